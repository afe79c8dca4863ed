"""Measures what deterministic kernels cost on this GPU: whole steps, and attention's backward pass alone.

    python scripts/bench/bench_determinism.py --kernels --json kernels.json   # the numbers of SLOWER in settle/determinism.py
    python scripts/bench/bench_determinism.py --cases 8b_4x4096,moe_4x4096    # cases of bench_peers.py with --layers layers
    python scripts/bench/bench_determinism.py --smoke                         # a tiny case on a CPU, where both modes are the same

Each case is one process, which builds the run once and then takes steps in both modes by turns, so that both are
measured on the same card, weights and rows. All processes start at once, because most of a start is the host's work.
They are measured one after another, when all are ready. So all of them must fit into the card together; `--together`
limits their number. Models have `--layers` layers: a step of fewer layers has the same cost a layer, and the output
head weighs more, so the share is a little too small. The table also has the share that the forecast gives for the same
model, which decides `run.deterministic=auto`.

With `--kernels` a process measures one head size: causal attention of 16,384 tokens in documents of equal lengths, four
query heads to a key head. Only the backward pass is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import bench_peers  # noqa: E402

CASES = ("8b_4x4096", "moe_4x4096", "dpo_8b_8x1024", "vl_7b_1024", "1b_full_8x4096", "8b_1x65536")
HEADS = (64, 128, 256)
LENGTHS = (1024, 4096, 16384, 65536)
BACKENDS = ("flash4", "sdpa", "sdpa float32")
"""As SLOWER names them. In float32 torch's memory-efficient kernel runs."""
TOKENS = 16384
WARM_UP, ROUNDS, BLOCK = 2, 8, 2
"""Steps of each mode before the measurement; how often the modes take turns, and the steps of a turn."""
READY = "ready"


