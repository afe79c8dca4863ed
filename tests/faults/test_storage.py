"""Full disks, damaged checkpoints and killed saves: saved checkpoints stay, and the user gets a message."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.harness import command, small_disk, wait_for
from support.killing import tail

from fxtune.checkpoint.folder import damage_of, paths, step_of
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
from fxtune.errors import StorageError
from fxtune.system.files.atomic_files import FileDigest, write_text

MIB = 2**20


def save(checkpoints: Checkpoints, step: int, mib: float = 0.01, **state: object) -> Path:
    """Save three tensors filled with the step's number. Raises StorageError."""
    size = int(mib * MIB / 12)
    checkpoints.save(
        TrainState(step=step, **state),
        {"w": torch.full((size,), float(step))},
        {f"w/{key}": torch.full((size,), float(step)) for key in ("exp_avg", "exp_avg_sq")},
    )
    checkpoints.wait()
    return checkpoints.folder / f"step-{step:08d}"


def ballast(disk: Path, leave: int) -> Path:
    """Fill the disk up to `leave` free bytes, with the file that is returned."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    file = disk / "ballast"
    with file.open("wb") as out:
        out.write(bytes(max(free - leave, 0)))
    return file


def test_full_disk_keeps_earlier_checkpoints_and_the_next_save_is_tried(tmp_path):
    notes: list[str] = []
    with small_disk(tmp_path / "disk", "64m") as disk:
        checkpoints = Checkpoints(disk / "checkpoints", CheckpointConfig(), note=notes.append)
        save(checkpoints, 1, mib=6)
        filled = ballast(disk, leave=4 * MIB)
        with pytest.raises(
            StorageError, match=r"step 2 could not be written.*it takes 7\.0 MiB, and 4\.0 MiB are free"
        ):
            save(checkpoints, 2, mib=6)
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000001"]  # and no partial file
        assert not notes, "the error is raised and the run ends"
        filled.unlink()
        save(checkpoints, 3, mib=6)
        assert checkpoints.load_newest().state.step == 3
        ballast(disk, leave=4 * MIB)
        checkpoints.save(TrainState(step=4), {"w": torch.zeros(4 * MIB)}, {})  # like a run, which does not wait
        assert checkpoints.settle()
        assert len(notes) == 1
        assert "Earlier checkpoints are intact, and training goes on" in notes[0]


def test_disk_that_fills_during_a_save_keeps_no_partial_checkpoint(tmp_path, monkeypatch):
    """The check for free space passed, and then the space was used up."""
    monkeypatch.setattr("fxtune.checkpoint.retention.SPARE", -(2**40))
    with small_disk(tmp_path / "disk", "16m") as disk:
        checkpoints = Checkpoints(disk / "checkpoints", CheckpointConfig(), note=lambda text: None)
        save(checkpoints, 1, mib=6)
        ballast(disk, leave=3 * MIB)
        with pytest.raises(StorageError, match="No space left"):
            save(checkpoints, 2, mib=6)
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000001"]
        assert torch.equal(checkpoints.load_newest().weights["w"], torch.full((6 * MIB // 12,), 1.0))


def test_short_of_space_an_old_checkpoint_is_removed_only_if_a_newer_one_is_complete(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        checkpoints = Checkpoints(disk / "checkpoints", CheckpointConfig(keep=2), note=lambda text: None)
        for step in (1, 2):
            save(checkpoints, step, mib=12)
        ballast(disk, leave=10 * MIB)  # a save needs 12 and leaves one free
        save(checkpoints, 3, mib=12)
        assert [path.name for path in paths(disk / "checkpoints")] == ["step-00000002", "step-00000003"]
        (disk / "checkpoints" / "step-00000003" / "state.json").unlink()
        with pytest.raises(StorageError, match="step 4"):
            save(checkpoints, 4, mib=12)
        assert (
            checkpoints.load_newest().state.step == 2
        )  # the only complete checkpoint is not removed for one that may fail


def test_short_of_space_the_oldest_checkpoints_go_first(tmp_path):
    """An 8 MiB disk has room for four checkpoints, and `keep` asks for five."""
    notes: list[str] = []
    with small_disk(tmp_path / "disk", "8m") as disk:
        folder = disk / "checkpoints"
        checkpoints = Checkpoints(folder, CheckpointConfig(keep=5), note=notes.append)
        kept = []
        for step in range(1, 13):
            save(checkpoints, step, mib=1.7, best_step=min(step, 2))
            kept.append([step_of(path) for path in paths(folder)])
        assert not notes
        assert kept[3:] == [[1, 2, 3, 4], *([2, step - 2, step - 1, step] for step in range(5, 13))]
        assert all(damage_of(path) is None for path in paths(folder))


def test_short_of_space_the_best_and_the_newest_checkpoint_stay(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        folder = disk / "checkpoints"
        checkpoints = Checkpoints(folder, CheckpointConfig(keep=1), note=lambda text: None)
        save(checkpoints, 1, mib=12, best_step=1)
        save(checkpoints, 2, mib=12, best_step=1)
        filled = ballast(disk, leave=10 * MIB)  # a save needs 12 and leaves one free
        for step, best in ((3, 1), (4, 4)):  # the best goes only when a better one is complete
            with pytest.raises(StorageError, match=f"step {step}"):
                save(checkpoints, step, mib=12, best_step=best)
            assert [step_of(path) for path in paths(folder)] == [1, 2]
        filled.unlink()
        save(checkpoints, 5, mib=12, best_step=5)
        assert [step_of(path) for path in paths(folder)] == [5]


def test_short_of_space_no_checkpoint_goes_if_all_of_them_free_too_little(tmp_path):
    with small_disk(tmp_path / "disk", "32m") as disk:
        folder = disk / "checkpoints"
        checkpoints = Checkpoints(folder, CheckpointConfig(keep=5), note=lambda text: None)
        for step in (1, 2, 3):
            save(checkpoints, step, mib=1)
        ballast(disk, leave=2 * MIB)
        with pytest.raises(StorageError, match="step 4"):
            save(checkpoints, 4, mib=8)
        assert [step_of(path) for path in paths(folder)] == [1, 2, 3]


def test_short_of_space_the_oldest_checkpoints_go_before_the_export(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        folder = disk / "checkpoints"
        checkpoints = Checkpoints(folder, CheckpointConfig(keep=9), note=lambda text: None)
        for step in (1, 2, 3, 4):
            save(checkpoints, step, mib=12, best_step=1)
        checkpoints.make_room(10 * MIB, best_step=1)
        assert [step_of(path) for path in paths(folder)] == [1, 2, 3, 4]
        checkpoints.make_room(24 * MIB, best_step=1)
        assert [step_of(path) for path in paths(folder)] == [1, 3, 4]
        checkpoints.make_room(60 * MIB, best_step=1)  # the newest and the best leave too little: the export will fail
        assert [step_of(path) for path in paths(folder)] == [1, 3, 4]


@pytest.fixture
def said(tmp_path):
    """The output of all runs in this folder so far."""
    return lambda: tail(tmp_path, 10**7)


def test_run_without_space_for_one_checkpoint_is_refused(tmp_path, run_here):
    with small_disk(tmp_path / "run", "1m"):
        code, text = run_here(*command(tmp_path))
    assert code == 6
    assert "has no room for this run: a checkpoint takes 0." in text
    assert "Traceback" not in text
    assert "step=1/" not in text


@pytest.mark.slow
def test_a_disk_with_room_for_one_checkpoint_takes_the_one_at_the_end(tmp_path, forks, said):
    """One checkpoint of full fine-tuning takes as much as the weights and two moments, the export as the weights."""
    words = command(tmp_path, "techniques.lora.enabled=false", "train.max_steps=3")
    assert forks.start([*words, "run.dir=large"], tmp_path).wait() == 0, said()
    size = sum(file.stat().st_size for file in (tmp_path / "large" / "checkpoints" / "step-00000003").iterdir())
    (tmp_path / "log.txt").unlink()
    with small_disk(tmp_path / "run", str(MIB + int(1.85 * size))) as disk:  # a MiB stays free for small files
        assert forks.start([*words, "checkpoint.every=1"], tmp_path).wait() == 6
        assert "has room for one checkpoint, and this run saves several" in " ".join(said().split())
        assert "step=1/" not in said()
        assert forks.start([*words, "checkpoint.every=0"], tmp_path).wait() == 0, said()
        assert [step_of(path) for path in paths(disk / "checkpoints")] == [3]


@pytest.mark.slow
def test_required_space_equals_checkpoint_size_also_with_two_update_rules(tmp_path, forks, said):
    """Hidden matrices have Muon's one moment; embedding, head and norms have AdamW's two."""
    words = command(
        tmp_path, "techniques.lora.enabled=false", "optimizer.name=muon", "train.max_steps=1", "checkpoint.every=1"
    )
    assert forks.start(words, tmp_path).wait() == 0, said()
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints" / "step-00000001").iterdir())
    with small_disk(tmp_path / "small", "256k"):
        assert forks.start([*words, "run.dir=small"], tmp_path).wait() == 6
    asked = re.search(r"a checkpoint takes ([\d.]+) MiB", said())
    assert asked, said()
    assert float(asked[1]) * MIB == pytest.approx(size, rel=0.05)


@pytest.mark.vital
def test_run_survives_a_full_disk_and_fails_only_if_its_last_save_fails(tmp_path, forks, said):
    with small_disk(tmp_path / "run", "40m") as disk:
        words = command(tmp_path, "train.epochs=15", "checkpoint.every=10")
        process = forks.start(words, tmp_path, stops=("training", 25))
        assert process.stopped(), said()
        assert paths(disk / "checkpoints")
        filled = ballast(disk, leave=MIB)
        process.send(signal.SIGCONT)
        wait_for(lambda: "could not be written" in said())
        complete = paths(disk / "checkpoints")
        assert complete
        assert all(damage_of(path) is None for path in complete)
        code = process.wait()
        text = said()
        assert "step=180/180" in text  # to the end
        assert "All steps are done. The adapter is in run/adapter." in " ".join(text.split())
        assert code == 6
        assert "Traceback" not in text
        assert paths(disk / "checkpoints")[-1] == complete[-1]
        filled.unlink()
        (tmp_path / "log.txt").unlink()
        again = forks.start(words, tmp_path).wait()
    assert again == 0, said()
    assert f"after step {int(complete[-1].name[5:])} " in said()


def steps(run: Path) -> list[int]:
    """The steps whose loss is in metrics.jsonl, in its order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/step"] for line in lines if "train/loss" in line]


