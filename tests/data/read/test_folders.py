"""Subsets and splits of a folder: the rows that `datasets.load_dataset` reads, or one error."""

import random
from itertools import pairwise

import pytest
from support.rows import values, write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError

CONFIGS = """
- config_name: a
  data_files:
  - split: train
    path: a/part-*.jsonl
  - split: test
    path: [a/held.jsonl, more/**/*.jsonl]
- config_name: b
  data_files: b/*.jsonl
- config_name: c
  data_dir: c
"""
FILES = [
    *("a/part-1.jsonl", "a/part-0.jsonl", "a/held.jsonl", "more/x/deep/1.jsonl", "more/0.jsonl", "b/test.jsonl"),
    *("c/train/1.jsonl", "c/dev/1.jsonl", "stray.jsonl"),
]
BOMB = "a: &a [lol]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijkl"))
BOMB += "configs: [{config_name: *l}]"
SHAPES = {
    "files": (["train.jsonl", "test.jsonl", "extra.jsonl"], None),
    "shards": (["data/train-00001-of-00002.jsonl", "data/train-00000-of-00002.jsonl", "data/odd-00000-of-00001.jsonl",
                "data/valid.jsonl", "train.jsonl"], None),
    "folders": (["data/train/a.jsonl", "data/train/b/c.jsonl", "data/my-val/x.jsonl", "data/test.jsonl"], None),
    "keywords": (["my_training.v1.jsonl", "dev-1.jsonl", "eval.jsonl", "validate.jsonl", "Test.jsonl"], None),
    "no keyword": (["b/1.jsonl", "a/1.jsonl", "contest.jsonl", "a-b/1.jsonl"], None),
    "both": (["train_test.jsonl", "rest.jsonl"], None),
    "one test": (["test.jsonl"], None),
    "special and hidden": (["__old/train.jsonl", ".old/test.jsonl", "a.jsonl"], None),
    "one config": (["a.jsonl", "test.jsonl"], "configs:\n- {config_name: x, data_files: '*.jsonl'}"),
    "list": (["a.jsonl", "b.jsonl", "c.jsonl"], "configs:\n- {config_name: x, data_files: [c.jsonl, a.jsonl]}"),
    "default by name": (FILES, f"configs:{CONFIGS.replace('name: b', 'name: default')}"),
    "default by key": (FILES, f"configs:{CONFIGS}  default: true"),
    "default by info": (
        FILES, f"configs:{CONFIGS}dataset_info:\n  config_name: a\n  features:\n  - {{name: text, dtype: string}}",
    ),
    "info alone": (["train.jsonl", "test.jsonl"], "dataset_info:\n  features:\n  - {name: text, dtype: string}"),
    "data_dir and files": (["d/a.jsonl", "a.jsonl"], "configs:\n- {config_name: x, data_dir: d, data_files: a.jsonl}"),
    "other splits": (
        ["a.jsonl", "b.jsonl"], "configs:\n- {config_name: x, data_files: [{split: train_sft, path: ./a.jsonl}]}",
    ),
    "special on demand": (["__x/a.jsonl", "b.jsonl"], "configs:\n- {config_name: x, data_files: '__x/*'}"),
}  # fmt: skip


def write_folder(folder, names, front_matter=None):
    for name in names:
        write_jsonl(folder / name, [{"text": name}])
    if front_matter is not None:
        (folder / "README.md").write_text(f"---\nlicense: mit\n{front_matter}\n---\n# A card\n")
    return folder


def read_by_datasets(folder, cache, subset=None):
    """The text of the rows of each split."""
    from datasets import load_dataset

    found = load_dataset(str(folder), subset, cache_dir=str(cache))
    return {str(split): rows["text"][:] for split, rows in found.items()}


def require_same(folder, cache, subset=None):
    expected = read_by_datasets(folder, cache, subset)
    for split in {*expected, "train", "validation", "test"}:
        if split in expected:
            assert [row["text"] for row in values(folder, split=split, subset=subset)] == expected[split], split
        else:
            with pytest.raises(DataError, match=rf"has no split '{split}'\..*{', '.join(expected)}|is one file"):
                open_source(SourceConfig(str(folder), split=split, subset=subset))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_is_read_as_by_the_datasets_library(shape, tmp_path):
    require_same(write_folder(tmp_path / "set", *SHAPES[shape]), tmp_path / "cache")


@pytest.mark.parametrize("subset", ["a", "b", "c"])
def test_a_subset_is_read_as_by_the_datasets_library(subset, tmp_path):
    require_same(write_folder(tmp_path / "set", FILES, f"configs:{CONFIGS}"), tmp_path / "cache", subset)


def test_folders_of_any_names_are_read_as_by_the_datasets_library(tmp_path):
    from datasets import load_dataset_builder

    draw = random.Random(0)
    words = ["train", "test", "dev", "val", "evaluation", "data", "a", "contest", "data", "x"]
    for number in range(30):
        names = set()
        for _ in range(draw.randint(1, 5)):
            parts = [
                draw.choice("-_. ").join(draw.choices(words, k=draw.randint(1, 2))) for _ in range(draw.randint(1, 3))
            ]
            shard = draw.choice(["", "", f"-0000{draw.randint(0, 2)}-of-00003"])
            names.add("/".join(parts) + shard + ".jsonl")
        names = {name for name in names if not any(other.startswith(name + "/") for other in names)}
        folder = write_folder(tmp_path / str(number), names)
        try:
            files = load_dataset_builder(str(folder), cache_dir=str(tmp_path / "cache")).config.data_files
        except ValueError:  # shards of a split such as my-set, which datasets cannot read
            continue
        for split, paths in files.items():
            expected = list(dict.fromkeys(path.removeprefix(f"{folder}/") for path in paths))
            assert [row["text"] for row in values(folder, split=str(split))] == expected, (names, split)


