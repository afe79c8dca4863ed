"""`fxtune doctor`: shows what this machine has, whether it works, and the commands that install what is missing.

    fxtune doctor                             # the machine
    fxtune doctor +recipe=llama_yarn_64k      # and whether that recipe can run on it
    fxtune doctor quickstart                  # how this environment differs from the environment of a run
    fxtune doctor +recipe=qwen_grpo sampler.url=http://host:8000    # and whether vLLM can sample for it

Each package is checked in a separate process, so a package that crashes or hangs spoils only its own line. With
several GPUs an all-reduce of a few seconds measures the links between them; with a recipe, only the recipe's GPUs take
part. Training on a GPU reuses the results of the package checks until a package, the driver or the GPU changes. The
page says whether a secret is set, and never prints the secret. Exit code 1 means that an installed package or the
links do not work, or that the recipe cannot run here.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from rich.text import Text

from fxtune.cli.answer import ANSWER
from fxtune.diagnostics import links, system_report
from fxtune.diagnostics.system_report import Finding, State
from fxtune.errors import CheckError, UserError
from fxtune.system.files import environment
from fxtune.system.machine.host import cores
from fxtune.system.machine.packages import CHECKS, PACKAGES, Package, installed_version
from fxtune.system.machine.tested_versions import WITHIN, outside_tested_range, refusals
from fxtune.system.terminal.console import plain, say, table, unicode
from fxtune.system.terminal.redact import redact
from fxtune.system.terminal.units import GIB
from fxtune.techniques import package_checks
from fxtune.techniques.package_checks import TIMEOUT_GPU, run_check

if TYPE_CHECKING:  # Config imports torch, and doctor must also run with a broken torch
    from fxtune.config.root import Config

TIMEOUT = 45.0
"""Seconds for a package check on a machine without a GPU."""
BATCH_TOKENS = 2**18
"""Assumed tokens of a micro-batch in shared memory, without a recipe."""
TOKEN_BYTES = 3 * 8
"""Bytes of a token in a batch: ids, targets, positions."""
DRIVERS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device files. One of them shows that there is a GPU, even if nvidia-smi is not installed."""


INSTALL_COMPILER = "apt install g++ python3-dev"
SIGNS = {
    State.works: ("✓", "ok", "green"),
    State.info: ("·", "-", "dim"),
    State.warning: ("!", "!", "yellow"),
    State.missing: ("○", "no", "dim"),
    State.broken: ("✗", "BROKEN", "bold red"),
}
REMEDIES = {State.broken: "To repair", State.warning: "To look at", State.missing: "To install what is missing"}


def run(config: Optional[Config] = None) -> None:
    """Print the page; with a recipe, it also says whether the recipe can run. Raises CheckError if something is
    broken."""
    findings: list[Finding] = []
    for title, section in _sections(config):
        # The name of a package or a folder may hold a secret.
        shown = [replace(finding, what=redact(finding.what), seen=redact(finding.seen)) for finding in section]
        say(_page(title, shown))
        findings += shown
    for state, title in REMEDIES.items():
        if lines := [f"  {item.what}: {item.remedy}" for item in findings if item.state is state and item.remedy]:
            say("\n".join([f"{title}:", *lines]))
    ANSWER.put([asdict(finding) for finding in findings])
    if broken := [f"  {finding.what}: {finding.seen}" for finding in findings if finding.state is State.broken]:
        raise CheckError("Broken here:\n" + "\n".join(broken))


def of_run(run: str) -> None:
    """Print how this environment differs from the run's. Raises ConfigError if `run` means no run."""
    folder = Path(run)
    if not (folder / environment.FILE).exists():
        from fxtune.outputs.run_output import run_folder  # imports torch

        folder = run_folder(run)
    facts = run_check("torch", any(Path(name).exists() for name in DRIVERS), TIMEOUT_GPU).get("facts") or {}
    here = environment.machine(facts.get("cuda"), facts.get("device_name", "unknown"))
    findings = []
    for name, had, version in environment.differences(folder, here):
        seen = f"{had or 'not installed'} in the run, {version or 'not installed'} here"
        findings.append(Finding(name, redact(seen), State.missing if version is None else State.warning))
    ANSWER.put([asdict(finding) for finding in findings])
    if not findings:
        count = len(environment.installed())
        say(f"This environment equals the environment of {folder}: {count} packages, {here['device']}.")
        return
    say(_page(f"Different from {folder}", findings))
    say(f"To bring the run's packages: pip install -r {shlex.quote(str(folder / environment.FILE))}")


