"""Objectives over pairs, by hand: two pairs whose answers have one to three tokens of known log-probabilities."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from support.processors import write_model, write_picture_pairs
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from fxtune.config.root import Config
from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.distributed.world import Device
from fxtune.models.kinds.known import images_of
from fxtune.models.load import ModelConfig
from fxtune.objectives.dpo import DPO, PairLoss
from fxtune.objectives.ipo import IPO
from fxtune.objectives.orpo import ORPO
from fxtune.objectives.simpo import SimPO
from fxtune.training.builder import RunBuilder

POLICY = [[-1.0, -2.0], [-0.5], [-0.25, -0.75, -1.0], [-3.0, -1.0]]
"""Of chosen, rejected, chosen, rejected: the log-probability of each answer token."""
REFERENCE = [[-1.5, -1.75], [-0.25], [-0.5, -1.0, -1.25], [-2.0, -1.5]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def batch() -> Batch:
    """One packed row: pairs of documents of four tokens, with padding in its middle as between two rows."""
    lengths, starts, at, labels = [len(answer) for answer in POLICY], [], [], []
    for document, targets in enumerate(lengths):
        begin = 4 * document + (4 if document > 1 else 0)
        starts.append(begin)
        at += range(begin, begin + targets)
        labels += [7] * targets
    cu_seqlens = [starts[0], starts[1], 8, starts[2], starts[3], 20, 20, 20]
    return Batch(
        torch.zeros(1, 20, dtype=torch.long),
        torch.zeros(1, 20, dtype=torch.long),
        torch.zeros(1, 20, dtype=torch.long),
        torch.tensor(cu_seqlens, dtype=torch.int32),
        torch.tensor([*at, 3]),
        torch.tensor([*labels, IGNORE_INDEX]),  # with_rounded_targets() adds such positions
        tokens=16,
        group_of=torch.tensor([0, 0, -1, 1, 1, -1, -1]),
        document_labels=torch.full((7,), math.nan),
    )


class FakeModel:
    def __init__(self) -> None:
        self.policy = torch.tensor([*chain(*POLICY), 0.0], requires_grad=True)

    def log_probs(self, batch):
        return self.policy

    def reference_log_probs(self, batch):
        return torch.tensor([*chain(*REFERENCE), 0.0])

    def router_terms(self, batch, count):
        assert count == 2
        return None, {}


def loss_of(objective):
    model = FakeModel()
    loss, metrics = objective.loss(model, batch())
    loss.backward()
    assert model.policy.grad.isfinite().all()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, model.policy.grad.tolist()


def margins(policy=POLICY, reference=REFERENCE, of=sum):
    """Chosen minus rejected, of the log ratio, for both pairs."""
    ratio = [of(one) - of(other) for one, other in zip(policy, reference, strict=True)]
    return [ratio[0] - ratio[1], ratio[2] - ratio[3]]


def mean(values):
    return sum(values) / len(values)


def test_dpo_is_the_paper_s_formula_and_its_gradient():
    loss, metrics, gradient = loss_of(DPO(beta=0.3))
    found = margins()
    assert loss == pytest.approx(sum(-math.log(sigmoid(0.3 * margin)) for margin in found), rel=1e-6)
    slope = [-0.3 * (1 - sigmoid(0.3 * margin)) for margin in found]
    wanted = [slope[0]] * 2 + [-slope[0]] + [slope[1]] * 3 + [-slope[1]] * 2
    assert gradient[:-1] == pytest.approx(wanted, rel=1e-5)
    assert metrics["reward_margin"] == pytest.approx(0.3 * sum(found), rel=1e-5)
    assert metrics["reward_accuracy"] == sum(margin > 0 for margin in found)
    assert metrics["log_probs_chosen"] == pytest.approx(mean(POLICY[0]) + mean(POLICY[2]))
    assert metrics["log_probs_rejected"] == pytest.approx(mean(POLICY[1]) + mean(POLICY[3]))
    assert (metrics["length_chosen"], metrics["length_rejected"]) == (5, 3)


def test_dpo_starts_at_the_logarithm_of_two():
    model = FakeModel()
    model.reference_log_probs = lambda batch: model.policy.detach()
    loss, metrics = DPO(length_normalized=0.5).loss(model, batch())
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-6)
    assert metrics["reward_margin"].item() == metrics["reward_accuracy"].item() == 0


def test_variants_of_dpo():
    found = margins()
    smooth, _, _ = loss_of(DPO(label_smoothing=0.2))
    assert smooth == pytest.approx(
        sum(-0.8 * math.log(sigmoid(0.1 * margin)) - 0.2 * math.log(sigmoid(-0.1 * margin)) for margin in found)
    )
    hinge, _, _ = loss_of(DPO(loss_type=PairLoss.hinge, beta=2.0))
    assert hinge == pytest.approx(sum(max(0.0, 1 - 2 * margin) for margin in found))
    plain, _, _ = loss_of(DPO())
    both, _, _ = loss_of(DPO(sft_weight=0.5))
    assert both == pytest.approx(plain - 0.5 * (mean(POLICY[0]) + mean(POLICY[2])))


def test_tokens_beyond_the_shorter_answer_count_less():
    """The shorter answers of the pairs have one and two tokens."""

    def weighted(answers, weight):
        tails = [1, 1, 2, 2]
        return [[sum(answer[:n]) + weight * sum(answer[n:])] for answer, n in zip(answers, tails, strict=True)]

    loss, metrics, _ = loss_of(DPO(beta=1.0, length_normalized=0.25))
    found = margins(weighted(POLICY, 0.25), weighted(REFERENCE, 0.25))
    assert loss == pytest.approx(sum(-math.log(sigmoid(margin)) for margin in found), rel=1e-6)
    assert metrics["length_chosen"] == 5


def test_ipo_by_token_and_by_sums():
    for by_token, of in ((True, mean), (False, sum)):
        loss, _, _ = loss_of(IPO(beta=0.4, by_token=by_token))
        assert loss == pytest.approx(sum((margin - 1 / 0.8) ** 2 for margin in margins(of=of)), rel=1e-5)


def test_simpo_and_orpo_need_no_reference():
    FakeModel.reference_log_probs, kept = None, FakeModel.reference_log_probs
    try:
        means = [mean(answer) for answer in POLICY]
        loss, metrics, _ = loss_of(SimPO(beta=2.0, gamma=0.5, sft_weight=0.1))
        wins = [2 * (means[0] - means[1]), 2 * (means[2] - means[3])]
        wanted = sum(-math.log(sigmoid(win - 0.5)) for win in wins) - 0.1 * (means[0] + means[2])
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert metrics["reward_margin"] == pytest.approx(sum(wins), rel=1e-5)
        loss, _, _ = loss_of(ORPO(beta=0.3))
        odds = [m - math.log(1 - math.exp(m)) for m in means]
        wanted = -means[0] - means[2]
        wanted -= 0.3 * sum(math.log(sigmoid(odds[at] - odds[at + 1])) for at in (0, 2))
        assert loss == pytest.approx(wanted, rel=1e-5)
    finally:
        FakeModel.reference_log_probs = kept


def test_orpo_is_finite_for_a_certain_answer():
    model = FakeModel()
    model.policy = torch.zeros(9, requires_grad=True)
    loss, _ = ORPO().loss(model, batch())
    loss.backward()
    assert loss.isfinite()
    assert model.policy.grad.isfinite().all()


@pytest.mark.parametrize(
    ("family", "adapters", "shares"),
    [("qwen2_5_vl", True, False), ("qwen2_5_vl", False, True), ("qwen3_5", True, False), ("llava", True, True)],
)
def test_dpo_of_pairs_with_images_is_that_of_plain_transformers(family, adapters, shares, tmp_path):
    """Both answers see the image. The trained weights were moved away from the reference."""
    config = Config(model=ModelConfig(path=str(write_model(family, tmp_path / "model"))), objective=DPO())
    rows = write_picture_pairs(tmp_path / "pictures", 6)
    config.data = DataConfig(sources=[SourceConfig(path=str(rows))], sequence_length=1024, packing=True)
    config.data.cache_dir, config.data.share_prompts = str(tmp_path / "cache"), shares
    config.techniques.lora.enabled, config.run.device = adapters, Device.cpu
    config.train.max_steps, config.train.micro_batch_size, config.train.global_batch_size = 1, 1, 1
    builder = RunBuilder(config)
    _, data = builder.read()
    model, _ = builder.proven_model()
    objective, table = builder.config.objective, data.tables[0]
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))

    def log_prob(of: Any, document: int) -> torch.Tensor:
        start, end = table.offsets[document : document + 2].tolist()
        ids = torch.from_numpy(table.ids[start:end].astype(np.int64))
        images = data.images.read([table.image(index) for index in table.images_in(start, end - start)])
        assert images["pixel_values"].shape[0] > 0
        logits = of(
            input_ids=ids[None], **images, **images_of(of.config).token_types(of.config, ids[None]), use_cache=False
        ).logits[0, :-1]
        learned = torch.from_numpy(table.supervised[start:end].astype(bool))[1:]
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][learned].sum()

    batch = builder.own(data.training).batch(0, 0)
    assert len(data.training.documents(0, 0)) > 2
    found, _ = objective.loss(model, batch)
    model.model.eval()
    expected = torch.zeros(())
    documents = [document for _, document in data.training.documents(0, 0)]
    for pair in zip(documents[::2], documents[1::2], strict=True):
        ratios = [log_prob(model.model, answer) - log_prob(plain, answer) for answer in pair]
        expected = expected - F.logsigmoid(objective.beta * (ratios[0] - ratios[1]))
    assert abs(expected / len(documents) * 2 - math.log(2)) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
