"""Linears quantized by each kind."""

from __future__ import annotations

import pytest
from support.architectures import lora

from fxtune.facts.options import DType, WeightFormat
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.technique import Quantize

KINDS = ("nf4", "int8")
kinds = pytest.mark.parametrize("kind", KINDS)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""A model whose linears all have several blocks of nf4's scales."""


def qlora(kind: str = "nf4", compute: DType = DType.float32, skip: tuple[str, ...] = (), **options) -> Pipeline:
    pipeline = lora(**options)
    pipeline.quantize = Quantize(True, WeightFormat(kind), compute, list(skip))
    return pipeline
