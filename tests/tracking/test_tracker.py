from support.runs import history
from support.tracking import start

from fxtune.facts.run import Facts
from fxtune.tracking.tracker import TrackingConfig, WandbConfig, WandbMode, check, wandb_mode


def test_figures_computed_again_after_a_kill_are_written_once(tmp_path):
    """A run was killed between its last questions and its end. The resumed run asks them again."""
    with start(tmp_path) as tracker:
        tracker.log(4, {"train/loss": 4.0})
        tracker.log(4, {"questions/exact_match": 0.5})
    with start(tmp_path, resume_step=4, tensorboard=True) as tracker:
        tracker.log(4, {"questions/exact_match": 0.5})
        tracker.log(4, {"eval/loss": 1.0})  # what the killed one had not come to
    assert [set(line) - {"time", "train/step"} for line in history(tmp_path)] == [
        {"train/loss"},
        {"questions/exact_match"},
        {"eval/loss"},
    ]
    assert scalars(tmp_path, "eval/loss") == [(4, 1.0)]


# --- TensorBoard


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_tensorboard_resume_hides_repeated_steps(tmp_path):
    with start(tmp_path, tensorboard=True) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"train/loss": float(step)})
    with start(tmp_path, tensorboard=True, resume_step=2) as tracker:
        tracker.log(3, {"train/loss": 30.0, "word": "text is skipped"})
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


# --- W&B: choices before anything starts


def test_auto_means_online_only_with_a_key(monkeypatch, tmp_path):
    auto = WandbConfig(mode=WandbMode.auto)
    assert wandb_mode(auto) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert wandb_mode(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(auto) == "disabled"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.delenv("WANDB_MODE")
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password " + "k" * 40 + "\n")
    netrc.chmod(0o600)
    assert wandb_mode(auto) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # a key for another server is no key
    assert wandb_mode(auto) == "offline"
    assert wandb_mode(WandbConfig(mode=WandbMode.online)) == "offline"
    assert wandb_mode(WandbConfig(mode=WandbMode.disabled)) == "disabled"


def test_check_reports_what_wandb_would_refuse():
    config = TrackingConfig(wandb=WandbConfig(mode=WandbMode.offline, project="a/b", tags=["x" * 65]))
    reasons = list(check(config, Facts()))
    assert len(reasons) == 3
    assert "pip install wandb" in reasons[0]
    assert not list(check(TrackingConfig(wandb=WandbConfig(mode=WandbMode.auto)), Facts(packages={"wandb": "0.31"})))
