import errno
import shutil
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.checkpoints import save
from transformers import AutoModelForCausalLM, LlamaConfig

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints, TrainState
from fxtune.errors import StorageError
from fxtune.facts.run import Facts
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer, moment_bytes
from fxtune.techniques.estimate.memory import forecast
from fxtune.techniques.estimate.recomputation import RecomputePlan


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_saved_checkpoint_loads(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3})
    got = checkpoints.load_newest()
    assert got.state == TrainState(
        step=3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3}
    )
    assert torch.equal(got.weights["w"], torch.full((4,), 3.0))
    assert torch.equal(got.moments["w/exp_avg"], torch.ones(4))


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_best=True))
    for step in (10, 20, 30, 40):
        save(checkpoints, step, best_step=10 if step < 40 else 20)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]  # 10 went when 20 became the best
    for step in (50, 60, 70):
        save(checkpoints, step, best_step=50)
    assert names(tmp_path) == ["step-00000050", "step-00000060", "step-00000070"]


def test_best_checkpoint_is_kept_until_a_better_one_is_saved_also_after_resume(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), note=lambda text: None)
    for step in (100, 200, 300):
        save(checkpoints, step, best_step=100)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stored, "write", full)
        with pytest.raises(StorageError, match="No space left"):
            save(checkpoints, 400, best_step=400)
    save(checkpoints, 500, best_step=400)
    assert names(tmp_path) == ["step-00000100", "step-00000300", "step-00000500"]
    again = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    assert again.load_newest().state.best_step == 400  # the state names it; its save failed
    save(again, 600, best_step=400)
    assert names(tmp_path) == ["step-00000100", "step-00000500", "step-00000600"]
    save(again, 700, best_step=700)
    assert names(tmp_path) == ["step-00000600", "step-00000700"]


def test_damaged_checkpoint_never_displaces_a_complete_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save(checkpoints, 8)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "step-00000008", kept)
    (save(checkpoints, 10) / "weights.safetensors").unlink()
    kept.rename(tmp_path / "step-00000008")
    assert checkpoints.load_newest().state.step == 8
    save(checkpoints, 9)
    assert checkpoints.load_newest().state.step == 9
    assert names(tmp_path) == ["step-00000009"]


def test_only_damaged_checkpoints_are_an_error_and_none_is_not(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.load_newest() is None
    (save(checkpoints, 1) / "state.json").unlink()
    with pytest.raises(StorageError, match=r"step-00000001.*state\.json"):
        checkpoints.load_newest()


def test_changes_after_a_save_are_not_in_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=pytest.fail)
    state, weight, moment = TrainState(step=1, figures={"a": 1}), torch.zeros(10**6), torch.zeros(10**6)
    checkpoints.save(state, {"w": weight}, {"w/exp_avg": moment})
    state.step, state.figures["a"] = 2, 2
    weight += 1
    moment += 1
    saved = checkpoints.load_newest()
    assert (saved.state.step, saved.state.figures) == (1, {"a": 1})
    assert not saved.weights["w"].any()
    assert not saved.moments["w/exp_avg"].any()


@pytest.fixture
def slow(monkeypatch):
    """A disk that writes once the event is set."""
    go, real = threading.Event(), stored.write
    monkeypatch.setattr(stored, "write", lambda *given: go.wait(600) and real(*given))
    yield go
    go.set()


def test_loop_continues_during_a_save_and_at_most_one_is_in_flight(tmp_path, slow):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(TrainState(step=1), {"w": torch.zeros(4)}, {})
    assert checkpoints.save_timings() == {}  # it has not ended
    assert not stored.paths(tmp_path)
    threading.Timer(0.1, slow.set).start()
    checkpoints.save(TrainState(step=2), {"w": torch.zeros(4)}, {})  # waits for the first
    assert slow.is_set()
    assert stored.paths(tmp_path)[0].name == "step-00000001"
    assert checkpoints.save_timings().keys() == {"checkpoint/stall_seconds", "checkpoint/seconds"}
    with checkpoints:
        pass  # waits, too
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    timings = checkpoints.save_timings()
    assert 0 < timings["checkpoint/stall_seconds"] < 600
    assert 0 < timings["checkpoint/seconds"] < 600
    assert checkpoints.save_timings() == {}  # reported once


def test_all_stalls_since_the_last_log_line_are_counted(tmp_path):
    checkpoints, stalls = Checkpoints(tmp_path, CheckpointConfig()), []
    for step in (1, 2, 3):
        checkpoints.save(TrainState(step=step), {"w": torch.zeros(4)}, {})
        stalls.append(checkpoints._save)
    checkpoints.wait()
    assert checkpoints.save_timings()["checkpoint/stall_seconds"] == sum(save.stall for save in stalls)


