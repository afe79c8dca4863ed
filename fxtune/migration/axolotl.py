"""Reads a config of Axolotl (YAML). Its keys are documented at docs.axolotl.ai/docs/config-reference."""

from __future__ import annotations

import re
from typing import Any

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import UNSET, Account, Entry, Fate, Tool, listed, pairs, within

CHATS = r"chat_template(\.default|\.argilla_chat)?|sharegpt.*|messages|chatml\..+|llama3\..+|zephyr\.nectar|alpaca.*"
"""Types of datasets whose rows are chats; with `rl`, pairs of chats."""
DEFAULTS = {"pretraining_dataset": {"type": "pretrain"}, "test_datasets": {"split": "test"}}  # of an entry of the key
TEXTS = ("completion", "pretrain")
PLACES = pairs("path split train_on_split=split name=subset revision data_files=path")
COLUMNS = pairs(
    "field_messages=messages field_chosen=chosen field_rejected=rejected field_tools=tools field=text "
    "field_system=system field_instruction=instruction field_input=input field_output=output field_prompt=prompt "
    "field_completion=completion field_label=label"
)
"""{key of a dataset that names a column: fxtune's name for this column}."""
ROLES = {"system": "system", "user": "user human", "assistant": "assistant gpt model", "tool": "tool"}
"""{role: the names of this role that fxtune reads}."""
USUAL = pairs("train_on_eos=turn|all train_on_eot=turn|all roles_to_train=assistant|gpt")
IGNORED = ("ds_type", "trust_remote_code", "conversation", "no_input_format")


def decide(account: Account) -> None:
    if account.get("reward_model"):
        account.set("objective", "reward", "reward_model")
    elif account.has("rl"):
        account.set("objective", account.get("rl"), "rl")
    shared.trainer(account, str(account.get("adapter")).removeprefix("q"))
    if isinstance(account.get("tokens"), dict):  # an older form of special_tokens
        account.differ("the tokens of the tokenizer's files stay", "tokens")
    shared.rows(account, "data.sources", "dataset", _source)
    shared.rows(account, "data.sources", "pretraining_dataset", _source)
    shared.rows(account, "data.eval_sources", "test_datasets", _source)
    texts = all(entry.get("type") in TEXTS for entry in account.get("dataset", []))
    template = str(account.get("chat_template_jinja", ".jinja"))
    if not template.endswith(".jinja"):
        account.refuse("write the template to a file NAME.jinja, and name the file here", "chat_template_jinja")
    if account.has("eta_min"):
        share = float(account.get("eta_min")) / float(account.get("learning_rate"))
        account.set("schedule.min_lr_ratio", share, "eta_min")
    long = account.word("excess_length_strategy", "split" if texts else "drop")
    account.set("data.on_long", long, "excess_length_strategy")
    if account.has("wandb_project") and account.get("wandb_mode") != "disabled":
        account.set("tracking.wandb.mode", "online")


def _source(account: Account, key: str, entry: Any) -> dict[str, Any]:
    """`entry` of the config's `key` as an entry of data.sources. Raises ValueError to refuse it."""
    left = DEFAULTS.get(key, {}) | (entry if isinstance(entry, dict) else {"path": entry})
    kind, files = left.pop("type", None), listed(left.pop("data_files", None) or [])
    left |= kind if isinstance(kind, dict) else {}
    if len(files) > 1:
        raise ValueError("give each of data_files as an entry with its own path")
    if files and "://" in str(files[0]):
        raise ValueError(f"download {files[0]}, and give it as `path`, or with --data FILE")
    if files:
        left |= {"path": None, "data_files": files[0]}
    given = [name for name in PLACES if left.get(name) not in UNSET]
    said = {name: (Fate.translated, f"{PLACES[name]}={left[name]}") for name in given}
    only = Fate.differs, "only the ends of answers are learned"
    said |= {name: only for name in USUAL if left.get(name) == "all"}
    left = {name: value for name, value in left.items() if value not in UNSET and name not in IGNORED}
    left = {name: value for name, value in left.items() if name not in USUAL or not within(value, USUAL[name])}
    source: dict[str, Any] = {"path": None, **{PLACES[name]: left.pop(name) for name in PLACES if name in left}}
    named = {name: left.pop(name) for name in COLUMNS if isinstance(left.get(name), str)}
    own = {"messages": "conversations"}  # fxtune reads this column without a new name
    moved = {name: old for name, old in named.items() if old not in (COLUMNS[name], own.get(COLUMNS[name]))}
    if columns := {old: COLUMNS[name] for name, old in moved.items()}:
        source["columns"] = columns
        said |= dict.fromkeys((*moved, "type"), (Fate.translated, f"columns={columns}"))
    mappings = left.pop("message_property_mappings", {})
    role = mappings.get("role", left.pop("message_field_role", "role"))
    text = mappings.get("content", left.pop("message_field_content", "content"))
    if role not in ("role", "from") or text not in ("content", "value"):
        raise ValueError(f"turns with {role} and {text}: rename them to role and content in the rows")
    if left.pop("chat_template", "tokenizer_default") != "tokenizer_default":
        said["chat_template"] = Fate.differs, "fxtune has one chat template for all datasets (data.chat_template)"
    if all(name in ROLES.get(role, "").split() for role, names in left.get("roles", {}).items() for name in names):
        left.pop("roles", None)
    if isinstance(kind, dict):
        prompt = str(left.pop("format", "{instruction}")).strip()
        if prompt not in ("{instruction}", "{instruction} {input}", "{instruction}\n{input}"):
            said["type"] = Fate.differs, f"rows become chats of the tokenizer's template, without {prompt[:60]!r}"
    elif kind in TEXTS:
        source["format"], said["type"] = "text", (Fate.translated, "format=text")
    elif kind is not None and "objective" not in account.recipe and not re.fullmatch(CHATS, str(kind)):
        raise ValueError(f"rows of type {kind}. Write chats: {{messages: [{{role, content}}]}}")
    elif str(kind).startswith(("alpaca", "chatml.", "llama3.", "zephyr.")):
        said["type"] = Fate.differs, "rows become chats of the tokenizer's template; Axolotl uses the type's own"
    if left:
        raise ValueError(f"not translated of {source['path']}: {', '.join(left)}")
    top, number = account.own(key), listed(account.get(key)).index(entry)
    for name, value in entry.items() if isinstance(entry, dict) and not account.data else ():
        fate, text = said.get(name, (Fate.no_effect, "fxtune does the same, or decides it itself"))
        account.entries[f"{top}.{number}.{name}"] = Entry(f"{top}.{number}.{name}", value, fate, text)
        if fate is Fate.differs:
            account.differ(f"{top}: {name}={str(value)[:40]}: {text}")
    return source


TOOL = Tool("axolotl", decide, shared.RULES)
