"""The attention backends that a recipe may name. All that fxtune knows about a backend is in its file."""

from __future__ import annotations

from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.attention.backends.cudnn import CUDNN
from fxtune.techniques.attention.backends.eager import EAGER
from fxtune.techniques.attention.backends.flash2 import FLASH2
from fxtune.techniques.attention.backends.flash3 import FLASH3
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.flex import FLEX
from fxtune.techniques.attention.backends.hub import HUB, hub
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS, ON_CPU, SDPA

BACKENDS = {
    backend.name: backend
    for backend in (
        FLASH4,
        FLASH3,
        CUDNN,
        FLASH2,
        SDPA,
        FLEX,
        EAGER,
    )
}
"""The fastest first."""
ALL = (*BACKENDS.values(), BY_DOCUMENTS, ON_CPU)
"""With what runs in sdpa's place."""


def backend_of(name: str) -> Backend | None:
    """The backend that a recipe names; None for `auto` and for unknown names."""
    return hub(name) if name.startswith(HUB) else BACKENDS.get(name)


def called(implementation: str) -> Backend:
    """The backend with this name in transformers; a name that no backend has is a kernel of the hub."""
    for backend in ALL:
        if backend.implementation == implementation:
            return backend
    return hub(HUB + implementation)
