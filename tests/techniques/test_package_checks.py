"""Package checks compare with plain torch, and tell a broken package from one that is not for this machine."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.harness import wait_for
from torch.nn.functional import scaled_dot_product_attention

from fxtune.distributed.ranks import ProcessRank
from fxtune.facts.run import Facts
from fxtune.kernels import matmul
from fxtune.system.machine.packages import CHECKS, THESE_HEADS, Heads, NotTriedError
from fxtune.techniques import package_checks, smoke_tests
from fxtune.techniques.attention.backends.flash4 import compile_ahead
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.smoke_tests import require_attention, require_close

CPU = torch.device("cpu")


def stands_for_kernels(monkeypatch, smoke_test) -> None:
    """Make `smoke_test` the check of the package `kernels`, which counts as installed."""
    monkeypatch.setitem(CHECKS, "kernels", replace(CHECKS["kernels"], module="torch"))
    monkeypatch.setattr("fxtune.techniques.attention.backends.hub.smoke_test", smoke_test)


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_the_installed_packages_work(name):
    pytest.importorskip(name)
    answer = package_checks.main(name, gpu=False)
    assert answer["state"] == "works", answer


@pytest.mark.parametrize(
    ("error", "state", "seen"),
    [
        (None, "works", "it ran, forward and backward"),
        (NotTriedError("imports; for another GPU"), "imports", "imports; for another GPU"),
        (RuntimeError("\nno kernel image\nmore"), "broken", "RuntimeError: no kernel image"),
        (ValueError(), "broken", "ValueError: (no message)"),
    ],
)
def test_what_a_check_raises_decides_the_state(monkeypatch, error, state, seen):
    def run(device):
        if error is not None:
            raise error
        return "it ran"

    stands_for_kernels(monkeypatch, run)
    assert package_checks.main("kernels", gpu=False) == {"state": state, "seen": seen}


def test_a_wrong_result_is_broken(monkeypatch):
    x = torch.ones(4)
    stands_for_kernels(monkeypatch, lambda _: str(require_close((x, 1.1 * x))))
    answer = package_checks.main("kernels", gpu=False)
    assert answer["state"] == "broken"
    assert "off by 9.1e-02 from plain torch's" in answer["seen"]


def test_attention_is_compared_with_float32():
    def kernel(q, k, v, causal):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2), "log-sum-exp"

    assert "within" in require_attention(CPU, kernel)
    with pytest.raises(ArithmeticError, match="off by"):
        require_attention(CPU, lambda q, k, v, causal: kernel(q, k, v, causal=False))


def test_quack_is_compared_with_plain_torch_on_the_gpu_that_it_is_for(monkeypatch):
    calls = []

    def by_quack(left, right, out):
        calls.append((left.shape, right.is_contiguous()))
        out.copy_(left.float() @ right.float() * factor)

    known = {"version": matmul.VERSION, "card": matmul.CAPABILITY}
    monkeypatch.setattr(metadata, "version", lambda name: known["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: known["card"])
    monkeypatch.setattr(matmul, "prepare", lambda *_: None)
    monkeypatch.setattr(matmul, "by_quack", by_quack)
    factor = 1.0
    seen = smoke_tests.quack(CPU)
    assert re.fullmatch(r"a linear within \d\.\de-03 of float32", seen), seen
    assert [contiguous for _, contiguous in calls] == [False, True], "forward by W^T, backward by W"
    factor = 1.1
    with pytest.raises(ArithmeticError, match="off by"):
        smoke_tests.quack(CPU)
    known["card"] = (10, 0)
    with pytest.raises(NotTriedError, match=r"compute capability 9\.0, and this GPU has 10\.0"):
        smoke_tests.quack(CPU)
    known["version"] = "0.7.0"
    with pytest.raises(NotTriedError, match=f"internal functions of {matmul.VERSION}"):
        smoke_tests.quack(CPU)


PROGRAM = """
import sys
from fxtune.config.compose import load
from fxtune.errors import ConfigError
from fxtune.training.builder import RunBuilder

