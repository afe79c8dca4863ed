"""scripts/make/gather.py: each text occurs once, order and hold-out are reproducible, long documents join a package's
files in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make" / "gather.py"


@pytest.fixture
def packages(tmp_path) -> Path:
    """Packages of 12 and 3 modules, with a copy, a binary file, a short file, a file with one long line and an unknown
    suffix.
    """
    root = tmp_path / "packages"
    for package, count in (("alpha", 12), ("beta", 3)):
        for index in range(count):
            file = root / package / ("inner" if index % 2 else "") / f"m{index:02}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{package}_{index} = {line}\n" for line in range(30)))
    (root / "beta" / "copy.py").write_text((root / "alpha" / "m00.py").read_text())
    (root / "beta" / "binary.txt").write_bytes(b"\xff\xfe" * 300)
    (root / "beta" / "short.md").write_text("too short")
    (root / "beta" / "table.txt").write_text("0" * 5000)
    (root / "beta" / "picture.svg").write_text("<svg>" * 100)
    return root


def gather(packages: Path, out: Path, *options: str) -> list[dict]:
    subprocess.run(
        [sys.executable, str(SCRIPT), str(out), "--roots", str(packages), *options], check=True, capture_output=True
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_each_text_occurs_once_and_the_seed_sets_the_order(packages, tmp_path):
    found = gather(packages, tmp_path / "a.jsonl")
    copies = {"alpha/m00.py", "beta/copy.py"}
    names = {file.relative_to(packages).as_posix() for file in packages.rglob("m*.py")}
    assert len(found) == 15
    assert {each["source"] for each in found} - copies == names - copies
    assert len({each["text"] for each in found}) == 15
    assert found == gather(packages, tmp_path / "b.jsonl")
    assert gather(packages, tmp_path / "c.jsonl", "--seed", "1") != found
    few = gather(packages, tmp_path / "d.jsonl", "--max-mb", "0.001")
    assert few == found[: len(few)]
    assert 0 < len(few) < 5


def test_joined_documents_hold_a_packages_files_in_order_up_to_the_length(packages, tmp_path):
    module = (packages / "alpha" / "m02.py").read_text()
    found = gather(
        packages, tmp_path / "a.jsonl", "--join", "package", "--length", str(len(module) * 5), "--min-chars", "10"
    )
    assert all(len(each["text"]) <= len(module) * 5 for each in found)
    assert (
        sum(each["text"].count("# ---- ") for each in found) == 16
    )  # with the short file, since its joined document is long enough
    for each in found:
        names = [line.removeprefix("# ---- ") for line in each["text"].splitlines() if line.startswith("# ---- ")]
        assert names == sorted(names, key=lambda name: ("inner" in name, name)), (
            "a folder's files come before those of its subfolders"
        )
        assert len({name.partition("/")[0] for name in names}) == 1
    assert any(module.strip() in each["text"] for each in found)
    assert any(" and 4 more" in each["source"] or " and 3 more" in each["source"] for each in found)
    cut = gather(packages, tmp_path / "b.jsonl", "--join", "package", "--length", "150", "--min-chars", "10")
    assert max(len(each["text"]) for each in cut) <= 150
    assert all(each["text"].endswith("\n") for each in cut)


def test_hold_out_depends_only_on_the_content(packages, tmp_path):
    def split(name: str, *options: str) -> tuple[set[str], set[str]]:
        held = tmp_path / f"{name}-held.jsonl"
        kept = gather(packages, tmp_path / f"{name}.jsonl", "--held-out-file", str(held), *options)
        return {each["text"] for each in kept}, {json.loads(line)["text"] for line in held.read_text().splitlines()}

    kept, held = split("a", "--held-out", "0.4")
    assert kept
    assert held
    assert not kept & held
    assert split("b", "--held-out", "0.4", "--seed", "5") == (kept, held)
    more, less = split("c", "--held-out", "0.8")[1], split("d", "--held-out", "0.1")[1]
    assert less <= held <= more
    with pytest.raises(subprocess.CalledProcessError):
        gather(packages, tmp_path / "e.jsonl", "--held-out", "0.4")