def test_what_is_left_out_is_said_in_one_line(tmp_path):
    folder = write_folder(tmp_path / "files", *SHAPES["files"])
    assert open_source(SourceConfig(str(folder))).remark == (
        "split train is 1 of 3 files: train.jsonl. Left out: split test (1 file), extra.jsonl"
    )
    assert "Left out: extra.jsonl" in open_source(SourceConfig(str(folder), split="train+test")).remark
    folder = write_folder(tmp_path / "subsets", FILES, f"configs:{CONFIGS}  sep: '|'")
    assert open_source(SourceConfig(str(folder), subset="c")).remark == (
        "split train of subset c is 1 of 9 files: c/train/1.jsonl. Left out: split validation (1 file), subset a, "
        "subset b; README.md sets sep for subset c, which fxtune does not read"
    )
    assert open_source(SourceConfig(str(write_folder(tmp_path / "all", ["a.jsonl", "b.jsonl"])))).remark == ""
    (tmp_path / "all" / "c.jsonl.zst").write_bytes(b"x")
    assert open_source(SourceConfig(str(tmp_path / "all"))).remark == "not unpacked and not read: c.jsonl.zst"


def test_a_subset_must_be_chosen_if_none_is_the_default(tmp_path):
    folder = write_folder(tmp_path / "set", FILES, f"configs:{CONFIGS}")
    with pytest.raises(DataError, match=r"several subsets, .*: a, b, c\. Set the source's subset .*subset=a"):
        open_source(SourceConfig(str(folder)))
    with pytest.raises(DataError, match=r"no subset 'd'\. .*: a, b, c\."):
        open_source(SourceConfig(str(folder), subset="d"))
    plain = write_folder(tmp_path / "plain", ["a.jsonl"])
    assert values(plain, subset="default") == values(plain)
    with pytest.raises(DataError, match=r"no subset 'd'\. .*: default\."):
        open_source(SourceConfig(str(plain), subset="d"))


@pytest.mark.parametrize(
    ("front_matter", "message"),
    [
        ("configs: 3", "`configs` is no list"),
        ("configs: [{data_files: a.jsonl}]", "config_name"),
        ("configs: [{config_name: x, data_files: 7}]", "is no path"),
        (
            "configs: [{config_name: x, data_files: [{split: train, path: [7]}]}]",
            "a value in `data_files` that is no path",
        ),
        ("configs: [{config_name: x, data_files: [{split: train}]}]", "list of split and path"),
        ("configs: [{config_name: x, data_files: [{split: t-1, path: a}]}]", "subset x names a split"),
        ("configs: [{config_name: x, data_files: b.jsonl}]", r"names b\.jsonl, which is no data file"),
        ("configs: [{config_name: x, data_files: '**.jsonl'}]", "stands for whole folders"),
        ("configs: [{config_name: x, default: 1}, {config_name: y, default: 1}]", "several default subsets: x, y"),
        (BOMB, "`configs` is no list of entries"),
        ("configs: [{", "front matter cannot be read"),
    ],
)
def test_a_wrong_card_is_one_error_with_its_name(front_matter, message, tmp_path):
    folder = write_folder(tmp_path / "set", ["a.jsonl"], front_matter)
    with pytest.raises(DataError, match=rf"README\.md.*{message}"):
        open_source(SourceConfig(str(folder)))
    assert values(folder / "*.jsonl") == [{"text": "a.jsonl"}]


@pytest.mark.parametrize("path", ["../secret.jsonl", "{folder}/../secret.jsonl", "https://example.org/a.jsonl"])
def test_a_card_cannot_name_files_outside_its_folder(path, tmp_path):
    write_jsonl(tmp_path / "secret.jsonl", [{"text": "secret"}])
    path = path.format(folder=tmp_path / "set")
    folder = write_folder(tmp_path / "set", ["a.jsonl"], f"configs: [{{config_name: x, data_files: '{path}'}}]")
    with pytest.raises(DataError, match="which is no data file of the folder"):
        open_source(SourceConfig(str(folder)))


def test_a_folder_may_have_any_name_and_a_script_beside_its_rows(tmp_path):
    folder = write_folder(tmp_path / "chats [v2]*", ["train.jsonl", "test.jsonl"])
    (folder / "chats [v2]*.py").write_text("raise SystemExit(9)")
    assert values(folder) == [{"text": "train.jsonl"}]


def test_documents_in_markdown_are_named_by_subjects(tmp_path):
    for name in ("guide.md", "testing.md", "training.md"):
        (tmp_path / name).write_text(name)
    assert len(values(tmp_path)) == 3


def test_tokens_follow_the_card(tmp_path):
    """The cache of tokens is found by the rows, so a file that moves from one split to another gives other tokens."""
    card = "configs: [{{config_name: x, data_files: [{{split: train, path: {}}}, {{split: test, path: {}}}]}}]"
    keys = set()
    for train, test in (("[a.jsonl, b.jsonl]", "[c.jsonl]"), ("[a.jsonl]", "[b.jsonl, c.jsonl]")):
        folder = write_folder(tmp_path / "set", ["a.jsonl", "b.jsonl", "c.jsonl"], card.format(train, test))
        for split in ("train", "train[-1:]+test"):
            keys.add(open_source(SourceConfig(str(folder), split=split)).content_key())
    assert len(keys) == 4
