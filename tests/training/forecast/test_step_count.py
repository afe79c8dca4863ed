"""The line about runs with too few steps to learn from."""

from __future__ import annotations

import json

import pytest
from support.cases import slow_but

from fxtune.cli.main import main
from fxtune.config.root import Config, TrainConfig
from fxtune.objectives.embedding import Embedding
from fxtune.training.forecast.step_count import few_steps


@pytest.mark.parametrize(
    ("micro", "rows", "epochs", "epoch_rows", "named"),
    [
        # 300 short chats in 32 rows, with the batch of a recipe: smaller batches alone do not reach 100 steps.
        (2, 16, None, 32, "micro_batch_size=1 train.global_batch_size=1 train.epochs=4 gives 128 steps."),
        (4, 32, 1.0, 1200, "micro_batch_size=4|global_batch_size=8 gives 150 steps."),
        (8, 32, 1.0, 400, "train.micro_batch_size=4 train.global_batch_size=4 gives 100 steps."),
        (1, 1, 2.0, 20, "train.epochs=4 gives 80 steps. That is still less than 100"),
        (1, 1, 4.0, 3, "More rows of data are needed."),
    ],
)
def test_too_few_steps_are_named_with_what_gives_more(micro, rows, epochs, epoch_rows, named):
    train = TrainConfig(micro_batch_size=micro, global_batch_size=rows, epochs=epochs)
    steps = max(1, round((epochs or 1.0) * epoch_rows / rows))
    (line,) = few_steps(Config(train=train), steps, epoch_rows)
    unchanged, _, changed = named.rpartition("|")
    assert changed in line
    assert not unchanged or unchanged not in line
    assert line.startswith(f"{steps} step")


def test_pairs_of_two_rows_stay_together():
    (line,) = few_steps(Config(train=TrainConfig(micro_batch_size=2, global_batch_size=16)), 15, 240, group=2)
    assert "global_batch_size=2 gives 120 steps" in line
    assert "micro_batch_size" not in line


def test_enough_steps_and_a_chosen_number_are_not_spoken_of():
    assert not list(few_steps(Config(train=TrainConfig(global_batch_size=4)), 87, 347))
    assert not list(few_steps(Config(train=TrainConfig(global_batch_size=16, max_steps=2)), 2, 32))
    assert not list(few_steps(Config(train=TrainConfig(global_batch_size=16)), None, 32))


def test_a_batch_whose_documents_are_compared_with_each_other_stays():
    config = Config(objective=Embedding(), train=TrainConfig(micro_batch_size=4, global_batch_size=16))
    (line,) = few_steps(config, 15, 240)
    assert "batch_size" not in line
    assert "train.epochs=4 gives 60 steps" in line


@pytest.mark.parametrize(
    "command", slow_but([["preview"], ["plan", "--gpu", "cpu"], ["train"]], ["preview"]), ids=" ".join
)
def test_each_command_says_it(command, cwd, capsys):
    """300 short chats with the batch and the rows of the recipes for large models."""
    with (cwd / "chats.jsonl").open("w") as file:
        for number in range(300):
            turns = [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": f"{number + 1}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    words = ["+recipe=quickstart", "data.sources.0.path=chats.jsonl", "data.sequence_length=512"]
    assert main([*command, *words, "train.micro_batch_size=2", "train.global_batch_size=16"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "1 step of 16 rows is too few to learn from" in said
    assert "train.micro_batch_size=1 train.global_batch_size=1 train.epochs=" in said
