"""Checks whether a package works here. Each check compares a tiny forward and backward through it with plain torch.

    python -P fxtune/techniques/package_checks.py NAME [gpu]

`fxtune doctor` checks all packages. A run checks those that it would use (`unusable`), before it decides an `auto`: a
package may be installed in part, such as flash-attn-4 without its CUDA part. Results on a GPU are recorded, failures
too, so that a run checks a package once; `doctor` checks and records again.

A check runs in a separate process: a broken wheel can end it with a segmentation fault, a kernel that compiles for
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

from fxtune.system.machine import facts as system_facts
from fxtune.system.machine.facts import APEX, MachineFacts
from fxtune.system.machine.host import cache_home
from fxtune.system.machine.packages import CHECKS, SOME_HEADS, THESE_HEADS, Heads, NotTriedError
from fxtune.system.process import process_group
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.redact import redact

PROGRAM = Path(__file__)
TIMEOUT_GPU = 180.0
"""Seconds for a check with a GPU: FlashAttention-4 compiles its kernels on first use."""
SHARED = ("flash_attn", "apex")
"""Folders of modules that several distributions share: flash-attn and flash-attn-4, NVIDIA's apex and PyPI's."""
OCCUPIED = re.compile("out of memory|busy or unavailable", re.IGNORECASE)
"""Errors that say nothing about the package: another process uses the GPU."""
PASSING = re.compile(f"{OCCUPIED.pattern}|no answer within|SIGKILL|SIGTERM", re.IGNORECASE)
"""Results that may change within a minute."""
RESULTS = "package_checks.json"
"""The file of recorded results in fxtune's cache."""
METADATA = ".dist-info"
"""The suffix of the folder that an installer writes beside a package, NAME-VERSION.dist-info."""


def main(name: str, gpu: bool, waits: bool = False) -> dict[str, Any]:
    """The result of one check. `gpu`: this machine may have one. `waits`: after the import the check waits for its
    heads as JSON on standard input; if that ends without them, so does the process."""
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
        torch.manual_seed(0)
        ran = pkgutil.resolve_name(check.smoke_test)(device, *([heads] if check.takes_heads else []))
        return {"state": "works", "seen": f"{ran}, forward and backward", **facts}
    except NotTriedError as why:
        return {"state": "imports", "seen": str(why), **facts}
    except Exception as error:  # noqa: BLE001
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"]
        return {"state": "broken", "seen": f"{type(error).__name__}: {lines[0]}", **facts}


def run_check(name: str, gpu: bool, timeout: float) -> dict[str, Any]:
    """The result of main() in a separate process. Without `gpu`, a package that needs one is only imported."""
    return _answer(_start(name, *(["gpu"] if gpu else [])), Heads(), timeout)


@contextlib.contextmanager
def import_ahead(facts: MachineFacts, techniques: Iterable[str]) -> Iterator[dict[str, process_group.Captured]]:
    """A process for each large package that one of these techniques may use and that has no recorded result. It
    imports the package and waits: unusable() takes it for its check, or it ends with the body."""
    names = [name for name, package in CHECKS.items() if name in facts.packages and package.technique in techniques]
    recorded = _recorded(names, facts.device_name) if facts.device == "cuda" and names else names
    waiting = {name: _start(name, "gpu", "waits") for name in names if name not in recorded}
    try:
        yield waiting
    finally:
        for process in waiting.values():
            process.end()


def _start(name: str, *options: str) -> process_group.Captured:
    return process_group.Captured([sys.executable, "-P", str(PROGRAM), name, *options])


