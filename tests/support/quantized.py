"""Linears quantized by each kind and library."""

from __future__ import annotations

import pytest
from support.architectures import lora

from fxtune.facts.options import ComputeDtype, Library, WeightFormat
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.technique import Quantize

KINDS = {
    "nf4": ("nf4", "bitsandbytes", True),
    "nf4_single": ("nf4", "bitsandbytes", False),
    "int8": ("int8", "bitsandbytes", True),
    "nf4_torchao": ("nf4", "torchao", True),
    "int8_torchao": ("int8", "torchao", True),
}
kinds = pytest.mark.parametrize("kind", KINDS)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""Weights of 16,384 elements and more, as torchao's nf4 needs."""


def qlora(
    kind: str = "nf4", compute: ComputeDtype = ComputeDtype.float32, skip: tuple[str, ...] = (), **options
) -> Pipeline:
    pipeline = lora(**options)
    name, library, double = KINDS[kind]
    pipeline.quantize = Quantize(True, WeightFormat(name), Library(library), double, compute, list(skip))
    return pipeline
