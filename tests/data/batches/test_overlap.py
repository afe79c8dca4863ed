"""Rows that are trained on and held out are an error with their places; copies and uneven weights are reported."""

import json
import pickle

import pytest
from support import processors
from support.processors import write_picture_rows
from support.tables import natural, table, training

from fxtune.data.batches.build import prepare_data
from fxtune.data.config import DataConfig, OnBadRow, OnOverlap, QuestionsConfig, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.errors import DataError
from fxtune.models.kinds.image_decoder.families import concatenated
from fxtune.models.load import ModelConfig, load_tokenizer


def chat(number: int) -> dict:
    turns = [("user", f"What is {number}?"), ("assistant", f"It is {number}.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path, rows) -> SourceConfig:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return SourceConfig(path=str(path))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.fixture
def prepare(tmp_path, tokenizer):
    def call(**data):
        config = DataConfig(sequence_length=64, cache_dir=str(tmp_path / "cache"), **data)
        return prepare_data(config, tokenizer, micro_batch_size=4, global_batch_size=4, progress=False)

    return call


def test_a_split_that_both_sides_have_is_an_error_with_the_first_pairs(prepare, tmp_path):
    """The second source is Alpaca: the format of a row does not matter, only what the model sees."""
    alpaca = {"instruction": "What is 7?", "output": "It is 7."}
    one = write(tmp_path / "one.jsonl", ["", *map(chat, range(5))])
    two = write(tmp_path / "two.jsonl", ["broken", {"instruction": "Why?", "output": "So."}, alpaca])
    held = write(tmp_path / "held.jsonl", [chat(99), chat(3), "", chat(7)])
    with pytest.raises(DataError) as caught:
        prepare(sources=[one, two], eval_sources=[held], on_bad_row=OnBadRow.quarantine)
    said = str(caught.value)
    assert "2 rows of data.sources are held out as well" in said
    assert f"2 of 3 rows of data.eval_sources ({held.path})" in said
    assert f"held.jsonl:2 is {tmp_path}/one.jsonl:5" in said
    assert f"held.jsonl:4 is {tmp_path}/two.jsonl:3" in said
    assert "data.on_overlap=drop" in said


def test_the_same_file_on_both_sides_is_an_error_and_two_slices_are_none(prepare, tmp_path):
    path = write(tmp_path / "all.jsonl", map(chat, range(20))).path
    with pytest.raises(DataError, match=r"20 of 20 rows of data\.eval_sources .*, and 17 more"):
        prepare(sources=[SourceConfig(path)], eval_sources=[SourceConfig(path)])
    sides = prepare(
        sources=[SourceConfig(path, split="train[:80%]")], eval_sources=[SourceConfig(path, split="train[80%:]")]
    )
    assert (sides.training.summary()["documents"], sides.evaluation.summary()["documents"]) == (16, 4)


def test_questions_are_held_out_rows(prepare, tmp_path):
    one = write(tmp_path / "one.jsonl", map(chat, range(10)))
    asked = write(tmp_path / "asked.jsonl", [chat(4), chat(50)])
    with pytest.raises(DataError, match=r"1 of 2 rows of data\.questions .*asked\.jsonl:1 is \S+one\.jsonl:5"):
        prepare(sources=[one], questions=QuestionsConfig(path=asked.path))
    made = prepare(sources=[one], questions=QuestionsConfig(path=asked.path), on_overlap=OnOverlap.drop)
    assert made.training.summary()["documents"] == 9


def test_questions_with_the_text_and_the_image_of_a_row_are_held_out(tmp_path):
    words, one = processors.tokenizer("llava"), write_picture_rows(tmp_path / "pictures", 9)
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    for name in rows[1]["images"] + rows[4]["images"]:
        (tmp_path / name).write_bytes((tmp_path / "pictures" / name).read_bytes())
    (tmp_path / rows[4]["images"][0]).write_bytes((tmp_path / rows[1]["images"][0]).read_bytes())
    asked = write(tmp_path / "asked.jsonl", [rows[4], rows[1]])
    config = DataConfig(
        sources=[SourceConfig(path=str(one))],
        questions=QuestionsConfig(path=asked.path),
        cache_dir=str(tmp_path / "cache"),
    )
    images = ImageProcessor(processors.processor("llava", tmp_path / "model"), concatenated)
    with pytest.raises(DataError, match=r"1 of 2 rows of data\.questions .*asked\.jsonl:2 is \S+rows\.jsonl:2"):
        prepare_data(config, words, micro_batch_size=4, global_batch_size=4, progress=False, images=images)


def test_drop_trains_on_the_others_and_keep_on_all(prepare, tmp_path):
    one = write(tmp_path / "one.jsonl", map(chat, range(10)))
    held = write(tmp_path / "held.jsonl", map(chat, range(7, 13)))
    kept = prepare(sources=[one], eval_sources=[held], on_overlap=OnOverlap.keep).training
    made = prepare(sources=[one], eval_sources=[held], on_overlap=OnOverlap.drop).training
    assert kept.summary()["documents"] == 10
    assert made.summary()["documents"] == 7
    assert made.summary()["overlapping"] == 3
    assert any("3 documents are held out as well" in note for note in made.notes())
    learned = {document for step in range(made.steps) for _, document in made.documents(step, 0)}
    assert learned == set(range(7))
    assert made.fingerprint != kept.fingerprint
    assert pickle.loads(pickle.dumps(made)).fingerprint == made.fingerprint
    assert kept.fingerprint == prepare(sources=[one]).training.fingerprint, "a run without overlap resumes as before"


def test_a_held_out_share_never_overlaps(prepare, tmp_path):
    """Copies of a row are on one side."""
    one = write(tmp_path / "one.jsonl", [chat(number % 20) for number in range(60)])
    made = prepare(sources=[one], eval_fraction=0.4)
    assert made.evaluation.summary()["documents"] > 0
    [note] = [note for note in made.training.notes() if "copies" in note]
    count = made.training.summary()["documents"]
    assert f"{count * 2 // 3} of {count} documents are copies of others; the most frequent occurs 3 times." in note


def test_the_held_out_share_keeps_its_documents_when_rows_are_added(prepare, tmp_path):
    """And eval_limit takes some of them, without giving the others to training."""

    def sides(rows, limit=None):
        made = prepare(sources=[write(tmp_path / "one.jsonl", map(chat, rows))], eval_fraction=0.3, eval_limit=limit)
        table = made.training.tables[0]
        found = [
            {int(table.digests[document]) for document in plan.stream.segments.group}
            for plan in (made.training, made.evaluation)
        ]
        return found

    trained, held_out = sides(range(40))
    more_trained, more_held_out = sides(range(60))
    assert trained < more_trained
    assert held_out < more_held_out
    limited, few = sides(range(60), limit=5)
    assert limited == more_trained
    assert len(few) == 5
    assert few < more_held_out


def test_copies_within_and_across_sources_are_counted():
    a = table([([1, 2, 3], [True] * 3)] * 4 + [([4, 5], [True] * 2)], "a")
    b = table([([4, 5], [True] * 2), ([6, 7], [True] * 2)], "b")
    assert training([a, b]).notes() == [
        "a: 3 of 5 documents are copies of others; the most frequent occurs 4 times.",
        "1 documents are in several of data.sources; the model learns them from each source.",
    ]
    assert training([natural(20, 10, 0, "a"), natural(20, 10, 1, "b")]).notes() == []


def test_shares_of_their_own_hold_out_each_source_and_a_row_of_two_sources_is_on_one_side(prepare, tmp_path):
    one = write(tmp_path / "one.jsonl", map(chat, range(60)))
    two = write(tmp_path / "two.jsonl", map(chat, range(40, 100)))
    held = write(tmp_path / "held.jsonl", map(chat, range(200, 210)))
    one.eval_fraction, two.eval_fraction = 0.1, 0.6
    with pytest.raises(DataError, match=r"rows of data\.sources .*two\.jsonl.*: .*two\.jsonl:\d+ is .*one\.jsonl:\d+"):
        prepare(sources=[one, two], eval_sources=[held])
    data = prepare(sources=[one, two], eval_sources=[held], on_overlap=OnOverlap.drop)
    sides = []
    for plan in (data.training, data.evaluation):
        micros = ((step, micro) for step in range(plan.steps) for micro in range(plan.micro_batches(step)))
        sides.append({plan.tables[at].digests[row] for place in micros for at, row in plan.documents(*place)})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 110
    assert 35 < len(sides[1]) < 65  # 10 of held.jsonl, 6 and 36 expected of the others, some of them the same


def pair(prompt: int, answer: int) -> dict:
    return {"prompt": f"What is {prompt}?", "chosen": f"It is {answer}.", "rejected": f"Not {answer}."}


def judged(prompt: int, answer: int) -> dict:
    return {"prompt": f"What is {prompt}?", "completion": f"It is {answer}.", "label": answer % 2 == 0}


def prompts_of(plan) -> set[int]:
    return {int(table.held_out_by[at]) for table in plan.tables for at in documents_of(plan, table)}


def documents_of(plan, table) -> list[int]:
    return [
        document
        for step in range(plan.steps)
        for micro in range(plan.micro_batches(step))
        for number, document in plan.documents(step, micro)
        if plan.tables[number] is table
    ]


@pytest.mark.parametrize("row", [pair, judged])
@pytest.mark.parametrize("limit", [None, 5])
def test_all_answers_to_a_prompt_are_on_one_side(row, limit, prepare, tmp_path):
    """Thirty prompts, each with four answers, divided over two files."""
    rows = [row(prompt, answer) for answer in range(4) for prompt in range(30)]
    sources = [write(tmp_path / "one.jsonl", rows[:70]), write(tmp_path / "two.jsonl", rows[70:])]
    made = prepare(sources=sources, eval_fraction=0.3, eval_limit=limit)
    trained, held_out = prompts_of(made.training), prompts_of(made.evaluation)
    assert not trained & held_out
    if limit is None:
        assert len(trained | held_out) == 30
        assert 3 <= len(held_out) <= 20
        counts = [plan.summary()["documents"] for plan in (made.training, made.evaluation)]
        assert counts == [4 * len(trained), 4 * len(held_out)]


def test_a_prompt_that_other_sources_hold_out_is_an_error(prepare, tmp_path):
    one = write(tmp_path / "one.jsonl", [pair(prompt, 1) for prompt in range(10)])
    held = write(tmp_path / "held.jsonl", [pair(99, 0), pair(3, 2)])
    with pytest.raises(DataError, match=r"1 of 2 rows of data\.eval_sources .*held\.jsonl:2 has the prompt of \S+:4"):
        prepare(sources=[one], eval_sources=[held])
    made = prepare(sources=[one], eval_sources=[held], on_overlap=OnOverlap.drop)
    assert made.training.summary()["documents"] == 9
    asked = QuestionsConfig(path=held.path)
    with pytest.raises(DataError, match=r"The prompt of 1 row of data\.sources is held out .*\n.* of data\.questions"):
        prepare(sources=[one], questions=asked)
    one.eval_fraction = 0.5
    two = write(tmp_path / "two.jsonl", [pair(prompt, 2) for prompt in range(10)])
    with pytest.raises(DataError, match=r"two\.jsonl.*|one\.jsonl:\d+ has the prompt of \S+two\.jsonl"):
        prepare(sources=[one, two])
