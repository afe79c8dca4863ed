"""Checks whether packages work here. Each check compares a tiny forward and backward pass through a package with plain
torch.

    python -P fxtune/techniques/package_checks.py NAME [gpu] [waits] [PART]

`fxtune doctor` checks all packages. A run checks the packages that it would use (`unusable`) before it decides any
`auto`, because a package may be installed in part, such as flash-attn-4 without its CUDA part. Results on a GPU are
recorded, including failures, so later runs do not check again. `doctor` always checks again and records the result.

A check runs in a separate process: a broken wheel can cause a segmentation fault, and a kernel that compiles for the
first time can hang. The last line of output is one JSON object. It has `state` (works; imports: its kernels need a
GPU; missing; broken), `seen`, and for torch the `facts` of this machine.

The first run on a machine waits for its checks. To shorten this time, large packages are imported while the run
imports transformers (`import_ahead`). The kernels of FlashAttention-4 for the heads of the run's model, and quack's
kernels, compile in several processes beside each other and are kept on disk, so the run need not compile them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import logging
import os
import pkgutil
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from fxtune.distributed.ranks import process_rank
from fxtune.system.machine import facts as system_facts
from fxtune.system.machine.facts import APEX, MachineFacts
from fxtune.system.machine.host import cache_home
from fxtune.system.machine.packages import CHECKS, SOME_HEADS, THESE_HEADS, Heads, NotTriedError
from fxtune.system.process import process_group
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.redact import redact

PROGRAM = Path(__file__)
TIMEOUT_GPU = 600.0
"""Seconds that a check on a GPU may take. FlashAttention-4 compiles its kernels on first use, and fla-core tunes some
for minutes."""
TIMEOUT_PARTS = 90.0
"""Seconds that all groups of kernels together may take, which compile ahead of a check."""
SHARED = ("flash_attn", "apex")
"""Module folders that two distributions share: flash-attn and flash-attn-4, or NVIDIA's apex and PyPI's apex."""
OCCUPIED = re.compile("out of memory|busy or unavailable", re.IGNORECASE)
"""Errors that say nothing about the package, because another process uses the GPU."""
PASSING = re.compile(f"{OCCUPIED.pattern}|no answer within|SIGKILL|SIGTERM", re.IGNORECASE)
"""Errors after which another check may succeed within a minute."""
RESULTS = "package_checks.json"
"""The file of recorded results in fxtune's cache."""
UNUSED = "unused"
"""The state of a package that an earlier run on this machine has imported ahead and not checked."""
METADATA = ".dist-info"
"""The suffix of the folder that an installer writes beside a package, NAME-VERSION.dist-info."""
Check = list[process_group.Captured]
"""The process of a check, and the processes that compile kernels for it."""


def main(name: str, gpu: bool, waits: bool = False, part: int | None = None) -> dict[str, Any]:
    """Run one check and return its result. `gpu`: whether this machine may have a GPU. `waits`: after the import, read
    the heads to try as JSON from standard input. If standard input ends without them, the process ends, too. `part`:
    compile this group of kernels in place of the smoke test; see Package.ahead."""
    check, facts, heads = CHECKS[name], dict[str, Any](), SOME_HEADS
    # The broad except is intended: any error of a package, on import or when it runs, becomes one line for the user.
    try:
        if not _installed(check.module):
            return {"state": "missing", "seen": ""}
        if check.before_import and gpu:
            pkgutil.resolve_name(check.before_import)()
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
        if part is not None:
            pkgutil.resolve_name(check.ahead)(device, heads, part)
            return {"state": "works", "seen": "compiled"}
        torch.manual_seed(0)
        ran = pkgutil.resolve_name(check.smoke_test)(device, *([heads] if check.takes_heads else []))
        return {"state": "works", "seen": f"{ran}, forward and backward", **facts}
    except NotTriedError as why:
        return {"state": "imports", "seen": str(why), **facts}
    except Exception as error:  # noqa: BLE001
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"]
        return {"state": "broken", "seen": f"{type(error).__name__}: {lines[0]}", **facts}


def run_check(name: str, gpu: bool, timeout: float) -> dict[str, Any]:
    """Run main() in a separate process and return its result. Without `gpu`, a package that needs a GPU is only
    imported."""
    return _answer([_start(name, *(["gpu"] if gpu else []))], Heads(), timeout)


