"""How much of an adapter's update survives the rounding of a merge.

A merge adds an update D = scaling * B A to stored weights W, and rounds the sum to the dtype of W. An entry
of D below half a rounding step is lost. In bfloat16 half a step is 0.2 to 0.4 % of the weight. Between the 16 values
of nf4 half a step is 4 % or more of the largest weight of a block: a merge into 4-bit weights loses 98 % of an update
of 1 % of the weights (peft#2321, #2368). So fxtune merges into 16 or 32 bits only, also in runs with
techniques.quantize. A short or careful training may change weights by less than bfloat16 can store: 53 % of an update
of 0.1 % of the weights survive. Such a merge is made again in float32 (outputs/merge.py).

    survives = sum <M - W, D> / sum <D, D>      M: merged weights; 1: the whole update on average; 0: nothing

The sums run over all weights with adapters, in float32 from the files. A large update of one weight would hide the
losses of other weights in these sums, so the mean of the weights' shares decides.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from fxtune.export.weights import Mismatch

LEAST = 0.9
"""The smallest mean share of a valid merge."""


class LostUpdateError(Mismatch):
    """Rounding would lose a part of the update."""


class Survival:
    """The two sums of each weight so far."""

    def __init__(self) -> None:
        self._rounds = False
        self._sums = dict[str, tuple[float, float]]()
        """{weight: (<M - W, D>, <D, D>)}."""

    def add(self, name: str, start: torch.Tensor, wanted: torch.Tensor, merged: torch.Tensor) -> None:
        """Add a weight. `start`: in the base; `wanted`: plus the update, in float32; `merged`: in the merged files."""
        update = wanted.float() - start.float()
        self._rounds |= merged.itemsize < update.itemsize
        if whole := float(update.square().sum(dtype=torch.float64)):
            self._sums[name] = float(((merged.float() - start.float()) * update).sum(dtype=torch.float64)), whole

    def shares(self) -> dict[str, Any]:
        """Proof.survives and Proof.weakest (models/proof.py); empty without an update. Raises LostUpdateError if a
        weight has less than 32 bits, and the mean share is below LEAST or NaN."""
        if not self._sums:
            return {}
        shares = {name: kept / whole for name, (kept, whole) in self._sums.items()}
        if self._rounds and not (mean := fmean(shares.values())) >= LEAST:
            raise LostUpdateError(f"only {mean:.0%} of the adapter's update would survive the rounding")
        kept, whole = map(sum, zip(*self._sums.values(), strict=True))
        share, worst = min((share, name) for name, share in shares.items())
        return {"survives": kept / whole, "weakest": f"{worst}: {share:.1%}"}
