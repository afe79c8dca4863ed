"""Chat rows, JSONL files of them, and the rows that a source reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.documents import EXAMPLES

from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import open_source

CHATS = [
    {"messages": [{"role": "user", "content": f"question {i} é"}, {"role": "assistant", "content": "yes"}]}
    for i in range(7)
]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one row per line. A string is written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_ranked() -> None:
    """Write into the working directory rows.jsonl, 96 questions with three answers each, one of them right, and the
    plugins of docs/plugins.md that read and rank them."""
    for name in ("ranked.py", "listwise.py"):
        Path(name).write_text(EXAMPLES[name])
    draw, rows = random.Random(0), []
    for number in range(96):
        candidates = [("It is seven.", 1), ("It is a lamp.", 0), ("Ask me again.", 0)]
        draw.shuffle(candidates)
        texts, relevance = zip(*candidates, strict=True)
        rows.append({"query": f"Which number? {number}", "candidates": texts, "relevance": relevance})
    write_jsonl(Path("rows.jsonl"), rows)


def write_pairs() -> None:
    """Write pairs.jsonl into the working directory: 48 questions, each with a chosen and a rejected answer."""
    draw, rows = random.Random(0), []
    for number in range(48):
        chosen, rejected = "Seven." + " Yes." * draw.randrange(4), "A lamp." + " No." * draw.randrange(4)
        rows.append({"prompt": f"Which number? {number}", "chosen": chosen, "rejected": rejected})
    write_jsonl(Path("pairs.jsonl"), rows)


def values(path: str | Path, **config: Any) -> list[Any]:
    """The rows of a source. Fails if one is bad."""
    found = list(open_source(SourceConfig(path=str(path), **config)).rows())
    assert all(row.error is None for row in found), found
    return [row.value for row in found]


def places(path: str | Path, **config: Any) -> list[str]:
    """The position of each row in its file, without the path."""
    return [row.where.removeprefix(str(path)) for row in open_source(SourceConfig(path=str(path), **config)).rows()]


TOKENIZE_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def numbered_chat(number: int, answer: str | None = None) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"what is {number}"},
            {"role": "assistant", "content": answer or f"answer number {number} é" * (number % 4 + 1)},
        ]
    }


def token_folders(tmp_path: Path) -> list[Path]:
    """The folders of the token cache below `tmp_path`, sorted."""
    return sorted(path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
