"""Chats with images become the ids that the family's own processor makes of them, and no token of an image is learned."""

from __future__ import annotations

import base64
import pickle
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from support.processors import FAMILIES, image_ids, processor, tokenizer

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.formats.registry import FORMATS, row_format
from fxtune.data.images.processor import ImageProcessor
from fxtune.models.kinds.image_decoder.families import concatenated

SIZES = {"a.png": (56, 56), "b.png": (90, 60)}
"""Width and height of the images in the folder."""
ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        Image.new("RGB", size, "red").save(tmp_path / name)
    return tmp_path


@pytest.fixture(params=FAMILIES)
def images(request, tmp_path):
    return ImageProcessor(processor(request.param, tmp_path / "model"), concatenated)


def encoder(images: ImageProcessor, row: dict[str, Any], **options: Any) -> Encoder:
    return Encoder(images.processor.tokenizer, row_format(row), images=images, **options)


def encoded(images: ImageProcessor, row: dict[str, Any], folder: Any, **options: Any) -> Document:
    (document,) = encoder(images, row, **options).encode([row], [folder])
    assert isinstance(document, Document), document
    assert len(document.ids) == len(document.supervised)
    return document


def refused(images: ImageProcessor, row: dict[str, Any], folder: Any, **options: Any) -> str:
    (reason,) = encoder(images, row, **options).encode([row], [folder])
    assert isinstance(reason, str), reason
    return reason


def by_processor(images: ImageProcessor, messages: list[dict[str, Any]], names: list[str]) -> list[int]:
    """The ids that transformers' processor makes of a chat, which is what a server does with it."""
    whole = images.processor
    text = whole.tokenizer.apply_chat_template(messages, tokenize=False)
    pictures = [[Image.new("RGB", SIZES[name], "red") for name in names]]
    return list(whole(text=[text], images=pictures, add_special_tokens=False)["input_ids"][0])


def is_same(images: ImageProcessor, ids: list[int], expected: list[int]) -> bool:
    """Qwen3.5's prompt for an answer ends between two newlines, which are one token inside of a text."""
    tokenizer = images.processor.tokenizer
    return ids == expected or (thinks(images) and tokenizer.decode(ids) == tokenizer.decode(expected))


def thinks(images: ImageProcessor) -> bool:
    return "<think>" in images.processor.tokenizer.chat_template


def learned(document: Document, images: ImageProcessor) -> str:
    ids = [token for token, learn in zip(document.ids, document.supervised, strict=True) if learn]
    return images.processor.tokenizer.decode(ids)


def part(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [text("\nLook: "), part("a.png"), text("\n\nand "), part("b.png"), part("a.png"), text("?\n")]},
    ANSWER,
    {"role": "user", "content": [part("b.png")]},
    {"role": "assistant", "content": "blue"},
]  # fmt: skip
NAMES = ["a.png", "b.png", "a.png", "b.png"]


def test_ids_are_the_ids_of_the_processor(images, folder):
    document = encoded(images, {"messages": CHAT}, folder)
    assert is_same(images, document.ids, by_processor(images, CHAT, NAMES))
    last = "\n</think>\n\nblue" if thinks(images) else "blue"  # the prompt opens the thoughts
    assert learned(document, images) == f"red<|im_end|>{last}<|im_end|>"
    assert [image.image.name for image in document.images] == NAMES
    for image in document.images:
        assert document.ids[image.start : image.end] == image_ids(images, *image.image.size)
        assert image.image.size == SIZES[image.image.name][::-1]


def test_marks_and_columns_give_the_same_document(images, folder):
    row = {
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "\nLook: <image>\n\nand <image><image>?\n"},
            {"from": "gpt", "value": "red"},
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": "blue"},
        ],
        "images": NAMES,
    }
    document, other = encoded(images, row, folder), encoded(images, {"messages": CHAT}, folder)
    assert document == other


