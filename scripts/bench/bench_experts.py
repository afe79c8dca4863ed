"""Times the experts of one layer, alone and kernel by kernel, forward and backward.

    python scripts/bench/bench_experts.py                                  # both mixtures of bench_peers.py, each format
    python scripts/bench/bench_experts.py --cases moe --formats bf16,fp8   # a part of these
    python scripts/bench/bench_experts.py --cases moe --formats full,transformers  # all weights trained, no adapters
    python scripts/bench/bench_experts.py --launches                       # other launches of the Triton kernels
    python scripts/bench/bench_experts.py --smoke                          # a short test on a CPU

A layer has 16,384 tokens, random experts for each token, adapters of rank 16 on both products, and weights without
space for the adapters. In `full` and `transformers` the weights are trained and have no adapters: `full` is fxtune's
operator, `transformers` the compiled code of transformers (grouped_mm). Both sort tokens by expert within the time
that is measured. The first line has two ceilings of the card, measured here: a product of square matrices in
bfloat16, and a copy in device memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import ablate  # noqa: E402

from fxtune.kernels import fp8, fp8_experts, grouped_matmul, matmul  # noqa: E402
from fxtune.kernels import gated_experts as gated_experts_module  # noqa: E402
from fxtune.kernels.gated_experts import Adapter, act_of, gated_experts  # noqa: E402
from fxtune.kernels.grouped_matmul import Routing  # noqa: E402
from fxtune.kernels.matmul import CUBLAS, CUTE  # noqa: E402
from fxtune.kernels.swiglu import SILU, Activation  # noqa: E402
from fxtune.system.host import cache_home  # noqa: E402
from fxtune.system.profiler import kernel_times, short_name  # noqa: E402
from fxtune.techniques.lora.experts import no_adapter  # noqa: E402
from fxtune.techniques.quantize.quantized_experts import packed_matrices  # noqa: E402

TOKENS, RANK, REPEATS = 16_384, 16, 5
FORMATS = ("bf16", "fp8", "mxfp4", "full", "transformers")
WHOLE = ("full", "transformers")
"""Formats in which the weights are trained, which biases are not."""
SHOWN = 0.005
"""Kernels with a smaller share of a layer's time are added up in one line."""
GPT_OSS = Activation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)


@dataclass
class Layer:
    """One layer's experts and the tokens that they compute."""

    routing: Routing
    index: Tensor
    """[tokens, k]: the experts of each token."""
    trained: list[Tensor]
    """hidden, weights, A1, B1, A2, B2."""
    matrices: tuple[Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None]
    act: Activation
    gemm: str

    def run(self, kind: str) -> Callable[[], Any]:
        """The forward and backward pass over weights in this format."""
        if kind in WHOLE:
            return self.run_whole(kind)
        hidden, weights, a1, b1, a2, b2 = trained = [tensor.detach().requires_grad_() for tensor in self.trained]
        rows, adapters = (self.routing.order, self.routing.back, self.routing.ends), (Adapter(a1, b1), Adapter(a2, b2))
        seed = torch.randn_like(hidden)
        if kind == "fp8":
            stored = fp8_experts.quantize_experts(self.matrices[0]), fp8_experts.quantize_experts(self.matrices[1])
            forward = lambda: fp8_experts.fp8_experts(hidden, weights, *rows, stored, adapters, self.act)  # noqa: E731
        else:
            given: Any = self.matrices
            if kind == "mxfp4":
                given = tuple(
                    packed_matrices(matrix.contiguous(), kind, "", False, matrix.dtype, matrix.device)[1]
                    for matrix in self.matrices
                )
            stored_as = kind if kind == "mxfp4" else ""
            forward = lambda: gated_experts(  # noqa: E731
                hidden, weights, *rows, given, adapters, self.act, self.gemm, self.biases, stored_as
            )
        return lambda: torch.autograd.grad(forward(), trained, seed)

    def run_whole(self, kind: str) -> Callable[[], Any]:
        """The forward and backward pass over trained weights without adapters, by fxtune or by transformers."""
        hidden, weights, first, last = trained = [
            tensor.detach().requires_grad_() for tensor in (*self.trained[:2], *self.matrices)
        ]
        seed = torch.randn_like(hidden)
        if kind == "full":

            def forward() -> Tensor:
                routing = Routing(self.index, len(first))
                rows, adapters = (routing.order, routing.back, routing.ends), (no_adapter(first), no_adapter(last))
                return gated_experts(hidden, weights, *rows, (first, last), adapters, self.act, trained=True)
        else:
            from transformers.integrations.moe import grouped_mm_experts_forward

            experts = SimpleNamespace(
                num_experts=len(first), gate_up_proj=first, down_proj=last, has_gate=True, has_bias=False,
                is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
                _apply_gate=lambda inner: act_of(inner, self.act),
            )  # fmt: skip
            compute = torch.compile(grouped_mm_experts_forward) if hidden.is_cuda else grouped_mm_experts_forward
            forward = lambda: compute(experts, hidden, self.index, weights.to(hidden.dtype))  # noqa: E731
        return lambda: torch.autograd.grad(forward(), trained, seed)

    def flops(self, kind: str) -> int:
        """Of the products with the experts' weights, forward and backward."""
        passes = 3 if kind in WHOLE else 2
        return 2 * passes * len(self.routing.back) * sum(matrix[0].numel() for matrix in self.matrices)


