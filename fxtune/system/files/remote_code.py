"""Keeps transformers' loader of remote code closed, except for the folders that the user trusts.

A model's folder may name Python code in `auto_map`. transformers runs that code if any of thirty functions gets
trust_remote_code=True, or if a person answers a prompt. fxtune passes model.trust_remote_code to all thirty, but one
call with another value would run a stranger's code. So fxtune also guards the two functions that all such code passes
through:

    get_cached_module_file(folder, file)    imports the packages that the file imports, and copies the file
    get_class_in_module(name, copy)         runs the copy

`import fxtune` installs the guard, also in ranks, in workers that tokenise and in trials. A call that comes from
fxtune's code passes only for a folder that trust() got: the snapshot of a commit that a user has pinned and trusted.
All other calls pass, because a notebook that uses fxtune may use transformers as well.

This module is imported before `python -m fxtune` has removed the working directory from sys.path. So at its top it
imports only modules of Python that are already loaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

LOADER = "transformers.dynamic_module_utils"

_trusted: set[str] = set()
"""Real paths of folders."""
_copies: set[str] = set()
"""Paths of the copies of trusted files, relative to the folder in which transformers keeps copies."""


def trust(folder: str | os.PathLike[str]) -> None:
    """Let this process run the Python code in `folder`: the user has set model.trust_remote_code for its commit."""
    _trusted.add(os.path.realpath(folder))


def refusal(folder: str | os.PathLike[str], file: str) -> Exception:
    """The error for code in `file` of `folder`, which is not trusted."""
    from fxtune.errors import ConfigError

    return ConfigError(
        f"{os.path.join(folder, file)} is Python code that came with {os.fspath(folder)}. Nobody has trusted it, so "
        "it does not run. If you have read it, set model.trust_remote_code=true on the command line, with the hub id "
        "in model.path and the full commit in model.revision."
    )


def install_guard() -> None:
    """Guard transformers' loader now or, if it is not imported yet, when it is imported."""
    if LOADER in sys.modules:
        _guard(sys.modules[LOADER])
    else:
        sys.meta_path.insert(0, _GuardedImport())


class _GuardedImport:
    """Finds the loader's module as Python does, and guards it once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != LOADER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _guard(module)

        spec.loader.exec_module = exec_module
        return spec


def _guard(loader: Any) -> None:
    """Replace the loader's functions by guarded ones, also in modules of transformers that have imported them. Raises
    AttributeError if the loader lacks these functions. Remote code cannot run without them."""
    copy_file, run_copy = loader.get_cached_module_file, loader.get_class_in_module

    # The arguments have transformers' names, because callers may pass them by name.
    def get_cached_module_file(
        pretrained_model_name_or_path: Any, module_file: str, *given: Any, **options: Any
    ) -> Any:
        folder, called = os.fspath(pretrained_model_name_or_path), _is_called_by_fxtune()
        if called and os.path.realpath(folder) not in _trusted:
            raise refusal(folder, module_file)
        copy = copy_file(folder, module_file, *given, **options)
        if called:
            _copies.add(os.fspath(copy))
        return copy

    def get_class_in_module(class_name: str, module_path: Any, *given: Any, **options: Any) -> Any:
        if _is_called_by_fxtune() and os.fspath(module_path) not in _copies:
            raise refusal(*os.path.split(os.fspath(module_path)))
        return run_copy(class_name, module_path, *given, **options)

    for guarded in (get_cached_module_file, get_class_in_module):
        name, original = guarded.__name__, getattr(loader, guarded.__name__)
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("transformers") and vars(module).get(name) is original:
                setattr(module, name, guarded)


def _is_called_by_fxtune() -> bool:
    import inspect

    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] == "fxtune" and name != __name__:
            return True
        frame = frame.f_back
    return False
