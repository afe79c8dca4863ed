"""Writes the recipe of an account: its differences as comments, its keys by section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fxtune.config import discovery
from fxtune.config.root import Config
from fxtune.migration.account import Account


def text(account: Account, title: str, command: str) -> str:
    """The recipe's file."""
    comments = [title, "", f"  {command}", *(f"Differs: {line}." for line in account.differences)]
    defaults: list[Any] = []
    body: dict[str, Any] = {}
    for key, value in account.recipe.items():
        if key in ("techniques", "objective"):
            defaults.append({f"override /{key}": value})
        else:
            section = body
            *path, last = key.split(".")
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
    order = [*Config.__dataclass_fields__]
    sections = [{"defaults": [*defaults, "_self_"]}] if defaults else []
    sections += [{key: body[key]} for key in sorted(body, key=order.index)]
    header = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return f"{header}# @package _global_\n" + "\n".join(
        yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=120) for section in sections
    )


def target(name: str) -> Path:
    """recipes/NAME.yaml."""
    return discovery.LOCAL / f"{name}.yaml"
