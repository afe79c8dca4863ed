"""Runs llama.cpp's converter with a named pre-tokenizer: python llama_cpp.py SCRIPT NAME WORD ...

What: `get_vocab_base_pre` of the converter's class TextModel, in the process of the converter alone.
Why: the converter knows a tokenizer by a hash of its ids. It has no option for another one and tells its users to edit
    this function. fxtune compares the ids of the file afterwards (outputs/targets/gguf.py).
Gone: the converter runs as it is, and refuses the tokenizer.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    script, name, *words = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))  # PYTHONSAFEPATH leaves it out
    if name:
        with suppress(ImportError, AttributeError):
            from conversion import TextModel

            known: Any = TextModel.get_vocab_base_pre
            TextModel.get_vocab_base_pre = lambda self, tokenizer: name
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
