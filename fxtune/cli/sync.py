"""`fxtune sync RUN`: sends a run's metrics to its trackers.

The rows come from the run's metrics.jsonl. Rows that a tracker already has are left out, so the command can be
repeated. A run that was partly offline becomes complete, with each step once.
"""

from __future__ import annotations

from filelock import Timeout

from fxtune.errors import StorageError, not_written
from fxtune.outputs.run_output import run_folder
from fxtune.system.terminal.console import say
from fxtune.tracking import tracker


def run(run: str) -> None:
    """Upload the missing rows. Raises ConfigError if the run or an API key is missing, StorageError if the upload
    fails."""
    try:
        titles = tracker.upload(run_folder(run), say)
    except Timeout as error:
        raise StorageError(
            f"{run} is in use by a run that still trains and sends its metrics itself: wait until it has ended."
        ) from error
    except OSError as error:  # of the lock
        what = f"{run}, where fxtune locks the run and trackers write, cannot be used"
        raise not_written(what, error, "or sync a copy of it on another disk") from error
    say(f"{' and '.join(titles)} {'has' if len(titles) == 1 else 'have'} all of {run}")
