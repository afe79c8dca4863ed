"""A version outside the tested range is named in one line, in doctor and at the start of a run. A torch,
transformers or peft outside of it is refused."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.specifiers import SpecifierSet

from fxtune.cli import doctor
from fxtune.errors import ConfigError
from fxtune.system.machine import facts, tested_versions
from fxtune.system.machine.tested_versions import WITHIN, outside_tested_range, refusals
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import trainer


def install(monkeypatch, package: str, version: str) -> None:
    """Let `package` have this version."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else real(name))


@pytest.fixture
def fresh():
    """Versions are read again in this test, and after it."""
    caches = outside_tested_range, tested_versions.requirements, facts._versions
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def newer_datasets(monkeypatch, fresh):
    install(monkeypatch, "datasets", "6.1.0")


@pytest.mark.usefixtures("newer_datasets")
def test_a_newer_version_is_named_with_the_range():
    line = outside_tested_range()
    assert "datasets 6.1.0 (tested: >=" in line
    assert "\n" not in line


@pytest.mark.usefixtures("fresh")
def test_tools_of_developers_and_missing_packages_do_not_count(monkeypatch):
    needs = ["pytest>=999; extra == 'dev'", "no-such-package<1", "peft>=0.1"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    assert outside_tested_range() == ""


@pytest.mark.usefixtures("newer_datasets")
def test_a_run_says_so_and_goes_on(small, capsys):
    small.train.max_steps = 1
    small.tracking.display = DisplayKind.plain
    trainer.run(small)
    assert capsys.readouterr().out.count("datasets 6.1.0 (tested:") == 1


@pytest.mark.usefixtures("newer_datasets")
def test_doctor_says_so():
    (finding,) = doctor.tested_range()
    assert "datasets 6.1.0" in finding.seen


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("2.10.1", True),
        ("2.11.0", False),
        ("2.13.0+cpu", False),
        ("2.15.0", False),
        ("2.16.0.dev20270101", True),
        ("3.0", True),
    ],
)
def test_a_torch_outside_the_range_is_refused(version, refused):
    assert bool(refusals({"torch": version})) is refused


@pytest.mark.parametrize(("name", "version"), [*((name, "99.0") for name in WITHIN), ("peft", "0.1.0")])
@pytest.mark.usefixtures("fresh")
def test_the_refusal_has_the_command_that_installs_a_tested_version(small, monkeypatch, name, version):
    tested = metadata.version(name).partition("+")[0]
    install(monkeypatch, name, version)
    with pytest.raises(
        ConfigError, match=rf"{name} {version} is (newer|older) .*pip install '{name}(>=.*,<.*)'"
    ) as refusal:
        trainer.run(small)
    (found,) = doctor.tested_range()
    assert found.state is doctor.State.broken
    assert str(refusal.value).endswith(found.remedy)
    range_ = SpecifierSet(str(refusal.value).partition(f"'{name}")[2].rstrip("'"))
    assert tested in range_
    assert version not in range_
