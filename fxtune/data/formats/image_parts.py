"""The images in the messages of a chat.

There are two notations. OpenAI, Qwen and TRL write the content of a message as a list of parts: `{type: text}`,
`{type: image}` or `{type: image_url}`. LLaVA, ShareGPT, LLaMA-Factory and ms-swift write `<image>` into the text and
list the images in a column of the row. A part of type image that names no image takes its image from this column, too.
This module turns both notations into one text, in which the character IMAGE stands for an image. The images of a
message are its list `images`, in the order of the text.

Models write no images, so `<image>` in an answer is text. In a question of a row without images, `<image>` is text for
a model that reads text alone. For a model that reads images, such a row is a bad row. So is a row with an image in a
column that fxtune does not read: the image would be lost (unread_image).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fxtune.data.formats.row_format import Conversation
from fxtune.data.formats.values import RowError, parse_json, require_text, short, type_name
from fxtune.system.terminal.units import counted

IMAGE = "\U0010fad3"
"""The private-use character that stands for an image in a text."""
MARK = "<image>"
COLUMNS = ("images", "image")
_PAYLOADS = ("image", "path", "url", "bytes", "image_url", "source")
_KNOWN = frozenset((*_PAYLOADS, "type", "detail"))
_NAME = re.compile(r"data:image/|[^\n]{1,255}\.(png|jpe?g|gif|webp|bmp|tiff?|avif|hei[cf])(\?\S*)?\s*$", re.IGNORECASE)
_BYTES = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\0|MM\0\*", re.DOTALL)
"""_NAME matches names, URLs and data: URIs of images. _BYTES matches the first bytes of image files."""
_PLACES = re.compile(f"({IMAGE}|{re.escape(MARK)})")


def read_content(content: Any, where: str) -> tuple[str, list[tuple[str, Any]]]:
    """Returns (the text of a message's content, a list of (place in the row, image) for each IMAGE in the text). If a
    part names no image, its image is None, and place_images() takes an image from the row's column. Raises RowError.
    """
    if not isinstance(content, (list, tuple)):
        return _text(content, where), []
    texts, images = [], []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(_text(part, place))
        elif isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(_text(part.get("text"), f"{place}.text"))
        elif isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            texts.append(IMAGE)
            images.append((place, _payload(part, place)))
        else:
            named = f"of type {short(part.get('type', [*part]))}" if isinstance(part, Mapping) else type_name(part)
            raise RowError(f"{place} is {named}; only parts with text or an image can be used")
    return "".join(texts), images


def place_images(chat: Conversation, row: Mapping[str, Any]) -> None:
    """Give each message its list `images`. Marks and parts that name no image take the next image of the row's column.
    Raises RowError if the messages need more or fewer images than the column has, or if an answer has an image."""
    column, listed = _column(row)
    rest, places = iter(listed), 0
    for message, where in zip(chat.messages, chat.places, strict=True):
        own = iter(message.pop("images", ()))
        content = message.get("content") or ""
        if message["role"] == "assistant":
            if IMAGE in content:
                raise RowError(f"{where} is an answer with an image, which no model learns to write")
            continue
        images, texts = [], []
        for text in _PLACES.split(content):
            place, value = where, None
            if text == IMAGE:
                place, value = next(own, (where, None))
            elif text != MARK or not column:
                texts.append(text)
                continue
            if value is None:
                places += 1
                if not column:
                    raise RowError(f"{place} names no image, and the row has no column `images`")
                place, value = column, next(rest, None)
            texts.append(IMAGE)
            images.append((place, value))
        if images:
            message.update(content="".join(texts), images=images)
    if places != len(listed):
        raise RowError(
            f"{column} has {counted(len(listed), 'images')}, and the messages have {counted(places, 'places')} for "
            f"them: {MARK} in a text that is no answer, or a part of type image. Write one for each image; the "
            f"source's `unused: [{column}]` would train without the images"
        )


def unread_image(row: Mapping[str, Any], read: Collection[str], questions: Iterable[str]) -> str | None:
    """The reason why a row without images is a bad row for a model that reads images; None if neither a column nor a
    question stands for an image. `read`: columns that fxtune reads, or that the user left unused. `questions`: texts
    in which MARK stands for an image."""
    column = next((name for name, value in row.items() if name not in read and is_image(value)), None)
    if column is not None:
        return (
            f"column {short(column)} has an image, and the row would be learned without it: name the column `images` "
            f"(the source's `columns`), beside `question` and `answer` alone, or beside `messages` with {MARK} in the "
            f"question. `unused: [{column}]` would train without the image"
        )
    if any(MARK in text for text in questions):
        return (
            f"a question has {MARK}, and the row has no image: name its images in a column `images`. If {MARK} is "
            "text, set the source's `unused: [images]`"
        )
    return None


def is_image(value: Any) -> bool:
    """Whether the value of a column is an image, names an image, or is a list that begins with such a value."""
    if isinstance(value, Mapping):
        return any(is_image(value.get(key)) for key in _PAYLOADS)
    if isinstance(value, (list, tuple)):
        return any(map(is_image, value[:1]))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _BYTES.match(value) is not None
    return isinstance(value, str) and _NAME.match(value) is not None


def for_chats(column: str, names: str) -> str:
    """The reason why a row of plain text cannot have `column`. `names`: columns that would make the row a chat."""
    way = f". The columns {names} make a chat (the source's `columns`); write {MARK} where the image belongs"
    return f"{column} is for chats, and this prompt is a text{way if column in COLUMNS else ''}"


def images_of(chat: Conversation) -> Iterator[tuple[str, Any]]:
    """Yield (place in the row, image) for each image of a chat, in order. The image is as the row names it."""
    for message in chat.messages:
        yield from message.get("images", ())


def _text(text: Any, where: str) -> str:
    if IMAGE in require_text(text, where):
        raise RowError(f"{where} holds a private-use character (U+10FAD3) that fxtune uses for images; remove it")
    return str(text)


def _payload(part: Mapping[str, Any], where: str) -> Any:
    if unknown := [key for key in part if key not in _KNOWN and _is_given(part[key])]:
        raise RowError(f"{where}.{short(unknown[0])} is not read; data.image_tokens bounds the size of images")
    given = [(key, part[key]) for key in _PAYLOADS if _is_given(part.get(key))]
    if len(given) > 1:
        raise RowError(f"{where} names its image twice ({given[0][0]}, {given[1][0]}); keep one")
    if not given:
        return None
    ((key, value),) = given
    if key == "source" and isinstance(value, Mapping) and "data" in value:  # the form of Anthropic's API
        return f"data:{value.get('media_type')};base64,{value['data']}"
    return value.get("url") if key in ("image_url", "source") and isinstance(value, Mapping) else value


def _is_given(value: Any) -> bool:
    """Whether the value of a key or of a column is more than nulls. Arrow writes null for missing keys."""
    return any(map(_is_given, value.values())) if isinstance(value, Mapping) else value is not None


def columns_of(row: Mapping[str, Any]) -> list[str]:
    """The columns among COLUMNS that name images in this row."""
    return [name for name in COLUMNS if row.get(name) not in ("", [], ()) and _is_given(row.get(name))]


def _column(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Returns (the column with images, its images), or ("", []) if the row has no such column. Raises RowError."""
    given = columns_of(row)
    if len(given) > 1:
        raise RowError("images and image are two columns of images; keep one")
    if not given:
        return "", []
    value = row[given[0]]
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list in a cell of a CSV file
        value = parse_json(value, given[0])
    return given[0], list(value) if isinstance(value, (list, tuple)) else [value]