def test_bytes_and_data_uris_need_no_folder(images, folder):
    data = (folder / "b.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    for value in ({"bytes": data, "path": None}, uri):
        row = {"messages": [{"role": "user", "content": [part(value)]}, ANSWER]}
        document = encoded(images, row, None)
        expected = by_processor(images, [{"role": "user", "content": [part("")]}, ANSWER], ["b.png"])
        assert is_same(images, document.ids, expected)
        assert document.images[0].image.read() == data


def test_a_quoted_placeholder_is_text_and_never_an_image(images, folder):
    """Beside an image or alone, in a chat. The tokens that stand for images are as many as the images need."""
    for name in images.placeholders:
        quoting = [{"role": "user", "content": [text(f"What is {name}?"), part("a.png")]}, ANSWER]
        document = encoded(images, {"messages": quoting}, folder)
        assert document.escaped
        assert len(document.images) == 1
        own = image_ids(images, 56, 56)
        placed = document.images[0]
        assert document.ids[placed.start : placed.end] == own
        rest = document.ids[: placed.start] + document.ids[placed.end :]
        assert not set(rest) & set(images.placeholders.values())
        row = {"messages": [{"role": "user", "content": name}, ANSWER]}
        alone = encoded(images, row, folder, unused=["images"])
        assert not set(alone.ids) & set(images.placeholders.values())


def test_a_placeholder_in_plain_text_or_ids_is_a_bad_row(images):
    (name, number), *_ = images.placeholders.items()
    assert "stands for an image" in refused(images, {"text": f"a {name} b"}, None)
    assert "stands for an image" in refused(images, {"input_ids": [5, number, 6]}, None)
    assert isinstance(encoder(images, {"text": "a b"}).encode([{"text": "a b"}])[0], Document)


PNG = "data:image/png;base64,iVBORw0KGgo="
SPOKEN = [{"role": "user", "content": "What?"}, ANSWER]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"file_name": "pics/a.png", "text": "a red circle"}, "file_name"),
        ({"image": "a.png", "text": "a red circle"}, "image"),
        ({"url": "https://example.org/a b.JPG?width=3", "prompt": "What?", "completion": "red"}, "url"),
        ({"messages": SPOKEN, "image_url": "a.png"}, "image_url"),
        ({"messages": SPOKEN, "file": {"bytes": b"\x89PNG\r", "path": None}}, "file"),
        ({"messages": SPOKEN, "image_url": [{"url": PNG}]}, "image_url"),
        ({"prompt": "What?", "chosen": "red", "rejected": "a cat", "file_path": "a.webp"}, "file_path"),
        ({"prompt": "What?", "completion": "red", "label": True, "file_path": "a.webp"}, "file_path"),
        ({"messages": [{"role": "user", "content": "<image>What?"}, ANSWER]}, "images"),
        ({"prompt": "<image>What?", "completion": "red"}, "images"),
    ],
)
def test_a_row_that_would_lose_its_image_is_bad(tmp_path, folder, row, column):
    """For a model that reads images; `unused` says that it is meant."""
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)
    reason = refused(images, row, folder)
    assert "`images`" in reason
    assert f"`unused: [{column}]`" in reason
    for found in (
        encoder(images, row, unused=[column]).encode([row], [folder]),
        Encoder(images.processor.tokenizer, row_format(row), unused=["image"]).encode([row], [folder]),
    ):
        assert not isinstance(found[0], str), found


@pytest.mark.parametrize(
    "more",
    [
        {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "file_name": "a.png"},
        {"messages": SPOKEN, "file_name": "rows.jsonl", "url": "https://example.org/page", "images": None},
        {"messages": [SPOKEN[0], {"role": "assistant", "content": "Write <image>."}]},
        {"text": "In SVG, <image> shows a.png"},
    ],
)
def test_a_row_with_its_images_and_a_row_of_text_are_used(tmp_path, folder, more):
    encoded(ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated), more, folder)


