"""Tokens that a base has never trained: their rows of the embedding or the head are zero, or the same as another row.

A base model often reserves special tokens that its own training never showed, and a chat template then writes them.
Adapters leave the rows of both tables as they are: the model cannot tell such tokens apart, nor write them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn

from fxtune.distributed.chunks import is_divided


def untrained_rows(model: Any, tokens: Iterable[int]) -> dict[str, list[int]]:
    """The `tokens` without a trained row, by the name of the frozen module that holds the rows: the embedding, and the
    head where its weight is not the embedding's.

    Tables that are trained, adapted, quantized or divided over ranks are not looked at.
    """
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    found, seen = dict[str, list[int]](), set[int]()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        plain = module.token_adapter.base_layer if hasattr(module, "token_adapter") else module  # peft's trained rows
        weight = getattr(plain, "weight", None)
        # peft trains some rows of a table beside the base's table, which is looked at here.
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
    # One column first: a comparison with all rows would need as much memory as the table.
    candidates = (weight.detach()[:, 0] == row[0]).nonzero()[:, 0]
    return int((weight.detach()[candidates] == row).all(-1).sum()) > 1
