"""Checks each key and value of a config against the dataclasses, and says exactly where a mistake is.

A stranger may have written a recipe. Hydra acts on some values (`hydra.callbacks` runs code) and lets unknown keys
pass (`+key`). So every recipe, group and override is checked before Hydra reads it. The merged config is checked once
more, when the values of pointers such as `${optimizer.lr}` are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import BooleanNode, FloatNode, IntegerNode
from omegaconf.errors import OmegaConfBaseException

from fxtune.config.introspection import Keys, Slot, all_keys
from fxtune.config.yaml_reader import POINTER
from fxtune.errors import did_you_mean, nearest
from fxtune.plugins import PLUGIN_ADDS

TRUST = "trust_remote_code"
TASK_FOLDER = "eval.task_folder"
"""The key that names a folder with code of benchmarks."""
OUTPUT_KEYS = ("run.dir", "data.cache_dir")
"""Keys that say where files are written."""

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NODES: dict[Any, Callable[..., Any]] = {int: IntegerNode, float: FloatNode, bool: BooleanNode}
_NO_CODE = "a config holds values, it cannot name code to run"
_FORBIDDEN_CHARACTER = re.compile("[\0\ud800-\udfff]")


@dataclass
class Validator:
    """Collects all problems of a config, so that a user can correct them in one go."""

    schema: type
    """The root dataclass."""
    place: Callable[[Keys], str]
    from_file: bool = True
    """Whether the values come from a file, which somebody else may have written."""
    problems: list[str] = field(default_factory=list)

    def add(self, keys: Keys, text: str) -> None:
        self.problems.append(f"{self.place(keys)}: {text}")

    def find(self, keys: Keys) -> Slot | None:
        """The slot at `keys`. If there is none, add the problem and return None."""
        slot = Slot(self.schema)
        for depth, key in enumerate(keys):
            found = None if _is_directive(key) else slot.below(key)
            if found is None:
                self.add(keys, self._no_such_key(slot, keys, depth))
                return None
            slot = found
        return slot

    def check(self, slot: Slot, value: Any, keys: Keys) -> None:
        """Add a problem for each part of `value` that `slot` cannot hold."""
        name = ".".join(keys)
        if isinstance(value, str) and _FORBIDDEN_CHARACTER.search(value):
            why = "has a character that no file and no name can have (NUL, or half of a surrogate pair)"
            self.add(keys, f"`{name}={value!r}` {why}")
        elif isinstance(value, str) and "${" in value:
            self._check_pointer(value, keys)
        elif value == "???":
            return  # compose.typed() reports unset keys after everything is merged
        elif value is None:
            if not slot.nullable:
                first = next(iter(slot.fields), "")  # null as a group's first key switches the group off
                way = f"; write {name}.{first}=null" if first and slot.fields[first].nullable else ""
                problem = f"cannot be null; it is {expected(slot)}{way}"
                if first and len(keys) == 1:
                    problem = f"is empty: put keys below it ({expected(slot)}), or leave it out"
                self.add(keys, f"`{name}` {problem}")
        elif slot.container is list or (slot.kind is Any and isinstance(value, list)):
            if not isinstance(value, list):
                if value not in slot.words:
                    words = "".join(f" or {word}" for word in slot.words)
                    entry = slot.below("0")
                    if entry is not None and entry.fields and isinstance(value, str):
                        self.add(
                            keys, f"`{name}` is a list of groups of keys{self._as_entry(entry, (*keys, '0'), value)}"
                        )
                    else:
                        self.add(keys, f"`{name}` is a list{words}: [{_shown(value)}], not {_shown(value)}")
                return
            for index, item in enumerate(value):
                self._check_below(slot, str(index), item, keys)
        elif slot.fields or slot.container is dict or (slot.kind is Any and isinstance(value, dict)):
            if not isinstance(value, dict):
                words = f" or the word{'s' * (len(slot.switches) > 1)} {', '.join(slot.switches)}" * bool(
                    slot.switches
                )
                way = self._as_entry(slot, keys, value) if keys[-1].isdigit() and isinstance(value, str) else ""
                fault = f"`{name}` is a group of keys ({expected(slot)}){words} and cannot be {_shown(value)}{way}"
                self.add(keys, fault)
                return
            every, slot = slot, slot.chosen(value)
            for key, item in value.items():
                if slot.container is dict and not isinstance(key, str):
                    way = "put it in quotes" if self.from_file else f"write {name}.{_shown(key)}={_shown(item)}"
                    self.add((*keys, str(key)), f"`{name}`: a name is text, and {_shown(key)} is not: {way}")
                if isinstance(item, bool) and (below := slot.below(str(key))) and {"on", "off"} <= {*below.choices}:
                    item = value[key] = "on" if item else "off"  # YAML reads an unquoted `off` as false
                if isinstance(item, str) and (below := slot.below(str(key))) and item in below.switches:
                    item = value[key] = {item: True}
                if slot.below(str(key)) is None and every.below(str(key)) is not None:
                    self.add((*keys, str(key)), _of_another_variant(every, (*keys, str(key)), value["name"]))
                else:
                    self._check_below(slot, str(key), item, keys)
        elif slot.choices:
            self._check_choice(slot.choices, value, keys, PLUGIN_ADDS if slot.words else "")
        elif slot.kind is not Any and value not in slot.words:
            self._check_scalar(slot, value, keys)

    def _check_below(self, slot: Slot, key: str, value: Any, above: Keys) -> None:
        keys = (*above, key)
        below = None if _is_directive(key) else slot.below(key)
        if below is None:
            self.add(keys, self._no_such_key(slot, keys, len(above)))
        else:
            self.check(below, value, keys)

    def _check_choice(self, choices: list[str], value: Any, keys: Keys, others: str = "") -> None:
        """`others`: a sentence that says where more choices come from."""
        if value in choices:
            return
        word, shown, remark = str(value), value, ""
        if isinstance(value, bool):
            word, shown = "on" if value else "off", _shown(value)  # a command line keeps `on` as it stands
            if self.from_file:
                shown, remark = word, f" (YAML reads an unquoted `{word}` as {shown})"
        close = nearest(word, choices) and ("on" in choices or not isinstance(value, bool))
        hint = did_you_mean(word, choices) if close else "." * bool(others)
        text = f"`{'.'.join(keys)}={shown}`{remark} is not one of {', '.join(choices)}{hint} {others}"
        self.add(keys, text.rstrip())

    def _check_scalar(self, slot: Slot, value: Any, keys: Keys) -> None:
        name, number = ".".join(keys), value
        wrong = isinstance(value, (list, dict))
        if slot.kind is str:
            # YAML does not keep 007, 1e5 and `on` as they are written. On a command line, Hydra keeps 007.
            if not wrong and (isinstance(value, bool) or not isinstance(value, str if self.from_file else (str, int))):
                self.add(keys, f"`{name}` is text, and {_shown(value)} is not: put it in quotes")
                return
        elif not wrong:
            try:
                number = _NODES[slot.kind](value=value, is_optional=False).validate_and_convert(value)
            except OmegaConfBaseException:
                wrong = True
            wrong = wrong or (slot.kind is bool and value not in (0, 1) and not isinstance(value, str))
        if wrong:
            self.add(keys, f"`{name}` is {expected(slot)}, and {_shown(value)} is not")
        elif isinstance(number, float) and not math.isfinite(number):
            self.add(keys, f"`{name}={number}` is not a finite number")
        elif slot.kind is not str and (limits := slot.range_broken(number)):
            self.add(keys, f"`{name}={number}` must be {limits}")
        elif self.from_file:
            self._check_permission(name, value, keys)

    def _check_permission(self, name: str, value: Any, keys: Keys) -> None:
        """Refuse a file's value that lets foreign code run or writes outside the working directory. Users may type
        such values on the command line."""
        if (keys[-1] == TRUST and value is not False) or (name == TASK_FOLDER and value is not None):
            why = "runs code of a stranger, so a recipe cannot set it"
            self.add(keys, f"`{name}` {why}: put {name}=true on the command line yourself")
        if name not in OUTPUT_KEYS:
            return
        path = Path(value)
        if path.is_absolute() or any(part.startswith((".", "~")) for part in path.parts if part != "."):
            why = "a recipe of a stranger writes below the working directory only (no /, ~, .. or hidden folders)"
            self.add(keys, f"`{name}={value}`: {why}; put {name}={value} on the command line yourself")

    def _check_pointer(self, value: str, keys: Keys) -> None:
        """Add a problem if a pointer (`${optimizer.lr}`) names anything but a key that exists."""
        name = ".".join(keys)
        if self.from_file and (keys[-1] == TRUST or name == TASK_FOLDER):
            self.add(keys, f"`{name}` can be set on the command line only")
        if "${" in POINTER.sub("", value):
            why = "a config is saved and shared, so it may point at other keys (${optimizer.lr}) and never at the"
            self.add(keys, f"`{name}={value}` is not allowed: {why} environment, a file or a function")
            return
        for dots, target in POINTER.findall(value):
            path = tuple(re.sub(r"\[(\d+)\]", r".\1", target).split("."))
            full = (*keys[: -len(dots)], *path) if dots else path
            targets = Validator(self.schema, lambda _: "")
            slot = targets.find(full)
            if slot is None:
                self.add(keys, f"`{name}={value}` points at nothing: {targets.problems[0].removeprefix(': ')}")
            elif self.from_file and name in OUTPUT_KEYS and full != ("run", "name") and slot.kind is str:
                self.add(
                    keys, f"`{name}={value}` points at a text that may be any path: it can point at run.name only"
                )
        if self.from_file and name in OUTPUT_KEYS:
            self._check_permission(name, POINTER.sub("x", value), keys)

    def _as_entry(self, entry: Slot, keys: Keys, value: str) -> str:
        """How to write a text that is meant as the first key of a list's entry: `data.sources.0.path=rows.jsonl`."""
        first = next(iter(entry.fields))
        if self.from_file:
            return f"; write `- {first}: {value}`"
        return f"; write {'.'.join((*keys, first))}={value}"

    def _no_such_key(self, slot: Slot, keys: Keys, depth: int) -> str:
        """The message that `slot` has no key `keys[depth]`, with the key that may be meant. The first `depth` of
        `keys` lead to `slot`."""
        above, key, rest = keys[:depth], keys[depth], keys[depth + 1 :]
        name, owner = ".".join(keys), ".".join(above)
        if _is_directive(key):
            return f"`{name}`: {_NO_CODE}"
        if slot.container is list:
            return f"`{name}`: `{owner}` is a list, its entries are counted from 0 (`{owner}.0`)"
        if not slot.fields:
            return f"unknown key `{name}`: `{owner}` is {expected(slot)} and has no keys"
        if "." in key:  # only a file's key can have dots: a command line's key is split at its dots
            return f"unknown key `{name}`: in a file, dots become nesting ({key.replace('.', ': {', 1)}: ...}})"
        if instead := _other_names()["earlier_versions"].get(name):
            return f"`{name}` is no key any more: {instead}"
        if better := self._likely_key(above, list(slot.fields), key, rest):
            return f"unknown key `{name}`; did you mean `{better}`?"
        return f"unknown key `{name}`. {f'`{owner}`' if above else 'A config'} has: {', '.join(slot.fields)}"

    def _likely_key(self, above: Keys, siblings: list[str], key: str, rest: Keys) -> str | None:
        full, last = ".".join((*above, key, *rest)), rest[-1] if rest else key
        translated = names_in_other_trainers().get(last)
        if translated and translated.rpartition(".")[0] == ".".join(above):
            return translated
        words = set(key.lower().split("_"))
        longer = [sibling for sibling in siblings if words <= set(sibling.split("_"))]
        if close := nearest(key, siblings, 0.75) or nearest(key, longer, 0.0):
            return ".".join((*above, close, *rest))
        if translated:
            return translated
        every_key = list(all_keys(self.schema))
        for end in (".".join((key, *rest)), key, last):
            if same := [known for known in every_key if f".{known}".endswith(f".{end}")]:
                return nearest(full, same, 0.0) or same[0]
        if close := nearest(key, siblings):
            return ".".join((*above, close, *rest))
        return nearest(full, every_key, 0.8)


