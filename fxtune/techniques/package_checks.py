"""Checks whether a package works here. Each check compares a tiny forward and backward through it with plain torch.

    python -P fxtune/techniques/package_checks.py NAME [gpu]

`fxtune doctor` checks all packages. A run checks those that it would use (`unusable`), before it decides an `auto`: a
package may be installed in part, such as flash-attn-4 without its CUDA part. Results on a GPU are recorded, failures
too, so that a run checks a package once; `doctor` checks and records again.

A check runs in a process of its own: a broken wheel can end it with a segmentation fault, a kernel that compiles for
the first time can hang. The last line of output is one JSON object: `state` (works; imports: its kernels need a GPU;
missing; broken), `seen`, and for torch the `facts` of this machine.

The first run on a machine waits for the checks, so they prepare it: they import large packages while the run imports
transformers (`import_ahead`), and FlashAttention-4 compiles its kernels for the heads of the run's model, and keeps
them on disk.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fxtune.system.facts import MachineFacts
    from fxtune.system.process_group import Captured

PROGRAM = Path(__file__)
TIMEOUT_GPU = 180.0
"""Seconds for a check with a GPU: FlashAttention-4 compiles its kernels on first use."""
SHARED = ("flash_attn", "apex")
"""Folders of modules that several distributions share: flash-attn and flash-attn-4, NVIDIA's apex and PyPI's."""
OCCUPIED = re.compile("out of memory|busy or unavailable", re.IGNORECASE)
"""Errors that say nothing about the package: another process has the GPU."""
THESE_HEADS = "only with the heads of this model"
PASSING = re.compile(f"{OCCUPIED.pattern}|no answer within|SIGKILL|SIGTERM|{THESE_HEADS}", re.IGNORECASE)
"""Results that may be others a minute later, or with another model."""
RESULTS = "package_checks.json"
"""The file of recorded results in fxtune's cache."""
METADATA = ".dist-info"
"""How the folder ends that an installer writes beside a package, NAME-VERSION before it."""
LARGE = {"flash-attn-4": "attention", "quack-kernels": "lora"}
"""Packages that take seconds to import -> the technique that may use them."""
TOLERANCE = 2e-2
"""Relative distance from float32 that bfloat16 operators may have: five times what rounding costs."""


@dataclass(frozen=True)
class Heads:
    """Heads of a layer's attention, for which FlashAttention-4 compiles its kernels."""

    queries: int = 4
    keys: int = 2
    width: int = 128


@dataclass(frozen=True)
class Check:
    module: str
    """What is imported."""
    run: Callable[..., str]
    """Runs the package on a torch.device and returns what it ran. Raises whatever is wrong."""
    gpu: bool = True
    """Its kernels exist for GPUs only."""
    takes_heads: bool = False
    """Whether `run` takes Heads, too."""


class NotTriedError(Exception):
    """The package, or this version of it, cannot be used on this machine, but is not broken. The message says why."""


def _torch(device: torch.device) -> str:
    import torch

    dtype = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    x, w = torch.randn(2, 64, 64, device=device)
    _require_same(lambda x, w: x @ w, lambda x, w: x @ w, [x.to(dtype), w.to(dtype)])
    return f"a matmul in {str(dtype).removeprefix('torch.')}"


def _compile(device: torch.device) -> str:
    import torch

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    _require_same(torch.compile(function), function, [torch.randn(64, device=device)])
    return "compiled a function"


def _triton(device: torch.device) -> str:
    import torch
    import triton

    globals()["tl"] = importlib.import_module("triton.language")  # a kernel reads its module's globals only

    @triton.jit
    def kernel(x, g, y, dx, SIZE: tl.constexpr):  # type: ignore[name-defined]  # noqa: F821
        at = tl.arange(0, SIZE)  # type: ignore[name-defined]  # noqa: F821
        value = tl.load(x + at)  # type: ignore[name-defined]  # noqa: F821
        tl.store(y + at, value * value)  # type: ignore[name-defined]  # noqa: F821
        tl.store(dx + at, 2 * value * tl.load(g + at))  # type: ignore[name-defined]  # noqa: F821

    x, g = torch.randn(2, 128, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, g, y, dx, SIZE=128)
    _require_close((y, x * x), (dx, 2 * x * g))
    return "compiled a kernel"


