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
import resource
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from rich.text import Text

from fxtune import probes, wandb_link
from fxtune.console import plain, say, table, unicode
from fxtune.errors import CheckError, StorageError, UserError
from fxtune.redact import redact

if TYPE_CHECKING:
    from fxtune.config import Config

GIB = 2 ** 30
PATIENCE = 30.0
"""Seconds that a probe has on a machine without a GPU."""
PATIENCE_GPU = 180.0
"""With one: FlashAttention-4 compiles its kernels on first use."""
ANSWER = 3.0
"""Seconds that a server has to answer."""
LITTLE_DISK = 5 * GIB
FEW_FILES = 1024
BATCH_TOKENS = 2 ** 18
"""Without a recipe: tokens of the micro-batches that loader processes are to hold."""
DRIVERS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Where a GPU shows, also when nvidia-smi is not installed."""
TOKEN_BYTES = 3 * 8
"""Of a batch: ids, targets, positions."""


class State(str, Enum):
    works = "works"
    told = "told"
    """Nothing to judge."""
    warning = "warning"
    missing = "missing"
    broken = "broken"


@dataclass(frozen=True)
class Finding:
    what: str
    seen: str
    state: State = State.told
    remedy: str = ""
    """The command, or what to do."""


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
    Package("flash-attn-3", ("flash-attn-3", "flash_attn_3"), "pip install git+https://github.com/Dao-AILab/flash-attention"
            "#subdirectory=hopper --no-build-isolation", "built from source; flash-attn-4 takes its place"),
    Package("flash-attn", ("flash-attn",), "pip install flash-attn --no-build-isolation",
            "built from source, an hour; torch has it built in"),
    Package("kernels", ("kernels",), "pip install kernels", "attention kernels of the Hugging Face hub"),
    Package("bitsandbytes", ("bitsandbytes",), QUANT, "a base in 4 or 8 bits, 8-bit AdamW"),
    Package("torchao", ("torchao",), QUANT, "the alternative to bitsandbytes"),
    Package("apex", ("apex",), "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
            "NVIDIA's fused optimizers, built from source"),
)
COMPILERS = "apt install g++ python3-dev"


def run(config: Optional[Config] = None, json: Optional[str] = None) -> None:
    """Print the page. `config`: a recipe to be judged as well; `json`: a file for all findings.

    Raises CheckError where something is broken.
    """
    findings: list[Finding] = []
    for title, seen in _sections(config):
        say(_page(title, seen))
        findings += seen
    for state, title in ((State.broken, "To mend"), (State.warning, "To look at"), (State.missing, "To have what is not here")):
        lines = [f"  {one.what}: {one.remedy}" for one in findings if one.state is state and one.remedy]
        if lines:
            say("\n".join([f"{title}:", *lines]))
    if json is not None:
        _write(Path(json), findings)
    if broken := [f"  {one.what}: {one.seen}" for one in findings if one.state is State.broken]:
        raise CheckError("Broken here:\n" + "\n".join(broken))


def _sections(config: Optional[Config]) -> Iterator[tuple[str, list[Finding]]]:
    """Title and findings of each part of the page, as they come to be known. The slow ones are under way all the time."""
    cards = gpus()
    gpu = bool(cards) or any(Path(name).exists() for name in DRIVERS)
    with ThreadPoolExecutor(max_workers=min(4, max(2, _cores()))) as pool, ThreadPoolExecutor(max_workers=2) as network:
        answers = {name: pool.submit(probe, name, gpu, PATIENCE_GPU if gpu else PATIENCE) for name in probes.PROBES}
        servers = [network.submit(check) for check in (hub, wandb)]
        machine = [*cards, *_torch(answers["torch"].result(), bool(cards)), *host(), *disks(config), *_loaders(config)]
        yield "Machine", machine
        yield "Network", [server.result() for server in servers]
        tried = [_tried(package, answers[package.probe].result()) for package in PACKAGES]
        yield "Packages", [_compiler(answers["torch.compile"].result()), *tried]
    if config is not None:
        yield "Recipe", [_recipe(config)]


def probe(name: str, gpu: bool, patience: float) -> dict[str, Any]:
    """What the probe of that name answered, in a process of its own that ends within `patience` seconds.

    `gpu`: there may be one; without, a package that needs one is imported and no more.
    """
    root = str(Path(probes.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), root]))
    process = subprocess.Popen(
        [sys.executable, "-P", str(probes.PROGRAM), name, *(["gpu"] if gpu else [])], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths})
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


def gpus() -> list[Finding]:
    """What the driver says, without torch. Empty where there is no driver."""
    asked = "index,name,memory.total,memory.free,driver_version,compute_cap"
    rows = _smi(f"--query-gpu={asked}")
    found = []
    for index, name, total, free, driver, capability in (row for row in rows if len(row) == 6):
        found.append(Finding(f"GPU {index}", f"{name}, compute capability {capability}, {_mib(free)} of {_mib(total)} GiB free; "
                                             f"driver {driver}", State.works))
    others = [f"{pid} {name} ({_mib(used)} GiB)" for pid, name, used in (row for row in _smi(
        "--query-compute-apps=pid,process_name,used_memory") if len(row) == 3)]
    if others:
        found.append(Finding("other processes", f"on the GPU: {', '.join(others)}", State.warning,
                             "their memory is not yours; wait for them, or pick another GPU with CUDA_VISIBLE_DEVICES"))
    return found


def host() -> Iterator[Finding]:
    """Cores, memory, open files."""
    total, available = _memory()
    yield Finding("CPU", f"{_cores()} cores for this process, {available / GIB:.0f} of {total / GIB:.0f} GiB memory available")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < FEW_FILES
    yield Finding("open files", f"{soft:,} at most (ulimit -n)", State.warning if few else State.told,
                  f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if few else "")


def disks(config: Optional[Config]) -> Iterator[Finding]:
    """Free space where runs, tokenised data and models are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    runs = Path((config.run.dir if config else None) or "runs")
    data = Path((config.data.cache_dir if config else None) or cache / "fxtune")
    models = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for what, folder in (("runs", runs), ("token cache", data), ("hub cache", models)):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(what, f"{folder}: {there} cannot be written", State.broken, f"use another folder, or mend {there}")
        else:
            little = free < LITTLE_DISK
            yield Finding(what, f"{folder}: {free / GIB:,.0f} GiB free", State.warning if little else State.told,
                          "free some space: a checkpoint is written beside the one before it" if little else "")


