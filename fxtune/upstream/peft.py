"""Private parts of peft, and its imports of other libraries. See the package's docstring for the form of an entry."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("bitsandbytes", "torchao")
AVAILABLE = ("is_bnb_available", "is_bnb_4bit_available", "is_torchao_available")


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """Yield the module peft. In the body peft finds only libraries of quantized weights that are already imported.

    peft imports each installed library of quantized linears. bitsandbytes takes one to three seconds, because its
    import loads torch's compiler. A model with quantized linears has already imported their library. peft has no
    option for this. If an entry of sys.modules is None, Python says that the module does not exist.
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
    asked = sys.modules["peft.import_utils"]
    for name in AVAILABLE:
        getattr(asked, name).cache_clear()


READ = "convert_peft_config_for_transformers"


# Names of experts.
#
# What: convert_peft_config_for_transformers(), by which peft reads the names of linears, such as `down_proj`, as names
#   of tensors that hold all experts.
# Why: peft calls it for each model whose files transformers converts. fxtune calls it before it adds adapters, and
#   switches it off while it adds them.


def read_as_experts(config: Any, model: nn.Module) -> None:
    """Move names in `config.target_modules` that peft reads as tensors of experts to `config.target_parameters`.
    Raises ValueError as peft does."""
    getattr(_conversion(), READ)(config, model, None)


@contextlib.contextmanager
def targets_as_they_are() -> Iterator[None]:
    """Keep peft from reading names of linears as names of experts."""
    module = _conversion()
    own = getattr(module, READ)
    setattr(module, READ, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(module, READ, own)


def _conversion() -> Any:
    with alone():
        return importlib.import_module("peft.utils.transformers_weight_conversion")


# A layer of peft with another forward.
#
# What: `__class__` of a layer that peft has made, set to a subclass of its class.
# Why: peft finds its layers by isinstance, and chooses a layer's class before it is known which layers run together.
#   Its mapping from classes of linears to classes of layers has no entry for tensors of experts.


def specialize(layer: nn.Module, behaviour: type) -> None:
    """Let `layer` have the methods of `behaviour`. super() in them calls the methods of the layer's class."""
    kind: Any = type(layer)
    layer.__class__ = _specialized(kind, behaviour)


@functools.cache
def _specialized(kind: Any, behaviour: type) -> Any:
    """Make one class for all layers of the class `kind`, so that they share a compiled graph."""
    return type(f"{behaviour.__name__}{kind.__name__}", (behaviour, kind), {"__module__": kind.__module__})
