"""`fxtune refresh`: tests whether a run's model is worse on new rows. If it is, the model is trained further, and
replaced if the new model is better. The command suits cron and CI.

    fxtune refresh quickstart 'data.sources=[{path: new.jsonl}]'            # a run's name, or its folder
    fxtune refresh runs/quickstart 'data.sources=[{path: new.jsonl}]' refresh.alpha=0.001 optimizer.lr=1e-3
    fxtune refresh quickstart 'data.sources=[{path: new.jsonl}]' --force    # train although there is no drift

The link runs/quickstart.refresh/current leads to the run that serves. Its model is current/adapter, or current/model
if the run trained the whole model. The link is replaced atomically, and each refresh starts from the run that serves.
lineage.json in the same folder keeps all figures and decisions. The first run is never changed.

Exit codes: 0 promoted, 10 no drift, 11 rejected (the new model is not better, and nothing is replaced), 12 replaced
(an earlier refresh with these rows was promoted, but another model serves now). The other exit codes are the same for
all commands. After a kill at any moment the same command goes on.
"""

from __future__ import annotations

from fxtune.cli.answer import ANSWER
from fxtune.errors import Ended
from fxtune.outputs.refresh import NO_DRIFT, PROMOTED, REJECTED, REPLACED, refresh

EXIT_CODES = {PROMOTED: 0, NO_DRIFT: 10, REJECTED: 11, REPLACED: 12}


def run(run: str, *overrides: str, force: bool = False, trust_remote_code: bool = False) -> None:
    """Refresh `run` with `overrides`, and raise Ended with the decision's exit code, or the errors of refresh()."""
    entry = refresh(run, overrides, force, trust_remote_code)
    ANSWER.put(entry)
    raise Ended(EXIT_CODES[entry["decision"]])
