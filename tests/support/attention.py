"""Attention backends, and machines that have them."""

from __future__ import annotations

from support.architectures import CPU, FAMILIES, random_model, tiny_model

from fxtune.models.load import load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline


def using(backend: str) -> Pipeline:
    pipeline = Pipeline()
    pipeline.attention.backend = backend
    return pipeline


def unchecked(backend: str, family: str, **changes):
    """A model with a backend that check() refuses on a CPU. Its operator has a reference implementation there."""
    model = random_model(family, **changes) if family in FAMILIES else tiny_model(family)
    return assemble(using(backend), model, load_config(model), CPU, 0).module
