"""Compiled models, and rows for them."""

from __future__ import annotations

import torch
from support.architectures import built, lora, random_model

from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.compile.technique import Compile


def compiled(family="llama", architecture=None, **options):
    pipeline = lora()
    pipeline.compile = Compile(enabled=True, **options)
    model = built(pipeline, random_model(family, **architecture or {}))
    return pipeline.compile, model.train()


def row(model, length=64, document=20):
    """One packed row of documents of this many tokens."""
    ids = (torch.arange(length) * 31 + document) % 128
    starts = torch.arange(0, length + document, document).clamp(max=length).int()
    return model_inputs(model, ids[None], (torch.arange(length) % document)[None], starts)


def learn(model, given):
    model.zero_grad()
    model(**given).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
