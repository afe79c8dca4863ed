"""Advice where memory runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.architectures import facts_of, random_model

from fxtune.errors import HardwareError
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.config import OptimizerConfig
from fxtune.techniques.pipeline import Pipeline
from fxtune.training import oom_advice
from fxtune.training import trainer as train
from fxtune.training.oom_advice import MemoryPhase


def test_out_of_memory_error_gives_advice(small, cwd, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. See documentation for Memory Management"
        )

    monkeypatch.setattr(LanguageModel, "summed_loss", full)
    with pytest.raises(
        HardwareError, match=r"1 row at once: .*allocate 2\.00 GiB\nWhat would help most.*\n.* GiB less"
    ):
        train.run(small)


def advice(phase: MemoryPhase, **changes) -> list[str]:
    facts = replace(facts_of(random_model("llama")), **changes)
    techniques, _ = Pipeline().resolved(facts)
    need, found = oom_advice.advice(facts, techniques, OptimizerConfig(), phase)
    assert need > 0
    assert [change.saves for change in found] == sorted((change.saves for change in found), reverse=True)
    assert all(change.saves > 0 for change in found)
    return [change.setting for change in found]


def test_advice_depends_on_what_the_phase_holds():
    rows = dict(sequence_length=64, rows=(64,), micro_batch_size=64)
    assert "train.micro_batch_size=32" in advice(MemoryPhase.training, **rows)
    assert not any("micro_batch" in setting for setting in advice(MemoryPhase.weights, **rows))
    assert "techniques.lora.enabled=true" in advice(MemoryPhase.weights, **rows)


def test_text_without_changes_names_general_remedies():
    assert "shorter rows" in oom_advice.to_text(1, [], MemoryPhase.training, 1, 8)