def begun(disk: Path, folder: Path, forks) -> list[str]:
    """The command line of a run in `disk` that was killed after seventy steps, with the checkpoint of step 60.

    Its checkpoints are on another disk.
    """
    (folder / "elsewhere").mkdir()
    (disk / "checkpoints").symlink_to(folder / "elsewhere")
    words = command(folder, "train.epochs=15", "checkpoint.every=10")
    process = forks.start(words, folder, stops=("training", 71))
    assert process.stopped()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return words


@pytest.mark.slow
def test_metrics_of_a_resumed_run_wait_for_disk_space_and_are_complete(tmp_path, forks, said):
    with small_disk(tmp_path / "run", "8m") as disk:
        words = begun(disk, tmp_path, forks)
        size = os.path.getsize(disk / "metrics.jsonl")
        filled = ballast(
            disk, leave=size // 4096 * 4096
        )  # enough for the run's files, but not for a second copy of these lines
        process = forks.start(words, tmp_path, stops=("training", 80))
        assert process.stopped(), said()
        assert "metrics.jsonl could not be written at step" in said()
        filled.unlink()
        process.send(signal.SIGCONT)
        assert process.wait() == 0, said()
        assert steps(disk) == list(range(1, 181))
        assert "its lines wait in memory until there is room" in " ".join(said().split())
        assert not list(disk.glob("metrics.jsonl?*"))


