"""The GEMM backend for frozen weights of fused adapters and the head: cuBLAS, or quack's kernel (kernels/matmul.py).

Before a weight is loaded, `refusal` says why quack's kernel is not available. `enable` compiles the kernel when the
model is built. `observe` checks with torch's profiler that the kernel runs on one of the model's own weights.
"""

from __future__ import annotations

from typing import Any

import torch

from fxtune.distributed.chunks import is_divided
from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.kernels import grouped_matmul
from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE
from fxtune.kernels.matmul import CAPABILITY, CUTE, MIN_LOGIT_ROWS, MIN_ROWS, MIN_SIZE, VERSION, is_served, mm, prepare
from fxtune.models.dims import Shape
from fxtune.system.machine.host import cache_home
from fxtune.system.process.profiler import observe_operators
from fxtune.techniques.experts.adapted import grouped, make_space
from fxtune.techniques.lora.fused_modules import groups

PACKAGE = "quack-kernels"
OPERATOR = r"^fxtune::cute_mm$"
ROWS = (MIN_ROWS, 2 * MIN_ROWS)
"""The numbers of rows that observe() tries, in this order, until quack's kernel serves the product."""


def refusal(facts: Facts) -> str | None:
    """Why quack's kernel cannot multiply for fused adapters under `facts`, and what to change; None if it can."""
    installed, tokens = facts.packages.get(PACKAGE), facts.tokens
    shape = Shape.of(facts.model)
    sizes = [shape.hidden, *(kind.inner for kind in shape.kinds if kind.experts == 1 and kind.inner)]
    if facts.device != "cuda" or facts.capability != CAPABILITY:
        card = (
            f"{facts.device_name}, {facts.capability[0]}.{facts.capability[1]}" if facts.capability else facts.device
        )
        return f"its kernel is for a GPU of compute capability 9.0 (H100, H200), and this is {card}"
    if installed != VERSION:
        if PACKAGE in facts.broken:
            return f"{PACKAGE} {facts.lacks(PACKAGE)}"
        return (
            f"it calls inner functions of {PACKAGE} {VERSION}, and {installed or 'none'} is installed: "
            f"pip install '{PACKAGE}[cu13]=={VERSION}'"
        )
    if facts.compute_dtype not in ("bfloat16", "float16"):
        return (
            f"it is for products in 16 bits, and these are in {facts.compute_dtype}: set "
            "techniques.precision.autocast=bfloat16"
        )
    quantize = facts.techniques.quantize
    # Beside experts in fp8, small linears keep 16 bits. `experts=auto` may still become `on`.
    if quantize.enabled and (quantize.experts is Switch.off or shape.expert_count < 2):
        return "techniques.quantize.enabled=true leaves fused adapters no products in 16 bits"
    if tokens and tokens < MIN_LOGIT_ROWS:
        return (
            f"it is for micro-batches of {MIN_LOGIT_ROWS:,} tokens or more, and this one has {tokens:,}: raise "
            "train.micro_batch_size or data.sequence_length"
        )
    if min(sizes) < MIN_SIZE:
        return f"it is for linears whose sizes are {MIN_SIZE:,} or more, and this model has a size of {min(sizes):,}"
    return None


def enable(model: Any, device: torch.device) -> str | None:
    """Compile quack's kernel for the dtype of products on `device`, and let the fused groups and experts of `model`
    call it. Returns why the kernel does not compile, or None."""
    dtype = compute_dtype(next(model.parameters()).new_empty(0, device=device))  # weights may have no memory yet
    # All errors are caught, because the compiler of another package has its own classes of errors.
    try:
        prepare(device, dtype, cache_home() / "quack")
        if mixtures := grouped(model):
            grouped_matmul.prepare(device, dtype, cache_home() / "quack")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        return f"{type(error).__name__}: {line}"
    for group in groups(model, DENSE):
        group.kind = DENSE_CUTE
    for experts in mixtures:
        experts.gemm = CUTE
    if mixtures and grouped_matmul.takes_gaps(device, dtype):
        for experts in mixtures:
            make_space(experts)
        # The freed memory of one layer is too small for the weights of the next layer, and would stay in torch's
        # cache.
        torch.cuda.empty_cache()
    return None


@torch.no_grad()
def observe(model: Any) -> tuple[str, bool | None]:
    """Multiply by the smallest weight of a group that quack's kernel serves, as operators do forward and backward. A
    whole matrix of zeros replaces a weight that is divided over ranks, because operators get the gathered weight.
    Returns a description of what ran, and whether quack's kernel ran. The second value is None if no group's weight is
    large enough."""
    device = next(model.parameters()).device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    matrices = sorted((group.weight.data for group in groups(model, DENSE_CUTE)), key=torch.Tensor.numel)
    for weight in matrices:
        wanted, stands_in = dtype or weight.dtype, is_divided(weight)
        matrix = torch.zeros(weight.shape, dtype=wanted, device=device) if stands_in else weight.to(wanted)
        for rows in ROWS:
            x, y = (matrix.new_zeros(rows, size) for size in reversed(matrix.shape))
            if is_served(x, matrix.t(), y) and is_served(y, matrix, x):
                products = lambda: (mm(x, matrix.t(), y, CUTE), mm(y, matrix, x, CUTE))  # noqa: B023, E731
                seen = observe_operators(products, {"cute": OPERATOR})["cute"]
                names = ", ".join(sorted(name[:60] for name in seen.kernels))
                theirs = not names or any("cutlass" in name and "quack" in name for name in seen.kernels)
                filled = " of zeros, as no rank has a whole weight" if stands_in else ""
                return (
                    f"{rows:,} rows times one of {len(matrices)} groups' {matrix.shape[0]:,} x {matrix.shape[1]:,}"
                    f"{filled}, and back: {seen.calls} products by {names or 'kernels that the profiler may not see'}",
                    seen.calls == 2 and theirs,
                )
    return f"none of {len(matrices)} groups' weights is large enough, so cuBLAS multiplies", None
