"""fxtune: fine-tune Hugging Face language models from short recipes, fast, and prove that every option acted.

    import fxtune
    run = fxtune.train("quickstart", ["optimizer.lr=1e-3"])
    run.generate("Two large pizzas for Ann, please.")

The functions stand in fxtune/api.py, which is imported when one of them is used (docs/python.md).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxtune.api import Run, load_recipe, plan, preview, train, verify

__version__ = "0.1.0"

# OpenMP threads that spin while they wait take a core from whatever else wants one: beside one busy process a CPU run
# is up to six times slower. OpenMP reads this when torch loads it, and child processes inherit it.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

__all__ = ["Run", "__version__", "load_recipe", "plan", "preview", "train", "verify"]


def __getattr__(name: str) -> Any:
    """Import the Python API when it is first used: torch and transformers take seconds."""
    if name in __all__:
        return getattr(importlib.import_module("fxtune.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
