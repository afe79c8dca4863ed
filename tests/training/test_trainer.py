"""The loop against plain transformers and peft, and interrupted and resumed."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.processors import write_model, write_picture_rows
from support.runs import figures, history, losses, same_export

from fxtune.config.root import Resume
from fxtune.data.config import OnOverlap, SourceConfig
from fxtune.errors import ConfigError, DataError
from fxtune.models.load import DType, ModelConfig
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.schedule import ScheduleName
from fxtune.training import trainer as train

VARYING = ("train/data_wait", "train/memory_gib", "train/mfu", "time")
"""Figures that differ from run to run."""
ASSETS = Path(train.__file__).parents[1] / "assets"


@pytest.mark.vital
def test_first_twenty_losses_equal_plain_transformers_and_peft(small, build, chats):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small.train.max_steps, small.train.micro_batch_size, small.train.global_batch_size = 20, 4, 4
    small.optimizer.weight_decay = 0.01
    trainer = build(small)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    plain = get_peft_model(
        plain, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ours = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(ours[name])

    # Ids and masks come from transformers' own chat template call, padding and labels from here.
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    encoded = [tokenizer.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True) for row in rows]
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    expected = []
    for step in range(20):
        documents = [document for _, document in trainer.plan.documents(step, 0)]
        longest = max(len(encoded[d]["input_ids"]) for d in documents)
        ids = torch.zeros(4, longest, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, d in enumerate(documents):
            tokens, marks = torch.tensor(encoded[d]["input_ids"]), torch.tensor(encoded[d]["assistant_masks"])
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            labels[row, : len(tokens)] = tokens.where(marks.bool(), torch.tensor(-100))
        loss = plain(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 1.0)
        warmed = min(1.0, (step + 1) / 2)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - 2) / 18))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmed * cosine
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    trainer.run()
    assert losses(trainer.folder.path) == pytest.approx(expected, rel=1e-5)


def test_late_logging_writes_the_same_lines(narrow, build):
    """As on a GPU, where the next step is issued before a line is written."""
    narrow.train.log_every, narrow.checkpoint.every, narrow.train.max_steps = 2, 3, 9
    lines = []
    for late in (False, True):
        narrow.run.name = f"late{late}"
        trainer = build(narrow)
        trainer.logs_late = late
        trainer.run()
        lines.append(
            [
                {key: value for key, value in line.items() if "second" not in key and key not in VARYING}
                for line in history(trainer.folder.path)
            ]
        )
    assert lines[0] == lines[1]
    assert [line["train/step"] for line in lines[1] if "train/loss" in line] == [2, 4, 6, 8, 9]


def document_losses(trainer) -> dict[bytes, float]:
    """Loss summed over each document of the first epoch, keyed by the document's tokens."""
    found: dict[bytes, list[float]] = {}
    trainer.model.eval()
    with torch.no_grad():
        for step in range(trainer.plan.steps):
            for micro in range(trainer.plan.micro_batches(step)):
                batch = trainer.plan.batch(step, micro)
                losses = torch.zeros(batch.targets.numel())
                losses[batch.supervised_at] = -trainer.language_model.log_probs(batch)
                for ids, positions, loss, targets in zip(
                    batch.input_ids,
                    batch.position_ids,
                    losses.view_as(batch.targets),
                    batch.targets,
                    strict=True,
                ):
                    starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
                    for start, end in itertools.pairwise(starts):
                        supervised = (targets[start:end] != -100).nonzero().flatten()
                        if len(supervised):  # padding has none
                            last = start + int(supervised[-1]) + 2  # up to and with the last target's token
                            found.setdefault(ids[start:last].numpy().tobytes(), []).append(
                                loss[start:end].sum().item()
                            )
    assert all(max(values) - min(values) < 1e-5 for values in found.values())
    return {key: values[0] for key, values in found.items()}


@pytest.mark.vital
def test_packing_does_not_change_document_losses(small, build):
    small.train.max_steps, small.train.epochs = None, 1
    apart = document_losses(build(small))
    small.data.packing, small.run.name = True, "packed"
    trainer = build(small)
    assert len(trainer.plan.documents(0, 0)) > small.train.micro_batch_size  # several documents a row
    packed = document_losses(trainer)
    assert packed.keys() == apart.keys()
    assert len(apart) >= 40
    for key, value in apart.items():
        assert packed[key] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_gradients_do_not_underflow_in_float16(small, build, monkeypatch):
    """Over a step of a million tokens the gradient of the mean is far below what float16 can hold."""
    small.train.max_steps, gradients = 1, {}
    monkeypatch.setattr(
        Optimizer,
        "step",
        lambda self, *_: gradients.setdefault(
            small.model.dtype, torch.cat([parameter.grad.flatten() for parameter in self.names])
        ),
    )
    for dtype in (DType.float32, DType.float16):
        small.model.dtype, small.run.name = dtype, dtype.value
        trainer = build(small)
        monkeypatch.setattr(trainer.plan, "supervised", lambda step: 10**6)
        trainer.run()
    exact, seen = gradients.values()
    assert (seen - exact).norm() < 0.01 * exact.norm()


@pytest.mark.slow
def test_model_card_describes_the_run(small, build):
    trainer = build(small)
    result = trainer.run()
    card = (trainer.folder.path / "adapter" / "README.md").read_text()
    torch_line = f"| torch | {metadata.version('torch')}"
    for part in (trainer.plan.fingerprint, f"{result['train/loss']:.6g}", torch_line, "| seed | 0 |"):
        assert part in card


