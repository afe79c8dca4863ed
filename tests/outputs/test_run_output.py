"""What a word means: a run, a checkpoint of it, an adapter or a model; by name or by folder, the same for all commands."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.runs import history

from fxtune.cli.main import main
from fxtune.errors import ConfigError
from fxtune.outputs.run_output import OutputKind, find_output, run_folder
from fxtune.training import trainer


def made(folder, file: str) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")


def test_newest_run_of_a_name_is_found(cwd):
    for age, name in enumerate(("lamp-3", "lamp-2", "lamp", "lamp-shade")):
        made(cwd / "runs" / name / "adapter", "adapter_config.json")
        os.utime(cwd / "runs" / name, (0, 1000 - age))
    os.utime(cwd / "runs" / "lamp-2", (0, 2000))
    found = find_output("lamp")
    assert (str(found.folder), found.kind) == ("runs/lamp-2/adapter", OutputKind.adapter)


def test_folders_of_runs_models_and_adapters_are_found(tmp_path):
    made(tmp_path / "run" / "model", "config.json")
    (tmp_path / "run" / "config.yaml").write_text("run: {name: mine}\n")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        found = find_output(str(path))
        assert (found.folder, found.kind) == (tmp_path / "run" / "model", OutputKind.model)
        assert found.config["run"]["name"] == "mine"
    made(tmp_path / "alone", "adapter_config.json")
    assert find_output(str(tmp_path / "alone")).config == {}


def test_a_checkpoint_is_found_by_each_of_its_names(cwd):
    run = cwd / "runs" / "lamp"
    for step in (2, 30):
        (run / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: lamp}\n")
    for name in ("lamp/step-30", "lamp/checkpoints/step-30", "runs/lamp/step-00000030", str(run / "step-30")):
        found = find_output(name)
        assert (found.folder.resolve(), found.kind) == (run / "checkpoints" / "step-00000030", OutputKind.checkpoint)
        assert found.run is not None
        assert found.run.resolve() == run
    os.chdir(run / "checkpoints")
    assert find_output("step-2").run == run
    os.chdir(cwd)
    with pytest.raises(ConfigError, match=r"runs/lamp/checkpoints: 2, 30\."):
        find_output("lamp/step-3")


def test_a_command_about_a_run_takes_what_the_run_has_exported_and_no_checkpoint(cwd):
    made(cwd / "runs" / "lamp" / "adapter", "adapter_config.json")
    (cwd / "runs" / "lamp" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (cwd / "runs" / "lamp" / "config.yaml").write_text("run: {name: lamp}\n")
    for name in ("lamp", "runs/lamp", "lamp/adapter"):
        assert str(run_folder(name)) == "runs/lamp"
    with pytest.raises(ConfigError, match=r"lamp/step-2 is a checkpoint"):
        run_folder("lamp/step-2")


def test_a_later_run_without_an_export_names_the_finished_run(cwd):
    for name in ("mine", "mine-2"):
        (Path("runs") / name / "adapter").mkdir(parents=True)
        (Path("runs") / name / "config.yaml").write_text("{}")
    (Path("runs") / "mine-2" / "adapter").rmdir()
    os.utime("runs/mine", (0, 0))
    with pytest.raises(
        ConfigError, match=r"runs/mine-2 has no adapter.* newest finished run of this name is runs/mine\."
    ):
        find_output("mine")


def test_what_holds_no_output_is_refused_with_what_to_do(cwd):
    (cwd / "runs" / "lamp" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (cwd / "runs" / "lamp" / "config.yaml").write_text("run: {name: lamp}\n")
    for name, message in (
        ("lamp", "the training has not finished.*or use a checkpoint: runs/lamp/step-2"),
        ("lmap", "there is no run `lmap`.*did you mean `lamp`"),
        ("runs/lmap", "there is no run `runs/lmap`.*did you mean `runs/lamp`"),
        ("llama_lora", r"is a recipe that has no run here: write \+recipe=llama_lora"),
        ("runs", "is no run, adapter or model"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_output(name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, chats):
    """A folder whose runs/lamp has trained two steps, with a checkpoint of each."""
    from fxtune.config import compose

    folder = tmp_path_factory.mktemp("finished")
    keys = "data.packing=false data.sequence_length=256 data.eval_fraction=0.2 train.max_steps=2 checkpoint.every=1"
    sizes = "train.micro_batch_size=4 train.global_batch_size=8 train.eval_every=1 checkpoint.keep=2"
    words = f"{keys} {sizes} techniques.lora.enabled=true model.dtype=float32 tracking.display=none run.report=false"
    source = f"data.sources=[{{path: '{chats}'}}]"
    config = compose.load([source, f"run.dir={folder / 'runs' / 'lamp'}", f"data.cache_dir={folder}", *words.split()])
    trainer.run(config)
    return folder


@pytest.fixture
def lamp(finished, tmp_path, monkeypatch) -> Path:
    """A copy of the run, in ./runs."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "lamp"


