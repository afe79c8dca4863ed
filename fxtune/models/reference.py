"""The reference of preference objectives: the model at the start of its run. Its passes have no gradient.

A run with adapters copies the adapters' weights once, before the first step, and each pass of the reference uses the
copies instead of the trained weights. So the passes of policy and reference run the same kernels, and rounding changes
both results in the same way. A reference with its adapters switched off would not be slower, but would compute other
products: with random weights in bfloat16 the first loss of an 8B model was then 0.77 instead of ln 2. Full fine-tuning
would need a second copy of all weights. Instead, the reference's log-probabilities are stored before the first step
(training/data/stored_numbers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxtune.models.prepared import PreparedModel
from fxtune.upstream import torch as upstream


class ReferenceModel:
    """The reference of `prepared`, made before the first step. `keeps_start`: the reference uses copies of the trained
    weights. False: the reference is the model without adapters."""

    def __init__(self, prepared: PreparedModel, keeps_start: bool) -> None:
        self.module = prepared.module
        self.trained: list[torch.Tensor] = []
        if keeps_start:
            self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.trained]

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the model computes as the reference, without gradient and dropout. Nothing here waits for
        the device."""
        was_training = self.module.training
        with torch.no_grad(), self._start_values() if self.start else self.module.disable_adapter():
            self.module.eval()  # needed also without dropout: the layers are compiled for this mode
            try:
                yield
            finally:
                self.module.train(was_training)

    @contextmanager
    def _start_values(self) -> Iterator[None]:
        """A context with the copies in place of the trained weights. Autocast keeps casts of trained weights until its
        context ends. So each change of the values clears these casts; otherwise policy and reference would compute
        with the same weights."""
        current = [parameter.detach().clone() for parameter in self.trained]
        upstream.foreach("copy_", self.trained, self.start)
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            upstream.foreach("copy_", self.trained, current)
            torch.clear_autocast_cache()
