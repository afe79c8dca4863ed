"""Activation checkpointing: recompute a layer in the backward pass in place of keeping what it produced.

Memory for activations falls from everything a layer computes to its input; the price is one more forward of each
checkpointed layer, a third of a step's time when all are. `every=2` pays half of that for half of the saving.

Layers are wrapped here, not by transformers' own switch: that one changed its name and its meaning within the versions we
serve, acts only in training mode, and needs care with frozen embeddings. The non-reentrant form of torch needs no input
that requires a gradient, keeps the random state (so dropout repeats itself in the recomputation) and stops recomputing as
soon as it has what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune.technique import Evidence, Technique, decoder_layers, observed
from fxtune.world import Facts, World


@dataclass
class Checkpointing(Technique):
    every: int = 1
    """Checkpoint one decoder layer in this many: 1 is all of them, 2 every other one."""

    def check(self, facts: Facts) -> Iterator[str]:
        config = facts.model.get("text_config") or facts.model
        layers = config.get("num_hidden_layers")
        if self.every < 1 or (layers and self.every > layers):
            yield f"every: {self.every} must be at least 1 and at most the model's {layers or ''} layers."

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        for layer in decoder_layers(model)[:: self.every]:
            layer.forward = partial(_checkpointed, layer.forward)
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count how often each layer's first norm or linear runs in one forward and backward: twice where it is recomputed."""
        layers = decoder_layers(model)
        calls = [0] * len(layers)

        def count(index: int, *_: Any) -> None:
            calls[index] += 1

        leaves = [next(module for module in layer.modules() if not list(module.children())) for layer in layers]
        hooks = [leaf.register_forward_pre_hook(partial(count, index)) for index, leaf in enumerate(leaves)]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            with observed(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                logits = model(**probe).logits
                torch.autograd.grad(logits.float().mean(), trained[:1])
        finally:
            for hook in hooks:
                hook.remove()
        # Layers before the first trained parameter get no backward pass, so nothing is recomputed there.
        inside = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
        owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
        first = 0 if any(id(parameter) not in owned for parameter in trained[:1]) else inside.index(True)
        wanted = [1 + (index % self.every == 0 and index >= first) for index in range(len(layers))]
        yield Evidence("checkpointing", f"{len(layers[:: self.every])} of {len(layers)} layers recomputed",
                       f"{sum(seen > 1 for seen in calls)} of {len(layers)} layers ran twice in one forward and backward",
                       calls == wanted)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # evaluation and generation keep nothing, so there is nothing to save
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