def _liger(device: torch.device) -> str:
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    _require_same(
        lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        lambda x, weight: torch.nn.functional.rms_norm(x, (256,), weight, 1e-6),
        [torch.randn(4, 256, device=device), torch.randn(256, device=device)],
    )
    return "RMSNorm"


def _flash(module: str) -> Callable[[torch.device], str]:
    return lambda device: _attention(device, importlib.import_module(module).flash_attn_func)


def _flash4(device: torch.device, heads: Heads) -> str:
    """Causal attention to documents of a packed row, as the run calls it."""
    import torch

    from fxtune.kernels.flash4 import flash4

    bounds = torch.tensor([0, 256], dtype=torch.int32, device=device)

    def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        assert causal
        out: torch.Tensor = flash4(q[0], k[0], v[0], bounds, 256, q.shape[-1] ** -0.5, 0, 0.0)[0]
        return out[None]

    try:
        return _attention(device, flash_attn, heads)
    except Exception as error:
        if heads == Heads():
            raise
        _attention(device, flash_attn)  # raises if the package fails with all heads
        raise RuntimeError(f"{error} ({THESE_HEADS})") from error


def _attention(device: torch.device, flash_attn: Callable[..., Any], heads: Heads = Heads()) -> str:
    """Causal attention of 256 tokens in bfloat16, [rows, tokens, heads, head_dim].

    Some versions return (output, log-sum-exp).
    """
    import torch

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        out = flash_attn(*inputs, causal=True)
        return out[0] if isinstance(out, tuple) else out

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    counts = heads.queries, heads.keys, heads.keys
    inputs = [torch.randn(1, 256, count, heads.width, device=device, dtype=torch.bfloat16) for count in counts]
    return f"attention within {_require_same(attention, plain, inputs):.1e} of float32"


def _quack(device: torch.device) -> str:
    """y = x W^T and dx = dy W of a linear, as fused adapters multiply."""
    from importlib import metadata

    import torch

    from fxtune.kernels.matmul import CAPABILITY, VERSION, by_quack, prepare
    from fxtune.system.host import cache_home

    if metadata.version("quack-kernels") != VERSION:
        raise NotTriedError(
            f"imports; techniques.lora.matmul calls internal functions of {VERSION}, so cuBLAS is used instead"
        )
    card, wanted = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), CAPABILITY))
    if card != wanted:
        raise NotTriedError(
            f"imports; techniques.lora.matmul uses it on compute capability {wanted}, and this GPU has {card}"
        )
    prepare(device, torch.bfloat16, cache_home() / "quack")
    x, dy, w = (torch.randn(size, device=device).bfloat16() for size in ((512, 384), (512, 640), (640, 384)))
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    by_quack(x, w.t(), y)
    by_quack(dy, w, dx)
    error = _require_close((y, x.float() @ w.float().t()), (dx, dy.float() @ w.float()))
    return f"a linear within {error:.1e} of float32"


def _bitsandbytes(device: torch.device) -> str:
    import bitsandbytes
    import torch

    layer: Any = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer = layer.to(device)
    dense = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    _require_same(layer, lambda x: x @ dense.T, [torch.randn(8, 128, device=device, dtype=torch.bfloat16)])
    if device.type == "cpu":
        return "a linear in 4 bits"
    _require_adamw_step(lambda weights: bitsandbytes.optim.AdamW8bit(weights, lr=0.1, weight_decay=0.0), device)
    return "a linear in 4 bits, AdamW in 8"


def _torchao(device: torch.device) -> str:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(128, 64, bias=False, device=device)
    weight = layer.weight.detach().clone()
    quantize_(layer, Int8WeightOnlyConfig())
    layer.requires_grad_(False)
    _require_same(layer, lambda x: x @ weight.T, [torch.randn(8, 128, device=device)])
    return "a linear in 8 bits"


