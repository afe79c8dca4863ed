"""From files with rows to micro-batches with the tensors of their images."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import image_models
from support.processors import FAMILIES, image_ids, processor, write_picture_rows

from fxtune.data.batches.batch_images import image_bytes
from fxtune.data.batches.build import plan_training
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.shared_prompts import shared_tokens
from fxtune.data.config import DataConfig, OnBadRow, OnLong, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read import row as row_limits
from fxtune.data.read import sources
from fxtune.data.tokenized import tokenize as tokenizing
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError
from fxtune.models.kinds.image_decoder.families import concatenated
from fxtune.models.kinds.known import images_of

COLORS = ("red", "lime", "blue", "white")
CPU = torch.device("cpu")


def write_rows(folder: Path, rows: list[dict[str, Any]], grows: int = 28) -> Path:
    """`grows`: how much wider each picture is than the one before it."""
    folder.mkdir(exist_ok=True)
    for number, color in enumerate(COLORS):
        Image.new("RGB", (56 + grows * number, 56), color).save(folder / f"{color}.png")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(*colors: str, answer: str = "yes") -> dict[str, Any]:
    marks = "<image>" * len(colors)
    turns = [{"role": "user", "content": f"{marks}What?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **({"images": [f"{color}.png" for color in colors]} if colors else {})}


ROWS = [row("red"), row(answer="none"), row("lime", "blue"), row("white"), row(answer="no image"), row("blue")]


@pytest.fixture(params=[family for family in FAMILIES if family != "idefics3"])  # the kind of model merges its tensors
def images(request, tmp_path) -> ImageProcessor:
    return ImageProcessor(processor(request.param, tmp_path / "model"), concatenated)


@pytest.fixture
def qwen(tmp_path) -> ImageProcessor:
    return ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)


def data_config(path: Path, **options: Any) -> DataConfig:
    options = {"sequence_length": 200, **options}
    return DataConfig([SourceConfig(str(path))], cache_dir=str(path.parent / "cache"), workers=1, **options)


def table_of(images: ImageProcessor, path: Path, **options: Any) -> TokenTable:
    data = data_config(path, **options)
    return tokenize(data.sources[0], data, images.processor.tokenizer, progress=False, images=images)


def plan_of(images: ImageProcessor, path: Path, micro_batch_size: int = 2, **options: Any) -> Any:
    data = data_config(path, **options)
    tables = [tokenize(data.sources[0], data, images.processor.tokenizer, progress=False, images=images)]
    return plan_training(tables, data, micro_batch_size=micro_batch_size, global_batch_size=2, epochs=2.0)


def colors_of(table: TokenTable, start: int, length: int) -> list[str]:
    return [Path(image.image.path).stem for image in table.placed_images(start, length)]


def by_hand(images: ImageProcessor, folder: Path, documents: list[list[str]]) -> dict[str, torch.Tensor]:
    """The tensors of documents with images of these colours, by transformers' processor."""
    pictures = [[Image.open(folder / f"{color}.png").convert("RGB") for color in colors] for colors in documents]
    return images.merge([images.tensors(own) for own in pictures if own])


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_has_the_images_of_its_documents_in_order(tmp_path, images, packing):
    path = write_rows(tmp_path / "data", ROWS)
    plan = plan_of(images, path, packing=packing)
    seen = 0
    for step in range(plan.steps):
        for micro in range(plan.micro_batches(step)):
            batch, rows = plan.batch(step, micro), plan.contents(step, micro)
            table = plan.tables[0]
            documents = [
                colors_of(table, int(table.offsets[piece.document]) + piece.first, piece.length)
                for contents in rows
                for piece in contents
            ]
            if not any(documents):
                assert batch.images is None
                continue
            expected = by_hand(images, path.parent, documents)
            assert batch.images.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(batch.images[name], tensor)
            own = {token for color in COLORS for token in image_ids(images, 56, 56 + 28 * COLORS.index(color))}
            assert not set(batch.labels.tolist()) & own
            seen += len([colors for colors in documents if colors])
    assert seen >= 8


