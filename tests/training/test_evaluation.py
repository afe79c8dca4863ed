"""Evaluation on held-out data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.runs import history

from fxtune.data.config import OnOverlap, SourceConfig
from fxtune.training import trainer as train

ASSETS = Path(train.__file__).parents[1] / "assets"


def test_evaluation_equals_plain_transformers_and_best_checkpoint_is_kept(small, cwd, chats):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small.data.eval_sources = [SourceConfig(path=str(chats), limit=10)]
    small.data.on_overlap = OnOverlap.keep
    small.train.eval_every, small.checkpoint.keep, small.run.dir = 2, 1, "run"
    small.techniques.lora.enabled, small.optimizer.lr = (
        False,
        1e-9,
    )  # the weights stay, so each evaluation can be checked
    train.run(small)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    plain = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    total, count = 0.0, 0
    for line in chats.read_text().splitlines()[:10]:
        row = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["assistant_masks"]).bool()
        loss = plain(input_ids=ids[None], labels=ids.where(mask, torch.tensor(-100))[None]).loss
        total, count = total + loss.item() * int(mask.sum()), count + int(mask.sum())
    lines = [line for line in history(Path("run")) if "eval/loss" in line]
    assert [line["train/step"] for line in lines] == [2, 4, 6]
    for line in lines:
        assert line["eval/loss"] == pytest.approx(total / count, rel=1e-4)
        assert line["eval/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
    best = min(lines, key=lambda line: line["eval/loss"])["train/step"]
    kept = sorted(path.name for path in Path("run/checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best:08d}", "step-00000006"})
