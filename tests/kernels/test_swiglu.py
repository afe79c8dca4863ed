"""act(gate) * up with adapters, against autograd. On a GPU: tests/gpu/test_fused_lora.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fxtune.kernels.swiglu import ACTS, FusedSums, gated, gated_backward

PLAIN = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}
ROWS, WIDTH, RANK = 5, 6, 2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("act", ACTS)
def test_result_gradient_and_sums_equal_autograd(act):
    gate_up, dp = drawn(ROWS, 2 * WIDTH).requires_grad_(), drawn(ROWS, WIDTH)
    share, above = (drawn(ROWS, RANK), drawn(2 * WIDTH, RANK)), (drawn(ROWS, RANK + 1), drawn(RANK + 1, WIDTH))
    gate, up = (gate_up + share[0] @ share[1].t()).chunk(2, -1)
    p = PLAIN[act](gate) * up
    (expected,) = torch.autograd.grad(p, gate_up, dp + above[0] @ above[1])

    given = gate_up.detach()
    torch.testing.assert_close(gated(act, given, share, torch.empty(ROWS, WIDTH, dtype=torch.float64)), p.detach())
    sums = FusedSums(share[0], above[0], (RANK // 2, RANK // 2, RANK + 1), keep_p=True)
    for times in (1, 2):  # the second call adds to the sums of the first
        overwritten = dp.clone()
        gradient = gated_backward(act, given, overwritten, share, above, torch.empty_like(given), sums)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(overwritten, p.detach())
        torch.testing.assert_close(sums.totals[0].sum(0), times * expected.t() @ share[0])
        torch.testing.assert_close(sums.totals[1].sum(0), times * p.detach().t() @ above[0])


def test_16_bit_results_are_rounded_once():
    gate_up = drawn(ROWS, 2 * WIDTH).bfloat16()
    none = torch.zeros(ROWS, 1).bfloat16(), torch.zeros(2 * WIDTH, 1).bfloat16()
    gate, up = gate_up.float().chunk(2, -1)
    result = gated("silu", gate_up, none, torch.empty(ROWS, WIDTH, dtype=torch.bfloat16))
    assert torch.equal(result, (F.silu(gate) * up).bfloat16())
