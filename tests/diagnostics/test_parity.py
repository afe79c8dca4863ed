"""Loss and gradients are those of plain transformers, and an error in fxtune is out of bounds."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.rows import write_jsonl, write_pairs
from support.tuning import TINY

from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.diagnostics import parity
from fxtune.diagnostics.parity import Compared
from fxtune.models.reference import ReferenceModel
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.training.builder import RunBuilder
from fxtune.training.step import TrainStep

SPLITS = {"1 x 4", "2 x 2", "4 x 1"}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """The quickstart's data is tokenized once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def compare(*overrides: str, each: bool = False) -> tuple[dict[str, Compared], list[str]]:
    """The variants by name, and what the comparison says."""
    builder, notes = RunBuilder(load([*TINY, *overrides])), []
    found = parity.compare(builder, builder.read()[1].training, each, notes.append)
    return {variant.name: variant for variant in found}, notes


def by_split(found: dict[str, Compared]) -> dict[str, Compared]:
    """The variants of fxtune by how they split the global batch."""
    return {
        name.split(", ")[1].removesuffix(" as configured"): variant
        for name, variant in found.items()
        if name.startswith("fxtune")
    }


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["techniques.checkpointing.enabled=true", "train.micro_batch_size=2"], id="packed lora"),
        pytest.param(
            ["data.packing=false", "techniques.lora.enabled=false", "data.buckets=[128,256]"], id="padded full"
        ),
        pytest.param(["model.dtype=bfloat16"], id="bfloat16 base"),
        pytest.param(["techniques.precision.autocast=bfloat16", "techniques.lora.enabled=false"], id="autocast"),
    ],
)
def test_loss_and_gradients_are_those_of_plain_transformers_for_every_split(overrides):
    found, _ = compare(*overrides)
    splits = by_split(found)
    assert splits.keys() == SPLITS
    assert all(variant.within for variant in splits.values()), [variant.beyond() for variant in splits.values()]
    assert all(variant.loss > 0 for variant in splits.values())
    if any("bfloat16" in text for text in overrides):
        assert 0 < found["plain transformers, bfloat16"].gradient_off < 0.1
    else:
        assert max(variant.gradient_off for variant in splits.values()) < 1e-5


MIXTURE = [
    "model.architecture={model_type: qwen3_moe, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2}",
    "techniques.router.aux_loss_coef=0.5",
    "data.sequence_length=128",
    "train.micro_batch_size=2",
]
WITH_ROUTERS = "fxtune, 2 x 2 as configured, with the routers' loss"


@pytest.mark.parametrize("in_config", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_routers_loss_is_that_of_plain_transformers_in_the_configured_micro_batches(in_config):
    """Two micro-batches of two rows have another routers' loss than one micro-batch of four rows. With
    output_router_logits in its config, transformers gives the auxiliary loss before the logits."""
    shape = MIXTURE[0].replace("}", ", output_router_logits: true}") if in_config else MIXTURE[0]
    found, _ = compare(shape, *MIXTURE[1:])
    assert all(variant.within for variant in found.values()), [variant.beyond() for variant in found.values()]
    assert max(variant.gradient_off for variant in found.values()) < 1e-5
    assert found[WITH_ROUTERS].loss > found["fxtune, 1 x 4"].loss + 0.5
    assert "fxtune, 4 x 1" in found


@pytest.mark.slow
def test_the_router_is_switched_off_like_every_technique():
    found, _ = compare(*MIXTURE, each=True)
    assert found["fxtune, without router, 2 x 2 as configured"].within


@pytest.mark.slow
def test_routers_that_count_padding_are_out_of_bounds(monkeypatch):
    monkeypatch.setattr(Batch, "is_token", lambda batch: torch.ones(batch.input_ids.numel()))
    found, _ = compare(*MIXTURE, "data.packing=false")
    assert not found[WITH_ROUTERS].within
    assert found["fxtune, 1 x 4"].within


SHAPE = (
    "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, "
    "head_dim: 16"
)
DENSE, LORA = f"model.architecture={{{SHAPE}}}", "techniques=[lora,fast]"
PAIRS = [
    "objective=dpo",
    "data.sources=[{path: pairs.jsonl}]",
    "data.sequence_length=128",
    "data.cache_dir=cache",
    "model.init=random",
    DENSE,
    LORA,
    "techniques.precision.enabled=false",
    "techniques.compile.enabled=false",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.max_steps=2",
    "run.device=cpu",
]
EXPERTS = [
    f"model.architecture={{{SHAPE}, model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, "
    "moe_intermediate_size: 16}",
    "techniques.router.aux_loss_coef=0.5",
]
FUSED = ["techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]"]
IN_STEP = "objective.reference=base"
JUDGED = ["objective=kto", "data.sources=[{path: answers.jsonl}]"]


def preferred(*words: str, stored_times: float = 1.0) -> dict[str, Compared]:
    """compare() of a step of pairs, by the variants' names. `stored_times`: multiplies the stored numbers."""
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in PAIRS if word.partition("=")[0] not in keys]
    builder = RunBuilder(load([*kept, *words]))
    data = builder.read()[1]
    builder.observed_model()
    for table in data.tables:
        if table.stored is not None:
            table.stored = table.stored.copy()
            table.stored["reference"] *= stored_times
    return {variant.name: variant for variant in parity.compare(builder, data.training, False, lambda text: None)}


