"""Liger on a CPU: plain torch in place of its kernels, models of every family, and what `auto` decides."""

from __future__ import annotations

import torch
from support.architectures import (
    CPU,
    FAMILIES,
    SIZES,
    facts_of,
    random_model,
)
from torch.nn import functional as F

from fxtune.models.load import ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.liger import technique
from fxtune.techniques.liger.technique import OPERATIONS, Liger
from fxtune.techniques.pipeline import Pipeline

OTHERS = {
    "granite": {"model_type": "granite", **SIZES},
    "smollm3": {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 0]},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "olmo3": {
        "model_type": "olmo3",
        **SIZES,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "ministral": {"model_type": "ministral", **SIZES, "head_dim": 16},
    "starcoder2": {"model_type": "starcoder2", **SIZES},
    "phi_qk": {**FAMILIES["phi"], "qk_layernorm": True},
    "phi3_partial": {
        **FAMILIES["phi3"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mistral_gelu": {**FAMILIES["mistral"], "hidden_act": "gelu_pytorch_tanh"},
}
EVERY = {**FAMILIES, **OTHERS}
GPU = dict(device="cuda", device_name="H200", capability=(9, 0), packages={"liger-kernel": "0.8.5", "torch": "2.11"})


def architecture(family: str) -> ModelConfig:
    model = random_model("llama")
    model.architecture = dict(EVERY[family])
    return model


def resolved(known, family="llama", **options) -> tuple[Liger, str]:
    liger = Liger(enabled=True, **options)
    note = liger.resolve(facts_of(architecture(family), **known))
    return liger, note or ""


def kernel_named(kernel):
    """Replaces an autograd.Function by a plain function under the kernel's name."""

    def wrap(function):
        def apply(*arguments):
            with torch.profiler.record_function(kernel):
                return function(*arguments)

        return type(function.__name__, (), {"apply": staticmethod(apply)})

    return wrap


@kernel_named("_rms_norm_forward_kernel")
def rms_norm(x, weight, eps, offset, casting, in_place, row_mode):
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (
        (offset + weight) * exact.to(x.dtype)
        if casting == "llama"
        else (exact * (offset + weight.float())).to(x.dtype)
    )


def layer_norm(x, weight, bias, eps, impl, mode):
    with torch.profiler.record_function("_layer_norm_forward_kernel"):
        return F.layer_norm(x, weight.shape, weight, bias, eps)


@kernel_named("_swiglu_forward_kernel")
def swiglu(gate, up, gate_multiplier, down_multiplier):
    assert gate_multiplier == down_multiplier == 1.0
    return F.silu(gate) * up


@kernel_named("_geglu_tanh_forward_kernel")
def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def operations(model: ModelConfig) -> list[str]:
    """All of Liger's operations that this model has, in order."""
    return [
        name for name in OPERATIONS if name in technique._operations(load_config(model).get_text_config().to_dict())
    ]


def all_on(model: ModelConfig, kernels: list[str] | None = None) -> Liger:
    return Liger(enabled=True, kernels=operations(model) if kernels is None else kernels)


def with_liger(model: ModelConfig, kernels: list[str] | None = None):
    """The module of the built model and its pipeline, without check(), which would require a GPU."""
    pipeline = Pipeline()
    pipeline.liger = all_on(model, kernels)
    return assemble(pipeline, model, load_config(model), CPU, 0).module, pipeline
