"""Counts the FLOPs of weights: their products, and the passes that compute them, as in tracking/throughput.py."""

from __future__ import annotations

from torch import nn

ATTENTION_PASSES = 3.5
"""FLOPs of attention's forward and backward pass, divided by the FLOPs of its forward pass. FlashAttention computes
the scores again in the backward pass."""


def matmul_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out): the sizes of a module that multiplies by its own matrix; None for other modules.

    The module is recognized by its attributes, so quantized and fused linears count with their logical size. If a
    wrapper such as PEFT's has the same attributes, only the linear inside it counts.
    """

    def sizes(candidate: nn.Module) -> tuple[int, int] | None:
        names = ("nx", "nf") if type(candidate).__name__ == "Conv1D" else ("in_features", "out_features")  # GPT-2
        rows, columns = (getattr(candidate, name, None) for name in names)
        if isinstance(getattr(candidate, "base_layer", None), nn.Embedding):  # PEFT's embedding
            return None
        return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None

    inner = any(sizes(child) for child in module.modules() if child is not module)
    return None if inner else sizes(module)


def weight_flops(trained: bool, forward_passes: int, backward: bool = True) -> float:
    """FLOPs of one weight for each row of its input: for the forward pass, the input's gradient and the weight's
    gradient. `forward_passes`: additional passes without gradients. `backward`: whether the input has a gradient."""
    return 2.0 * (1 + forward_passes + trained + backward)
