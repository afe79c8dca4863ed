"""Does a package work on this machine? Each probe runs a tiny forward and backward through it and compares with plain torch.

    python -P fxtune/diagnostics/package_checks.py NAME [gpu]

A probe has a process of its own: a broken wheel can end it with a segmentation fault, a kernel that is compiled for the first
time can hang, and neither may take `fxtune doctor` with it. The last line of its output is one JSON object: `state` (works,
imports: its kernels need a GPU; missing; broken), `seen`, and `facts` from the probe of the machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROGRAM = Path(__file__)
CLOSE = 2e-2
"""Relative distance from float32 that bfloat16 operators may have: five times what rounding costs."""


@dataclass(frozen=True)
class Probe:
    module: str
    """What is imported."""
    attempt: Callable[[torch.device], str]
    """Runs it on that device and says what it saw. Raises whatever is wrong."""
    gpu: bool = True
    """Its kernels exist for GPUs only."""


class NotTriedError(Exception):
    """It is not for this machine, or not this version of it: its text says why. No fault of the package."""


def _torch(device: torch.device) -> str:
    import torch

    dtype = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    x, w = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))
    (x.to(dtype) @ w.to(dtype)).float().sum().backward()
    assert x.grad is not None
    _close((x.grad, w.detach().sum(1).expand(64, 64)))
    return f"a matmul in {str(dtype).removeprefix('torch.')}"


def _compile(device: torch.device) -> str:
    import torch

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(64, device=device, requires_grad=True)
    torch.compile(function)(x).backward()
    assert x.grad is not None
    _close((x.grad, x.detach().cos() * x.detach() + x.detach().sin()))
    return "compiled a function"


def _triton(device: torch.device) -> str:
    import torch
    import triton

    globals()["tl"] = importlib.import_module("triton.language")  # a kernel reads its globals, nothing else

    @triton.jit
    def kernel(x, g, y, dx, SIZE: tl.constexpr):  # type: ignore[name-defined]  # noqa: F821
        at = tl.arange(0, SIZE)  # type: ignore[name-defined]  # noqa: F821
        value = tl.load(x + at)  # type: ignore[name-defined]  # noqa: F821
        tl.store(y + at, value * value)  # type: ignore[name-defined]  # noqa: F821
        tl.store(dx + at, 2 * value * tl.load(g + at))  # type: ignore[name-defined]  # noqa: F821

    x, g = torch.randn(2, 128, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, g, y, dx, SIZE=128)
    _close((y, x * x), (dx, 2 * x * g))
    return "compiled a kernel"


def _liger(device: torch.device) -> str:
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight = (
        torch.randn(4, 256, device=device, requires_grad=True),
        torch.randn(256, device=device, requires_grad=True),
    )
    again = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
    ours = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
    plain = torch.nn.functional.rms_norm(again[0], (256,), again[1], 1e-6)
    gradient = torch.randn_like(plain)
    ours.backward(gradient.clone())
    plain.backward(gradient)
    _close((ours, plain), (x.grad, again[0].grad), (weight.grad, again[1].grad))
    return "RMSNorm"


def _flash4(device: torch.device) -> str:
    from flash_attn.cute import flash_attn_func

    return _attention(device, lambda q, k, v: flash_attn_func(q, k, v, causal=True))


def _flash3(device: torch.device) -> str:
    from flash_attn_interface import flash_attn_func

    return _attention(device, lambda q, k, v: flash_attn_func(q, k, v, causal=True))


def _flash2(device: torch.device) -> str:
    from flash_attn import flash_attn_func

    return _attention(device, lambda q, k, v: flash_attn_func(q, k, v, causal=True))


def _quack(device: torch.device) -> str:
    """y = x W^T and dx = dy W of a linear, as fused adapters multiply."""
    from importlib import metadata

    import torch

    from fxtune.kernels.matmul import CAPABILITY, VERSION, by_quack, prepare
    from fxtune.system.host import cache_home

    if metadata.version("quack-kernels") != VERSION:
        raise NotTriedError(
            f"imports; techniques.lora.matmul calls inner functions of {VERSION}, so cuBLAS takes its place"
        )
    card, wanted = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), CAPABILITY))
    if card != wanted:
        raise NotTriedError(
            f"imports; techniques.lora.matmul takes it on compute capability {wanted}, and this GPU has {card}"
        )
    prepare(device, torch.bfloat16, cache_home() / "quack")
    x, dy, w = (torch.randn(size, device=device).bfloat16() for size in ((512, 384), (512, 640), (640, 384)))
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    by_quack(x, w.t(), y)
    by_quack(dy, w, dx)
    return f"a linear within {_close((y, x.float() @ w.float().t()), (dx, dy.float() @ w.float())):.1e} of float32"


def _attention(device: torch.device, call: Callable[..., Any]) -> str:
    """Causal attention of 256 tokens, 4 query and 2 key heads of 128 in bfloat16, [rows, tokens, heads, head_dim].

    Some versions return (output, log-sum-exp).
    """
    import torch

    inputs = [
        torch.randn(1, 256, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    ]
    plain = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = call(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    q, k, v = (tensor.transpose(1, 2) for tensor in plain)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
        1, 2
    )
    gradient = torch.randn_like(expected)
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient)
    worst = _close((out, expected), *((mine.grad, theirs.grad) for mine, theirs in zip(inputs, plain, strict=True)))
    return f"attention within {worst:.1e} of float32"


def _bitsandbytes(device: torch.device) -> str:
    import bitsandbytes
    import torch

    layer: Any = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(
        device
    )
    x = torch.randn(8, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    dense = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    gradient = torch.randn_like(out)
    out.backward(gradient)
    _close((out, x.detach().float() @ dense.T), (x.grad, gradient.float() @ dense))
    if device.type == "cpu":
        return "a linear in 4 bits"
    weight = torch.nn.Parameter(torch.ones(8192, device=device))
    weight.grad = torch.ones_like(weight)
    bitsandbytes.optim.AdamW8bit([weight], lr=0.1, weight_decay=0.0).step()
    _close((weight.detach(), torch.full_like(weight, 0.9)))
    return "a linear in 4 bits, AdamW in 8"


def _torchao(device: torch.device) -> str:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(128, 64, bias=False, device=device)
    weight = layer.weight.detach().clone()
    quantize_(layer, Int8WeightOnlyConfig())
    layer.requires_grad_(False)
    x = torch.randn(8, 128, device=device, requires_grad=True)
    out = layer(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    _close((out, x.detach() @ weight.T), (x.grad, gradient @ weight))
    return "a linear in 8 bits"


def _apex(device: torch.device) -> str:
    import torch
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam

    layer, plain = FusedLayerNorm(256).to(device), torch.nn.LayerNorm(256).to(device)
    inputs = [torch.ones(4, 1, device=device) * torch.linspace(-1, 2, 256, device=device) for _ in range(2)]
    outs = [norm(x.requires_grad_()) for norm, x in zip((layer, plain), inputs, strict=True)]
    gradient = torch.randn_like(outs[0])
    for out in outs:
        out.backward(gradient)
    _close((outs[0], outs[1]), (inputs[0].grad, inputs[1].grad))
    weight = torch.nn.Parameter(torch.ones(64, device=device))
    weight.grad = torch.ones_like(weight)
    FusedAdam([weight], lr=0.1).step()
    _close((weight.detach(), torch.full_like(weight, 0.9)))
    return "FusedLayerNorm and FusedAdam"


def _kernels(device: torch.device) -> str:
    kernels = importlib.import_module("kernels")
    assert callable(kernels.get_kernel)
    return "imports; a kernel is fetched from the hub when a recipe names it (techniques.attention.backend=hub:ORG/KERNEL@COMMIT)"


PROBES = {
    "torch": Probe("torch", _torch, gpu=False),
    "torch.compile": Probe("torch", _compile, gpu=False),
    "triton": Probe("triton", _triton),
    "liger-kernel": Probe("liger_kernel.ops.rms_norm", _liger),
    "flash-attn-4": Probe("flash_attn.cute", _flash4),
    "quack-kernels": Probe("quack.gemm", _quack),
    "flash-attn-3": Probe("flash_attn_interface", _flash3),
    "flash-attn": Probe("flash_attn.flash_attn_interface", _flash2),
    "kernels": Probe("kernels", _kernels, gpu=False),
    "bitsandbytes": Probe("bitsandbytes", _bitsandbytes, gpu=False),
    "torchao": Probe("torchao.quantization", _torchao, gpu=False),
    "apex": Probe("apex.normalization", _apex),
}


def main(name: str, gpu: bool) -> dict[str, Any]:
    """The answer of one probe. `gpu`: there may be one here."""
    probe, answer = PROBES[name], {}
    # Broad on purpose: whatever a package raises, be it when imported or when it runs, is one line for the user.
    try:
        if not _there(probe.module):
            return {"state": "missing", "seen": ""}
        importlib.import_module(probe.module)
        if probe.gpu and not gpu:
            return {"state": "imports", "seen": "imports; its kernels run on a GPU only"}
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if name == "torch":
            answer["facts"] = _facts()
        if probe.gpu and device.type == "cpu":
            return {"state": "imports", "seen": "imports; torch sees no GPU for its kernels"}
        torch.manual_seed(0)
        return {"state": "works", "seen": f"{probe.attempt(device)}, forward and backward", **answer}
    except NotTriedError as why:
        return {"state": "imports", "seen": str(why), **answer}
    except Exception as error:  # noqa: BLE001
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {
            "state": "broken",
            "seen": f"{type(error).__name__}: {lines[0] if lines else '(no message)'}",
            **answer,
        }


def _there(module: str) -> bool:
    """Whether the package is installed. One whose own parts are missing is there, and broken."""
    top, *inner = module.split(".")
    if (spec := importlib.util.find_spec(top)) is None:
        return False
    # flash-attn and flash-attn-4 share a folder, and PyPI's apex is another project than NVIDIA's.
    if top in ("flash_attn", "apex"):
        return any(
            Path(place, f"{inner[0]}{suffix}").exists()
            for place in spec.submodule_search_locations or ()
            for suffix in ("", ".py")
        )
    return True


def _facts() -> dict[str, Any]:
    """What fxtune itself finds out about this machine, and what torch says of its GPU."""
    import torch

    from fxtune.distributed.world import World

    os.environ.pop("WORLD_SIZE", None)
    why = ""
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001  torch says what is wrong with the driver by many types of errors
            why = str(error).splitlines()[0]
    return {
        **asdict(World.create().facts()),
        "cuda": torch.version.cuda,
        "why_no_gpu": why,
        "python": sys.version.split()[0],
    }


def _close(*pairs: tuple[Any, Any]) -> float:
    """The largest relative distance of (ours, expected). Raises ArithmeticError where it is beyond CLOSE."""
    worst = 0.0
    for ours, expected in pairs:
        off = ((ours.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm()).item()
        if not off <= CLOSE:
            raise ArithmeticError(f"runs, but its result is off by {off:.1e} from plain torch's")
        worst = max(worst, off)
    return worst


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n" + json.dumps(main(sys.argv[1], "gpu" in sys.argv[2:])), flush=True)
    os._exit(0)  # not through exit hooks of a package that is being tried
