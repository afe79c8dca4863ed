"""`fxtune new`: rows of each kind become a recipe that passes the checks of a run, and that trains."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from support.cases import slow_but
from support.disks import files_of_at_most
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
    "anchors.jsonl": lambda file: jsonl(
        file, [{"anchor": q, "positive": a, "negative": f"It is {a}0"} for q, a in ASKED]
    ),
    "ranked.jsonl": lambda file: jsonl(
        file, [{"query": q, "passages": [a, f"{n}", "No."], "labels": [2, 1, 0]} for n, (q, a) in enumerate(ASKED)]
    ),
    "numbers.csv": lambda file: table(file, ["text", "label"], [(q, n % 3) for n, (q, _) in enumerate(ASKED)]),
    "shares.jsonl": lambda file: jsonl(file, [{"text": q, "label": n / 200} for n, (q, _) in enumerate(ASKED)]),
    "several.jsonl": lambda file: jsonl(
        file, [{"sentence": q, "category": [["even"], ["odd", "red"]][n % 2]} for n, (q, _) in enumerate(ASKED)]
    ),
}
AS_TURNS = ("questions.csv", "pairs.jsonl", "judged.jsonl", "labels.csv")
"""Their texts become turns of the model's template."""
ONE_STEP = (
    *("train.max_steps=1", "data.questions.limit=1", "data.questions.max_new_tokens=2"),
    *("tracking.display=none", "run.report=false"),
)
OBJECTIVES = {"pairs.jsonl": "dpo", "judged.jsonl": "kto", "anchors.jsonl": "embedding", "ranked.jsonl": "ranking"}
OBJECTIVES |= dict.fromkeys(("numbers.csv", "shares.jsonl", "several.jsonl"), "classification")
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


@pytest.mark.parametrize("file", slow_but(FILES, *AS_TURNS, "book.txt", "folder", "anchors.jsonl", "numbers.csv"))
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


def steps_of(name):
    """(the steps that the recipe says, the steps of the run)"""
    (said,) = re.findall(r", ([\d,]+) steps$", Path(f"recipes/{name}.yaml").read_text(), re.MULTILINE)
    assert main(["preview", f"+recipe={name}", "--json", "out.json"]) in (0, None)
    return int(said.replace(",", "")), json.loads(Path("out.json").read_text())["summary"]["steps"]


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
    table("places.csv", ["text", "category"], [(q, n) for n, (q, _) in enumerate(ASKED)])
    for name, file in (("inner", "inner.jsonl"), ("topics", "topics.csv"), ("places", "places.csv")):
        assert main(["new", name, "--data", file]) == 0
        assert load([f"+recipe={name}"]).data.sources[0].columns == {}
        assert load([f"+recipe={name}"]).objective.name == "causal_lm"


def test_keys_of_the_command_are_used_for_reading_and_stand_in_the_recipe(capfd):
    table("odd.csv", ["Frage", "Antwort", "Kontext"], [(*pair, f"note {n}") for n, pair in enumerate(ASKED)])
    words = ["new", "odd", "--data", "odd.csv", "--columns", "Frage=instruction,Antwort=output"]
    assert main(words) == 3
    assert "data.sources.0.unused=[Kontext]" in capfd.readouterr().err
    keys = ("data.sources.0.unused=[Kontext]", "optimizer.lr=3e-4", "techniques.lora.r=4", "schedule=linear")
    assert main([*words, *keys, "train.epochs=1"]) == 0
    config = load(["+recipe=odd"])
    assert config.data.sources[0].unused == ["Kontext"]
    assert (config.optimizer.lr, config.techniques.lora.r, config.train.epochs) == (3e-4, 4, 1)
    assert config.schedule.name.value == "linear"
    assert main(["train", "+recipe=odd", *ONE_STEP]) == 0


def test_rows_with_faults_are_quarantined_if_the_command_says_so_and_are_not_asked(capfd):
    rows = [{"question": f"{n}. {q}", "answer": 5 if n % 4 else a} for n, (q, a) in enumerate(ASKED * 4)]
    jsonl("faults.jsonl", rows)
    assert main(["new", "faults", "--data", "faults.jsonl"]) == 3
    assert "`answer`" in capfd.readouterr().err, "the column by its name in the file"
    assert main(["new", "faults", "--data", "faults.jsonl", "data.on_bad_row=quarantine"]) == 0
    asked = Path("recipes/faults_questions.jsonl").read_text().splitlines()
    assert asked
    assert all(isinstance(json.loads(line)["output"], str) for line in asked)
    assert main(["train", "+recipe=faults", *ONE_STEP]) == 0


@pytest.mark.parametrize("key", ["+recipe=quickstart", "data.sources=[{path: a.csv}]", "optimizer.lrr=1"])
def test_what_no_recipe_of_new_can_have_is_refused(key, capfd):
    FILES["chats.jsonl"]("chats.jsonl")
    assert main(["new", "mine", "--data", "chats.jsonl", key]) == 2
    assert key.partition("=")[0] in capfd.readouterr().err
    assert not Path("recipes/mine.yaml").exists()


