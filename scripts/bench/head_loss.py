"""Compares the head and its loss: fxtune, Liger, cut-cross-entropy and plain torch, forward and backward, on this GPU.

    python scripts/bench/head_loss.py                                  # the shape of TRL#6858: 16,384 x 248,320 x 2,048
    python scripts/bench/head_loss.py --hidden 4096 --vocabulary 128256 --tokens 16384
    python scripts/bench/head_loss.py --smoke                          # a small shape; works without a GPU

All tools get the same hidden states, weight and labels in bfloat16, and compute the mean cross-entropy and its
gradients. The head is frozen (gradient of the hidden states alone, as with LoRA) or trained (gradient of the weight,
too). Each figure is the median of --repeats passes by the GPU's clock, after two passes that compile and tune. Memory is
the peak of torch's allocator, inputs and gradients included, in GB of 10^9 bytes as TRL#6858 has it.

A table shows how far each tool is from a reference in float32: |tool - reference| / |reference| for the loss and each
gradient. cut-cross-entropy leaves out blocks of the softmax whose probabilities are all below 2^-12 (`filter_eps`). With
random weights these are almost all blocks, so its backward pass has little to do. A second row has it compute all.

cut-cross-entropy is the wheel of the Python Package Index (`pip install cut-cross-entropy`). Published figures: 92.6 ms
and 3.1 GB, Liger 321 ms and 6.1 GB (huggingface/trl, pull request 6858, one H100).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import baselines  # noqa: E402
import torch  # noqa: E402
from baselines import Measurement  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fxtune.kernels import matmul  # noqa: E402
from fxtune.kernels.linear_cross_entropy import chunk_sizes, linear_cross_entropy  # noqa: E402
from fxtune.system.machine.host import cache_home  # noqa: E402
from fxtune.system.process.profiler import kernel_times, short_name  # noqa: E402

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The mean cross-entropy of hidden states [tokens, d], a weight [vocabulary, d] and labels [tokens]."""
WARM_UP = 2
KERNELS = 8
"""Kernels of a tool that are listed, with the ms and the calls of one pass."""
REFERENCE_ROWS = 512
"""Tokens whose logits the reference holds in float32."""


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, device=device).to(torch.bfloat16)
    weight = (0.02 * torch.randn(args.vocabulary, args.hidden, device=device)).to(torch.bfloat16)
    labels = torch.randint(args.vocabulary, (args.tokens,), device=device)
    wanted = reference(hidden, weight, labels)
    rows = []
    for trained in (False, True):
        for tool, settings, make in tools():
            row: dict[str, Any] = dict(head="trained" if trained else "frozen", tool=tool, settings=settings)
            try:
                row |= measure(make(), hidden, weight, labels, trained, wanted, args.repeats)
            except Exception as error:  # noqa: BLE001  a tool that is not installed or cannot run here
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    for row in rows:
        kernels = ", ".join(f"{name} {ms:.1f} ms ({calls})" for name, ms, calls in row.get("kernels", ()))
        print(f"\n{row['head']}, {row['tool']} {row['settings']}: {kernels}" if kernels else "", end="")
    print()
    baselines.save(args.baseline, [measurement(row, args.tokens) for row in rows])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=248320)
    parser.add_argument("--hidden", type=int, default=2048, help="width of the hidden states")
    parser.add_argument("--repeats", type=int, default=10, help="timed passes (10)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    baselines.add_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a small shape")
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.vocabulary, args.hidden, args.repeats = 64, 512, 128, 2
    return args


def tools() -> Iterator[tuple[str, str, Callable[[], Loss]]]:
    """(tool, settings, a function that imports it) of each row."""
    yield "fxtune", "quack's products", partial(fxtune, matmul.CUTE)
    yield "fxtune", "cuBLAS's products", partial(fxtune, matmul.CUBLAS)
    yield "liger", "", liger
    yield "cut-cross-entropy", "", partial(cut, "high")
    yield "cut-cross-entropy", "all gradients", partial(cut, None)
    yield "torch", "all logits at once", lambda: lambda h, w, y: F.cross_entropy((h @ w.t()).float(), y)


