"""What takes time in a run, and what to change, from its recorded times."""

import re
from pathlib import Path

import pytest
from support.recorded import record

from fxtune.reports.bottlenecks import find_bottlenecks, sentences
from fxtune.reports.run_files import RunFiles


def found(folder, changes=None, **values):
    return find_bottlenecks(RunFiles(record(folder / "run", changes, **values)))


def test_a_run_with_nothing_to_change_says_so(tmp_path):
    run = RunFiles(record(tmp_path / "run"))
    first, *rest = sentences(run)
    assert first == (
        "1 min 40 s: 76% forward and backward, 10% start-up, 8% evaluations, 2% optimizer, "
        "2% questions, export and the rest, 1% rest of the steps, 1% waiting for data."
    )
    assert rest == ["Nothing to change: no other part takes long enough to matter."]


def test_waiting_for_data_names_the_workers(tmp_path):
    changes = {"train/data_wait": 0.2, "train/forward_backward_seconds": 1.5}
    (finding,) = found(tmp_path, changes)
    assert finding.share == pytest.approx(0.16)
    assert finding.keys == ["loader.num_workers=2"]
    (finding,) = found(tmp_path / "more", changes, config={"loader": {"num_workers": 4}})
    assert finding.keys == ["loader.num_workers=8"]


def test_a_wait_of_the_host_while_the_gpu_is_busy_does_not_count(tmp_path):
    """The loop runs ahead of the GPU, whose own times of the parts fill the step."""
    assert not found(tmp_path, {"train/data_wait": 0.5, "train/forward_backward_seconds": 1.95})


def test_the_largest_share_comes_first(tmp_path):
    changes = {"train/data_wait": 0.1, "train/forward_backward_seconds": 1.2, "train/update_seconds": 0.5}
    slow = found(
        tmp_path,
        changes,
        result={"time/evaluation_seconds": 15.0, "time/total_seconds": 107.0, "time/training_seconds": 95.0},
    )
    assert [finding.sentence for finding in slow] == [
        "Clipping and the optimizer took 19% of the time",
        "Evaluations took 14% of the time",
        "The steps waited for data for 7% of the time",
    ]
    assert slow[1].keys == ["train.eval_every=40", "train.eval_share=0.05", "data.eval_limit=N"]


def test_padding_counts_only_where_rows_are_not_packed(tmp_path):
    assert not found(tmp_path)
    (finding,) = found(tmp_path / "padded", setting={"rows": {"packing": False}})
    assert finding.share == pytest.approx(0.76 * 0.2)
    assert finding.sentence == "20% of the tokens in the rows are padding, which took 15% of the time"
    assert finding.keys == ["data.packing=true"]


def test_of_several_ranks_the_slowest_is_named(tmp_path):
    ranks = {"train/ranks": 4.0, "train/slowest_rank": 3, "train/slowest_behind": 0.25}
    (finding,) = found(tmp_path, ranks)
    assert finding.sentence.startswith(
        "Rank 3 takes 25% longer than the others, which wait for it for 15% of the time"
    )
    assert finding.share == pytest.approx(0.76 * 0.2)
    waiting = {**ranks, "train/slowest_behind": 0.0, "train/forward_backward_seconds": 1.4}
    (finding,) = found(tmp_path / "sums", waiting)
    assert finding.sentence.startswith("Sums over the ranks, and waiting for each other, took")


def test_checkpoints_that_stop_the_loop(tmp_path):
    stalls = [{"train/step": step, "checkpoint/stall_seconds": 2.5} for step in (20, 40)]
    (finding,) = found(tmp_path, {"train/forward_backward_seconds": 1.8}, lines=stalls)
    assert finding.share == pytest.approx(0.05)
    assert finding.keys == ["checkpoint.every=40"]


@pytest.mark.parametrize(("stage", "keys"), [("model", []), ("optimizer_and_questions", ["data.questions.limit=N"])])
def test_a_long_start_names_its_longest_stage(tmp_path, stage, keys):
    start = {"train/step": 40, f"startup/{stage}_seconds": 30.0}
    (finding,) = found(tmp_path, lines=[start], result={"time/total_seconds": 130.0})
    assert finding.sentence == (
        f"The start of this short run took 31% of the time, most of it for: {stage.replace('_', ' ')}"
    )
    assert finding.keys == keys


def test_a_long_start_outside_of_all_stages_says_what_it_was(tmp_path):
    start = {"train/step": 40, "startup/other_seconds": 30.0}
    (finding,) = found(tmp_path, lines=[start], result={"time/total_seconds": 130.0})
    assert "the run's files" in finding.sentence
    assert not finding.sentence.endswith("other")


def test_a_short_run_that_is_mostly_compiled(tmp_path):
    (finding,) = found(tmp_path, lines=[{"train/step": 40, "compile/seconds": 20.0, "compile/graphs": 1}])
    assert finding.share == pytest.approx(0.2)
    assert finding.keys == ["techniques.compile.enabled=false"]


def test_an_idle_card_is_what_no_other_part_explains(tmp_path):
    (finding,) = found(tmp_path, result={"energy/gpu_utilization": 0.5})
    assert finding.sentence.startswith("The card had nothing to do for 28% of the time")
    assert finding.share == pytest.approx(1 - 0.5 - 0.10 - 0.008 - 0.08 - 0.02 - 0.012)


def test_every_key_that_is_named_exists():
    """The sentences are for people to type from."""
    from fxtune.config.root import Config
    from fxtune.reports import bottlenecks

    text = Path(bottlenecks.__file__).read_text()
    for key in set(re.findall(r"\b((?:train|data|loader|checkpoint|parallel|techniques)\.[a-z_.]+)=", text)):
        value = Config()
        for name in key.split("."):
            value = getattr(value, name)
