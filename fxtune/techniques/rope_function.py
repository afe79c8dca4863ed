"""Replaces `apply_rotary_pos_emb` for a single model of transformers.

An attention of transformers calls that function by its name in its own Python module, where a replacement would change
every model of the process. So the model's attention gets a copy of its forward, with globals of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxtune.errors import ConfigError

ROPE_FUNCTION = "apply_rotary_pos_emb"


def keep_unrotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Replaces apply_rotary_pos_emb where q and k are already rotated."""
    return q, k


@functools.cache
def with_rope_function(forward: Any, function: Callable[..., Any], owner: str) -> Any:
    """A copy of `forward`, an attention's method, that calls `function` in place of apply_rotary_pos_emb.

    Raises ConfigError if `forward` does not call it. `owner`: the attention's name for the message.
    """
    # transformers 5.24 wraps forwards to rename keywords (`deprecate_kwarg`); layers pass the new names.
    forward = inspect.unwrap(forward)
    if ROPE_FUNCTION not in forward.__code__.co_names:
        raise ConfigError(
            f"techniques.liger.rope: {owner} of this transformers does not call {ROPE_FUNCTION}. Set it to off."
        )
    # The globals are those of a registered module, because torch.compile looks up a function's globals by their
    # module's name.
    module = types.ModuleType(f"{forward.__module__}__{getattr(function, '__name__', 'other')}_{id(function):x}")
    module.__dict__.update({**forward.__globals__, ROPE_FUNCTION: function, "__name__": module.__name__})
    module = sys.modules.setdefault(module.__name__, module)
    copy = types.FunctionType(
        forward.__code__, module.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
