"""Which layers keep what, and which offload it to host memory."""

from fxtune.facts.recomputation import RecomputePlan


def test_every_second_layer_has_the_level_of_the_plan():
    assert RecomputePlan("input", every=2).levels(5) == ["input", "everything", "input", "everything", "input"]


def test_mixed_levels_are_sorted_and_the_first_layers_keep_least():
    plan = RecomputePlan(mix=(("everything", 1), ("narrow", 2)))
    assert plan.levels(5) == ["input", "input", "narrow", "narrow", "everything"]


def test_last_of_the_offloading_layers_does_not_offload():
    assert RecomputePlan("input", sent="inputs").sending(3) == [True, True, False]
    assert RecomputePlan("input", sent="inputs", senders=1).sending(3) == [True, False, False]
    assert RecomputePlan(mix=(("everything", 2),), sent="kept").sending(4) == [True, False, False, False]
    assert RecomputePlan("input").sending(2) == [False, False]