def test_workers_deliver_the_same_batches_or_name_an_image_that_is_gone(tmp_path, qwen):
    path = write_rows(tmp_path / "data", ROWS)
    plan = plan_of(qwen, path)
    loaders = [Loader(plan, LoaderConfig(num_workers=workers), CPU) for workers in (0, 2)]
    try:
        for loader in loaders:
            for step in loader.steps(start_step=1):
                for micro, batch in enumerate(step.micro_batches):
                    own = plan.batch(step.index, micro)
                    assert torch.equal(batch.input_ids, own.input_ids)
                    assert (batch.images is None) == (own.images is None)
                    for name, tensor in (own.images or {}).items():
                        assert torch.equal(batch.images[name], tensor)
        (path.parent / "blue.png").unlink()
        for loader in loaders:
            with pytest.raises(DataError, match=r"blue\.png: there is no such file") as raised:
                [list(step.micro_batches) for step in loader.steps()]
            assert "Traceback" not in str(raised.value)
    finally:
        for loader in loaders:
            loader.close()


def test_the_table_is_cached_until_an_image_changes(tmp_path, qwen, capsys):
    path = write_rows(tmp_path / "data", ROWS)
    first = table_of(qwen, path)
    built = (first.folder / "table.json").stat().st_ino
    assert (table_of(qwen, path).folder / "table.json").stat().st_ino == built
    Image.new("RGB", (56, 112), "red").save(path.parent / "red.png")
    second = table_of(qwen, path)
    assert second.folder == first.folder
    assert second.fingerprint != first.fingerprint
    assert (second.folder / "table.json").stat().st_ino != built
    assert second.placed_images(0, 200)[0].image.size == (112, 56)


def test_the_table_depends_on_the_processor_and_the_folder(tmp_path, qwen):
    path = write_rows(tmp_path / "data", ROWS)
    first = table_of(qwen, path)
    (tmp_path / "copy").mkdir()
    copy = write_rows(tmp_path / "copy", ROWS)
    other = tokenize(SourceConfig(str(copy)), data_config(path), qwen.processor.tokenizer, progress=False, images=qwen)
    assert other.folder != first.folder
    assert other.fingerprint == first.fingerprint
    qwen.processor.image_processor.size = {"shortest_edge": 784, "longest_edge": 4 * 784}
    assert table_of(ImageProcessor(qwen.processor, qwen.merge), path).folder != first.folder


def test_documents_with_other_images_are_no_copies(tmp_path, qwen):
    table = table_of(qwen, write_rows(tmp_path, [row("red"), row("blue"), row("red")], grows=0))
    first, second, _ = np.split(table.ids, table.offsets[1:-1])
    assert first.tolist() == second.tolist()
    assert table.digests[0] == table.digests[2] != table.digests[1]


def test_bytes_lie_beside_the_table(tmp_path, qwen):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Feature

    path = write_rows(tmp_path / "data", ROWS)
    pictures = [[f"{color}.png" for color in colors] for colors in (["red"], [], ["lime", "blue"])]
    content = [[{"bytes": (path.parent / name).read_bytes(), "path": None} for name in names] for names in pictures]
    chats = [
        [{"role": turn["role"], "content": turn["content"]} for turn in ROWS[index]["messages"]] for index in range(3)
    ]
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"messages": List(turn), "images": List(Feature(decode=False))})
    made = Dataset.from_dict({"messages": chats, "images": content}, features)
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    expected = table_of(qwen, path)
    for source in (tmp_path / "rows.parquet", tmp_path / "saved"):
        table = pickle.loads(pickle.dumps(table_of(qwen, source)))
        assert table.ids.tolist() == expected.ids[: len(table.ids)].tolist()
        assert [image.image.read() for image in table.placed_images(0, len(table.ids))] == [
            item["bytes"] for items in content for item in items
        ]
        assert table.image_processor is not None


def test_rows_with_bad_images_are_quarantined_with_file_and_line(tmp_path, qwen):
    rows = [row("red"), row("missing"), row("red", "blue")]
    rows[2]["images"].pop()
    path = write_rows(tmp_path / "data", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*missing\.png: there is no such file.*on_bad_row"):
        table_of(qwen, path)
    table = table_of(qwen, path, on_bad_row=OnBadRow.quarantine)
    assert len(table) == 1
    entries = list(table.read_bad_rows())
    assert [entry["where"].rpartition(":")[2] for entry in entries] == ["2", "3"]
    assert "1 image, and the messages have 2 places" in entries[1]["error"]


def test_a_row_never_begins_or_ends_inside_an_image(tmp_path, qwen):
    # An answer before the image, so that a cut document still teaches something.
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}, *row("white")["messages"]]
    path = write_rows(tmp_path / "data", [{"messages": turns, "images": ["white.png"]}, row("red")])
    (placed, *_) = table_of(qwen, path).placed_images(0, 200)
    for length in range(placed.start - 1, placed.start + placed.tokens + 2):
        plan = plan_of(qwen, path, sequence_length=length, on_long=OnLong.truncate, micro_batch_size=1)
        table = plan.tables[0]
        for step in range(plan.steps):
            spec = plan.batch_spec(step, 0)
            ids = plan.batch(step, 0).input_ids
            whole = sum(placed.tokens for at, size in zip(spec.start, spec.length, strict=True)
                        for placed in table.placed_images(int(at), int(size)))  # fmt: skip
            assert int((ids == qwen.placeholders["<|image_pad|>"]).sum()) == whole


