"""`fxtune doctor`: packages that raise, crash, hang or lie are lines of its page; secrets are not."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from fxtune.cli import doctor
from fxtune.cli.main import main
from fxtune.diagnostics import package_checks, system_report
from fxtune.diagnostics.system_report import Finding, State
from fxtune.distributed.world import Device, World
from fxtune.system import host

ROOT = Path(__file__).resolve().parents[2]
CANARY = "hf_canary0123456789abcdef"
KEY = "0123456789abcdef0123456789abcdef01234567"

RAISES = f"raise RuntimeError('no kernel image; see https://me:hunter2@example.org/?token={CANARY}')"
CRASHES = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
HANGS = "import subprocess, time\nsubprocess.Popen(['sleep', '300'])\ntime.sleep(300)"
LEAVES = "import sys\nprint('{not json')\nsys.exit(3)"


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Makes packages that stand before the installed ones, in the processes that doctor starts."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def make(name: str, text: str) -> None:
        path = folder / name.replace(".", "/")
        path.mkdir(parents=True)
        (path / "__init__.py").write_text(text)

    return make


@pytest.fixture
def quick(monkeypatch):
    """Only `torch` and what a test fakes is tried; the others take seconds each."""
    true, tried = doctor.probe, set()

    def probe(name: str, gpu: bool, patience: float) -> dict:
        if name in tried or name == "torch":
            return true(name, gpu, 2.0 if name == "kernels" else patience)
        return {"state": "missing", "seen": ""} if name != "torch.compile" else {"state": "works", "seen": "compiled"}

    monkeypatch.setattr(doctor, "probe", probe)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tried


def findings(*words: str, code: int) -> dict[str, dict]:
    file = Path("doctor.json").absolute()
    assert main(["doctor", "--json", str(file), *words]) == code
    return {one["what"]: one for one in json.loads(file.read_text())}


def test_a_sound_machine_is_0_and_everything_has_its_line(cwd, quick, capsys):
    found = findings(code=0)
    assert {
        "Python",
        "torch",
        "CPU",
        "open files",
        "runs",
        "token cache",
        "hub cache",
        "Hugging Face hub",
        "W&B",
        "torch.compile",
        *(package.probe for package in doctor.PACKAGES),
    } <= set(found)
    assert found["torch"]["state"] == "works"
    assert "a matmul in bfloat16, forward and backward" in found["torch"]["seen"]
    assert all(one["remedy"] for one in found.values() if one["state"] in ("missing", "broken"))
    out, err = capsys.readouterr()
    assert err == ""
    assert "flash-attn-4: pip install 'fxtune[flash]'" in out
    assert "\x1b" not in out, "colours have no place in a pipe"


def test_what_raises_crashes_hangs_or_leaves_is_a_line_each_and_the_end_is_1(cwd, quick, fakes, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_SECRET", "opensesame-42")
    quick |= {"bitsandbytes", "torchao", "kernels", "liger-kernel"}
    fakes("bitsandbytes", RAISES)
    fakes("torchao", CRASHES)
    fakes("kernels", HANGS)
    fakes("liger_kernel", LEAVES)
    began = time.monotonic()
    found = findings(code=1)
    assert time.monotonic() - began < 30
    assert {name for name, one in found.items() if one["state"] == "broken"} == quick
    for name, told in (
        ("bitsandbytes", "RuntimeError: no kernel image"),
        ("torchao", "killed by SIGSEGV"),
        ("kernels", "no answer within 2 s"),
        ("liger-kernel", "ended with 3"),
    ):
        assert told in found[name]["seen"]
        assert "--force-reinstall" in found[name]["remedy"]
    assert "a token in HF_TOKEN" in found["Hugging Face hub"]["seen"]
    assert "logged in" in found["W&B"]["seen"]
    out, err = capsys.readouterr()
    assert err.startswith("fxtune: Broken here:")
    for text in (out, err, json.dumps(found)):
        for secret in (CANARY, KEY, "hunter2", "opensesame"):
            assert secret not in text


def test_a_probe_that_hangs_leaves_no_process_behind(fakes, tmp_path):
    pid = tmp_path / "pid"
    fakes(
        "kernels",
        f"import subprocess, time\nchild = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(300)",
    )
    answer = doctor.probe("kernels", False, 3.0)
    assert answer == {"state": "broken", "seen": "no answer within 3 s"}
    child = Path(f"/proc/{pid.read_text()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_package_whose_result_is_wrong_is_broken(fakes):
    fakes("torchao", "")
    fakes(
        "torchao.quantization",
        "class Int8WeightOnlyConfig: pass\ndef quantize_(layer, config):\n    layer.weight.data.mul_(1.1)\n",
    )
    answer = doctor.probe("torchao", False, 60.0)
    assert answer["state"] == "broken"
    assert "off by" in answer["seen"]


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_the_installed_packages_work(name):
    pytest.importorskip(name)
    assert doctor.probe(name, False, 60.0)["state"] == "works"


def test_half_of_a_shared_folder_is_not_the_other_half(fakes):
    fakes("flash_attn.cute", "def flash_attn_func(q, k, v, causal): raise NotImplementedError")
    assert doctor.probe("flash-attn", False, 30.0)["state"] == "missing"
    assert doctor.probe("flash-attn-4", False, 30.0)["state"] == "imports"
    assert doctor.probe("flash-attn-3", False, 30.0)["state"] == "missing"


def test_apex_of_another_project_is_told(fakes, monkeypatch):
    fakes("apex", "")
    assert doctor.probe("apex", False, 30.0)["state"] == "missing"
    monkeypatch.setattr(doctor, "_version", lambda names: "0.9")
    package = next(one for one in doctor.PACKAGES if one.probe == "apex")
    told = doctor._tried(package, {"state": "missing", "seen": ""})
    assert "another project" in told.seen
    assert told.state is State.missing


def test_attention_probes_compare_with_float32():
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    def kernel(q, k, v, causal=True):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2), "log-sum-exp"

    device = torch.device("cpu")
    assert "within" in package_checks._attention(device, kernel)
    with pytest.raises(ArithmeticError, match="off by"):
        package_checks._attention(device, lambda q, k, v: kernel(q, k, v, causal=False))


# --- the machine


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A driver with one GPU that another process uses; torch here is a CPU build."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "--query-gpu*) echo '0, NVIDIA H200, 143771, 100000, 580.65.06, 9.0';;\n"
        "--query-compute-apps*) echo '4242, python, 43008';;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def test_a_gpu_that_torch_does_not_use_is_broken_and_other_processes_are_told(cwd, quick, card):
    import torch

    if torch.version.cuda:
        pytest.skip("torch is built for CUDA here")
    found = findings(code=1)
    assert found["GPU 0"]["seen"] == "NVIDIA H200, compute capability 9.0, 97.7 of 140.4 GiB free; driver 580.65.06"
    assert "4242 python (42.0 GiB)" in found["other processes"]["seen"]
    assert found["torch"]["state"] == "broken"
    assert "built for the CPU" in found["torch"]["seen"]


def test_a_folder_that_cannot_be_written_is_broken(cwd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(cwd)))
    assert {one.what: one.state for one in system_report.disks()}["runs"] is State.broken


def test_little_disk_few_files_and_little_shared_memory_are_warnings(cwd, monkeypatch, small):
    import resource
    import shutil

    usage = shutil.disk_usage(cwd)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    assert {one.state for one in system_report.disks()} == {State.warning}
    assert {one.what: one.remedy for one in system_report.host()}["open files"] == "ulimit -n 4096"
    small.data.sequence_length = 65536
    (shared,) = doctor._loaders(small)
    assert shared.state is State.warning
    assert "loader.num_workers=0" in shared.remedy


def test_a_container_s_memory_counts(monkeypatch):
    limits = {
        "/sys/fs/cgroup/memory.max": "2147483648\n",
        "/sys/fs/cgroup/memory.current": "1610612736\n",
        "/sys/fs/cgroup/memory.stat": "anon 1073741824\ninactive_file 536870912\n",
    }
    true = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: limits.get(str(self)) or true(self, *a, **k))
    assert host.memory() == (2 << 30, 1 << 30)
    assert World.create(Device.cpu).facts().host_memory == 2 << 30


# --- the network


@pytest.fixture
def server():
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(401)

        def log_message(self, *arguments):
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize(
    ("check", "variable", "switch"),
    [(system_report.hub, "HF_ENDPOINT", "HF_HUB_OFFLINE"), (system_report.wandb, "WANDB_BASE_URL", "WANDB_MODE")],
)
def test_servers_answer_do_not_answer_or_are_not_asked(server, tmp_path, monkeypatch, check, variable, switch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv(variable, server)
    assert check().state is State.works
    monkeypatch.setenv(variable, "http://me:hunter2@127.0.0.1:9")
    refused = check()
    assert refused.state is State.warning
    assert "cannot be reached" in refused.seen
    assert "hunter2" not in refused.seen
    monkeypatch.setenv(switch, "1" if switch == "HF_HUB_OFFLINE" else "offline")
    assert "offline" in check().seen
    assert check().state is State.told


def test_a_stored_token_is_found_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "no token" in system_report.hub().seen
    (tmp_path / "token").write_text(CANARY)
    assert "a token in" in system_report.hub().seen
    assert CANARY not in system_report.hub().seen


# --- a recipe


def test_a_recipe_that_can_run_and_one_that_cannot_with_all_reasons(cwd, quick, capsys):
    found = findings("+recipe=quickstart", code=0)
    assert "can run on" in found["quickstart"]["seen"]
    found = findings(
        "+recipe=quickstart",
        "techniques.rope.enabled=true",
        "techniques.rope.factor=1.0",
        "techniques.precision.tf32=true",
        code=1,
    )
    for reason in ("techniques.rope.factor", "techniques.precision.tf32"):
        assert reason in found["quickstart"]["seen"]
    assert main(["doctor", "+recipe=quickstrat"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_recipe_whose_memory_may_run_out_is_a_warning_and_no_promise(cwd, quick, monkeypatch, capsys):
    true = World.facts
    monkeypatch.setattr(World, "facts", lambda self, **known: replace(true(self, **known), free_memory=2**29))
    found = findings("+recipe=quickstart", code=0)["quickstart"]
    assert found["state"] == "warning"
    assert re.search(
        r"can run on .*, but may run out of memory: a step needs some \d\.\d GiB, and 0\.5 are free", found["seen"]
    )
    assert "quickstart: a smaller train.micro_batch_size" in capsys.readouterr().out


# --- the page


def test_no_torch_is_needed_to_say_that_torch_is_broken():
    code = "import sys, fxtune.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_page_fits_the_terminal(width):
    file = io.StringIO()
    Console(file=file, width=width).print(
        doctor._page(
            "Packages",
            [
                Finding("flash-attn-4", "4.0.0b36: RuntimeError: " + "x" * 100, State.broken),
                Finding("torch", "[bold]2.13[/bold]"),
            ],
        )
    )
    lines = file.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert "[bold]" in file.getvalue()


def test_the_matmul_of_quack_is_tried_against_plain_torch_on_a_card_that_it_is_for(monkeypatch):
    import torch

    from fxtune.kernels import matmul

    tried = []

    def by_quack(left, right, out):
        tried.append((left.shape, right.is_contiguous()))
        out.copy_(left.float() @ right.float() * factor)

    known = {"version": matmul.VERSION, "card": matmul.CAPABILITY}
    monkeypatch.setattr(metadata, "version", lambda name: known["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: known["card"])
    monkeypatch.setattr(matmul, "prepare", lambda *_: None)
    monkeypatch.setattr(matmul, "by_quack", by_quack)
    cpu, factor = torch.device("cpu"), 1.0
    told = package_checks._quack(cpu)
    assert re.fullmatch(r"a linear within \d\.\de-03 of float32", told), told
    assert [contiguous for _, contiguous in tried] == [False, True], "by W^T, and back by W"
    factor = 1.1
    with pytest.raises(ArithmeticError, match="off by"):
        package_checks._quack(cpu)
    known["card"] = (10, 0)
    with pytest.raises(package_checks.NotTriedError, match=r"compute capability 9\.0, and this GPU has 10\.0"):
        package_checks._quack(cpu)
    known["version"] = "0.7.0"
    with pytest.raises(package_checks.NotTriedError, match=f"inner functions of {matmul.VERSION}"):
        package_checks._quack(cpu)
    package = next(one for one in doctor.PACKAGES if one.probe == "quack-kernels")
    broken = doctor._tried(package, {"state": "broken", "seen": "x"})
    assert package.install.endswith(f"=={matmul.VERSION}'")
    assert f"--force-reinstall --no-deps 'quack-kernels[cu13]=={matmul.VERSION}'" in broken.remedy


def test_what_is_not_for_this_machine_is_told_and_no_fault(monkeypatch):
    def unfit(device):
        raise package_checks.NotTriedError("imports; for another card")

    monkeypatch.setitem(package_checks.PROBES, "torch", package_checks.Probe("torch", unfit, gpu=False))
    answer = package_checks.main("torch", False)
    assert (answer["state"], answer["seen"]) == ("imports", "imports; for another card")


def test_the_commands_that_install_name_extras_that_have_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in doctor.PACKAGES:
        if "fxtune[" in package.install:
            extra = package.install.partition("[")[2].partition("]")[0]
            assert any(need.startswith(package.probe) for need in extras[extra]), (
                f"{extra} does not install {package.probe}"
            )
    assert {package.probe for package in doctor.PACKAGES} | {"torch", "torch.compile"} == set(package_checks.PROBES)
