"""The reference of preference objectives: the model as it was when its run started, for passes without gradient.

A run with new adapters starts from its base, so its reference is the model with the adapters off. A run that continues
an adapter starts from that adapter: its trained weights are copied once, and each pass puts the copies in their place.
Neither needs a second model in memory. Full fine-tuning would need one, so there the reference's log-probabilities are
stored before the first step (training/stored_reference.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

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
        self.draws = _has_dropout(self.module)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model be its reference: without gradient and dropout. Nothing here waits for the device."""
        was_training = self.module.training
        with torch.no_grad():
            if self.draws:
                self.module.eval()
            try:
                if self.start:
                    with self._start_values():
                        yield
                else:
                    with self.module.disable_adapter():
                        yield
            finally:
                if self.draws:
                    self.module.train(was_training)

    @contextmanager
    def _start_values(self) -> Iterator[None]:
        now = [parameter.detach().clone() for parameter in self.trained]
        upstream.foreach("copy_", self.trained, self.start)
        try:
            yield
        finally:
            upstream.foreach("copy_", self.trained, now)


def _has_dropout(model: nn.Module) -> bool:
    text = model.config.get_text_config()  # type: ignore[operator, union-attr]
    rates = [getattr(text, name, 0.0) or 0.0 for name in ("attention_dropout", "attn_pdrop")]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(rate > 0 for rate in rates)
