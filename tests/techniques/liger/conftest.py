"""Plain torch in place of Liger's kernels, which need a GPU."""

from __future__ import annotations

import pytest
from support.liger import (
    gate_up,
    geglu,
    layer_norm,
    rms_norm,
    swiglu,
)


@pytest.fixture
def stand_ins(monkeypatch):
    from liger_kernel import ops

    for name, function in {
        "LigerRMSNormFunction": rms_norm,
        "LigerLayerNormFunction": layer_norm,
        "LigerSiLUMulFunction": swiglu,
        "LigerFusedGateUpSiLUMulFunction": gate_up,
        "LigerGELUMulFunction": geglu,
    }.items():
        monkeypatch.setattr(ops, name, function)