@pytest.mark.slow
def test_finished_run_leaves_no_processes(small, build, chats):
    small.data.eval_sources = [SourceConfig(path=str(chats), limit=10)]
    small.data.on_overlap = OnOverlap.keep
    small.train.max_steps, small.train.eval_every, small.loader.num_workers = 2, 1, 1
    others = (
        multiprocessing.active_children()
    )  # tests/support/reference.py keeps one, and may have been at work before
    trainer = build(small)
    trainer.run()
    assert [child for child in multiprocessing.active_children() if child not in others] == []


def test_training_bfloat16_weights_warns(small, build):
    notes = []
    for dtype, lora in ((DType.bfloat16, True), (DType.float32, False), (DType.bfloat16, False)):
        small.model.dtype, small.techniques.lora.enabled, small.run.name = dtype, lora, f"{dtype.value}{lora}"
        build(small, notes.append)
    assert sum("update below 1/512" in note for note in notes) == 1


def test_failed_start_leaves_no_folder(small, cwd):
    small.data.sources = [SourceConfig(path="missing.jsonl")]
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        train.run(small)
    assert not Path("runs").exists()


def test_resume_must_is_refused_without_an_unfinished_run(small, cwd):
    small.run.resume = Resume.must
    with pytest.raises(ConfigError, match="no unfinished run"):
        train.run(small)


@pytest.mark.parametrize("extendable", [True, False])
def test_a_longer_recipe_of_a_finished_run_is_told_how_to_go_on_with_it(narrow, cwd, said, extendable):
    """The advice is followed, and acts."""
    narrow.schedule.name = ScheduleName.constant if extendable else ScheduleName.cosine
    narrow.train.max_steps = 1
    train.run(narrow)
    narrow.train.max_steps = 2
    train.run(narrow)
    (line,) = [line for line in said if "finished run of this recipe" in line]
    key, value = re.search(r"(run\.dir|model\.adapter)=(\S+)", line).groups()
    assert key == ("run.dir" if extendable else "model.adapter")
    if extendable:
        narrow.run.dir = value
    else:
        narrow.model.adapter = value
    train.run(narrow)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run", "run-2", *["run-3"] * (not extendable)]


@pytest.mark.vital
def test_adapter_loaded_by_plain_peft_gives_the_trained_logits(small, build):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = build(small)
    trainer.run()
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32), trainer.folder.path / "adapter"
    ).eval()
    trainer.model.eval()
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, trainer.model(input_ids=ids).logits, atol=1e-5)
        with plain.disable_adapter():
            assert not torch.allclose(plain(input_ids=ids).logits, trainer.model(input_ids=ids).logits, atol=1e-2)


def test_paused_run_goes_on_with_the_same_bits_at_the_rate_of_the_whole_run(narrow, cwd, said):
    narrow.run.dir = "whole"
    narrow.run.deterministic = True
    train.run(narrow)
    narrow.run.dir = "paused"
    for pause in (2, 5, None):
        narrow.train.pause_after = pause
        train.run(narrow)
        if pause:
            assert said[-1].startswith(f"Paused after step {pause} of 6 (train.pause_after).")
            assert not Path("paused/result.json").exists()
    assert figures("whole", "step", "loss", "lr") == figures("paused", "step", "loss", "lr")
    assert same_export("whole", "paused")


def test_a_resumed_run_with_an_empty_cache_learns_the_same_time(narrow, cwd, tmp_path, said):
    source = (ASSETS / "tiny" / "chat_template.jinja").read_text()
    Path("timed.jinja").write_text("{{ strftime_now('%H:%M:%S') }}\n" + source)
    narrow.data.chat_template, narrow.run.dir = "timed.jinja", "run"
    narrow.train.pause_after = 2
    train.run(narrow)
    begun = json.loads(Path("run/about.json").read_text())["template_time"]
    narrow.data.cache_dir, narrow.train.pause_after = str(tmp_path / "empty"), None
    Path("run/about.json").write_text(json.dumps({"template_time": "2001-02-03T04:05:06"}))
    with pytest.raises(ConfigError):
        train.run(narrow)
    Path("run/about.json").write_text(json.dumps({"template_time": begun}))
    narrow.data.cache_dir = str(tmp_path / "other")
    train.run(narrow)
    assert Path("run/adapter").is_dir()
    assert json.loads(Path("run/about.json").read_text())["template_time"] == begun


def test_an_image_that_goes_while_a_run_trains_stops_it_with_a_checkpoint(small, build, tmp_path):
    """The error names the row. When the file is back, the same command goes on to the same end."""
    rows = write_picture_rows(tmp_path / "pictures")
    small.model = ModelConfig(path=str(write_model("qwen2_5_vl", tmp_path / "model")))
    small.data.sources = [SourceConfig(path=str(rows))]
    small.train.micro_batch_size, small.train.global_batch_size = 1, 2
    small.checkpoint.every, small.run.dir = 0, "run"
    undisturbed = replace(small, run=replace(small.run, dir="undisturbed"))
    expected = train.run(undisturbed)
    trainer, step = build(small), 3
    places = [place for micro in range(2) for place in trainer.plan.documents(step, micro)]
    row = next(document for _, document in places if document % 3)  # the others have no image
    file = next((tmp_path / "pictures").glob(f"{row}-0.*"))
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError, match=rf"rows\.jsonl:{row + 1}: .*{file.name}: there is no such file"):
        trainer.run()
    trainer.folder.release()
    assert (Path("run") / "checkpoints" / f"step-{step:08d}").exists()
    file.write_bytes(content)
    assert train.run(small)["train/loss"] == expected["train/loss"]
