"""The pages of this project, their commands and their plugins."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.name: path.read_text() for path in DOCUMENTS}
README = TEXTS["README.md"]
EXAMPLES = {
    code.splitlines()[0][2:]: code
    for page in ("plugins.md", "rl.md")
    for code in re.findall(r"```python\n(# \w+\.py\n.*?)```", TEXTS[page], re.DOTALL)
}
"""The plugins of docs/plugins.md and docs/rl.md, by the names of their files."""


def commands(text: str) -> list[str]:
    """Every `fxtune ...` or `python -m fxtune ...` line of a document's code blocks, without its comment."""
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL))
    lines = [line.split("  #")[0].strip() for line in re.sub(r"\\\n *", "", blocks).splitlines()]
    return [line.removeprefix("python -m ") for line in lines if line.startswith(("fxtune ", "python -m fxtune "))]


ALL = sorted({line for text in TEXTS.values() for line in commands(text) if "=mine" not in line})
"""The commands of all pages, but those with a recipe of the reader's own, which tests/cli/test_programs.py runs."""
