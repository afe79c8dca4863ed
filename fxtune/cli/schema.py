"""`fxtune schema`: the JSON Schema of recipes, for editors and programs.

fxtune schema                       # print it
fxtune schema recipes/fxtune.json   # write it; a recipe's line `# yaml-language-server: $schema=fxtune.json` uses it
"""

from __future__ import annotations

import json
from pathlib import Path

from fxtune.cli.options import write_text
from fxtune.config.schema import recipe_schema


def run(file: str | None = None) -> None:
    text = json.dumps(recipe_schema(), indent=1) + "\n"
    if file is None:
        print(text, end="")
    else:
        write_text(Path(file), text, "fxtune schema")
