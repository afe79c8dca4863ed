"""What settle() returns is never replaced: later stages are results of their own (fxtune/settle/stages.py)."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
from support.imports import modules

from fxtune.settle.settled import Settled


def replacements(tree: ast.AST) -> Iterator[str]:
    """Code that changes a settled recipe: replace() on one, and an attribute `settled` that is set outside of the
    constructor or twice in it."""
    made: set[ast.AST] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in kind.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                made.update([node for node in ast.walk(method) if _is_set(node)][:1])
    for node in ast.walk(tree):
        if _is_set(node) and node not in made:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("replace", "dataclasses.replace"):
            first = ast.unparse(node.args[0])
            if first.rpartition(".")[2] == "settled":
                yield ast.unparse(node)


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "settled" and isinstance(node.ctx, ast.Store)


def test_a_settled_recipe_is_not_replaced():
    files = {name: path for name, path in modules().items() if not name.startswith("settle.")}
    found = {name: list(replacements(ast.parse(path.read_text()))) for name, path in files.items()}
    assert {name: code for name, code in found.items() if code} == {}


def test_a_settled_recipe_has_no_method_that_returns_another():
    methods = inspect.getmembers(Settled, inspect.isfunction)
    returned = {name: inspect.signature(method).return_annotation for name, method in methods}
    assert [name for name, kind in returned.items() if "Settled" in str(kind)] == []


@pytest.mark.parametrize(
    "text",
    [
        "replaced = replace(self.settled, notes=())",
        "replaced = dataclasses.replace(settled, notes=())",
        "builder.settled = other",
        "class Builder:\n    def read(self):\n        self.settled, found = read()",
        "class Builder:\n    def __init__(self):\n        self.settled = settle()\n        self.settled = other",
    ],
)
def test_replacements_are_found(text):
    assert list(replacements(ast.parse(text)))
