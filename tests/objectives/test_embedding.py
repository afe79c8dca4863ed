"""Embedding models: the loss by hand, against plain transformers, and by the public commands."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import exported, figures, same_export
from torch.nn import functional as F

from fxtune.cli.main import main
from fxtune.data.batches.batch import Batch
from fxtune.objectives.embedding import Embedding
from fxtune.objectives.language_model import Pool
from fxtune.objectives.vector_model import VectorModel

WORDS = [
    "objective=embedding",
    "data.sources=[{path: rows.jsonl}]",
    "data.sequence_length=128",
    "data.cache_dir=cache",
    "model.init=random",
    f"model.architecture={SMALLER}",
    "techniques.lora.enabled=true",
    "techniques.lora.init=gaussian",
    "train.global_batch_size=12",
    "train.micro_batch_size=3",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


def write_rows(file: Path, count: int) -> None:
    draw, rows = random.Random(0), []
    for number in range(count):
        places = draw.sample(["dock", "shop", "office", "harbour"], 2)
        query = f"Where is order {number}?"
        texts = [f"Order {number} is at the {place}{', I think' * draw.randint(0, 2)}." for place in places]
        rows.append({"query": query, "positive": texts[0], "negative": texts[1]})
    write_jsonl(file, rows)


@pytest.fixture
def rows(cwd):
    write_rows(Path("rows.jsonl"), 64)


def train(run: str, *words: str) -> list[tuple[float, ...]]:
    assert main([*WORDS, f"run.dir={run}", *words]) == 0
    return steps(run)


def steps(run: str) -> list[tuple[float, ...]]:
    return figures(run, "loss", "recall_at_1", "ndcg_at_10", "grad_norm")


GROUPS = [
    (["q one", "p one", "n one", "n two"], [1, 0, 0]),
    (["q two", "p two", "p three", "n one"], [1, 1, 0]),
    (["q one", "p four"], [1]),  # the query of the first group: its positive is no negative there
    (["q three", "p one", "q two"], [1, 0]),  # a positive of the first group; a negative that is another query
    (["q four", "p five", "q four"], [1, 0]),  # a negative with the text of the query
]


def micro_batches() -> list[Batch]:
    """Each group is a micro-batch of one packed row, with padding. A word is a token."""
    words = sorted({word for texts, _ in GROUPS for text in texts for word in text.split()})
    batches = []
    for texts, labels in GROUPS:
        count, width = len(texts), 10
        ids = [words.index(word) for text in texts for word in text.split()]
        starts = torch.tensor([*range(0, 2 * count + 1, 2), *[width] * (6 - count)], dtype=torch.int32)
        row = torch.tensor([ids + [0] * (width - len(ids))])
        none = torch.full((6 - count,), math.nan)
        batches.append(
            Batch(
                row,
                row,
                torch.tensor([[0, 1] * 5]),
                starts,
                torch.arange(0, 2 * count, 2),
                torch.ones(count, dtype=torch.long),
                tokens=2 * count,
                filled=torch.tensor([2 * count]),
                group_of=torch.tensor([0] * count + [-1] * (6 - count)),
                document_labels=torch.cat([torch.tensor([math.nan, *map(float, labels)]), none]),
            )
        )
    return batches


class FakeModel:
    """A model that gives the documents of each micro-batch the vectors of a table."""

    def __init__(self, vectors: list[torch.Tensor]) -> None:
        self.table, self.batches = vectors, micro_batches()

    def vectors(self, batch: Batch, pool: Pool) -> torch.Tensor:
        index = next(n for n, own in enumerate(self.batches) if torch.equal(own.input_ids, batch.input_ids))
        return F.pad(self.table[index], (0, 0, 0, 6 - len(self.table[index])), value=0.3)

    def router_terms(self, batch, count):
        return None, {}


def expected(objective: Embedding, vectors: list[torch.Tensor]) -> torch.Tensor:
    """The summed loss of the step from its definition, one query at a time."""
    total = torch.zeros(())
    for size in [*objective.matryoshka, vectors[0].shape[1]]:
        unit = [F.normalize(each[:, :size], dim=1) for each in vectors]
        documents = [
            (text, label, texts[0], unit[group][1 + place])
            for group, (texts, labels) in enumerate(GROUPS)
            for place, (text, label) in enumerate(zip(texts[1:], labels, strict=True))
        ]
        for group, (texts, labels) in enumerate(GROUPS):
            for place in range(1, 1 + sum(labels)):
                query, positive = unit[group][0], unit[group][place]
                wrong = [
                    query @ vector
                    for text, label, asked, vector in documents
                    if text not in (texts[place], texts[0]) and not (label and asked == texts[0])
                ]
                if objective.false_negative_margin is not None:
                    wrong = [score for score in wrong if score <= query @ positive + objective.false_negative_margin]
                scores = torch.stack([query @ positive, *wrong]) / objective.temperature
                loss = -scores.log_softmax(0)[0]
                if objective.symmetric:
                    wrong = [
                        positive @ unit[other][0]
                        for other, (others, _) in enumerate(GROUPS)
                        if others[0] != texts[0] and others[1] not in (texts[place], texts[0])
                    ]
                    scores = torch.stack([positive @ query, *wrong]) / objective.temperature
                    loss = (loss - scores.log_softmax(0)[0]) / 2
                total = total + loss / sum(labels)
    return total


@pytest.mark.parametrize(
    "objective",
    [
        Embedding(),
        Embedding(symmetric=True, temperature=0.2),
        Embedding(matryoshka=[4, 2]),
        Embedding(false_negative_margin=0.1),
    ],
    ids=["plain", "symmetric", "matryoshka", "margin"],
)
def test_loss_and_gradient_are_those_of_the_definition(objective):
    torch.manual_seed(0)
    vectors = [torch.randn(len(texts), 6, requires_grad=True) for texts, _ in GROUPS]
    wanted = expected(objective, vectors)
    gradients = torch.autograd.grad(wanted, vectors)
    model = FakeModel(vectors)
    with torch.no_grad():
        values = [objective.step_values(model, batch) for batch in model.batches]
        # Rows that do not count change nothing.
        parts = objective.step_parts(torch.cat([*values, torch.zeros_like(values[0])])).split(6)
    losses = [
        objective.loss(model, replace(batch, step_part=part))[0]
        for batch, part in zip(model.batches, parts, strict=False)
    ]
    assert sum(losses).item() == pytest.approx(wanted.item(), rel=1e-5)
    sum(losses).backward()
    for vector, gradient in zip(vectors, gradients, strict=True):
        assert torch.allclose(vector.grad, gradient, rtol=1e-4, atol=1e-5)


def test_metrics_rank_the_positive_among_all_candidates():
    vectors = [torch.eye(len(texts), 6) for texts, _ in GROUPS]
    vectors[0][1] = torch.tensor([1.0, 0.1, 0, 0, 0, 0])  # the positive of "q one" is first
    vectors[1][1] = torch.tensor([0.1, 0, 0, 0, 0, 1.0])  # "p two" is behind it, and before the others
    objective, model = Embedding(), FakeModel(vectors)
    parts = objective.step_parts(torch.cat([objective.step_values(model, batch) for batch in model.batches])).split(6)
    found = [objective.loss(model, replace(b, step_part=p))[1] for b, p in zip(model.batches, parts, strict=True)]
    assert found[0]["recall_at_1"].item() == 1
    assert found[0]["mrr_at_10"].item() == 1
    # The positives of "q two" are its second, behind "p one", and one whose score is equal to many others'.
    assert found[1]["recall_at_1"].item() == 0
    assert 0.25 < found[1]["mrr_at_10"].item() < 0.5


@pytest.mark.parametrize("pool", slow_but(["last", "mean"], "last"))
@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradients_are_those_of_plain_transformers_for_every_split(rows, pool, packing):
    words = ["objective.symmetric=true", f"objective.pool={pool}", f"data.packing={packing}"]
    assert main(["verify", *WORDS, *words, "--loss", "--json", "seen.json"]) == 0
    variants = [found for found in json.loads(Path("seen.json").read_text())["loss"] if "fxtune" in found["name"]]
    assert len(variants) >= 2
    assert max(variant["gradient_off"] for variant in variants) < 2e-5
    assert max(variant["loss"] for variant in variants) - min(variant["loss"] for variant in variants) < 1e-4


def test_chat_says_how_an_embedding_model_is_used(rows, capsys):
    train("run", "techniques.lora.enabled=false")
    capsys.readouterr()
    assert main(["chat", "run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "sentence-transformers" in error
    assert "show" not in error


def test_dropout_is_the_same_in_both_passes(rows, monkeypatch):
    seen, vectors = [], VectorModel.vectors

    def recorded(model, batch, pool):
        found = vectors(model, batch, pool)
        seen.append((found.requires_grad, found.detach().clone()))
        return found

    monkeypatch.setattr(VectorModel, "vectors", recorded)
    words = ["train.max_steps=2", "train.micro_batch_size=6"]
    with_dropout = train("one", *words, "techniques.lora.dropout=0.3")
    flags, (one, two, *again) = zip(*seen[-4:], strict=True)
    assert flags == (False, False, True, True)
    assert torch.equal(one, again[0])
    assert torch.equal(two, again[1])
    assert with_dropout[1] != train("other", *words)[1]


def test_loss_does_not_depend_on_micro_batches(rows):
    whole = train("whole", "train.micro_batch_size=12")
    assert whole[0][0] > 1
    for one, other in zip(whole, train("parts", "train.micro_batch_size=3"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)


def test_run_resumes_bit_for_bit(rows):
    whole = train("whole", "data.eval_fraction=0.2")
    train("paused", "data.eval_fraction=0.2", "train.pause_after=2")
    assert train("paused", "data.eval_fraction=0.2") == whole
    assert same_export("whole", "paused")
    assert all("embed_tokens" not in name for name in exported("whole"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "What?", "positive": ""}, "positive is empty"),
        ({"query": "What?", "positive": "This.", "negative": "What?"}, "cannot be a wrong answer to itself"),
        ({"query": "What?", "pos": ["This."], "neg": ["That.", "This."]}, "also a positive of this query"),
        ({"query": "What?", "positive": "This.", "note": "It is a secret."}, "column 'note' is not read"),
        ({"query": "What?", "positive": None}, "the query has no positive"),
    ],
)
def test_bad_rows_are_refused(cwd, capsys, row, message):
    good = [{"query": f"Where is {number}?", "positive": f"At {number}."} for number in range(9)]
    write_jsonl(Path("rows.jsonl"), [*good, row])
    assert main([*WORDS, "run.dir=refused"]) == 3
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "rows.jsonl:10" in text


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ("causal_lm", {"query": "What?", "positive": "This."}),
        ("dpo", {"query": "What?", "positive": "This."}),
    ],
)
def test_rows_of_another_objective_are_refused(cwd, capsys, objective, row):
    write_jsonl(Path("rows.jsonl"), [{name: f"{text} {n}" for name, text in row.items()} for n in range(9)])
    assert main([f"objective={objective}", *WORDS[1:], "run.dir=refused"]) == 2
    assert f"objective={objective} does not learn" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("word", ["objective.matryoshka=[64]", "objective.pool=cls"])
def test_options_that_do_not_fit_the_model_are_refused(rows, capsys, word):
    assert main([*WORDS, word, "run.dir=refused"]) == 2
    assert word.split("=")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(rows, ranks, cwd):
    word = "data.eval_fraction=0.2"
    alone = train("alone", word)
    assert ranks.run([*WORDS, word, "data.cache_dir=other", "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(alone, steps("together"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)
