"""Exports trained weights, for `fxtune merge`, `fxtune push` and `fxtune export`.

outputs/targets has a file for each target. A target first refuses what it cannot serve, before weights are read. Then
it writes its files and names the command that serves them. prove() compares the server's answers with plain
transformers (targets/served.py). The figures go to the model card and, for a finished run, to result.json, which the
report reads.
"""

from __future__ import annotations

from pathlib import Path

from fxtune.checkpoint.folder import step_of
from fxtune.checkpoint.run_folder import RESULT
from fxtune.distributed.files import as_json
from fxtune.errors import ConfigError, HardwareError, did_you_mean, not_written
from fxtune.outputs.checkpoint_model import run_of
from fxtune.outputs.merge import find, merge
from fxtune.outputs.run_output import ADAPTER_FILE, OutputKind
from fxtune.outputs.targets.gguf import CONVERTED, GgufTarget
from fxtune.outputs.targets.ollama import OllamaTarget
from fxtune.outputs.targets.served import Plain, Unproven, compare, problems
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions, Target
from fxtune.outputs.targets.vllm import VllmTarget
from fxtune.reports.exports import COLUMNS, EXPORTS, export_rows
from fxtune.reports.run_files import RunFiles
from fxtune.system.files.atomic_files import replace_text
from fxtune.training.rollouts.client import ServerError

TARGETS: dict[str, type[Target]] = {"vllm": VllmTarget, "gguf": GgufTarget, "ollama": OllamaTarget}
READS = {"model": {"unmerged", "card"}, **{name: target.reads for name, target in TARGETS.items()}}
"""{target: the options that it reads}. `model`: a folder for transformers and peft."""
EXACT = {*CONVERTED, "adapter", "merged model"}
"""Types of files whose weights have at least 16 bits."""
SERVED = "## Served"
"""The last section of a model card."""


def export(
    name: str,
    to: str = "model",
    folder: Path | str | None = None,
    options: ExportOptions | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Export the adapter or model `name` (a run, a checkpoint, a folder, or the hub id of an adapter) to the target
    `to`. `folder`: a new folder for the files; None: a folder in the run.

    Raises ConfigError if the target cannot serve the model, StorageError if files cannot be read or written.
    """
    options = options or ExportOptions()
    if to not in READS:
        merged = f" `fxtune merge {name}` writes the merged model." * to.startswith("merge")
        raise ConfigError(f"--to {to}: there is no such target{did_you_mean(to, READS)}{merged}")
    if unread := options.given() - READS[to]:
        takers = [f"--to {other}" for other, read in READS.items() if min(unread) in read]
        option = f"--{min(unread).replace('_', '-')}"
        raise ConfigError(f"{option} has no meaning for --to {to}; it is for {' and '.join(takers)}. Leave it out.")
    if to == "model":
        place = merge(name, folder, trust_remote_code=trust_remote_code, unmerged=options.unmerged, card=options.card)
        return Exported(place, "adapter" if (place / ADAPTER_FILE).exists() else "merged model")
    if (found := find(name)) and found.kind is OutputKind.checkpoint:
        place = run_of(found.folder) / f"exported-step-{step_of(found.folder)}"
        name = str(place if place.exists() else merge(name, place, unmerged=True, trust_remote_code=trust_remote_code))
    source = Source(name, trust_remote_code)
    source.require_writes(to)
    target = TARGETS[to](source, options, Path(folder) if folder is not None else None)
    if source.run is not None:
        _ = RunFiles(source.run).result  # an unreadable file is an error before the export
    target.check()
    done = target.write()
    done.notes = target.notes
    prove(source, target, done)
    _record(source, to, done)
    return done


def prove(source: Source, target: Target, done: Exported) -> None:
    """Ask a server about each file, and set the proofs and problems of `done`."""
    plain = None
    for kind, file in done.files.items():
        try:
            if not source.questions:
                raise Unproven(source.unasked)
            serving = target.serving(file)
            plain = plain or Plain.of(source)  # before the server takes the memory
            with serving as server:
                done.proofs[file.name] = figures = compare(source, plain, server)
            done.problems += [f"{file.name}: {why}" for why in problems(figures, kind in EXACT)]
        except Unproven as reason:
            done.proofs[file.name] = {"not_proven": str(reason)}
        except (HardwareError, ServerError) as error:
            done.proofs[file.name] = {"not_proven": f"the server failed: {error}"}
            done.problems.append(f"{file.name}: the server failed")


def _record(source: Source, to: str, done: Exported) -> None:
    """Write the proofs to result.json of a finished run, and to the model card. Raises StorageError."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *export_rows(done.proofs)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    command = done.command.replace(f"{done.folder}/", "")  # other machines have other folders
    card = done.folder / "README.md"
    try:
        if source.run is not None and (result := RunFiles(source.run).result):
            proofs = {f"{to}/{file}": figures for file, figures in done.proofs.items()}
            replace_text(source.run / RESULT, as_json(result | {EXPORTS: result.get(EXPORTS, {}) | proofs}))
        if source.run is None and done.folder == (source.adapter or source).origin.folder:
            return  # the hub's cache, or a folder of another tool
        text = card.read_text("utf-8") if card.exists() else f"# {done.folder.name}\n\nExported with fxtune.\n"
        served = f"{SERVED}\n\n`{command}`\n\nThe server's answers beside plain transformers:\n\n{table}\n"
        replace_text(card, f"{text.partition(SERVED)[0].rstrip()}\n\n{served}")
    except OSError as error:
        raise not_written(f"The proof of {done.folder} cannot be written", error) from error
