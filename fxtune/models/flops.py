"""How FLOPs are counted: the products of weights and their passes, as in tracking/throughput.py."""

from __future__ import annotations

from torch import nn

ATTENTION_PASSES = 3.5
"""FLOPs of attention, forward and backward, as a multiple of its forward pass: FlashAttention computes the scores
again."""


def matmul_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a module that multiplies by its own matrix; None for others.

    The module is recognized by its attributes, so quantized and fused linears count with their logical size. Of a
    wrapper with the same attributes, such as PEFT's, only the inner linear counts.
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
    """FLOPs of a weight for each row of its input: forward, gradient of the input, gradient of the weight.
    `forward_passes`: additional passes without gradients. `backward`: whether the input has a gradient."""
    return 2.0 * (1 + forward_passes + trained + backward)