def test_images_are_never_learned_even_in_a_turn_that_is(images, folder):
    from fxtune.data.formats.row_format import ChatRole, LearnConfig

    learn = LearnConfig(roles=[ChatRole.user, ChatRole.assistant])
    document = encoded(images, {"messages": CHAT[1:3]}, folder, learn=learn)
    assert "Look" in learned(document, images)
    for image in document.images:
        assert not any(document.supervised[image.start : image.end])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.png", r"messages[0].content[0]: missing.png: there is no such file"),
        ("broken.png", "broken.png: it is no image"),
        ("cut.png", "cut.png: it cannot be decoded"),
        ("../a.png", "leads out of"),
        ("https://example.org/a.png", "not fetched while training"),
        ("thin.png", "thin.png: the model's processor takes no such image"),
    ],
)
def test_an_image_that_cannot_be_used_is_a_bad_row(tmp_path, folder, value, reason):
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)
    (folder / "broken.png").write_bytes(b"no image")
    Image.effect_noise((64, 64), 80).save(folder / "cut.png")
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:1500])
    Image.new("RGB", (1000, 2)).save(folder / "thin.png")
    row = {"messages": [{"role": "user", "content": [part(value)]}, ANSWER]}
    assert reason in refused(images, row, folder)


def test_a_model_of_text_refuses_rows_with_images(folder):
    row = {"messages": CHAT}
    (reason,) = Encoder(tokenizer("llava"), FORMATS["messages"]).encode([row], [folder])
    assert "messages[1].content[1] has an image, and only text is read here" in reason


def test_a_template_that_drops_the_images_of_a_turn_is_a_bad_row(tmp_path, folder):
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content if message.content is string else 'a' }}"
                        "<|im_end|>{% endfor %}")  # fmt: skip
    row = {"messages": [{"role": "user", "content": [part("a.png")]}, ANSWER]}
    assert "0 placeholders" in refused(images, row, folder, chat_template=str(template))


