"""fxtune: fine-tune Hugging Face language models from short recipes, fast, and prove that every option acted.

    import fxtune
    run = fxtune.train("quickstart", ["optimizer.lr=1e-3"])
    run.generate("Two large pizzas for Ann, please.")

The functions are in fxtune/api.py. This file is imported when a function is first used (docs/python.md).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fxtune.system.files import remote_code

if TYPE_CHECKING:
    from fxtune.api import Run, load_recipe, plan, preview, train, verify
    from fxtune.objectives.base import Objective
    from fxtune.objectives.needs import Needs
    from fxtune.objectives.registry import objective
    from fxtune.plugins import Group, environment, load_plugin, metric, reward, row_format, technique
    from fxtune.techniques.base import Evidence, Technique

__version__ = "0.1.0"

# By default OpenMP's threads spin while they wait. Beside one other busy process, a CPU run is then up to six times
# slower. OpenMP reads this variable when torch loads OpenMP. Child processes inherit the variable.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# transformers imports fla-core with a model's code. Its launch settings are fixed (kernels/fla_package.py), and
# FlashQLA does not run by accident.
os.environ.setdefault("FLA_CACHE_MODE", "strict")
os.environ.setdefault("FLA_FLASH_QLA", "0")

# The guard is installed here, because each child process imports fxtune before it reads a model's folder.
remote_code.install_guard()

_MODULES = {
    "fxtune.api": ("Run", "load_recipe", "plan", "preview", "train", "verify"),
    "fxtune.objectives.base": ("Objective",),
    "fxtune.objectives.needs": ("Needs",),
    "fxtune.objectives.registry": ("objective",),
    "fxtune.plugins": ("Group", "environment", "load_plugin", "metric", "reward", "row_format", "technique"),
    "fxtune.techniques.base": ("Evidence", "Technique"),
}
"""The modules of the public names. All but fxtune.api are for authors of plugins (docs/plugins.md)."""
__all__ = [
    "Evidence",
    "Group",
    "Needs",
    "Objective",
    "Run",
    "Technique",
    "__version__",
    "environment",
    "load_plugin",
    "load_recipe",
    "metric",
    "objective",
    "plan",
    "preview",
    "reward",
    "row_format",
    "technique",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because torch and transformers take seconds to import."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
