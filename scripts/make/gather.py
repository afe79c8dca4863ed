"""Gathers text from this machine: sources and documentation of the standard library and the installed packages.

    python scripts/make/gather.py text.jsonl --max-mb 200                        # a document a file
    python scripts/make/gather.py long.jsonl --join package --length 300000      # long documents: a package's files one after another
    python scripts/make/gather.py text.jsonl --held-out 0.02 --held-out-file held.jsonl

Writes one JSON object a line: {"text": ..., "source": ...}. Files are left out if their content was seen before (licenses,
vendored copies), if they are not UTF-8, shorter than --min-chars, or have a line that no person would write. The order depends on
--seed alone. A document's content decides whether it is held out, so that does not change with what else is gathered.

Joined documents are for long contexts: a module is explained by the ones before it. Each file's name is written above it. The text
belongs to the packages' authors: use it for experiments on this machine, do not distribute it.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".py", ".md", ".rst", ".txt")
LONGEST_LINE = 1000
"""Characters; a file with a longer line is data or generated."""


class Document(NamedTuple):
    text: str
    source: str
    """Where it is from: `package/path`; for a joined document the first file's, and the number of files."""


class File(NamedTuple):
    path: Path
    name: str
    """The path below its root."""
    size: int

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


def standard_roots() -> list[Path]:
    """The standard library and every folder with installed packages."""
    installed = [
        *site.getsitepackages(),
        *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
    ]
    found = [Path(path).resolve() for path in (sysconfig.get_paths()["stdlib"], *installed)]
    return list(dict.fromkeys(path for path in found if path.is_dir()))


def find(roots: Iterable[Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[File]:
    """The files below `roots`, root by root, sorted by name. Links to folders are not followed."""
    roots = [Path(root).resolve() for root in roots]
    found = []
    for root in roots:
        for folder, below, names in os.walk(root):
            # A root inside another (site-packages in the standard library) is read on its own.
            below[:] = sorted(name for name in below if name != "__pycache__" and Path(folder, name) not in roots)
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix in suffixes and path.is_file() and (size := path.stat().st_size):
                    found.append(File(path, path.relative_to(root).as_posix(), size))
    return found


def documents(
    files: Iterable[File], seed: int = 0, min_chars: int = 200, length: int | None = None
) -> Iterator[Document]:
    """Documents in an order drawn from `seed`, one at a time. Only the hashes of their contents stay in memory.

    `length` None: one document a file. Else: the files of a package joined, up to `length` characters; a longer file becomes
    several documents, cut at a line's end.
    """
    seen: set[bytes] = set()
    if length is None:
        for file in sorted(files, key=lambda file: _lot(seed, file.name)):
            text = _read(file.path, seen, min_chars)
            if text is not None:
                yield Document(text, file.name)
        return
    for group in sorted(_groups(files, length), key=lambda group: _lot(seed, group[0].name)):
        parts = [(file, text) for file in group if (text := _read(file.path, seen, 1)) is not None]
        joined = "".join(_part(file, text.strip()) for file, text in parts)
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        for text in _cut(joined, length):
            if len(text) >= min_chars:
                yield Document(text, f"{parts[0][0].name}{more}")


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is held out; its text alone decides."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"held out").digest(), "big") < share * 2**64


def write(
    found: Iterable[Document], out: Path, max_mb: float, held_out: float = 0.0, held_out_file: Path | None = None
) -> dict:
    """Write documents as JSONL up to `max_mb` megabytes of text. Returns counts and bytes of both files."""
    counts = dict(documents=0, bytes=0, held_out=0, held_out_bytes=0)
    with ExitStack() as opened:
        kept = opened.enter_context(out.open("w", encoding="utf-8"))
        aside = opened.enter_context(held_out_file.open("w", encoding="utf-8")) if held_out_file else None
        for document in found:
            held = aside is not None and is_held_out(document.text, held_out)
            (aside if held and aside else kept).write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")
            counts["held_out" if held else "documents"] += 1
            counts["held_out_bytes" if held else "bytes"] += len(document.text.encode())
            if counts["bytes"] + counts["held_out_bytes"] >= max_mb * 1e6:
                break
    return counts


def _lot(seed: int, name: str) -> bytes:
    return blake2b(f"{seed} {name}".encode(), digest_size=8).digest()


def _read(path: Path, seen: set[bytes], min_chars: int) -> str | None:
    """The text of a file; None if it is no text, too short, generated, or was seen before."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None
    if len(text.strip()) < min_chars or "\0" in text or max(map(len, text.splitlines()), default=0) > LONGEST_LINE:
        return None
    key = blake2b(text.strip().encode(), digest_size=16).digest()
    if key in seen:
        return None
    seen.add(key)
    return text


def _groups(files: Iterable[File], length: int) -> Iterator[list[File]]:
    """Files of one package of at most `length` bytes together, or a single one that is longer."""
    group: list[File] = []
    together = 0
    for file in files:
        size = len(_part(file, "")) + file.size
        if group and (file.package != group[0].package or together + size > length):
            yield group
            group, together = [], 0
        group.append(file)
        together += size
    if group:
        yield group


def _part(file: File, text: str) -> str:
    return f"# ---- {file.name}\n\n{text}\n\n"


def _cut(text: str, length: int) -> Iterator[str]:
    while len(text) > length:
        at = text.rfind("\n", 0, length) + 1 or length
        yield text[:at]
        text = text[at:]
    yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--roots", type=Path, nargs="+", help="folders to look in (default: stdlib and site-packages)")
    parser.add_argument("--suffixes", nargs="+", default=list(SUFFIXES), help="(default: %(default)s)")
    parser.add_argument("--max-mb", type=float, default=200, help="megabytes of text (default: %(default)s)")
    parser.add_argument(
        "--min-chars", type=int, default=200, help="shorter documents are left out (default: %(default)s)"
    )
    parser.add_argument("--join", choices=("none", "package"), default="none", help="package: long documents")
    parser.add_argument(
        "--length", type=int, default=300_000, help="characters of a joined document (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", type=float, default=0.0, help="share of the documents that go to --held-out-file"
    )
    parser.add_argument("--held-out-file", type=Path)
    asked = parser.parse_args()
    if bool(asked.held_out) != bool(asked.held_out_file) or not 0 <= asked.held_out < 1:
        parser.error("--held-out (a share below 1) and --held-out-file belong together")
    files = find(asked.roots or standard_roots(), tuple(asked.suffixes))
    found = documents(files, asked.seed, asked.min_chars, asked.length if asked.join == "package" else None)
    counts = write(found, asked.out, asked.max_mb, asked.held_out, asked.held_out_file)
    print(
        f"{counts['documents']:,} documents, {counts['bytes'] / 1e6:,.1f} MB in {asked.out}; held out: {counts['held_out']:,} "
        f"documents, {counts['held_out_bytes'] / 1e6:,.1f} MB"
    )


if __name__ == "__main__":
    main()
