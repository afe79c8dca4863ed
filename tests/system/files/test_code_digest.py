"""The digest of fxtune's source code."""

from fxtune.system.files import code_digest


def test_digest_changes_with_names_and_content_of_python_files_only(tmp_path, monkeypatch):
    monkeypatch.setattr(code_digest, "PACKAGE", tmp_path)
    (tmp_path / "kernels").mkdir()
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("kernels/c.py", "3"), ("notes.txt", "4")):
        (tmp_path / name).write_text(text)
        digests.append(code_digest.digest.__wrapped__())
    assert len(set(digests)) == 4
    assert digests[3] == digests[4], "only Python counts"
    part = code_digest.digest.__wrapped__("kernels")
    (tmp_path / "a.py").write_text("5")
    assert code_digest.digest.__wrapped__("kernels") == part
    assert len(part) == 12
