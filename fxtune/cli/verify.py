"""`fxtune verify`: checks that every technique of the recipe acts, and that the loss is right.

    fxtune verify +recipe=quickstart           # build the model as training does, observe it, take one step
    fxtune verify +recipe=quickstart --loss    # also compare loss and gradients with plain transformers
    fxtune verify +recipe=quickstart --each    # as --loss, and again with each technique off in turn
    fxtune verify +recipe=rl_quickstart --canary    # do sampled answers grow longer if that is the reward?
    fxtune verify quickstart                   # are a run's adapter, model and merged model still what was proven?

The first rows are the evidence that training itself requires before its first step. The other rows need data or a
backward pass: which tokens are supervised, which weights are trained, whether the documents of a real row are
isolated, what a step costs. Everything that a run builds before its first step is built, and nothing is written. Exit
code 1 means that a technique did not act, or that a file has changed since it was proven.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fxtune.checkpoint import folder as stored
from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.diagnostics.verification import verify
from fxtune.errors import CheckError
from fxtune.models.proof import PROOF, changed_since
from fxtune.outputs.run_output import ADAPTER_FILE, find_folder, find_output, is_checkpoint, unknown
from fxtune.system.terminal.console import say


def run(config: Config, loss: bool = False, each: bool = False, canary: bool = False) -> dict[str, Any]:
    """Print and return what was observed. Raises CheckError if something did not act, and the errors of training."""
    seen = verify(config, loss, each, canary)
    found = {
        "acted": not seen.failed,
        "decided": seen.decided,
        "techniques": seen.techniques,
        "evidence": [asdict(row) for row in seen.evidence],
        "loss": [asdict(variant) for variant in seen.compared],
    }
    ANSWER.put(found)
    seen.require_acted()
    return found


def saved(run: str) -> None:
    """Check that saved files have not changed. The exports of a run, or the folder of an adapter or a model, are
    compared with the proof.json in the folder. A checkpoint is compared with the digests from when it was written.

    Needs no base and no GPU. Raises CheckError for a file that has changed, StorageError for a folder without proof.
    """
    folder = find_folder(run)
    if folder is None:
        raise unknown(run)
    if is_checkpoint(folder):
        if damage := stored.damage_of(folder):
            raise CheckError(f"{folder}: {damage.reason}. Use another checkpoint of the run.")
        say(f"{folder}: as it was written.")
        return
    exported = [path.parent for name in (ADAPTER_FILE, "config.json") for path in folder.glob(f"*/{name}")]
    proven = [path.parent for path in folder.glob(f"*/{PROOF}")]
    folders = sorted({*exported, *proven}) or [find_output(run).folder]
    changed = []
    for folder in folders:
        proof, lines = changed_since(folder)
        changed += [f"  {folder / line}" for line in lines]
        if not lines:
            say(f"{folder}: as it was proven. {proof.sentence()}")
    if changed:
        raise CheckError(
            f"{len(changed)} files differ from the proven files:\n" + "\n".join(changed) + "\nExport them again "
            "(fxtune merge RUN/step-N), or use another copy."
        )
