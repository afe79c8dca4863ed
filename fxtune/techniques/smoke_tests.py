"""Smoke tests of packages. Each test runs a tiny forward and backward pass through a package, and compares the results
with plain torch's.

system/machine/packages.py lists the packages, and package_checks.py runs the tests. The tests of attention kernels
are in the files of their backends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fxtune.kernels import grouped_matmul, matmul
from fxtune.kernels.linear_attention import document_chunks, linear_attention
from fxtune.kernels.short_convolution import short_convolution
from fxtune.system.machine.host import cache_home
from fxtune.system.machine.packages import SOME_HEADS, Heads, NotTriedError

TOLERANCE = 2e-2
"""Largest relative distance of a bfloat16 result from the float32 result: five times bfloat16's rounding error."""


def torch_matmul(device: torch.device) -> str:
    dtype = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    x, w = torch.randn(2, 64, 64, device=device)
    require_same(lambda x, w: x @ w, lambda x, w: x @ w, [x.to(dtype), w.to(dtype)])
    return f"a matmul in {str(dtype).removeprefix('torch.')}"


def torch_compile(device: torch.device) -> str:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    require_same(torch.compile(function), function, [torch.randn(64, device=device)])
    return "compiled a function"


def triton(device: torch.device) -> str:
    language = importlib.import_module("triton")
    # Triton looks names up among the globals of the kernel's module only.
    globals()["tl"] = importlib.import_module("triton.language")

    @language.jit
    def kernel(x, g, y, dx, SIZE: tl.constexpr):  # type: ignore[name-defined]  # noqa: F821
        at = tl.arange(0, SIZE)  # type: ignore[name-defined]  # noqa: F821
        value = tl.load(x + at)  # type: ignore[name-defined]  # noqa: F821
        tl.store(y + at, value * value)  # type: ignore[name-defined]  # noqa: F821
        tl.store(dx + at, 2 * value * tl.load(g + at))  # type: ignore[name-defined]  # noqa: F821

    x, g = torch.randn(2, 128, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, g, y, dx, SIZE=128)
    require_close((y, x * x), (dx, 2 * x * g))
    return "compiled a kernel"


def liger(device: torch.device) -> str:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    require_same(
        lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        lambda x, weight: torch.nn.functional.rms_norm(x, (256,), weight, 1e-6),
        [torch.randn(4, 256, device=device), torch.randn(256, device=device)],
    )
    return "RMSNorm"


def quack(device: torch.device) -> str:
    """Test y = x W^T and dx = dy W of a linear, the products that fused adapters compute."""
    if metadata.version("quack-kernels") != matmul.VERSION:
        raise NotTriedError(
            f"imports; fused adapters call internal functions of {matmul.VERSION}, so cuBLAS is used instead"
        )
    capabilities = torch.cuda.get_device_capability(device), matmul.CAPABILITY
    card, needed = (".".join(map(str, capability)) for capability in capabilities)
    if card != needed:
        raise NotTriedError(f"imports; fused adapters use it on compute capability {needed}, and this GPU has {card}")
    matmul.prepare(device, torch.bfloat16, cache_home() / "quack")
    x, dy, w = (torch.randn(size, device=device).bfloat16() for size in ((512, 384), (512, 640), (640, 384)))
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    matmul.by_quack(x, w.t(), y)
    matmul.by_quack(dy, w, dx)
    error = require_close((y, x.float() @ w.float().t()), (dx, dy.float() @ w.float()))
    return f"a linear within {error:.1e} of float32"


def compile_grouped_products(device: torch.device, heads: Heads, _: int) -> None:
    """Compile quack's kernels for a mixture's experts with adapters."""
    if heads.experts and torch.cuda.get_device_capability(device) == matmul.CAPABILITY:
        grouped_matmul.prepare(device, torch.bfloat16, cache_home() / "quack")


