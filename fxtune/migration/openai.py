"""Reads a fine-tuning job of OpenAI's API, as JSON (platform.openai.com/docs/api-reference/fine-tuning)."""

from __future__ import annotations

from typing import Any

from fxtune.migration.account import Account, Tool


def decide(account: Account) -> None:
    account.refuse("this model is not published. Name the model to train: --model ID", "model_name_or_path")
    for target, name in (("data.sources", "dataset"), ("data.eval_sources", "validation_file")):
        if account.has(name):
            account.set(target, [{"path": account.get(name)}], name)
    method = account.get("method", {"type": "supervised"})
    kind = method.get("type", "supervised")
    options: dict[str, Any] = {**account.get("hyperparameters", {}), **method.get(kind, {}).get("hyperparameters", {})}
    given = {name: value for name, value in options.items() if value != "auto"}
    account.set("techniques", ["lora", "fast"])
    account.set("train.epochs", given.pop("n_epochs", 3), "method")
    account.set("train.global_batch_size", given.pop("batch_size", 8), "method")
    account.differ("batch_size counts examples, and a row of a step has as many as fit (data.packing)")
    account.set("optimizer.lr", "auto")
    if kind == "dpo":
        account.set("objective", "dpo", "method")
        account.set("objective.beta", given.pop("beta", 0.1), "method")
    if given.pop("learning_rate_multiplier", None) is not None:
        account.differ("learning_rate_multiplier: their rate is not published; optimizer.lr=auto is the model's")
    if given or kind not in ("supervised", "dpo"):
        account.refuse(f"{', '.join(given) or kind}: fxtune trains supervised and dpo, by epochs and batch", "method")


TOOL = Tool("openai", decide)