def _sections(config: Optional[Config]) -> Iterator[tuple[str, list[Finding]]]:
    cards = system_report.gpus()
    gpu = bool(cards) or any(Path(name).exists() for name in DRIVERS)
    timeout = TIMEOUT_GPU if gpu else TIMEOUT
    folders = (config.run.dir, config.data.cache_dir) if config is not None else ()
    with ThreadPoolExecutor(min(4, max(2, cores()))) as pool, ThreadPoolExecutor(2) as network:
        checks = {name: pool.submit(run_check, name, gpu, timeout) for name in CHECKS}
        servers = [network.submit(server) for server in (system_report.hub, system_report.wandb)]
        torch = _torch(checks["torch"].result(), bool(cards))
        machine = [*cards, *torch, *system_report.host(), *system_report.disks(*folders), *_shared_memory(config)]
        yield "Machine", machine
        yield "Network", [server.result() for server in servers]
        packages = [_package(package, checks[package.name].result()) for package in PACKAGES.values()]
        yield "Packages", [_compiler(checks["torch.compile"].result()), *packages, *tested_range()]
    facts = checks["torch"].result().get("facts") or {}
    if facts.get("device") == "cuda":  # later runs on this GPU reuse the results
        package_checks.record({name: check.result() for name, check in checks.items()}, facts["device_name"])
    if ranks := _ranks(config, facts):
        yield "Links", links.check(*ranks)
    if config is not None:
        from fxtune.diagnostics import sampler_report

        if sampler := list(sampler_report.findings(config)):
            yield "Sampler", sampler
        yield "Recipe", [_recipe(config)]


def tested_range() -> Iterator[Finding]:
    """Yield a finding for each version that is refused, and one for all versions outside the tested range."""
    for line in refusals({name: version for name in WITHIN if (version := installed_version(name))}):
        yield Finding(f"version of {line.partition(' ')[0]}", line, State.broken, line.partition(": ")[2])
    if line := outside_tested_range():
        yield Finding("versions", line, State.warning, "pip install fxtune brings versions inside the range")


def _torch(answer: dict[str, Any], has_gpu: bool) -> Iterator[Finding]:
    versions = [f"{name} {installed_version(name) or 'is missing'}" for name in ("transformers", "peft", "datasets")]
    yield Finding("Python", f"{sys.version.split()[0]}; {', '.join(versions)}")
    facts, reinstall = answer.get("facts") or {}, "pip install --force-reinstall torch"
    cuda = facts.get("cuda")
    built = installed_version("torch") + (f", built for {f'CUDA {cuda}' if cuda else 'the CPU'}" if facts else "")
    if answer["state"] != "works":
        yield Finding("torch", f"{built}: {answer['seen'] or 'not installed'}", State.broken, reinstall)
        return
    if has_gpu and facts["device"] == "cpu":
        why = "torch sees no GPU (CUDA_VISIBLE_DEVICES?)" if cuda else "torch is built for the CPU"
        seen = f"{built}, does not use the GPU: {facts['why_no_gpu'] or why}"
        remedy = f"{reinstall}  (a build for a CUDA version that the driver supports: https://pytorch.org)"
        yield Finding("torch", seen, State.broken, remedy)
        return
    yield Finding("torch", f"{built}: {answer['seen']}", State.works)
    if facts["device"] == "cpu":
        yield Finding("GPU", "none: training runs on the CPU")
        return
    capability = tuple(facts["capability"])
    needs = {"bfloat16": (8, 0), "TF32": (8, 0), "fp8": (8, 9)}
    dtypes = ", ".join(f"{name} {'yes' if capability >= least else 'no'}" for name, least in needs.items())
    yield Finding("precision", f"{dtypes} (compute capability {'.'.join(map(str, capability))})")