def names_in_other_trainers() -> dict[str, str]:
    """{the name of a key in another trainer: fxtune's key}"""
    return {name: key for key, names in _other_names()["other_trainers"].items() for name in names.split()}


def _other_names() -> dict[str, dict[str, str]]:
    """Read when a message or `fxtune help` needs it, because most runs do not."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8")))


def command_line_only(key: str) -> bool:
    return key in (*OUTPUT_KEYS, TASK_FOLDER) or key.rpartition(".")[2] == TRUST


def _is_directive(key: str) -> bool:
    """Whether Hydra would turn data into a call at `key` (`_target_`, `_partial_`, ...)."""
    return len(key) > 2 and key.startswith("_") and key.endswith("_")


def _of_another_variant(section: Slot, keys: Keys, name: str) -> str:
    """The message that `keys` belong to other variants of the section than the chosen variant `name`."""
    owner, key = ".".join(keys[:-1]), keys[-1]
    having = [other for other in section.variants if Slot(section.variants[other]).below(key) is not None]
    chosen = f"`{owner}.{key}` is an option of {owner}={' and '.join(having)}, and this is {owner}={name}"
    return f"{chosen}: leave it out, or choose another {owner}"


def expected(slot: Slot) -> str:
    if slot.fields:
        return ", ".join(slot.fields)
    if slot.choices:
        return f"one of {', '.join(slot.choices)}"
    if slot.container in (list, dict):
        return "a list" if slot.container is list else "{name: value, ...}"
    return slot.takes or " or ".join([_TYPE_NAMES.get(slot.kind, str(slot.kind)), *slot.words])


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
