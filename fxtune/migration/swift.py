"""Reads a config of ms-swift (YAML, or args.json of a run). Its keys are documented at swift.readthedocs.io."""

from __future__ import annotations

from typing import Any

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import Account, Tool


def decide(account: Account) -> None:
    kind = account.get("tuner_type") or account.get("train_type", "lora")
    if not account.has("learning_rate"):
        account.set("optimizer.lr", 1e-4 if kind == "lora" else 1e-5)
    if account.has("rlhf_type"):
        account.set("objective", account.word("rlhf_type"), "rlhf_type")
    shared.trainer(account, kind)
    if not account.has("max_length"):
        account.differ("max_length is not set: ms-swift takes rows of the model's length, fxtune data.sequence_length")
    account.set("data.on_long", "truncate" if account.has("rlhf_type") else "drop")
    shared.rows(account, "data.sources", "dataset", _source)
    shared.rows(account, "data.eval_sources", "val_dataset", _source)


def _source(account: Account, key: str, name: Any) -> dict[str, Any]:
    """An entry of data.sources. `name`: `org/data:subset#500`, where subset and number of rows are optional, or a
    file."""
    path, _, limit = str(name).partition("#")
    path, _, subset = path.partition(":") if "://" not in path else (path, "", "")
    source: dict[str, Any] = {"path": path}
    return source | ({"subset": subset} if subset else {}) | ({"limit": int(limit)} if limit else {})


TOOL = Tool("swift", decide, shared.RULES)
