"""Model folders that name Python code. The code makes a file, the canary, when it runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import transformers

from fxtune.system.files.hub import locate

AUTO = sorted(name for name in dir(transformers) if name.startswith("Auto") and name != "AutoBackbone")
"""The auto classes of transformers."""
CODE = "import os, pathlib\npathlib.Path(os.environ['CANARY']).touch()\nclass Evil: pass\n"


def change(path: Path, **values: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def plant_code(folder: Path) -> Path:
    """Put evil.py into `folder`, and name it in the auto_map of each config file there, for each auto class."""
    (folder / "evil.py").write_text(CODE)
    named = {auto: ["evil.Evil", "evil.Evil"] if auto == "AutoTokenizer" else "evil.Evil" for auto in AUTO}
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        change(folder / name, auto_map=named)
    return folder


def stranger_in(parent: Path) -> Path:
    """A folder in `parent` with a valid model of a type that transformers has, and with code.

    Its name is new, since transformers does not run the code of a folder of the same name twice.
    """
    return plant_code(Path(shutil.copytree(locate("builtin:tiny").folder, parent / f"stranger_{os.urandom(4).hex()}")))
