"""The RoPE of one model is replaced, not that of every model in the process."""

from __future__ import annotations

import pytest

from fxtune.errors import ConfigError
from fxtune.kernels.rotary import apply_rotary
from fxtune.techniques.rope_function import with_rope_function


def test_attention_without_a_rope_function_is_refused():
    def forward(self, x):
        return x

    with pytest.raises(
        ConfigError, match=r"techniques.liger.rope: Odd of this transformers does not call apply_rotary_pos_emb"
    ):
        with_rope_function(forward, apply_rotary, "Odd")
