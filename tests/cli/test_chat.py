"""`fxtune chat RUN`: answers of the base and of the tuned model, from a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from support import image_models, processors
from support.architectures import lora, prepared_model, trained
from transformers import AutoModelForImageTextToText

from fxtune.cli import chat
from fxtune.cli.main import main
from fxtune.data.config import DataConfig, ImageTokensConfig, QuestionsConfig
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.outputs.conversation import Conversation
from fxtune.outputs.run_output import find_output
from fxtune.settle.images import image_processor
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.answers import answer, load_questions

TINY = ModelConfig(path="builtin:tiny", dtype=DType.float32)
PROMPTS = ["What colour is the lamp?", "Order seven chairs."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """runs/mine with an adapter and runs/full with a whole model, whose answers differ from the base's."""
    root = tmp_path_factory.mktemp("chat")
    prepared = prepared_model(lora(), TINY, dtype="float32")
    model = trained(prepared.module)
    save_model(prepared, load_tokenizer(TINY), root / "runs" / "mine" / "adapter")
    merged = model.merge_and_unload()
    merged.name_or_path = ""
    save_model(PreparedModel(merged), load_tokenizer(TINY), root / "runs" / "full" / "model")
    for name in ("mine", "full"):
        (root / "runs" / name / "config.yaml").write_text("model: {path: 'builtin:tiny', init: pretrained}\n")
    return root


@pytest.fixture
def runs(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder / "runs"


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[str]]:
    """The first 8 tokens of the answers, as training asks its questions."""
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]} for text in PROMPTS
    ]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(TINY)
    questions = load_questions(DataConfig(questions=QuestionsConfig(path=str(folder / "q.jsonl"))), tokenizer)
    adapter = str(folder / "runs" / "mine" / "adapter")
    prepared = prepared_model(
        lora(), ModelConfig(path="builtin:tiny", dtype=DType.bfloat16, adapter=adapter), dtype="bfloat16"
    )
    tuned = prepared.module
    found = {"tuned": answer(prepared, tokenizer, questions, 1, 8)}
    with tuned.disable_adapter():
        found["base"] = answer(prepared, tokenizer, questions, 1, 8)
    assert found["tuned"] != found["base"]
    return found


def ask(monkeypatch, *words: str, lines: str = "\n\n".join(PROMPTS) + "\n") -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *words, "--max-new-tokens", "8"])


