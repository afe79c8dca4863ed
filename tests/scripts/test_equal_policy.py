"""scripts/study/equal_policy.py: the step of fxtune that TRL repeats. TRL itself is not installed here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


def test_trl_gets_the_answers_and_rewards_of_the_step_of_fxtune(monkeypatch, cwd):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import equal_policy

    case = equal_policy.CASES["dapo, an equal group"]
    loss, gradients, given = equal_policy.step_of_fxtune(case, cwd)
    assert np.isfinite(loss)
    assert equal_policy.norm(gradients) > 0
    assert equal_policy.distance(gradients, gradients) == 0
    groups = [[each.reward for each in given if each.group == group] for group in range(len(equal_policy.PROMPTS))]
    assert [len(set(rewards)) > 1 for rewards in groups] == [True, True, True, False]
    assert all(each.reward == len(each.ids) / equal_policy.LONGEST for each in given)
    assert all(len(each.ids) == len(each.log_probs) for each in given)