def hub() -> Finding:
    """Whether the Hugging Face hub answers, and whether there is a token."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()
    stored = Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    token = next((f"a token in {name}" for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)),
                 f"a token in {stored}" if stored.is_file() else "no token (gated models need `hf auth login`)")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding("Hugging Face hub", f"offline (HF_HUB_OFFLINE): models and data come from the cache or a folder; {token}")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return _server("Hugging Face hub", address, token, "check the network and HTTPS_PROXY, or give folders as model.path")


def wandb() -> Finding:
    """Whether Weights & Biases answers, and whether there is a key."""
    key = "logged in" if wandb_link.api_key_at_hand() else "no API key (`wandb login`): runs are kept offline"
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("offline", "disabled", "dryrun"):
        return Finding("W&B", f"{mode} (WANDB_MODE); {key}")
    return _server("W&B", wandb_link.server(), key, "runs go on offline; upload them later with `wandb sync`")


def _server(what: str, address: str, aside: str, remedy: str) -> Finding:
    shown = redact(address)
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ANSWER):
            pass
    except urllib.error.HTTPError:
        pass  # it answers, that is enough
    except (OSError, ValueError) as error:
        reason = redact(str(getattr(error, "reason", error)))
        return Finding(what, f"{shown} cannot be reached ({reason}); {aside}", State.warning, remedy)
    return Finding(what, f"{shown} answers; {aside}", State.works)


def _torch(answer: dict[str, Any], card: bool) -> Iterator[Finding]:
    versions = [f"{name} {_version((name,)) or 'is missing'}" for name in ("transformers", "peft", "datasets")]
    yield Finding("Python", f"{sys.version.split()[0]}; {', '.join(versions)}")
    facts = answer.get("facts") or {}
    cuda = facts.get("cuda")
    built = _version(("torch",)) + (f", built for {f'CUDA {cuda}' if cuda else 'the CPU'}" if facts else "")
    if answer["state"] != "works":
        yield Finding("torch", f"{built}: {answer['seen'] or 'not installed'}", State.broken,
                      "pip install --force-reinstall torch")
        return
    if card and facts["device"] == "cpu":
        why = facts["why_no_gpu"] or ("it is built for the CPU" if not cuda else "it sees no GPU (CUDA_VISIBLE_DEVICES?)")
        yield Finding("torch", f"{built}, does not use the GPU: {why}", State.broken,
                      "pip install --force-reinstall torch  (a build for a CUDA that the driver serves: https://pytorch.org)")
        return
    yield Finding("torch", f"{built}: {answer['seen']}", State.works)
    if facts["device"] == "cpu":
        yield Finding("GPU", "none: training runs on the CPU")
        return
    capability = tuple(facts["capability"])
    able = {"bfloat16": capability >= (8, 0), "TF32": capability >= (8, 0), "fp8": capability >= (8, 9)}
    yield Finding("precision", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in able.items())
                  + f" (compute capability {'.'.join(map(str, capability))})")


def _tried(package: Package, answer: dict[str, Any]) -> Finding:
    version = _version(package.distributions)
    state, seen = answer["state"], answer["seen"]
    if state == "missing":
        if version:  # PyPI's apex
            return Finding(package.probe, f"{version} is another project of that name ({package.need})", State.missing,
                           f"pip uninstall {package.probe}; {package.install}")
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
    return Finding("torch.compile", answer["seen"] or "torch is not installed", State.warning,
                   f"{COMPILERS}  (a C++ compiler and Python's headers), or leave techniques.compile.enabled=false")


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
    yield Finding("shared memory", f"/dev/shm: {free / GIB:.2f} GiB free, {workers} loader processes need {needed / GIB:.2f} GiB",
                  State.told if enough else State.warning,
                  "" if enough else "loader.num_workers=0; in a container: docker run --shm-size=8g")


def _recipe(config: Config) -> Finding:
    from fxtune.setting import Setting

    try:
        setting = Setting(config)
    except UserError as error:
        return Finding(config.run.name, f"cannot run here: {redact(str(error))}", State.broken)
    decided = "".join(f"\n{note}" for note in setting.decided)
    return Finding(config.run.name, f"can run on {setting.facts.device_name}, weights in {setting.facts.dtype}{decided}\n"
                                    "(`fxtune verify` builds it and proves that it acts)", State.works)


def _page(title: str, findings: list[Finding]) -> Any:
    return table(title, ["", "", ""], [[_mark(one.state), one.what, plain(one.seen)] for one in findings])


def _mark(state: State) -> Text:
    signs = {State.works: ("✓", "ok", "green"), State.told: ("·", "-", "dim"), State.warning: ("!", "!", "yellow"),
             State.missing: ("○", "no", "dim"), State.broken: ("✗", "BROKEN", "bold red")}
    sign, word, style = signs[state]
    return Text(sign if unicode() else word, style)


def _write(file: Path, findings: list[Finding]) -> None:
    try:
        file.write_text(json.dumps([asdict(one) for one in findings], indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"--json {file} cannot be written: {error}. Give a file in a folder that is there.") from error


def _smi(*arguments: str) -> list[list[str]]:
    """What nvidia-smi prints, as cells. Empty where it is not there or does not answer."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        done = subprocess.run(["nvidia-smi", *arguments, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=2 * ANSWER, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _mib(text: str) -> str:
    return f"{float(text) / 1024:.1f}" if text.replace(".", "").isdigit() else "?"


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and available to this process; a container's limit counts."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"])
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max": no limit, and no number
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, limit - used)
    return total, available


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""