for asked in sys.argv[1:]:
    try:
        builder = RunBuilder(load(["+recipe=quickstart", *asked.split()]))
    except ConfigError as error:
        print("refused:", error)
        continue
    print("chosen:", *builder.facts.packages.keys() & {"torchao", "bitsandbytes"})
    print(*builder.notes, sep="\\n")
    builder.build()
    print("built")
"""


def half_installed(folder: Path, name: str, code: str) -> None:
    """A package whose version is known and whose code fails."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    (folder / f"{name}-0.49.0.dist-info").mkdir()
    (folder / f"{name}-0.49.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.49.0\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["raise RuntimeError('No CTK flavor installed')", "def __getattr__(name): raise OSError('No CTK flavor')"]
)
def test_a_package_installed_by_half_is_passed_over_or_refused(tmp_path, code):
    """Of a package that fails when it is imported or when it is used, neither fxtune nor peft makes a traceback."""
    pytest.importorskip("torchao")
    half_installed(tmp_path, "bitsandbytes", code)
    paths = [str(tmp_path), str(Path(package_checks.__file__).parents[2])]
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "optimizer.name=adamw_8bit",
            "techniques.quantize.enabled=true techniques.quantize.type=int8",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    auto, demanded = run.stdout.split("refused:")
    assert "chosen: torchao" in auto
    assert "built" in auto
    (line,) = [line for line in auto.splitlines() if "No CTK flavor" in line]
    assert "bitsandbytes" in line
    assert "not used" in line
    assert re.search(
        r"type: bitsandbytes stores int8, and it is installed and does not work here \(\w+Error: No CTK flavor",
        demanded,
    )