def test_positions_of_several_axes(tmp_path):
    """Each document has its own, and a batch of text has the positions of its tokens on all axes."""

    def positions(ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.arange(len(ids)) * (axis + 2) + len(tensors["image_grid_thw"]) for axis in range(3)])

    images = ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated, rope_positions=positions)
    plan = plan_of(images, write_rows(tmp_path / "data", ROWS))
    for step in range(plan.steps):
        batch, spec = plan.batch(step, 0), plan.batch_spec(step, 0)
        assert batch.rope_positions.shape == (3, *batch.input_ids.shape)
        for at in range(len(spec.offsets) - 1):
            column = 0
            for document in range(spec.offsets[at], spec.offsets[at + 1]):
                start, length = int(spec.start[document]), int(spec.length[document])
                count = len(plan.tables[0].images_in(start, length))
                for axis in range(3):
                    own = batch.rope_positions[axis, at, column : column + length]
                    expected = np.arange(length) * (axis + 2) + count if count else np.arange(length)
                    assert own.tolist() == expected.tolist()
                column += length


def test_pairs_share_their_prompt_with_its_images(tmp_path, qwen):
    pairs = [
        {"prompt": [{"role": "user", "content": "<image>What?"}], "chosen": [{"role": "assistant", "content": word}],
         "rejected": [{"role": "assistant", "content": "other"}], "images": [f"{color}.png"]}
        for color, word in (("red", "one"), ("white", "two"))
    ]  # fmt: skip
    path = write_rows(tmp_path / "data", pairs)
    plan = plan_of(qwen, path)
    assert plan.tables[0].images is not None
    assert (shared_tokens(plan.tables[0])[1::2] > 0).all()
    batch = plan.batch(0, 0)
    grids = batch.images["image_grid_thw"].prod(1).tolist()
    count = int((batch.input_ids == qwen.placeholders["<|image_pad|>"]).sum())
    assert count == sum(grids) // 4


def test_documents_of_a_group_with_other_images_share_nothing_of_them(tmp_path, qwen):
    group = {"documents": [row("red", "blue"), row("red", "lime")], "labels": [1, 0]}
    table = table_of(qwen, write_rows(tmp_path, [group], grows=0))
    second = table.placed_images(int(table.offsets[1]), int(table.offsets[2] - table.offsets[1]))[1]
    assert 0 < shared_tokens(table)[1] <= second.start


def test_the_size_of_the_images_of_a_batch_is_known_before_any_is_decoded(tmp_path, images):
    path = write_rows(tmp_path / "data", ROWS)
    plan = plan_of(images, path)
    for step in range(plan.steps):
        spec, found = plan.batch_spec(step, 0), plan.batch(step, 0).images
        expected = sum(tensor.nbytes for tensor in (found or {}).values())
        assert image_bytes(plan.tables, spec.source, spec.start, spec.length) == expected


