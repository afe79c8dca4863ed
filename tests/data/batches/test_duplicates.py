"""data.dedup: what counts as a copy, that none leaks into the held-out rows, and the report about them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import processors
from support.rows import write_jsonl
from support.tables import table, training

from fxtune.data.batches.build import plan_evaluation, plan_training, prepare_data
from fxtune.data.batches.duplicates import SHINGLE, find_duplicates, first_copies
from fxtune.data.config import DataConfig, Dedup, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.models.kinds.image_decoder.families import concatenated
from fxtune.models.load import ModelConfig, load_tokenizer


def document(draw: random.Random, length: int = 60) -> list[int]:
    return [draw.randrange(1, 30_000) for _ in range(length)]


def edited(draw: random.Random, tokens: list[int], changes: int) -> list[int]:
    tokens = list(tokens)
    for at in draw.sample(range(len(tokens)), changes):
        tokens[at] = draw.randrange(30_000, 60_000)
    return tokens


def of(documents: list[list[int]], name: str = "table"):
    return table([(tokens, [True] * len(tokens)) for tokens in documents], name)


def runs(tokens: list[int]) -> set[tuple[int, ...]]:
    size = min(SHINGLE, len(tokens))
    return {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}


def similarity(one: list[int], other: list[int]) -> float:
    a, b = runs(one), runs(other)
    return len(a & b) / len(a | b)


@pytest.fixture
def near(tmp_path) -> DataConfig:
    return DataConfig(dedup=Dedup.near, cache_dir=str(tmp_path))


def test_near_copies_are_those_of_all_pairs(near):
    """Against the same rule by all pairs: a document is left out if it is like an earlier one that is kept."""
    draw = random.Random(0)
    documents = []
    for _ in range(40):
        original = document(draw, draw.randrange(3, 300))
        documents += [original, *(edited(draw, original, min(n, len(original))) for n in (0, 1, 2, 3))]
    draw.shuffle(documents)
    first, second = of(documents[:120], "a"), of(documents[120:], "b")
    kept: list[list[int]] = []
    expected = {}
    for at, tokens in enumerate(documents):
        found = next((one for one in kept if similarity(one, tokens) >= 0.8), None)
        if found is None:
            kept.append(tokens)
        elif found != tokens:
            expected[int((first.digests.tolist() + second.digests.tolist())[at])] = found
    found = find_duplicates([first, second], [], near)
    assert 20 < len(expected) < 120
    assert set(found.near.tolist()) == set(expected)
    assert (np.diff(found.near.astype(object)) > 0).all()


def test_held_out_sources_are_never_left_out_and_what_is_like_them_is(near):
    draw = random.Random(1)
    held = [document(draw) for _ in range(5)]
    alike = [edited(draw, tokens, 1) for tokens in held]
    trained, own = of([*alike, held[0], document(draw)], "train"), of([*held, edited(draw, held[0], 1)], "held")
    found = find_duplicates([trained], [own], near)
    assert set(found.near.tolist()) == set(trained.digests[:5].tolist())
    assert set(found.like.tolist()) == set(own.digests[:5].tolist())


def test_a_system_prompt_that_many_share_makes_no_copies(near):
    draw = random.Random(2)
    prompt = document(draw, 400)
    documents = [[*prompt, *document(draw, 100)] for _ in range(60)]
    documents.append(edited(draw, documents[7][400:], 1))
    documents[-1] = [*prompt, *documents[-1]]
    found = find_duplicates([of(documents)], [], near)
    assert found.near.tolist() == [int(of(documents).digests[-1])]


def test_first_copies_of_documents_and_of_pieces():
    draw = random.Random(3)
    a, b, c = (document(draw, 5) for _ in range(3))
    plain = of([a, b, a, c, b])
    assert first_copies(plain, np.zeros(0, np.uint64)).tolist() == [True, True, False, True, False]
    assert first_copies(plain, plain.digests[3:4]).tolist() == [True, True, False, False, False]
    pieces = of([a, a, a, a, b, c, c])  # of the chats a (two pieces), a, b, c, c
    pieces.whole = of([a, a, b, c, c])
    assert first_copies(pieces, np.zeros(0, np.uint64)).tolist() == [True, True, False, False, True, True, False]


@pytest.mark.parametrize("packing", [True, False])
def test_no_near_copy_of_a_held_out_document_is_trained_on(near, packing):
    draw = random.Random(4)
    originals = [document(draw) for _ in range(60)]
    documents = [tokens for one in originals for tokens in (one, one, edited(draw, one, 1))]
    data = of(documents)
    near.sources, near.eval_fraction, near.packing = [SourceConfig(path="x")], 0.3, packing
    found = find_duplicates([data], [], near).near

    def used(plan) -> list[int]:
        return [
            row for s in range(plan.steps) for m in range(plan.micro_batches(s)) for _, row in plan.documents(s, m)
        ]

    kept = training([data], micro=2, step=4, packing=packing, eval_fraction=0.3)
    held = plan_evaluation([data], near, micro_batch_size=2, shares=[0.3], near_copies=found)
    leaks = sum(similarity(documents[a], documents[b]) >= 0.8 for a in used(kept) for b in used(held))
    assert leaks > 0  # without data.dedup
    kept = plan_training([data], near, micro_batch_size=2, global_batch_size=4, near_copies=found)
    assert not any(similarity(documents[a], documents[b]) >= 0.8 for a in used(kept) for b in used(held))
    assert len(used(kept)) + len(used(held)) == len(set(used(kept)) | set(used(held))) == 60
    assert kept.fingerprint != training([data], micro=2, step=4, packing=packing, eval_fraction=0.3).fingerprint


def test_report_names_files_and_lines_and_the_result_is_cached(tmp_path, capsys):
    draw = random.Random(5)
    words = [
        f"{first}{second}" for first in ["lamp", "table", "chair", "plate", "order"] for second in ["", "red", "blue"]
    ]

    def row(text: str) -> str:
        return json.dumps({"prompt": "Say it.", "completion": text}) + "\n"

    texts = [" ".join(draw.choices(words, k=60)) for _ in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(map(row, [*texts, texts[2]])))
    (tmp_path / "b.jsonl").write_text("\n" + "".join(map(row, [texts[5] + " now", texts[0], "no other is like this"])))
    tokenizer = load_tokenizer(ModelConfig())

    def prepare(dedup: Dedup):
        sources = [SourceConfig(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")]
        data = DataConfig(sources=sources, dedup=dedup, cache_dir=str(tmp_path / "cache"), sequence_length=1024)
        return prepare_data(data, tokenizer, micro_batch_size=1, global_batch_size=2)

    prepared = prepare(Dedup.near)
    said = capsys.readouterr().out
    assert (
        f"leaves out 1 of 9 documents, 1 copies and 0 near-copies (similarity of 0.8 or more): {tmp_path}/a.jsonl:9 of"
        in said
    )
    assert f"{tmp_path}/b.jsonl:2 of {tmp_path}/a.jsonl:6" in said
    assert f"{tmp_path}/b.jsonl:3 of {tmp_path}/a.jsonl:1" in said
    assert prepared.training.summary()["documents"] == 9
    (file,) = Path(tmp_path / "cache" / "duplicates").iterdir()
    stamp = file.stat().st_mtime_ns
    again = prepare(Dedup.near)
    assert again.training.fingerprint == prepared.training.fingerprint
    assert file.stat().st_mtime_ns == stamp
    file.write_bytes(b"damaged")
    assert prepare(Dedup.near).training.fingerprint == prepared.training.fingerprint
    assert prepare(Dedup.exact).training.summary()["documents"] == 10
    assert prepare(Dedup.off).training.summary()["documents"] == 12


def test_documents_with_different_images_are_never_near_copies(tmp_path):
    """Twenty rows with one question: ten pictures, each with two answers that differ in a word of many."""
    rows = []
    for number in range(20):
        Image.new("RGB", (30, 30), (25 * (number // 2), 0, 0)).save(tmp_path / f"{number}.png")
        answer = {
            "role": "assistant",
            "content": "It is the same answer in all of these rows, " * 3 + "ab"[number % 2],
        }
        rows.append({"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": [f"{number}.png"]})
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = DataConfig(
        sources=[SourceConfig(path=str(path))], dedup=Dedup.near, eval_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )
    images = ImageProcessor(processors.processor("llava", tmp_path / "model"), concatenated)
    prepared = prepare_data(
        data, processors.tokenizer("llava"), micro_batch_size=1, global_batch_size=1, progress=False, images=images
    )
    used = {index for step in range(prepared.training.steps) for _, index in prepared.training.documents(step, 0)}
    assert used == set(range(0, 20, 2))
    assert prepared.training.summary()["documents"] == 10