def _answer(check: process_group.Captured, heads: Heads, timeout: float) -> dict[str, Any]:
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
    ahead: dict[str, process_group.Captured] | None = None,
) -> dict[str, str]:
    """The reason for each of `packages` that is installed and does not work on this device. From then on all facts of
    this process count these packages as missing.

    `heads`: the heads of the run's model. `ahead`: the processes of import_ahead(); a check removes its process.
    """
    names = {name: "apex" if name == APEX else name for name in packages if name in facts.packages}
    checks = list(names.values())
    if facts.device == "cuda":
        answers = _check_on_gpu(checks, facts, heads, {} if ahead is None else ahead)
    else:
        answers = {name: _check_here(name) for name in checks}
    broken = {name: answers[check]["seen"] for name, check in names.items() if answers[check]["state"] == "broken"}
    broken = {name: seen for name, seen in broken.items() if not OCCUPIED.search(seen)}
    system_facts.BROKEN.update(broken)
    # Other libraries import what is installed, as peft does with bitsandbytes: hide the package from them.
    for name in broken:
        module = CHECKS[names[name]].module
        top = module.partition(".")[0]
        sys.modules[module if top in SHARED else top] = None  # type: ignore[assignment]
    return broken


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
    names: list[str], facts: MachineFacts, heads: Heads, ahead: dict[str, process_group.Captured]
) -> dict[str, dict[str, Any]]:
    """The results of checks, each in a separate process: a fault of a kernel would end all work on the GPU. A
    recorded result is taken instead of a check.
    """
    answers = _recorded(names, facts.device_name, heads)
    if missing := [name for name in names if name not in answers]:
        with (
            phase(f"Checking once that {', '.join(missing)} works on this GPU", part="package checks"),
            ThreadPoolExecutor(len(missing)) as pool,
        ):
            checks = [ahead.pop(name) if name in ahead else _start(name, "gpu", "waits") for name in missing]
            results = list(pool.map(lambda check: _answer(check, heads, TIMEOUT_GPU), checks))
        answers |= record(dict(zip(missing, results, strict=True)), facts.device_name, heads)
    return answers


def record(
    answers: dict[str, dict[str, Any]], device_name: str, heads: Heads = SOME_HEADS
) -> dict[str, dict[str, Any]]:
    """Record results on this machine's GPU for later runs, and return them. A result that says nothing about the
    package is not recorded: another process had the GPU, or the machine was too busy to answer.

    `heads`: the heads that were tried. A package that works with other heads alone is recorded for these heads only; a
    package that works with none, for all heads, so that `fxtune doctor` can replace the result.
    """
    from fxtune.system.files.atomic_files import add_cached  # which imports torch

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
    """The recorded results that still hold for these heads. A package that did not work is checked again as soon as
    any package was installed, repaired or removed, even if no version has changed.
    """
    from fxtune.system.files.atomic_files import read_cached

    cached = read_cached(cache_home() / RESULTS)
    found = {name: cached[key] for name, key in _keys(names, device_name, heads).items() if key in cached}
    of_any = {name: cached[key] for name, key in _keys(names, device_name).items() if key in cached}
    recorded = found | {name: answer for name, answer in of_any.items() if answer["state"] == "broken"}
    if all(answer["state"] == "works" for answer in recorded.values()):
        return recorded
    changed = _last_installed()
    return {name: answer for name, answer in recorded.items() if answer["state"] == "works" or answer["at"] >= changed}


def _keys(names: Iterable[str], device_name: str, heads: Heads = SOME_HEADS) -> dict[str, str]:
    """The name in the file of results for each check: it changes with the GPU, its driver, Python, and the version of
    any installed package, because a package may fail through another one. The name of a check that takes heads changes
    with the heads, too: a decision of a run must not depend on the models of earlier runs.
    """
    driver = Path("/proc/driver/nvidia/version")
    installed = sorted(entry.name for folder in _site_folders() for entry in folder if entry.name.endswith(METADATA))
    machine = [device_name, driver.read_text() if driver.exists() else "", sys.version, installed]
    environment = blake2b(repr(machine).encode(), digest_size=8).hexdigest()
    tried = "" if heads == SOME_HEADS else f" {heads.queries}/{heads.keys}/{heads.width}"
    return {name: f"{name}{tried * CHECKS[name].takes_heads} {environment}" for name in names}


def _last_installed() -> float:
    """When a file or folder at the top of a folder with installed packages was last changed, in seconds since 1970."""
    return max((entry.stat().st_ctime for folder in _site_folders() for entry in folder), default=0.0)


def _site_folders() -> Iterator[list[os.DirEntry[str]]]:
    """The content of each folder of sys.path that holds installed packages: no checkout, no working directory."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            content = list(entries)
            if any(entry.name.endswith(METADATA) for entry in content):
                yield content


def _installed(module: str) -> bool:
    """Whether the package is installed. A package without some of its modules counts as installed, but broken; a mere
    folder of its name on PYTHONPATH does not."""
    top, *inner = module.split(".")
    if (spec := importlib.util.find_spec(top)) is None:
        return False
    if top in SHARED:
        places = [Path(place, inner[0]) for place in spec.submodule_search_locations or ()]
        return any(path.exists() or path.with_suffix(".py").exists() for path in places)
    return spec.origin is not None or top in metadata.packages_distributions()


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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n" + json.dumps(main(sys.argv[1], "gpu" in sys.argv[2:], "waits" in sys.argv[2:])), flush=True)
    os._exit(0)  # skip the exit hooks of the package that was checked