def test_batches_that_are_ready_take_a_share_of_the_memory():
    config = LoaderConfig(num_workers=8, prefetch_factor=4)
    plenty = 1 << 40
    assert config.bounded(0, 0, 0) == config
    assert config.bounded(100, plenty, plenty) == config
    for size, free, shared in (
        (100, 12_800, plenty),
        (100, plenty, 6_400),
        (100, 6_400, plenty),
        (100, 1_700, plenty),
    ):
        bounded = config.bounded(size, free, shared)
        ready = bounded.num_workers * bounded.prefetch_factor * size
        assert 0 < ready <= min(free / 4, shared / 2)
        assert bounded.num_workers == min(8, ready // size)
    # The main process builds batches that /dev/shm cannot hold.
    assert config.bounded(100, plenty, 100).num_workers == 0


def test_workers_take_the_rest_of_a_small_file_with_images(tmp_path, qwen, monkeypatch):
    """The workers are one here, in this process."""
    path = write_rows(tmp_path / "data", ROWS * 4)
    expected = table_of(qwen, path)
    assert path.stat().st_size < tokenizing.IN_PROCESS_BYTES
    shards = []

    def one_worker(setup, argument, tasks, processes):
        work = setup(argument)
        for task in tasks:
            shards.append(task)
            yield work(task)

    monkeypatch.setattr(sources, "SHARD_BYTES_WITH_IMAGES", 1000)
    monkeypatch.setattr(tokenizing, "map_in_order", one_worker)
    for seconds, handed_over in ((0.0, True), (600.0, False)):
        monkeypatch.setattr(tokenizing, "IN_PROCESS_SECONDS", seconds)
        data = replace(data_config(path), cache_dir=str(tmp_path / f"after {seconds}"), workers=2)
        shards.clear()
        found = tokenize(data.sources[0], data, qwen.processor.tokenizer, progress=False, images=qwen)
        assert found.fingerprint == expected.fingerprint
        assert bool(shards) == handed_over
        rows = sum(1 for shard in shards for _ in shard.rows())
        assert rows < len(found), "the first rows are tokenized in this process"


def test_images_in_a_row_may_be_larger_than_its_text(tmp_path, qwen, monkeypatch):
    from datasets import Dataset

    noise = Image.effect_noise((90, 90), 80)
    pictures = []
    for number in range(3):
        noise.save(file := tmp_path / f"{number}.png")
        pictures.append(file.read_bytes())
    monkeypatch.setattr(row_limits, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(row_limits, "MAX_ROW_BYTES_WITH_IMAGES", 50_000)
    content = [*pictures[:2], b"x" * 60_000]
    uris = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in content]
    rows = [row("red") | {"images": [uri]} for uri in uris]
    rows.append(row("red", answer="word " * 300))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in rows))
    Dataset.from_list(
        [{"messages": line["messages"], "images": [{"bytes": data, "path": None}]}
         for line, data in zip(rows, [*content, pictures[2]], strict=True)]
    ).to_parquet(tmp_path / "rows.parquet")  # fmt: skip
    for path in (lines, tmp_path / "rows.parquet"):
        table = table_of(qwen, path, on_bad_row=OnBadRow.quarantine, sequence_length=4000)
        assert len(table) == 2
        reasons = [entry["error"] for entry in table.read_bad_rows()]
        assert len(reasons) == 2
        assert "with its images" in reasons[0]
        assert "text alone" in reasons[1]


MARKS = {"qwen2_5_vl": 0, "gemma3": 2, "internvl": 2}
"""Tokens around the features of an image."""


def plan_of_pictures(family, folder):
    images = ImageProcessor(processor(family, folder / "model"), concatenated)
    data = data_config(write_picture_rows(folder / "data"), sequence_length=400)
    table = tokenize(data.sources[0], data, images.processor.tokenizer, progress=False, images=images)
    return plan_training([table], data, micro_batch_size=1, global_batch_size=4, epochs=1.0)


@pytest.mark.parametrize("family", MARKS)
def test_the_images_of_a_step_are_those_of_its_batches(family, tmp_path):
    plan = plan_of_pictures(family, tmp_path)
    table, config = plan.tables[0], image_models.config(family)
    token = table.image_processor.feature_token
    shape = images_of(config).shape(config)
    steps = [plan.images(step) for step in range(plan.steps)]
    assert sum(map(len, steps)) == len(table.images) == 36
    for step, images in enumerate(steps):
        batches = [plan.batch(step, micro) for micro in range(plan.micro_batches(step))]
        assert images.features.sum() == sum(int((batch.input_ids == token).sum()) for batch in batches)
        tensors = [batch.images for batch in batches if batch.images is not None]
        work = shape.work(images.features, images.heights, images.widths)
        if family == "qwen2_5_vl":
            assert work.patches == sum(int(found["image_grid_thw"].prod(-1).sum()) for found in tensors)
        else:
            assert work.features == 4 * sum(len(found["pixel_values"]) for found in tensors)
    features, heights, widths = table.image_sizes(np.arange(36))
    assert (heights[0], widths[0]) == table.image(0).size
    assert set(table.images["tokens"] - features) == {MARKS[family]}
