"""Reads a fine-tuning job of OpenAI's API, as JSON. Its keys: platform.openai.com/docs/api-reference/fine-tuning."""

from __future__ import annotations

from typing import Any

from fxtune.migration.account import Account, Rule, each, number, to, without

METHODS = {"supervised": None, "dpo": "dpo"}

RULES: dict[str, Rule] = {
    "suffix": to("run.name", str),
    "seed": to("run.seed", int),
    **each("metadata integrations object id created_at", without("it says nothing about the training")),
    "hyperparameters": without("see method"),
}


def read(account: Account) -> None:
    account.refuse("this model is not published. Name the model to train: --model ID", "model")
    account.set("data.sources", [{"path": account.get("training_file")}], "training_file")
    if account.has("validation_file"):
        account.set("data.eval_sources", [{"path": account.get("validation_file")}], "validation_file")
    method = account.get("method", {"type": "supervised"})
    kind = method.get("type", "supervised")
    options: dict[str, Any] = {**account.get("hyperparameters", {}), **method.get(kind, {}).get("hyperparameters", {})}
    account.recipe["techniques"] = ["lora", "fast"]
    if kind not in METHODS:
        account.refuse(f"{kind}: fxtune trains supervised and dpo", "method")
    elif METHODS[kind]:
        account.set("objective", METHODS[kind], "method")
    else:
        account.note("supervised", "method")
    given = {name: value for name, value in options.items() if value != "auto"}
    account.recipe["train.epochs"] = number(given.pop("n_epochs", 3))
    account.recipe["train.global_batch_size"] = int(given.pop("batch_size", 8))
    account.recipe["optimizer.lr"] = "auto"
    if "beta" in given and kind == "dpo":
        account.recipe["objective.beta"] = number(given.pop("beta"))
    if given.pop("learning_rate_multiplier", None) is not None:
        account.differ(
            "learning_rate_multiplier: their base rate is not published; optimizer.lr=auto follows from the model"
        )
    if given:
        account.refuse(f"hyperparameters: {', '.join(given)} not translated", "method")
    account.follow(RULES)
