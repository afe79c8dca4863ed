"""FLOPs of the matmuls of modules."""

from __future__ import annotations


def weight_flops(trained: bool, forward_passes: int, backward: bool = True) -> float:
    """FLOPs of a weight for each row of its input: forward, gradient of the input, gradient of the weight.
    `forward_passes`: additional passes without gradients. `backward`: whether the input has a gradient."""
    return 2.0 * (1 + forward_passes + trained + backward)
