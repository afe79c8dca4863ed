"""`fxtune finish RUN`: end a run before its last step, with a finished model.

    fxtune finish quickstart              # a run's name (the newest of runs/quickstart, runs/quickstart-2, ...)
    fxtune finish runs/quickstart-2       # a run's folder

With schedule.name=wsd the run takes its best weights so far, and the learning rate decays before the run ends. With
other schedules the run ends at once. It ends as always: it evaluates, exports and answers its questions. If the run is
alive, this command asks it to end and returns at once. If the run was stopped, this command continues the run to its
end, on the ranks of the recipe or on the ranks that torchrun or srun has started.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.run_folder import CHECKPOINTS, RESULT, require_own_files
from fxtune.cli.answer import ANSWER
from fxtune.config import compose
from fxtune.config.root import Config, Resume
from fxtune.distributed import choice
from fxtune.distributed.launch import launch
from fxtune.distributed.ranks import LAUNCHER, process_rank
from fxtune.errors import ConfigError, Ended, writing
from fxtune.outputs.run_output import run_folder
from fxtune.settle.ranks import ranks_of
from fxtune.system.terminal.console import say
from fxtune.training.run.end import FINISH

DONE = "done"
"""_prepare() returns this for a run that needs no training by this command."""


def run(run: str, *, trust_remote_code: bool = False) -> None:
    """End the run `run`. Raises ConfigError if the run does not exist or has no checkpoint to continue from,
    StorageError if its folder cannot be written, and for a stopped run the errors of training."""
    folder = run_folder(run)
    config = compose.of_run(folder, trust_remote_code)
    config.run.dir, config.run.resume = str(folder), Resume.must
    # A rank that this command has started does not call _prepare() again.
    ranks = "1" if LAUNCHER in os.environ else choice.of_rank_0(lambda: _prepare(folder, config))
    if ranks == DONE:
        return
    if process_rank().size == 1 and int(ranks) > 1:
        flags = ["--trust-remote-code"] * trust_remote_code
        raise Ended(launch(int(ranks), ["finish", str(folder), *flags, *ANSWER.words]))
    from fxtune.cli import train

    train.run(config)


def _prepare(folder: Path, config: Config) -> str:
    """Ask the run in `folder` to end. Returns the number of ranks that must continue it, or DONE if none must."""
    if (folder / RESULT).exists():
        say(f"{folder} is finished already: there is nothing to do.")
        return DONE
    with writing(f"{folder} cannot be written"):
        require_own_files(folder)
        alive = _is_alive(folder / ".lock")
        if not alive and not stored.paths(folder / CHECKPOINTS):
            raise ConfigError(f"{folder} has no checkpoint yet, so there is nothing to finish. Give its command.")
        ranks = 1 if alive else ranks_of(config)  # an error here must come before the file is written
        (folder / FINISH).touch()
    if alive:
        say(f"{folder} is running and will end: its next line of figures says when.")
    return DONE if alive else str(ranks)


def _is_alive(lock: Path) -> bool:
    """Whether a process holds the lock of a run."""
    own = FileLock(lock)
    try:
        own.acquire(timeout=0)
    except Timeout:
        return True
    own.release()
    return False
