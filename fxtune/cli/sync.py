"""`fxtune sync RUN`: send W&B the rows of a run that it does not have yet.

The rows come from the run's metrics.jsonl. Rows that W&B has are left out, so the command can be repeated, and a run
that was partly online becomes complete, with each step once.
"""

from __future__ import annotations

from filelock import Timeout

from fxtune.cli.run_output import run_folder
from fxtune.errors import ConfigError, StorageError
from fxtune.system.console import say
from fxtune.tracking import tracker


def run(run: str) -> None:
    """Upload the missing rows. Raises ConfigError without a run, an API key or wandb,
    StorageError if the upload fails."""
    from importlib.util import find_spec

    if find_spec("wandb") is None:
        raise ConfigError("wandb is not installed: pip install wandb")
    try:
        tracker.upload(run_folder(run), say)
    except Timeout as error:
        raise StorageError(
            f"{run} is in use by a run that still trains and sends its metrics itself: wait until it has ended."
        ) from error
    except OSError as error:
        raise StorageError(f"{run} cannot be read: {error}. Change its permissions.") from error
    say(f"W&B has all of {run}")
