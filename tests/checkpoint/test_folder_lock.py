"""Two runs in one folder, of one host and of two."""

import json
import socket

import pytest
from filelock import FileLock
from support.harness import wait_for

from fxtune.checkpoint import folder_lock
from fxtune.checkpoint.folder_lock import FolderLock
from fxtune.checkpoint.run_folder import claim
from fxtune.errors import StorageError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(folder_lock, "COUNT_SECONDS", 0.3)
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", 600.0)  # a watch ends as soon as the count grows


def test_lock_is_held_once_and_given_back(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert first.acquire()
    assert not second.acquire()
    assert socket.gethostname() in second.holder()
    first.release()
    assert not (tmp_path / ".holder").exists()
    assert second.acquire()
    second.release()


def test_run_of_another_host_is_refused_where_flock_stays_within_a_host(tmp_path, monkeypatch):
    """Another file in place of the lock gives this process the lock that `alpha` has, too."""
    monkeypatch.setattr(socket, "gethostname", lambda: "alpha")
    holder = FolderLock(tmp_path)
    assert holder.acquire()
    monkeypatch.setattr(socket, "gethostname", lambda: "beta")
    monkeypatch.setattr(folder_lock, "LOCK", ".other")
    monkeypatch.setattr(FolderLock, "_note", _note_of("alpha"))
    with pytest.raises(StorageError, match=r"is in use by a run that is alive \(process 7 on alpha\)\. Wait for it"):
        claim("name", str(tmp_path), "auto", {})
    holder.release()


def _note_of(host):
    def write(self, count):
        note = {"host": host, "process": 7, "count": count}
        (self.folder / ".holder").write_text(json.dumps(note))

    return write


def test_run_that_died_on_another_host_is_taken_over_when_its_count_stands_still(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", 0.3)
    (tmp_path / ".holder").write_text(json.dumps({"host": "alpha", "process": 7, "count": 3}))
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    assert "alpha" not in lock.holder()
    lock.release()


def test_holder_counts_while_it_lives(tmp_path):
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    wait_for(lambda: counted(tmp_path) > 2)
    lock.release()
    with FileLock(tmp_path / ".lock", timeout=0):
        pass


def counted(folder) -> int:
    try:
        return json.loads((folder / ".holder").read_text())["count"]
    except ValueError:  # read in the middle of a write
        return 0


def test_note_that_is_being_written_is_read_again(tmp_path, monkeypatch):
    """Another host has emptied its note to write the next count."""
    monkeypatch.setattr(folder_lock, "COUNT_SECONDS", 10.0)
    (tmp_path / ".holder").touch()
    lock, slept = FolderLock(tmp_path), []

    def sleep(seconds):
        slept.append(seconds)
        (tmp_path / ".holder").write_text(json.dumps({"host": "alpha", "process": 7, "count": len(slept)}))

    monkeypatch.setattr(folder_lock.time, "sleep", sleep)
    assert not lock.acquire()
    assert "process 7 on alpha" in lock.holder()