def test_a_chosen_objective_reads_the_rows_in_its_format():
    table("labels.csv", ["text", "label"], [(q, ("even", "odd")[n % 2]) for n, (q, _) in enumerate(ASKED)])
    assert main(["new", "mine", "--data", "labels.csv", "objective=classification"]) == 0
    config = load(["+recipe=mine"])
    assert (config.objective.name, config.data.sources[0].format) == ("classification", "labelled")
    assert config.data.questions.path is None


def test_judgments_in_words_name_the_objective_that_learns_judgments(capfd):
    rows = [{"prompt": q, "completion": a, "label": ("bad", "good")[n % 2]} for n, (q, a) in enumerate(ASKED)]
    jsonl("words.jsonl", rows)
    assert main(["new", "mine", "--data", "words.jsonl"]) == 3
    message = capfd.readouterr().err
    assert all(word in message for word in ("objective=kto", "true", "false"))


@pytest.mark.parametrize("packing", ["false", "true"])
def test_the_steps_of_pairs_are_near_the_steps_of_the_run(packing, capfd):
    """The run has the prompt of a packed pair once, and each answer of an unpacked pair in a row."""
    FILES["pairs.jsonl"]("pairs.jsonl")
    assert main(["new", "mine", "--data", "pairs.jsonl", f"data.packing={packing}"]) == 0
    said, steps = steps_of("mine")
    assert abs(said - steps) <= 0.1 * steps


def test_the_steps_of_packed_judged_answers_are_near_the_steps_of_the_run():
    """Their prompts are not shared."""
    jsonl("rows.jsonl", [{"prompt": q * 5, "completion": a, "label": n % 2} for n, (q, a) in enumerate(ASKED)])
    assert main(["new", "mine", "--data", "rows.jsonl", "data.packing=true"]) == 0
    said, steps = steps_of("mine")
    assert abs(said - steps) <= max(1, 0.1 * steps)


def test_the_steps_of_prompts_are_near_the_steps_of_the_run_and_rows_have_room_for_answers():
    jsonl("rows.jsonl", [{"prompt": q, "answer": a} for q, a in ASKED])
    words = ["objective=policy", "objective.rewards=[{name: exact}]"]
    assert main(["new", "mine", "--data", "rows.jsonl", *words]) == 0
    said, steps = steps_of("mine")
    assert abs(said - steps) <= 0.1 * steps


def test_the_steps_of_texts_that_are_longer_than_a_row_are_near_the_steps_of_the_run():
    jsonl("long.jsonl", [{"text": " ".join(question for question, _ in ASKED) * 6}] * 3)
    assert main(["new", "mine", "--data", "long.jsonl"]) == 0
    said, steps = steps_of("mine")
    assert steps > 10
    assert abs(said - steps) <= 0.1 * steps


def test_the_steps_of_asked_chats_are_near_the_steps_of_the_run():
    drafted("chats.jsonl")
    said, steps = steps_of("chats_jsonl")
    assert abs(said - steps) <= 0.1 * steps


def test_the_suggested_columns_are_columns_of_the_file(capfd):
    table("odd.csv", ["Frage", "Antwort"])
    assert main(["new", "odd", "--data", "odd.csv", "--columns", "Frage=question,Antwort=reply"]) == 3
    (said,) = re.findall(r"`columns: \{(.*?)\}`", capfd.readouterr().err)
    assert main(["new", "odd", "--data", "odd.csv", "--columns", said.replace(": ", "=").replace(", ", ",")]) == 0


@pytest.mark.parametrize("value", ["hello there", 5, {"role": "user"}])
def test_messages_that_are_no_list_are_named_with_their_value(value, capfd):
    jsonl("bad.jsonl", [{"messages": value}] * 3)
    assert main(["new", "bad", "--data", "bad.jsonl"]) == 3
    told = capfd.readouterr().err
    assert "`messages`" in told
    assert "list of turns" in told
    assert repr(value) in told
    assert "--columns" not in told


def test_one_row_is_one_row(capfd):
    jsonl("one.jsonl", [{"messages": turns(*ASKED[0])}])
    assert main(["new", "one", "--data", "one.jsonl"]) == 0
    for text in (capfd.readouterr().out, Path("recipes/one.yaml").read_text()):
        assert "1 row of messages" in text
        assert not re.search(r"\b1 (rows|documents|steps)\b", text)


