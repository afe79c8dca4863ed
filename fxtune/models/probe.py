"""The answers of a model to a few fixed tokens, and the distance of two answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fxtune.models.kinds.known import kind_of
from fxtune.models.shards import MARK
from fxtune.models.structure import hooked, observing, outputs

Distance = Callable[[torch.Tensor, torch.Tensor], float]
TOKENS = 8
"""Number of tokens in the probe."""


@dataclass(frozen=True)
class Answer:
    """The logits of a model for the probe, or its scores."""

    logits: torch.Tensor
    noise: float
    """The distance, kl() by default, between these logits and the logits after one rounding error in each number of
    the embedded tokens. With random weights, and over fp8, it grows with each layer."""

    @staticmethod
    def of(model: Any, logits: torch.Tensor | None = None, distance: Distance | None = None) -> Answer:
        """`logits`: the result of probe_logits(), if it is known."""
        logits = probe_logits(model) if logits is None else logits
        return Answer(logits, (distance or kl)(logits, probe_logits(model, nudge=torch.finfo(logits.dtype).eps)))


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean over tokens of the Kullback-Leibler divergence of `other` from `one`, in nats. Both are logits. One
    number a token, such as a reward, is taken as the logit of yes against no."""
    if one.shape[-1] == 1:
        one, other = (F.pad(scores, (0, 1)) for scores in (one, other))
    wanted, seen = (logits.double().log_softmax(-1) for logits in (one, other.to(one.device)))
    return (wanted.exp() * (wanted - seen)).sum(-1).mean().item()


def probe_logits(model: Any, nudge: float = 0.0) -> torch.Tensor:
    """The model's logits [1, 8, vocabulary], or scores [1, 8, 1], for eight fixed tokens, under the active autocast.
    So few logits can be kept for a later check. A model that reads images gives logits of eight more tokens, from a
    row with an image.

    `nudge`: the relative change of each number of the embedded tokens.
    """
    device = next(model.parameters()).device
    row = kind_of(model.config).small_row(model, TOKENS, spread=False)
    # Without a mask, transformers would look for documents in the positions, but positions on the meta device have no
    # values.
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device) if device.type == "meta" else None

    def moved(_: Any, __: Any, states: torch.Tensor) -> torch.Tensor:
        up = torch.arange(states.shape[-1], device=device) % 2 * 2 - 1
        return states * (1 + nudge * up).to(states.dtype)

    experts = model.get_experts_implementation() if mask is not None else None
    if experts is not None:
        # On the meta device torch's grouped products take only bfloat16.
        model.set_experts_implementation("batched_mm")
    stored = [name for name, buffer in model.named_buffers() if mask is not None and hasattr(buffer, MARK)]
    try:
        with (
            hooked([model.get_input_embeddings().register_forward_hook(moved)]),
            _emptied(model, stored),
            observing(model),
        ):
            logits = outputs(model, **row, attention_mask=mask, use_cache=False)
            images = kind_of(model.config).images
            if images and (with_image := images.probe(model)):
                logits = torch.cat([logits, outputs(model, **with_image, use_cache=False)[:, -TOKENS:]], 1)
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)
    return logits


@contextmanager
def _emptied(model: Any, buffers: Sequence[str]) -> Iterator[None]:
    """A context in which the named buffers, such as the biases of routers, have no memory, like the parameters."""
    places = [(model.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in buffers)]
    filled = [module._buffers[leaf] for module, leaf in places]
    try:
        for (module, leaf), buffer in zip(places, filled, strict=True):
            module._buffers[leaf] = buffer.to("meta")
        yield
    finally:
        for (module, leaf), buffer in zip(places, filled, strict=True):
            module._buffers[leaf] = buffer


def relative_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference of two tensors, divided by the norm of `other`."""
    return ((one.float() - other.float()).norm() / other.float().norm()).item()
