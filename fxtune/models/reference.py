"""The reference of preference objectives: the model as it was when its run started, for passes without gradient.

A run with adapters copies their weights once, and each pass of the reference puts the copies in their place: new
adapters, which start without an effect, and continued ones alike. Both passes then run the same kernels, so that
rounding moves both results in the same way. With the adapters off the products differ: an 8B of
random weights in bfloat16 began at a loss of 0.77 in place of ln 2, at the same speed. Full fine-tuning would need a
second copy of all weights, so there the reference's log-probabilities are stored before the first step
(training/stored_reference.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxtune.models.prepared import PreparedModel
from fxtune.upstream import torch as upstream


class ReferenceModel:
    """`keeps_start`: the reference is the model with its trained weights as they are now, in copies. False: the model
    without adapters."""

    def __init__(self, prepared: PreparedModel, keeps_start: bool) -> None:
        self.module = prepared.module
        self.trained: list[torch.Tensor] = []
        if keeps_start:
            self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.trained]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model be its reference: without gradient and dropout. Nothing here waits for the device."""
        was_training = self.module.training
        with torch.no_grad(), self._start_values() if self.start else self.module.disable_adapter():
            self.module.eval()  # also without dropout: an evaluation has compiled the layers for this mode
            try:
                yield
            finally:
                self.module.train(was_training)

    @contextmanager
    def _start_values(self) -> Iterator[None]:
        now = [parameter.detach().clone() for parameter in self.trained]
        upstream.foreach("copy_", self.trained, self.start)
        try:
            yield
        finally:
            upstream.foreach("copy_", self.trained, now)