@pytest.mark.parametrize("kind", ["pairs", "judged", "triplets"])
def test_a_micro_batch_has_whole_groups(kind):
    """Without packing a pair has two rows, a judged answer a second one for its mismatched twin, a triplet three."""
    made = {
        "pairs": lambda n, q, a: {"prompt": q, "chosen": a, "rejected": "No."},
        "judged": lambda n, q, a: {"prompt": q, "completion": a, "label": n % 3 == 0},
        "triplets": lambda n, q, a: {"anchor": q, "positive": a, "negative": "No."},
    }
    jsonl("few.jsonl", [made[kind](n, q, a) for n, (q, a) in enumerate(ASKED[:12])])
    keys = ["data.packing=false"] if kind == "triplets" else []
    assert main(["new", "few", "--data", "few.jsonl", *keys]) == 0
    assert load(["+recipe=few"]).data.packing is False
    assert main(["train", "+recipe=few", *ONE_STEP]) == 0


def test_equal_rows_are_counted_and_neither_held_out_nor_asked(capfd):
    """Equal rows are on one side of a hold-out, so there would be nothing to evaluate on, or nothing to train on."""
    jsonl("same.jsonl", [{"messages": turns(*ASKED[0])}] * 120)
    assert main(["new", "same", "--data", "same.jsonl", "--json", "out.json"]) == 0
    assert "120 of 120 rows are equal" in capfd.readouterr().out
    assert "120 of 120 rows are equal" in Path("recipes/same.yaml").read_text()
    assert load(["+recipe=same"]).data.eval_fraction == 0
    assert main(["train", "+recipe=same", *ONE_STEP]) == 0


def test_documents_that_the_run_leaves_out_make_no_steps(capfd):
    long = [{"messages": turns(f"{n} " * 3000, "Yes.")} for n in range(10)]
    jsonl("huge.jsonl", [*long, *({"messages": turns(*pair)} for pair in ASKED[:40])])
    assert main(["new", "huge", "--data", "huge.jsonl"]) == 0
    told, written = capfd.readouterr().out, Path("recipes/huge.yaml").read_text()
    for text in (told, written):
        (line,) = (line for line in text.splitlines() if "10 documents" in line)
        assert re.search(r"9\d\.\d% of the tokens", line)
        assert "data.on_long" in line
    said, steps = steps_of("huge")
    assert steps >= 50
    assert abs(said - steps) <= 0.1 * steps


def test_a_few_long_groups_are_left_out_and_the_rest_trains():
    rows = [{"anchor": q, "positive": a} for q, a in ASKED]
    jsonl("long.jsonl", [*rows, {"anchor": "Why?", "positive": "Because. " * 3000}])
    assert main(["new", "long", "--data", "long.jsonl"]) == 0
    assert main(["train", "+recipe=long", *ONE_STEP]) == 0


def test_the_recipe_says_how_many_rows_the_run_holds_out(capfd):
    FILES["questions.csv"]("questions.csv")
    assert main(["new", "mine", "--data", "questions.csv"]) == 0
    (line,) = (line for line in Path("recipes/mine.yaml").read_text().splitlines() if "eval_fraction" in line)
    capfd.readouterr()
    assert main(["preview", "+recipe=mine"]) == 0
    assert f"held out for evaluation: {line.partition('# ')[2].split()[0]} documents" in capfd.readouterr().out


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_file_that_is_not_utf8_says_how_to_convert_it(ending, encoding, capfd):
    rows = {"csv": "frage,antwort\nWozu?,Dafür\n", "txt": "Dafür"}
    Path(f"rows.{ending}").write_text(
        rows.get(ending, '{"text": "Dafür"}' if ending == "jsonl" else '[{"text": "Dafür"}]'), encoding=encoding
    )
    assert main(["new", "mine", "--data", f"rows.{ending}"]) == 3
    told = capfd.readouterr()
    assert f"rows.{ending}" in told.err
    assert "UTF-8" in told.err
    assert "iconv" in told.err
    assert not told.out.strip(), "no count of rows that cannot be read"


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


def test_questions_are_held_out_rows_and_no_file_is_overwritten(capfd):
    config = drafted("chats.jsonl")
    asked = [json.loads(line) for line in Path(config.data.questions.path).read_text().splitlines()]
    assert len(asked) == 20
    assert {row["messages"][0]["content"] for row in asked} <= {question for question, _ in ASKED}
    assert config.data.on_overlap.value == "drop"
    before = Path(config.data.questions.path).read_text()
    assert main(["new", "chats_jsonl", "--data", "nothing.jsonl"]) == 6, "found before rows are read"
    assert "recipes/chats_jsonl.yaml exists" in capfd.readouterr().err
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


def test_a_recipe_whose_questions_a_full_disk_refuses_is_not_in_the_way_of_the_next_try(capsys):
    jsonl("long.jsonl", [{"prompt": question, "completion": f"{answer} " * 700} for question, answer in ASKED])
    assert main(["new", "first", "--data", "long.jsonl"]) == 0  # the tokens are in the cache from here on
    with files_of_at_most(150_000):
        assert main(["new", "mine", "--data", "long.jsonl"]) == 6
    assert "recipes/mine_questions.jsonl cannot be written" in capsys.readouterr().err
    assert main(["new", "mine", "--data", "long.jsonl"]) == 0
