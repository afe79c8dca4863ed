"""Compares the Triton kernel of MXFP4 with its plain reference."""

from __future__ import annotations

import torch

from fxtune.kernels import mxfp4_triton
from fxtune.kernels.quantized import unpack_mxfp4

mxfp4_triton.BYTES = 64

for rows, width in ((1, 32), (5, 96), (7, 64)):
    for dtype in (torch.float16, torch.float32):
        codes = torch.randint(256, (rows, width // 2), dtype=torch.uint8)
        low = 118 if dtype is torch.float16 else 0  # the smallest exponents of float32 are subnormal
        scales = torch.randint(low, 135, (rows, width // 32), dtype=torch.uint8)
        found, wanted = torch.full((2, rows, width), torch.nan, dtype=dtype)
        mxfp4_triton.unpack(codes, scales, found)
        unpack_mxfp4(codes, scales, wanted)
        assert torch.equal(found, wanted), (rows, width, dtype)
for shape, inside in (
    ((3, 5, 96), (5, 64)),
    ((3, 6, 64), (5, 64)),
    ((3, 5, 64), (5, 64)),
):  # gaps: of rows, of matrices
    codes = torch.randint(256, (3, *inside), dtype=torch.uint8)[..., ::2].contiguous()
    scales = torch.randint(118, 135, (3, inside[0], inside[1] // 32), dtype=torch.uint8)
    found, wanted = torch.zeros(2, *shape)
    for unpack, into in ((mxfp4_triton.unpack, found), (unpack_mxfp4, wanted)):
        unpack(codes, scales, into[:, : inside[0], : inside[1]])
    assert torch.equal(found, wanted), shape
every = torch.arange(256, dtype=torch.uint8).view(1, 256)
found, wanted = torch.empty(2, 1, 512)
mxfp4_triton.unpack(every, torch.full((1, 16), 127, dtype=torch.uint8), found)
unpack_mxfp4(every, torch.full((1, 16), 127, dtype=torch.uint8), wanted)
assert torch.equal(found, wanted)
print("compared")
