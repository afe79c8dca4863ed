"""Imports point down: a package imports only the packages that this table allows, a folder of a package only folders
below it, and no two modules import each other. An import that only annotations need is an import.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from support.imports import imports, modules

ALLOWED = {
    "errors": "",
    "upstream": "errors",
    "system": "errors upstream",
    "plugins": "errors upstream system",
    "distributed": "errors upstream system",
    "kernels": "errors upstream system",
    "data": "errors upstream system plugins",
    "facts": "system distributed",
    "models": "errors upstream system distributed facts",
    "export": "errors upstream system distributed models",
    "checkpoint": "errors upstream system distributed",
    "estimate": "errors system kernels models facts",
    "techniques": "errors upstream system plugins distributed kernels models facts estimate",
    "objectives": "errors upstream system plugins distributed kernels data models facts techniques",
    "optim": "errors upstream system distributed facts",
    "tracking": "errors system data models checkpoint facts estimate techniques",
    "reports": "errors system checkpoint",
    "config": "errors upstream system plugins distributed data models checkpoint facts techniques objectives optim tracking",
    "migration": "errors config",
    "settle": "errors system plugins distributed data models facts estimate techniques objectives optim config",
    "training": "errors upstream system plugins distributed data models export checkpoint facts estimate techniques objectives optim tracking reports config settle",
    "outputs": "errors upstream system distributed data models export checkpoint facts techniques objectives reports config settle training",
    "drafts": "errors system data models objectives config settle training",
    "tuning": "errors upstream system plugins distributed data models checkpoint facts estimate techniques objectives optim config settle training",
    "diagnostics": "errors upstream system plugins distributed kernels data models checkpoint facts estimate techniques objectives tracking config settle training tuning",
    "cli": "errors upstream system plugins distributed data models export checkpoint facts estimate techniques objectives optim tracking reports config settle training outputs "
    "tuning diagnostics drafts migration",
    "api": "errors system distributed data models checkpoint facts estimate techniques reports config settle training outputs tuning diagnostics",
    "__main__": "system cli",
}
"""Package -> the packages it may import, lowest first.

Every package may import `fxtune` itself, which holds the version.
"""

FOLDERS = {
    "data": "formats read images chat tokenized batches",
    "models": "kinds",
    "system": "machine terminal process files",
    "training": "monitors data rollouts forecast run",
    "outputs": "targets",
    "techniques": "attention experts lora quantize liger checkpointing compile",
}
"""Package -> its folders, lowest first: a folder imports only folders before it."""
FOR_ANNOTATIONS = {
    "": "the public names: torch and transformers are imported when a name is first used",
    "cli.doctor": "the page must come also where torch, which the config imports, is broken",
}
"""Modules with imports of fxtune under `if TYPE_CHECKING:`, and why."""
ALL = modules()


def package(name: str) -> str:
    return name.partition(".")[0]


def test_table_lists_every_package_and_allows_only_lower_ones():
    assert set(ALLOWED) == {package(name) for name in ALL} - {""}
    order = list(ALLOWED)
    for name, below in ALLOWED.items():
        assert all(order.index(other) < order.index(name) for other in below.split())


@pytest.mark.parametrize("name", ALLOWED)
def test_package_imports_only_what_the_table_allows(name):
    wrong = {
        f"{module} imports {other}"
        for module, path in ALL.items()
        if package(module) == name
        for other in imports(path, set(ALL))
        if package(other) not in {"", name, *ALLOWED[name].split()}
    }
    assert not wrong


def test_no_two_modules_import_each_other():
    require_no_circle({name: imports(path, set(ALL)) - {"", name} for name, path in ALL.items()})


def part(name: str) -> str:
    """The folder of a module inside its package; the module itself, if it lies beside the folders."""
    return ".".join(name.split(".")[:2])


def test_no_two_folders_import_each_other():
    """Nor by way of a module beside them."""
    imported: dict[str, set[str]] = {}
    for name, path in ALL.items():
        imported.setdefault(part(name), set()).update(map(part, imports(path, set(ALL)) - {""}))
    require_no_circle({name: others - {name} for name, others in imported.items()})


def test_a_folder_imports_only_folders_before_it():
    order = {name: [f"{name}.{folder}" for folder in folders.split()] for name, folders in FOLDERS.items()}
    assert {part(name) for name in ALL if name.count(".") > 1} == {
        folder for each in order.values() for folder in each
    }
    wrong = set()
    for name, path in ALL.items():
        folders = order.get(package(name), [])
        if part(name) in folders:
            above = folders[folders.index(part(name)) + 1 :]
            wrong |= {f"{name} imports {other}" for other in imports(path, set(ALL)) if part(other) in above}
    assert not wrong


def test_only_these_modules_import_for_annotations_alone():
    found = {name for name, path in ALL.items() if imports(path, set(ALL)) - imports(path, set(ALL), typing=False)}
    assert found == set(FOR_ANNOTATIONS)


def test_scripts_and_tests_of_gpus_import_names_that_exist():
    """Most of them run on other machines only, where a renamed function would show too late."""
    root = Path(__file__).parents[2]
    files = [
        file
        for folder in ("scripts", "tests/gpu", "tests/support", "examples")
        for file in (root / folder).rglob("*.py")
    ]
    missing = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fxtune":
                module = str(node.module).removeprefix("fxtune").removeprefix(".")
                names = {alias.name for alias in node.names} - top_names(ALL[module])
                missing |= {
                    f"{file.relative_to(root)}: {module}.{name}" for name in names if not is_module(module, name)
                }
    assert not missing


@functools.cache
def top_names(path: Path) -> set[str]:
    """Every name that a module binds outside of functions and classes, or imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if not isinstance(node, (ast.Load, ast.Store))]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def is_module(module: str, name: str) -> bool:
    full = f"{module}.{name}".lstrip(".")
    return full in ALL or any(known.startswith(f"{full}.") for known in ALL)


def require_no_circle(imported: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, f"import circle: {' -> '.join([*chain[chain.index(name) :], name])}"
        if name not in done:
            for other in imported.get(name, ()):
                visit(other, (*chain, name))
            done.add(name)

    for name in imported:
        visit(name, ())


def test_imports_inside_functions_are_found(tmp_path):
    file = tmp_path / "lora.py"
    file.write_text(
        "def f():\n    from fxtune.techniques import pipeline\n    import fxtune.techniques.rope\n"
        "    from fxtune.config.root import Config\n    from fxtune import __version__\n"
    )
    assert imports(file, set(ALL)) == {"techniques.pipeline", "techniques.rope", "config.root", ""}


def test_imports_for_type_checking_can_be_left_out(tmp_path):
    file = tmp_path / "lora.py"
    file.write_text(
        "import fxtune.techniques.rope\nif TYPE_CHECKING:\n    from fxtune.techniques.pipeline import Pipeline\n"
    )
    assert imports(file, set(ALL)) == {"techniques.pipeline", "techniques.rope"}
    assert imports(file, set(ALL), typing=False) == {"techniques.rope"}
