"""The answers of a few steps on a run's page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxtune.errors import StorageError
from fxtune.reports.rollouts import COLUMNS, LONGEST, rollout_rows


def write_step(run: Path, step: int, answers: list[tuple[int, float, str]]) -> Path:
    folder = run / "rollouts" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    rows = [
        {"group": group, "reward": reward, "text": text, "where": f"rows.jsonl:{group + 1}", "finished": reward > 0}
        for group, reward, text in answers
    ]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_a_few_steps_are_shown_with_the_prompt_whose_answers_differ_most(tmp_path):
    for step in range(1, 21):
        write_step(tmp_path, step, [(0, 0.5, "same"), (0, 0.5, "same"), (1, 1.0, "good"), (1, -1.0, "x" * 2000)])
    rows = list(rollout_rows(tmp_path))
    assert [row[0] for row in rows] == ["1", "5", "9", "12", "16", "20"]
    for row in rows:
        assert len(row) == len(COLUMNS)
        assert row[1:4] == ["0.25", "rows.jsonl:2", "1: good"]
        assert row[4].startswith("-1: xxx")
        assert row[4].endswith("… (cut off)")
        assert len(row[4]) < LONGEST + 30


def test_runs_without_rollouts_have_no_rows_and_damaged_answers_are_named(tmp_path):
    assert list(rollout_rows(tmp_path)) == []
    folder = write_step(tmp_path, 1, [(0, 1.0, "a")])
    (folder / "answers.jsonl").write_text("{broken")
    with pytest.raises(StorageError, match=r"answers.jsonl"):
        list(rollout_rows(tmp_path))
