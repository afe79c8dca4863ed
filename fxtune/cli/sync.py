"""`fxtune sync RUN_FOLDER`: send W&B what it does not have of a run, whatever kept it from getting there.

The rows come from the run's metrics.jsonl. Those that W&B has are left out, so it may be given again, and a run that was
online in part becomes whole without a step twice.
"""

from __future__ import annotations

from pathlib import Path

from filelock import Timeout

from fxtune.errors import ConfigError, StorageError
from fxtune.system.console import say
from fxtune.tracking import tracker


def run(folder: str) -> None:
    """Raises ConfigError: no run there, no API key, no wandb; StorageError: W&B cannot be reached or does not take it."""
    from importlib.util import find_spec

    if find_spec("wandb") is None:
        raise ConfigError("wandb is not installed: pip install wandb")
    try:
        tracker.upload(Path(folder), say)
    except Timeout as error:
        raise StorageError(f"{folder} is in use by a run that is alive. It sends its figures itself: wait.") from error
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error}. Mend its permissions.") from error
    say(f"W&B has all of {folder}")
