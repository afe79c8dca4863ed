"""`fxtune preview`: prints the first samples as the model will see them, after template, split and packing. It also
prints a forecast of the memory and time of a step, on each GPU if there are several.

The samples are read back from the first batches of the training run. They show the mistakes by which most runs learn
nothing or the wrong thing: an answer that is not supervised, a missing end-of-turn token, a template that is applied
twice, rows that are mostly padding.

    fxtune preview +recipe=quickstart
    fxtune preview rl_quickstart        # the newest stored answers of a run, with rewards
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from rich.console import Console

from fxtune.cli.answer import ANSWER
from fxtune.config import compose
from fxtune.config.root import Config
from fxtune.diagnostics.preview import preview, preview_rollouts
from fxtune.outputs.run_output import run_folder


def run(config: Config, console: Optional[Console] = None, html: Optional[Path] = None) -> dict[str, Any]:
    """Print and return samples and statistics. Raises the errors of diagnostics' preview()."""
    found = preview(config, console, html)
    ANSWER.put(found)
    return found


def of_run(run: str) -> None:
    """Print the newest stored answers of a run. Raises the errors of preview_rollouts()."""
    folder = run_folder(run)
    ANSWER.put(preview_rollouts(compose.of_run(folder), folder))