def figures(capsys) -> str:
    """The evaluation loss that was printed."""
    return next(line for line in capsys.readouterr().out.splitlines() if "eval/loss" in line)


def test_commands_take_a_run_its_checkpoints_and_its_adapter(lamp, chats, monkeypatch, capsys):
    losses = [line["eval/loss"] for line in history(lamp) if "eval/loss" in line]
    for name, loss in (("lamp", losses[-1]), ("runs/lamp/step-1", losses[-2])):
        assert main(["eval", name]) == 0
        assert f"{loss:.4f}" in figures(capsys)
    other = chats.parent / "other.jsonl"
    other.write_text("".join(chats.read_text().splitlines(keepends=True)[:5]))
    found = []
    for name in ("lamp/step-1", "lamp/step-2"):
        assert main(["eval", f"data.eval_sources=[{{path: '{other}'}}]", name]) == 0
        found.append(figures(capsys))
    assert found[0] != found[1]

    answers = []
    for name in ("lamp", "lamp/step-00000002", "lamp/step-1"):
        monkeypatch.setattr("sys.stdin", io.StringIO("What colour is the lamp?\n"))
        assert main(["chat", name, "--max-new-tokens", "8"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]

    assert main(["merge", "lamp"]) == 0
    assert main(["merge", "lamp/step-2", "of_step"]) == 0
    assert main(["merge", "lamp/step-1", "of_first"]) == 0
    one, other, first = (
        load_file(folder / "model.safetensors") for folder in (lamp / "merged", Path("of_step"), Path("of_first"))
    )
    assert all(one[name].equal(other[name]) for name in one)
    assert any(not one[name].equal(first[name]) for name in one)
    assert main(["verify", "lamp/step-1"]) == 0
    capsys.readouterr()
    assert main(["merge", "lmap", "out"]) == 2
    assert "did you mean `lamp`" in capsys.readouterr().err


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_an_adapter_with_a_flipped_byte_is_used_by_no_command(lamp, monkeypatch, capsys):
    flip(lamp / "adapter" / "adapter_model.safetensors")
    (lamp / "adapter" / "notes.txt").write_text("An added file changes nothing.")
    for words in (["merge", "lamp"], ["chat", "lamp"], ["eval", "lamp"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        assert main(words) == 6
        message = capsys.readouterr().err
        assert "is not the file that was saved" in message
        assert "proof.json" in message
    assert not (lamp / "merged").exists()
    flip(lamp / "adapter" / "adapter_model.safetensors")
    assert main(["merge", "lamp"]) == 0
    flip(lamp / "merged" / "model.safetensors")
    assert main(["chat", "lamp/merged"]) == 6
    assert "is not the file that was saved" in capsys.readouterr().err
    options = lamp / "checkpoints" / "step-00000001"
    flip(next(options.glob("*.safetensors")))
    assert main(["verify", "lamp/step-1"]) == 1


MERGED = [
    *("+recipe=quickstart", "data.sources.0.limit=60", "data.questions.path=null", "data.eval_fraction=0.2"),
    *("train.max_steps=3", "run.dir=run", "run.device=cpu", "run.report=false", "data.cache_dir=cache"),
]


def test_a_merged_model_is_measured_in_16_bits(cwd, capsys):
    """Training over nf4 would otherwise quantize the merged model again."""
    pytest.importorskip("bitsandbytes")
    assert main([*MERGED, "techniques.quantize.enabled=true", "techniques.quantize.type=nf4"]) == 0
    assert main(["merge", "run"]) == 0
    found = []
    for keys in ([], ["techniques.quantize.enabled=false"], ["techniques.quantize.enabled=true"]):
        capsys.readouterr()
        assert main(["eval", "run/merged", *keys]) == 0
        found.append(figures(capsys))
    assert found[0] == found[1] != found[2]


def test_a_merged_model_is_measured_against_the_base_that_taught_its_run(cwd, capsys):
    teacher = ["objective=distillation", "objective.teacher=base", "objective.text_weight=0.5", "model.dtype=float32"]
    assert main([*MERGED, *teacher]) == 0
    assert main(["merge", "run"]) == 0
    capsys.readouterr()
    assert main(["eval", "run/merged"]) == 0
    trained = next(line["eval/loss"] for line in history(Path("run")) if "eval/loss" in line)
    assert float(figures(capsys).split("│")[2]) == pytest.approx(trained, abs=0.01)
