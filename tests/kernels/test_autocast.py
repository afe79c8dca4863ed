"""The dtype that an operation computes in."""

import torch

from fxtune.kernels.autocast import compute_dtype


def test_autocast_decides_where_it_is_on():
    x = torch.ones(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert compute_dtype(x) is torch.float32
    assert compute_dtype(x.half()) is torch.float16
