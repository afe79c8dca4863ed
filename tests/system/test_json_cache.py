"""Results that several processes add at the same time all stay."""

from __future__ import annotations

import threading

from fxtune.system.files.atomic_files import add_cached, json_or_empty


def test_results_that_are_added_at_the_same_time_all_stay(tmp_path):
    file, start = tmp_path / "folder" / "times.json", threading.Barrier(4)

    def add(number: int) -> None:
        start.wait()
        for index in range(25):
            add_cached(file, {f"{number} {index}": [number, index]})

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json_or_empty(file) == {f"{number} {index}": [number, index] for number in range(4) for index in range(25)}


def test_a_damaged_file_is_empty_and_is_written_anew(tmp_path):
    file = tmp_path / "times.json"
    for content in ("[1, 2]", "{", ""):
        file.write_text(content)
        assert json_or_empty(file) == {}
    add_cached(file, {"a": 1})
    assert json_or_empty(file) == {"a": 1}
    (tmp_path / "folder.json").mkdir()
    add_cached(tmp_path / "folder.json", {"a": 1})
    assert json_or_empty(tmp_path / "folder.json") == {}
