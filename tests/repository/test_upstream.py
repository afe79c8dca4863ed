"""Private parts of other libraries are used in fxtune/upstream only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.imports import modules

LIBRARIES = (
    *("transformers", "peft", "liger_kernel", "datasets", "hydra", "accelerate", "tokenizers", "huggingface_hub"),
)
INTERNALS = {
    *("__code__", "__globals__", "__closure__", "co_names", "getsource", "_attn_implementation"),
    *("_can_record_outputs", "_global_mapping", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save"),
    *("_model_mapping", "_MODEL_TO_CONVERSION_PATTERN", "_tied_weights_keys", "_weight_conversions"),
    *("all_tied_weights_keys", "load_balancing_loss_func", "eager_attention_forward"),
}
"""Names of attributes and strings that reach into a library's objects."""
ALLOWED = {
    ("cli.help", "getsource"): "reads fxtune's own source, for the text under a field",
}


def private(tree: ast.AST) -> Iterator[str]:
    """Private parts of LIBRARIES that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_") and not name.startswith("__"))
        elif isinstance(node, ast.Attribute):
            if node.attr in INTERNALS or (
                node.attr.startswith("_") and not node.attr.startswith("__") and _root(node) in LIBRARIES
            ):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in INTERNALS:
            yield str(node.value)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_private_part_outside_upstream_but_each_exception_that_is_needed():
    found = {
        (name, part)
        for name, path in modules().items()
        if not name.startswith("upstream")
        for part in private(ast.parse(path.read_text()))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    "text",
    [
        "from peft.utils import _names",
        "from transformers._private import name",
        "import transformers\ntransformers.models._cache",
        "forward.__code__.co_names",
        "getattr(model, '_can_record_outputs', None)",
    ],
)
def test_private_parts_are_found(text):
    assert list(private(ast.parse(text)))


def test_each_module_says_what_and_why():
    for path in (Path(modules()["upstream"]).parent).glob("[a-z]*.py"):
        text = path.read_text()
        assert all(word in text for word in ("What", "Why")), path