def test_a_broken_package_is_passed_over_by_auto_and_refused_if_named():
    facts = Facts(
        device="cuda",
        device_name="H100",
        capability=(9, 0),
        memory=80 * 10**9,
        model={"model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "num_attention_heads": 1},
        dtype="bfloat16",
        packing=True,
        sequence_length=64,
        packages={"torch": "2.11"},
        broken=dict.fromkeys(("flash-attn-4", "liger-kernel"), "RuntimeError: No CTK flavor installed"),
    )
    attention, liger = Attention(), Liger(enabled=True)
    facts = replace(facts, techniques=Pipeline(attention=attention, liger=liger))
    assert not list(attention.check(facts))
    assert not list(liger.check(facts))
    assert "flash4 needs flash-attn-4, which is installed and does not work here" in attention.resolve(facts)
    assert attention.backend == "sdpa"
    assert "No CTK flavor installed" in liger.resolve(facts)
    assert liger.kernels == ["rope"]
    for demanded in (Attention(backend="flash4"), Liger(enabled=True, kernels=["rms_norm"])):
        (reason,) = demanded.check(facts)
        assert "No CTK flavor installed" in reason


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Checks on a GPU that is not there: the names that were checked since the last call, and the folder of installed
    packages, in which a test can install something.
    """
    asked: list[str] = []
    seen = {"torchao": "RuntimeError: no kernel image", "quack-kernels": "OutOfMemoryError: CUDA out of memory"}

    class Check:
        def __init__(self, command):
            self.name = command[3]
            asked.append(self.name)

        def tell(self, text):
            self.heads = json.loads(text)

        def result(self, limit):
            why = seen.get(self.name)
            if self.name == "flash-attn-4" and self.heads["width"] == 16:
                why = f"ValueError: too narrow ({THESE_HEADS})"
            return 0, json.dumps({"state": "broken" if why else "works", "seen": why or "ran"}), 1.0

    site = tmp_path / "site"
    (site / "torchao-0.18.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fxtune.system.process.process_group.Captured", Check)
    monkeypatch.setattr("fxtune.system.machine.facts.BROKEN", {})
    # Not the real folders: other test processes may write into them.
    monkeypatch.setattr(sys, "path", [str(site), *(folder for folder in sys.path if "site-packages" not in folder)])
    for module in ("torchao", "torchao.quantization", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module))

    def checked(device_name="H100") -> set[str]:
        names = ("torchao", "bitsandbytes", "quack-kernels")
        facts = Facts(device="cuda", device_name=device_name, packages=dict.fromkeys(names, "1"))
        assert package_checks.unusable(facts, names) == {"torchao": "RuntimeError: no kernel image"}
        found = set(asked)
        asked.clear()
        return found

    return checked, site


def test_a_package_is_checked_once_whether_it_works_or_not(recorded):
    """A GPU that another process uses says nothing about a package, so that check is made again."""
    checked, _ = recorded
    assert checked() == {"torchao", "bitsandbytes", "quack-kernels"}
    assert checked() == {"quack-kernels"}


def test_a_package_is_checked_again_with_another_gpu_or_another_version(recorded):
    checked, site = recorded
    checked()
    assert checked("H200") == {"torchao", "bitsandbytes", "quack-kernels"}
    assert checked() == {"quack-kernels"}
    (site / "torchao-0.18.0.dist-info").rename(site / "torchao-0.19.0.dist-info")
    assert checked() == {"torchao", "bitsandbytes", "quack-kernels"}


def test_a_package_that_failed_is_checked_again_when_something_was_repaired_without_a_new_version(recorded):
    """As `pip install --force-reinstall` does, or a library that is unpacked into the folder."""
    checked, site = recorded
    checked()
    before = time.time()

    def repaired() -> bool:
        (site / "lib.so").touch()
        return (site / "lib.so").stat().st_ctime > before  # the file system's clock is coarser

    wait_for(repaired)
    assert checked() == {"torchao", "quack-kernels"}


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_of_kernels_compile_beside_each_other_and_before_the_smoke_test(rank, recorded, monkeypatch):
    """On the first rank of a machine. Other ranks would compile the same kernels."""
    events = []

    class Watched:
        def __init__(self, command):
            self.part = command[-1] if command[-1].isdecimal() else "check"

        def tell(self, text):
            events.append(("told", self.part))

        def result(self, limit):
            events.append(("ended", self.part))
            return 0, json.dumps({"state": "works", "seen": "ran"}), 1.0

    monkeypatch.setattr("fxtune.system.process.process_group.Captured", Watched)
    monkeypatch.setattr(package_checks, "process_rank", lambda: ProcessRank(rank, 2, rank))
    facts = Facts(device="cuda", device_name="H100", packages={"flash-attn-4": "4"})
    assert package_checks.unusable(facts, ["flash-attn-4"], Heads(32, 8, 64)) == {}
    parts = [] if rank else ["0", "1", "2", "3", "4", "5"]
    assert events == [(event, part) for names in (parts, ["check"]) for event in ("told", "ended") for part in names]


@pytest.mark.parametrize("part", range(CHECKS["flash-attn-4"].parts))
def test_each_group_of_kernels_runs_by_the_reference_of_its_operators(part, request):
    request.addfinalizer(partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()))
    compile_ahead(CPU, Heads(4, 2, 64), part)


def test_heads_of_earlier_models_decide_nothing(recorded):
    name, facts = "flash-attn-4", Facts(device="cuda", device_name="H100", packages={"flash-attn-4": "4"})
    refused = {name: f"ValueError: too narrow ({THESE_HEADS})"}
    for _ in range(2):
        assert package_checks.unusable(facts, [name], Heads(4, 2, 16)) == refused
        assert package_checks.unusable(facts, [name], Heads(32, 8, 64)) == {}
        with package_checks.import_ahead(facts, ["attention"]) as ahead:
            assert ahead == {}, "it works with some heads"


def test_doctor_replaces_what_is_recorded_for_each_shape_of_heads(recorded):
    name, facts = "flash-attn-4", Facts(device="cuda", device_name="H100", packages={"flash-attn-4": "4"})
    why = "RuntimeError: nvcc is not in PATH"
    package_checks.record({name: {"state": "broken", "seen": why}}, "H100", Heads(32, 8, 64))
    for heads in (Heads(32, 8, 64), Heads(4, 4, 64)):
        assert package_checks.unusable(facts, [name], heads) == {name: why}, "it fails with any heads"
    package_checks.record({name: {"state": "works", "seen": "ran"}}, "H100")
    assert package_checks.unusable(facts, [name], Heads(32, 8, 64)) == {}


def test_fla_core_is_checked_again_for_another_rule(recorded):
    name, facts = "fla-core", Facts(device="cuda", device_name="H100", packages={"fla-core": "0.6"})
    package_checks.record({name: {"state": "works", "seen": "ran"}}, "H100", Heads(recurrences=("delta",)))
    package_checks.record(
        {name: {"state": "broken", "seen": f"wrong ({THESE_HEADS})"}}, "H100", Heads(recurrences=("kda",))
    )
    assert package_checks.unusable(facts, [name], Heads(recurrences=("delta",))) == {}
    assert name in package_checks.unusable(facts, [name], Heads(recurrences=("kda",)))


@pytest.mark.parametrize("rules", [("delta",), ("scan", "kda"), ()])
def test_the_smoke_test_of_fla_core_runs_on_a_cpu_too(rules):
    smoke_tests.fla(CPU, Heads(recurrences=rules))


def test_doctor_replaces_what_is_recorded(recorded):
    checked, _ = recorded
    checked()
    package_checks.record({"bitsandbytes": {"state": "works", "seen": "again"}}, "H100")
    package_checks.record({"quack-kernels": {"state": "works", "seen": "the GPU is free"}}, "H100")
    assert checked() == set()


@pytest.mark.slow
def test_a_check_that_waits_gets_the_heads_of_the_run_or_ends_with_its_input(monkeypatch, tmp_path):
    """In real processes."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # as unusable() leaves it
    site = tmp_path / "site"
    site.mkdir()
    (site / "flash_attn").mkdir()
    (site / "flash_attn" / "cute.py").write_text("raise ImportError('No CTK flavor')\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fxtune.system.machine.facts.BROKEN", {})
    facts = Facts(device="cuda", device_name="H100", packages={"flash-attn-4": "4"})
    for machine, techniques in ((replace(facts, device="cpu"), ["attention"]), (facts, ["lora"])):
        with package_checks.import_ahead(machine, techniques) as ahead:
            assert ahead == {}
    with package_checks.import_ahead(facts, ["attention"]) as ahead:
        assert package_checks.unusable(facts, [], ahead=ahead) == {}
        (unused,) = ahead.values()
    assert all(process._process.poll() is not None for process in unused), "a check that is not needed ends"
    with package_checks.import_ahead(facts, ["attention"]) as ahead:
        assert ahead == {}, "no run on this machine has needed it"
        found = package_checks.unusable(facts, ["flash-attn-4"], Heads(32, 8, 128), ahead)
    assert found["flash-attn-4"].endswith("No CTK flavor")
    with package_checks.import_ahead(facts, ["attention"]) as ahead:
        assert ahead == {}, "its result is recorded"


@pytest.mark.parametrize("name", CHECKS)
def test_each_package_names_functions_that_exist(name):
    functions = [CHECKS[name].smoke_test, *filter(None, [CHECKS[name].before_import, CHECKS[name].ahead])]
    assert all(callable(pkgutil.resolve_name(function)) for function in functions)


def test_a_mere_folder_on_the_path_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "folder_named_so").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(CHECKS, "kernels", replace(CHECKS["kernels"], module="folder_named_so"))
    assert package_checks.main("kernels", gpu=False) == {"state": "missing", "seen": ""}
