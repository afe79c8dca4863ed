"""`fxtune new`: rows of each kind become a recipe that passes the checks of a run, and that trains."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image
from support.cases import slow_but
from support.processors import write_model, write_picture_rows

from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.drafts import draft

ASKED = [(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(120)]


def jsonl(file, rows):
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(file, columns, rows=ASKED):
    with Path(file).open("w", newline="") as opened:
        csv.writer(opened).writerows([columns, *rows])


def parquet(file, columns):
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table(dict(zip(columns, zip(*ASKED, strict=True), strict=True))), file)


def folder(name):
    Path(name).mkdir()
    table(f"{name}/train.csv", ["prompt", "completion"])
    table(f"{name}/test.csv", ["prompt", "completion"], ASKED[:10])


def turns(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


FILES = {
    "chats.jsonl": lambda file: jsonl(file, [{"messages": turns(*pair)} for pair in ASKED]),
    "dialogs.jsonl": lambda file: jsonl(file, [{"dialog": turns(*pair)} for pair in ASKED]),
    "sharegpt.json": lambda file: Path(file).write_text(
        json.dumps([{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in ASKED])
    ),
    "alpaca.csv": lambda file: table(file, ["instruction", "output"]),
    "questions.csv": lambda file: table(file, ["question", "answer"]),
    "asked.tsv": lambda file: Path(file).write_text("prompt\tcompletion\n" + "".join(f"{q}\t{a}\n" for q, a in ASKED)),
    "rows.parquet": lambda file: parquet(file, ["prompt", "completion"]),
    "texts.jsonl": lambda file: jsonl(file, [{"text": f"{q} {a}"} for q, a in ASKED]),
    "book.txt": lambda file: Path(file).write_text("\n\n".join(f"{q} {a}" for q, a in ASKED)),
    "pairs.jsonl": lambda file: jsonl(
        file, [{"prompt": q, "chosen": a, "rejected": "I do not know."} for q, a in ASKED]
    ),
    "judged.jsonl": lambda file: jsonl(
        file, [{"prompt": q, "completion": a, "label": n % 2 == 0} for n, (q, a) in enumerate(ASKED)]
    ),
    "labels.csv": lambda file: table(file, ["text", "label"], [(q, "even") for q, _ in ASKED]),
    "folder": folder,
}
AS_TURNS = ("questions.csv", "pairs.jsonl", "judged.jsonl", "labels.csv")
"""Their texts become turns of the model's template."""
ONE_STEP = (
    *("train.max_steps=1", "data.questions.limit=1", "data.questions.max_new_tokens=2"),
    *("tracking.display=none", "run.report=false"),
)
OBJECTIVES = {"pairs.jsonl": "dpo", "judged.jsonl": "kto"}
NAMES = {file: file.replace(".", "_") for file in FILES}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def drafted(file, *words):
    FILES[file](file)
    assert main(["new", NAMES[file], "--data", file, *words]) == 0
    return load([f"+recipe={NAMES[file]}"])


@pytest.mark.parametrize("file", slow_but(FILES, *AS_TURNS, "book.txt", "folder"))
def test_rows_of_each_kind_become_a_recipe_that_trains(place, file, capfd):
    config = drafted(file)
    assert config.objective.name == OBJECTIVES.get(file, "causal_lm")
    text = (place / f"recipes/{NAMES[file]}.yaml").read_text()
    assert all("  # " in line for line in text.splitlines() if line.strip().startswith(("sequence_length", "epochs")))
    assert config.data.sequence_length >= 16
    if file in AS_TURNS:
        capfd.readouterr()
        assert main(["preview", f"+recipe={NAMES[file]}"]) in (0, None)
        assert "<|im_start|>" in capfd.readouterr().out
    if file in AS_TURNS and file.endswith("csv"):
        asked = [
            json.loads(line) for line in (place / f"recipes/{NAMES[file]}_questions.jsonl").read_text().splitlines()
        ]
        assert all({"instruction", "output"} <= row.keys() for row in asked), "asked as they are trained"
        assert len({int(row["instruction"].split()[2]) % 2 for row in asked}) == 2, "drawn, not every n-th"
    assert main(["train", f"+recipe={NAMES[file]}", *ONE_STEP]) == 0