def layer_of(shape: dict[str, Any], tokens: int, device: torch.device, gemm: str) -> Layer:
    """A layer with random weights of a shape of ablate.SHAPES."""
    width, experts, k = shape["hidden_size"], shape["num_experts"], shape["num_experts_per_tok"]
    inner = shape.get("moe_intermediate_size", shape["intermediate_size"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*sizes: int, scale: float) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype).mul_(scale)

    index = torch.rand(tokens, experts, device=device).topk(k, -1).indices
    routing = Routing(index, experts)
    trained = [
        draw(tokens, width, scale=1.0),
        torch.rand(tokens, k, device=device),
        draw(experts, RANK, width, scale=width**-0.5),
        draw(experts, 2 * inner, RANK, scale=0.3),
        draw(experts, RANK, inner, scale=inner**-0.5),
        draw(experts, width, RANK, scale=0.3),
    ]
    if shape["model_type"] == "gpt_oss":  # which stores [experts, in, out]
        first, last = (
            draw(experts, width, 2 * inner, scale=width**-0.5),
            draw(experts, inner, width, scale=inner**-0.5),
        )
        biases = draw(experts, 2 * inner, scale=1.0), draw(experts, width, scale=1.0)
        return Layer(routing, index, trained, (first.mT, last.mT), biases, GPT_OSS, gemm)
    first, last = draw(experts, 2 * inner, width, scale=width**-0.5), draw(experts, width, inner, scale=inner**-0.5)
    return Layer(routing, index, trained, (first, last), (None, None), SILU, gemm)


def milliseconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time of `run` on the card, without its first two calls."""
    if not torch.cuda.is_available():
        run()
        return float("nan")
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def show_kernels(run: Callable[[], Any]) -> None:
    times = kernel_times(lambda: [run() for _ in range(REPEATS)]).by_name
    kernels = sorted(times.items(), key=lambda kernel: -kernel[1][0])
    total = sum(seconds for seconds, _ in times.values())
    shown = [(name, *figures) for name, figures in kernels if figures[0] > SHOWN * total]
    for name, seconds, calls in shown:
        print(f"    {seconds / REPEATS * 1e3:8.3f} ms {calls / REPEATS:4.0f} x {short_name(name)}")
    rest = total - sum(seconds for _, seconds, _ in shown)
    print(f"    {rest / REPEATS * 1e3:8.3f} ms  others", flush=True)


def ceilings(device: torch.device) -> None:
    if device.type != "cuda":
        return
    x, y = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / milliseconds(lambda: x @ y, 20) / 1e9
    source = torch.randn(2**29, device=device, dtype=torch.bfloat16)
    copied = 2 * source.nbytes / milliseconds(lambda: source.clone()) / 1e9
    print(f"{torch.cuda.get_device_name()}: {flops:,.0f} TFLOP/s in bfloat16, {copied:.2f} TB/s copied")


def launches_of(layer: Layer) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(kernel, launch, a call) for the candidates of each Triton kernel and for the other ways to compute the same."""
    from fxtune.kernels import expert_adapters_triton, fp8_experts_triton, gated_experts_triton

    launch_of: dict[str, dict[str, int]] = {
        "FORWARD": gated_experts_triton.FORWARD,
        "BACKWARD": gated_experts_triton.BACKWARD,
        "PROJECT": expert_adapters_triton.PROJECT,
        "OUTER": expert_adapters_triton.OUTER,
        "PRODUCT": fp8_experts_triton.PRODUCT,
    }
    hidden, _, a1, b1, a2, b2 = layer.trained
    routing, (first, last), ends = layer.routing, layer.matrices, layer.routing.ends
    token, rows = routing.order // routing.k, len(routing.back)
    narrow = torch.randn(rows, RANK, device=hidden.device, dtype=hidden.dtype)
    wide = torch.randn(rows, first.shape[1], device=hidden.device, dtype=hidden.dtype)
    h = wide[:, : last.shape[2]].contiguous()

    def with_launch(name: str, launch: dict[str, int], call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            kept = dict(launch_of[name])
            launch_of[name].update(launch)
            try:
                call()
            finally:
                launch_of[name].update(kept)

        return run

    def each(name: str, kernel: str, launches: list[tuple[int, ...]], call: Callable[[], Any]) -> Iterator[Any]:
        keys = [key for key in ("ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages") if key in launch_of[name]]
        for launch in launches:
            yield kernel, str(launch), with_launch(name, dict(zip(keys, launch, strict=True)), call)

    r1, weights = narrow, torch.rand(rows, 1, device=hidden.device)
    dh = torch.randn_like(h)
    given = r1, b1, a2, layer.biases[0], ends, layer.act
    around = r1, b1, dh, narrow, a2, weights, layer.biases[0], ends, layer.act
    gated = [(64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (64, 64, 8, 3), (32, 32, 4, 3)]
    yield from each("FORWARD", "activation", gated, lambda: gated_experts_module.activate(wide, *given))
    yield from each("BACKWARD", "its backward", gated, lambda: gated_experts_module.activate_backward(wide, *around))
    small = [(64, 128, 4, 3), (64, 128, 4, 5), (128, 128, 4, 3), (128, 64, 4, 4)]
    yield from each(
        "PROJECT", "project in place", small, lambda: expert_adapters_triton.project(hidden, token, a1.mT, ends)
    )
    down = [(128, 64, 4, 4), (128, 64, 4, 7), (64, 128, 4, 4), (64, 128, 4, 7)]
    yield from each("OUTER", "outer in place", down, lambda: expert_adapters_triton.outer(hidden, token, narrow, ends))
    yield from each("OUTER", "outer of rows", down, lambda: expert_adapters_triton.outer(wide, None, narrow, ends))
    gathered = hidden.index_select(0, token)
    yield "project", layer.gemm, lambda: grouped_matmul.product(gathered, a1.mT, ends, gemm=layer.gemm)
    yield "outer", layer.gemm, lambda: grouped_matmul.outer(gathered, narrow, ends, gemm=layer.gemm)
    yield "outer of rows", layer.gemm, lambda: grouped_matmul.outer(wide, narrow, ends, gemm=layer.gemm)

    for name, x, matrix, factor in (("down", h, last, b2.mT), ("its gradient", wide, first.mT, a1)):
        matrices = matrix.mT  # [experts, in, out]
        low = grouped_matmul.product(narrow, factor, ends, gemm=layer.gemm)
        yield (
            f"{name}, 16 bits",
            layer.gemm,
            lambda m=matrices, x=x: grouped_matmul.product(x, m, ends, gemm=layer.gemm),
        )
        yield (
            f"{name}, 16 bits",
            f"{layer.gemm}, adapter added",
            lambda m=matrices, x=x, low=low: grouped_matmul.product(x, m, ends, low, layer.gemm),
        )
        yield (
            f"{name}, adapter alone",
            layer.gemm,
            lambda f=factor: grouped_matmul.product(narrow, f, ends, gemm=layer.gemm),
        )
        bordered = torch.cat([x, narrow], 1)
        border = torch.cat([matrix, factor.mT], 2) if matrix.stride(2) == 1 else torch.cat([matrices, factor], 1).mT
        yield (
            f"{name}, 16 bits",
            f"{layer.gemm}, bordered",
            lambda m=border.mT, x=bordered: grouped_matmul.product(x, m, ends, gemm=layer.gemm),
        )
        # The product in the other direction reads the weight without its border: a tensor with gaps.
        inside = border[:, : matrix.shape[1], : matrix.shape[2]]
        y = torch.randn(rows, matrix.shape[1], device=x.device, dtype=x.dtype)
        yield (
            f"{name}, 16 bits",
            f"{layer.gemm}, back, plain",
            lambda m=matrix, y=y: grouped_matmul.product(y, m, ends, gemm=layer.gemm),
        )
        yield (
            f"{name}, 16 bits",
            f"{layer.gemm}, back, gaps",
            lambda m=inside, y=y: grouped_matmul.product(y, m, ends, gemm=layer.gemm),
        )
        if layer.biases[0] is None:
            codes, scales = fp8_experts.quantize_experts(matrix.contiguous(), False)[:2]
            left = fp8.quantize_rows(x)
            yield from each(
                "PRODUCT",
                f"{name}, fp8 with adapter",
                [
                    (128, 128, 128, 4, 3),
                    (128, 128, 128, 8, 3),
                    (128, 256, 128, 8, 3),
                    (256, 128, 128, 8, 3),
                    (128, 256, 64, 8, 4),
                ],
                lambda c=codes, s=scales, x=left, f=factor: fp8_experts_triton.product(
                    *x, c.view(fp8.E4M3), s, ends, (narrow, f)
                ),
            )
            yield (
                f"{name}, fp8",
                "torch",
                lambda c=codes, s=scales, x=left: fp8_experts.scaled_product(
                    x, c, s, ends, torch.bfloat16, fp8_experts.TORCH
                ),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="moe,gpt_oss", help="shapes of ablate.py")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument(
        "--launches", action="store_true", help="time the candidates of each launch in place of a layer"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; works without a GPU")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        parser.error("this needs a GPU (--smoke runs tiny sizes without one)")
    device, gemm = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), CUBLAS
    if device.type == "cuda" and torch.cuda.get_device_capability() == matmul.CAPABILITY:
        grouped_matmul.prepare(device, torch.bfloat16, cache_home() / "quack")
        gemm = CUTE
    ceilings(device)
    torch.manual_seed(0)
    for name in args.cases.split(","):
        shape, tokens = dict(ablate.SHAPES[name]), TOKENS
        if args.smoke:
            shape.update(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_experts=4)
            shape["num_experts_per_tok"], tokens = 2, 32
        layer = layer_of(shape, tokens, device, gemm)
        if args.launches:
            from triton.errors import TritonError

            for kernel, launch, call in launches_of(layer):
                try:
                    print(f"{name}: {kernel:32} {launch:28} {milliseconds(call):8.3f} ms", flush=True)
                except (TritonError, RuntimeError) as error:  # a launch may need more shared memory than the card has
                    print(f"{name}: {kernel:32} {launch:28} {type(error).__name__}", flush=True)
            continue
        for kind in args.formats.split(","):
            if kind in ("fp8", *WHOLE) and layer.biases[0] is not None:
                continue
            run = layer.run(kind)
            took = milliseconds(run, 10)
            peak = ""
            if device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run()
                peak = f", {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB beyond weights and states"
            products = "products" if kind in WHOLE else "frozen products"
            print(f"{name}, {kind}: {took:.3f} ms, {products} {layer.flops(kind) / 1e12:.2f} TFLOP{peak}")
            show_kernels(run)
        del layer


if __name__ == "__main__":
    main()
