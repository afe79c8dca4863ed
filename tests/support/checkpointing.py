"""Models with activation checkpointing, their gradients, and the evidence that it acted."""

from __future__ import annotations

import torch
from torch import nn

from fxtune.facts.options import Policy
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.pipeline import Pipeline, make_probe

NARROW = {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]}


def checkpointed(pipeline: Pipeline, **options) -> Pipeline:
    pipeline.checkpointing = Checkpointing(enabled=True, **options)
    return pipeline


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # dropout
    model.train()
    model.zero_grad()
    model(**make_probe(model)).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def with_random_lora_b(model):
    """A new adapter has B = 0, and so no gradient for A."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def seen(pipeline: Pipeline, model: PreparedModel | nn.Module) -> str:
    """What checkpointing's evidence says, all of which must hold."""
    prepared = model if isinstance(model, PreparedModel) else PreparedModel(model)
    evidence = list(pipeline.checkpointing.verify(prepared, make_probe(prepared.module)))
    assert all(one.acted for one in evidence), evidence
    return "\n".join(f"{one.asked} | {one.observed}" for one in evidence)


def close(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], limit: float) -> bool:
    assert ours.keys() == plain.keys()
    return all((ours[name] - plain[name]).norm() <= limit * plain[name].norm() for name in plain)


def traced(model):
    for layer in decoder_layers(model):
        layer.forward = torch.compile(
            layer.forward, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False
        )
    return model
