"""What a user sees of `fxtune verify`: the evidence for a correct recipe, and the reason why a wrong one fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processors import write_model, write_picture_rows
from support.rows import write_jsonl
from support.tuning import QUICKSTART, TINY

from fxtune.cli.main import main
from fxtune.diagnostics import verification
from fxtune.objectives import language_model
from fxtune.techniques import pipeline
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.tracking import throughput


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
    matching = [row for row in found["evidence"] if row["technique"] == name and asked in row["asked"]]
    assert len(matching) == 1, found["evidence"]
    return matching[0]


def test_the_quickstart_is_as_asked_for_and_no_file_is_left(cwd, capsys):
    code, found = verified(cwd)
    assert code == 0
    assert found["acted"]
    assert {"attention", "precision", "lora", "data", "parameters", "loss", "optimizer"} <= {
        row["technique"] for row in found["evidence"]
    }
    assert all(row["acted"] for row in found["evidence"])
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
    first, second = verification.observe_data(data)
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
    assert not next(iter(verification.observe_data(data))).acted


def test_a_technique_that_does_nothing_is_named_and_the_exit_code_is_1(cwd, monkeypatch, capsys):
    monkeypatch.setattr(Checkpointing, "apply", lambda self, model, world: model)
    code, found = verified(cwd, "techniques.checkpointing.enabled=true")
    assert code == 1
    assert not found["acted"]
    failed = [row["technique"] for row in found["evidence"] if not row["acted"]]
    assert set(failed) == {"checkpointing"}
    out, err = capsys.readouterr()
    assert out.count("✗") == len(failed)
    assert err.startswith(f"fxtune: {len(failed)} of ")
    assert "checkpointing: asked for" in err
    assert "Traceback" not in err


def test_an_adapter_that_no_gradient_reaches_is_named(cwd, monkeypatch):
    from fxtune.training import builder

    original = builder.assemble

    def assemble(*arguments, **named):
        model = original(*arguments, **named)
        module = model.module.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
        module.register_forward_hook(lambda module, inputs, output: output.detach())
        return model

    monkeypatch.setattr(builder, "assemble", assemble)
    code, found = verified(cwd)
    assert code == 1
    parameters = row(found, "parameters", "adapters")
    assert not parameters["acted"]
    assert "none in base_model.model.model.layers.1.mlp.up_proj" in parameters["observed"]


def test_a_trained_token_that_no_document_reads_needs_no_gradient(cwd):
    write_jsonl(Path("rows.jsonl"), [{"prompt": f"is {i} even?", "completion": "yes"} for i in range(8)])
    words = (
        "model.init=random",
        "model.architecture={tie_word_embeddings: false}",
        "data.sources=[{path: rows.jsonl}]",
    )
    code, found = verified(cwd, *words, 'techniques.lora.train_tokens=["<|im_end|>"]')
    assert (code, row(found, "parameters", "the adapters are trained and nothing else")["acted"]) == (0, True)


def test_a_base_that_is_not_frozen_is_named(cwd, monkeypatch):
    from fxtune.techniques.lora.technique import Lora

    original = Lora.apply

    def apply(self, model, world):
        original(self, model, world)
        model.module.get_submodule("base_model.model.model.norm").weight.requires_grad_(True)

    monkeypatch.setattr(Lora, "apply", apply)
    code, found = verified(cwd)
    assert code == 1
    assert "not as asked: base_model.model.model.norm.weight" in row(found, "parameters", "adapters")["observed"]


def test_what_a_run_builds_to_count_its_work_is_built(monkeypatch):
    def count(*_: Any) -> None:
        raise RuntimeError("layers differ")

    monkeypatch.setattr(throughput, "training_cost", count)
    with pytest.raises(RuntimeError, match="layers differ"):
        main(["verify", *TINY])


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
    assert not any("do not see each other" in row["asked"] for row in found["evidence"])


def test_errors_have_their_exit_codes(cwd, capsys):
    assert main(["verify", QUICKSTART, "techniques.lora.r=0"]) == 2
    assert main(["verify", QUICKSTART, "techniques.rope.enabled=true", "techniques.rope.factor=1.0"]) == 2
    assert main(["verify", QUICKSTART, "data.sources.0.path=nowhere.jsonl"]) == 3
    assert main(["verify", *TINY, "--json", "no/such/folder.json"]) == 6
    assert main(["verify", QUICKSTART, "--los"]) == 2
    assert main(["preview", QUICKSTART, "--loss"]) == 2
    assert "unrecognized arguments: --loss" in capsys.readouterr().err


# --- the loss compared with plain transformers


def compared(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["loss"]}


def test_each_compares_with_plain_transformers_and_without_each_technique(cwd, capsys):
    code, found = verified(cwd, "--each")
    assert code == 0, found["loss"]
    names = list(compared(found))
    assert names[0] == "plain transformers, float32"
    assert {name.split(", ")[1] for name in names if name.startswith("fxtune") and "without" not in name} == {
        "1 x 4 as configured",
        "2 x 2",
        "4 x 1",
    }
    assert "fxtune, without attention, 1 x 4 as configured" in names
    assert "each parameter's gradient" in capsys.readouterr().out


def test_documents_that_see_each_other_are_out_of_bounds(cwd, monkeypatch, capsys):
    """Packing without isolation: positions continue, and nothing separates the documents."""
    original = language_model.model_inputs

    def one_document(model, input_ids, position_ids, cu_seqlens, *pieces):
        length = input_ids.shape[1]
        rows = torch.arange(input_ids.shape[0] + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device) * length
        return original(model, input_ids, torch.arange(length, device=input_ids.device).expand_as(input_ids), rows)

    for module in (pipeline, language_model):
        monkeypatch.setattr(module, "model_inputs", one_document)
    code, found = verified(cwd, "--loss")
    assert code == 1
    ours = [row for row in found["loss"] if row["name"].startswith("fxtune")]
    assert ours
    assert min(row["loss_off"] for row in ours) > 1e-5
    assert min(row["gradient_off"] for row in ours) > 0.1
    assert not row(found, "data", "real row")["acted"]
    assert "gradient off by" in capsys.readouterr().err


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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_rows_with_images_have_the_loss_and_the_gradients_of_plain_transformers(family, cwd):
    """Files to loss: rows, images, packing and M-RoPE against transformers' own model, a document at a time."""
    model, rows = write_model(family, cwd / "model"), write_picture_rows(cwd / "pictures")
    words = [f"model.path={model}", f"data.sources=[{{path: {rows}}}]", "data.sequence_length=256"]
    steps = ["train.max_steps=2", "train.micro_batch_size=2", "train.global_batch_size=4", "run.device=cpu"]
    code = main(["verify", "--loss", "--json", "seen.json", *words, *steps, "data.packing=true"])
    found = seen(cwd / "seen.json")
    assert code == 0, found
    assert row(found, "data", "documents of a real row")["acted"]
