"""Plain torch in place of Liger's kernels, which need a GPU."""

from __future__ import annotations

import pytest
from support.liger import (
    geglu,
    layer_norm,
    rms_norm,
    swiglu,
)


@pytest.fixture
def stand_ins(monkeypatch):
    from liger_kernel.transformers import geglu as geglu_file
    from liger_kernel.transformers import layer_norm as layer_norm_file
    from liger_kernel.transformers import rms_norm as rms_norm_file
    from liger_kernel.transformers import swiglu as swiglu_file

    monkeypatch.setattr(rms_norm_file, "LigerRMSNormFunction", rms_norm)
    monkeypatch.setattr(layer_norm_file, "_functional_layer_norm", layer_norm)
    monkeypatch.setattr(swiglu_file, "LigerSiLUMulFunction", swiglu)
    monkeypatch.setattr(geglu_file, "LigerGELUMulFunction", geglu)
