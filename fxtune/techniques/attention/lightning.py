"""Runs MiniMax's lightning attention (arXiv 2501.08313) as fxtune's operator: linear attention without a delta rule,
in which each head's state decays by a constant.

transformers computes it inside the forward of a layer's attention, so there is no function to replace as in linear.py.
The attention gets a forward of fxtune, which calls the attention's own modules. So adapters and quantized weights act.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.kernels.linear_attention import linear_attention
from fxtune.techniques.attention.linear import documents

PARTS = ("qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "slope_rate", "layer_idx", "num_hidden_layers")


def serves(part: nn.Module) -> bool:
    """Whether `part` of a layer is lightning attention."""
    return all(hasattr(part, name) for name in PARTS)


def attach(part: Any) -> None:
    """Let `part` call the operator, in place."""
    # A tensor, because a number would compile each layer again.
    part.depth = torch.tensor(1 - part.layer_idx / (part.num_hidden_layers - 1 + 1e-5) + 1e-5)
    part.forward = types.MethodType(_forward, part)


def _forward(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
    """hidden_states [rows, length, d]. The second result is a state for a cache."""
    assert not args, "lightning attention takes keywords only"
    if given.get("cache") is not None or given.get("past_key_values") is not None:
        return type(self).forward(self, hidden_states, **given)
    heads, qkv = self.num_attention_heads, self.act_fn(self.qkv_proj(hidden_states))
    mask = given.get("attention_mask")
    if mask is not None:  # [rows, length], false for padding
        qkv = (qkv * mask.unsqueeze(-1)).to(hidden_states.dtype)
    q, k, v = qkv.flatten(0, 1).unflatten(-1, (heads, -1)).chunk(3, -1)
    # The buffer `slope_rate` has these numbers in the dtype of the weights.
    slopes = self.depth * torch.exp2(-8 / heads * torch.arange(1, heads + 1, device=v.device))
    out = linear_attention(q, k, v, -slopes.expand(len(v), -1), None, 1.0, *documents(hidden_states, given))
    out = self.norm(out.reshape(*hidden_states.shape[:2], -1))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None
