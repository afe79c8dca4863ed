"""`fxtune doctor`: what this machine has, whether it works, and the command that installs what is missing. One page.

    fxtune doctor                             # the machine
    fxtune doctor +recipe=llama_yarn_64k      # and whether that recipe can run on it

Each package is tried in a process of its own (probes.py), a tiny forward and backward, so that one that crashes or hangs is a
line of the page and not its end. This process imports no torch unless a recipe is to be judged. No secret is printed, only
whether there is one. Exit code 1: something that is installed does not work, or the recipe cannot run here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from rich.text import Text

from fxtune.diagnostics import package_checks, system_report
from fxtune.diagnostics.system_report import GIB, Finding, State
from fxtune.errors import CheckError, StorageError, UserError
from fxtune.system.console import plain, say, table, unicode
from fxtune.system.host import cores
from fxtune.system.redact import redact

if TYPE_CHECKING:
    from fxtune.config.root import Config

PATIENCE = 45.0
"""Seconds that a probe has on a machine without a GPU."""
PATIENCE_GPU = 180.0
"""With one: FlashAttention-4 compiles its kernels on first use."""
BATCH_TOKENS = 2**18
"""Without a recipe: tokens of the micro-batches that loader processes are to hold."""
DRIVERS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Where a GPU shows, also when nvidia-smi is not installed."""
TOKEN_BYTES = 3 * 8
"""Of a batch: ids, targets, positions."""


@dataclass(frozen=True)
class Package:
    probe: str
    distributions: tuple[str, ...]
    """Under which names its version may be found."""
    install: str
    need: str = ""
    """What it is for."""


FLASH, QUANT = "pip install 'fxtune[flash]'", "pip install 'fxtune[quant]'"
PACKAGES = (
    Package("triton", ("triton",), "pip install triton", "torch.compile and Liger on a GPU"),
    Package("liger-kernel", ("liger-kernel",), FLASH, "techniques.liger"),
    Package("flash-attn-4", ("flash-attn-4",), FLASH, "attention on Hopper and Blackwell"),
    Package(
        "quack-kernels",
        ("quack-kernels",),
        "pip install 'quack-kernels[cu13]==0.6.5'",
        "techniques.lora.matmul on Hopper",
    ),
    Package(
        "flash-attn-3",
        ("flash-attn-3", "flash_attn_3"),
        "pip install git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper --no-build-isolation",
        "built from source; flash-attn-4 takes its place",
    ),
    Package(
        "flash-attn",
        ("flash-attn",),
        "pip install flash-attn --no-build-isolation",
        "built from source, an hour; torch has it built in",
    ),
    Package("kernels", ("kernels",), "pip install kernels", "attention kernels of the Hugging Face hub"),
    Package("bitsandbytes", ("bitsandbytes",), QUANT, "a base in 4 or 8 bits, 8-bit AdamW"),
    Package("torchao", ("torchao",), QUANT, "the alternative to bitsandbytes"),
    Package(
        "apex",
        ("apex",),
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
        "NVIDIA's fused optimizers, built from source",
    ),
)
COMPILERS = "apt install g++ python3-dev"


def run(config: Optional[Config] = None, json: Optional[str] = None) -> None:
    """Print the page. `config`: a recipe to be judged as well; `json`: a file for all findings.

    Raises CheckError where something is broken.
    """
    findings: list[Finding] = []
    for title, found in _sections(config):
        seen = [
            replace(one, what=redact(one.what), seen=redact(one.seen)) for one in found
        ]  # a run's name is anybody's text
        say(_page(title, seen))
        findings += seen
    for state, title in (
        (State.broken, "To mend"),
        (State.warning, "To look at"),
        (State.missing, "To have what is not here"),
    ):
        lines = [f"  {one.what}: {one.remedy}" for one in findings if one.state is state and one.remedy]
        if lines:
            say("\n".join([f"{title}:", *lines]))
    if json is not None:
        _write(Path(json), findings)
    if broken := [f"  {one.what}: {one.seen}" for one in findings if one.state is State.broken]:
        raise CheckError("Broken here:\n" + "\n".join(broken))


