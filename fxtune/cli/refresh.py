"""`fxtune refresh`: one command for cron or CI. Is a run's model worse on new rows? If so it is trained further, and
replaced if the result is better.

    fxtune refresh quickstart 'data.sources=[{path: new.jsonl}]'            # a run's name, or its folder
    fxtune refresh runs/quickstart 'data.sources=[{path: new.jsonl}]' refresh.alpha=0.001 optimizer.lr=1e-3
    fxtune refresh quickstart 'data.sources=[{path: new.jsonl}]' --force    # train although there is no drift

The model that serves is always runs/quickstart.refresh/current/adapter, or current/model where the run trained the
whole model: `current` is a link to a run, replaced atomically. Each refresh starts from the run that `current` links
to, and lineage.json beside it keeps all figures and decisions. The first run is never changed.

Exit codes: 0 promoted, 10 no drift, 11 rejected (the new model is not better, and nothing is replaced), 12 replaced
(the model that these rows gave was promoted, and another one serves now); others as for every command. After a kill at
any moment the same command goes on.
"""

from __future__ import annotations

from fxtune.cli.answer import ANSWER
from fxtune.errors import Ended
from fxtune.outputs.refresh import NO_DRIFT, PROMOTED, REJECTED, REPLACED, refresh

EXIT_CODES = {PROMOTED: 0, NO_DRIFT: 10, REJECTED: 11, REPLACED: 12}


def run(run: str, *overrides: str, force: bool = False, trust_remote_code: bool = False) -> None:
    """Refresh `run` with `overrides`, and raise Ended with the exit code of the decision. Raises as refresh()."""
    entry = refresh(run, overrides, force, trust_remote_code)
    ANSWER.put(entry)
    raise Ended(EXIT_CODES[entry["decision"]])