def _package(package: Package, answer: dict[str, Any]) -> Finding:
    name, version, seen = package.name, installed_version(*(package.distributions or (package.name,))), answer["seen"]
    if answer["state"] == "missing" and version:  # apex on PyPI, for example, is not NVIDIA's apex
        seen = f"{version} is another project with the same name ({package.purpose})"
        return Finding(name, seen, State.missing, f"pip uninstall {name}; {package.install}")
    if answer["state"] == "missing":
        return Finding(name, f"not installed ({package.purpose})", State.missing, package.install)
    seen = f"{version}: {seen}" if version else seen
    if answer["state"] == "broken":
        reinstall = package.install.replace("pip install", "pip install --force-reinstall --no-deps", 1)
        reinstall = reinstall.replace("'fxtune[flash]'", name).replace("'fxtune[quant]'", name)
        return Finding(name, seen, State.broken, f"{reinstall}  (or: pip uninstall {name})")
    return Finding(name, seen, State.works if answer["state"] == "works" else State.info)


def _compiler(answer: dict[str, Any]) -> Finding:
    if answer["state"] == "works":
        return Finding("torch.compile", answer["seen"], State.works)
    remedy = f"{INSTALL_COMPILER}  (a C++ compiler and Python's headers), or leave techniques.compile.enabled=false"
    return Finding("torch.compile", answer["seen"] or "torch is not installed", State.warning, remedy)


def _shared_memory(config: Optional[Config]) -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    workers, prefetch, tokens = 2, 4, BATCH_TOKENS
    if config is not None:
        workers = 2 if config.loader.num_workers is None else config.loader.num_workers
        prefetch, tokens = config.loader.prefetch_factor, config.train.micro_batch_size * config.data.sequence_length
    free, need = shutil.disk_usage(shared).free, workers * prefetch * tokens * TOKEN_BYTES
    seen = f"/dev/shm: {free / GIB:.2f} GiB free, {workers} loader processes need {need / GIB:.2f} GiB"
    if free > need:
        yield Finding("shared memory", seen)
    else:
        remedy = "loader.num_workers=0; in a container: docker run --shm-size=8g"
        yield Finding("shared memory", seen, State.warning, remedy)


def _ranks(config: Optional[Config], facts: dict[str, Any]) -> tuple[int, str] | None:
    """(number of ranks, device) of the recipe, or without a recipe of this machine. None for one rank: it has no
    links."""
    device = "cpu" if not facts.get("gpus") or (config and config.run.device.value == "cpu") else "cuda"
    ranks = facts.get("gpus", 1)
    if config is not None:
        from fxtune.settle.ranks import ranks_of

        try:
            ranks = ranks_of(config)
        except UserError:  # _recipe() reports the error
            return None
    return (ranks, device) if ranks > 1 else None


def _recipe(config: Config) -> Finding:
    from fxtune.distributed.world import World
    from fxtune.settle.degrees import memory_need
    from fxtune.settle.settled import settle_here

    name = config.run.name
    try:
        settled = settle_here(config, World.create(config.run.device, config.run.memory_gib))
        facts = settled.facts
        need = memory_need(config.techniques, facts, facts.degrees).device
    except UserError as error:
        return Finding(name, f"cannot run here: {redact(str(error))}", State.broken)
    notes = "".join(f"\n{note}" for note in [*config.techniques.ignored_options(), *settled.notes])
    ranks = f"{facts.degrees.ranks} ranks ({facts.degrees}) on " if facts.degrees.ranks > 1 else ""
    seen = f"can run on {ranks}{facts.device_name}, weights in {facts.dtype}"
    verify = "(`fxtune verify` builds the model and checks that each technique takes effect)"
    if need <= (free := facts.free_memory):
        return Finding(name, f"{seen}{notes}\n{verify}", State.works)
    seen += f", but may run out of memory: a step needs about {need / GIB:.1f} GiB, and {free / GIB:.1f} are free"
    remedy = (
        "a smaller train.micro_batch_size, techniques.checkpointing.enabled=true, or a shorter data.sequence_length"
    )
    return Finding(name, f"{seen}{notes}\n{verify}", State.warning, remedy)


def _page(title: str, findings: list[Finding]) -> Any:
    return table(title, ["", "", ""], [[_sign(row.state), row.what, plain(row.seen)] for row in findings])


def _sign(state: State) -> Text:
    sign, word, style = SIGNS[state]
    return Text(sign if unicode() else word, style)