def _apex(device: torch.device) -> str:
    import torch
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam

    x = torch.ones(4, 1, device=device) * torch.linspace(-1, 2, 256, device=device)
    _require_same(FusedLayerNorm(256).to(device), torch.nn.LayerNorm(256).to(device), [x])
    _require_adamw_step(lambda weights: FusedAdam(weights, lr=0.1), device)
    return "FusedLayerNorm and FusedAdam"


def _kernels(device: torch.device) -> str:
    assert callable(importlib.import_module("kernels").get_kernel)
    return "imports; a recipe fetches a kernel from the hub by techniques.attention.backend=hub:ORG/KERNEL@COMMIT"


CHECKS = {
    "torch": Check("torch", _torch, gpu=False),
    "torch.compile": Check("torch", _compile, gpu=False),
    "triton": Check("triton", _triton),
    "liger-kernel": Check("liger_kernel.ops.rms_norm", _liger),
    "flash-attn-4": Check("flash_attn.cute", _flash4, takes_heads=True),
    "quack-kernels": Check("quack.gemm", _quack),
    "flash-attn-3": Check("flash_attn_interface", _flash("flash_attn_interface")),
    "flash-attn": Check("flash_attn.flash_attn_interface", _flash("flash_attn")),
    "kernels": Check("kernels", _kernels, gpu=False),
    "bitsandbytes": Check("bitsandbytes", _bitsandbytes, gpu=False),
    "torchao": Check("torchao.quantization", _torchao, gpu=False),
    "apex": Check("apex.normalization", _apex),
}


def main(name: str, gpu: bool, waits: bool = False) -> dict[str, Any]:
    """The result of one check. `gpu`: this machine may have one. `waits`: after the import the check waits for its
    heads as JSON on standard input; if that ends without them, so does the process."""
    check, facts, heads = CHECKS[name], dict[str, Any](), Heads()
    # The broad except is intended: any error of a package, on import or when it runs, becomes one line for the user.
    try:
        if not _installed(check.module):
            return {"state": "missing", "seen": ""}
        if name == "flash-attn-4" and gpu:  # package() sets its cache folder, which it reads at its first import
            importlib.import_module("fxtune.kernels.flash4").package()
        importlib.import_module(check.module)
        if check.gpu and not gpu:
            return {"state": "imports", "seen": "imports; its kernels run on a GPU only"}
        import torch

        if waits:
            if not (line := sys.stdin.readline()):
                os._exit(0)
            heads = Heads(**json.loads(line))
        device = torch.device("cuda" if gpu and torch.cuda.is_available() else "cpu")
        if name == "torch":
            facts = {"facts": _facts()}
        if check.gpu and device.type == "cpu":
            return {"state": "imports", "seen": "imports; torch sees no GPU for its kernels"}
        torch.manual_seed(0)
        ran = check.run(device, *([heads] if check.takes_heads else []))
        return {"state": "works", "seen": f"{ran}, forward and backward", **facts}
    except NotTriedError as why:
        return {"state": "imports", "seen": str(why), **facts}
    except Exception as error:  # noqa: BLE001
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"]
        return {"state": "broken", "seen": f"{type(error).__name__}: {lines[0]}", **facts}


def run_check(name: str, gpu: bool, timeout: float) -> dict[str, Any]:
    """The result of main() in a process of its own. Without `gpu`, a package that needs one is only imported."""
    return _answer(_start(name, *(["gpu"] if gpu else [])), Heads(), timeout)


@contextlib.contextmanager
def import_ahead(facts: MachineFacts, techniques: Iterable[str]) -> Iterator[dict[str, Captured]]:
    """A process for each package of LARGE that one of these techniques may use and that has no recorded result. It
    imports the package and waits: unusable() takes it for its check, or it ends with the body."""
    names = [name for name, technique in LARGE.items() if name in facts.packages and technique in techniques]
    recorded = _recorded(names, facts.device_name) if facts.device == "cuda" and names else names
    waiting = {name: _start(name, "gpu", "waits") for name in names if name not in recorded}
    try:
        yield waiting
    finally:
        for process in waiting.values():
            process.end()


def _start(name: str, *options: str) -> Captured:
    from fxtune.system.process_group import Captured

    return Captured([sys.executable, "-P", str(PROGRAM), name, *options])


