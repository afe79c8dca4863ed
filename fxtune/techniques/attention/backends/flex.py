"""torch's flex attention: the compiler writes a kernel for a block mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxtune.system.files.compiler_cache import use_cache_folder
from fxtune.techniques.attention.backends.backend import Backend


class _Flex(Backend):
    def prepare(self) -> None:
        use_cache_folder()  # for the kernel that transformers compiles

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count calls of transformers' function. In eager mode the function is no operator of the profiler."""
        from transformers import AttentionInterface

        original = AttentionInterface()[self.implementation]
        count = [0]

        def counted(*given: Any, **options: Any) -> Any:
            count[0] += 1
            return original(*given, **options)

        AttentionInterface.register(self.implementation, counted)
        try:
            yield count
        finally:
            AttentionInterface.register(self.implementation, original)


FLEX = _Flex(
    "flex",
    "flex_attention",
    "torch's compiler, for a block mask",
    operators=("higher_order.flex_attention",),
    half=False,
    head_dim=0,
    softcap=True,
    sinks=True,
    pieces=False,
    bidirectional=False,
    flag="_supports_flex_attn",
)
