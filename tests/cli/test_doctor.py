"""What a user sees of `fxtune doctor`: packages that raise, crash or hang are lines of its page; secrets are not."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.harness import limit_counts_from, wait_for
from support.processes import alive
from support.vllm_server import vllm_server

from fxtune.cli import doctor
from fxtune.cli.main import main
from fxtune.diagnostics.system_report import Finding, State
from fxtune.distributed.world import World
from fxtune.kernels import matmul
from fxtune.system.files import environment
from fxtune.system.machine.facts import MachineFacts
from fxtune.techniques import package_checks

ROOT = Path(__file__).resolve().parents[2]
CANARY = "hf_canary0123456789abcdef"
KEY = "0123456789abcdef0123456789abcdef01234567"

RAISES = f"raise RuntimeError('no kernel image; see https://me:hunter2@example.org/?token={CANARY}')"
CRASHES = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
HANGS = "import subprocess, time\nsubprocess.Popen(['sleep', '300'])\ntime.sleep(300)"
EXITS = "import sys\nprint('{not json')\nsys.exit(3)"


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Makes packages that are found before the installed ones, in the processes that doctor starts."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def make(name: str, text: str) -> None:
        path = folder / name.replace(".", "/")
        path.mkdir(parents=True)
        (path / "__init__.py").write_text(text)

    return make


@pytest.fixture(scope="session")
def torch_answer() -> dict:
    """The check of torch, which imports it: once for all tests."""
    return doctor.run_check("torch", False, 300.0)


@pytest.fixture
def checked(monkeypatch, torch_answer) -> set[str]:
    """Names of the packages that are really checked. The others are missing, and torch is as it is here."""
    run_check, names = doctor.run_check, set()

    def check(name: str, gpu: bool, timeout: float) -> dict:
        if name in names:
            return run_check(name, gpu, 2.0 if name == "kernels" else 300.0)
        compiler = {"state": "works", "seen": "compiled"}
        return {"torch": torch_answer, "torch.compile": compiler}.get(name, {"state": "missing", "seen": ""})

    monkeypatch.setattr(doctor, "run_check", check)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return names


def findings(*words: str, code: int) -> dict[str, dict]:
    file = Path("doctor.json").absolute()
    assert main(["doctor", "--json", str(file), *words]) == code
    found = json.loads(file.read_text())
    assert ("error" in found) == (code != 0)
    return {row["what"]: row for row in (found["results"] if code else found)}


# --- packages


def test_a_working_machine_exits_with_0_and_everything_has_a_line(cwd, checked, capsys):
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
        *(package.name for package in doctor.PACKAGES.values()),
    } <= set(found)
    assert found["torch"]["state"] == "works"
    assert "matmul in bfloat16" in found["torch"]["seen"]
    assert all(row["remedy"] for row in found.values() if row["state"] in ("missing", "broken"))
    out, err = capsys.readouterr()
    assert err == ""
    assert "flash-attn-4: pip install 'fxtune[flash]'" in out
    assert "\x1b" not in out, "no colours in a pipe"


@pytest.mark.slow
def test_packages_that_raise_crash_hang_or_exit_are_lines_and_the_exit_code_is_1(
    cwd, checked, fakes, capsys, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_SECRET", "opensesame-42")
    checked |= {"bitsandbytes", "torchao", "kernels", "liger-kernel"}
    fakes("bitsandbytes", RAISES)
    fakes("torchao", CRASHES)
    fakes("kernels", HANGS)
    fakes("liger_kernel", EXITS)
    found = findings(code=1)
    assert {name for name, one in found.items() if one["state"] == "broken"} == checked
    for name, reason in (
        ("bitsandbytes", "RuntimeError: no kernel image"),
        ("torchao", "killed by SIGSEGV"),
        ("kernels", "no answer within 2 s"),
        ("liger-kernel", "ended with 3"),
    ):
        assert reason in found[name]["seen"]
        assert "--force-reinstall" in found[name]["remedy"]
    assert "a token in HF_TOKEN" in found["Hugging Face hub"]["seen"]
    assert "logged in" in found["W&B"]["seen"]
    out, err = capsys.readouterr()
    assert err.startswith("fxtune: Broken here:")
    for text in (out, err, json.dumps(found)):
        for secret in (CANARY, KEY, "hunter2", "opensesame"):
            assert secret not in text


@pytest.mark.slow
def test_a_check_that_hangs_leaves_no_process_behind(fakes, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    fakes(
        "kernels",
        f"import subprocess, time\nchild = subprocess.Popen(['sleep', '6000'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(6000)",
    )
    limit_counts_from(monkeypatch, lambda: pid.exists() and pid.read_text())
    answer = doctor.run_check("kernels", False, 1.0)
    assert answer == {"state": "broken", "seen": "no answer within 1 s"}
    wait_for(lambda: not alive(pid.read_text()))


def test_flash_attn_and_flash_attn_4_share_a_folder(fakes):
    fakes("flash_attn.cute", "def flash_attn_func(q, k, v, causal): raise NotImplementedError")
    assert doctor.run_check("flash-attn", False, 300.0)["state"] == "missing"
    assert doctor.run_check("flash-attn-4", False, 300.0)["state"] == "imports"
    assert doctor.run_check("flash-attn-3", False, 300.0)["state"] == "missing"


def test_pypi_s_apex_is_named_as_another_project(fakes, monkeypatch):
    fakes("apex", "")
    assert doctor.run_check("apex", False, 300.0)["state"] == "missing"
    monkeypatch.setattr(doctor, "installed_version", lambda *names: "0.9")
    package = next(entry for entry in doctor.PACKAGES.values() if entry.name == "apex")
    found = doctor._package(package, {"state": "missing", "seen": ""})
    assert "another project" in found.seen
    assert found.state is State.missing


def test_a_broken_quack_is_reinstalled_in_the_version_that_is_called():
    package = next(entry for entry in doctor.PACKAGES.values() if entry.name == "quack-kernels")
    assert package.install.endswith(f"=={matmul.VERSION}'")
    broken = doctor._package(package, {"state": "broken", "seen": "x"})
    assert f"--force-reinstall --no-deps 'quack-kernels[cu13]=={matmul.VERSION}'" in broken.remedy


def test_install_commands_name_extras_that_contain_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in doctor.PACKAGES.values():
        if "fxtune[" in package.install:
            extra = package.install.partition("[")[2].partition("]")[0]
            assert any(need.startswith(package.name) for need in extras[extra]), f"{extra}: no {package.name}"


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


def test_a_gpu_that_torch_does_not_use_is_broken_and_other_processes_are_listed(cwd, checked, card):
    import torch

    if torch.version.cuda:
        pytest.skip("torch is built for CUDA here")
    found = findings(code=1)
    assert found["GPU 0"]["seen"] == "NVIDIA H200, compute capability 9.0, 97.7 of 140.4 GiB free; driver 580.65.06"
    assert "4242 python (42.0 GiB)" in found["other processes"]["seen"]
    assert found["torch"]["state"] == "broken"
    assert "built for the CPU" in found["torch"]["seen"]


def test_a_run_takes_what_doctor_found_on_the_gpu(cwd, checked, torch_answer, monkeypatch):
    card = {"device": "cuda", "device_name": "H100", "capability": (9, 0), "gpus": 1}
    answers = {
        "torch": {**torch_answer, "facts": {**torch_answer["facts"], **card}},
        "flash-attn-4": {"state": "broken", "seen": "ImportError: No CTK flavor"},
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(cwd / "cache"))
    monkeypatch.setattr("fxtune.system.machine.facts.BROKEN", {})
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    works = {"state": "works", "seen": "ran"}
    monkeypatch.setattr(doctor, "run_check", lambda name, *_: answers.get(name, works))
    monkeypatch.setattr(
        "fxtune.system.process.process_group.Captured", lambda command: pytest.fail(f"{command} ran again")
    )
    findings(code=1)
    facts = MachineFacts(device="cuda", device_name="H100", packages={"flash-attn-4": "4", "torchao": "0.18"})
    assert package_checks.unusable(facts, facts.packages) == {"flash-attn-4": "ImportError: No CTK flavor"}


def test_little_shared_memory_is_a_warning(cwd, monkeypatch, small):
    usage = doctor.shutil.disk_usage(cwd)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    small.data.sequence_length = 65536
    (shared,) = doctor._shared_memory(small)
    assert shared.state is State.warning
    assert "loader.num_workers=0" in shared.remedy


# --- a recipe


def test_a_recipe_that_can_run_and_one_that_cannot_with_all_reasons(cwd, checked, capsys):
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


def test_a_recipe_that_may_run_out_of_memory_is_a_warning(cwd, checked, monkeypatch, capsys):
    facts = World.facts
    monkeypatch.setattr(World, "facts", lambda self, *given: replace(facts(self, *given), free_memory=2**29))
    found = findings("+recipe=quickstart", code=0)["quickstart"]
    assert found["state"] == "warning"
    assert re.search(
        r"can run on .*, but may run out of memory: a step needs about \d\.\d GiB, and 0\.5 are free", found["seen"]
    )
    assert "quickstart: a smaller train.micro_batch_size" in capsys.readouterr().out


# --- the sampler of a recipe

ROLLOUTS = [
    *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.sources=[{path: rows.jsonl}]"),
    *("objective.rewards=[{name: exact}]", "sampler.max_tokens=8", "data.sequence_length=64", "run.device=cpu"),
]
TINY = ROOT / "fxtune" / "assets" / "tiny"


def test_a_vllm_server_that_can_sample_for_the_recipe_has_three_lines_and_nothing_is_left(cwd, checked):
    with vllm_server(TINY) as server:
        found = findings(*ROLLOUTS, f"sampler.url={server.url}", code=0)
        assert server.loaded == []
        assert [call for call, _ in server.history] == ["load_lora_adapter", "completions", "completions"]
    assert found["vLLM"]["seen"] == f"{server.url}: version 0.0.1 serves tiny, up to 4,096 tokens"
    assert "rank 16" in found["vLLM adapters"]["seen"]
    assert {found[name]["state"] for name in ("vLLM", "vLLM adapters", "vLLM log-probabilities")} == {"works"}
    assert [file.name for file in cwd.iterdir()] == ["doctor.json"]


@pytest.mark.parametrize(
    ("fault", "what", "part"),
    [
        ("no_updates", "vLLM adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("no_lora", "vLLM adapters", "--enable-lora"),
        ("low_rank", "vLLM adapters", "max_lora_rank 8"),
        ("elsewhere", "vLLM adapters", "No adapter found"),
        ("hot", "vLLM log-probabilities", "before the temperature"),
        ("old", "vLLM log-probabilities", "no token ids"),
    ],
)
def test_a_server_with_wrong_options_is_broken_and_the_option_is_named(cwd, checked, fault, what, part):
    with vllm_server(TINY, faults=(fault,)) as server:
        found = findings(*ROLLOUTS, f"sampler.url={server.url}", code=1)
    broken = [row for row in found.values() if row["state"] == "broken"]
    assert [row["what"] for row in broken] == [what]
    assert part in broken[0]["seen"]
    assert broken[0]["remedy"]


def test_a_server_that_reads_too_little_or_serves_another_model_is_named(cwd, checked):
    with vllm_server(TINY, longest=32) as server:
        found = findings(*ROLLOUTS, f"sampler.url={server.url}", code=1)
        assert found["vLLM"]["remedy"] == "start it with --max-model-len 64"
        longer = ("model.path=builtin:tiny-student", "data.sequence_length=32")
        found = findings(*ROLLOUTS, f"sampler.url={server.url}", *longer, code=0)
        assert found["vLLM"]["state"] == "warning"
        assert "model.path=builtin:tiny-student" in found["vLLM"]["seen"]
    found = findings(*ROLLOUTS, "sampler.url=http://127.0.0.1:1", code=1)
    assert found["vLLM"]["state"] == "broken"
    assert "--enable-lora" in found["vLLM"]["remedy"]
    assert "vLLM adapters" not in found


def test_an_environment_with_vllm_shows_its_version_and_one_without_it_the_commands_that_make_it(cwd, checked):
    found = findings(*ROLLOUTS, "sampler=vllm", code=1)["vLLM"]
    assert "python -m venv vllm; vllm/bin/pip install 'vllm>=" in found["remedy"]
    assert findings(*ROLLOUTS, "sampler=vllm", "sampler.venv=nowhere", code=1)["vLLM"]["state"] == "broken"
    for name, version in (("vllm", "0.30.0"), ("torch", "2.13.0")):
        folder = Path(f"env/lib/python3.11/site-packages/{name}-{version}.dist-info")
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = findings(*ROLLOUTS, "sampler=vllm", "sampler.venv=env", code=0)["vLLM"]
    assert found["seen"] == "0.30.0 with torch 2.13.0, in env"


# --- the page


def test_doctor_imports_no_torch():
    code = "import sys, fxtune.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_page_fits_the_terminal(width):
    file = io.StringIO()
    broken = Finding("flash-attn-4", "4.0.0b36: RuntimeError: " + "x" * 100, State.broken)
    page = doctor._page("Packages", [broken, Finding("torch", "[bold]2.13[/bold]")])
    Console(file=file, width=width).print(page)
    assert max(len(line) for line in file.getvalue().splitlines()) <= width
    assert "[bold]" in file.getvalue()


# --- a run


def test_a_run_is_compared_with_this_environment(cwd, checked, capsys, torch_answer):
    facts = torch_answer["facts"]
    run = cwd / "runs" / "mine"
    run.mkdir(parents=True)
    lock = run / environment.FILE
    lock.write_text(environment.lock(environment.machine(facts["cuda"], facts["device_name"])))
    assert findings("runs/mine", code=0) == {}
    assert "This environment equals the environment of runs/mine" in capsys.readouterr().out
    text = re.sub(r"(?m)^peft==.*$", "peft==0.1.0", lock.read_text())
    lock.write_text(re.sub(r"# device: .*", "# device: NVIDIA H200", text) + "never-published==1.0\n")
    found = findings("runs/mine", code=0)
    assert {name: row["state"] for name, row in found.items()} == {
        "device": "warning",
        "peft": "warning",
        "never-published": "missing",
    }
    assert found["device"]["seen"] == f"NVIDIA H200 in the run, {facts['device_name']} here"
    assert "pip install -r runs/mine/requirements.lock" in capsys.readouterr().out


def test_a_word_that_means_no_run_is_refused(cwd, checked):
    found = main(["doctor", "nothing"])
    assert found == 2
