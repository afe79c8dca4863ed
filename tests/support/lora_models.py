"""Builds a model with peft's adapters and with fused adapters, and computes its loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.architectures import facts_of, lora, prepared_model, random_model

from fxtune.facts.options import Switch, WeightFormat
from fxtune.models.load import ModelConfig
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.pipeline import Pipeline, make_probe

EVERY = {"attention": 2, "mlp": 2, "linear": 2}
OPERATORS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "mistral_sliding", "gemma", "gemma2", "gemma3"), EVERY),
    "phi": {"attention": 2, "linear": 6},
    "phi3": {"linear": 8},
}
"""Number of fused operators in a model with two layers, by family."""
LossAndGradients = tuple[torch.Tensor, dict[str, torch.Tensor]]


def lora_pair(model: ModelConfig, *given: Any, **options: Any) -> list[Any]:
    """The modules of prepared_pair()."""
    return [prepared.module for prepared in prepared_pair(model, *given, **options)]


def prepared_pair(
    model: ModelConfig,
    dtype: str = "float32",
    prepare: Callable[[Pipeline], None] = lambda pipeline: None,
    **options: Any,
) -> list[PreparedModel]:
    """The same model and adapters, with B not zero, in peft and fused. `options` are keys of techniques.lora."""
    found = []
    for fused in (Switch.off, Switch.on):
        pipeline = lora(fused=fused, **options)
        prepare(pipeline)
        made = prepared_model(pipeline, model, dtype=dtype)
        for name, parameter in made.module.named_parameters():
            if "bias" in name:  # biases of the base, which are zero in a random model
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
            if "lora_B" in name:
                parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        found.append(made)
    return found


def quantized_in(kind: WeightFormat) -> Callable[[Pipeline], None]:
    """A function that sets up a pipeline for a quantized base."""

    def prepare(pipeline: Pipeline) -> None:
        pipeline.quantize.enabled, pipeline.quantize.type = True, kind
        pipeline.quantize.resolve(facts_of(random_model("llama")))

    return prepare


def loss_and_gradients(model: Any, **autocast: Any) -> LossAndGradients:
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", **(autocast or {"enabled": False})):
        loss = model(**make_probe(model)).logits.float().logsumexp(-1).mean()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def require_close(found: LossAndGradients, wanted: LossAndGradients, tolerance: float) -> None:
    """Assert equal losses and gradients. `tolerance` is relative to the loss and to each gradient's norm."""
    (loss, gradients), (their_loss, theirs) = found, wanted
    assert abs(loss - their_loss) <= tolerance * abs(their_loss)
    assert list(gradients) == list(theirs)
    for name, gradient in gradients.items():
        assert gradient.dtype is theirs[name].dtype
        assert (gradient - theirs[name]).norm() <= tolerance * theirs[name].norm(), name
