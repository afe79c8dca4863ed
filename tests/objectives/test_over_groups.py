"""An objective over groups of three documents with labels, the plugin `listwise` of docs/plugins.md: it trains, evaluates
and resumes, on ranks and in any micro-batches, and no line of the trainer, of packing or of the plan knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.harness import SMALLER
from support.rows import write_ranked
from support.runs import figures, same_export
from torch.nn import functional as F

from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.data.batches.loader import Loader
from fxtune.objectives import language_model
from fxtune.plugins import files_used
from fxtune.training.builder import RunBuilder
from fxtune.training.evaluation import evaluate

PLUGINS = ["--plugin", "ranked.py", "--plugin", "listwise.py"]
WORDS = [
    "objective=listwise",
    "data.sources=[{path: rows.jsonl, format: ranked}]",
    "data.sequence_length=160",
    "data.cache_dir=cache",
    "model.init=random",
    f"model.architecture={SMALLER}",
    "techniques.lora.enabled=true",
    "train.micro_batch_size=3",
    "train.global_batch_size=12",
    "train.max_steps=6",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]

TEMPERATURE = 32
"""Scores of about -200 in float32 are exact to 1e-5, so their softmax needs a temperature to be exact to 1e-6."""


@pytest.fixture
def rows(cwd):
    write_ranked()


def train(*words: str) -> None:
    assert main([*PLUGINS, *WORDS, *words]) == 0


def steps(run: str) -> list[tuple[float, ...]]:
    return figures(run, "loss", "accuracy", "grad_norm")


@pytest.mark.parametrize(("packing", "fused"), slow_but([(True, False), (False, True)], (True, False)))
def test_objective_learns_by_the_public_command(rows, fused, packing, capsys):
    head = [f"techniques.liger.enabled={fused}", "techniques.liger.kernels=[fused_linear_cross_entropy]"]
    train("run.dir=run", f"data.packing={packing}", "data.eval_fraction=0.25", "train.max_steps=16", *head)
    found = steps("run")
    assert sum(step[0] for step in found[-3:]) < 0.5 * sum(step[0] for step in found[:3])
    assert sum(step[1] for step in found[-3:]) / 3 > 0.9
    figures = json.loads(Path("run/result.json").read_text())
    assert figures["eval/accuracy"] > 0.9
    assert "eval/perplexity" not in figures
    assert main(["eval", *PLUGINS, "run"]) == 0
    capsys.readouterr()
    assert main(["refresh", *PLUGINS, "run", "data.sources=[{path: rows.jsonl, format: ranked}]"]) == 2
    assert "learns from groups of documents (objective=listwise)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("packing", slow_but([True, False], True))
def test_run_resumes_bit_for_bit(rows, packing):
    """Also where the checkpoint falls between two log lines."""
    words = [f"data.packing={packing}", "train.log_every=2"]
    train("run.dir=whole", *words)
    train("run.dir=paused", "train.pause_after=3", *words)
    train("run.dir=paused", *words)
    assert steps("paused") == steps("whole")
    assert same_export("whole", "paused")


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_two_ranks_learn_what_one_process_learns(rows, ranks, cwd, packing):
    words = [*WORDS, f"data.packing={packing}"]
    train("run.dir=alone", f"data.packing={packing}")
    assert ranks.run([*PLUGINS, *words, "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(steps("alone"), steps("together"), strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def verified(*words: str, objective: str = WORDS[0]) -> tuple[int, dict]:
    """Exit code of `verify --loss`, and the variants by name."""
    code = main(["verify", *PLUGINS, objective, *WORDS[1:], "--loss", "--json", "seen.json", *words])
    compared = json.loads(Path("seen.json").read_text())["loss"]
    return code, {variant["name"]: variant for variant in compared}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["data.packing=true", "objective.temperature=32"], id="packed"),
        pytest.param(
            ["data.packing=false", "data.buckets=[64,160]", "techniques.lora.enabled=false"],
            id="buckets",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]"],
            id="fused",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_verify_compares_the_loss_with_plain_transformers(rows, words):
    code, found = verified(*words)
    assert code == 0
    splits = [variant for name, variant in found.items() if name.startswith("fxtune")]
    assert len(splits) >= 2
    assert max(max(variant["loss_off"], variant["gradient_off"]) for variant in splits) < 1e-5
    assert max(max(variant["bounds"][:2]) for variant in splits) < 3e-5


def test_verify_finds_documents_that_see_each_other(rows, monkeypatch):
    def without_borders(model, ids, positions, *rest):
        row = torch.arange(ids.shape[1], device=ids.device).expand_as(positions)
        return model_inputs(model, ids, row, *rest)

    model_inputs = language_model.model_inputs
    monkeypatch.setattr(language_model, "model_inputs", without_borders)
    code, found = verified("data.packing=true")
    assert code == 1
    assert not any(variant["gradient_off"] < 1e-3 for name, variant in found.items() if name.startswith("fxtune"))


def test_verify_finds_an_objective_that_couples_the_groups_of_a_micro_batch(rows):
    Path("mean.py").write_text(
        "from dataclasses import dataclass\n"
        "import fxtune\n"
        "from fxtune.objectives.registry import OBJECTIVES\n\n\n"
        "@fxtune.objective('mean')\n"
        "@dataclass\n"
        "class Mean(OBJECTIVES['listwise']):\n"
        "    def loss(self, model, batch):\n"
        "        loss, metrics = super().loss(model, batch)\n"
        "        return loss / (batch.group_of.amax() + 1), metrics\n"
    )
    code, found = verified("--plugin", "mean.py", "train.micro_batch_size=1", objective="objective=mean")
    assert code == 1
    assert found["fxtune, 12 x 1 as configured"]["loss_off"] > 0.1


@pytest.mark.slow
def test_verify_compares_the_loss_of_two_ranks(rows, ranks, cwd):
    words = ["verify", *PLUGINS, *WORDS, "data.packing=true", "--loss", "--json", "seen.json"]
    assert ranks.run(words, cwd) == [0, 0]
    compared = json.loads(Path("seen.json").read_text())["loss"]
    splits = [variant for variant in compared if variant["name"].startswith("fxtune on 2 ranks")]
    assert len(splits) == 3
    assert max(variant["gradient_off"] for variant in splits) < 1e-5


def plain(model, tables, documents, labels) -> torch.Tensor:
    """The loss of one group by plain transformers, one document at a time."""
    scores = []
    for source, at in documents:
        table = tables[source]
        ids, marks = (
            torch.tensor(array[table.offsets[at] : table.offsets[at + 1]]) for array in (table.ids, table.supervised)
        )
        log_probs = model(input_ids=ids.long()[None]).logits[0, :-1].log_softmax(-1)
        scores.append(log_probs.gather(1, ids[1:].long()[:, None])[marks[1:], 0].sum())
    return F.cross_entropy(torch.stack(scores)[None] / TEMPERATURE, torch.tensor([labels.index(1)]))


def test_loss_and_gradients_are_those_of_plain_transformers_in_any_micro_batches(rows):
    with files_used(["ranked.py", "listwise.py"]):
        config = load([*WORDS, "techniques.lora.enabled=false", f"objective.temperature={TEMPERATURE}"])
        for packing, sizes in ((True, (12, 4, 1)), (False, (12, 6, 3))):
            builder = RunBuilder(replace(config, data=replace(config.data, packing=packing)))
            plan = builder.read()[1].training
            language = builder.language_model(builder.build())
            language.model.train()
            step = builder.train_step(language, builder.config.objective)
            groups: dict[tuple[int, int], list] = {}
            for micro in range(plan.micro_batches(0)):
                for row in plan.contents(0, micro):
                    for part in row:
                        groups.setdefault((micro, part.group), []).append((part.source, part.document))
            assert len(groups) == plan.groups(0)
            assert {len(documents) for documents in groups.values()} == {3}
            losses = []
            for documents in groups.values():
                labels = [plan.tables[source].labels[at] for source, at in documents]
                losses.append(plain(language.model, plan.tables, documents, labels) / len(groups))
                losses[-1].backward()
            loss = sum(term.item() for term in losses)
            wanted = torch.cat([parameter.grad.flatten() for parameter in step.optimizer.names])
            step.optimizer.drop()
            for size in sizes:
                cut = plan.with_micro_batch_size(size)
                batches = [cut.batch(0, micro) for micro in range(cut.micro_batches(0))]
                metrics = step.backward(batches, step.objective.normalizer(cut, 0))
                gradient = torch.cat([parameter.grad.flatten() for parameter in step.optimizer.names])
                step.optimizer.drop()
                assert metrics["loss"].item() == pytest.approx(loss, rel=1e-5)
                assert (gradient - wanted).norm() < 1e-5 * wanted.norm()


def test_held_out_loss_does_not_depend_on_packing(rows):
    found = []
    with files_used(["ranked.py", "listwise.py"]):
        for packing in (True, False):
            config = load([*WORDS, f"data.packing={packing}", "data.eval_fraction=0.5"])
            builder = RunBuilder(config)
            data = builder.read()[1]
            model = builder.language_model(builder.build())
            loader = Loader(data.evaluation, config.loader, builder.world.device)
            found.append(evaluate(model, config.objective, loader, builder.techniques.precision))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