@pytest.mark.slow
def test_lost_metrics_are_reported_at_the_end_and_by_the_resumed_run(tmp_path, forks, said):
    with small_disk(tmp_path / "run", "8m") as disk:
        words = begun(disk, tmp_path, forks)
        filled = ballast(disk, leave=os.path.getsize(disk / "metrics.jsonl") // 4096 * 4096)
        assert (
            forks.start(words, tmp_path).wait() == 6
        )  # all steps are done and saved elsewhere; the export has no room
        found = steps(disk)
        assert found == list(range(1, len(found) + 1))
        assert 60 < len(found) < 180
        assert f"metrics.jsonl lacks its last lines, from step {len(found) + 1} on: " in " ".join(said().split())
        filled.unlink()
        (tmp_path / "log.txt").unlink()
        assert forks.start(words, tmp_path).wait() == 0, said()
        assert f"metrics.jsonl has no lines of steps {len(found) + 1} to 180, which were logged" in " ".join(
            said().split()
        )


def _save_for_ever(folder: str, said: str) -> None:
    checkpoints = Checkpoints(Path(folder), CheckpointConfig(keep=2))
    first = checkpoints.load_newest()
    with open(said, "a") as out:
        for step in range(first.state.step + 1 if first else 1, 10**6):
            save(checkpoints, step, mib=6)
            out.write(f"{step}\n")
            out.flush()


@pytest.mark.slow
def test_killed_saves_lose_nothing_that_was_reported_as_saved(tmp_path):
    context, draw, leftovers = multiprocessing.get_context("fork"), random.Random(0), 0
    folder, said = tmp_path / "checkpoints", tmp_path / "said"
    said.touch()
    for kills in range(200):
        if kills >= 12 and leftovers:
            break
        before = said.stat().st_size
        child = context.Process(target=_save_for_ever, args=(str(folder), str(said)))
        child.start()
        wait_for(lambda: said.stat().st_size > before, every=0.002)  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        leftovers += len(list(folder.glob(".*-step-*")))
        found = Checkpoints(folder, CheckpointConfig(), note=pytest.fail).load_newest()
        assert found.state.step >= int(said.read_text().split()[-1])
        assert found.weights["w"].unique().tolist() == [found.state.step]
    assert leftovers  # some saves must have been killed midway, else the test shows nothing


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def forge(path: Path, name: str, make) -> None:
    """Replace a file of a checkpoint and its digest in the manifest, as an attacker would."""
    (path / name).unlink()
    digest = make(path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = asdict(digest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def sealed(file: Path, data: bytes) -> FileDigest:
    file.write_bytes(data)
    return FileDigest(hashlib.sha256(data).hexdigest(), len(data))


def tensors(**named: torch.Tensor):
    def make(file: Path) -> FileDigest:
        save_file(named, file)
        return sealed(file, file.read_bytes())

    return make


def state(**values: object):
    return lambda file: write_text(file, json.dumps({**asdict(TrainState(step=2)), **values}))


FORGED = {
    "pickle": ("weights.safetensors", lambda file: sealed(file, pickle.dumps(Bomb())), "tensors cannot be read"),
    "another weight": ("weights.safetensors", tensors(v=torch.zeros(873)), "v is only in weights.safetensors"),
    "another shape": (
        "weights.safetensors",
        tensors(w=torch.zeros(5)),
        r"w is \[5\] in weights.safetensors, and \[873\]",
    ),
    "another dtype": (
        "weights.safetensors",
        tensors(w=torch.zeros(873).half()),
        "w is F16 in .*, and F32 in the model",
    ),
    "another moment": ("optimizer.safetensors", tensors(**{"v/exp_avg": torch.zeros(873)}), "moments of v"),
    "a moment's shape": (
        "optimizer.safetensors",
        tensors(**{"w/exp_avg": torch.zeros(3)}),
        "have the shape of its weight",
    ),
    "a strange key": ("state.json", state(evil=1), "`evil`, which this version"),
    "a step as text": ("state.json", state(step="../../x"), "`step` is not of its type"),
    "another step": ("state.json", state(step=7), "of step 7, under another's name"),
    "nesting": ("state.json", lambda file: write_text(file, "[" * 10**5), "nested too deeply|no JSON"),
    "no object": ("state.json", lambda file: write_text(file, "[]"), "no JSON object"),
}


@pytest.mark.parametrize("name", FORGED)
def test_checkpoint_with_forged_files_is_skipped_with_the_reason(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    file, make, why = FORGED[name]
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(), note=notes.append)
    save(checkpoints, 1)
    forge(save(checkpoints, 2), file, make)
    assert checkpoints.load_newest({"w": torch.zeros(873)}).state.step == 1
    assert len(notes) == 1
    assert re.search(why, notes[0]), notes
    assert notes[0].endswith("It is passed over for the newest complete one, step-00000001.")
    assert not Path("exploded").exists()


def link_out(path: Path) -> None:
    (path / "state.json").rename(path.parent / "elsewhere.json")
    (path / "state.json").symlink_to(path.parent / "elsewhere.json")


def link_whole(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / "weights.safetensors").unlink()
    os.mkfifo(path / "weights.safetensors")  # a reader would block forever


def by_name(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../etc/passwd"] = manifest["files"].pop("state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))


def newer_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


def flip(path: Path) -> None:
    data = bytearray((path / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "weights.safetensors").write_bytes(data)


HARM = {
    "a link in it": (link_out, "state.json is a link", True),
    "a link": (link_whole, "it is a link", True),
    "a pipe": (pipe, "weights.safetensors is no plain file", True),
    "more files": (lambda path: (path / "optimizer.pt").write_bytes(b"x"), "optimizer.pt was not saved with it", True),
    "a path": (by_name, "manifest.json does not describe a checkpoint", True),
    "another format": (newer_format, "not of this version of fxtune", True),
    "no manifest": (lambda path: (path / "manifest.json").write_text("{}"), "not of this version of fxtune", True),
    "a newer state": (lambda path: forge(path, "state.json", state(evil=1)), "`evil`, which this version", True),
    "a changed bit": (flip, "another sha256", False),
    "a missing file": (
        lambda path: (path / "optimizer.safetensors").unlink(),
        "optimizer.safetensors cannot be read",
        False,
    ),
    "empty": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json is no JSON", False),
    "binary": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is no JSON", False),
}
"""The change to a checkpoint, the message about it, and whether the checkpoint is kept when the run reaches its step
again.
"""


@pytest.mark.parametrize("name", HARM)
def test_changed_checkpoint_is_skipped_with_the_reason(tmp_path, name):
    harm, why, kept = HARM[name]
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes.append)
    save(checkpoints, 1)
    harm(save(checkpoints, 2))
    assert checkpoints.load_newest().state.step == 1
    assert len(notes) == 1
    assert why in notes[0]
    save(checkpoints, 2)  # the run reaches that step again
    assert checkpoints.load_newest().state.step == 2
    assert os.path.lexists(tmp_path / "aside-step-00000002") is kept
    assert len(notes) == 1 + kept
    assert (
        not kept or f"It is kept as {tmp_path / 'aside-step-00000002'}: remove that if you do not need it." in notes[1]
    )


@pytest.mark.parametrize("then", [(410, 500, 510, 600), (500, 510, 600)], ids=["before its step", "at its step"])
def test_checkpoint_of_another_format_is_set_aside_unchanged(tmp_path, then):
    """After a rollback of fxtune the run resumes from an older checkpoint, passes the newer one and stops at each save."""
    newer = save(Checkpoints(tmp_path, CheckpointConfig()), 500)
    newer_format(newer)
    files = {file.name: file.read_bytes() for file in newer.iterdir()}
    for step in (300, 400):
        save(Checkpoints(tmp_path, CheckpointConfig(keep=3)), step)
    newer = next(tmp_path.glob("aside-*")).rename(newer)  # these two checkpoints are older
    for _ in range(2):  # no step was trained without it yet, so the newer fxtune may still use it
        notes: list[str] = []
        assert Checkpoints(tmp_path, CheckpointConfig(), note=notes.append).load_newest().state.step == 400
        assert len(notes) == 1
        assert newer.exists()
    before = 400
    for step in then:
        notes = []
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), note=notes.append)
        assert checkpoints.load_newest().state.step == before
        save(checkpoints, step)
        assert len(notes) == (
            2 if before == 400 else 0
        )  # messages: skipped, kept under another name, then no conflict
        assert [step_of(path) for path in paths(tmp_path)] == [before, step]
        before = step
    aside = tmp_path / "aside-step-00000500"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == files


