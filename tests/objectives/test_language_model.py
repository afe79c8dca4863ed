"""Losses and log-probabilities of supervised rows equal plain transformers', for every family's logits and every kind of head."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import (
    ADAPTERS,
    CPU,
    FAMILIES,
    SIZES,
    built,
    lora,
    prepared_model,
    random_model,
    tiny_model,
    trained,
)
from support.attention import using
from support.mixtures import uneven
from support.tables import grouped, training
from torch import distributed
from torch.nn import functional as F

from fxtune.data.batches.batch import BatchSpec, build_batch
from fxtune.distributed.chunks import is_divided
from fxtune.distributed.sharding import shard
from fxtune.errors import ConfigError
from fxtune.facts.options import Autocast
from fxtune.kernels import linear_cross_entropy as kernel
from fxtune.models.load import load_config
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.objectives import language_model
from fxtune.objectives.dpo import DPO
from fxtune.objectives.ipo import IPO
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.orpo import ORPO
from fxtune.objectives.simpo import SimPO
from fxtune.techniques.assemble import assemble
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline, require_acted
from fxtune.training import trainer

OTHERS = {
    "granite": {"model_type": "granite", **SIZES, "logits_scaling": 8.0},
    "cohere": {"model_type": "cohere", **SIZES, "logit_scale": 0.25},
    "gemma2_capped": {**FAMILIES["gemma2"], "final_logit_softcapping": 0.5},
    "untied": {**FAMILIES["gemma"], "tie_word_embeddings": False},
    "tied": {**FAMILIES["llama"], "tie_word_embeddings": True},
}
EVERY = {**FAMILIES, **OTHERS}
FUSED = Liger(enabled=True, kernels=["fused_linear_cross_entropy"])
PLAIN = Liger()


@pytest.fixture(autouse=True)
def chunks_of_five_rows(monkeypatch):
    """The fused loss has several chunks, although the batches are small."""
    hold_rows(monkeypatch, 5)


def hold_rows(monkeypatch, rows):
    for module in (language_model, kernel):
        monkeypatch.setattr(module, "default_chunk_rows", lambda *_: rows)


KINDS = pytest.mark.parametrize("liger", [PLAIN, FUSED], ids=["plain", "fused"])


def batch(lengths=(9, 14, 6), padding=3, share=0.4):
    draw = np.random.default_rng(0)
    total = sum(lengths)
    table = SimpleNamespace(
        images=None,
        ids=draw.integers(3, 128, total).astype(np.int32),
        supervised=draw.random(total) < share,
        stored=None,
    )
    return build_batch(
        [table],
        BatchSpec(
            np.zeros(len(lengths), np.int64),
            np.cumsum([0, *lengths[:-1]]),
            np.array(lengths),
            np.array([0, len(lengths)]),
            total + padding,
            packed=True,
            pad_id=0,
            slots=len(lengths) + 1,
        ),
    )


def plain_loss(model, given) -> torch.Tensor:
    logits = model(**model_inputs(model, given.input_ids, given.position_ids, given.cu_seqlens)).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), given.targets.flatten(), ignore_index=-100, reduction="sum")


def plain_log_probs(model, given) -> torch.Tensor:
    logits = model(**model_inputs(model, given.input_ids, given.position_ids, given.cu_seqlens)).logits
    log_probs = logits.flatten(0, 1).float().log_softmax(-1)[given.supervised_at]
    return log_probs.gather(1, given.labels[:, None]).squeeze(1)


def model_of(family: str, pipeline: Pipeline | None = None, **changes):
    """A model whose logits are large enough for a soft cap or a scale to matter."""
    model = random_model("llama")
    model.architecture = {**EVERY[family], **changes}
    mine = built(pipeline or Pipeline(), model)
    with torch.no_grad():
        head = mine.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    return mine


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def same(model, loss: LanguageModel, given, rtol: float = 2e-5) -> None:
    """Loss, log-probabilities and their gradients are those of the model's own logits."""
    upstream = torch.randn(given.supervised, generator=torch.Generator().manual_seed(1))
    log_probs, expected = loss.log_probs(given), plain_log_probs(model, given)
    close(model, (log_probs * upstream).sum(), (expected * upstream).sum(), rtol)
    torch.testing.assert_close(log_probs, expected, rtol=rtol, atol=1e-5)
    document = (given.position_ids == 0).flatten().cumsum(0)[given.supervised_at] - 1
    segments = loss.segment_log_probs(given)
    expected = torch.stack([expected[document == number].sum() for number in range(len(segments))])
    torch.testing.assert_close(segments, expected, rtol=rtol, atol=1e-5)
    weights = torch.randn(len(segments), generator=torch.Generator().manual_seed(2))
    expected = plain_log_probs(model, given)
    close(model, (loss.segment_log_probs(given) * weights).sum(), (expected * weights[document]).sum(), rtol)
    wanted = plain_loss(model, given)
    mine = loss.summed_loss(given)
    torch.testing.assert_close(mine, wanted, rtol=rtol, atol=1e-5)
    close(model, mine, wanted, rtol)


