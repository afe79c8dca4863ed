"""The shipped assets: the tiny base model and the quickstart's data, and the scripts that write both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fxtune.models.prepared import PreparedModel

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "make"
TINY, DATA = ROOT / "fxtune" / "assets" / "tiny", ROOT / "fxtune" / "assets" / "data"
TINY_VISION = ROOT / "fxtune" / "assets" / "tiny-vision"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def scripts():
    """The modules of scripts/make. They import each other, as with `python scripts/make/X.py`."""
    sys.path.insert(0, str(SCRIPTS))
    import corpus
    import make_base
    import make_preferences
    import make_quickstart
    import make_vision
    import make_vision_base

    sys.path.remove(str(SCRIPTS))
    return {
        "corpus": corpus,
        "make_base": make_base,
        "make_quickstart": make_quickstart,
        "make_preferences": make_preferences,
        "make_vision": make_vision,
        "make_vision_base": make_vision_base,
    }


def conversations(name: str) -> list[tuple[str, dict]]:
    """(the customer's message, the order) of each row."""
    rows = [json.loads(line)["messages"] for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return [(user["content"], json.loads(assistant["content"])) for _, user, assistant in rows]


def test_data_equals_the_output_of_its_script(tmp_path):
    for name in (
        "make_quickstart",
        "make_preferences",
        "make_moderation",
        "make_retrieval",
        "make_support",
        "make_vision",
        "make_general",
    ):
        subprocess.run([sys.executable, SCRIPTS / f"{name}.py", "--out", tmp_path], check=True)
    written = sorted(file.name for file in tmp_path.iterdir())
    assert written == sorted(file.name for file in DATA.glob("*.jsonl"))
    for name in written:
        if "vision" in name:  # other versions of zlib compress the same pixels to other bytes
            assert list(pictures(tmp_path / name)) == list(pictures(DATA / name)), name
        else:
            assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def pictures(file: Path) -> Iterator[tuple[tuple[int, int], bytes, str, dict[str, str]]]:
    """(size and pixels of the picture, question, answer) of each row of the vision quickstart."""
    for line in file.read_text().splitlines():
        system, user, assistant = json.loads(line)["messages"]
        assert system["content"] == "Answer with JSON."
        picture, question = user["content"]
        image = Image.open(BytesIO(b64decode(picture["image"].partition(",")[2]))).convert("RGB")
        yield image.size, image.tobytes(), question["text"], json.loads(assistant["content"])


def test_held_out_pictures_do_not_occur_in_training():
    train, test = ([*pictures(DATA / f"vision_{name}.jsonl")] for name in ("train", "test"))
    assert len({pixels for _, pixels, _, _ in train + test}) == len(train + test) >= 1100
    kinds = {tuple(answer["shape"].split()[2:]) for *_, answer in train}
    new = [tuple(answer["shape"].split()[2:]) not in kinds for *_, answer in test]
    assert sum(new) / len(new) == 0.5, "in half of the held-out pictures the shape must have a new color"


def test_every_answer_tells_what_is_in_its_picture(scripts):
    """The place has pixels of the color, and more of them if the shape is large."""
    scenes = sys.modules["scenes"]
    counts: dict[str, list[int]] = {"small": [], "large": []}
    for size, pixels, _, answer in pictures(DATA / "vision_test.jsonl"):
        article, extent, color, shape = answer["shape"].split()
        row, column = map(int, re.fullmatch(r"in row (\d), column (\d)", answer["place"]).groups())
        assert (article, shape in scenes.SHAPES) == ("a", True)
        image = Image.frombytes("RGB", size, pixels)
        left, top = (column - 1) * scenes.SIDE, (row - 1) * scenes.SIDE
        found = [
            count
            for count, pixel in image.crop((left, top, left + scenes.SIDE, top + scenes.SIDE)).getcolors()
            if max(abs(have - want) for have, want in zip(pixel, scenes.COLORS[color], strict=True)) <= 14
        ]
        assert len(found) == 1, answer
        counts[extent] += found
    small, large = (sum(found) / len(found) for found in counts.values())
    assert large > 1.7 * small


def test_every_answer_follows_from_its_message(scripts):
    words = sys.modules["shop"]
    for message, order in conversations("quickstart_train") + conversations("quickstart_test"):
        assert list(order) == ["name", "city", "item", "color", "quantity"]
        assert order["name"] in message
        assert order["city"] in message
        count = order["quantity"]
        noun = order["item"] if count == 1 else words.PLURALS[order["item"]]
        written = ["a", "an", "one", "1"] if count == 1 else [str(count), *words.COUNTS[count : count + 1]]
        assert re.search(rf"\b({'|'.join(written)}) {order['color']} {noun}\b", message, re.IGNORECASE), (
            message,
            order,
        )


def test_a_pair_has_the_preferred_answer_and_one_that_differs_in_form_or_number(scripts):
    """So the best answer is known; both files have no order in common."""
    train, test = (
        [json.loads(line) for line in (DATA / f"preferences_{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    orders = [row["prompt"][0]["content"] for row in train + test]
    assert len(set(orders)) == len(orders)
    chosen = re.compile(r"Dear (\w+), (\d+) ([\w ]+) will leave for (\w+) today\.")
    miscounted = 0
    for row in train + test:
        name, count, goods, city = chosen.fullmatch(row["chosen"]).groups()
        assert all(word in row["prompt"][0]["content"] for word in (name, city))
        if wrong := chosen.fullmatch(row["rejected"]):
            assert (wrong[1], wrong[4]) == (name, city)
            assert wrong[2] != count
            miscounted += 1
        else:
            assert all(word in row["rejected"] for word in (name, count, goods, city))
    assert 0.25 < miscounted / len(orders) < 0.35


def test_corpus_depends_only_on_its_seed_and_holds_no_json_answers(scripts, tokenizer):
    documents = scripts["corpus"].documents
    texts = list(islice(documents(1), 3000))
    assert texts == list(islice(documents(1), 3000))
    assert texts != list(islice(documents(2), 3000))
    chats = [text for text in texts if "<|im_start|>assistant" in text]
    assert len(chats) > 500
    assert not any("{" in text for text in chats)
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    assert max(lengths) < scripts["make_base"].CONTEXT


@pytest.mark.slow
def test_tokenizer_equals_the_output_of_its_script(scripts, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    make_base = scripts["make_base"]
    make_base.train_tokenizer(
        islice(scripts["corpus"].documents(make_base.SEED), make_base.TOKENIZER_DOCUMENTS), tmp_path
    )
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["make_base", "make_vision_base"])
def test_model_folder_is_small_and_documents_its_command(scripts, name):
    folder = scripts[name].ASSET
    assert sum(file.stat().st_size for file in folder.iterdir()) <= scripts[name].LIMIT
    readme = (folder / "README.md").read_text()
    assert f"python scripts/make/{name}.py" in readme
    assert f"seed {scripts[name].SEED}" in readme
    assert "provisional" not in readme.lower()


def test_plain_transformers_loads_the_base_in_bfloat16(scripts):
    import torch
    from transformers import AutoModelForCausalLM

    model, loading_info = AutoModelForCausalLM.from_pretrained(TINY, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for key, value in scripts["make_base"].ARCHITECTURE.items():
        assert getattr(model.config, key) == value, key


@given(text=st.text(max_size=60))
def test_tokenizer_round_trips_every_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_template_marks_assistant_tokens(tokenizer, scripts):
    assert tokenizer.chat_template == scripts["make_base"].TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A b"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "C"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA b<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("U<|im_end|>\n<|im_start|>assistant\n")
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "A b<|im_end|>C<|im_end|>"


def test_base_answers_fluently_and_without_json():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fxtune.data.config import DataConfig, QuestionsConfig
    from fxtune.training.answers import answer, exact_match, load_questions

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    questions = load_questions(
        DataConfig(questions=QuestionsConfig(path="builtin:quickstart_test", limit=20)), tokenizer
    )
    base = PreparedModel(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32))
    answers = answer(base, tokenizer, questions)
    assert exact_match(answers, questions) == 0
    named = [json.loads(question.answer)["name"] in text for question, text in zip(questions, answers, strict=True)]
    assert sum(named) >= 16, "the base answers fluently about the right customer; fine-tuning teaches only the format"


def test_shipped_adapter_names_its_base_on_every_machine():
    options = json.loads((TINY.parent / "tiny-orders" / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == "builtin:tiny"
