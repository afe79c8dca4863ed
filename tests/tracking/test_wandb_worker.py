"""The process that runs W&B: it sends the rows of metrics.jsonl. A server that fails: tests/faults/test_wandb.py."""

import pytest
from support.servers import Wandb, serving
from support.tracking import start

from fxtune.tracking.tracker import WandbMode


@pytest.fixture
def wandb_server(monkeypatch):
    with serving(Wandb()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield server


def test_online_history_reaches_the_server_under_the_given_id(tmp_path, wandb_server):
    notes: list[str] = []
    tracker = start(tmp_path, WandbMode.auto, notes, wandb_id="abcd1234")
    tracker.log(7, {"train/loss": 0.25})
    tracker.finish()
    assert any("/runs/abcd1234" in note for note in notes), notes
    assert {upsert["name"] for upsert in wandb_server.upserts} == {"abcd1234"}
    assert [(row["train/step"], row["train/loss"]) for row in wandb_server.history("abcd1234")] == [(7, 0.25)]
