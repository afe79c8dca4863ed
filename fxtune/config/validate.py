"""Reads recipes as what they are, data from a stranger, and tells exactly where one is wrong.

Everything here happens before Hydra sees a value, because Hydra acts on some of what it reads (`hydra.callbacks` runs code)
and lets other things pass (a key added with `+`). A file is walked beside the dataclasses: each key must be a field, each
value must have the field's type, text may point at other keys and at nothing else. Nothing that is read is ever executed.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import BooleanNode, FloatNode, IntegerNode
from omegaconf.errors import OmegaConfBaseException

from fxtune.config.bounds import outside
from fxtune.config.discovery import did_you_mean, nearest
from fxtune.config.introspection import all_keys, choices, hints, stripped, under
from fxtune.config.yaml_reader import POINTER, Keys

TRUST = "trust_remote_code"
WRITTEN = ("run.dir", "data.cache_dir")
"""Keys that say where files are written."""

ELSEWHERE = {  # what other trainers call it
    "learning_rate": "optimizer.lr",
    "batch_size": "train.micro_batch_size",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "steps": "train.max_steps",
    "max_grad_value": "train.max_grad_norm",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "dataset": "data.sources",
    "datasets": "data.sources",
    "train_file": "data.sources",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "output_dir": "run.dir",
    "lora_r": "techniques.lora.r",
    "rank": "techniques.lora.r",
    "lora_alpha": "techniques.lora.alpha",
    "lora_dropout": "techniques.lora.dropout",
    "gradient_checkpointing": "techniques.checkpointing.enabled",
    "torch_compile": "techniques.compile.enabled",
    "lr_scheduler_type": "schedule.name",
    "save_steps": "checkpoint.every",
    "eval_steps": "train.eval_every",
    "logging_steps": "train.log_every",
    "report_to": "tracking.wandb.mode",
    "use_wandb": "tracking.wandb.mode",
    "wandb": "tracking.wandb",
    "lora": "techniques.lora",
}

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NODES: dict[Any, Callable[..., Any]] = {int: IntegerNode, float: FloatNode, bool: BooleanNode}


@dataclass
class Vetting:
    """Collects what is wrong, so that a user mends all of it at once."""

    schema: type
    """The root dataclass."""
    where: Callable[[Keys], str]
    stranger: bool = True
    """The values come from a file: somebody else may have written them."""
    problems: list[str] = field(default_factory=list)

    @property
    def sections(self) -> list[str]:
        """The keys at the top."""
        return list(hints(self.schema))

    def add(self, keys: Keys, text: str) -> None:
        self.problems.append(f"{self.where(keys)}: {text}")

    def key(self, keys: Keys) -> Any:
        """The type of the field that `keys` name, or None, with a problem noted, where there is none."""
        hint: Any = self.schema
        for depth, key in enumerate(keys):
            inner, _ = stripped(hint)
            if _underscored(key):
                self.add(keys, f"`{'.'.join(keys)}`: {_NO_CODE}")
                return None
            below = under(inner, key)
            if below is None:
                self.add(keys, self._unknown(keys[:depth], inner, key, keys[depth + 1 :]))
                return None
            hint = below
        return hint

    def value(self, hint: Any, value: Any, keys: Keys) -> None:
        """Note what is wrong with `value` at `keys`, whose field has the type `hint`."""
        name = ".".join(keys)
        inner, optional = stripped(hint)
        if isinstance(value, str) and "${" in value:
            self._pointer(value, keys)
            return
        if value == "???":
            return  # typed() names what is still missing, once everything is merged
        if value is None:
            if not optional and inner is not Any:
                self.add(keys, f"`{name}` cannot be null; it is {_wanted(inner)}")
        elif inner is Any:
            self._free(value, keys)
        elif dataclasses.is_dataclass(inner):
            self._section(inner, value, keys)
        elif typing.get_origin(inner) is list:
            if not isinstance(value, list):
                self.add(keys, f"`{name}` is a list: [{_shown(value)}], not {_shown(value)}")
                return
            for index, item in enumerate(value):
                self.value(typing.get_args(inner)[0], item, (*keys, str(index)))
        elif typing.get_origin(inner) is dict:
            self._section(inner, value, keys)
        else:
            self._leaf(inner, value, keys)

    def _section(self, inner: Any, value: Any, keys: Keys) -> None:
        if not isinstance(value, dict):
            self.add(keys, f"`{'.'.join(keys)}` has keys of its own: {_wanted(inner)}, and is not {_shown(value)}")
            return
        for key, item in value.items():
            below = (*keys, str(key))
            hint = None if _underscored(str(key)) else under(inner, str(key))
            if _underscored(str(key)):
                self.add(below, f"`{'.'.join(below)}`: {_NO_CODE}")
            elif hint is None:
                self.add(below, self._unknown(keys, inner, str(key), ()))
            else:
                if isinstance(item, bool) and {"on", "off"} <= set(choices(hint)):
                    item = value[key] = "on" if item else "off"  # an unquoted `off`, as YAML reads it
                self.value(hint, item, below)

    def _leaf(self, inner: Any, value: Any, keys: Keys) -> None:
        name = ".".join(keys)
        if isinstance(inner, type) and issubclass(inner, Enum):
            options = [member.name for member in inner]
            if value not in options:
                word = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
                told, reads = word, ""
                if isinstance(value, bool) and self.stranger:
                    reads = f" (YAML reads an unquoted `{word}` as {str(value).lower()})"
                elif isinstance(value, bool):
                    told = str(value).lower()  # a command line keeps `on` as it stands
                self.add(
                    keys, f"`{name}={told}`{reads} is not one of {', '.join(options)}{_close(str(word), options)}"
                )
            return
        wrong, number = isinstance(value, (list, dict)), None
        if inner is str:
            # 007, 1e5 and `on` would not come out as they were written; on a command line Hydra keeps 007 as text
            wrong = not isinstance(value, str if self.stranger else (str, int)) or isinstance(value, bool)
            if wrong and not isinstance(value, (list, dict)):
                self.add(keys, f"`{name}` is text, and {_shown(value)} is not: put it in quotes")
                return
        elif not wrong:
            try:
                number = _NODES[inner](value=value, is_optional=False)._value()
            except OmegaConfBaseException:
                wrong = True
            wrong = wrong or (inner is bool and value not in (0, 1) and not isinstance(value, str))
        if wrong:
            self.add(keys, f"`{name}` is {_TYPES[inner]}, and {_shown(value)} is not")
        elif problem := outside(name, number):
            self.add(keys, problem)
        if self.stranger and not wrong:
            self._beyond(name, value, keys)

    def _beyond(self, name: str, value: Any, keys: Keys) -> None:
        """What only the user may say, and not a file: that foreign code may run, and that files are written elsewhere."""
        if keys[-1] == TRUST and value is not False:
            self.add(
                keys,
                f"`{name}` runs code of a stranger, so a recipe cannot ask for it: say {name}=true on the command "
                "line yourself",
            )
        if name in WRITTEN and (Path(value).is_absolute() or _leads_out(value)):
            self.add(
                keys,
                f"`{name}={value}`: a recipe may come from a stranger, so it writes below the working directory only "
                f"(no /, ~, .. or hidden folders); say {name}={value} on the command line yourself",
            )

    def _free(self, value: Any, keys: Keys) -> None:
        """Below a field that takes anything: still no code and no secrets."""
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inner:
            if isinstance(value, dict) and _underscored(str(key)):
                self.add((*keys, str(key)), f"`{'.'.join((*keys, str(key)))}`: {_NO_CODE}")
            else:
                self.value(Any, item, (*keys, str(key)))

    def _pointer(self, value: str, keys: Keys) -> None:
        name = ".".join(keys)
        if self.stranger and keys[-1] == TRUST:
            self.add(keys, f"`{name}` can be set on the command line only")
        if "${" in POINTER.sub("", value):
            self.add(
                keys,
                f"`{name}={value}` is not read: a config is saved and shared, so it may point at other keys "
                "(${optimizer.lr}) and never at the environment, a file or a function",
            )
            return
        for dots, target in POINTER.findall(value):
            path = tuple(re.sub(r"\[(\d+)\]", r".\1", target).split("."))
            full = (*keys[: -len(dots)], *path) if dots else path
            elsewhere = Vetting(self.schema, lambda _: "", self.stranger)
            hint = elsewhere.key(full)
            if hint is None:
                self.add(keys, f"`{name}={value}` points at nothing: {elsewhere.problems[0].removeprefix(': ')}")
            elif self.stranger and name in WRITTEN and full != ("run", "name") and stripped(hint)[0] is str:
                self.add(
                    keys,
                    f"`{name}={value}` points at a text that may be any path: of texts it can point at run.name only",
                )
        if self.stranger and name in WRITTEN:
            self._beyond(name, POINTER.sub("x", value), keys)

    def _unknown(self, above: Keys, inner: Any, key: str, rest: Keys) -> str:
        name = ".".join((*above, key, *rest))
        if not dataclasses.is_dataclass(inner):
            if typing.get_origin(inner) is list:
                return (
                    f"`{name}`: `{'.'.join(above)}` is a list, its entries are counted from 0 (`{'.'.join(above)}.0`)"
                )
            return f"unknown key `{name}`: `{'.'.join(above)}` is {_wanted(inner)} and has no keys"
        siblings = list(hints(inner))
        if "." in key and self.stranger:
            return f"unknown key `{name}`: in a file, dots become nesting ({key.replace('.', ': {', 1)}: ...}})"
        better = self._better(above, siblings, key, rest)
        if better:
            return f"unknown key `{name}`; did you mean `{better}`?"
        owner = f"`{'.'.join(above)}`" if above else "A config"
        return f"unknown key `{name}`. {owner} has: {', '.join(siblings)}"

    def _better(self, above: Keys, siblings: list[str], key: str, rest: Keys) -> str | None:
        last = rest[-1] if rest else key
        close = nearest(key, siblings, 0.75)
        if close:
            return ".".join((*above, close, *rest))
        if last in ELSEWHERE:
            return ELSEWHERE[last]
        everywhere = list(all_keys(self.schema))
        same = [known for known in everywhere if known.rpartition(".")[2] == last]
        if same:
            return nearest(".".join((*above, key, *rest)), same, 0.0) or same[0]
        close = nearest(key, siblings)
        if close:
            return ".".join((*above, close, *rest))
        return nearest(".".join((*above, key, *rest)), everywhere, 0.8)


def told_only(key: str) -> bool:
    """Whether a key's value belongs on a command line, and not in a file that is given on: see Vetting._beyond."""
    return key in WRITTEN or key.rpartition(".")[2] == TRUST


_NO_CODE = "a config holds values, it cannot name code to run"


def _underscored(key: str) -> bool:
    """Hydra's own words (`_target_`, `_partial_`, ...), which make data into calls."""
    return len(key) > 2 and key.startswith("_") and key.endswith("_")


def _wanted(inner: Any) -> str:
    if dataclasses.is_dataclass(inner):
        return ", ".join(hints(inner))
    if isinstance(inner, type) and issubclass(inner, Enum):
        return f"one of {', '.join(member.name for member in inner)}"
    return {list: "a list", dict: "{name: value, ...}"}.get(typing.get_origin(inner), _TYPES.get(inner, str(inner)))


def _leads_out(path: str) -> bool:
    return any(part.startswith((".", "~")) for part in Path(path).parts if part != ".")


def _close(word: str, options: list[str]) -> str:
    return did_you_mean(word, options) if nearest(word, options) else ""


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
