"""Reads a YAML file of plain values, with the line of each key.

The file may come from a stranger: tags, anchors and merge keys are refused, and nothing in it is executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fxtune.config.discovery import place
from fxtune.config.introspection import Keys
from fxtune.errors import ConfigError

_MAX_BYTES = 256 * 1024
_MAX_DEPTH = 24

POINTER = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)\}")
"""`${optimizer.lr}`: the value of another key."""


@dataclass
class RecipeFile:
    path: Path
    data: dict[str, Any]
    lines: dict[Keys, int]
    package: str | None
    """The text after `# @package`, if the file has such a line."""

    def where(self, keys: Keys) -> str:
        """`recipes/mine.yaml:7`, for the deepest of `keys` that the file holds."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{place(self.path)}:{self.lines.get(keys, 1)}"


def read(path: Path) -> RecipeFile:
    """Read a YAML mapping of plain values. Raises ConfigError with file and line."""
    name = place(path)
    try:
        if not path.is_file():  # reading a pipe would wait, reading a device would never end
            raise ConfigError(f"{name}: not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{name}: {path.stat().st_size} bytes, and a recipe may have {_MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
        _refuse_beyond_values(text, name)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data: Any = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = " ".join(part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
        raise ConfigError(f"{name}{line}: this is not YAML: {what or error}") from error
    except OmegaConfBaseException as error:
        pointers = [n for n, line in enumerate(text.splitlines(), 1) if "${" in POINTER.sub("", line)]
        first = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"{name}:{pointers[0] if pointers else 1}: {first}") from error
    if not isinstance(data, dict) or (node is not None and not isinstance(node, yaml.MappingNode)):
        raise ConfigError(f"{name}:1: a recipe is `key: value` lines, and this file is not")
    lines: dict[Keys, int] = {}
    if node is not None:
        _collect_lines(node, data, (), lines)
    header = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    return RecipeFile(path, data, lines, header[1] if header else None)


def _refuse_beyond_values(text: str, name: str) -> None:
    """Raise ConfigError for anchors, merge keys, tags and too many levels. Only parse events are read, and they build
    no values, so a YAML bomb does no harm."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"{name}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(
                f"{where}: YAML anchors (&{event.anchor}, *{event.anchor}) are not read; "
                "write the value out, or point at a key: ${optimizer.lr}"
            )
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.style is None:
            raise ConfigError(f"{where}: YAML merge keys (<<) are not read, write the values out")
        if getattr(event, "tag", None):
            raise ConfigError(f"{where}: YAML tags ({event.tag}) are not read, a recipe holds plain values only")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{where}: more than {_MAX_DEPTH} levels deep")


def _collect_lines(node: yaml.Node, data: Any, keys: Keys, lines: dict[Keys, int]) -> None:
    """Add the line of each key below `node` to `lines`. `data`: the values of `node` as OmegaConf reads them, where
    the key `on:` is True."""
    if isinstance(node, yaml.MappingNode):
        for (key_node, value_node), key in zip(node.value, data, strict=True):
            lines[(*keys, str(key))] = key_node.start_mark.line + 1
            _collect_lines(value_node, data[key], (*keys, str(key)), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*keys, str(index))] = item.start_mark.line + 1
            _collect_lines(item, data[index], (*keys, str(index)), lines)
