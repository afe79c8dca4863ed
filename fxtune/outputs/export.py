"""Exports what a run has trained: the one way of `fxtune merge`, `fxtune push` and `fxtune export`.

outputs/targets has a file for each target. A target first says what it cannot serve, before weights are read; then it
writes its files and names the command that serves them. prove() asks the server itself (targets/served.py) and writes
the figures to exports.json of the run, for the report, and into the model card. result.json stays as training left it.
"""

from __future__ import annotations

from pathlib import Path

from fxtune.checkpoint.folder import step_of
from fxtune.distributed.files import write_json
from fxtune.errors import ConfigError, HardwareError, did_you_mean
from fxtune.outputs.checkpoint_model import run_of
from fxtune.outputs.merge import find, merge
from fxtune.outputs.run_output import ADAPTER_FILE, OutputKind
from fxtune.outputs.targets.gguf import CONVERTED, GgufTarget
from fxtune.outputs.targets.ollama import OllamaTarget
from fxtune.outputs.targets.served import Plain, Unproven, compare, problems
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions, Target
from fxtune.outputs.targets.vllm import VllmTarget
from fxtune.reports.exports import COLUMNS, EXPORTS, export_rows, read_exports
from fxtune.training.rollouts.client import ServerError

TARGETS: dict[str, type[Target]] = {"vllm": VllmTarget, "gguf": GgufTarget, "ollama": OllamaTarget}
READS = {"model": {"unmerged", "card"}, **{name: target.reads for name, target in TARGETS.items()}}
"""{target: the options that it reads}. `model`: a folder for transformers and peft."""
EXACT = {*CONVERTED, "adapter", "merged model"}
"""Types of files whose weights have at least 16 bits."""
SERVED = "## Served"


def export(
    name: str,
    to: str = "model",
    folder: Path | str | None = None,
    options: ExportOptions | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the adapter or the model `name` (a run, a checkpoint, a folder, or the hub id of an adapter) for the
    target `to` into a new folder. Without `folder` it lies in the run.

    Raises ConfigError if the target cannot serve it, StorageError if files cannot be read or written.
    """
    options = options or ExportOptions()
    if to not in READS:
        raise ConfigError(f"--to {to}: there is no such target (known: {', '.join(READS)}){did_you_mean(to, READS)}")
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
    target.check()
    done = target.write()
    done.notes = target.notes
    prove(source, target, done)
    if source.run is not None:
        proofs = {f"{to}/{file}": figures for file, figures in done.proofs.items()}
        write_json(source.run / EXPORTS, read_exports(source.run) | proofs)
    if source.run is not None or to != "vllm":  # vLLM serves others' folders where they are
        _add_to_card(done)
    return done


def prove(source: Source, target: Target, done: Exported) -> None:
    """Set the proofs and the problems of `done`. Raises HardwareError if the server fails."""
    plain = None
    for kind, file in done.files.items():
        try:
            if not source.questions:
                raise Unproven("there are no questions: it belongs to no run, or the model reads images")
            with target.serving(file) as server:
                plain = plain or Plain.of(source)
                done.proofs[file.name] = figures = compare(source, plain, server)
                done.problems += [f"{file.name}: {why}" for why in problems(figures, kind in EXACT)]
        except Unproven as reason:
            done.proofs[file.name] = {"not_proven": str(reason)}
        except ServerError as error:
            raise HardwareError(f"{file}: the server failed while it was asked: {error}. The files stay.") from error


def _add_to_card(done: Exported) -> None:
    """Write what was proven into the model card, in place of an earlier section."""
    card = done.folder / "README.md"
    if card.exists() and all("not_proven" in found for found in done.proofs.values()):
        return
    before = card.read_text(encoding="utf-8") if card.exists() else f"# {done.folder.name}\n\nExported with fxtune.\n"
    rows = [COLUMNS, ["---"] * len(COLUMNS), *export_rows(done.proofs)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    # Other machines have other folders.
    command = "" if card.exists() else f"`{done.command.replace(f'{done.folder}/', '')}`\n\n"
    section = f"{SERVED}\n\n{command}The server's answers beside plain transformers:\n\n{table}\n"
    kept, _, after = before.partition(SERVED)
    after = after[at:] if (at := after.find("\n## ")) >= 0 else ""
    card.write_text(f"{kept.rstrip()}\n\n{section}{after}", encoding="utf-8")
