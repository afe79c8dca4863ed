"""Fused adapters in complete models on a GPU: as accurate as plain peft, faster, and without a second copy of the
base.

The operators themselves are tested in test_fused_lora.py.
"""

from __future__ import annotations

import functools
import gc
import time

import pytest
import torch
from support import reference

from fxtune.facts.options import Autocast, Policy, Switch
from fxtune.system.terminal.units import GIB
from fxtune.techniques.compile import residual_pass
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.lora import gemm_backend
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.precision import Precision

TWO_LAYERS = dict(reference.LAYERS_OF_8B, num_hidden_layers=2, vocab_size=4096, tie_word_embeddings=False)


def pipeline(fused: Switch, compiled: bool = False, policy: Policy | None = None, **options) -> Pipeline:
    made = Pipeline(
        lora=Lora(enabled=True, fused=fused),
        precision=Precision(autocast=Autocast.bfloat16),
        compile=Compile(enabled=compiled),
    )
    if policy is not None:
        made.checkpointing.enabled, made.checkpointing.policy = True, policy
        for name, value in options.items():
            setattr(made.checkpointing, name, value)
    return made


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma"])
def test_fused_is_as_accurate_as_peft(shape, compiled):
    given = reference.batch(shape)
    exact = reference.plain(shape, given, lora=True)
    rounded = reference.relative_errors(reference.plain(shape, given, dtype="bfloat16", lora=True), exact)
    found = reference.ours(pipeline(Switch.auto, compiled), shape, given, lora=True)
    assert any("fused on" in note for note in found.notes), found.notes
    assert any("2 attentions' projections, 2 whole MLPs, 2 single linears" in one.asked for one in found.evidence), (
        found.evidence
    )
    off = reference.relative_errors(found, exact)
    assert all(off[what] <= 1.5 * rounded[what] + 1e-3 for what in ("loss", "logits", "grads")), (off, rounded)


def test_fused_products_add_the_residual_stream(monkeypatch):
    """In a compiled layer the products of o_proj and of the MLP add the residual stream, with quack and not with
    cuBLAS.
    """
    found, fold = [], residual_pass.fold
    monkeypatch.setattr(residual_pass, "fold", lambda graph: found.append(fold(graph)) or found[-1])
    for refusal in (gemm_backend.refusal, lambda facts: "for this test"):
        found.clear()
        monkeypatch.setattr(gemm_backend, "refusal", refusal)
        made = pipeline(Switch.on, True)
        # A cached graph is not folded again, and the pass of an earlier test holds its own `fold`. pytest's monkeypatch
        # would hide these options for good: it deletes what is not in a module's __dict__.
        with (
            torch.compiler.config.patch(force_disable_caches=True),
            torch._inductor.config.patch(post_grad_custom_post_pass=None),
        ):
            *_, notes = reference.build(made, TWO_LAYERS, reference.batch(TWO_LAYERS, (1500, 1500)), lora=True)
        assert max(found) == (2 if any("quack" in note for note in notes) else 0), (notes, found)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": Policy.full},
        {"policy": Policy.full, "mlp_tiles": 4},
        {"policy": Policy.selective},
        {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]},
        {"policy": Policy.selective, "save": ["attention"]},
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_changes_only_rounding(options, compiled):
    """Compiled code may round the residual sums elsewhere, and tiles of an MLP add up a gradient of a weight in parts:
    there the gradients must be as accurate as without checkpointing. Elsewhere they must be nearly the same."""
    treated = reference.ours(pipeline(Switch.on, compiled, **options), "llama", reference.batch("llama"), lora=True)
    if compiled or "mlp_tiles" in options:
        exact = reference.plain("llama", reference.batch("llama"), lora=True)
        off, usual = (reference.relative_errors(result, exact)["grads"] for result in (treated, whole(compiled)))
        assert off <= 1.1 * usual + 1e-3, (off, usual)
    else:
        assert reference.relative_errors(treated, whole(compiled))["grads"] <= 5e-3


@functools.cache
def whole(compiled: bool) -> reference.Result:
    """The same without checkpointing."""
    return reference.ours(pipeline(Switch.on, compiled), "llama", reference.batch("llama"), lora=True)


def test_frozen_weights_are_stored_once():
    given = reference.batch(TWO_LAYERS, (64, 64))
    sizes = {}
    for fused in (Switch.off, Switch.on):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model, *_ = reference.build(pipeline(fused), TWO_LAYERS, given)
        gc.collect()
        torch.cuda.empty_cache()
        sizes[fused] = torch.cuda.memory_allocated() - before
        del model
    assert sizes[Switch.on] < 1.02 * sizes[Switch.off], sizes


def measured(fused: Switch, policy: Policy | None, given) -> tuple[float, float]:
    """Seconds and peak GiB of a compiled forward and backward."""
    model, made, *_ = reference.build(pipeline(fused, True, policy), TWO_LAYERS, given)
    with made.precision.context(given.input_ids.device):
        loss = reference.with_head(made, model)
    times = []
    for index in range(11):
        if index == 3:  # compiled already
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with made.precision.context(given.input_ids.device):
            total = loss.summed_loss(given)
        total.backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[3:])[3], torch.cuda.max_memory_allocated() / GIB


@pytest.mark.timed
@pytest.mark.parametrize("policy", [None, Policy.selective, Policy.full])
def test_compiled_step_is_faster_without_more_memory(policy):
    given = reference.batch(TWO_LAYERS, (4096,), rows=4, packed=False)
    found = {}
    for fused in (Switch.off, Switch.on):
        found[fused] = measured(fused, policy, given)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    (plain, plain_peak), (ours, our_peak) = found[Switch.off], found[Switch.on]
    print(
        f"policy {policy and policy.value}: peft {plain * 1e3:.1f} ms, {plain_peak:.2f} GiB; fused {ours * 1e3:.1f} ms, "
        f"{our_peak:.2f} GiB"
    )
    assert ours < 0.97 * plain
    assert our_peak <= 1.01 * plain_peak


def test_generation_matches_peft():
    given = reference.batch("llama", (64, 64))
    ids = torch.arange(3, 19, device="cuda").view(2, 8)
    answers = []
    for fused in (Switch.off, Switch.on):
        model, *_ = reference.build(pipeline(fused), "llama", given, dtype="float32")
        with torch.autocast("cuda", enabled=False):
            answers.append(
                model.eval().generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=8,
                    do_sample=False,
                    pad_token_id=0,
                )
            )
    assert torch.equal(*answers)
