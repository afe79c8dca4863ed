"""Reads a config of LLaMA-Factory (YAML). Its keys are in src/llamafactory/hparams of LLaMA-Factory's repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import Account, Tool, listed, pairs

COLUMNS = pairs("system tools images chosen rejected kto_tag=label messages")
"""{column in dataset_info.json: fxtune's name for this column}."""
ALPACA = pairs("prompt=instruction query=input response=output history") | COLUMNS


def decide(account: Account) -> None:
    stage = account.get("stage", "sft")
    if stage == "dpo":
        account.set("objective", account.word("pref_loss", "sigmoid"), "stage", "pref_loss")
        if account.get("pref_loss") == "hinge":
            account.set("objective.loss_type", "hinge", "pref_loss")
    elif stage not in ("sft", "pt"):
        account.set("objective", account.word("stage"), "stage")
    packing = account.get("neat_packing") or (account.get("packing") if account.has("packing") else stage == "pt")
    # LLaMA-Factory reads the keys of packing in these stages alone.
    account.set("data.packing", packing and stage in ("sft", "pt"), "packing", "neat_packing")
    shared.trainer(account, account.get("finetuning_type", "lora"))
    shared.rows(account, "data.sources", "dataset", _source)
    shared.rows(account, "data.eval_sources", "eval_dataset", _source)
    if account.has("interleave_probs"):
        sources, shares = account.recipe.get("data.sources", []), listed(account.get("interleave_probs"))
        for entry, share in zip(sources, shares, strict=False):
            entry["weight"] = float(share)
        account.differ("shares of rows; weights of sources are shares of supervised tokens", "interleave_probs")
    account.set("data.on_long", {"pt": "split", "sft": "drop"}.get(stage, "truncate"))
    if stage == "sft":
        account.differ("documents longer than cutoff_len are left out, where LLaMA-Factory cuts them (data.on_long)")


def _source(account: Account, key: str, name: str) -> dict[str, Any]:
    """The entry `name` of dataset_info.json as an entry of data.sources. Raises ValueError if it cannot be read."""
    place = Path(str(account.get("dataset_dir", "data"))) / "dataset_info.json"
    places = [above / place for above in (Path(), account.file.parent, *account.file.resolve().parents)]
    places.append(account.file.parent / place.name)
    file = next((file for file in places if file.is_file()), None)
    if file is None:
        raise ValueError(f"{name}: no {place} here, beside or above {account.file}. Copy it, or give --data FILE")
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))[name]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is no JSON, or has no {name}: {error}") from error
    path = entry.get("hf_hub_url") or entry.get("script_url")
    source = {"path": str(file.parent / entry["file_name"]) if "file_name" in entry else path}
    limit = account.get("max_samples") or entry.get("num_samples")
    parts = {"split": entry.get("split"), "subset": entry.get("subset"), "limit": limit}
    source |= {part: value for part, value in parts.items() if value}
    chats = entry.get("formatting") in ("sharegpt", "openai")
    own = {name: column for name, column in entry.get("columns", {}).items() if name in (COLUMNS if chats else ALPACA)}
    plain = not chats and not entry.get("ranking") and "response" not in own
    renames = {column: "text" if plain and name == "prompt" else ALPACA[name] for name, column in own.items()}
    renames = {old: new for old, new in renames.items() if old != new and (old, new) != ("conversations", "messages")}
    return source | ({"columns": renames} if renames else {})


TOOL = Tool("llamafactory", decide, shared.RULES)