def test_a_template_that_takes_only_parts(tmp_path, folder):
    """SmolVLM's writes nothing of a content that is a string."""
    images = ImageProcessor(processor("idefics3", tmp_path / "model"), concatenated)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }}:{% for part in message.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    row = {"messages": CHAT[1:3]}
    document = encoded(images, row, folder, chat_template=str(template))
    assert learned(document, images) == "red<end_of_utterance>"
    assert len(document.images) == 3


def test_a_long_chat_is_divided_at_its_turns_with_its_images(images, folder):
    row = {"messages": CHAT}
    made = encoder(images, row)
    whole = encoded(images, row, folder)
    made.longest = len(whole.ids) - 1
    found = made.split(row, whole, folder).pieces
    assert [[image.image.name for image in piece.images] for piece in found] == [NAMES[:3], NAMES]
    for piece in found:
        for image in piece.images:
            assert piece.ids[image.start : image.end] == image_ids(images, *image.image.size)


@pytest.mark.parametrize("steps", [False, True])
def test_each_piece_of_a_long_chat_has_all_earlier_images_or_is_counted(images, folder, steps):
    """Exchanges, or the steps of an agent whose tools return images; each answer says how many images precede it."""
    names, turns = ["a.png", "b.png"] * 2, []
    for number in range(8):
        shown = [part(names[number // 2])] if number % 2 == 0 else []
        role = "tool" if steps and number else "user"
        turns.append({"role": role, "content": [text(f"question {number}"), *shown]})
        turns.append({"role": "assistant", "content": f"<{number // 2 + 1}>"})
    row = {"messages": turns}
    made, whole = encoder(images, row), encoded(images, row, folder)
    lengths = []
    for longest in range(len(whole.ids) - 1, 30, -23):
        made.longest = longest
        found = made.split(row, whole, folder)
        answers = 0
        for piece in found.pieces:
            assert len(piece.ids) <= longest
            *_, last = learned(piece, images).split("<|im_end|>")[:-1] or [""]
            if last:  # else the answer is cut, and counted
                end = max(index for index, learn in enumerate(piece.supervised) if learn)
                seen = [image.image.name for image in piece.images if image.start < end]
                assert seen == names[: int(last.removeprefix("\n</think>\n\n")[1:-1])]
            answers += sum(piece.supervised)
        # The last answer of each piece has the three tokens that end its thoughts, if the answer is not cut.
        more = answers + found.counts.lost_supervised - sum(whole.supervised)
        assert more in range(0, 3 * (len(found.pieces) + found.counts.dropped) + 1, 3) if thinks(images) else more == 0
        shown = [len(piece.images) for piece in found.pieces]
        assert found.counts.repeated_images == sum(shown) - max(shown, default=0)
        lengths.append(len(found.pieces))
    assert max(lengths) > 2


def test_a_cut_leaves_each_image_whole(images, folder):
    learn = [ANSWER, {"role": "user", "content": [text("a"), part("a.png"), text("b")]}, ANSWER]
    row = {"messages": [{"role": "user", "content": "?"}, *learn]}
    whole = encoded(images, row, folder)
    made = encoder(images, row)
    placed = whole.images[0]
    for longest in range(placed.start - 3, placed.end + 3):
        made.longest = longest
        from fxtune.data.chat.split import truncate_chat

        (piece,) = truncate_chat(whole, longest).pieces
        inside = placed.start < longest < placed.end
        assert len(piece.ids) == (placed.start if inside else longest)
        assert len(piece.images) == (longest >= placed.end)


def test_answers_of_a_pair_have_the_same_images(images, folder):
    row = {
        "prompt": [{"role": "user", "content": [part("a.png"), text("colour, please, in one word?"), part("b.png")]}],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "some"}],
    }
    made = encoder(images, row)
    (group,) = made.encode([row], [folder])
    assert isinstance(group, EncodedGroup), group
    assert [[image.image.name for image in document.images] for document in group.documents] == [
        ["a.png", "b.png"]
    ] * 2


def test_a_prompt_loses_the_text_before_its_images_or_the_pair_is_left_out(images, folder):
    row = {
        "prompt": [{"role": "user", "content": [text("one:"), part("a.png"), text("what?")]}],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "some"}],
    }
    made = encoder(images, row)
    (group,) = made.encode([row], [folder])
    assert isinstance(group, EncodedGroup), group
    lengths = [len(document.ids) for document in group.documents]
    first = group.documents[0].images[0].start
    for over in (first - 1, first):  # one token is left before the image, because some templates open it
        made.longest = sum(lengths) - 2 * over
        found = made.shorten(group.documents)
        assert [len(document.ids) for document in found.pieces] == (
            [length - over for length in lengths] if over < first else []
        )
        assert found.counts.dropped == (over == first)
        for document in found.pieces:
            assert [image.start for image in document.images] == [1]
            assert document.ids[1 : 1 + document.images[0].tokens] == image_ids(images, 56, 56)


def test_another_image_in_the_prompt_of_one_answer_is_a_bad_row(images, folder):
    Image.new("RGB", SIZES["a.png"], "blue").save(folder / "c.png")
    chats = [
        [{"role": "user", "content": [part(name)]}, {"role": "assistant", "content": word}]
        for name, word in (("a.png", "red"), ("c.png", "blue"))
    ]
    row = {"chosen": chats[0], "rejected": chats[1]}
    assert "prompt" in refused(images, row, folder)


def test_an_encoder_can_be_sent_to_a_worker(images, folder):
    row = {"messages": CHAT}
    copy = pickle.loads(pickle.dumps(encoder(images, row)))
    assert copy.encode([row], [folder]) == encoder(images, row).encode([row], [folder])


def test_a_picture_of_a_camera_is_counted_upright(tmp_path, folder):
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)
    exif, out = Image.Exif(), BytesIO()
    exif[0x0112] = 6
    Image.new("RGB", (112, 28)).save(out, "JPEG", exif=exif)
    (document,) = [
        encoded(images, {"messages": [{"role": "user", "content": [part({"bytes": out.getvalue()})]}, ANSWER]}, None)
    ]
    assert document.images[0].image.size == (112, 28)
