"""Datasets of the hub without a network, from the cache of `datasets`, and saved to disk."""

import json
import shutil
from pathlib import Path

import pytest
from support.rows import CHATS, write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_unreachable_hub_is_one_error_without_retries(monkeypatch):
    """`datasets` is called in its offline mode, in which it does not retry for half a minute for each file."""
    import datasets

    modes = []
    load_dataset = datasets.load_dataset

    def load(*args, **options):
        modes.append(datasets.config.HF_HUB_OFFLINE)
        return load_dataset(*args, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for offline in (True, False):  # without the flag, the port below refuses the connection
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(DataError, match=r"nobody/nothing-here.*hub cannot be reached.*hf download") as caught:
            open_source(SourceConfig(path="nobody/nothing-here"))
        assert "HF_HUB_OFFLINE" in str(caught.value)
        assert datasets.config.HF_HUB_OFFLINE is offline
    assert modes == [True, True]


def test_offline_cache_serves_the_requested_revision(tmp_path, monkeypatch):
    """The cache has the layout that `datasets` leaves after a download."""
    import datasets

    made = datasets.load_dataset(
        "json",
        data_files=str(write_jsonl(tmp_path / "a.jsonl", CHATS)),
        cache_dir=str(tmp_path / "made"),
        split="train",
    )
    commit = "ab" * 20
    folder = tmp_path / "cache" / "nobody___thing" / "default" / "0.0.0" / commit
    shutil.copytree(Path(made.cache_files[0]["filename"]).parent, folder)
    (folder / "json-train.arrow").rename(folder / "thing-train.arrow")
    info = json.loads((folder / "dataset_info.json").read_text())
    info |= {"builder_name": "parquet", "dataset_name": "thing", "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def load(**config):
        return open_source(SourceConfig(path="nobody/thing", **config), tmp_path / "cache")

    for revision in (None, "main", commit):
        source = load(revision=revision, limit=3)
        assert [row.value for row in source.rows()] == CHATS[:3]
    assert next(source.rows()).where == "nobody/thing row 1"
    assert source.format() is FORMATS["messages"]
    for revision in ("cd" * 20, "v1"):
        with pytest.raises(DataError, match=f"HF_HUB_OFFLINE is set; .* revision {revision}"):
            load(revision=revision)
    with pytest.raises(DataError, match=r"Unknown split .*train"):
        load(split="test")
    with pytest.raises(DataError, match="config 'odd'"):
        load(subset="odd")


def test_saved_dataset_dict_gives_the_requested_split(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(CHATS), test=Dataset.from_list(CHATS[:1])).save_to_disk(tmp_path / "saved")
    for split, count in (("train", len(CHATS)), ("test", 1)):
        assert len(list(open_source(SourceConfig(path=str(tmp_path / "saved"), split=split)).rows())) == count
    with pytest.raises(DataError, match=r"no split 'validation'\..*: test, train\."):
        open_source(SourceConfig(path=str(tmp_path / "saved"), split="validation"))


def test_saved_dataset_is_read(tmp_path):
    from datasets import Dataset

    Dataset.from_list(CHATS).save_to_disk(tmp_path / "saved")
    source = open_source(SourceConfig(path=str(tmp_path / "saved"), limit=5))
    assert [row.value for row in source.rows()] == CHATS[:5]
    assert next(source.rows()).where.endswith("saved row 1")
    assert source.content_key() == open_source(SourceConfig(path=str(tmp_path / "saved"), limit=5)).content_key()
