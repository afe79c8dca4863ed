"""The folder of a run's refreshes: its link, its entries, its lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxtune.checkpoint.lineage import open_lineage
from fxtune.errors import ConfigError, StorageError


@pytest.fixture
def run(cwd) -> Path:
    folder = Path("runs/a=1")
    folder.mkdir(parents=True)
    return folder


def test_link_names_the_run_that_serves_and_survives_a_move_of_the_folder(run):
    found = open_lineage(run)
    assert found.serving == run
    candidate = found.folder / "run-1"
    candidate.mkdir()
    found.refreshes.append({"number": 1})
    found.save()
    found.serve(candidate)
    found.release()
    Path("runs").rename("moved")
    again = open_lineage(Path("moved/a=1"))
    assert again.serving == Path("moved/a=1.refresh/run-1")
    assert again.serving.is_dir()
    assert again.next_number() == 2
    again.release()


def test_every_name_of_a_lineage_opens_it_and_others_are_refused(run):
    found = open_lineage(run.absolute())
    with pytest.raises(StorageError, match="in use by another refresh"):
        open_lineage(run)
    (found.folder / "run-1").mkdir()
    found.save()
    found.release()
    for name in (found.folder, found.folder / "current"):
        open_lineage(name).release()
    with pytest.raises(ConfigError, match="run-1 does not serve"):
        open_lineage(found.folder / "run-1")


def test_lineage_in_which_nothing_was_decided_leaves_nothing(run):
    open_lineage(run).release()
    assert [path.name for path in Path("runs").iterdir()] == ["a=1"]
