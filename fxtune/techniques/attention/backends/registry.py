"""The attention backends that a recipe may name. A backend's file has all that fxtune knows about it."""

from __future__ import annotations

from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.attention.backends.cudnn import CUDNN
from fxtune.techniques.attention.backends.eager import EAGER
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.flash_packages import FLASH2, FLASH3
from fxtune.techniques.attention.backends.flex import FLEX
from fxtune.techniques.attention.backends.hub import HUB, hub
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS, ON_CPU, SDPA

BACKENDS = {backend.name: backend for backend in (FLASH4, FLASH3, CUDNN, FLASH2, SDPA, FLEX, EAGER)}
"""Name in a recipe -> backend, the fastest backend first."""
ALL = (*BACKENDS.values(), BY_DOCUMENTS, ON_CPU)
"""BACKENDS, and the two backends that may run in place of sdpa."""


def backend_of(name: str) -> Backend | None:
    """The backend that a recipe names; None for `auto` and for unknown names."""
    return hub(name) if name.startswith(HUB) else BACKENDS.get(name)


def called(implementation: str) -> Backend:
    """The backend with this name in transformers. A name that no backend has is the name of a kernel on the hub."""
    for backend in ALL:
        if backend.implementation == implementation:
            return backend
    return hub(HUB + implementation)
