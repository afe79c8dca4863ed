"""What a user sees of `fxtune verify`: the evidence for a correct recipe, and the reason why a wrong one fails."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tuning import QUICKSTART, TINY

from fxtune.cli import verify
from fxtune.cli.main import main
from fxtune.diagnostics import parity
from fxtune.errors import CheckError
from fxtune.objectives import language_model
from fxtune.techniques import pipeline
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.training.step import TrainStep


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """The quickstart's data is tokenized once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def seen(file) -> dict[str, Any]:
    return json.loads(file.read_text())


def verified(cwd, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the content of --json."""
    file = cwd / "seen.json"
    code = main(["verify", *TINY, "--json", str(file), *words])
    found = seen(file)
    file.unlink()
    return code, found


def row(found: dict[str, Any], name: str, asked: str) -> dict[str, Any]:
    matching = [one for one in found["evidence"] if one["technique"] == name and asked in one["asked"]]
    assert len(matching) == 1, found["evidence"]
    return matching[0]


def test_the_quickstart_is_as_asked_for_and_no_file_is_left(cwd, capsys):
    code, found = verified(cwd)
    assert code == 0
    assert found["acted"]
    assert {"attention", "precision", "lora", "data", "parameters", "loss", "optimizer"} <= {
        one["technique"] for one in found["evidence"]
    }
    assert all(one["acted"] for one in found["evidence"])
    assert found["decided"]
    assert list(cwd.iterdir()) == []
    out, err = capsys.readouterr()
    for part in (*found["decided"], "asked for", "observed", "acted", "✓"):
        assert part in out
    assert "✗" not in out
    assert "fxtune:" not in err


def test_the_share_of_supervised_tokens_is_that_of_the_rows(cwd):
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    builder = RunBuilder(load(TINY))
    _, data = builder.read()
    plan = data.training
    batches = [plan.batch(step, micro) for step in range(4) for micro in range(plan.micro_batches(step))]
    tokens, supervised = sum(batch.tokens for batch in batches), sum(batch.supervised for batch in batches)
    first, second = verify.observe_data(data)
    assert f"{supervised:,} of {tokens:,} tokens" in first.observed
    assert first.acted
    assert f"{1 - tokens / sum(batch.input_ids.numel() for batch in batches):.1%} padding" in second.observed


@pytest.mark.parametrize("wrong", ["none", "all"])
def test_chats_with_no_or_all_tokens_supervised_are_not_as_asked(monkeypatch, wrong):
    from fxtune.config.compose import load
    from fxtune.data.batches import plan as plans
    from fxtune.training.builder import RunBuilder

    _, data = RunBuilder(load(TINY)).read()
    original = plans.build_batch

    def empty_or_full(tables, spec):
        batch = original(tables, spec)
        real = batch.position_ids > 0
        targets = (
            batch.input_ids.roll(-1, 1).where(real.roll(-1, 1), torch.tensor(-100))
            if wrong == "all"
            else (torch.full_like(batch.targets, -100))
        )
        return replace(batch, targets=targets)

    monkeypatch.setattr(plans, "build_batch", empty_or_full)
    assert not next(iter(verify.observe_data(data))).acted


def test_a_technique_that_does_nothing_is_named_and_the_exit_code_is_1(cwd, monkeypatch, capsys):
    monkeypatch.setattr(Checkpointing, "apply", lambda self, model, world: model)
    code, found = verified(cwd, "techniques.checkpointing.enabled=true")
    assert code == 1
    assert not found["acted"]
    failed = [one["technique"] for one in found["evidence"] if not one["acted"]]
    assert set(failed) == {"checkpointing"}
    out, err = capsys.readouterr()
    assert out.count("✗") == len(failed)
    assert err.startswith(f"fxtune: {len(failed)} of ")
    assert "checkpointing: asked for" in err
    assert "Traceback" not in err


def test_an_adapter_that_no_gradient_reaches_is_named(cwd, monkeypatch):
    from fxtune.techniques.pipeline import Pipeline

    original = Pipeline.build

    def build(self, *arguments):
        model = original(self, *arguments)
        module = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
        module.register_forward_hook(lambda module, inputs, output: output.detach())
        return model

    monkeypatch.setattr(Pipeline, "build", build)
    code, found = verified(cwd)
    assert code == 1
    parameters = row(found, "parameters", "adapters")
    assert not parameters["acted"]
    assert "none in base_model.model.model.layers.1.mlp.up_proj" in parameters["observed"]


def test_a_base_that_is_not_frozen_is_named(cwd, monkeypatch):
    from fxtune.techniques.lora.technique import Lora

    original = Lora.apply

    def apply(self, model, world):
        made = original(self, model, world)
        made.get_submodule("base_model.model.model.norm").weight.requires_grad_(True)
        return made

    monkeypatch.setattr(Lora, "apply", apply)
    code, found = verified(cwd)
    assert code == 1
    assert "not as asked: base_model.model.model.norm.weight" in row(found, "parameters", "adapters")["observed"]


def test_a_loss_that_is_not_finite_is_named(cwd, monkeypatch):
    original = language_model.LanguageModel.summed_loss
    monkeypatch.setattr(
        language_model.LanguageModel, "summed_loss", lambda self, batch: original(self, batch) * float("nan")
    )
    code, found = verified(cwd)
    assert code == 1
    assert not row(found, "loss", "finite")["acted"]


def test_full_fine_tuning_trains_everything(cwd):
    code, found = verified(cwd, "techniques.lora.enabled=false", "data.packing=false")
    assert code == 0
    parameters = row(found, "parameters", "all parameters")
    assert "100.00%" in parameters["observed"]
    assert not any("do not see each other" in one["asked"] for one in found["evidence"])


def test_errors_have_their_exit_codes(cwd, capsys):
    assert main(["verify", QUICKSTART, "techniques.lora.r=0"]) == 2
    assert main(["verify", QUICKSTART, "techniques.rope.enabled=true", "techniques.rope.factor=1.0"]) == 2
    assert main(["verify", QUICKSTART, "data.sources.0.path=nowhere.jsonl"]) == 3
    assert main(["verify", *TINY, "--json", "no/such/folder.json"]) == 6
    assert main(["verify", QUICKSTART, "--los"]) == 2
    assert main(["verify", "-m", QUICKSTART, "run.seed=1,2", "--json", "one.json"]) == 2
    assert main(["preview", QUICKSTART, "--loss"]) == 2
    assert "unrecognized arguments: --loss" in capsys.readouterr().err


# --- the loss compared with plain transformers


def compared(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found["loss"]}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["techniques.checkpointing.enabled=true", "train.micro_batch_size=2"], id="packed lora"),
        pytest.param(
            ["data.packing=false", "techniques.lora.enabled=false", "data.buckets=[128,256]"], id="padded full"
        ),
        pytest.param(["model.dtype=bfloat16"], id="bfloat16 base"),
        pytest.param(["techniques.precision.autocast=bfloat16", "techniques.lora.enabled=false"], id="autocast"),
    ],
)
def test_loss_and_gradients_are_those_of_plain_transformers_for_every_split(cwd, capsys, words):
    code, found = verified(cwd, "--loss", *words)
    rows = compared(found)
    assert code == 0, found["loss"]
    exact = not any("bfloat16" in word for word in words)
    assert next(iter(rows)) == "plain transformers, float32"
    assert {name.split(", ")[1].removesuffix(" as configured") for name in rows if name.startswith("fxtune")} == {
        "1 x 4",
        "2 x 2",
        "4 x 1",
    }
    ours = [one for name, one in rows.items() if name.startswith("fxtune")]
    assert all(one["loss"] > 0 for one in ours)
    if exact:
        assert max(one["gradient_off"] for one in ours) < 1e-5
    else:
        assert 0 < rows["plain transformers, bfloat16"]["gradient_off"] < 0.1
    assert "each parameter's gradient" in capsys.readouterr().out


def test_each_switches_off_one_technique_at_a_time(cwd, capsys):
    code, found = verified(cwd, "--each", "techniques.checkpointing.enabled=true")
    assert code == 0
    assert {name for name in compared(found) if "without" in name} == {
        "fxtune, without attention, 1 x 4 as configured",
        "fxtune, without checkpointing, 1 x 4 as configured",
    }
    assert "Not switched off: precision and lora." in " ".join(capsys.readouterr().out.split())


def test_a_technique_that_another_needs_is_not_switched_off(cwd, capsys, monkeypatch):
    def check(self, facts):
        if not facts.techniques.checkpointing.enabled:
            yield "fullgraph: needs checkpointing, says this test."

    monkeypatch.setattr("fxtune.techniques.compile.technique.Compile.check", check)
    monkeypatch.setattr("fxtune.techniques.compile.technique.Compile.apply", lambda self, model, world: model)
    monkeypatch.setattr("fxtune.techniques.compile.technique.Compile.verify", lambda self, model, probe: iter(()))
    code, found = verified(cwd, "--each", "techniques.checkpointing.enabled=true", "techniques.compile.enabled=true")
    assert code == 0
    assert not any("without checkpointing" in name for name in compared(found))
    assert any("without compile" in name for name in compared(found))
    assert "without checkpointing: left out" in capsys.readouterr().out


def test_documents_that_see_each_other_are_out_of_bounds(cwd, monkeypatch, capsys):
    """Packing without isolation: positions continue, and nothing separates the documents."""
    original = language_model.model_inputs

    def one_document(model, input_ids, position_ids, cu_seqlens):
        length = input_ids.shape[1]
        rows = torch.arange(input_ids.shape[0] + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device) * length
        return original(model, input_ids, torch.arange(length, device=input_ids.device).expand_as(input_ids), rows)

    for module in (pipeline, language_model):
        monkeypatch.setattr(module, "model_inputs", one_document)
    code, found = verified(cwd, "--loss")
    assert code == 1
    ours = [one for one in found["loss"] if one["name"].startswith("fxtune")]
    assert ours
    assert min(one["loss_off"] for one in ours) > 1e-5
    assert min(one["gradient_off"] for one in ours) > 0.1
    assert not row(found, "data", "real row")["acted"]
    assert "gradient off by" in capsys.readouterr().err


def test_a_loss_that_depends_on_the_split_is_out_of_bounds(cwd, monkeypatch):
    """The mean of each micro-batch instead of the mean of the step: right for one micro-batch, wrong for several."""
    backward = TrainStep.backward

    def mean_of_means(self, batches, normalizer, index=0):
        kept = list(batches)
        parts = [backward(self, [batch], batch.supervised * len(kept), index)["loss"] for batch in kept]
        return {"loss": sum(parts)}

    monkeypatch.setattr(TrainStep, "backward", mean_of_means)
    code, found = verified(cwd, "--loss")
    assert code == 1
    off = {name.split(", ")[1]: one["loss_off"] for name, one in compared(found).items() if name.startswith("fxtune")}
    assert off["1 x 4 as configured"] < 1e-5 < off["4 x 1"]


def test_dynamic_rope_has_no_reference(cwd, capsys):
    code = main(
        [
            "verify",
            *TINY,
            "--loss",
            "techniques.rope.enabled=true",
            "techniques.rope.type=dynamic",
            "techniques.rope.factor=2.0",
        ]
    )
    assert code == 2
    assert "techniques.rope.type=dynamic" in capsys.readouterr().err


def test_nan_is_out_of_every_bound():
    nan = float("nan")
    one = parity.Compared("x", 1.0, nan, 0.0, "w", 0.0, (1.0, 1.0, 1.0))
    assert not one.within
    assert "loss off by nan" in one.beyond()[0]


def test_check_error_is_exit_code_1():
    assert CheckError("x").exit_code == 1
