"""Rerankers: losses and figures against the formulas and scikit-learn, rows of many shapes, and public commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from sklearn.metrics import ndcg_score
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import figures, same_export
from torch.nn import functional as F
from transformers import AutoTokenizer

from fxtune.cli.main import main
from fxtune.data.formats.candidates import CandidatesFormat
from fxtune.data.formats.row_format import LearnConfig
from fxtune.objectives.ranking import Ranking, RankingLoss

WORDS = ["red", "blue", "green", "cat", "dog", "house", "river", "tree"]
LEARNS = [
    *("objective=ranking", "data.sources=[{path: rows.jsonl}]", "data.eval_fraction=0.2", "data.sequence_length=128"),
    *("model.init=random", f"model.architecture={SMALLER}", "optimizer.lr=1e-2", "data.cache_dir=cache"),
    *("run.report=false", "tracking.display=plain", "run.device=cpu", "train.max_steps=4"),
    *("train.micro_batch_size=2", "train.global_batch_size=4"),
]


def write(count: int = 40) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        size = draw.randint(2, 4)
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(size)]
        rows.append(
            {"query": draw.choice(WORDS), "passages": texts, "labels": [2, *[draw.randint(0, 1)] * (size - 1)]}
        )
    write_jsonl(Path("rows.jsonl"), rows)


GROUPS = torch.tensor([0, 0, 0, -1, 1, 1, -1])
RELEVANCES = torch.tensor([1.0, 0.0, 0.5, float("nan"), 0.0, 1.0, float("nan")])


def losses(kind: RankingLoss, scores: torch.Tensor):
    class Given:
        def scores(self, batch):
            return scores

    batch = type("Batch", (), {"document_labels": RELEVANCES, "group_of": GROUPS})
    return Ranking(losses=kind).group_losses(Given(), batch)


@pytest.mark.parametrize("kind", list(RankingLoss))
def test_losses_are_the_formulas_of_each_query(kind):
    scores = torch.tensor([0.3, 1.2, -0.4, 9.0, 0.7, 0.1, 9.0], requires_grad=True)
    found = losses(kind, scores)
    assert found.counted.tolist() == [True, False, False, False, True, False, False]
    expected = []
    for group in range(2):
        s, r = scores[group == GROUPS], RELEVANCES[group == GROUPS]
        if kind is RankingLoss.listwise:
            expected.append(F.cross_entropy(s, r.softmax(0)))
        elif kind is RankingLoss.pointwise:
            expected.append(F.binary_cross_entropy_with_logits(s, r))
        else:
            pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if r[i] > r[j]]
            expected.append(-sum(F.logsigmoid(s[i] - s[j]) for i, j in pairs) / len(pairs))
    torch.testing.assert_close(found.losses[found.counted], torch.stack(expected))
    ours, theirs = (
        torch.autograd.grad(total, scores, retain_graph=True)[0]
        for total in (found.total(found.losses), torch.stack(expected).sum())
    )
    torch.testing.assert_close(ours, theirs)


def test_figures_are_those_of_scikit_learn():
    for seed in range(20):
        scores = torch.randn(7, generator=torch.manual_seed(seed))
        found = losses(RankingLoss.listwise, scores)
        for group, slot in ((0, 0), (1, 4)):
            s, r = scores[group == GROUPS], RELEVANCES[group == GROUPS]
            gain = (2**r - 1).numpy()
            assert found.metrics["ndcg"][slot].item() == pytest.approx(ndcg_score([gain], [s.numpy()], k=10), abs=1e-6)
            rank = 1 + int((s > s[r.argmax()]).sum())
            assert found.metrics["mrr"][slot].item() == pytest.approx(1 / rank)
            assert found.metrics["first"][slot].item() == (rank == 1)


def test_equal_scores_rank_nothing():
    assert not losses(RankingLoss.listwise, torch.zeros(7)).metrics["first"].any()


@pytest.mark.parametrize(
    ("row", "relevances"),
    [
        ({"query": "q", "passages": ["a", "b"], "labels": [0, 1]}, [0, 1]),
        ({"query": "q", "documents": ["a", "b"], "scores": [0.5, 1]}, [0.5, 1]),
        ({"query": "q", "passages": {"passage_text": ["a", "b"], "is_selected": [1, 0]}}, [1, 0]),
        ({"query": "q", "positive": "a", "negative": "b"}, [1, 0]),
        ({"anchor": "q", "pos": ["a"], "neg": ["b", "c"]}, [1, 0, 0]),
    ],
)
def test_published_shapes_are_read(row, relevances):
    content = CandidatesFormat().read(row, LearnConfig())
    assert content.labels == relevances
    assert all(text.text == "q" and text.second in "abc" for text in content.texts.values())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "passages": ["a"], "labels": [1]}, "fewer than two candidates"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1, 1]}, "nothing to rank"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1]}, "as many `labels`"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1, None]}, "labels[1] is null"),
        ({"query": "q", "positive": None, "negative": "b"}, "no positive"),
    ],
)
def test_mistakes_name_the_row(cwd, capsys, row, reason):
    write_jsonl(Path("rows.jsonl"), [row] * 8)
    assert main([*LEARNS, "run.dir=refused"]) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert reason in error
    assert "rows.jsonl:1" in error


@pytest.mark.parametrize("packing", ["true", "false"])
def test_gradients_equal_plain_transformers(cwd, packing):
    rows = [{"query": word, "passages": ["a cat", "the dog runs"], "labels": [1, 0]} for word in WORDS * 4]
    write_jsonl(Path("rows.jsonl"), rows)
    words = [f"data.packing={packing}", f"techniques.lora.enabled={packing}", "data.eval_fraction=0", "data.dedup=off"]
    assert main(["verify", *LEARNS, *words, "--loss", "--json", "seen.json"]) == 0
    variants = json.loads(Path("seen.json").read_text())["loss"]
    assert all(variant["loss_off"] < 1e-5 for variant in variants)


def test_a_run_shows_what_it_knew_before_and_resumes_bit_for_bit(cwd, capsys):
    write()
    assert main([*LEARNS, "run.dir=whole"]) == 0
    assert "mrr" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained("whole/model").chat_template is None, "a CrossEncoder would write chats"
    for words in (["train.pause_after=2"], []):
        assert main([*LEARNS, "run.dir=paused", *words]) == 0
    assert figures("paused", "loss", "ndcg") == figures("whole", "loss", "ndcg")
    assert same_export("whole", "paused")
