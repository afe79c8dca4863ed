"""The tiled MLP: the gradients of an untiled one, computed twice, dropout and autocast repeated."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from support.architectures import built, lora, random_model
from support.cases import slow_but
from support.checkpointing import checkpointed, close, gradients, seen, with_random_lora_b

from fxtune.facts.options import Policy, Switch
from fxtune.models.structure import decoder_layers
from fxtune.techniques.pipeline import Pipeline, make_probe

TILED = {
    "tiles": {"mlp_tiles": 3},
    "selective_tiles": {"policy": Policy.selective, "mlp_tiles": 5},
    "tiles_alone": {"policy": Policy.none, "mlp_tiles": 2},
    "a_token_a_tile": {"mlp_tiles": 24},
}


@pytest.mark.parametrize(
    ("pipelines", "family", "how"),
    slow_but(
        itertools.product((lora, Pipeline), ("llama", "gemma2", "phi3"), TILED),
        *((lora, "llama", how) for how in TILED),
        (Pipeline, "gemma2", "tiles"),
        (lora, "phi3", "selective_tiles"),
    ),
)
def test_tiled_mlp_gives_the_gradients_of_an_untiled_mlp(pipelines, family, how):
    options = TILED[how]
    pipeline = checkpointed(pipelines(), **options)
    model = with_random_lora_b(built(pipeline, random_model(family)))
    assert f"each MLP in {options['mlp_tiles']} tiles (of the probe's 24 tokens)" in seen(pipeline, model)
    plain = gradients(with_random_lora_b(built(pipelines(), random_model(family))))
    assert close(gradients(model), plain, 1e-5)


def test_tiled_mlp_of_a_checkpointed_layer_runs_twice():
    pipeline = checkpointed(lora(), mlp_tiles=4)
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "aten.mm (gate_proj, up_proj) 16+16, aten.mm (down_proj) 8+8" in told  # 2 layers x 4 tiles


@pytest.mark.parametrize("fused", [Switch.off, Switch.on])
@pytest.mark.parametrize("policy", [Policy.none, Policy.full])  # torch's selective checkpoint itself refuses it
def test_retained_graph_with_tiles_gives_its_gradients_again_and_is_then_freed(policy, fused):
    kept = []

    def keep(module, given):
        kept.append(weakref.ref(given[0]))

    model = with_random_lora_b(
        built(
            checkpointed(lora(dropout=0.3 * (fused is Switch.off), fused=fused), policy=policy, mlp_tiles=3),
            random_model("llama"),
        )
    ).train()
    once = gradients(model)
    model.zero_grad()
    for layer in decoder_layers(model):
        layer.mlp.register_forward_pre_hook(keep)
    torch.manual_seed(0)
    loss = model(**make_probe(model)).logits.logsumexp(-1).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    twice = {name: parameter.grad / 2 for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert close(twice, once, 1e-6)
    loss.backward()
    gc.collect()
    assert kept, "the hook was called"
    assert not any(reference() is not None for reference in kept), (
        "what a graph kept lives no longer than torch keeps it"
    )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_recomputed_tiles_repeat_dropout_and_autocast():
    pipeline = checkpointed(lora(dropout=0.5), mlp_tiles=2)
    model = with_random_lora_b(built(pipeline, random_model("llama")))
    with torch.autocast("cpu", torch.bfloat16):
        first, again = gradients(model), gradients(model)
    assert all(torch.equal(first[name], again[name]) for name in first)
    mlp = decoder_layers(model)[0].mlp.train()
    hidden = torch.randn(1, 8, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(5)
        out = mlp(hidden)
    out.float().sum().backward()
    torch.manual_seed(5)
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # the tiles' own order of draws, without the function that recomputes them
        other = hidden.detach().requires_grad_()
        expected = torch.cat([mlp.replaced.forward(piece) for piece in other.split(4, dim=1)], dim=1)
    expected.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(hidden.grad, other.grad)
