"""Writes a recipe file: comments, keys by section, and behind a key the reason for its value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fxtune.config import discovery
from fxtune.config.compose import load
from fxtune.config.root import Config

WIDTH = 50
"""The column at which reasons begin."""


def text(comments: Iterable[str], keys: Mapping[str, Any], reasons: Mapping[str, str] = {}) -> str:
    """The text of a recipe file. `keys`: {key with dots, or group: value}; `reasons`: {key: why it has this value}."""
    groups = [key for key in keys if "." not in key]
    defaults = [f"  - override /{key}: {_value(keys[key])}" for key in groups]
    lines = [f"# {line}".rstrip() for line in comments] + [discovery.SCHEMA_LINE, "# @package _global_"]
    why = {f"override /{key}": reasons[key] for key in groups if key in reasons}
    if defaults:
        lines += [
            "defaults:",
            *(_with(line, why.get(line.split(":")[0].strip(" -"), "")) for line in defaults),
            "  - _self_",
        ]
    body: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in groups:
            *path, last = key.split(".")
            section = body
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
    for group in (name for name in Config.__dataclass_fields__ if name in body):
        lines += ["", *_section({group: body[group]}, "", 0, {**reasons, group: ""})]
    return "\n".join(lines) + "\n"


def write(name: str, content: str) -> Path:
    """Write recipes/NAME.yaml, and read it again as a run does. Raises StorageError if the file exists or cannot be
    written, ConfigError if a run would refuse it."""
    path = discovery.LOCAL / f"{name}.yaml"
    discovery.write_new(path, content)
    with discovery.removed_if_unfinished(path):
        load([f"+recipe={name}"])
    return path


def _section(values: Mapping[str, Any], path: str, depth: int, reasons: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in values.items():
        name, indent = f"{path}.{key}".lstrip("."), "  " * depth
        if isinstance(value, dict) and value and depth < 3:
            lines += [_with(f"{indent}{key}:", reasons.get(name, "")), *_section(value, name, depth + 1, reasons)]
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            lines.append(_with(f"{indent}{key}:", reasons.get(name, "")))
            lines += [f"{indent}  - {_value(entry)}" for entry in value]
        else:
            lines.append(_with(f"{indent}{key}: {_value(value)}", reasons.get(name, "")))
    return lines


def _value(value: Any) -> str:
    """A value on one line of YAML."""
    plain = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return plain.removesuffix("\n").removesuffix("\n...")


def _with(line: str, reason: str) -> str:
    return f"{line:{WIDTH}}  # {reason}" if reason else line