@contextlib.contextmanager
def import_ahead(facts: MachineFacts, techniques: Iterable[str]) -> Iterator[dict[str, Check]]:
    """A context manager that starts the processes of each large package that `techniques` may use and that has no
    recorded result. Each process imports its package and waits until unusable() runs the check in it; a check that
    does not depend on the model begins at once. A process that is not used ends with the context, and on this machine
    it does not start ahead again."""
    from fxtune.system.files.atomic_files import add_cached, json_or_empty

    names = [name for name, package in CHECKS.items() if name in facts.packages and package.technique in techniques]
    recorded = {*_recorded(names, facts.device_name)} if facts.device == "cuda" and names else {*names}
    file, keys = cache_home() / RESULTS, _keys((name for name in names if name not in recorded), facts.device_name)
    known = json_or_empty(file) if keys else {}
    waiting = {name: _start_all(name) for name, key in keys.items() if f"{UNUSED} {key}" not in known}
    try:
        yield waiting
        if waiting:  # a recipe that is refused says nothing about its packages
            add_cached(file, {f"{UNUSED} {keys[name]}": {"state": UNUSED, "seen": "", "at": 0.0} for name in waiting})
    finally:
        for process in itertools.chain(*waiting.values()):
            process.end()


def _start_all(name: str) -> Check:
    """The process of the check `name`, and behind it, on a machine's first rank, the processes that compile its groups
    of kernels."""
    waits, parts = ["waits"] * CHECKS[name].takes_heads, 0 if process_rank().local_rank else CHECKS[name].parts
    return [_start(name, "gpu", *waits), *(_start(name, "gpu", "waits", str(part)) for part in range(parts))]


def _start(name: str, *options: str) -> process_group.Captured:
    return process_group.Captured([sys.executable, "-P", str(PROGRAM), name, *options])


def _answer(processes: Check, heads: Heads, timeout: float) -> dict[str, Any]:
    """The result of a check within `timeout` seconds. A check that waits begins when all groups of its kernels have
    compiled, at the latest after TIMEOUT_PARTS. It compiles the kernels of a group that failed or hangs itself."""
    (check, *parts), until = processes, time.monotonic() + TIMEOUT_PARTS
    for part in parts:
        part.tell(json.dumps(asdict(heads)) + "\n")
    for part in parts:
        part.result(max(until - time.monotonic(), 0.0))
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
    facts: MachineFacts,
    packages: Iterable[str],
    heads: Heads = SOME_HEADS,
    ahead: dict[str, Check] | None = None,
    compiles: bool = False,
) -> dict[str, str]:
    """Check `packages`, and return the reason for each one that is installed but does not work on this device. Facts
    that this process collects later count these packages as missing.

    `heads`: the heads of the run's model. `ahead`: the processes of import_ahead(); a check takes its processes
    out. `compiles`: whether the run will import the compiler, which it then does while checks run.
    """
    names = {name: "apex" if name == APEX else name for name in packages if name in facts.packages}
    checks = list(names.values())
    if facts.device == "cuda":
        answers = _check_on_gpu(checks, facts, heads, {} if ahead is None else ahead, compiles)
    else:
        answers = {name: _check_here(name) for name in checks}
    broken = {name: answers[check]["seen"] for name, check in names.items() if answers[check]["state"] == "broken"}
    broken = {name: seen for name, seen in broken.items() if not OCCUPIED.search(seen)}
    system_facts.BROKEN.update(broken)
    # Libraries import other packages that are installed, as peft imports bitsandbytes. Hide broken packages from them.
    for name in broken:
        module = CHECKS[names[name]].module
        top = module.partition(".")[0]
        sys.modules[module if top in SHARED else top] = None  # type: ignore[assignment]
    return broken


@functools.cache
def _check_here(name: str) -> dict[str, Any]:
    """Run a check on a CPU and return its result. It runs in this process, which will import the package anyway."""

    import torch

    for logger in (CHECKS[name].module.partition(".")[0], "torch.utils._pytree"):  # torchao registers enums there
        logging.getLogger(logger).setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return main(name, gpu=False)


def _check_on_gpu(
    names: list[str], facts: MachineFacts, heads: Heads, ahead: dict[str, Check], compiles: bool
) -> dict[str, dict[str, Any]]:
    """The results of checks, recorded ones if there are any. Other checks run in separate processes, because a faulty
    kernel ends all work of its process on the GPU.
    """
    answers = _recorded(names, facts.device_name, heads)
    if missing := [name for name in names if name not in answers]:
        with (
            phase(f"Checking once that {', '.join(missing)} works on this GPU", part="package checks"),
            ThreadPoolExecutor(len(missing)) as pool,
        ):
            checks = [ahead.pop(name) if name in ahead else _start_all(name) for name in missing]
            answered = pool.map(lambda check: _answer(check, heads, TIMEOUT_GPU), checks)
            if compiles:
                from fxtune.upstream.torch import import_compiler  # imported here because it imports torch

                import_compiler()
            results = list(answered)
        answers |= record(dict(zip(missing, results, strict=True)), facts.device_name, heads)
    return answers


