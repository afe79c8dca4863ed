"""Who multiplies by the frozen weights of fused adapters and by the head: cuBLAS, or quack's kernel (kernels/matmul.py).

Whether the kernel can be had here is known before a weight is loaded (`hindrance`); that it compiles is known when it has, which
is when the model is built (`take`); and that it ran is seen by torch's profiler on one of the model's own weights (`ran`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxtune.errors import HardwareError
from fxtune.kernels.matmul import CAPABILITY, CUTE, LEAST_ROWS, LEAST_SIZE, VERSION, mm, prepare, served
from fxtune.system.host import cache_home
from fxtune.system.profiler import operators
from fxtune.techniques.lora.modules import cute_weights, use_cute

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

PACKAGE = "quack-kernels"
OPERATOR = r"^fxtune::cute_mm$"
ROWS = (LEAST_ROWS, 2 * LEAST_ROWS, 4 * LEAST_ROWS, 8 * LEAST_ROWS)
"""With how many rows a product is looked for that the kernel serves."""


def hindrance(facts: Facts) -> str | None:
    """Why the CuTe kernel cannot multiply under `facts` and what to change, or None: it can, adapters being fused."""
    found = facts.packages.get(PACKAGE)
    tokens = facts.tokens
    smallest = min(
        (int(facts.text[name]) for name in ("hidden_size", "intermediate_size") if facts.text.get(name)), default=0
    )
    if facts.device != "cuda" or facts.capability != CAPABILITY:
        card = (
            f"{facts.device_name}, {facts.capability[0]}.{facts.capability[1]}" if facts.capability else facts.device
        )
        return f"its kernel is for a GPU of compute capability 9.0 (H100, H200), and this is {card}"
    if found != VERSION:
        return (
            f"it calls inner functions of {PACKAGE} {VERSION}, and {found or 'none'} is installed: "
            f"pip install '{PACKAGE}[cu13]=={VERSION}'"
        )
    if facts.compute_dtype not in ("bfloat16", "float16"):
        return (
            f"it is for products in 16 bits, and these are in {facts.compute_dtype}: set "
            "techniques.precision.autocast=bfloat16"
        )
    if facts.techniques.quantize.enabled:
        return "techniques.quantize.enabled=true leaves no product in 16 bits that fused adapters do at once"
    if tokens and tokens < LEAST_ROWS:
        return (
            f"it is for {LEAST_ROWS:,} tokens at once or more, and a micro-batch has {tokens:,}: raise "
            "train.micro_batch_size or data.sequence_length"
        )
    if smallest and smallest < LEAST_SIZE:
        return f"it is for linears of {LEAST_SIZE:,} numbers or more on either side, and this model has some of {smallest:,}"
    return None


def take(model: Any, optional: bool) -> str | None:
    """Compile the kernel, and let the fused groups of `model` and its head multiply by it, in the dtype that autocast has here.

    `optional`: if it does not compile, leave the model as it is, and return why. Else raises HardwareError.
    """
    weight = next(model.parameters())
    device = weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    # Broad on purpose: it is a compiler of another package, with errors of its own; the user asked for it, or did not.
    try:
        prepare(device, dtype, cache_home() / "quack")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {next((line for line in str(error).splitlines() if line.strip()), 'no reason given')}"
        if optional:
            return why
        raise HardwareError(
            f"techniques.lora.matmul=cute: {PACKAGE}'s kernel did not compile here ({why}). Use auto or cublas."
        ) from error
    use_cute(model)
    model.products_by = CUTE
    return None


@torch.no_grad()
def ran(model: Any) -> tuple[str, bool | None]:
    """Multiply by a weight of the model as its operators do, forward and backward: what ran, and whether it was the kernel.

    None: no group's weight is large enough for it. The smallest that is will do, since this takes memory of its own.
    """
    device = next(model.parameters()).device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    groups = sorted(cute_weights(model), key=torch.Tensor.numel)
    for made in groups:
        made = made.detach().to(dtype or made.dtype)
        for rows in ROWS:
            x, y = (made.new_zeros(rows, size) for size in reversed(made.shape))
            if served(x, made.t(), y) and served(y, made, x):
                seen = operators(lambda: (mm(x, made.t(), y, CUTE), mm(y, made, x, CUTE)), {"cute": OPERATOR})["cute"]  # noqa: B023
                kernels = ", ".join(sorted(name[:60] for name in seen.kernels)) or "kernels that nobody may see"
                theirs = not seen.kernels or any("cutlass" in name and "quack" in name for name in seen.kernels)
                return (
                    f"{rows:,} rows times one of {len(groups)} groups' {made.shape[0]:,} x {made.shape[1]:,}, and back: "
                    f"{seen.calls} products by {kernels}",
                    seen.calls == 2 and theirs,
                )
    return f"none of {len(groups)} groups' weights is large enough, so cuBLAS does", None