def fxtune(gemm: str) -> Loss:
    if gemm == matmul.CUTE:
        matmul.prepare(torch.device("cuda", 0), torch.bfloat16, cache_home() / "quack")
    return lambda h, w, y: linear_cross_entropy(h, w, y, gemm=gemm) / len(y)


def liger() -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda h, w, y: loss(w, h, y)


def cut(filter_eps: str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as loss

    return lambda h, w, y: loss(h, w, y, filter_eps=filter_eps)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss and its gradients in float32, some rows at a time. The gradients are on the CPU."""
    wide, d_hidden, total = weight.float(), [], torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_weight = torch.zeros_like(wide)
    for h, y in zip(*(x.split(chunk_sizes(len(labels), REFERENCE_ROWS)) for x in (hidden, labels)), strict=True):
        logits = h.float() @ wide.t()
        total += F.cross_entropy(logits, y, reduction="sum")
        gradient = logits.softmax(1)
        gradient[torch.arange(len(y), device=y.device), y] -= 1
        gradient /= len(labels)
        d_hidden.append(gradient @ wide)
        d_weight.addmm_(gradient.t(), h.float())
    return dict(loss=(total / len(labels)).cpu(), d_hidden=torch.cat(d_hidden).cpu(), d_weight=d_weight.cpu())


def measure(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, trained: bool, wanted: dict[str, Tensor], repeats: int
) -> dict[str, Any]:
    """Milliseconds, GB and relative errors of a tool."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(trained)
    cuda = hidden.is_cuda

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, labels)
        value.backward()
        return value.detach()

    for _ in range(WARM_UP):
        value = step()
    found = dict(loss=value, d_hidden=hidden.grad, d_weight=weight.grad)
    errors = {name: relative_error(mine, wanted[name]) for name, mine in found.items() if mine is not None}
    found.clear()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    memory = torch.cuda.max_memory_allocated() if cuda else None
    by_name = kernel_times(step).by_name
    kernels = [(short_name(name), 1e3 * seconds, calls) for name, (seconds, calls) in by_name.items()]
    return dict(
        ms=statistics.median(times),
        ms_least=min(times),
        ms_most=max(times),
        memory=memory,
        errors=errors,
        kernels=sorted(kernels, key=lambda kernel: -kernel[1])[:KERNELS],
    )


def relative_error(mine: Tensor, wanted: Tensor) -> float:
    """|mine - wanted| / |wanted|, some rows at a time."""
    difference = norm = 0.0
    pairs = zip(mine.detach().reshape(-1).split(1 << 27), wanted.reshape(-1).split(1 << 27), strict=True)
    for part, exact in pairs:
        exact = exact.to(mine.device, torch.float32)
        difference += float((part.float() - exact).norm()) ** 2
        norm += float(exact.norm()) ** 2
    return float((difference / norm) ** 0.5)


def measurement(row: dict[str, Any], tokens: int) -> Measurement:
    """A row as a file of benchmarks/baselines holds it."""
    head = f"{row['head']} head"
    if "error" in row:
        return Measurement(head, row["tool"], row["settings"], error=row["error"])
    return Measurement(
        head,
        row["tool"],
        row["settings"],
        rows=tokens,
        step_ms=round(row["ms"], 1),
        memory_gib=row["memory"] and round(row["memory"] / 2**30, 2),
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| head | tool | ms | least to most | peak GB | error of loss | of d hidden | of d weight |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        tool = f"{row['tool']}, {row['settings']}" if row["settings"] else row["tool"]
        if "error" in row:
            lines.append(f"| {row['head']} | {tool} | {row['error']} | | | | | |")
            continue
        memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}"
        errors = [
            f"{row['errors'][name]:.1e}" if name in row["errors"] else "" for name in ("loss", "d_hidden", "d_weight")
        ]
        lines.append(
            f"| {row['head']} | {tool} | {row['ms']:.1f} | {row['ms_least']:.1f} to {row['ms_most']:.1f} | {memory} | "
            f"{' | '.join(errors)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
