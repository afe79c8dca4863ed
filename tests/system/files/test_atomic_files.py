"""Files are written completely or not at all, with their digest, and damage is found."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fxtune.system.files.atomic_files import (
    DTYPES,
    FileDigest,
    find_damage,
    replace_folder,
    replace_text,
    replacing,
    write_tensors,
    write_text,
)

TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
    max_size=5,
)


@settings(max_examples=60)
@given(TENSORS)
def test_written_tensors_are_read_back_by_safetensors(tmp_path_factory, shapes):
    file = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in shapes.items() if name != "__metadata__"
    }
    digest = write_tensors(file, tensors)
    assert digest.bytes == file.stat().st_size
    assert digest.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())


def test_failed_replacement_keeps_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "a.json"
    replace_text(file, "old")

    def interrupted() -> None:
        with replacing(file) as out:
            out.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "old"
    replace_text(file, "new", shared=True)
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("existing", ["nothing", "a folder", "a link"])
def test_folder_takes_the_place_of_what_was_there(tmp_path, existing):
    staging, final, elsewhere = tmp_path / "staging", tmp_path / "final", tmp_path / "elsewhere"
    for folder in (staging, elsewhere):
        folder.mkdir()
        (folder / folder.name).touch()
    if existing == "a folder":
        final.mkdir()
    elif existing == "a link":
        final.symlink_to(elsewhere)
    replace_folder(staging, final, tmp_path / "backup")
    assert [path.name for path in final.iterdir()] == ["staging"]
    assert not final.is_symlink()
    assert (elsewhere / "elsewhere").exists()
    assert not (tmp_path / "backup").exists()


def test_damage_tells_lost_files_from_unreadable_ones(tmp_path):
    file = tmp_path / "a"
    digest = write_text(file, "text")
    assert digest == FileDigest(hashlib.sha256(b"text").hexdigest(), 4)
    assert find_damage(file, digest) is None
    file.write_text("test")
    assert find_damage(file, digest).lost
    file.write_text("longer")
    assert find_damage(file, digest).lost
    file.unlink()
    assert find_damage(file, digest).lost
    os.mkfifo(file)
    assert not find_damage(file, digest).lost
    assert "no plain file" in find_damage(file, digest).reason
