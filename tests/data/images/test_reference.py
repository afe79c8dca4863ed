"""Which images a row may name."""

from __future__ import annotations

import base64
import os
from io import BytesIO

import pytest
from PIL import Image

from fxtune.data.formats.values import RowError
from fxtune.data.images import reference
from fxtune.data.images.reference import EMBEDDED, find_image


def picture(color: str = "red", size: tuple[int, int] = (6, 4)) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    (data / "pictures").mkdir(parents=True)
    (data / "pictures" / "a.png").write_bytes(picture())
    (tmp_path / "secret.png").write_bytes(picture("blue"))
    return data


@pytest.mark.parametrize("form", ["relative", "absolute", "file", "object", "dots"])
def test_a_file_beside_the_data(folder, form):
    path = folder / "pictures" / "a.png"
    value = {
        "relative": "pictures/a.png",
        "absolute": str(path),
        "file": f"file://{path}",
        "object": {"bytes": None, "path": "pictures/a.png"},
        "dots": "pictures/../pictures/a.png",
    }[form]
    found = find_image(value, folder)
    assert found.size == (4, 6)
    assert found.path == str(path)
    assert found.read() == path.read_bytes()
    assert not found.data


@pytest.mark.parametrize("form", ["bytes", "object", "uri", "lines", "percent"])
def test_bytes_in_the_row(form):
    data = picture()
    value = {
        "bytes": data,
        "object": {"bytes": data, "path": "a.png"},
        "uri": "data:image/png;base64," + base64.b64encode(data).decode(),
        "lines": "data:image/png;base64," + base64.encodebytes(data).decode(),
        "percent": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    }[form]
    found = find_image(value, None)
    assert found.read() == data
    assert found.path == ""
    assert found.name == ("a.png" if form == "object" else EMBEDDED)


def test_the_digest_is_of_the_bytes(folder):
    same = find_image(picture(), None)
    assert find_image("pictures/a.png", folder).digest == same.digest
    assert find_image(picture("blue"), None).digest != same.digest


@pytest.mark.parametrize(
    "path", ["../secret.png", "pictures/../../secret.png", "ABSOLUTE", "LINK", "FOLDER/secret.png"]
)
def test_no_path_leaves_the_folder_of_the_data_file(folder, path):
    secret = folder.parent / "secret.png"
    (folder / "LINK").symlink_to(secret)
    (folder / "FOLDER").symlink_to(folder.parent)
    with pytest.raises(RowError, match="leads out of"):
        find_image(str(secret) if path == "ABSOLUTE" else path, folder)


def test_links_inside_the_folder_are_followed(folder):
    (folder / "link.png").symlink_to("pictures/a.png")
    assert find_image("link.png", folder).path == str(folder / "pictures" / "a.png")
    linked = folder.parent / "other"
    linked.symlink_to(folder)  # the user's own link to the folder leads nowhere else
    assert find_image("pictures/a.png", linked).size == (4, 6)


@pytest.mark.parametrize("url", ["http://example.org/a.png", "https://example.org/a.png", "s3://bucket/a.png"])
def test_addresses_are_not_fetched(folder, url):
    with pytest.raises(RowError, match="not fetched while training"):
        find_image(url, folder)


def test_a_pipe_is_not_opened(folder):
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(RowError, match="pipe"):
        find_image("pipe.png", folder)


@pytest.mark.parametrize(
    "value",
    [None, "", 3, {}, {"path": None, "bytes": None}, {"bytes": "text"}, ["a.png"], "data:image/png;base64,@@", "no\0",
     "pictures", "missing.png", b"broken", "x" * 5000],
)  # fmt: skip
def test_what_is_no_image_is_a_bad_row(folder, value):
    with pytest.raises(RowError) as raised:
        find_image(value, folder)
    assert len(str(raised.value)) < 500


def test_base64_is_read_with_and_without_a_uri_also_in_lines(folder):
    data = picture() * 2
    for text in (base64.b64encode(data).decode(), base64.encodebytes(data).decode()):
        assert find_image(text, folder) == find_image(f"data:image/png;base64,{text}", None)


def test_heic_is_told_what_to_write(folder):
    with pytest.raises(RowError, match=r"HEIC.*convert"):
        find_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", None)


def test_a_large_file_is_refused(folder, monkeypatch):
    monkeypatch.setattr(reference, "MAX_BYTES", 10)
    for value in ("pictures/a.png", picture()):
        with pytest.raises(RowError, match="limit"):
            find_image(value, folder)


def test_rows_of_the_hub_have_no_files():
    with pytest.raises(RowError, match="hub"):
        find_image("pictures/a.png", None)


def test_a_file_that_changed_is_an_error(folder):
    found = find_image("pictures/a.png", folder)
    (folder / "pictures" / "a.png").write_bytes(picture("lime", (60, 40)))
    with pytest.raises(RowError, match="changed"):
        found.read()
