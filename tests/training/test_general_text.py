"""What a run forgets: its loss and its KL from the base on general text, beside plain transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.harness import run as run_command
from support.harness import write_preferences
from support.rows import write_jsonl
from support.runs import history, same_export
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.config.root import Config
from fxtune.data.config import SourceConfig
from fxtune.errors import ConfigError
from fxtune.objectives.distillation import Distillation
from fxtune.objectives.reward import Reward
from fxtune.reports.page import render
from fxtune.reports.run_files import RunFiles
from fxtune.training import trainer

ASSETS = Path(trainer.__file__).parents[1] / "assets"
TEXTS = [json.loads(line)["text"] for line in (ASSETS / "data" / "tiny_general.jsonl").read_text().splitlines()]


def measured(run: str = "run") -> dict[str, float]:
    result = json.loads(Path(run, "result.json").read_text())
    return {name: value for name, value in result.items() if name.startswith("general/")}


def log_probs(model, texts: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(the distributions of the next token, the tokens themselves) of each text, which its end-of-text token ends."""
    tokenizer, found = AutoTokenizer.from_pretrained(ASSETS / "tiny"), []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            found.append((model(input_ids=ids).logits[0, :-1].log_softmax(-1), ids[0, 1:]))
    return found


def expected(tuned, texts: list[str]) -> dict[str, float]:
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    before, after = log_probs(base, texts), log_probs(tuned, texts)
    count = sum(len(ids) for _, ids in before)
    loss = [-sum(float(p.gather(1, ids[:, None]).sum()) for p, ids in side) / count for side in (before, after)]
    kl = sum(float((p.exp() * (p - q)).sum()) for (p, _), (q, _) in zip(before, after, strict=True)) / count
    return {"general/loss_before": loss[0], "general/loss": loss[1], "general/kl": kl}


@pytest.fixture
def holds_out(small, cwd) -> Config:
    small.data.eval_fraction, small.run.dir, small.optimizer.lr = 0.2, "run", 4e-3
    return small


@pytest.mark.parametrize("packing", [False, True])
def test_figures_equal_plain_transformers_and_peft(holds_out, packing):
    holds_out.data.packing, holds_out.data.sequence_length = packing, 512
    trainer.run(holds_out)
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    found, plain = measured(), expected(PeftModel.from_pretrained(base, "run/adapter").eval(), TEXTS)
    assert found == {name: pytest.approx(value, rel=2e-3) for name, value in plain.items()}
    assert found["general/kl"] > 0.01


def test_full_fine_tuning_compares_with_the_stored_likeliest_tokens(holds_out):
    write_jsonl(Path("mine.jsonl"), [{"text": text} for text in TEXTS[:6]])
    holds_out.data.general = [SourceConfig(path="mine.jsonl")]
    holds_out.techniques.lora.enabled, holds_out.optimizer.lr = False, 1e-3
    trainer.run(holds_out)
    plain = expected(AutoModelForCausalLM.from_pretrained("run/model", dtype=torch.float32), TEXTS[:6])
    found = measured()
    assert found["general/loss"] == pytest.approx(plain["general/loss"], rel=2e-3)
    assert 0.8 * plain["general/kl"] < found["general/kl"] < 1.01 * plain["general/kl"]


def test_a_run_learns_the_same_bits_with_and_without_it_and_after_a_pause(holds_out, said):
    holds_out.techniques.lora.dropout = 0.1
    trainer.run(holds_out)
    line = next(line for line in said if "general text" in line)
    assert f"{measured()['general/loss_before']:.3f} -> {measured()['general/loss']:.3f}" in line
    page = render([RunFiles(Path("run"))])
    assert f"{measured()['general/loss_before']:.4g} → {measured()['general/loss']:.4g}" in page
    assert f"{measured()['general/kl']:,.3g} nats a token" in page
    holds_out.run.dir, holds_out.train.pause_after = "paused", 3
    trainer.run(holds_out)
    holds_out.train.pause_after = None
    trainer.run(holds_out)
    assert measured("paused") == measured()
    holds_out.run.dir, holds_out.data.general = "without", []
    trainer.run(holds_out)
    assert measured("without") == {}
    assert same_export("run", "paused")
    assert same_export("run", "without")
    assert [row["train/step"] for row in history(Path("run")) if "general/loss_before" in row] == [0]


def test_a_run_whose_measurement_finds_no_memory_still_exports(holds_out, said, monkeypatch):
    def scarce(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Distillation, "loss", scarce)
    trainer.run(holds_out)
    assert any("Not measured" in line and "data.general=[]" in line for line in said)
    assert Path("run/adapter/adapter_model.safetensors").exists()
    assert "general/loss" not in measured()


def test_a_run_without_held_out_data_and_a_model_that_writes_no_text_measure_nothing(small, cwd, said):
    small.run.dir = "run"
    trainer.run(small)
    assert measured() == {}
    write_preferences(Path("pairs.jsonl"), Path("judged.jsonl"))
    small.data.sources[0].path, small.data.eval_fraction = "pairs.jsonl", 0.3
    small.objective, small.run.dir = Reward("reward"), "scores"
    trainer.run(small)
    assert measured("scores") == {}
    assert not [line for line in said if "general" in line]


def test_rows_that_are_no_texts_are_refused(holds_out):
    write_jsonl(Path("pairs.jsonl"), [{"prompt": "Say a color.", "chosen": "red", "rejected": "seven"}])
    holds_out.data.general = [SourceConfig(path="pairs.jsonl")]
    with pytest.raises(ConfigError, match=r"data\.general: pairs\.jsonl has rows of format preference"):
        trainer.run(holds_out)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_ranks_that_share_the_weights_measure_the_same(cwd, lora):
    words = [
        *("+recipe=quickstart", "run.device=cpu", "train.epochs=null", "train.max_steps=2", "data.questions.limit=2"),
        *("train.global_batch_size=8", f"techniques.lora.enabled={str(lora).lower()}", "optimizer.lr=1e-3"),
        *("data.cache_dir=cache", "run.report=false"),
    ]
    for name, ranks in (("one", "run.gpus=1"), ("two", "run.gpus=2 parallel.shard=2")):
        done = run_command([*words, f"run.dir={name}", *ranks.split()], cwd)
        assert done.code == 0, done.text
    assert measured("two") == {name: pytest.approx(value, rel=2e-3) for name, value in measured("one").items()}