def close(model, mine: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
    """Both have the same gradients."""
    theirs, ours = gradients(model, expected), gradients(model, mine)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() <= rtol * theirs[name].norm() + 2e-6, name


@KINDS
@pytest.mark.parametrize("family", EVERY)
def test_losses_and_log_probs_equal_each_familys_own_forward(family, liger):
    model = model_of(family)
    loss = LanguageModel(PreparedModel(model), liger)
    (evidence,) = loss.evidence
    assert evidence.acted, evidence
    assert not loss.own_forward
    same(model, loss, batch())


def test_logit_scales_and_caps_are_read_from_the_config():
    """The logits of these models are not those of the head alone."""
    found = {
        family: (loss.scale, loss.cap)
        for family in OTHERS
        if (loss := LanguageModel(PreparedModel(model_of(family)))).scale != 1.0 or loss.cap
    }
    assert found == {"granite": (0.125, 0.0), "cohere": (0.25, 0.0), "gemma2_capped": (1.0, 0.5)}


@KINDS
@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name not in ("pissa", "olora")] + ["lm_head"])
def test_losses_and_log_probs_with_adapters(adapter, liger):
    """lm_head: an adapter on the head itself, which is no plain linear then."""
    options = {"target_modules": ["q_proj", "lm_head"]} if adapter == "lm_head" else ADAPTERS[adapter]
    prepared = prepared_model(lora(**options), random_model("llama"))
    model = trained(prepared.module).eval()
    loss = LanguageModel(prepared, liger)
    assert loss.evidence[0].acted, loss.evidence
    same(model, loss, batch())
    if liger is FUSED:
        assert ("runs again in the backward pass" in loss.evidence[0].observed) == (adapter == "lm_head")
        assert ("the head is trained" in loss.evidence[0].observed) == (adapter == "head")


def test_the_head_is_described_alike_where_ranks_divide_its_weight(tmp_path):
    prepared = prepared_model(lora(), random_model("llama"))
    whole = LanguageModel(prepared, FUSED)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        world = SimpleNamespace(weights_mesh=distributed.init_device_mesh("cpu", (1,)), device=torch.device("cpu"))
        prepared.sharding = shard(prepared.module, decoder_layers(prepared.module), None, [], world)
        divided = LanguageModel(prepared, FUSED)
        assert is_divided(divided.head.weight), "gathered for the description only"
    finally:
        distributed.destroy_process_group()
    told, expected = (model.evidence[0].observed.rpartition(";")[2] for model in (divided, whole))
    assert told == expected


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_head_repeats_dropout_and_saves_random_state_only_for_it(dropout, monkeypatch):
    prepared = prepared_model(lora(target_modules=["lm_head"], dropout=dropout), random_model("llama"))
    model = trained(prepared.module).train()
    loss, given, asked = LanguageModel(prepared, FUSED), batch(), []
    plain = LanguageModel(prepared)
    own = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or own())
    torch.manual_seed(3)
    mine = loss.summed_loss(given)
    assert bool(asked) == bool(dropout)
    ours = gradients(model, mine)
    torch.manual_seed(3)
    wanted = plain.summed_loss(given)
    torch.testing.assert_close(mine, wanted)
    for name, gradient in gradients(model, wanted).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_bfloat16_base_with_float32_head_under_autocast(head, liger):
    model, pipeline = random_model("llama"), lora(modules_to_save=["lm_head"] if head == "trained" else [])
    model.dtype = model.dtype.bfloat16
    pipeline.precision.autocast = Autocast.bfloat16
    prepared = prepared_model(pipeline, model, dtype="bfloat16")
    mine = trained(prepared.module).eval()
    loss, given = LanguageModel(prepared, liger), batch()
    assert loss.evidence[0].acted, loss.evidence
    with pipeline.precision.context(torch.device("cpu")):
        wanted, total = plain_loss(mine, given), loss.summed_loss(given)
    assert total.dtype is torch.float32
    assert abs(total - wanted) < 1e-2 * wanted
    theirs, ours = gradients(mine, wanted), gradients(mine, total)
    assert ours.keys() == theirs.keys()
    flat = [torch.cat([found[name].flatten() for name in sorted(theirs)]) for found in (ours, theirs)]
    assert (flat[0] - flat[1]).norm() < 2e-2 * flat[1].norm()