def record(
    answers: dict[str, dict[str, Any]], device_name: str, heads: Heads = SOME_HEADS
) -> dict[str, dict[str, Any]]:
    """Record results on this machine's GPU for later runs, and return them. A result is not recorded if it says
    nothing about the package: another process had the GPU, or the machine was too busy to answer.

    `heads`: the heads that were tried. A package that works is recorded for these heads and without heads. A failure
    with these heads alone (THESE_HEADS) is recorded for these heads. Any other failure is recorded without heads:
    `fxtune doctor` tries no model's heads and can replace this record.
    """
    from fxtune.system.files.atomic_files import add_cached  # imported here because it imports torch

    lasting = {name: answer for name, answer in answers.items() if not PASSING.search(answer["seen"])}
    now = time.time()
    stamped = {name: {"state": answer["state"], "seen": answer["seen"], "at": now} for name, answer in lasting.items()}
    of_heads, of_any = _keys(stamped, device_name, heads), _keys(stamped, device_name)
    entries = {of_any[name]: answer for name, answer in stamped.items() if THESE_HEADS not in answer["seen"]}
    for name, answer in stamped.items():
        if answer["state"] == "works" or THESE_HEADS in answer["seen"]:
            entries[of_heads[name]] = answer
    add_cached(cache_home() / RESULTS, entries)
    return answers


def _recorded(names: list[str], device_name: str, heads: Heads = SOME_HEADS) -> dict[str, dict[str, Any]]:
    """The recorded results that are still valid for `heads`. The record of a package that did not work is valid until
    any package is installed, repaired or removed, even if no version changes.
    """
    from fxtune.system.files.atomic_files import json_or_empty

    cached = json_or_empty(cache_home() / RESULTS)
    found = {name: cached[key] for name, key in _keys(names, device_name, heads).items() if key in cached}
    of_any = {name: cached[key] for name, key in _keys(names, device_name).items() if key in cached}
    recorded = found | {name: answer for name, answer in of_any.items() if answer["state"] == "broken"}
    if all(answer["state"] == "works" for answer in recorded.values()):
        return recorded
    # The last change at the top of a folder with installed packages.
    changed = max((entry.stat().st_ctime for folder in _site_folders() for entry in folder), default=0.0)
    return {name: answer for name, answer in recorded.items() if answer["state"] == "works" or answer["at"] >= changed}


def _keys(names: Iterable[str], device_name: str, heads: Heads = SOME_HEADS) -> dict[str, str]:
    """The key of each check in the file of results. Keys change with the GPU, its driver, Python, and the version of
    any installed package, because a fault of one package can break another. The key of a check that takes heads also
    changes with the heads: the decisions of a run must not depend on the models of earlier runs.
    """
    environment = environment_digest(device_name)
    sizes = f" {heads.queries}/{heads.keys}/{heads.width} {' '.join(heads.recurrences)}"
    tried = "" if heads == SOME_HEADS else sizes.rstrip()
    return {name: f"{name}{tried * CHECKS[name].takes_heads} {environment}" for name in names}


def environment_digest(device_name: str) -> str:
    """16 hexadecimal digits that change with the GPU, its driver, Python, and the version of any installed package."""
    driver = Path("/proc/driver/nvidia/version")
    installed = sorted(entry.name for folder in _site_folders() for entry in folder if entry.name.endswith(METADATA))
    machine = [device_name, driver.read_text() if driver.exists() else "", sys.version, installed]
    return blake2b(repr(machine).encode(), digest_size=8).hexdigest()


def _site_folders() -> Iterator[list[os.DirEntry[str]]]:
    """Yield the content of each folder of sys.path that holds installed packages. Checkouts and the working directory
    hold none."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            content = list(entries)
            if any(entry.name.endswith(METADATA) for entry in content):
                yield content


def _installed(module: str) -> bool:
    """Whether the package of `module` is installed. A package that lacks some of its modules counts as installed: its
    check then finds it broken. A mere folder of that name on PYTHONPATH does not count."""
    top, *inner = module.split(".")
    if (spec := importlib.util.find_spec(top)) is None:
        return False
    if top in SHARED:
        places = [Path(place, inner[0]) for place in spec.submodule_search_locations or ()]
        return any(path.exists() or path.with_suffix(".py").exists() for path in places)
    return spec.origin is not None or top in metadata.packages_distributions()


def _facts() -> dict[str, Any]:
    """The MachineFacts of this machine, its number of GPUs, torch's CUDA version, and why torch does not use a GPU."""
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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    number = next((int(word) for word in sys.argv[2:] if word.isdecimal()), None)
    print("\n" + json.dumps(main(sys.argv[1], "gpu" in sys.argv[2:], "waits" in sys.argv[2:], number)), flush=True)
    os._exit(0)  # skip the exit hooks of the package that was checked
