"""liger-kernel's functions still take the arguments that fxtune passes. The kernels run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from fxtune.upstream import liger as upstream


def test_backward_pass_of_rms_norm_takes_these_arguments(monkeypatch):
    ops = pytest.importorskip("liger_kernel.ops")
    import inspect

    signature, given = inspect.signature(ops.rms_norm_backward), {}

    def backward(*arguments, **options):
        given.update(signature.bind(*arguments, **options).arguments)
        return torch.zeros(2, 8), None

    monkeypatch.setattr(ops, "rms_norm_backward", backward)
    x, weight = torch.ones(2, 8), torch.ones(8)
    upstream.rms_norm_backward(x, x, weight, torch.ones(2), 1.0, "gemma", False)
    names = list(signature.parameters)
    assert given[names[0]] is x
    assert given["offset"] == 1.0
    assert not given["in_place"]
    assert not given["needs_dw"]