def test_checkpoints_set_aside_never_overwrite_each_other(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=lambda text: None)
    save(checkpoints, 1)
    for tokens in range(3):
        newer_format(save(checkpoints, 2, tokens=tokens))
        assert checkpoints.load_newest().state.step == 1
    save(checkpoints, 2, tokens=3)
    aside = [tmp_path / f"aside-step-00000002{number}" for number in ("", "-2", "-3")]
    assert sorted(tmp_path.glob("aside-*")) == aside
    assert [json.loads((path / "state.json").read_text())["tokens"] for path in aside] == [0, 1, 2]


def test_checkpoint_with_an_io_error_is_kept(tmp_path, monkeypatch):
    """I/O errors at resume and when the run reaches its step: the checkpoint may be complete."""
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1), note=notes.append)
    save(checkpoints, 1)
    copy = (tmp_path / "step-00000001").rename(tmp_path / "copy")
    save(checkpoints, 2)
    copy.rename(tmp_path / "step-00000001")
    real = hashlib.file_digest

    def failing(stream, name):
        if "step-00000002" in stream.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    assert checkpoints.load_newest().state.step == 1
    assert "cannot be read: Input/output error" in notes[0]
    save(checkpoints, 2)
    monkeypatch.undo()
    assert damage_of(tmp_path / "aside-step-00000002") is None
    assert [path.name for path in paths(tmp_path)] == ["step-00000002"]


