"""Counts and times by torch's profiler, on a CPU."""

from __future__ import annotations

import torch

from fxtune.system.process.profiler import MAX_LENGTH, kernel_times, observe_operators, short_name, uncovered


def products() -> None:
    for _ in range(3):
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))


def test_operators_of_the_second_call_are_counted_by_pattern():
    found = observe_operators(products, {"products": r"^aten::mm$", "attention": "attention"})
    assert {name: one.calls for name, one in found.items()} == {"products": 3, "attention": 0}
    assert not found["products"].kernels


def test_time_and_calls_are_summed_by_operator():
    seconds, calls = kernel_times(products).by_name["aten::mm"]
    assert calls == 3
    assert seconds > 0


def test_exchange_that_nothing_hides_is_counted_once():
    exchanges = [(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)]
    assert uncovered(exchanges, []) == 4.0
    assert uncovered(exchanges, [(2.5, 20.0)]) == 2.5
    assert uncovered(exchanges, [(0.5, 1.0), (0.0, 0.75)]) == 3.0
    assert uncovered([], [(0.0, 1.0)]) == 0.0


def test_a_kernels_name_is_shown_without_template_arguments():
    assert short_name("void at::native::add<float, 4>(int)") == "at::native::add"
    assert short_name("kernel_cutlass_gemm<1>") == "gemm"
    assert len(short_name("x" * 100)) == MAX_LENGTH