def _answer(check: Captured, heads: Heads, timeout: float) -> dict[str, Any]:
    from fxtune.system.redact import redact

    check.tell(json.dumps(asdict(heads)) + "\n")
    code, output, _ = check.result(timeout)
    lines = output.strip().splitlines() or ["no message"]
    if code is None:
        return {"state": "broken", "seen": f"no answer within {timeout:g} s"}
    if code == 0 and (answers := [line for line in lines if line.startswith("{")]):
        answer: dict[str, Any] = json.loads(answers[-1])
        return {**answer, "seen": redact(answer["seen"])}
    if code < 0:
        return {"state": "broken", "seen": f"its process was killed by {signal.Signals(-code).name}"}
    return {"state": "broken", "seen": redact(f"its process ended with {code}: {lines[-1]}")}


def unusable(
    facts: MachineFacts, packages: Iterable[str], heads: Heads = Heads(), ahead: dict[str, Captured] | None = None
) -> dict[str, str]:
    """Why packages cannot be used, for those of `packages` that are installed and do not work on this device. From
    then on all facts of this process count them as missing.

    `heads`: of the run's model. `ahead`: the processes of import_ahead(); a check takes its own out.
    """
    from fxtune.system.facts import APEX, BROKEN

    names = {name: "apex" if name == APEX else name for name in packages if name in facts.packages}
    checks = list(names.values())
    if facts.device == "cuda":
        answers = _check_on_gpu(checks, facts, heads, {} if ahead is None else ahead)
    else:
        answers = {name: _check_here(name) for name in checks}
    found = {name: answers[check]["seen"] for name, check in names.items() if answers[check]["state"] == "broken"}
    found = {name: seen for name, seen in found.items() if not OCCUPIED.search(seen)}
    BROKEN.update(found)
    for name in found:  # other libraries import what is installed, as peft does with bitsandbytes: hide it from them
        module = CHECKS[names[name]].module
        top = module.partition(".")[0]
        sys.modules[module if top in SHARED else top] = None  # type: ignore[assignment]
    return found


@functools.cache
def _check_here(name: str) -> dict[str, Any]:
    """The result of a check on a CPU, in this process, which will import the package anyway."""
    import torch

    for logger in (CHECKS[name].module.partition(".")[0], "torch.utils._pytree"):  # torchao registers enums there
        logging.getLogger(logger).setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main(name, gpu=False)


def _check_on_gpu(
    names: list[str], facts: MachineFacts, heads: Heads, ahead: dict[str, Captured]
) -> dict[str, dict[str, Any]]:
    """The results of checks, each in a separate process: a fault of a kernel would end all work on the GPU. A
    recorded result is taken instead of a check.
    """
    from fxtune.system.progress import phase

    answers = _recorded(names, facts.device_name)
    if missing := [name for name in names if name not in answers]:
        with (
            phase(f"Checking once that {', '.join(missing)} works on this GPU", part="package checks"),
            ThreadPoolExecutor(len(missing)) as pool,
        ):
            checks = [ahead.pop(name) if name in ahead else _start(name, "gpu", "waits") for name in missing]
            found = list(pool.map(lambda check: _answer(check, heads, TIMEOUT_GPU), checks))
        answers |= record(dict(zip(missing, found, strict=True)), facts.device_name)
    return answers


def record(answers: dict[str, dict[str, Any]], device_name: str) -> dict[str, dict[str, Any]]:
    """Record results on this machine's GPU for later runs, and return them. What says nothing about the package is
    not recorded: another process had the GPU, or the machine was too busy to answer.
    """
    from fxtune.system.host import cache_home
    from fxtune.system.json_cache import add_cached

    lasting = {name: answer for name, answer in answers.items() if not PASSING.search(answer["seen"])}
    stamped = {name: {"state": one["state"], "seen": one["seen"], "at": time.time()} for name, one in lasting.items()}
    keys = _keys(stamped, device_name)
    add_cached(cache_home() / RESULTS, {keys[name]: answer for name, answer in stamped.items()})
    return answers


