"""Times an operation inside compiled code: torch.compile's version of it against Liger's kernel.

The compiler fuses a norm with the residual before it, and the gated product into one kernel, as Liger does; but it
fuses nothing across a hand-written kernel. So each operation is timed with its neighbours in a layer: the residual
before a norm, and matmuls on either side, so thin that they do not hide it. It runs forward and backward, with the
run's number of tokens up to MOST_ROWS: beyond that both times grow with the tokens.
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
    """One operation at one size. `width`: the hidden size for a norm, the intermediate size for a gated product."""

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

    None: Liger's does not compile here. Any other error is raised, because it says nothing about the kernel and must
    not be cached as a result.
    """
    from triton.errors import TritonError
    from triton.testing import do_bench

    measured: list[float | None] = []
    for operation in (plain_operation(case), liger_operation(case)):
        try:
            step, leaves = _step(case, operation)
            step()
            measured.append(float(do_bench(step, warmup=10, rep=50, grad_to_none=leaves, return_mode="median")))
        except TritonError:  # raised inside an operator, so torch does not turn it into a RuntimeError
            if not measured:
                raise
            measured.append(None)
    torch.cuda.empty_cache()
    assert measured[0] is not None
    return measured[0], measured[1]


def plain_operation(case: Case) -> Callable[..., torch.Tensor]:
    """The operation as transformers writes it."""
    written: dict[str, Callable[..., torch.Tensor]] = {
        "rms_norm": partial(_rms_norm, case.offset, case.casting),
        "layer_norm": _layer_norm,
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    }
    return written[case.operation]


def liger_operation(case: Case) -> Callable[..., torch.Tensor]:
    """The same with Liger's kernel."""
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
    """A compiled forward and backward pass of the operation with its neighbours, and its tensors with a gradient."""
    dtype = getattr(torch, case.dtype)

    def random(*size: int, gradient: bool = True) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=dtype).mul_(0.1).requires_grad_(gradient)

    block: Callable[..., Any]
    if case.operation.endswith("norm"):
        leaves = [
            random(1, case.rows, case.width),
            random(1, case.rows, case.width),
            random(case.width, gradient=case.trained),
        ]
        after = random(case.width, THIN, gradient=False)

        def normed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
            stream = x + y
            return operation(stream, weight) @ after, stream

        block = normed
    else:
        leaves = [random(1, case.rows, THIN)]
        gate, up, down = (
            random(*size, gradient=False) for size in ((THIN, case.width), (THIN, case.width), (case.width, THIN))
        )

        def gated(x: torch.Tensor) -> Any:
            return (operation(x @ gate, x @ up) @ down,)

        block = gated

    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    gradients = [torch.ones_like(out) for out in block(*leaves)]

    def step() -> None:
        torch.autograd.backward(compiled(*leaves), gradients)

    return step, [leaf for leaf in leaves if leaf.requires_grad]
