"""Compares the Triton kernels of fp8 and of gated activations with adapters with their plain references."""

from __future__ import annotations

import torch

from fxtune.kernels import fp8, fp8_triton, swiglu, swiglu_lora_triton

torch.manual_seed(0)
fp8_triton.HELD = 1024
compared = 0
for width in (5, 1024, 2500):
    for dtype in (torch.float32, torch.bfloat16):
        for powers in (False, True):
            x = (torch.randn(4, width + 9) * torch.logspace(-30, 20, 4)[:, None]).to(dtype)[:, 3 : 3 + width]
            x[2] = 0
            codes, scales = torch.empty(4, width, dtype=fp8.E4M3), torch.empty(4, 1)
            fp8_triton.quantize_rows(x, codes, scales, fp8.SMALLEST, powers)
            expected, expected_scales = fp8.quantize_rows(x, powers)
            assert torch.equal(scales, expected_scales)
            # The interpreter (triton 3.9) loses the carry where rounding reaches the next power of two, and rounds ties up.
            same = codes.view(torch.uint8) == expected.view(torch.uint8)
            assert same.float().mean() > 0.93, same.float().mean()
            made = fp8_triton.dequantize_rows(codes, scales, torch.empty(4, width))
            assert torch.equal(made, fp8.dequantize_rows(codes, scales))
            compared += 1
for width in (5, 1024, 2500):
    x, columns = torch.randn(4, width), torch.rand(1, width)
    codes, scales = torch.empty(4, width, dtype=fp8.E4M3), torch.empty(4, 1)
    fp8_triton.quantize_rows(x, codes, scales, fp8.SMALLEST, False, columns)
    expected, expected_scales = fp8.quantize_rows(x, columns=columns)
    assert torch.equal(scales, expected_scales)
    assert (codes.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.93
    compared += 1
for shape in ((5, 7), (128, 256), (130, 300)):
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    into = torch.empty(shape[::-1], dtype=torch.uint8)
    fp8_triton.transpose(x, into)
    assert torch.equal(into, x.t())
    compared += 1
for act in swiglu.ACTS:
    for rows, width, rank, above in ((70, 200, 32, 16), (5, 64, 48, 96)):
        gate_up, dp = torch.randn(rows, 2 * width + 8)[:, : 2 * width], torch.randn(rows, width + 3)[:, :width]
        share = torch.randn(rows, rank + 8)[:, :rank], 0.3 * torch.randn(2 * width, rank)
        more = torch.randn(rows, above), torch.randn(above, width)
        p, mine, theirs = (torch.empty(rows, size) for size in (width, 2 * width, 2 * width))
        swiglu_lora_triton.forward(act, gate_up, p, share)
        torch.testing.assert_close(p, swiglu.gated(act, gate_up, share, torch.empty_like(p)), rtol=1e-4, atol=1e-4)
        other = dp.clone()
        swiglu_lora_triton.backward(act, gate_up, dp, mine, share, more)
        swiglu.gated_backward(act, gate_up, other, share, more, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dp, other, rtol=1e-4, atol=1e-4)
        compared += 1
print(compared, "compared")
