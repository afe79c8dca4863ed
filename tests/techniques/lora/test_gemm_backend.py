"""The GEMM backend of a run; what it computes is tested in tests/kernels/test_matmul.py."""

from __future__ import annotations

import json
import re

import pytest

from fxtune.facts.options import Switch
from fxtune.techniques.lora import gemm_backend
from fxtune.tracking.tracker import DisplayKind


@pytest.mark.slow
def test_a_resumed_run_says_that_another_kernel_multiplies(small, cwd, monkeypatch, capsys):
    from fxtune.training import trainer

    def broken(*_):
        raise TypeError("no such architecture")

    small.techniques.lora.fused, small.train.max_steps, small.checkpoint.every = Switch.on, 2, 1
    small.run.dir, small.tracking.display = "run", DisplayKind.plain
    monkeypatch.setattr(gemm_backend, "refusal", lambda facts: None)
    with monkeypatch.context() as patch:
        patch.setattr(gemm_backend, "prepare", broken)
        patch.setattr(trainer.Trainer, "_finish", broken)
        with pytest.raises(TypeError):
            trainer.run(small)
    setting = json.loads((cwd / "run" / "setting.json").read_text())
    assert setting["products"] == {"by": "torch"}
    monkeypatch.setattr(gemm_backend, "prepare", lambda *_: None)
    monkeypatch.setattr(trainer.Trainer, "_loop", lambda self: None)
    trainer.run(small)
    assert re.search(r"Since the run was started this changed.*products", " ".join(capsys.readouterr().out.split()))
