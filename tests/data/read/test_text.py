"""Text files as documents, paragraphs or lines."""

from support.rows import places, values

from fxtune.data.config import TextUnit


def test_text_units_are_documents_paragraphs_or_lines(tmp_path):
    (tmp_path / "a.md").write_text("\n# one\nmore\n\n\ntwo\n")
    assert values(tmp_path / "a.md") == [{"text": "\n# one\nmore\n\n\ntwo\n"}]
    assert values(tmp_path / "a.md", text_unit=TextUnit.paragraph) == [{"text": "# one\nmore"}, {"text": "two"}]
    assert places(tmp_path / "a.md", text_unit=TextUnit.paragraph) == [":2", ":6"]
    assert [row["text"] for row in values(tmp_path / "a.md", text_unit=TextUnit.line)] == ["# one", "more", "two"]
    assert places(tmp_path / "a.md", text_unit=TextUnit.line) == [":2", ":3", ":6"]
