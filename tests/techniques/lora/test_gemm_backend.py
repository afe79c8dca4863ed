"""The GEMM backend of a run; what it computes is tested in tests/kernels/test_matmul.py."""

from __future__ import annotations

import json

import pytest

from fxtune.facts.options import Matmul, Switch
from fxtune.techniques.lora import gemm_backend


@pytest.mark.slow
def test_a_resumed_run_keeps_the_gemm_backend_that_auto_chose(small, cwd, monkeypatch):
    from fxtune.training import trainer

    def broken(*_):
        raise TypeError("no such architecture")

    small.techniques.lora.fused, small.train.max_steps, small.checkpoint.every = Switch.on, 2, 1
    small.run.dir = "run"
    monkeypatch.setattr(gemm_backend, "refusal", lambda facts: None)
    with monkeypatch.context() as patch:
        patch.setattr(gemm_backend, "prepare", broken)
        patch.setattr(trainer.Trainer, "_finish", broken)
        with pytest.raises(TypeError):
            trainer.run(small)
    setting = json.loads((cwd / "run" / "setting.json").read_text())
    assert setting["techniques"]["lora"]["matmul"] == "cublas"
    monkeypatch.setattr(gemm_backend, "prepare", lambda *_: None)
    made = []
    monkeypatch.setattr(trainer.Trainer, "_loop", lambda self: made.append(self))
    trainer.run(small)
    assert made[0].techniques.lora.matmul is Matmul.cublas, "today auto would take cute"
    assert made[0].language_model.gemm == "cublas"
    assert made[0].state.step == 2