def test_checkpoint_whose_replacement_was_killed_is_restored_also_in_another_format(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=lambda text: None)
    save(checkpoints, 1)
    newer_format(save(checkpoints, 2))
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")
    assert checkpoints.load_newest().state.step == 1
    assert "version" in damage_of(tmp_path / "step-00000002").reason


def killed_with_three(folder, forks, epochs):
    """The command line and the checkpoints' folder of a run that was killed when it had three checkpoints and wrote
    another."""
    words = command(folder, f"train.epochs={epochs}", "checkpoint.every=1", "checkpoint.keep=3")
    checkpoints = folder / "run" / "checkpoints"
    process = forks.start(words, folder, stops=("saving", 5))
    assert process.stopped()
    assert len(paths(checkpoints)) >= 3
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return words, checkpoints


@pytest.mark.slow
def test_resume_by_an_older_fxtune_keeps_newer_checkpoints(tmp_path, forks, said):
    words, folder = killed_with_three(tmp_path, forks, epochs=4)
    newest = [path for path in paths(folder) if damage_of(path) is None][-1]
    newer_format(newest)
    weights = (newest / "weights.safetensors").read_bytes()
    assert forks.start(words, tmp_path).wait() == 0, said()
    text = " ".join(said().split())
    assert f"{newest.name}: manifest.json is not of this version of fxtune. It is passed over for" in text
    assert text.count(f"It is kept as run/checkpoints/aside-{newest.name}: remove that if you do not need it.") == 1
    assert (folder / f"aside-{newest.name}" / "weights.safetensors").read_bytes() == weights
    assert len(paths(folder)) in (3, 4)  # the best checkpoint may be older


