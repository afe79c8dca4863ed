"""Scores of documents and their gradients, against plain transformers with one document at a time in float32."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.architectures import CPU, random_model, tiny_model
from support.tables import grouped, training
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.errors import ConfigError
from fxtune.models.load import build, load_config
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.reward import Reward
from fxtune.objectives.score_model import ScoreModel
from fxtune.techniques.attention.backends.registry import FLASH4
from fxtune.upstream.transformers import set_attention

END = 1
"""The token that ends each document, and with which rows are padded here."""
LENGTHS = [5, 9, 3, 7, 8, 2]


class Table:
    """Three pairs of documents."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.documents = [[*draw.integers(2, 120, length - 1).tolist(), END] for length in LENGTHS]
        self.ids = np.concatenate([np.array(document, np.int32) for document in self.documents])
        self.supervised = np.ones(len(self.ids), bool)
        self.stored = self.images = None


def batch(packed: bool) -> tuple[Batch, list[list[int]]]:
    table, count = Table(), len(LENGTHS)
    spec = BatchSpec(
        source=np.zeros(count, np.int64),
        start=np.cumsum([0, *LENGTHS[:-1]]),
        length=np.array(LENGTHS),
        offsets=np.array([0, 2, count]) if packed else np.arange(count + 1),
        width=24 if packed else 12,
        packed=packed,
        pad_id=END,
        slots=count + 4,
        group=np.array([0, 0, 1, 1, 2, 2]),
        label=np.array([2, 0, np.nan, np.nan, 0.5, 0], np.float32),
    )
    return build_batch([table], spec), table.documents  # type: ignore[list-item]


def plain_loss(model, documents, center: float, margins: list[float]) -> torch.Tensor:
    """The formula of the papers, with a score of the last token of each document alone."""
    model.config.pad_token_id = None  # transformers then takes the last token
    scores = [model(input_ids=torch.tensor([document])).logits[0, 0] for document in documents]
    losses = [
        -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2
        for chosen, rejected, margin in zip(scores[::2], scores[1::2], margins, strict=True)
    ]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_loss_and_gradients_are_those_of_plain_transformers(family, packed):
    """Also where padding is the token that ends a document."""
    model = tiny_model(family)
    config = load_config(model, "score")
    config.pad_token_id = END
    ours = build(model, config, CPU, 0).module.eval()
    plain = copy.deepcopy(ours)
    given, documents = batch(packed)
    for objective, margins in ((Reward(), [0.0] * 3), (Reward(center=0.5, margin=True), [2.0, 0.0, 0.5])):
        loss, metrics = objective.loss(ScoreModel(PreparedModel(ours)), given)
        wanted = plain_loss(plain, documents, objective.center, margins)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert metrics["length_chosen"] == sum(length - 1 for length in LENGTHS[::2])
        for module, value in ((ours, loss), (plain, wanted)):
            module.zero_grad()
            value.backward()
        expected = dict(plain.named_parameters())
        for name, parameter in ours.named_parameters():
            if parameter.grad is None or expected[name].grad is None:
                assert parameter.grad is expected[name].grad, name
                continue
            size = expected[name].grad.norm().item()
            assert (parameter.grad - expected[name].grad).norm().item() <= 1e-5 * size + 1e-8, name


def test_rewards_of_answers_that_share_a_prompt_are_those_of_whole_documents():
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 120, size).tolist() for size in (5, 1, 9)]
    answers = [[draw.integers(2, 120, size).tolist() for size in sizes] for sizes in ((3, 4), (2, 2), (6, 1))]
    documents = [[*prompt, *answer, END] for prompt, pair in zip(prompts, answers, strict=True) for answer in pair]
    marks = [[False] * len(prompt) for prompt in prompts for _ in "cr"]
    learned = [[*mark, *[True] * (len(tokens) - len(mark))] for mark, tokens in zip(marks, documents, strict=True)]
    rows = list(zip(documents, learned, strict=True))
    plan = training(
        [grouped([rows[:2], rows[2:4], rows[4:]])], micro=2, step=2, sequence_length=40, epochs=1, share_prompts=True
    )
    assert plan.shared(0).sum() == 4 + 8, "all but the last token of each prompt"
    model = random_model("llama")
    config = load_config(model, "score")
    FLASH4.prepare()
    set_attention(config, FLASH4.implementation)
    scorer = ScoreModel(PreparedModel(build(model, config, CPU, 0).module))
    plain = copy.deepcopy(scorer.model)
    plain.set_attn_implementation("sdpa")
    loss = Reward(center=0.5).loss(scorer, plan.batch(0, 0))[0]
    wanted = plain_loss(plain, documents, 0.5, [0.0] * 3)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for module, value in ((scorer.model, loss), (plain, wanted)):
        value.backward()
        assert module.score.weight.grad.norm() > 0
    for ours, theirs in zip(scorer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_scores_are_float32_under_autocast():
    model = random_model("llama")
    scores = ScoreModel(PreparedModel(build(model, load_config(model, "score"), CPU, 0).module))
    given, _ = batch(True)
    exact = scores.scores(given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = scores.scores(given)
    assert rounded.dtype is torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05
    assert rounded.ne(rounded.bfloat16().float()).any()


def test_model_that_scores_otherwise_is_refused():
    model = random_model("llama")
    module = build(model, load_config(model, "score"), CPU, 0).module
    module.score.register_forward_hook(lambda _, __, output: output * 2)
    with pytest.raises(ConfigError, match="does not score a row by a linear over its last hidden state"):
        ScoreModel(PreparedModel(module))