@pytest.mark.parametrize("run", ["mine", "runs/mine", "runs/mine/adapter", "full"])
def test_each_line_of_a_pipe_is_answered_as_in_training(runs, expected, monkeypatch, capsys, run):
    assert ask(monkeypatch, run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == expected["tuned"]


@pytest.mark.parametrize(("encoding", "code"), [("utf-8", 0), ("latin-1", 3)])
def test_a_pipe_is_utf_8_in_each_locale_and_other_bytes_are_one_message(runs, monkeypatch, capsys, encoding, code):
    pipe = io.TextIOWrapper(io.BytesIO("first\nüber\n".encode(encoding)), encoding="ascii")
    monkeypatch.setattr("sys.stdin", pipe)
    assert main(["chat", "mine", "--max-new-tokens", "8"]) == code
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert ("Lines without an answer: 1 of 2" in said.err) == bool(code)


@pytest.mark.parametrize("run", ["mine", "full"])
def test_base_and_tuned_model_answer_beside_each_other(runs, expected, monkeypatch, capsys, run):
    assert ask(monkeypatch, run, "--show", "base") == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == expected["base"]
    assert ask(monkeypatch, run, "--show", "both") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["base", "tuned"] * 2
    assert [line.partition(": ")[2].strip() for line in lines[0::2]] == expected["base"]
    assert [line.partition(": ")[2].strip() for line in lines[1::2]] == expected["tuned"]


def test_a_terminal_has_two_columns_and_a_conversation(runs, expected, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(chat, "console", lambda: screen)
    conversation = Conversation(find_output("mine"), "both", max_new_tokens=8)
    talk, speakers = chat.Chat(conversation), conversation.speakers
    typed = iter([PROMPTS[0], PROMPTS[1], "/new", PROMPTS[1]])

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    seen = []
    reply = talk.reply
    monkeypatch.setattr(talk, "reply", lambda text: (reply(text), seen.append(len(speakers[0].messages))))
    talk.talk()
    assert seen == [2, 4, 2], "the second prompt continues the conversation, /new starts another"
    assert "base" in screen.file.getvalue()
    assert "tuned" in screen.file.getvalue()


def test_a_system_turn_takes_the_place_of_the_recipes(folder, monkeypatch, tmp_path):
    shutil.copytree(folder / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    config = Path("runs/mine/config.yaml")
    config.write_text(config.read_text() + "data: {system: Be a clerk.}\n")
    for given, turns in (None, ["Be a clerk."]), ("Be brief.", ["Be brief."]), ("", []):
        conversation = Conversation(find_output("mine"), "tuned", max_new_tokens=2, system=given)
        conversation.answer(conversation.speakers[0], PROMPTS[0], lambda _: None)
        roles = [(turn["role"], turn["content"]) for turn in conversation.speakers[0].messages[:-1]]
        assert roles == [*(("system", text) for text in turns), ("user", PROMPTS[0])]
    assert ask(monkeypatch, "mine", "--system", "Be brief.") == 0


def test_answers_appear_as_they_are_written(runs, monkeypatch):
    pieces: list[str] = []
    conversation = Conversation(find_output("mine"), "tuned", max_new_tokens=40)
    (speaker,) = conversation.speakers
    conversation.answer(speaker, PROMPTS[0], pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces).strip() == speaker.messages[-1]["content"]


def test_temperature_draws_tokens(runs, monkeypatch, capsys):
    answers = set()
    for seed in range(3):
        torch.manual_seed(seed)
        assert ask(monkeypatch, "mine", "--temperature", "3") == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) > 1


def test_a_longer_conversation_than_the_model_reads_is_one_message(runs, monkeypatch, capsys):
    assert ask(monkeypatch, "mine", lines="word " * 600 + "\n" + PROMPTS[0] + "\n") == 3
    out, err = capsys.readouterr()
    first, _ = out.splitlines()  # the second prompt has an answer
    assert "and the model reads 512" in first
    assert first.strip("()") in err


def test_a_prompt_that_no_template_can_write_is_refused_and_the_next_is_answered(runs, expected, monkeypatch, capsys):
    assert ask(monkeypatch, "mine", lines=f"caf\udce9\n{PROMPTS[0]}\n") == 3
    first, second = capsys.readouterr().out.splitlines()
    assert "lone surrogate" in first
    assert second.strip() == expected["tuned"][0]


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Path:
    """runs/mine with an adapter of a model that reads images, merged/ with both as one model, and pictures."""
    root = tmp_path_factory.mktemp("vision")
    source = ModelConfig(path=str(processors.write_model("qwen2_5_vl", root / "base")), dtype=DType.float32)
    base = AutoModelForImageTextToText.from_pretrained(source.path)
    image_models.draw_for_answers(base)
    base.save_pretrained(source.path)
    prepared = prepared_model(lora(), source, dtype="float32")
    trained(prepared.module)
    save_model(prepared, load_tokenizer(source), root / "runs" / "mine" / "adapter")
    config = f"model: {{path: {root / 'base'}, init: pretrained}}\ndata: {{image_tokens: {{min: null, max: 9}}}}\n"
    (root / "runs" / "mine" / "config.yaml").write_text(config)
    draw = random.Random(0)
    for name, size in (("one.png", (50, 30)), ("the other's.png", (30, 90))):
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(root / name)
    assert main(["merge", str(root / "runs" / "mine" / "adapter"), str(root / "merged")]) == 0
    return root


def _asked(root: Path, model: ModelConfig, text: str, names: list[str], most: int | None) -> str:
    """The first 8 tokens of the answer, as training asks its questions."""
    tokenizer, file = load_tokenizer(model), root / "q.jsonl"
    turns = [{"role": "user", "content": "<image>" * len(names) + text}, {"role": "assistant", "content": "x"}]
    file.write_text(json.dumps({"messages": turns, "images": names}))
    data = DataConfig(questions=QuestionsConfig(path=str(file)), image_tokens=ImageTokensConfig(max=most))
    images = image_processor(model, data, tokenizer)
    prepared = prepared_model(lora() if model.adapter else Pipeline(), model, dtype="float32")
    questions = load_questions(data, tokenizer, images)
    return answer(prepared, tokenizer, questions, 1, 8, images=images)[0]


@pytest.mark.parametrize("run", ["mine", "merged"])
def test_images_before_a_prompt_are_shown_to_the_model(vision, monkeypatch, capsys, run):
    monkeypatch.chdir(vision)
    lines = [
        "/image one.png What is it?",
        '/image one.png  /image "the other\'s.png"',
        "What's new?",
        "What is it?",
        "/image the\\ other\\'s.png What is it?",
    ]
    assert ask(monkeypatch, run, lines="\n".join(lines)) == 0
    found = [line.strip() for line in capsys.readouterr().out.splitlines()]
    model = ModelConfig(path=str(vision / "merged"), dtype=DType.float32)
    if run == "mine":
        adapter = str(vision / "runs" / "mine" / "adapter")
        model = ModelConfig(path=str(vision / "base"), dtype=DType.float32, adapter=adapter)
    one, other = "one.png", "the other's.png"
    shown = [("What is it?", [one]), ("What's new?", [one, other]), ("What is it?", []), ("What is it?", [other])]
    most = 9 if run == "mine" else None  # the merged model has the bound in its own files
    assert found == [_asked(vision, model, text, names, most) for text, names in shown]
    assert len(set(found)) == 4, "the images must matter, or this compares nothing"


def test_an_image_stays_in_the_conversation(vision, monkeypatch):
    monkeypatch.chdir(vision)
    conversation = Conversation(find_output("mine"), "tuned", max_new_tokens=8)
    talk, speakers = chat.Chat(conversation), conversation.speakers
    pieces: list[str] = []
    for prompt in ("/image one.png Where?", "Why?"):
        assert talk.handle_line(prompt)
    with_image = speakers[0].messages[-1]["content"]
    assert [message["role"] for message in speakers[0].messages] == ["user", "assistant"] * 2
    speakers[0].messages[0]["content"] = "Where?"
    del speakers[0].messages[2:]
    conversation.answer(speakers[0], "Why?", pieces.append)
    assert speakers[0].messages[-1]["content"] != with_image


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/image none.png What is it?", "none.png: there is no such file"),
        ("/image broken.png What is it?", "broken.png: it is no image of the formats"),
        ("/image", "/image takes the name of a file"),
        ("/image 'one.png What is it?", "/image takes the name of a file"),
        ("/imgae one.png What is it?", "/imgae is no command; did you mean /image?"),
    ],
)
def test_an_image_that_cannot_be_shown_is_one_message(vision, monkeypatch, capsys, line, message):
    monkeypatch.chdir(vision)
    Path("broken.png").write_text("no image")
    assert ask(monkeypatch, "mine", lines=f"{line}\nWhat?\n") == 3
    first, *rest = " ".join(capsys.readouterr().out.splitlines()).split(")", 1)
    assert message in first
    assert rest


