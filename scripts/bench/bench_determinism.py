"""Measures how much longer attention's backward pass takes with deterministic kernels on this GPU.

    python scripts/bench/bench_determinism.py --json kernels.json    # the numbers of SLOWER in settle/determinism.py

Causal attention of 16,384 tokens in documents of equal lengths, four query heads to a key head. Only the backward pass
is timed. `bench_peers.py --tools fxtune --set run.deterministic=true` measures whole steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxtune.system.process.determinism import use_deterministic_kernels
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS

HEADS = (64, 128, 256)
LENGTHS = (1024, 4096, 16384, 65536)
TOKENS = 16384


def efficient(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, *_: Any) -> Tensor:
    """Torch's memory-efficient kernel. Documents are rows: [rows, heads, tokens, width], key heads are repeated."""
    parts = (x.unflatten(1, (len(bounds) - 1, -1))[0].transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in parts)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


BACKENDS: dict[str, tuple[torch.dtype, Callable[..., Tensor]]] = {
    "flash4": (torch.bfloat16, FLASH4.core),
    "sdpa": (torch.bfloat16, BY_DOCUMENTS.core),
    "sdpa float32": (torch.float32, efficient),
}
"""As SLOWER names them."""


def measure(backend: str, head: int, length: int) -> dict[str, Any]:
    """Median milliseconds of the backward pass in both modes, measured by turns."""
    from triton.testing import do_bench

    dtype, core = BACKENDS[backend]
    tokens, queries = max(TOKENS, length), 4096 // head
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    given = [
        torch.randn(1, tokens, heads, head, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (queries, queries // 4, queries // 4)
    ]
    out = core(*given, bounds, head**-0.5, 0, 0.0)
    gradient = torch.randn_like(out)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(2):
        for on, found in times.items():
            use_deterministic_kernels(on)
            work = lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)  # noqa: E731
            found.append(do_bench(work, warmup=20, rep=100, return_mode="median"))
    usual, ordered = (min(found) for found in times.values())
    row = dict(device=torch.cuda.get_device_name(), backend=backend, head=head, length=length)
    return {**row, "ms": usual, "deterministic_ms": ordered, "slower": ordered / usual - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    FLASH4.prepare()
    rows = []
    for head in HEADS:
        for backend in BACKENDS:
            for length in LENGTHS[: 3 if backend == "sdpa float32" else 4]:
                rows.append(measure(backend, head, length))
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
