"""Property tests try the same examples in each run of `make test`, on every machine and in every worker."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def examples() -> list[tuple[int, float]]:
    """What a property test is given, and a number that it draws from torch."""
    seen = []

    @settings(max_examples=300, database=None)
    @given(st.integers())
    def collect(number):
        seen.append((number, torch.rand(1).item()))

    collect()
    return seen


@pytest.mark.skipif(not settings.default.derandomize, reason="this profile searches for other examples")
def test_examples_depend_neither_on_earlier_tests_nor_on_imported_modules(tmp_path):
    before = examples()
    assert len({number for number, _ in before}) > 100
    file = tmp_path / "constants.py"
    file.write_text(f"CONSTANTS = {[7_777_777_000 + 31 * number for number in range(300)]}")
    spec = importlib.util.spec_from_file_location("constants_of_a_test", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        torch.rand(5)
        assert examples() == before
