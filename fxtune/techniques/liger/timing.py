"""Which is faster inside compiled code: what the compiler makes of an operation, or Liger's kernel for it?

A compiler fuses a norm with the residual before it, and the SwiGLU product into one kernel, as Liger does; a hand-written kernel
inside compiled code is a wall that nothing is fused across. Which wins depends on the card, the sizes and both versions, so it
is measured: each operation with the neighbours that it has in a layer (the residual before a norm; matmuls, thin ones so that
they do not hide it, on either side), forward and backward, compiled both ways, at the run's number of tokens up to MOST_ROWS.
Beyond that time grows with the tokens for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from fxtune.kernels import liger_operators as operators

MOST_ROWS = 16384
THIN = 64


@dataclass(frozen=True)
class Case:
    """One operation at one size. `width`: of the hidden states for a norm, of the MLP's inside for a gated product."""

    operation: str
    rows: int
    width: int
    dtype: str
    trained: bool
    """Whether the norm's weight has a gradient."""
    offset: float = 0.0
    casting: str = "llama"


def times(case: Case) -> tuple[float, float | None]:
    """Milliseconds of one forward and backward pass on the GPU, compiled: plain, and with Liger's kernel.

    None where Liger's does not compile here. Any other error is raised: it says nothing of the kernel, and who keeps these times
    must not take it for an answer.
    """
    from triton.errors import TritonError
    from triton.testing import do_bench

    measured: list[float | None] = []
    for operation in (plain(case), ligers(case)):
        try:
            step, leaves = _step(case, operation)
            step()
            measured.append(float(do_bench(step, warmup=10, rep=50, grad_to_none=leaves, return_mode="median")))
        except TritonError:  # behind an operator nobody makes a RuntimeError of it
            if not measured:
                raise
            measured.append(None)
    torch.cuda.empty_cache()
    assert measured[0] is not None
    return measured[0], measured[1]


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """The operation as transformers writes it."""
    written: dict[str, Callable[..., torch.Tensor]] = {
        "rms_norm": partial(_rms_norm, case.offset, case.casting),
        "layer_norm": _layer_norm,
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    }
    return written[case.operation]


def ligers(case: Case) -> Callable[..., torch.Tensor]:
    """The same by Liger's kernel."""
    return {
        "rms_norm": lambda x, w: operators.rms_norm(x, w, 1e-6, case.offset, case.casting)[0],
        "layer_norm": lambda x, w: operators.layer_norm(x, w, w, 1e-6)[0],
        "swiglu": lambda gate, up: operators.gated(gate, up, "swiglu"),
        "geglu": lambda gate, up: operators.gated(gate, up, "geglu"),
    }[case.operation]


def _rms_norm(offset: float, casting: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * exact.to(x.dtype) if casting == "llama" else (exact * (offset + weight.float())).to(x.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, weight, 1e-6)


def _step(case: Case, operation: Callable[..., torch.Tensor]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """One forward and backward pass of the operation between its neighbours, compiled, and the tensors with a gradient."""
    dtype = getattr(torch, case.dtype)

    def drawn(*size: int, gradient: bool = True) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=dtype).mul_(0.1).requires_grad_(gradient)

    block: Callable[..., Any]
    if case.operation.endswith("norm"):
        leaves = [
            drawn(1, case.rows, case.width),
            drawn(1, case.rows, case.width),
            drawn(case.width, gradient=case.trained),
        ]
        after = drawn(case.width, THIN, gradient=False)

        def normed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
            stream = x + y
            return operation(stream, weight) @ after, stream

        block = normed
    else:
        leaves = [drawn(1, case.rows, THIN)]
        gate, up, down = (
            drawn(*size, gradient=False) for size in ((THIN, case.width), (THIN, case.width), (case.width, THIN))
        )

        def gated(x: torch.Tensor) -> Any:
            return (operation(x @ gate, x @ up) @ down,)

        block = gated

    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    gradients = [torch.ones_like(out) for out in block(*leaves)]

    def step() -> None:
        torch.autograd.backward(compiled(*leaves), gradients)

    return step, [leaf for leaf in leaves if leaf.requires_grad]