@pytest.fixture
def pairs(cwd):
    write_pairs()
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    write_jsonl(
        Path("answers.jsonl"),
        [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row, side in zip(rows, itertools.cycle(("chosen", "rejected")), strict=False)
        ],
    )


def require_equal(found: dict[str, Compared]) -> None:
    assert all(variant.within for variant in found.values()), [variant.beyond() for variant in found.values()]
    assert max(max(variant.loss_off, variant.gradient_off) for variant in found.values()) < 1e-5
    assert abs(found["plain transformers, float32"].loss - math.log(2)) > 1e-4  # the model differs from its reference


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["data.packing=true", IN_STEP], id="packed"),
        pytest.param(["data.packing=false", "data.buckets=[64,128]", IN_STEP], id="buckets", marks=pytest.mark.slow),
        pytest.param(["data.packing=true", "objective.reference=stored"], id="stored", marks=pytest.mark.slow),
        pytest.param(["techniques=[fast]", "objective.label_smoothing=0.2", *FUSED], id="full"),
        pytest.param(["objective=ipo", *FUSED], id="ipo", marks=pytest.mark.slow),
        pytest.param(["objective=simpo", "data.packing=false"], id="simpo"),
        pytest.param(["objective=orpo"], id="orpo", marks=pytest.mark.slow),
        pytest.param([*JUDGED, "objective.desirable_weight=2", "objective.reference=stored", *FUSED], id="kto"),
        pytest.param(
            ["techniques.compile.enabled=true", "train.global_batch_size=2", IN_STEP],
            id="compiled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_preferences_are_those_of_plain_transformers(pairs, words):
    require_equal(preferred(*words))


def test_reference_of_a_continued_adapter_is_its_start(pairs):
    words = ["run.dir=first", "run.report=false", "tracking.display=plain", "optimizer.lr=1e-2"]
    assert main([*PAIRS, *words]) == 0
    require_equal(preferred("model.adapter=first/adapter", "objective.reference=start"))


def test_routers_loss_of_preferences_is_that_of_the_policy(pairs):
    require_equal(preferred(*EXPERTS, "data.packing=true", IN_STEP))


def test_routers_loss_of_the_reference_is_out_of_bounds(pairs, monkeypatch):
    """As of an objective that asks for the reference after the policy."""
    router_terms = LanguageModel.router_terms

    def after_the_reference(self, batch, count):
        self.reference_log_probs(batch)
        return router_terms(self, batch, count)

    monkeypatch.setattr(LanguageModel, "router_terms", after_the_reference)
    found = preferred(*EXPERTS, "data.packing=true", IN_STEP)
    assert not found["fxtune, 2 x 2 as configured, with the routers' loss"].within
    assert found["fxtune, 1 x 4"].within


def test_reference_with_its_adapters_on_is_out_of_bounds(pairs, monkeypatch):
    monkeypatch.setattr(ReferenceModel, "active", lambda self: torch.no_grad())
    found = preferred(IN_STEP)
    assert not any(variant.within for name, variant in found.items() if name.startswith("fxtune"))


def test_wrong_stored_reference_is_out_of_bounds(pairs):
    found = preferred("objective.reference=stored", stored_times=1.001)
    assert not any(variant.within for name, variant in found.items() if name.startswith("fxtune"))


@dataclass
class Centered(Objective):
    """The variance of the documents' log-probabilities over the whole step."""

    needs = Needs(documents=(2, 2), whole_step=True)

    def step_values(self, model, batch):
        scores = batch.document_sums(model.log_probs(batch))
        return torch.stack([scores, (batch.group_of >= 0).float()], dim=1)

    def step_parts(self, values):
        return (values[:, :1].sum() / values[:, 1:].sum()).expand(len(values), 1)

    def loss(self, model, batch):
        scores, mean = batch.document_sums(model.log_probs(batch)), batch.step_part.squeeze(1)
        off = torch.where(batch.group_of >= 0, scores - mean, 0.0)
        return off.square().sum(), {}

    def normalizer(self, plan, step):
        return float(len(plan.lengths(step)))


def test_sums_over_the_step_are_those_of_plain_transformers(pairs):
    builder = RunBuilder(replace(load(PAIRS), objective=Centered("centered")))
    found = parity.compare(builder, builder.read()[1].training, False, lambda text: None)
    assert all(variant.within for variant in found), [variant.beyond() for variant in found]


@pytest.mark.slow
def test_preferences_of_two_ranks_are_those_of_plain_transformers(pairs, ranks, cwd):
    common = [word for word in PAIRS if word not in (DENSE, LORA)]
    for words in (
        [*common, DENSE, LORA, IN_STEP],
        [*common, *EXPERTS, LORA],
        [*common, DENSE, "techniques=[fast]", "parallel.shard=2"],
    ):
        assert ranks.run(["verify", *words, "--loss", "--json", "seen.json"], cwd) == [0, 0]
        compared = json.loads(Path("seen.json").read_text())["loss"]
        splits = [variant for variant in compared if variant["name"].startswith("fxtune on 2 ranks")]
        assert len(splits) == 3
        assert max(variant["gradient_off"] for variant in splits) < 1e-5


def test_each_switches_off_one_technique_at_a_time():
    found, notes = compare("techniques.checkpointing.enabled=true", each=True)
    assert all(variant.within for variant in found.values())
    assert {name for name in found if "without" in name} == {
        "fxtune, without attention, 1 x 4 as configured",
        "fxtune, without checkpointing, 1 x 4 as configured",
    }
    assert any("Not switched off: precision and lora." in note for note in notes)


def test_a_technique_that_another_needs_is_not_switched_off(monkeypatch):
    def check(self, facts):
        if not facts.techniques.checkpointing.enabled:
            yield "fullgraph: needs checkpointing, says this test."

    monkeypatch.setattr("fxtune.techniques.compile.technique.Compile.check", check)
    monkeypatch.setattr("fxtune.techniques.compile.technique.Compile.apply", lambda self, model, world: model)
    found, notes = compare("techniques.checkpointing.enabled=true", "techniques.compile.enabled=true", each=True)
    assert not any("without checkpointing" in name for name in found)
    assert any("without compile" in name for name in found)
    assert any("without checkpointing: left out" in note for note in notes)


def test_a_loss_that_depends_on_the_split_is_out_of_bounds(monkeypatch):
    """The mean of each micro-batch instead of the mean of the step: right for one micro-batch, wrong for several."""
    backward = TrainStep.backward

    def mean_of_means(self, batches, normalizer, index=0, counted=None):
        kept = list(batches)
        counts = [int((batch.targets != IGNORE_INDEX).sum()) * len(kept) for batch in kept]
        parts = [backward(self, [batch], count, index) for batch, count in zip(kept, counts, strict=True)]
        return {"loss": sum(part["loss"] for part in parts)}

    monkeypatch.setattr(TrainStep, "backward", mean_of_means)
    splits = by_split(compare()[0])
    assert splits["1 x 4"].within
    assert splits["1 x 4"].loss_off < 1e-5 < splits["4 x 1"].loss_off
    assert not splits["4 x 1"].within


def test_nan_is_out_of_every_bound():
    variant = Compared("x", 1.0, math.nan, 0.0, "w", 0.0, (1.0, 1.0, 1.0))
    assert not variant.within
    assert "loss off by nan" in variant.beyond()[0]