def test_unexpected_error_in_the_save_thread_is_raised_in_the_loop(tmp_path, monkeypatch):
    def broken(*_):
        raise AssertionError("ours")

    monkeypatch.setattr(stored, "write", broken)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(TrainState(step=1), {}, {})
    with pytest.raises(AssertionError, match="ours"):
        checkpoints.wait()


def test_without_memory_for_a_copy_the_save_is_synchronous_with_one_note(tmp_path, monkeypatch):
    monkeypatch.setattr("fxtune.checkpoint.host_copy.memory", lambda: (0, 0))
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes.append)
    for step in (1, 2):
        checkpoints.save(TrainState(step=step), {"w": torch.full((4,), float(step))}, {})
        assert names(tmp_path)[-1] == f"step-{step:08d}"  # by now
    assert len(notes) == 1
    assert "stands still while one is written" in notes[0]
    assert checkpoints.load_newest().weights["w"].tolist() == [2.0] * 4


def test_unchanged_state_is_not_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    path = save(checkpoints, 1)
    before = path.stat().st_ino
    save(checkpoints, 1, clock={"seconds": 2.5})  # which goes on in between
    assert path.stat().st_ino == before
    save(checkpoints, 1, tokens=3)
    assert path.stat().st_ino != before


def test_foreign_folders_are_never_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for name in ("step-00000001-copy", "step-best", "notes"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert names(tmp_path) == ["notes", "step-00000001-copy", "step-00000003", "step-best"]


def test_disk_space_is_checked_before_a_run_begins(tmp_path):
    free, notes = shutil.disk_usage(tmp_path).free, []
    checkpoints = Checkpoints(tmp_path / "not" / "there", CheckpointConfig(keep=2), note=notes.append)
    for size, saves, evaluates in ((free // 10, 9, True), (free // 4, 9, False), (free // 3, 2, False)):
        checkpoints.check_room(size, free // 10, saves, evaluates)
        assert not notes, (size, saves, evaluates)
    for size, evaluates, fit, wanted, fails in (
        (free // 3, False, 2, 3, False),
        (free // 4, True, 3, 4, False),
        (free // 3, True, 2, 4, True),
    ):
        checkpoints.check_room(size, free // 10, 9, evaluates)
        (note,) = notes
        notes.clear()
        assert f"has room for {fit} checkpoints" in note
        assert f"and the one being written would be {wanted}," in note
        assert ("Saves fail" in note) is fails
        assert ("the best" in note) is evaluates
    checkpoints.check_room(free // 2, free // 10, 1, False)
    for saves, evaluates, change in ((2, False, "every=0."), (1, True, "every=0 checkpoint.keep_best=false.")):
        with pytest.raises(StorageError, match=f"has room for one checkpoint, .* at the end: checkpoint.{change}$"):
            checkpoints.check_room(free // 2, free // 10, saves, evaluates)
    with pytest.raises(
        StorageError, match=r"has no room for this run: a checkpoint takes [\d.]+ [GM]iB and what is exported"
    ):
        checkpoints.check_room(free // 2, int(free * 0.6), 1, False)


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        (dict(name="adamw"), False),
        (dict(name="adamw", stochastic_rounding=True), False),
        (dict(name="adamw_8bit"), False),
        (dict(name="sgd"), False),
        (dict(name="lion"), False),
        (dict(name="muon"), False),
        (dict(name="muon"), True),
    ],
)
def test_estimated_moments_equal_the_optimizers_state(options, lora):
    """moment_bytes() of an optimizer, and memory.forecast() by the model's shape alone, which adds the gradients. The
    model is a bfloat16 Llama of which the embedding and the head are the largest part. Adapters are float32, and one of
    them is on the head.
    """
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=3072, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    ).to(torch.bfloat16)
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=["q_proj", "down_proj", "lm_head"], use_dora=True)
        )
    optimizer = Optimizer(model, OptimizerConfig(**{**options, "name": OptimizerName(options["name"])}))
    for parameter in optimizer.names:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-6, torch.tensor(True))
    kept = sum(tensor.nbytes for name, tensor in optimizer.state()[0].items() if not name.endswith("/step"))
    # 8-bit moments have tables of 1 KiB for each tensor, a large share of tensors as small as these.
    tables = 0.06 if "8bit" in options["name"] else 0
    assert moment_bytes(options["name"], optimizer.parts) == pytest.approx(kept, rel=tables)
    if not lora:
        facts = Facts(
            model=model.config.to_dict(),
            dtype="bfloat16",
            optimizer=options["name"],
            stochastic_rounding=options.get("stochastic_rounding", False),
        )
        gradients = sum(parameter.nbytes for parameter in optimizer.names)
        assert forecast(facts, RecomputePlan("everything")).trained == pytest.approx(
            gradients + kept, rel=0.02 + tables
        )


def test_eight_bit_moments_are_a_quarter_of_float32_ones():
    parts = [torch.optim.SGD([torch.zeros(100, dtype=torch.bfloat16)])]  # of any optimizer
    assert moment_bytes("adamw_8bit", parts) == 200