@KINDS
def test_batch_without_supervised_tokens_has_zero_loss(liger):
    model = model_of("llama")
    empty = batch(share=0.0)
    assert empty.supervised == 0
    loss = LanguageModel(PreparedModel(model), liger).summed_loss(empty)
    assert loss == 0
    loss.backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_head_runs_on_supervised_rows_only():
    model, seen = model_of("llama"), []
    loss, given = LanguageModel(PreparedModel(model)), batch()
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    loss.summed_loss(given)
    assert seen == [given.supervised]
    assert 0 < given.supervised < given.tokens


def test_chunk_size_does_not_change_the_loss(monkeypatch):
    model, given = model_of("qwen3"), batch(lengths=(20, 30, 14), padding=0, share=0.8)
    wanted = LanguageModel(PreparedModel(model)).summed_loss(given)
    for rows in (1, 3, 7, 1000):
        hold_rows(monkeypatch, rows)
        found = LanguageModel(PreparedModel(model), FUSED).summed_loss(given)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class Shifted(torch.nn.Module):
    """A model that changes its logits in a way that no config names."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config
        for name in ("get_decoder", "get_output_embeddings"):
            setattr(self, name, getattr(model, name))

    def forward(self, **given):
        out = self.inner(**given)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) / 10
        return out


def test_model_with_unknown_logits_keeps_its_own_forward():
    model = Shifted(model_of("llama"))
    loss = LanguageModel(PreparedModel(model))
    assert loss.own_forward
    assert loss.evidence[0].acted
    assert "Shifted: its logits differ from its head's logits" in loss.evidence[0].observed
    same(model, loss, batch())
    with pytest.raises(ConfigError, match=r"loss: asked for .*fused with the head; seen: Shifted"):
        require_acted(LanguageModel(PreparedModel(model), FUSED).evidence)


def test_model_without_known_parts_keeps_its_own_forward():
    model = model_of("llama")
    model.get_decoder = None
    loss = LanguageModel(PreparedModel(model))
    assert loss.own_forward
    assert "do not run one after the other" in loss.evidence[0].observed
    same(model, loss, batch())


def test_wrong_fused_loss_is_detected(monkeypatch):
    right = kernel._softmax_gradient
    monkeypatch.setattr(
        kernel,
        "_softmax_gradient",
        lambda logits, labels, losses, scale, cap, gradient: right(logits, labels, losses, scale * 1.1, cap, gradient),
    )
    assert [LanguageModel(PreparedModel(model_of("llama")), liger).evidence[0].acted for liger in (PLAIN, FUSED)] == [
        True,
        False,
    ]


def test_comparison_leaves_the_model_unchanged():
    model = model_of("llama").train()
    before = [parameter.clone() for parameter in model.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    LanguageModel(PreparedModel(model), FUSED)
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_gradients_with_activation_checkpointing():
    """The loss runs the decoder whose layers the techniques wrapped."""
    pipeline = lora()
    pipeline.checkpointing.enabled = True
    prepared = prepared_model(pipeline, random_model("gemma2"))
    model = trained(prepared.module).train()
    one, two = (gradients(model, LanguageModel(prepared, liger).summed_loss(batch())) for liger in (PLAIN, FUSED))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


def test_runs_with_fused_and_plain_loss_agree(small, cwd):
    """Training and evaluation, and the evidence in the run folder."""
    small.data.eval_fraction, small.train.max_steps, seen = 0.2, 2, {}
    for name, liger in (("plain", PLAIN), ("fused", FUSED)):
        small.run.dir, small.techniques.liger = str(cwd / name), liger
        result = trainer.run(small)
        evidence = json.loads((cwd / name / "evidence.json").read_text())
        seen[name] = [result["train/loss"], result["train/grad_norm"], result["eval/loss"]]
        assert [
            one["asked"].endswith(name if name == "plain" else "fused with the head")
            for one in evidence
            if one["technique"] == "loss"
        ] == [True]
    assert seen["fused"] == pytest.approx(seen["plain"], rel=1e-5)


SHARING = {
    "llama": random_model("llama"),
    "windows": tiny_model("cohere2"),
    "mixture": tiny_model("qwen3_moe"),
    "capped": random_model("gemma2"),
}


@functools.cache
def by_both(name: str) -> tuple[LanguageModel, LanguageModel]:
    """The same model: its attention takes bounds of keys, and plain."""
    backends = ("flash4", "eager" if name == "capped" else "sdpa")
    models = []
    for backend in backends:
        model = assemble(using(backend), SHARING[name], load_config(SHARING[name]), CPU, 0)
        uneven(model.module)
        models.append(LanguageModel(model))
    return models[0], models[1]


@st.composite
def pairs(draw):
    """Pairs of answers, some with prompts of one token, and a reference's log-probabilities."""
    seed = draw(st.integers(0, 99))
    numbers, groups = np.random.default_rng(seed), []
    for _ in range(draw(st.integers(1, 5))):
        prompt = numbers.integers(3, 128, draw(st.integers(1, 12))).tolist()
        answers = [numbers.integers(3, 128, draw(st.integers(1, 9))).tolist() for _ in "cr"]
        groups.append([([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for answer in answers])
    table = grouped(groups)
    table.stored = (-numbers.random(len(table.ids))).astype([("reference", np.float32)])
    return table


OBJECTIVES = [DPO(length_normalized=0.5, sft_weight=1.0), IPO(), SimPO(), ORPO()]


@pytest.mark.parametrize("name", SHARING)
@settings(max_examples=8, deadline=None)
@given(table=pairs(), objective=st.sampled_from(OBJECTIVES))
def test_a_shared_prompt_changes_no_number(name, table, objective):
    """Log-probabilities of each document, the loss of each objective, and all gradients."""
    seen = []
    for model, once in zip(by_both(name), (True, False), strict=True):
        plan = training([table], micro=2, step=2, sequence_length=64, epochs=1, share_prompts=once)
        loss, sums = torch.zeros(()), np.zeros(len(table))
        for step in range(plan.steps):
            batch = plan.batch(step, 0).with_rounded_targets()
            loss = loss + objective.loss(model, batch)[0]
            with torch.no_grad():
                found = model.segment_log_probs(batch)[batch.group_of >= 0]
            sums[[document for _, document in plan.documents(step, 0)]] = found.numpy()
        parameters = dict(model.model.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        seen.append((loss.item(), sums, dict(zip(parameters, gradients, strict=True))))
    (loss, sums, gradients), (expected, whole, others) = seen
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(sums, whole, rtol=1e-5, atol=1e-5)
    size = max(gradient.norm().item() for gradient in others.values() if gradient is not None)
    for parameter, gradient in others.items():
        assert (gradient is None) == (gradients[parameter] is None), parameter
        if gradient is not None:
            off = (gradients[parameter] - gradient).norm().item()
            assert off <= 1e-4 * gradient.norm().item() + 1e-6 * size, parameter
