"""Which modules of fxtune a file imports, read from its source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "fxtune"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module below `package` by its dotted name without the package's own: {"data.batches.plan": path, ...}."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, names: set[str], package: str = "fxtune", typing: bool = True) -> set[str]:
    """The modules in `names` that the file imports anywhere. `typing`: also those under `if TYPE_CHECKING:`."""
    found = set()
    everywhere, for_typing = _imports(path)
    for node in everywhere:
        if node in for_typing and not typing:
            continue
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{path}: write absolute imports; a relative one hides its target"
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        for full in imported:
            if full == package or full.startswith(f"{package}."):
                name = full.removeprefix(package).removeprefix(".")
                while name and name not in names:
                    name = name.rpartition(".")[0]
                found.add(name)
    return found


@functools.cache
def _imports(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[ast.Import | ast.ImportFrom]]:
    """The imports of a file, and the imports under `if TYPE_CHECKING:`. Each file is parsed once."""
    tree = ast.parse(path.read_text())
    for_typing = [node for part in tree.body if _for_type_checking(part) for node in ast.walk(part)]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return found, [node for node in found if node in for_typing]


def _for_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