def test_checkpoint_of_another_recipe_is_skipped_with_the_reason(tmp_path):
    notes: list[str] = []
    ours, theirs = (
        Checkpoints(tmp_path / name, CheckpointConfig(), name, notes.append) for name in ("ours", "theirs")
    )
    save(ours, 1)
    save(theirs, 2).rename(tmp_path / "ours" / "step-00000002")
    assert ours.load_newest().state.step == 1
    assert "another recipe" in notes[0]


@pytest.mark.vital
def test_run_killed_while_saving_resumes_from_a_complete_checkpoint(tmp_path, forks, said):
    """The newest complete checkpoint of a killed run is damaged by hand."""
    words, folder = killed_with_three(tmp_path, forks, epochs=8)
    *_, older, newest = (path for path in paths(folder) if damage_of(path) is None)
    data = bytearray((newest / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "weights.safetensors").write_bytes(data)
    code = forks.start([*words, "checkpoint.every=0"], tmp_path).wait()
    assert code == 0, said()
    assert f"{newest.name}: weights.safetensors is not the file that was saved" in said()
    assert f"Resuming run after step {int(older.name[5:])} " in said()


def test_unwritable_quarantine_is_an_error_with_its_path(tmp_path, run_here):
    """The disk has room for the lock and the config, and for no row."""
    rows = [json.dumps({"messages": []}) for _ in range(3000)]
    command(tmp_path)  # makes the chats
    with (tmp_path / "chats.jsonl").open("a") as out:
        out.write("\n".join(rows) + "\n")
    with small_disk(tmp_path / "run", "64k"):
        code, text = run_here(*command(tmp_path, "data.on_bad_row=quarantine"))
    assert code == 6, text
    assert "run/quarantine.jsonl: No space left on device. Free space there" in text
    assert "Traceback" not in text
