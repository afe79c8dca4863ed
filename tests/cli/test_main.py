"""The command line: commands, options, sweeps, exit codes, completion. Overrides and recipes: tests/config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections import UserDict
from pathlib import Path

import pytest
from support.recipes import QUICK, write_recipe

from fxtune.cli import main as command
from fxtune.distributed import failure
from fxtune.errors import DataError, NumbersError


def fail_with(monkeypatch, error: BaseException) -> None:
    def run(config):
        raise error

    monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)


def refused(capsys, *argv: str) -> str:
    """The message that a wrong command line prints."""
    assert command.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fxtune: ")
    assert "Traceback" not in err
    assert out == ""
    return err


def fxtune(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, timeout=600)


def test_training_gets_typed_config_of_recipe_groups_and_keys(cwd, trained):
    (cwd / "docs.jsonl").write_text('{"text": "one row"}\n')
    assert command.main([QUICK, "optimizer=muon", "data.sources.0.path=docs.jsonl", "run.seed=3"]) == 0
    (config,) = trained
    assert config.optimizer.name.value == "muon"
    assert config.data.sources[0].path == "docs.jsonl"
    assert config.run.seed == 3
    assert config.run.name == "quickstart"
    assert config.run.dir is None
    assert [path.name for path in cwd.iterdir()] == ["docs.jsonl"], "Hydra left something in the working directory"


def test_command_train_can_be_left_out(cwd, trained):
    assert command.main(["train", QUICK]) == 0
    assert command.main([QUICK]) == 0
    assert trained[0] == trained[1]


def test_cfg_prints_config_and_runs_nothing(cwd, trained, capsys):
    import yaml

    assert command.main([QUICK, "--cfg", "job", "train.max_steps=11"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["max_steps"] == 11
    assert "hydra" not in printed
    assert command.main([QUICK, "--cfg", "job", "-p", "train.log_every"]) == 0
    assert capsys.readouterr().out.strip().isdigit()
    assert command.main([QUICK, "-i", "defaults-tree"]) == 0
    assert "recipe" in capsys.readouterr().out
    assert trained == []


def test_multirun_names_each_job_folder_after_its_changes(cwd, trained, capsys):
    assert command.main(["-m", QUICK, "optimizer.lr=1e-3,0.01", "run.seed=1"]) == 0
    assert [config.optimizer.lr for config in trained] == [1e-3, 1e-2]
    folders = [config.run.dir for config in trained]
    assert folders == ["runs/quickstart/optimizer.lr=0.001", "runs/quickstart/optimizer.lr=0.01"]
    err = capsys.readouterr().err
    assert all(folder in err for folder in folders)
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_recipes_and_groups_can_be_swept(cwd, trained):
    assert command.main(["-m", "+recipe=quickstart,full_quickstart", "optimizer=adamw,sgd", "run.dir=here"]) == 0
    assert {config.run.dir for config in trained} == {
        f"here/recipe={name},optimizer={optimizer}"
        for name in ("quickstart", "full_quickstart")
        for optimizer in ("adamw", "sgd")
    }
    assert {(config.run.name, config.optimizer.name.value) for config in trained} == {
        (name, optimizer) for name in ("quickstart", "full_quickstart") for optimizer in ("adamw", "sgd")
    }


def test_failing_job_does_not_stop_the_others(cwd, trained, capsys, monkeypatch):
    done, models = [], []

    def run(config):
        if config.optimizer.lr > 0.05:
            model = UserDict()
            models.append(weakref.ref(model))
            raise NumbersError("diverged [not markup]")
        assert models[0]() is None, "the next job needs the memory"
        done.append(config.optimizer.lr)

    monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)
    assert command.main(["-m", QUICK, "optimizer.lr=0.1,0.01"]) == 5
    assert done == [0.01]
    err = capsys.readouterr().err
    assert "diverged [not markup]" in err
    assert "1 of 2 runs failed" in err


def test_path_below_a_sweeps_folder_is_no_key(cwd, capsys):
    folder = cwd / "runs" / "optimizer.lr=0.1" / "checkpoints"
    folder.mkdir(parents=True)
    assert "there is no such checkpoint" in refused(capsys, "merge", "runs/optimizer.lr=0.1/checkpoints/step-3")


def test_all_jobs_are_checked_before_the_first_runs(cwd, trained, capsys):
    assert "train.micro_batch_size=0" in refused(capsys, "-m", QUICK, "train.micro_batch_size=4,2,0")
    assert "is a number" in refused(capsys, "-m", QUICK, "optimizer.lr=1e-3,high")
    assert trained == []


IMPORTS = """
import json, sys
from fxtune.cli.main import main

