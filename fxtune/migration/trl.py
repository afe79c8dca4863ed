"""Reads a config of TRL's command line (`trl sft --config FILE`): the fields of SFTConfig, DPOConfig, ModelConfig."""

from __future__ import annotations

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import OFF, Account, Tool, listed


def decide(account: Account) -> None:
    if not account.has("learning_rate"):
        account.set("optimizer.lr", {"sft": 2e-5, "reward": 1e-4}.get(account.method, 1e-6))
    if account.method != "sft":
        account.set("objective", account.method)
    loss = " ".join(map(str, listed(account.get("loss_type", []))))
    if loss in ("", {"sft": "nll", "kto": "kto"}.get(account.method, "sigmoid")):
        account.note("the objective's own", "loss_type")
    elif account.method != "dpo":
        account.refuse("fxtune has no such loss here. Is this a config of DPO? Give --method dpo", "loss_type")
    else:
        account.set("objective" if loss == "ipo" else "objective.loss_type", loss, "loss_type")
    shared.trainer(account, "lora" if account.get("use_peft") else "full")
    parts = {"path": "dataset", "subset": "dataset_config", "split": "dataset_train_split"}
    source = {part: account.get(key) for part, key in parts.items() if account.has(key)}
    if (column := account.get("dataset_text_field", "text")) != "text":
        source["columns"] = {column: "text"}
    account.set("data.sources", [source] * account.has("dataset"), *parts.values(), "dataset_text_field")
    if account.get("eval_strategy", "no") not in OFF:
        account.set("data.eval_sources", [source | {"split": account.get("dataset_test_split")}], "dataset_test_split")
    account.set("data.on_long", "drop" if account.method == "sft" else "truncate")
    if account.method == "sft":
        account.differ("documents longer than max_length are left out, where TRL cuts them (data.on_long)")
        if not account.get("assistant_only_loss") and account.get("completion_only_loss") is not True:
            account.differ("chats teach the assistant's turns alone; TRL learns all tokens (data.learn.roles)")


TOOL = Tool("trl", decide, shared.RULES)