def fla(device: torch.device, heads: Heads) -> str:
    """The linear attention of `heads.recurrences` and a short convolution over three documents, against the same
    operators on the CPU."""
    bounds = torch.tensor([0, 1, 64, 194], dtype=torch.int32)
    places = [bounds, document_chunks(bounds, 194)]

    def compared(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
        def on_cpu(*copies: torch.Tensor) -> torch.Tensor:
            return run(*(copy.cpu() for copy in copies), *places).to(device)

        def here(*given: torch.Tensor) -> torch.Tensor:
            return run(*given, *(place.to(device) for place in places))

        require_same(here, on_cpu, [given.detach().clone() for given in inputs])

    def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *given: Tensor) -> Tensor:
        *beta, bounds, chunks = given
        return linear_attention(q, k, v, g, beta[0] if beta else None, 0.1, bounds, chunks)

    draw = lambda *sizes: torch.randn(194, *sizes, device=device)  # noqa: E731
    q, k = (torch.nn.functional.normalize(draw(2, 128), dim=-1).bfloat16() for _ in range(2))
    v, decay, beta = draw(4, 128).bfloat16(), -5 * draw(4).abs(), draw(4).sigmoid().bfloat16()
    for_each_value_head = (of.repeat_interleave(2, 1) for of in (q, k))
    inputs = {
        "delta": (q, k, v, decay, beta),
        "scan": (q, k, v, decay),
        "kda": (*for_each_value_head, v, -draw(4, 128).abs(), beta),
    }
    for name in heads.recurrences:
        compared(recurrence, *inputs[name])
    x, weight = draw(1024).bfloat16(), torch.randn(1024, 4, device=device).bfloat16()  # as many channels as q, k and v
    compared(lambda x, weight, *where: short_convolution(x, weight, None, True, *where), x, weight)
    return f"{', '.join(heads.recurrences)} and a short convolution"


def bitsandbytes(device: torch.device) -> str:
    package = importlib.import_module("bitsandbytes")
    layer: Any = package.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer = layer.to(device)
    dense = package.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    require_same(layer, lambda x: x @ dense.T, [torch.randn(8, 128, device=device, dtype=torch.bfloat16)])
    if device.type == "cpu":
        return "a linear in 4 bits"
    require_adamw_step(lambda weights: package.optim.AdamW8bit(weights, lr=0.1, weight_decay=0.0), device)
    return "a linear in 4 bits, AdamW in 8"


def torchao(device: torch.device) -> str:
    from torchao.optim import AdamW8bit

    with torch.compiler.set_stance("force_eager"):
        require_adamw_step(lambda weights: AdamW8bit(weights, lr=0.1, weight_decay=0.0), device)
    return "AdamW in 8 bits"


def apex(device: torch.device) -> str:
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam

    x = torch.ones(4, 1, device=device) * torch.linspace(-1, 2, 256, device=device)
    require_same(FusedLayerNorm(256).to(device), torch.nn.LayerNorm(256).to(device), [x])
    require_adamw_step(lambda weights: FusedAdam(weights, lr=0.1), device)
    return "FusedLayerNorm and FusedAdam"


def require_attention(device: torch.device, flash_attn: Callable[..., Any], heads: Heads = SOME_HEADS) -> str:
    """Compare `flash_attn`'s causal attention of 256 tokens in bfloat16 with float32.

    `flash_attn` takes tensors [rows, tokens, heads, head_dim]. Some versions return (output, log-sum-exp).
    """

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        out = flash_attn(*inputs, causal=True)
        return out[0] if isinstance(out, tuple) else out

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    counts = heads.queries, heads.keys, heads.keys
    inputs = [torch.randn(1, 256, count, heads.width, device=device, dtype=torch.bfloat16) for count in counts]
    return f"attention within {require_same(attention, plain, inputs):.1e} of float32"


def require_adamw_step(optimizer: Callable[[list[Any]], Any], device: torch.device) -> None:
    """Require that one step of Adam at lr 0.1 moves each weight by 0.1. Libraries keep the state of weights with fewer
    than 4,096 elements in 32 bits, so the weight here has 8,192."""
    weight = torch.nn.Parameter(torch.ones(8192, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer([weight]).step()
    require_close((weight.detach(), torch.full_like(weight, 0.9)))


def require_same(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Any]) -> float:
    """Compare the output of `ours` and the gradients of all its inputs with `plain`, plain torch in float32. Returns
    the largest relative distance, as require_close()."""
    copies = [tensor.clone().float().requires_grad_() for tensor in inputs]
    out, expected = ours(*(tensor.requires_grad_() for tensor in inputs)), plain(*copies)
    gradient = torch.randn_like(expected)
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient)
    return require_close((out, expected), *((a.grad, b.grad) for a, b in zip(inputs, copies, strict=True)))


def require_close(*pairs: tuple[Any, Any]) -> float:
    """Return the largest relative distance between a result and its expected value, over pairs of (result, expected).
    Raises ArithmeticError if one is above TOLERANCE."""
    worst = 0.0
    for result, expected in pairs:
        result, expected = result.detach().float(), expected.detach().float()
        error = ((result - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCE:
            raise ArithmeticError(f"runs, but its result is off by {error:.1e} from plain torch's")
        worst = max(worst, error)
    return worst
