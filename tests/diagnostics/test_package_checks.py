"""Package checks compare with plain torch, and tell a broken package from one that is not for this machine."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fxtune.diagnostics import package_checks
from fxtune.diagnostics.package_checks import CHECKS, Check, NotTriedError
from fxtune.kernels import matmul

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_the_installed_packages_work(name):
    pytest.importorskip(name)
    answer = package_checks.main(name, gpu=False)
    assert answer["state"] == "works", answer


@pytest.mark.parametrize(
    ("error", "state", "seen"),
    [
        (None, "works", "it ran, forward and backward"),
        (NotTriedError("imports; for another GPU"), "imports", "imports; for another GPU"),
        (RuntimeError("\nno kernel image\nmore"), "broken", "RuntimeError: no kernel image"),
        (ValueError(), "broken", "ValueError: (no message)"),
    ],
)
def test_what_a_check_raises_decides_the_state(monkeypatch, error, state, seen):
    def run(device):
        if error is not None:
            raise error
        return "it ran"

    monkeypatch.setitem(CHECKS, "kernels", Check("torch", run, gpu=False))
    assert package_checks.main("kernels", gpu=False) == {"state": state, "seen": seen}


def test_a_wrong_result_is_broken(monkeypatch):
    x = torch.ones(4)
    monkeypatch.setitem(
        CHECKS, "kernels", Check("torch", lambda _: str(package_checks._require_close((x, 1.1 * x))), False)
    )
    answer = package_checks.main("kernels", gpu=False)
    assert answer["state"] == "broken"
    assert "off by 9.1e-02 from plain torch's" in answer["seen"]


def test_attention_is_compared_with_float32():
    def kernel(q, k, v, causal):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2), "log-sum-exp"

    assert "within" in package_checks._attention(CPU, kernel)
    with pytest.raises(ArithmeticError, match="off by"):
        package_checks._attention(CPU, lambda q, k, v, causal: kernel(q, k, v, causal=False))


def test_quack_is_compared_with_plain_torch_on_the_gpu_that_it_is_for(monkeypatch):
    calls = []

    def by_quack(left, right, out):
        calls.append((left.shape, right.is_contiguous()))
        out.copy_(left.float() @ right.float() * factor)

    known = {"version": matmul.VERSION, "card": matmul.CAPABILITY}
    monkeypatch.setattr(metadata, "version", lambda name: known["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: known["card"])
    monkeypatch.setattr(matmul, "prepare", lambda *_: None)
    monkeypatch.setattr(matmul, "by_quack", by_quack)
    factor = 1.0
    seen = package_checks._quack(CPU)
    assert re.fullmatch(r"a linear within \d\.\de-03 of float32", seen), seen
    assert [contiguous for _, contiguous in calls] == [False, True], "forward by W^T, backward by W"
    factor = 1.1
    with pytest.raises(ArithmeticError, match="off by"):
        package_checks._quack(CPU)
    known["card"] = (10, 0)
    with pytest.raises(NotTriedError, match=r"compute capability 9\.0, and this GPU has 10\.0"):
        package_checks._quack(CPU)
    known["version"] = "0.7.0"
    with pytest.raises(NotTriedError, match=f"internal functions of {matmul.VERSION}"):
        package_checks._quack(CPU)
