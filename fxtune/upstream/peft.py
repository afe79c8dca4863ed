"""peft: what it imports beside itself."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

LIBRARIES = ("bitsandbytes", "torchao")
AVAILABLE = ("is_bnb_available", "is_bnb_4bit_available", "is_torchao_available")


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """peft, which finds no library of quantized weights that this process has not imported yet.

    peft imports each library that is installed, to ask whether a linear is one of its own. bitsandbytes takes one to
    three seconds, because it builds compiled functions at its import and so loads torch's compiler. A model with
    quantized linears has imported their library already. peft has no option for this: the entry None in sys.modules,
    by which Python says that there is no such module, is public, and so are the functions whose answers peft keeps.
    Without these functions in a version of peft, its answer stays what it is, and only time is lost.
    """
    hidden = [name for name in LIBRARIES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is allowed there
    try:
        peft = importlib.import_module("peft")
        _forget()
        yield peft
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        _forget()


def _forget() -> None:
    """Let peft ask again which libraries are installed."""
    asked = sys.modules.get("peft.import_utils")
    for name in AVAILABLE:
        if clear := getattr(getattr(asked, name, None), "cache_clear", None):
            clear()
