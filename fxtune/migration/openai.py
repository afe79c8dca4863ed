"""Reads a fine-tuning job of OpenAI's API, as JSON (platform.openai.com/docs/api-reference/fine-tuning)."""

from __future__ import annotations

from typing import Any

from fxtune.migration.account import Account, Tool


def decide(account: Account) -> None:
    account.refuse("this model is not published. Name the model to train: --model ID", "model_name_or_path")
    for target, name in (("data.sources", "dataset"), ("data.eval_sources", "validation_file")):
        if str(account.get(name)).startswith("file-") and "." not in account.get(name):
            account.refuse("the id of an upload is no path. Download the file, and give --data FILE", name)
        elif account.has(name):
            account.set(target, [{"path": account.get(name)}], name)
    method = account.get("method", {"type": "supervised"})
    kind = method.get("type", "supervised")
    options: dict[str, Any] = {**account.get("hyperparameters", {}), **method.get(kind, {}).get("hyperparameters", {})}
    given = {name: value for name, value in options.items() if value != "auto" and name != "learning_rate_multiplier"}
    account.set("techniques", ["lora", "fast"])
    account.set("train.epochs", given.pop("n_epochs", 3), "method")
    size, rate, noun = given.pop("batch_size", 8), "auto", "examples, and a packed row holds as many as fit"
    if not str(size).isdecimal():
        account.refuse(f"batch_size={size} is no whole number", "method")
    batch = int(size) if str(size).isdecimal() else 8
    if kind == "dpo":
        account.set("objective", "dpo", "method")
        account.set("objective.beta", given.pop("beta", 0.1), "method")
        account.set("data.packing", False)  # each answer of a pair has a row
        account.set("train.micro_batch_size", 2)
        batch, rate, noun = 2 * batch, account.objective.kind.needs.pair_rate, "pairs of 2 rows each"
    account.set("train.global_batch_size", batch, "method")
    account.set("optimizer.lr", rate)
    account.differ(f"batch_size counts {noun}")
    account.differ(f"OpenAI publishes no learning rate: optimizer.lr={rate}, without learning_rate_multiplier")
    if given or kind not in ("supervised", "dpo"):
        account.refuse(f"{', '.join(given) or kind}: fxtune trains supervised and dpo, by epochs and batch", "method")


TOOL = Tool("openai", decide)
