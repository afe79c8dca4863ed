"""Finds tokens that were not trained in a base: their rows of the embedding or the head are zero or equal another row.

A base model often reserves special tokens that did not occur in its training, and a chat template then writes them.
Adapters do not change the rows of both tables, so the model can neither tell such tokens apart nor write them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn

from fxtune.distributed.chunks import is_divided


def untrained_rows(model: Any, tokens: Iterable[int]) -> dict[str, list[int]]:
    """The `tokens` without a trained row, by the name of the module that holds the row: the embedding, or the head if
    it has a weight of its own.

    Tables that are trained, adapted, quantized or divided over ranks are skipped.
    """
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    found, seen = dict[str, list[int]](), set[int]()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        plain = module.token_adapter.base_layer if hasattr(module, "token_adapter") else module  # rows trained by peft
        weight = getattr(plain, "weight", None)
        # If peft trains some rows of a table, the base's whole table is still examined here.
        if not _is_plain(weight) or hasattr(module, "base_layer") or id(weight) in seen:
            continue
        seen.add(id(weight))
        if rows := [token for token in tokens if _is_untrained(weight, token)]:
            found[names[module]] = rows
    return found


def _is_plain(weight: Any) -> TypeGuard[nn.Parameter]:
    return (
        isinstance(weight, nn.Parameter)
        and not weight.requires_grad
        and weight.is_floating_point()
        and weight.itemsize > 1
        and not weight.is_meta
        and not is_divided(weight)
    )


def _is_untrained(weight: torch.Tensor, token: int) -> bool:
    row = weight.detach()[token]
    if not bool(row.any()):
        return True
    # Rows that differ in the first column are excluded. A comparison of all columns would need another table's memory.
    candidates = (weight.detach()[:, 0] == row[0]).nonzero()[:, 0]
    return int((weight.detach()[candidates] == row).all(-1).sum()) > 1