def measure_steps(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A case: the median seconds of its steps in both modes, and the forecast's share."""
    import torch

    from fxtune.config import compose
    from fxtune.data.batches.loader import Loader
    from fxtune.settle import determinism
    from fxtune.system.determinism import use_deterministic_kernels
    from fxtune.training.builder import RunBuilder, steps_only

    shape = bench_peers.SHAPES[bench_peers.CASES[name].shape]
    text = shape.get("text_config", shape)
    text["num_hidden_layers"] = min(args.layers, text["num_hidden_layers"])
    words = bench_peers.fxtune_words(name, args, 1)
    config = steps_only(compose.load([*words, "run.deterministic=true"]), 2 * (WARM_UP + ROUNDS * BLOCK + 1))
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    model, _ = builder.proven_model()
    model.model.train()
    train_step = builder.train_step(model, builder.config.objective, recorded=False)
    loader = Loader(builder.own(plan), config.loader, builder.world.device)
    taken = (train_step(plan, step, builder.config.optimizer.lr) for step in loader.steps())
    synchronize = torch.cuda.synchronize if builder.world.device.type == "cuda" else lambda: None
    for on in (False, True):
        use_deterministic_kernels(on)
        list(islice(taken, WARM_UP))
    synchronize()
    wait_for_turn()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for on, found in seconds.items():
            use_deterministic_kernels(on)
            for _ in range(BLOCK):
                synchronize()
                began = time.perf_counter()
                next(taken)
                synchronize()
                found.append(time.perf_counter() - began)
    if args.profile:
        show_difference(taken)
    taken.close()
    loader.close()
    usual, ordered = (statistics.median(found) for found in seconds.values())
    return {
        "case": name,
        "layers": text["num_hidden_layers"],
        "ms": usual * 1e3,
        "deterministic_ms": ordered * 1e3,
        "cost": ordered / usual - 1,
        "spread": max(max(found) / min(found) - 1 for found in seconds.values()),
        "forecast": determinism.cost(builder.facts),
        "device": builder.facts.device_name,
    }


def show_difference(taken: Iterator[Any]) -> None:
    """Profile a step of each mode, and print the kernels whose times differ most to stderr."""
    from fxtune.system.determinism import use_deterministic_kernels
    from fxtune.system.profiler import kernel_times, short_name

    times = []
    for on in (False, True):
        use_deterministic_kernels(on)
        times.append(kernel_times(lambda: next(taken)).by_name)
    added = {name: [mode.get(name, (0.0, 0)) for mode in times] for name in {*times[0], *times[1]}}
    for name, modes in sorted(added.items(), key=lambda entry: -abs(entry[1][1][0] - entry[1][0][0]))[:25]:
        shown = ", ".join(f"{seconds * 1e3:.3f} ms {calls} x" for seconds, calls in modes)
        print(f"    {shown}  {short_name(name)}", file=sys.stderr, flush=True)


def measure_kernels(head: int) -> list[dict[str, Any]]:
    """Median milliseconds of the backward pass of each backend with heads of `head`, in both modes, by length."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    from fxtune.system.determinism import use_deterministic_kernels
    from fxtune.techniques.attention.backends.flash4 import FLASH4
    from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS

    def efficient(q, k, v, bounds, scale, *_):
        # Documents as rows: [rows, heads, tokens, width], key heads repeated for the query heads.
        parts = (x.unflatten(1, (len(bounds) - 1, -1))[0].transpose(1, 2) for x in (q, k, v))
        q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in parts)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    cores, rows = {"flash4": FLASH4.core, "sdpa": BY_DOCUMENTS.core, "sdpa float32": efficient}, []
    FLASH4.prepare()
    works = []
    for backend in BACKENDS:
        for length in LENGTHS:
            tokens, queries = max(TOKENS, length), 4096 // head
            dtype = torch.float32 if "float32" in backend else torch.bfloat16
            if length > TOKENS and dtype == torch.float32:
                continue
            bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
            q, k, v = (
                torch.randn(1, tokens, heads, head, device="cuda", dtype=dtype, requires_grad=True)
                for heads in (queries, queries // 4, queries // 4)
            )
            out = cores[backend](q, k, v, bounds, head**-0.5, 0, 0.0)
            gradient = torch.randn_like(out)

            def work(out=out, gradient=gradient, given=(q, k, v)):
                torch.autograd.grad(out, given, gradient, retain_graph=True)

            for on in (False, True):
                use_deterministic_kernels(on)
                work()
            works.append((backend, length, work))
    torch.cuda.synchronize()
    wait_for_turn()
    for backend, length, work in works:
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(2):
            for on, found in times.items():
                use_deterministic_kernels(on)
                found.append(do_bench(work, warmup=20, rep=100, return_mode="median"))
        usual, ordered = (min(found) for found in times.values())
        device = torch.cuda.get_device_name()
        rows.append(dict(device=device, backend=backend, head=head, length=length, ms=usual, deterministic_ms=ordered))
        rows[-1]["slower"] = ordered / usual - 1
    return rows


def wait_for_turn() -> None:
    """Tell the parent process that this one is ready, and wait until it may measure."""
    print(READY, flush=True)
    sys.stdin.readline()


def run_children(jobs: list[str], args: argparse.Namespace) -> list[Any]:
    """Start a process for each job, let them measure in turn, and return their results."""
    words = [sys.executable, __file__, "--layers", str(args.layers), "--scratch", str(args.scratch)]
    children = {
        job: subprocess.Popen(
            [*words, *["--smoke"] * args.smoke, *["--profile"] * args.profile, "--child", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    }
    ready = {job: any(line.strip() == READY for line in child.stdout) for job, child in children.items()}
    results = []
    for job, child in children.items():
        output = child.communicate("go\n" if ready[job] else None)[0]
        if child.returncode or not ready[job]:
            print(f"{job}: failed with exit code {child.returncode}", flush=True)
            continue
        results.append(json.loads(output.splitlines()[-1]))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=lambda text: text.split(","), help="default: all, or none with --kernels")
    parser.add_argument("--kernels", action="store_true", help="also attention alone")
    parser.add_argument("--profile", action="store_true", help="also the kernels whose times differ, to stderr")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--together", type=int, default=3, help="processes that share the card")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fxtune-peers")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps, args.set = 2, ["tracking.display=none"]
    args.scratch.mkdir(parents=True, exist_ok=True)
    if args.child:
        kernels = args.child.isdecimal()
        print(json.dumps(measure_kernels(int(args.child)) if kernels else measure_steps(args.child, args)))
        return
    jobs = [str(head) for head in HEADS if args.kernels]
    jobs += ["smoke"] if args.smoke else args.cases or [name for name in CASES if not args.kernels]
    results = []
    for at in range(0, len(jobs), args.together):
        results += run_children(jobs[at : at + args.together], args)
    rows = [row for found in results for row in (found if isinstance(found, list) else [found])]
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
