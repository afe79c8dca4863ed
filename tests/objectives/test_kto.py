"""KTO by hand, and by the public command: the KL term is of the whole step, whatever its micro-batches."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import figures

from fxtune.cli.main import main
from fxtune.data.batches.batch import Batch
from fxtune.objectives.kto import KTO

RATIOS = [0.5, 2.0, -1.5, 0.25]
"""log(policy / reference): a good answer, its twin, a bad answer, its twin."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def batch(step_part=None) -> Batch:
    """Four documents of two tokens, the second supervised, and padding."""
    row = torch.zeros(1, 10, dtype=torch.long)
    return Batch(
        row,
        row,
        row,
        torch.tensor([0, 2, 4, 6, 8, 10], dtype=torch.int32),
        torch.tensor([0, 2, 4, 6]),
        torch.tensor([7, 7, 7, 7]),
        tokens=8,
        group_of=torch.tensor([0, 0, 1, 1, -1]),
        document_labels=torch.tensor([1.0, math.nan, 0.0, math.nan, math.nan]),
        step_part=step_part,
    )


class FakeModel:
    def __init__(self) -> None:
        self.policy = torch.tensor(RATIOS, requires_grad=True)

    def log_probs(self, batch):
        return self.policy - 3.0

    def reference_log_probs(self, batch):
        return torch.full((4,), -3.0)

    def router_terms(self, batch, count):
        assert count == 2
        return None, {}


@pytest.mark.parametrize(("sums", "kl"), [(None, 1.125), ([6.0, 4.0], 1.5), ([-6.0, 4.0], 0.0)])
def test_loss_and_gradient(sums, kl):
    model = FakeModel()
    objective = KTO(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    part = None if sums is None else torch.tensor(sums).expand(5, 2)
    loss, metrics = objective.loss(model, batch(part))
    loss.backward()
    good, bad = 0.3 * (0.5 - kl), 0.3 * (kl + 1.5)
    assert loss.item() == pytest.approx(1.2 * (1 - sigmoid(good)) + 0.8 * (1 - sigmoid(bad)), rel=1e-6)
    slope = [-1.2 * 0.3 * sigmoid(good) * sigmoid(-good), 0.8 * 0.3 * sigmoid(bad) * sigmoid(-bad)]
    assert model.policy.grad.tolist() == pytest.approx([slope[0], 0, slope[1], 0], rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(2 * kl)
    assert metrics["reward_margin"].item() == pytest.approx(good + bad, rel=1e-5)
    assert metrics["reward_accuracy"].item() == (good > 0) + (bad > 0)


def test_parts_of_a_step_have_the_sums_of_all_micro_batches():
    values = KTO().step_values(FakeModel(), batch())
    assert KTO().step_parts(torch.cat([values, torch.zeros_like(values), values])).tolist() == [[4.5, 4.0]] * 15


WORDS = [
    "objective=kto",
    "data.sources=[{path: rows.jsonl}]",
    "data.sequence_length=128",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "model.init=random",
    f"model.architecture={SMALLER}",
    "techniques.lora.enabled=true",
    "train.global_batch_size=8",
    "train.max_steps=5",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


@pytest.fixture
def rows(cwd):
    draw, rows = random.Random(0), []
    for number in range(64):
        good = draw.random() < 0.5
        answer = " It is fine." if good else " Ask" + " again" * draw.randint(1, 3)
        rows.append({"prompt": f"Which number is {number}?", "completion": answer, "label": good})
    write_jsonl(Path("rows.jsonl"), rows)


def train(run: str, *words: str) -> list[tuple[float, ...]]:
    assert main([*WORDS, f"run.dir={run}", *words]) == 0
    return steps(run)


def steps(run: str) -> list[tuple[float, ...]]:
    return figures(run, "loss", "kl", "grad_norm")


@pytest.mark.parametrize("packing", slow_but([True, False], True))
def test_loss_does_not_depend_on_micro_batches(rows, packing):
    word = f"data.packing={packing}"
    whole = train("whole", word, "train.micro_batch_size=8")
    assert whole[0][0] == pytest.approx(0.5, abs=1e-6)
    assert whole[-1][0] < 0.45
    parts = train("parts", word, "train.micro_batch_size=2")
    for one, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_run_resumes_bit_for_bit(rows):
    word = "train.micro_batch_size=4"
    whole = train("whole", word)
    train("paused", word, "train.pause_after=2")
    assert train("paused", word) == whole


def test_answers_of_one_kind_are_refused(rows, capsys):
    write_jsonl(Path("rows.jsonl"), [{"prompt": f"{n}?", "completion": f" {n}", "label": True} for n in range(9)])
    assert main([*WORDS, "run.dir=refused"]) == 2
    assert "all answers are good" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(rows, ranks, cwd):
    word = "train.micro_batch_size=4"
    alone = train("alone", word)
    assert ranks.run([*WORDS, word, "data.cache_dir=other", "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(alone, steps("together"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