def _sections(config: Optional[Config]) -> Iterator[tuple[str, list[Finding]]]:
    """Title and findings of each part of the page, as they come to be known. The slow ones are under way all the time."""
    cards = system_report.gpus()
    gpu = bool(cards) or any(Path(name).exists() for name in DRIVERS)
    with ThreadPoolExecutor(max_workers=min(4, max(2, cores()))) as pool, ThreadPoolExecutor(max_workers=2) as network:
        answers = {
            name: pool.submit(probe, name, gpu, PATIENCE_GPU if gpu else PATIENCE) for name in package_checks.PROBES
        }
        servers = [network.submit(check) for check in (system_report.hub, system_report.wandb)]
        here = [
            *cards,
            *_torch(answers["torch"].result(), bool(cards)),
            *system_report.host(),
            *system_report.disks(*_folders(config)),
            *_loaders(config),
        ]
        yield "Machine", here
        yield "Network", [server.result() for server in servers]
        tried = [_tried(package, answers[package.probe].result()) for package in PACKAGES]
        yield "Packages", [_compiler(answers["torch.compile"].result()), *tried]
    if config is not None:
        yield "Recipe", [_recipe(config)]


def probe(name: str, gpu: bool, patience: float) -> dict[str, Any]:
    """What the probe of that name answered, in a process of its own that ends within `patience` seconds.

    `gpu`: there may be one; without, a package that needs one is imported and no more.
    """
    root = str(Path(package_checks.__file__).parents[2])
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), root]))
    process = subprocess.Popen(
        [sys.executable, "-P", str(package_checks.PROGRAM), name, *(["gpu"] if gpu else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
        process.communicate()
        return {"state": "broken", "seen": f"no answer within {patience:g} s"}
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines and lines[-1].startswith("{"):
        answer: dict[str, Any] = json.loads(lines[-1])
        return {**answer, "seen": redact(answer["seen"])}
    if process.returncode < 0:
        return {"state": "broken", "seen": f"its process was killed by {signal.Signals(-process.returncode).name}"}
    last = (err.strip().splitlines() or ["no message"])[-1]
    return {"state": "broken", "seen": redact(f"its process ended with {process.returncode}: {last}")}


def _torch(answer: dict[str, Any], card: bool) -> Iterator[Finding]:
    versions = [f"{name} {_version((name,)) or 'is missing'}" for name in ("transformers", "peft", "datasets")]
    yield Finding("Python", f"{sys.version.split()[0]}; {', '.join(versions)}")
    facts = answer.get("facts") or {}
    cuda = facts.get("cuda")
    built = _version(("torch",)) + (f", built for {f'CUDA {cuda}' if cuda else 'the CPU'}" if facts else "")
    if answer["state"] != "works":
        yield Finding(
            "torch",
            f"{built}: {answer['seen'] or 'not installed'}",
            State.broken,
            "pip install --force-reinstall torch",
        )
        return
    if card and facts["device"] == "cpu":
        why = facts["why_no_gpu"] or (
            "it is built for the CPU" if not cuda else "it sees no GPU (CUDA_VISIBLE_DEVICES?)"
        )
        yield Finding(
            "torch",
            f"{built}, does not use the GPU: {why}",
            State.broken,
            "pip install --force-reinstall torch  (a build for a CUDA that the driver serves: https://pytorch.org)",
        )
        return
    yield Finding("torch", f"{built}: {answer['seen']}", State.works)
    if facts["device"] == "cpu":
        yield Finding("GPU", "none: training runs on the CPU")
        return
    capability = tuple(facts["capability"])
    able = {"bfloat16": capability >= (8, 0), "TF32": capability >= (8, 0), "fp8": capability >= (8, 9)}
    yield Finding(
        "precision",
        ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in able.items())
        + f" (compute capability {'.'.join(map(str, capability))})",
    )


def _tried(package: Package, answer: dict[str, Any]) -> Finding:
    version = _version(package.distributions)
    state, seen = answer["state"], answer["seen"]
    if state == "missing":
        if version:  # PyPI's apex
            return Finding(
                package.probe,
                f"{version} is another project of that name ({package.need})",
                State.missing,
                f"pip uninstall {package.probe}; {package.install}",
            )
        return Finding(package.probe, f"not installed ({package.need})", State.missing, package.install)
    named = f"{version}: {seen}" if version else seen
    if state == "broken":
        again = package.install.replace("pip install", "pip install --force-reinstall --no-deps", 1)
        again = again.replace("'fxtune[flash]'", package.probe).replace("'fxtune[quant]'", package.probe)
        return Finding(package.probe, named, State.broken, f"{again}  (or: pip uninstall {package.distributions[0]})")
    return Finding(package.probe, named, State.works if state == "works" else State.told)


def _compiler(answer: dict[str, Any]) -> Finding:
    if answer["state"] == "works":
        return Finding("torch.compile", answer["seen"], State.works)
    return Finding(
        "torch.compile",
        answer["seen"] or "torch is not installed",
        State.warning,
        f"{COMPILERS}  (a C++ compiler and Python's headers), or leave techniques.compile.enabled=false",
    )


def _folders(config: Optional[Config]) -> tuple[Optional[str], Optional[str]]:
    return (config.run.dir, config.data.cache_dir) if config is not None else (None, None)


def _loaders(config: Optional[Config]) -> Iterator[Finding]:
    """Shared memory, which batches pass through on their way from loader processes."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    workers, ahead, tokens = 2, 4, BATCH_TOKENS
    if config is not None:
        workers = 2 if config.loader.num_workers is None else config.loader.num_workers
        ahead, tokens = config.loader.prefetch_factor, config.train.micro_batch_size * config.data.sequence_length
    needed = workers * ahead * tokens * TOKEN_BYTES
    enough = free > needed
    yield Finding(
        "shared memory",
        f"/dev/shm: {free / GIB:.2f} GiB free, {workers} loader processes need {needed / GIB:.2f} GiB",
        State.told if enough else State.warning,
        "" if enough else "loader.num_workers=0; in a container: docker run --shm-size=8g",
    )


def _recipe(config: Config) -> Finding:
    from fxtune.training.builder import RunBuilder

    try:
        setting = RunBuilder(config)
    except UserError as error:
        return Finding(config.run.name, f"cannot run here: {redact(str(error))}", State.broken)
    decided = "".join(f"\n{note}" for note in [*setting.config.techniques.ignored_options(), *setting.decided])
    verdict = f"can run on {setting.facts.device_name}, weights in {setting.facts.dtype}"
    proof = "(`fxtune verify` builds it and proves that it acts)"
    need, free = setting.techniques.memory_need(setting.facts).device, setting.facts.free_memory
    if need > free:
        return Finding(
            config.run.name,
            f"{verdict}, but may run out of memory: a step needs some {need / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} are free{decided}\n{proof}",
            State.warning,
            "a smaller train.micro_batch_size, techniques.checkpointing.enabled=true, a shorter data.sequence_length, "
            "or free memory",
        )
    return Finding(config.run.name, f"{verdict}{decided}\n{proof}", State.works)


def _page(title: str, findings: list[Finding]) -> Any:
    return table(title, ["", "", ""], [[_mark(one.state), one.what, plain(one.seen)] for one in findings])


def _mark(state: State) -> Text:
    signs = {
        State.works: ("✓", "ok", "green"),
        State.told: ("·", "-", "dim"),
        State.warning: ("!", "!", "yellow"),
        State.missing: ("○", "no", "dim"),
        State.broken: ("✗", "BROKEN", "bold red"),
    }
    sign, word, style = signs[state]
    return Text(sign if unicode() else word, style)


def _write(file: Path, findings: list[Finding]) -> None:
    try:
        file.write_text(json.dumps([asdict(one) for one in findings], indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"--json {file} cannot be written: {error}. Give a file in a folder that is there."
        ) from error


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""