def test_a_model_of_text_takes_no_image(runs, vision, monkeypatch, capsys):
    assert ask(monkeypatch, "mine", lines=f"/image {vision / 'one.png'} What?\n") == 3
    assert "The model reads no images" in " ".join(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda run: None, 2, "there is no run `nobody` (looked for ./nobody and runs/nobody). There are: full, mine"),
        (lambda run: shutil.rmtree(run / "adapter"), 2, "has no adapter and no model yet"),
        (lambda run: (run / "adapter" / "adapter_model.safetensors").unlink(), 6, "adapter_model.safetensors"),
        (lambda run: (run / "adapter" / "adapter_model.safetensors").write_bytes(b"x"), 6, "is not what was proven"),
        (lambda run: (run / "adapter" / "adapter_config.json").write_text("{"), 6, "adapter_config.json"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), 6, "config.yaml"),
    ],
    ids=["missing", "unfinished", "no weights", "broken weights", "broken adapter config", "broken config"],
)
def test_a_missing_or_broken_run_is_one_message(runs, tmp_path, monkeypatch, capsys, spoil, code, message):
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path / "runs" / "mine")
    name = "nobody" if "nobody" in message else "mine"
    assert ask(monkeypatch, name) == code
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("fxtune: ") == 1
    assert "Traceback" not in err + out


def test_bad_options_are_refused_with_the_usage(cwd, monkeypatch, capsys):
    assert ask(monkeypatch) == 2
    assert "usage: fxtune chat RUN" in capsys.readouterr().err
    assert ask(monkeypatch, "mine", "--show", "all") == 2
    assert "--show invalid choice: 'all'" in capsys.readouterr().err


def test_a_model_that_has_learned_plain_texts_continues_the_prompt_as_typed(cwd, monkeypatch, capsys):
    rows = [{"prompt": f"{number}, ", "completion": str(number + 1)} for number in range(32)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data.sources=[{path: rows.jsonl}]", "data.eval_sources=[]", "data.questions.path=null"]
    assert main(["+recipe=quickstart", *words, "train.max_steps=1", "run.dir=runs/texts"]) == 0
    seen = []
    conversation = Conversation(find_output("texts"), "tuned", max_new_tokens=2)
    monkeypatch.setattr(conversation, "tokenizer", tokenizer := load_tokenizer(TINY))
    monkeypatch.setattr(conversation.speakers[0].model, "generate", lambda ids, **_: (seen.append(ids), ids)[1])
    conversation.answer(conversation.speakers[0], "7, ", lambda _: None)
    assert tokenizer.decode(seen[0][0], skip_special_tokens=True) == "7, "
    assert ask(monkeypatch, "texts") == 0
    assert "has learned from plain texts" in capsys.readouterr().out
    assert ask(monkeypatch, "texts", "--system", "Be brief.") == 2
