"""Attention over rows that are cut into pieces: what each rank computes, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.architectures import ARCHITECTURES, CPU, facts_of, tiny_model
from support.cases import pairs, slow_but
from support.decoder_sizes import decoder_sizes
from support.forecasts import LLAMA, card
from support.rank_threads import on_ranks
from support.tables import natural, training

from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError
from fxtune.kernels.flash4 import Options
from fxtune.models.dims import key_copies
from fxtune.models.load import load_config
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers, without_dropout
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.attention import context
from fxtune.techniques.attention.backends import flash4
from fxtune.techniques.attention.backends.registry import EAGER, FLASH4, SDPA, called
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.checkpointing.offload import Offload
from fxtune.techniques.pipeline import Pipeline

LENGTH = 48
STARTS = torch.tensor([0, 5, 30, 48, 60, 96, 96, 96], dtype=torch.int32)
"""Two rows; two documents reach over the middle of the first one, and over both thirds of the second."""


@pytest.mark.parametrize(("cut", "backend"), pairs([(4, 2, 2, 1), (4, 1, 2, 2), (6, 2, 3, 3)], [SDPA, EAGER, FLASH4]))
@pytest.mark.parametrize("window", [0, 7])
def test_attention_on_pieces_is_attention_on_the_row(cut, backend, window):
    heads, key_heads, ranks, copies = cut
    backend.prepare()
    context.register(backend)
    assert key_copies(heads, key_heads, ranks) == copies
    module = _llama_attention(heads, key_heads)
    shapes = [(2, heads, LENGTH, 8), (2, key_heads, LENGTH, 8), (2, key_heads, LENGTH, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weights = torch.randn(2, LENGTH, heads, 8)
    options = dict(
        scaling=8**-0.5, sliding_window=window or None, cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS, is_causal=True
    )
    whole = Options(STARTS, LENGTH, 8**-0.5, window, 0.0)
    expected = flash4.attend(*(x.transpose(1, 2) for x in inputs), whole)
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)

    def work(rank, group):
        from transformers import AttentionInterface

        piece = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
        own = [x.detach()[:, :, piece].clone().requires_grad_() for x in inputs]
        attend = AttentionInterface()[backend.implementation]
        mask = torch.empty(2, 1, 0, 0, dtype=torch.bool)
        out, _ = attend(module, *own, mask, context_group=group, context_ranks=ranks, **options)
        return out, *torch.autograd.grad((out * weights[:, piece]).sum(), own)

    outs, *found = zip(*on_ranks(ranks, work), strict=True)
    assert torch.allclose(torch.cat(outs, 1), expected, atol=1e-6)
    for parts, gradient in zip(found, gradients, strict=True):
        assert torch.allclose(torch.cat(parts, 2), gradient, atol=1e-5)


@pytest.mark.parametrize(("key_heads", "packing"), [(2, True), (1, False)])
def test_losses_and_gradients_of_the_pieces_add_up_to_those_of_the_rows(key_heads, packing):
    plan = training([natural(40, 30, 3)], micro=2, step=2, sequence_length=70, packing=packing)
    model = _llama(key_heads)
    whole, gradients = _loss_and_gradients(model, plan.batch(0, 0), "")
    context.register(SDPA)
    parts = on_ranks(
        2,
        lambda rank, group: _loss_and_gradients(copy.deepcopy(model), plan.with_row_piece(rank, 2).batch(0, 0), group),
    )
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-6)
    for expected, *own in zip(gradients, *(found for _, found in parts), strict=True):
        assert torch.allclose(sum(own), expected, atol=1e-5)


def test_a_piece_without_targets_takes_part_in_every_exchange():
    plan = training([natural(8, 60, 5, share=0.2)], micro=1, step=1, sequence_length=64, packing=False)
    assert not plan.with_row_piece(0, 2).batch(0, 0).supervised
    model = _llama(2)
    _, gradients = _loss_and_gradients(model, plan.batch(0, 0), "")
    context.register(SDPA)
    parts = on_ranks(
        2,
        lambda rank, group: _loss_and_gradients(copy.deepcopy(model), plan.with_row_piece(rank, 2).batch(0, 0), group),
    )
    for expected, *own in zip(gradients, *(found for _, found in parts), strict=True):
        assert torch.allclose(sum(own), expected, atol=1e-5)


def test_offload_sends_the_queries_of_all_ranks_tokens():
    plan = training([natural(8, 60, 5)], micro=1, step=1, sequence_length=64)
    context.register(SDPA)

    def work(pieces):
        def on_rank(rank, group):
            own = copy.deepcopy(model)
            offload = Offload(decoder_layers(own), torch.device("cpu"), True, min_bytes=0, pieces=pieces)
            found = _loss_and_gradients(own, plan.with_row_piece(rank, 2).batch(0, 0), group)[1]
            return offload.sent, found

        return on_ranks(2, on_rank)

    model = _llama(2)
    _, gradients = _loss_and_gradients(copy.deepcopy(model), plan.batch(0, 0), "")
    (more, first), (_, second) = work(pieces=2)
    for expected, result, other in zip(gradients, first, second, strict=True):
        assert torch.allclose(result + other, expected, atol=1e-5)
    # Queries, keys and values that attention saved, 32 and twice 16 numbers of 4 bytes, of 32 tokens.
    assert more >= work(pieces=1)[0][0] + 32 * (32 + 16 + 16) * 4


@pytest.mark.parametrize(
    "kind", slow_but(sorted(ARCHITECTURES), "llama", "gemma2", "gpt2", "deepseek_v3", "qwen3_moe", "gpt_oss", "opt")
)
def test_what_is_not_refused_gives_the_logits_of_the_whole_row(kind):
    """Windows, soft caps, latent attention, experts and position embeddings of every family."""
    model_config = tiny_model(kind)
    facts = facts_of(model_config, degrees=Degrees(context=2))
    pipeline = Pipeline()
    facts = replace(facts, techniques=pipeline)
    if kind in ("bloom", "falcon", "gpt_oss", "lfm3", "llama4_text", "mamba", "mamba2", "qwen3_next"):
        with pytest.raises(ConfigError, match=r"parallel\.context=2: .*Set parallel\.context=1"):
            pipeline.check(facts)
        return
    pipeline, _ = pipeline.resolved(facts)
    model = assemble(pipeline, model_config, load_config(model_config), CPU, 0).module
    context.register(called(model.config._attn_implementation))
    lengths = (24,) if kind == "opt" else (7, 17)  # OPT of transformers does not separate documents
    ids = (torch.arange(24) * 7919 + 3).unsqueeze(0) % 120
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def work(rank, group):
        piece = slice(12 * rank, 12 * rank + 12)
        with torch.no_grad():
            return model(**model_inputs(model, ids[:, piece], positions[:, piece], starts, 2, group)).logits

    with without_dropout(model), torch.no_grad():
        expected = model(**model_inputs(model, ids, positions, starts)).logits
        assert torch.allclose(torch.cat(on_ranks(2, work), 1), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "techniques", "reason"),
    [
        (
            dict(num_attention_heads=30, num_key_value_heads=30, hidden_size=1920),
            {},
            "4 ranks do not divide llama's 30 query heads. Set it to 3, or",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            {},
            "RoPE of type dynamic depends on the longest row",
        ),
        ({}, {"rope": {"type": "dynamic"}}, "Use techniques.rope.type=yarn"),
        ({"max_position_embeddings": 4098}, {}, "rows are padded to 4100 tokens, beyond the 4098 positions of llama"),
        (
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            {},
            "the conv layers of llama need a whole row",
        ),
    ],
)
def test_rows_that_cannot_be_cut_are_refused_with_a_change(model, techniques, reason):
    facts = card(80, 4097, model=LLAMA | model, techniques={"attention": {}, **techniques}, degrees=Degrees(context=4))
    assert any(reason in found for found in context.refusals(facts)), list(context.refusals(facts))


def test_yarn_and_llama_are_not_refused():
    facts = card(80, 4096, techniques={"attention": {}, "rope": {"type": "yarn"}}, degrees=Degrees(context=4))
    assert not list(context.refusals(facts))


def test_flex_and_cuda_graphs_are_refused_and_auto_passes_them_over():
    facts = card(80, 4096, techniques={"attention": {"backend": "flex"}}, degrees=Degrees(context=2))
    with pytest.raises(ConfigError, match=r"backend: flex makes its mask of one piece of a row \(parallel\.context\)"):
        facts.techniques.check(facts)
    facts = card(80, 4096, techniques={"compile": {"cuda_graphs": "on"}}, degrees=Degrees(context=2))
    with pytest.raises(ConfigError, match=r"cuda_graphs: ranks exchange pieces of rows inside a pass"):
        facts.techniques.check(facts)


def _loss_and_gradients(model, batch, group):
    loss = LanguageModel(PreparedModel(model), None, group).summed_loss(batch)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def _llama(key_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            **decoder_sizes(32, 48, layers=2, heads=4),
            num_key_value_heads=key_heads,
            vocab_size=30_000,
            attn_implementation="sdpa",
        )
    )


def _llama_attention(heads, key_heads):
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=key_heads)
    return LlamaAttention(config, 0)
