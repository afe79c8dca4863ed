"""`fxtune schema`: the JSON Schema of recipes, for editors and programs.

    fxtune schema                                      # print it
    fxtune schema --json recipes/fxtune.schema.json    # write it

An editor finds the schema by the line `# yaml-language-server: $schema=fxtune.schema.json` in a recipe. `fxtune new`,
`import` and `recipes copy` write this line, and the schema beside the recipe.
"""

from __future__ import annotations

from fxtune.cli.answer import ANSWER
from fxtune.config.schema import recipe_schema
from fxtune.distributed.files import as_json


def run() -> None:
    schema = recipe_schema()
    ANSWER.put(schema)
    if ANSWER.file is None:
        print(as_json(schema), end="")