def _recorded(names: list[str], device_name: str) -> dict[str, dict[str, Any]]:
    """The recorded results that still hold. A package that did not work is checked again as soon as any package was
    installed, repaired or removed, even if no version has changed.
    """
    from fxtune.system.host import cache_home
    from fxtune.system.json_cache import read_cached

    known = read_cached(cache_home() / RESULTS)
    found = {name: known[key] for name, key in _keys(names, device_name).items() if key in known}
    if all(answer["state"] == "works" for answer in found.values()):
        return found
    changed = _last_installed()
    return {name: answer for name, answer in found.items() if answer["state"] == "works" or answer["at"] >= changed}


def _keys(names: Iterable[str], device_name: str) -> dict[str, str]:
    """The name in the file of results for each check: it changes with the GPU, its driver, Python, and the version of
    any installed package, because a package may fail through another one.
    """
    driver = Path("/proc/driver/nvidia/version")
    installed = sorted(entry.name for folder in _site_folders() for entry in folder if entry.name.endswith(METADATA))
    machine = [device_name, driver.read_text() if driver.exists() else "", sys.version, installed]
    environment = blake2b(repr(machine).encode(), digest_size=8).hexdigest()
    return {name: f"{name} {environment}" for name in names}


def _last_installed() -> float:
    """When a file or folder at the top of a folder with installed packages was last changed, in seconds since 1970."""
    return max((entry.stat().st_ctime for folder in _site_folders() for entry in folder), default=0.0)


def _site_folders() -> Iterator[list[os.DirEntry[str]]]:
    """The content of each folder of sys.path that holds installed packages: no checkout, no working directory."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            found = list(entries)
            if any(entry.name.endswith(METADATA) for entry in found):
                yield found


def _installed(module: str) -> bool:
    """Whether the package is installed. One that lacks modules of its own counts as installed, but broken."""
    top, *inner = module.split(".")
    if (spec := importlib.util.find_spec(top)) is None:
        return False
    if top in SHARED:
        places = [Path(place, inner[0]) for place in spec.submodule_search_locations or ()]
        return any(path.exists() or path.with_suffix(".py").exists() for path in places)
    return True


def _facts() -> dict[str, Any]:
    """The Facts of this machine, its number of GPUs, torch's CUDA version, and why torch does not use a GPU."""
    import torch

    from fxtune.distributed.world import World

    os.environ.pop("WORLD_SIZE", None)
    why = ""
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001  torch reports a faulty driver by many types of errors
            why = str(error).splitlines()[0]
    machine = asdict(World.create().facts())
    return {**machine, "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "why_no_gpu": why}


def _require_adamw_step(optimizer: Callable[[list[Any]], Any], device: torch.device) -> None:
    """One step of Adam at lr 0.1 moves each weight by 0.1. The smallest 8-bit optimizer state has 4,096 elements."""
    import torch

    weight = torch.nn.Parameter(torch.ones(8192, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer([weight]).step()
    _require_close((weight.detach(), torch.full_like(weight, 0.9)))


def _require_same(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Any]) -> float:
    """Compare outputs and gradients of all inputs of a function with those of plain torch in float32."""
    import torch

    copies = [tensor.clone().float().requires_grad_() for tensor in inputs]
    out, expected = ours(*(tensor.requires_grad_() for tensor in inputs)), plain(*copies)
    gradient = torch.randn_like(expected)
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient)
    return _require_close((out, expected), *((a.grad, b.grad) for a, b in zip(inputs, copies, strict=True)))


def _require_close(*pairs: tuple[Any, Any]) -> float:
    """The largest relative distance among pairs of (result, expected). Raises ArithmeticError beyond TOLERANCE."""
    worst = 0.0
    for result, expected in pairs:
        result, expected = result.detach().float(), expected.detach().float()
        error = ((result - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCE:
            raise ArithmeticError(f"runs, but its result is off by {error:.1e} from plain torch's")
        worst = max(worst, error)
    return worst


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n" + json.dumps(main(sys.argv[1], "gpu" in sys.argv[2:], "waits" in sys.argv[2:])), flush=True)
    os._exit(0)  # skip the exit hooks of the package that was checked
