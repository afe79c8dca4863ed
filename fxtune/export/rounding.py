"""How much of an adapter's update survives the rounding of a merge.

A merge adds an update D = scaling * B A to stored weights W, and rounds the sum to the dtype of W. W lies on the grid
of this dtype. So a number of D below half a step of the grid is lost: in bfloat16 half a step is 0.2 to 0.4 % of the
weight, between the 16 values of nf4 it is 4 % or more of the largest weight of a block. A merge into weights of 4 bits
loses 98 % of an update of 1 % of the weights (peft#2321, #2368). So fxtune merges into 16 or 32 bits only, also the
adapters of a run with techniques.quantize. But a short or careful training may change weights by less than bfloat16
can store. Of updates of 0.1, 0.2, 0.3 and 0.5 % of normally distributed weights 53, 82, 93 and 99 % survive.

    survives = sum <M - W, D> / sum <D, D>      M: merged weights; 1: the whole update on average; 0: nothing

The sums run over all weights with adapters, in float32 from the files.
"""

from __future__ import annotations

import torch

from fxtune.export.weights import Mismatch

LEAST = 0.9
"""The smallest share of the update with which a merged model counts."""


class LostUpdateError(Mismatch):
    """Rounding would lose a part of the update."""


class Survival:
    """The sums over the weights that were added so far."""

    def __init__(self) -> None:
        self._kept, self._whole, self._dtype = 0.0, 0.0, ""

    def add(self, start: torch.Tensor, wanted: torch.Tensor, merged: torch.Tensor) -> None:
        """Add a weight: as the base stores it, with the update in float32, and as the merge has written it."""
        update = wanted.float() - start.float()
        self._kept += float(((merged.float() - start.float()) * update).sum(dtype=torch.float64))
        self._whole += float(update.square().sum(dtype=torch.float64))
        self._dtype = str(merged.dtype).removeprefix("torch.")

    def share(self) -> float | None:
        """The share that survives; None without an update. Raises LostUpdateError if it is below LEAST."""
        if not self._whole:
            return None
        share = self._kept / self._whole
        if share < LEAST:
            raise LostUpdateError(
                f"The update of this adapter is so small that only {share:.0%} of it would survive the rounding to "
                f"{self._dtype} in which the base is stored (needed: {LEAST:.0%}). Nothing was written. Use the "
                "adapter beside its base, as peft and vLLM can, or train longer or with a larger optimizer.lr."
            )
        return share
