"""scripts/bench/head_loss.py: each tool's loss and gradients are compared with a reference, and a tool that cannot run
gives its message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import head_loss  # noqa: E402

sys.path.remove(str(SCRIPTS))


def test_rows_have_errors_or_the_message_of_a_tool_that_cannot_run(cwd, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["head_loss.py", "--smoke", "--json", "found.json"])
    head_loss.main()
    rows = json.loads(Path("found.json").read_text())
    assert [row["head"] for row in rows] == ["frozen"] * 6 + ["trained"] * 6
    measured = {(row["head"], row["tool"]): row["errors"] for row in rows if "errors" in row}
    for tool in ("fxtune", "torch"):
        assert list(measured["frozen", tool]) == ["loss", "d_hidden"]
        assert list(measured["trained", tool]) == ["loss", "d_hidden", "d_weight"]
        assert max(measured["trained", tool].values()) < 0.01
    assert "| frozen | cut-cross-entropy | " in capsys.readouterr().out


def test_reference_and_its_distance(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.randint(9, (7,))
    monkeypatch.setattr(head_loss, "REFERENCE_ROWS", 3)
    found = head_loss.reference(hidden.detach(), weight.detach(), labels)
    F.cross_entropy(hidden @ weight.t(), labels).backward()
    torch.testing.assert_close(found["d_hidden"], hidden.grad)
    torch.testing.assert_close(found["d_weight"], weight.grad)
    assert head_loss.relative_error(1.1 * weight, weight.detach()) == pytest.approx(0.1, rel=1e-4)
