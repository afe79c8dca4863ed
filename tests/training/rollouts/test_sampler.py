"""Answers of the trained model: their log-probabilities, their random numbers, and where they end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.architectures import prepared_model, random_model

from fxtune.config.root import SamplerConfig
from fxtune.distributed.world import World
from fxtune.errors import HardwareError
from fxtune.system.process.oom import RowsPerPass
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.rollouts.episodes import Episodes, seed_of
from fxtune.training.rollouts.folder import Asked
from fxtune.training.rollouts.sampler import Draw, ModelSampler, uniform

PROMPTS = [[5, 9, 2, 77, 31], [8], [100, 3, 3, 64, 12, 90, 41, 7, 6], [11, 12]]
ALL = slice(None)
CPU = World(torch.device("cpu"))


def sampler(prepared, ends=frozenset(), **options) -> ModelSampler:
    config = SamplerConfig(**{"max_tokens": 9, "batch": 3, **options})
    return ModelSampler(prepared, config, Pipeline().precision, CPU, RowsPerPass(CPU.device), set(ends), 0)


def requests(count: int = 3, only: slice = ALL) -> Episodes:
    seeds = [seed_of(7, *prompt, number) for prompt in PROMPTS for number in range(count)]
    asked = [Asked(prompt) for prompt in PROMPTS for _ in range(count)]
    return Episodes(asked[only], seeds[only], SamplerConfig(max_tokens=9))


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("gemma3", 0.7), ("llama", 1.6)])
def test_log_probs_are_those_of_plain_transformers(family, temperature):
    prepared = prepared_model(Pipeline(), random_model(family))
    model = prepared.module.eval()
    for request, answer in zip(
        requests().asked, sampler(prepared, temperature=temperature).sample(requests(), "")(), strict=True
    ):
        ids = torch.tensor([[*request.prompt, *answer.ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[0, len(request.prompt) :, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.log_probs), expected, atol=2e-5)
        assert not answer.finished
        assert len(answer.ids) == 9


def test_an_answer_does_not_depend_on_the_other_answers_of_its_batch():
    prepared = prepared_model(Pipeline(), random_model("llama"))
    together = sampler(prepared, batch=12).sample(requests(), "")()
    alone = [sampler(prepared, batch=1).sample(requests(only=slice(at, at + 1)), "")()[0] for at in range(12)]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in together}) == 12
    assert sampler(prepared).sample(requests(), "")() == sampler(prepared).sample(requests(), "")()


def test_answers_end_with_the_token_that_ended_them():
    prepared = prepared_model(Pipeline(), random_model("llama"))
    whole = sampler(prepared).sample(requests(), "")()
    ends = {whole[0].ids[2], whole[5].ids[0]}
    for answer, before in zip(sampler(prepared, ends).sample(requests(), "")(), whole, strict=True):
        at = next((at for at, token in enumerate(before.ids) if token in ends), None)
        assert answer.finished == (at is not None)
        assert answer.ids == before.ids[: None if at is None else at + 1]
        assert answer.log_probs == pytest.approx(before.log_probs[: len(answer.ids)], abs=1e-5)


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([[0.3, -1.0, 2.0, -torch.inf, 0.0]]).expand(20_000, -1)
    draw = Draw(range(20_000), 0.8, 3, CPU)
    for _ in range(3):
        shares = torch.bincount(draw(logits), minlength=5) / 20_000
        assert torch.allclose(shares, (logits[0] / 0.8).softmax(-1), atol=0.015)
        assert shares[3] == 0


def test_random_numbers_are_spread_evenly_and_differ_by_seed():
    numbers = uniform([seed_of(1, number) for number in range(500)], 200)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.histogram(numbers, 10)[0] / numbers.size == pytest.approx([0.1] * 10, abs=0.005)
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.15
    assert len(np.unique(numbers)) == numbers.size
    assert len({seed_of(a, b) for a in range(30) for b in range(30)}) == 900
    assert all(0 <= seed_of(number) < 2**63 for number in range(-3, 100))


def test_answers_that_do_not_fit_in_memory_are_written_in_smaller_batches():
    prepared, notes, most = prepared_model(Pipeline(), random_model("llama")), list[str](), 4

    def refuse(module, given, named):
        rows = len(named["input_ids"])
        if rows > most:
            raise torch.OutOfMemoryError(f"no room for {rows} rows")

    undisturbed = sampler(prepared, batch=12).sample(requests(), "")()
    small = sampler(prepared, batch=12)
    small.rows_per_pass = RowsPerPass(CPU.device, {}, notes.append)
    with prepared.module.register_forward_pre_hook(refuse, with_kwargs=True):
        found = small.sample(requests(), "")()
    assert [answer.ids for answer in found] == [answer.ids for answer in undisturbed]
    assert len(notes) == 2, "12, 6, 3"
    most = 0
    with prepared.module.register_forward_pre_hook(refuse, with_kwargs=True), pytest.raises(HardwareError):
        small.sample(requests(), "")()
