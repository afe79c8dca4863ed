"""`fxtune report RUN...`: a page about a run, or about several runs side by side. The page needs no network.

    fxtune report quickstart                          # runs/quickstart/report.html, as a run writes it at its end
    fxtune report quickstart quickstart-2 quickstart-3                      # runs/report.html
    fxtune report runs/* --output all.html

RUN is a run's name or folder; the run may still train. A folder of runs, such as `fxtune -m` makes, stands for all its
runs. The page has the curves, the time by part and the keys that would save some of it (as in `fxtune why`), the
options that were asked for and whether they acted, the data, the answers, and the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fxtune.checkpoint.run_folder import REPORT, holds_run
from fxtune.cli.answer import ANSWER
from fxtune.outputs.run_output import run_folder
from fxtune.reports.page import write_report
from fxtune.system.terminal.console import say


def run(run: str, *more: str, output: Optional[Path] = None) -> None:
    """Write the page. Raises ConfigError if a name means no run, StorageError if a file cannot be read or written."""
    names = [name for name in (run, *more) if not Path(name).is_file()]  # `runs/*` also matches an earlier page
    folders = list(dict.fromkeys(folder for name in names or [run] for folder in runs_of(run_folder(name))))
    file = output or (folders[0] if len(folders) == 1 else folders[0].parent) / REPORT
    write_report(folders, file)
    ANSWER.put({"report": str(file)})
    say(f"The report is in {file}")


def runs_of(folder: Path) -> list[Path]:
    """The folder of a run, or the folders of the runs in it."""
    if holds_run(folder):
        return [folder]
    return sorted(inner for inner in folder.iterdir() if holds_run(inner)) or [folder]
