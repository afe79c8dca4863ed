"""A version outside the tested range is named in one line, in doctor and at the start of a run."""

from __future__ import annotations

from importlib import metadata

import pytest

from fxtune.cli import doctor
from fxtune.system.tested_versions import outside_tested_range
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import trainer


@pytest.fixture
def newer_transformers(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "6.1.0" if name == "transformers" else real(name))
    outside_tested_range.cache_clear()
    yield
    outside_tested_range.cache_clear()


@pytest.mark.usefixtures("newer_transformers")
def test_a_newer_version_is_named_with_the_range():
    line = outside_tested_range()
    assert "transformers 6.1.0 (tested: >=" in line
    assert "\n" not in line


def test_tools_of_developers_and_missing_packages_do_not_count(monkeypatch):
    needs = ["pytest>=999; extra == 'dev'", "no-such-package<1", "peft>=0.1"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    outside_tested_range.cache_clear()
    assert outside_tested_range() == ""
    outside_tested_range.cache_clear()


@pytest.mark.usefixtures("newer_transformers")
def test_a_run_says_so_and_goes_on(small, capsys):
    small.train.max_steps = 1
    small.tracking.display = DisplayKind.plain
    trainer.run(small)
    assert capsys.readouterr().out.count("transformers 6.1.0 (tested:") == 1


@pytest.mark.usefixtures("newer_transformers")
def test_doctor_says_so():
    (finding,) = doctor.tested_range()
    assert "transformers 6.1.0" in finding.seen