def test_columns_with_other_names_are_named(place, capfd):
    table("odd.csv", ["Frage hier", "Antwort"])
    assert main(["new", "odd", "--data", "odd.csv"]) == 3
    assert "--columns" in capfd.readouterr().err
    assert main(["new", "odd", "--data", "odd.csv", "--columns", "Frage hier=instruction,Antwort=output"]) == 0
    assert load(["+recipe=odd"]).data.sources[0].columns == {"Frage hier": "instruction", "Antwort": "output"}


@pytest.mark.parametrize(("columns", "code", "seen"), [("Frage", 2, "COLUMN=NAME"), (None, 3, "no such file")])
def test_columns_are_asked_for_only_where_they_help(place, capfd, columns, code, seen):
    table("odd.csv", ["Frage", "Antwort"])
    words = ["--data", "odd.csv", "--columns", columns] if columns else ["--data", "nofile.csv"]
    assert main(["new", "odd", *words]) == code
    told = capfd.readouterr().err
    assert seen in told
    assert ("--columns" in told) == bool(columns)


def test_pictures_and_a_model_of_text_are_refused(place, capfd):
    file = write_picture_rows(place, rows=8)
    assert main(["new", "seen", "--data", str(file), "--model", "builtin:tiny"]) == 2
    assert "reads no images" in capfd.readouterr().err


def test_a_question_that_repeats_its_answer_keeps_its_column(place):
    table("same.csv", ["question", "answer"], [("Hello", "Hello"), *ASKED])
    assert main(["new", "same", "--data", "same.csv"]) == 0
    assert load(["+recipe=same"]).data.sources[0].columns == {"question": "instruction", "answer": "output"}


def test_a_chat_in_an_object_and_a_text_with_a_category_of_its_own_stay_as_they_are(place):
    jsonl("inner.jsonl", [{"conv": {"prompt": q, "completion": a}} for q, a in ASKED])
    table("topics.csv", ["text", "category"], ASKED)
    for name, file in (("inner", "inner.jsonl"), ("topics", "topics.csv")):
        assert main(["new", name, "--data", file]) == 0
        assert load([f"+recipe={name}"]).data.sources[0].columns == {}


def test_labels_that_are_numbers_say_what_to_write(place, capfd):
    table("numbers.csv", ["text", "label"], [(q, n % 2) for n, (q, _) in enumerate(ASKED)])
    assert main(["new", "numbers", "--data", "numbers.csv"]) == 3
    assert "Write each label as a word" in capfd.readouterr().err


def test_pictures_get_a_model_that_sees_them_and_are_not_copied_as_questions(place):
    file = write_picture_rows(place, rows=120)
    assert main(["new", "seen", "--data", str(file)]) == 0
    assert load(["+recipe=seen"]).model.path == "builtin:tiny-vision"
    assert load(["+recipe=seen"]).data.questions.path is None


def test_pictures_in_a_folder_with_their_questions_become_a_recipe_that_trains(place):
    (place / "pictures").mkdir()
    for n in range(50):
        Image.new("RGB", (32, 32), (5 * n, 80, 80)).save(place / f"pictures/{n}.jpg")
    rows = [{"file_name": f"{n}.jpg", "question": "How red is it?", "answer": str(5 * n)} for n in range(50)]
    jsonl("pictures/metadata.jsonl", rows)
    assert main(["new", "seen", "--data", "pictures"]) == 0
    assert load(["+recipe=seen"]).model.path == "builtin:tiny-vision"
    assert main(["train", "+recipe=seen", *ONE_STEP]) == 0


def test_a_file_name_without_a_file_beside_a_text_is_no_picture():
    jsonl("pages.jsonl", [{"file_name": f"{n}.png", "text": f"{q} {a}"} for n, (q, a) in enumerate(ASKED)])
    assert main(["new", "pages", "--data", "pages.jsonl"]) == 0
    assert load(["+recipe=pages"]).model.path == "builtin:tiny"


