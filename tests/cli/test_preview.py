"""What a user sees of `fxtune preview`, compared with the data."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from support.processors import processor, write_model, write_picture_rows

from fxtune.cli import preview
from fxtune.cli.main import main
from fxtune.data.batches.build import prepare_data
from fxtune.data.config import MixConfig, OnLong, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.diagnostics.preview import TokenTexts
from fxtune.errors import StorageError
from fxtune.models.kinds.image_decoder.families import concatenated
from fxtune.models.load import ModelConfig, load_tokenizer


def page_of(config, width: int = 400, **console) -> str:
    file = io.StringIO()
    preview.run(config, Console(file=file, width=width, **console))
    return file.getvalue()


def chat(tmp_path, *turns: tuple[str, str]) -> SourceConfig:
    file = tmp_path / "own.jsonl"
    with file.open("w") as out:
        for question, reply in turns:
            out.write(
                json.dumps(
                    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}
                )
                + "\n"
            )
    return SourceConfig(path=str(file))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.mark.parametrize("packing", [True, False])
def test_only_answers_and_their_end_of_turn_are_marked_as_supervised(small, tmp_path, packing):
    turns = [(f"what is {i} plus one", f"it is {i + 1}") for i in range(5)]
    small.data.sources, small.data.packing = [chat(tmp_path, *turns)], packing
    page = page_of(small)
    page = page[page.index("\n") :]  # the legend has a mark, too
    learned = re.findall("⟦(.*?)⟧", page, re.DOTALL)
    assert len(learned) >= 3
    assert set(learned) <= {f"{reply}<|im_end|>" for _, reply in turns}
    outside = re.sub("⟦.*?⟧", "", page, flags=re.DOTALL)
    assert "it is" not in outside
    assert outside.count("<|im_start|>user↵\nwhat is") == len(learned)


def test_the_border_of_a_prompt_and_its_answer_is_where_sampling_begins(small, tmp_path, tokenizer, capsys):
    assert len(tokenizer(" the")["input_ids"]) < sum(len(tokenizer(part)["input_ids"]) for part in (" ", "the"))
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Ans: ", "completion": "the"}) + "\n")
    small.data.sources = [SourceConfig(path=str(file))]
    assert "Ans: ⟦the<" in page_of(small)
    assert "(1 of 1 documents)" in " ".join(capsys.readouterr().out.split())


def test_supervised_tokens_are_green_and_special_ones_magenta_on_a_terminal(small, tmp_path):
    small.data.sources = [chat(tmp_path, ("hello", "goodbye"))]
    page = page_of(small, force_terminal=True, color_system="standard", no_color=False)
    page = page.replace("\x1b[0m\x1b[32m", "")  # from one supervised token to the next
    assert re.search(r"\x1b\[32m⟦goodbye\x1b\[0m\x1b\[1;35m<\|im_end\|>⟧", page)
    assert re.search(r"\x1b\[1;35m<\|im_start\|>\x1b\[0muser↵\nhello", page)


def test_boundaries_padding_and_statistics_are_those_of_the_plan(small, tmp_path):
    small.data.sources, small.data.packing = [chat(tmp_path, *[(f"say {i}", f"{i}") for i in range(8)])], True
    small.data.sequence_length = 128
    page = page_of(small)
    rows = re.findall(r"row \d+: (\d+) documents?, (\d+) tokens of 128", page)
    pads = [int(n) for n in re.findall(r"… (\d+) pads?\n", page)]
    assert [128 - int(used) for _, used in rows] == pads
    spans = re.findall(r"document \d+ of .*own.jsonl: positions 0-(\d+)", page)
    assert len(spans) == min(6, sum(min(3, int(count)) for count, _ in rows))
    for count, _ in rows:
        if int(count) > 3:
            assert f"… {int(count) - 3} more of this row's documents" in page
    plan = prepare_data(
        small.data, load_tokenizer(small.model), micro_batch_size=4, global_batch_size=8, max_steps=6, epochs=100
    ).training
    summary = plan.summary()
    assert f"{summary['supervised_share']:.1%} of the tokens ({summary['supervised_tokens']:,})" in page
    assert f"{summary['padding_share']:.1%} of the rows" in page


def test_the_middle_of_a_long_document_is_counted_and_pieces_are_named(small, tmp_path):
    words = " ".join(f"word{i}" for i in range(700))
    small.data.sources, small.data.sequence_length = [chat(tmp_path, ("count", words))], 4096
    page = page_of(small)
    left, learned = (
        int(n.replace(",", ""))
        for n in re.search(r"… ([\d,]+) tokens left out, ([\d,]+) of them supervised …", page).groups()
    )
    assert left == learned > 1000
    assert "word0 word1 " in page
    assert "word699<|im_end|>⟧" in page
    assert "word350" not in page

    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"text": f"count {words}"}) + "\n")
    small.data.sources, small.data.sequence_length = [SourceConfig(path=str(file))], 64
    page = page_of(small)
    assert re.search(r"document 1 of .*own.jsonl, its tokens [\d,]+-[\d,]+ of [\d,]+: positions 0-63", page)
    assert re.search(r"own.jsonl: 1 document longer than 64 tokens was split into \d+ pieces", page)
    small.data.on_long = OnLong.truncate
    assert "its tokens 0-63 of" in page_of(small)


def test_control_characters_are_readable_and_never_reach_the_terminal(small, tmp_path):
    small.data.sources = [chat(tmp_path, ("naïve 🦊 \x1b[31mred\x07 [bold]x[/bold]", "日本語\u202eevil\ttab\nline"))]
    page = page_of(small)
    assert "naïve 🦊 \\x1b[31mred\\x07 [bold]x[/bold]" in page
    assert "日本語\\u202eevil" in page
    assert "↵\nline<|im_end|>⟧" in page
    assert not set("\x1b\x07\u202e\ufffd") & set(page)


def test_a_part_of_a_character_is_shown_as_its_bytes(tokenizer):
    ids = tokenizer("🦊", add_special_tokens=False).input_ids
    assert len(ids) > 1  # otherwise this tests nothing
    texts = TokenTexts(tokenizer)
    assert texts.document(ids, [False] * len(ids)).plain == "🦊"
    torn = texts.document(ids[1:], [False] * (len(ids) - 1)).plain
    assert re.fullmatch(r"(\\x[0-9a-f]{2})+", torn)
    assert bytes.fromhex(torn.replace("\\x", "")) == "🦊".encode()[4 - torn.count("x") :]
    half = texts.document(ids, [False] + [True] * (len(ids) - 1)).plain  # supervision begins inside the character
    assert re.fullmatch(r"(\\x..)+⟦(\\x..)+⟧", half)


def test_a_terminal_without_unicode_gets_ascii_marks(small, tmp_path):
    small.data.sources = [chat(tmp_path, ("hello", "goodbye"))]
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    preview.run(small, Console(file=file, width=400))
    file.flush()
    assert b"[[goodbye<|im_end|>]]" in raw.getvalue()


def test_held_out_documents_and_source_weights_are_shown(small, chats, tmp_path):
    own = chat(tmp_path, *[(f"say {i}", f"{i}") for i in range(30)])
    own.weight = 1.0
    small.data.sources = [own, SourceConfig(path=str(chats), weight=3.0)]
    small.data.eval_fraction = 0.2
    page = page_of(small)
    assert re.search(r"own\.jsonl +│ .*│ 2\d\.\d%", page)
    assert re.search(r"chats\.jsonl +│ .*│ 7\d\.\d%", page)
    assert re.search(r"held out for evaluation: \d+ documents, [\d,]+ supervised tokens$", page, re.MULTILINE)


def test_held_out_rows_of_preferences_are_counted_in_pairs(small):
    small.data.sources, small.data.eval_fraction = [SourceConfig(path="builtin:preferences_train")], 0.1
    assert re.search(r"held out for evaluation: \d+ pairs, ", page_of(small))


def test_held_out_documents_that_are_left_out_are_counted(small, tmp_path):
    small.data.sources = [chat(tmp_path, *[("say", f"long {i} " * 200 if i % 2 else f"{i}") for i in range(40)])]
    small.data.eval_fraction, small.data.on_long, small.data.sequence_length = 0.5, OnLong.drop, 128
    page = page_of(small)
    used, dropped = re.search(r"for evaluation: (\d+) documents, .*; (\d+) longer than 128", page).groups()
    assert int(used) > 0 < int(dropped) <= 20


def test_a_mix_of_short_and_long_documents_is_shown(small):
    small.data.packing, small.data.sequence_length, small.data.mix = True, 128, MixConfig(0.4, 64)
    page = page_of(small)
    assert re.search(
        r"long documents +\W*4\d\.\d% of the tokens, \d+% to \d+% in a step \(over 64 tokens each\)", page
    )
    assert re.search(
        r"% of the tokens are in documents of more than 64 \(\d+% to \d+% in a step, 40.0% requested\)", page
    )
    small.data.mix.long_share = None
    assert "long documents" not in page_of(small)


def test_the_command_previews_a_recipe(cwd, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cwd / "cache"))
    assert main(["preview", "+recipe=quickstart"]) in (0, None)
    page = capsys.readouterr().out
    assert "<|im_start|>assistant" in page
    assert "The first epoch" in page


def test_a_narrow_terminal_breaks_no_word(small, chats):
    small.data.sources = [SourceConfig(path=str(chats))]
    assert "supervised tokens" in page_of(small, width=50).partition("Source")[2]


def rows_of(tmp_path, *rows: dict) -> SourceConfig:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(file))


PAIR = {
    "prompt": [{"role": "user", "content": "what is one plus one"}],
    "chosen": "it is two",
    "rejected": "it is ten",
}


@pytest.mark.parametrize(("packing", "width"), [(True, 400), (False, 50)])
def test_a_pair_is_shown_with_its_prompt_once_and_both_answers(small, tmp_path, packing, width):
    small.data.sources, small.data.packing = (
        [rows_of(tmp_path, {**PAIR, "score_chosen": 8.5, "score_rejected": 3})],
        packing,
    )
    page = page_of(small, width=width)
    page = page[page.index("step 0, row") :].partition("The first epoch")[0]
    assert page.count("what is one plus one") == page.count("prompt of both") == page.count("it is ten") > 0
    assert "labels 8.5 and 3: the prompt of both, " in " ".join(page.split())
    assert "⟦it is two<|im_end|>⟧" in page
    assert "⟦it is ten<|im_end|>⟧" in page
    side_by_side = [line for line in page.splitlines() if "it is two" in line and "it is ten" in line]
    assert bool(side_by_side) == (width == 400)
    assert re.search("chosen, 5 tokens.*rejected, 5 tokens", page, re.DOTALL)
    assert re.search(r"step 0, row 0: \d+ documents" if packing else "step 0, rows 0 to 1: 2 documents", page)


def test_a_judged_answer_is_shown_with_its_judgment(small, tmp_path):
    judged = {"prompt": PAIR["prompt"], "completion": [{"role": "assistant", "content": "it is ten"}]}
    small.data.sources = [rows_of(tmp_path, {**judged, "label": False})]
    page = page_of(small)
    assert "group 0, judged bad: positions" in page
    assert "A run is refused: " in page
    assert "Set objective=kto" in page


def test_files_have_the_page_and_the_samples(small, tmp_path, tokenizer):
    small.data.sources = [rows_of(tmp_path, PAIR, {**PAIR, "chosen": "<b>two</b>"})]
    html = tmp_path / "page.html"
    found = preview.run(small, Console(file=io.StringIO(), width=120), html=html)
    page = html.read_text()
    assert "it is two" in page
    assert "&lt;b&gt;two" in page
    assert "<b>two" not in page
    answers = [[document["answer"] for document in sample] for sample in found["samples"]]
    assert answers == [["chosen", "rejected"]] * len(answers)
    chosen, rejected = found["samples"][0]
    prompt = chosen["prompt_tokens"]
    assert chosen["ids"][:prompt] == rejected["ids"][:prompt]
    assert tokenizer.decode(chosen["ids"][:prompt]).endswith("<|im_start|>assistant\n")
    assert chosen["supervised"].index(True) == prompt
    assert found["summary"]["supervised_tokens"] > 0
    with pytest.raises(StorageError, match="--html"):
        preview.run(small, Console(file=io.StringIO()), html=tmp_path / "none" / "page.html")


def test_the_newest_answers_of_a_run_are_shown_with_rewards_and_what_is_learned(cwd, capsys, tokenizer):
    rows = [{"prompt": f"Tell me about {thing}."} for thing in ("lamps", "tents")]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.sources=[{path: rows.jsonl}]"),
        *("objective.rewards=[{name: length}]", "data.cache_dir=cache", "sampler.max_tokens=12", "run.dir=run"),
        *("sampler.answers=4", "data.sequence_length=64", "train.global_batch_size=2", "train.max_steps=2"),
        *("run.device=cpu", "run.report=false", "tracking.display=plain"),
    ]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["preview", "run", "--json", "seen.json"]) == 0
    page, found = capsys.readouterr().out, json.loads(Path("seen.json").read_text())
    lines = Path("run/rollouts/step-00000002/answers.jsonl").read_text().splitlines()
    stored = [answer for answer in map(json.loads, lines) if answer["advantage"] is not None]
    assert found["step"] == 2
    assert len(found["answers"]) == len(stored) > 1
    for shown, answer in zip(found["answers"], stored, strict=True):
        learned = [token for token, counts in zip(shown["ids"], shown["supervised"], strict=True) if counts]
        assert learned == answer["ids"]
        assert "Tell me about" in tokenizer.decode(shown["ids"][: -len(learned)])
    best = max((answer for answer in stored if answer["group"] == stored[0]["group"]), key=lambda each: each["reward"])
    assert f"{best['where']}: reward {best['reward']:.4g}, advantage {best['advantage']:+.4g}" in page
    assert re.findall("(?s)(?:⟦|\\[\\[)(.*?)(?:⟧|\\]\\])", page.partition("step 2: ")[2])
    assert main(["preview", "cache"]) == 2
    Path("run/rollouts").rename("gone")
    assert main(["preview", "run"]) == 2
    assert "no answers of a model" in capsys.readouterr().err


def test_images_are_a_line_each_and_pictures_in_the_page(small, tmp_path):
    small.model = ModelConfig(path=str(write_model("qwen2_5_vl", tmp_path / "model")))
    small.data.sources = [SourceConfig(path=str(write_picture_rows(tmp_path / "pictures")))]
    small.techniques.lora.enabled = False
    page = tmp_path / "page.html"
    found = preview.run(small, Console(file=(out := io.StringIO()), width=400), html=page)
    lines = re.findall(r"image (\d): (\S+), (\d+) x (\d+) pixels, (\d+) tokens", out.getvalue())
    assert lines
    assert "<|image_pad|>" not in out.getvalue()
    documents = [document for sample in found["samples"] for document in sample]
    listed = [(document, image) for document in documents for image in document["images"]]
    assert [line[1] for line in lines] == [Path(image["name"]).name for _, image in listed]
    sources = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page.read_text())
    assert len(sources) == len(listed)
    for (_, name, width, height, tokens), (document, image), source in zip(lines, listed, sources, strict=True):
        file = tmp_path / "pictures" / name
        assert Image.open(file).size == (int(width), int(height)) == (image["width"], image["height"])
        own = slice(image["start"], image["start"] + image["tokens"])
        assert len(set(document["ids"][own])) == 1
        assert not any(document["supervised"][own])
        seen = Image.open(io.BytesIO(base64.b64decode(source)))
        assert seen.width * seen.height == int(tokens) * 8 * 8  # a token is 2 x 2 patches of 4 x 4 pixels


@pytest.mark.parametrize("family", ["gemma3", "llava", "internvl", "idefics3"])
def test_a_picture_is_shown_as_the_model_sees_it(tmp_path, family):
    seen = ImageProcessor(processor(family, tmp_path), concatenated).seen(Image.new("RGB", (40, 30), (250, 10, 10)))
    red, green, blue = seen.getpixel((seen.width // 2, seen.height // 2))
    assert red > 240
    assert max(green, blue) < 20
    if family in ("gemma3", "llava"):
        assert seen.size == (28, 28)