HEAVY = json.loads(sys.argv[1])
def loaded():
    return sorted(name for name in HEAVY if name in sys.modules)

found = []
for words in (["--cfg", "job"], ["optimizer.lr=fast"], ["data.sources.0.path=no.jsonl"], ["train.max_steps=1", "data.questions.path=null", "run.report=false"]):
    code = main(["+recipe=quickstart", "tracking.display=none", *words])
    found.append([code, loaded()])
print(json.dumps(found))
"""
SLOW_TO_IMPORT = (
    *("transformers", "peft", "torch._dynamo", "torch.distributed.tensor"),
    *("torch._inductor.compile_fx", "bitsandbytes", "datasets", "pyarrow", "pandas", "scipy", "sklearn", "wandb"),
    *("optuna", "pygal", "torchvision", "tensorboard"),
)


def test_a_command_imports_nothing_slow_before_its_config_is_checked_and_a_run_only_what_it_uses(cwd):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(SLOW_TO_IMPORT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed, refused, without_data, run = json.loads(done.stdout.splitlines()[-1])
    assert printed == [0, []]
    assert refused == [2, []]
    assert without_data == [3, []]
    assert run[0] == 0
    # transformers itself imports the compiler's front end, DTensor, and scipy where it is installed.
    allowed = {"transformers", "peft", "torch._dynamo", "torch.distributed.tensor", "scipy"}
    # transformers 5.17 imports sklearn where it is installed, and sklearn imports the others.
    assert set(run[1]) <= allowed | ({"sklearn", "pandas", "pyarrow"} if "sklearn" in run[1] else set())


ROWS = {
    "pairs.jsonl": {"prompt": "a", "completion": "b"},
    "chats.jsonl": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "names.jsonl": {"title": 1},
    "kinds/pairs.jsonl": {"prompt": "a", "completion": "b"},
}


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["data.sources.0.path=no.jsonl"], "data.sources.0.path", ["no.jsonl"]),
        (["data.sources=[{path: pairs.jsonl}, {path: kinds}]"], "data.sources.1.path", ["pairs.jsonl", "table.csv"]),
        (["data.eval_sources=[{path: no.jsonl}]"], "data.eval_sources.0.path", ["no.jsonl"]),
        (["data.questions.path=no.jsonl"], "data.questions.path", ["no.jsonl"]),
        (["data.sources=[{path: names.jsonl}]"], "data.sources.0.path", ["title"]),
        (
            ["data.sources=[{path: pairs.jsonl, columns: {promt: prompt}}]"],
            "data.sources.0.columns",
            ["promt", "prompt, completion", "'data.sources=[{path: pairs.jsonl}]'"],
        ),
        (
            ["data.sources=[{path: '*s.jsonl'}]", "data.on_bad_row=quarantine"],
            "data.sources.0.path",
            ["pairs.jsonl has the columns of prompt_completion", "chats.jsonl has the columns of messages"],
        ),
    ],
)
def test_a_mistake_in_the_data_is_named_with_its_key_before_training_begins(cwd, trained, capsys, words, key, said):
    (cwd / "kinds").mkdir()
    (cwd / "kinds" / "table.csv").write_text("prompt,completion\na,b\n")
    for name, row in ROWS.items():
        (cwd / name).write_text(json.dumps(row) + "\n")
    assert command.main([QUICK, *words]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"fxtune: {key}: ")
    assert all(part in error for part in said)
    assert trained == []


def test_a_finished_run_needs_its_data_no_more(cwd, trained):
    words = [QUICK, "data.sources.0.path=no.jsonl", "run.dir=here"]
    assert command.main(words) == 3
    (cwd / "here").mkdir()
    (cwd / "here" / "result.json").write_text("{}")
    assert command.main(words) == 0
    assert len(trained) == 1


def test_user_error_is_printed_once_with_its_exit_code(cwd, trained, capsys, monkeypatch):
    fail_with(monkeypatch, DataError("docs.jsonl:3: no [bold]messages[/bold]"))
    assert command.main([QUICK]) == 3
    out, err = capsys.readouterr()
    assert err == "fxtune: docs.jsonl:3: no [bold]messages[/bold]\n"
    assert out == ""


def test_bug_keeps_its_traceback(cwd, trained, monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours") as caught:
        command.main([QUICK])
    assert caught.traceback[-1].name == "run"


def test_interruption_exits_with_130(cwd, trained, capsys, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert command.main([QUICK]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["+recipe=lama_lora"], "did you mean `llama_lora`?"),
        (["+recip=quickstart"], "did you mean `+recipe=quickstart`?"),
        (["+recipe=./none.yaml"], "there is no recipe file ./none.yaml"),
        (["previw", QUICK], "did you mean `preview`?"),
        (["serve", "quickstart"], "fxtune export RUN --to vllm"),
        (["quickstart"], "fxtune +recipe=quickstart"),
        (["train.max_steps=3"], "data.sources is empty"),
        ([QUICK, "chat", "mine"], "fxtune chat ..., then its options"),
        (["recipes", "list"], "`fxtune recipes list` is not a command"),
        ([QUICK, "--config-dir=recipes"], "unrecognized arguments: --config-dir"),
        ([QUICK, "--resolve"], "add --cfg job"),
        ([QUICK, "-m", "--cfg", "job"], "not allowed with"),
    ],
)
def test_mistake_is_named_with_its_correction(cwd, trained, capsys, argv, message):
    assert message in refused(capsys, *argv)
    assert trained == []


def test_help_and_recipe_list_import_nothing_slow(cwd):
    script = (
        "import sys; from fxtune.cli.main import main; main(['--help']); main(['recipes']); "
        "print({'torch', 'hydra', 'yaml'} & {*sys.modules})"
    )
    done = fxtune("-c", script, cwd=cwd)
    assert "+recipe=quickstart" in done.stdout
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    "words", [["chats.jsonl"], ["train", "chats.jsonl"], ["preview", "+recipe=quickstart", "chats.jsonl"]]
)
def test_a_data_file_alone_is_answered_with_the_key_it_belongs_to(cwd, capsys, words):
    Path("chats.jsonl").write_text("{}\n")
    assert command.main(words) == 2
    assert "data.sources.0.path=chats.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("pre", "preview", "train"),
        ("+re", "+recipe=", "+optimizer="),
        ("+recipe=mi", "+recipe=mine", "+recipe=quickstart"),
        ("preview +recipe=quickstart optimizer=m", "optimizer=muon", "optimizer=sgd"),
        ("preview recipe=quickstart data.sources.0.p", "data.sources.0.path=", "data.sources.0.format="),
        ("+recipe=mine op", "optimizer.", "model."),
        ("recipes ", "", "optimizer="),
    ],
)
def test_completion(cwd, monkeypatch, capsys, line, offered, not_offered):
    write_recipe("broken: [\n")
    monkeypatch.setenv("COMP_LINE", f"fxtune {line}")
    monkeypatch.setenv("COMP_POINT", str(len(line) + 7))
    assert command.main(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert offered in words or offered == ""
    assert not_offered not in words


def test_bug_in_a_job_ends_the_sweep_with_its_traceback(cwd, trained, monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours") as caught:
        command.main(["-m", QUICK, "run.seed=1,2"])
    assert caught.traceback[-1].name == "run"


@pytest.mark.slow
def test_completion_in_a_real_bash(cwd):
    script = (
        'eval "$(fxtune -sc install=bash)"; COMP_LINE="fxtune +recipe=llama_l"; COMP_POINT=${#COMP_LINE}; '
        'COMP_WORDS=(fxtune +recipe=llama_l); COMP_CWORD=1; hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    program = cwd / "bin" / "fxtune"  # as pip installs it, but of this tree
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom fxtune.cli.main import main\nsys.exit(main())\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(Path(command.__file__).parents[2])
    done = subprocess.run(["bash", "-c", script], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "+recipe=llama_lora"


def test_rank_that_failed_on_a_gpu_exits_without_pythons_cleanup(cwd, trained, capsys, monkeypatch):
    """NCCL's connections stay open. So the process starts no other job of a sweep, and it ends by os._exit()."""

    def leave(code):
        raise SystemExit(code)

    jobs = []

    def run(config):
        jobs.append(config.run.seed)
        failure.keep_connections()
        raise NumbersError("diverged") if len(jobs) < 3 else ZeroDivisionError("ours")

    monkeypatch.setattr(failure, "_KEPT", [])
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)
    for words, code, said in (
        ([QUICK], 5, "diverged"),
        (["-m", QUICK, "run.seed=1,2"], 5, "diverged"),
        ([QUICK], 1, "ZeroDivisionError: ours"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == code
        assert capsys.readouterr().err.count(said) == 1
    assert len(jobs) == 3