@pytest.mark.parametrize(("split", "file"), [("test", "rows/test.jsonl"), ("validation", "rows/dev/part.jsonl")])
def test_a_folder_s_split_is_held_out(place, split, file):
    train = "rows/train.jsonl" if split == "test" else "rows/train/part.jsonl"
    for name, rows in ((train, ASKED), (file, ASKED[:30])):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(name, [{"conv": {"messages": turns(*pair)}} for pair in rows])
    assert main(["new", "mine", "--data", "rows"]) == 0
    config = load(["+recipe=mine"])
    assert [source.split for source in config.data.eval_sources] == [split]
    assert f"split {split}" in (place / "recipes/mine.yaml").read_text()


def test_questions_are_held_out_rows_and_no_file_is_overwritten():
    config = drafted("chats.jsonl")
    asked = [json.loads(line) for line in Path(config.data.questions.path).read_text().splitlines()]
    assert len(asked) == 20
    assert {row["messages"][0]["content"] for row in asked} <= {question for question, _ in ASKED}
    assert config.data.on_overlap.value == "drop"
    before = Path(config.data.questions.path).read_text()
    assert main(["new", "chats_jsonl", "--data", "chats.jsonl"]) == 6
    Path("recipes/chats_jsonl.yaml").unlink()
    assert main(["new", "chats_jsonl", "--data", "chats.jsonl"]) == 6
    assert Path(config.data.questions.path).read_text() == before
    assert not Path("recipes/chats_jsonl.yaml").exists()


@pytest.mark.parametrize(
    ("card", "images", "model"),
    [
        ("H200", False, "Qwen/Qwen3.5-35B-A3B"),
        ("A100-40GB", False, "Qwen/Qwen3.5-9B"),
        ("L4", False, "Qwen/Qwen3-4B-Instruct-2507"),
        ("H100", True, "Qwen/Qwen3.5-9B"),
    ],
)
def test_the_proposed_model_is_the_largest_that_fits_the_card_and_offline_its_name_is_said(
    place, capsys, card, images, model
):
    FILES["chats.jsonl"]("chats.jsonl")
    rows = write_picture_rows(place / "pictures", rows=8) if images else "chats.jsonl"
    assert main(["new", "mine", "--data", str(rows), "--gpu", card]) == 6
    assert f"hf download {model}`" in capsys.readouterr().err
    assert not Path("recipes/mine.yaml").exists()


def test_a_card_gets_the_fast_bundle_and_a_micro_batch_that_fits():
    config = drafted("chats.jsonl", "--gpu", "H100", "--model", "builtin:tiny")
    assert config.techniques.lora.enabled
    assert config.techniques.compile.enabled == "auto"
    assert config.train.global_batch_size % config.train.micro_batch_size == 0


def test_packages_that_the_card_s_machine_lacks_are_named(place, monkeypatch):
    model, rows = write_model("qwen3_5", place / "model"), write_picture_rows(place / "pictures", rows=60)
    written = []
    for name, packages in (("without", {}), ("with", {"fla-core": "0.6.0"})):
        monkeypatch.setattr(draft, "installed_packages", lambda packages=packages: packages)
        assert main(["new", name, "--data", str(rows), "--gpu", "H100", "--model", str(model)]) == 0
        written.append((place / f"recipes/{name}.yaml").read_text())
    assert "fxtune[hybrid]" in written[0]
    assert "fxtune[hybrid]" not in written[1]


@pytest.mark.parametrize(
    "words", [["mine"], ["--data", "chats.jsonl"], ["a/b", "--data", "chats.jsonl"], ["mine", "--data", "odd.jsonl"]]
)
def test_what_is_missing_is_one_message(capsys, words):
    FILES["chats.jsonl"]("chats.jsonl")
    jsonl("odd.jsonl", [{"x": 1, "y": 2}])
    assert main(["new", *words]) in (2, 3)
    assert capsys.readouterr().err.count("fxtune: ") == 1
