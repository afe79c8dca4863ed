"""`fxtune preview`: prints the first samples as the model will see them, after template, split and packing, and what a
step will need and take by arithmetic, on each of several GPUs if there are some.

The page is read back from the first batches of the training run. It shows the mistakes by which most runs learn
nothing or the wrong thing: an answer that is not supervised, a missing end-of-turn token, a template that is applied
twice, rows that are mostly padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from rich.console import Console

from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.diagnostics.preview import preview


def run(config: Config, console: Optional[Console] = None, html: Optional[Path] = None) -> dict[str, Any]:
    """Print and return samples and statistics. Raises as preview()."""
    found = preview(config, console, html)
    ANSWER.put(found)
    return found
