"""scripts/other_versions.py: the requirements without upper ends, and the two tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "other_versions.py"
spec = importlib.util.spec_from_file_location("other_versions", SCRIPT)
other_versions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other_versions)


def test_upper_ends_are_left_out_but_for_torch():
    ends = {need.name: str(need.specifier) for need in other_versions.without_upper_ends()}
    assert ends["transformers"].startswith(">=")
    assert [name for name, range_ in ends.items() if "<" in range_] == ["torch"]
    assert {"pytest", "torchao"} <= ends.keys()


def test_packages_that_moved():
    here = {"fxtune": "0.1", "torch": "2.13.0+cpu", "peft": "0.22.0", "new": "1.0"}
    lock = {"torch": "2.13.0", "peft": "0.21.2", "unused": "3"}
    assert other_versions.moved(here, lock) == [("new", "-", "1.0"), ("peft", "0.21.2", "0.22.0")]


def test_tests_that_failed_or_could_not_run(tmp_path):
    results = tmp_path / "tests.xml"
    results.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="wrong&#10;and more"/></testcase>'
        '<testcase classname="b" name="broken"><error message="no module"/></testcase></testsuite></testsuites>'
    )
    assert list(other_versions.failed(results)) == [("a::bad", "wrong"), ("b::broken", "no module")]
