"""Keys and values of a shared prompt, copied to each answer that attends to them (data/batches/shared_prompts.py).

The operator is no autograd.Function, because torch keeps no compiled graph with a Function on disk.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fxtune::select_keys", mutates_args=())
def select_keys(tokens: Tensor, index: Tensor, copies: Tensor) -> Tensor:
    """tokens[index], [keys, heads, d], for `tokens` [tokens, heads, d] and `index` int64 [keys].

    The backward pass gathers by `copies` (Batch.key_copies), int64 [most copies, tokens], and adds nothing in place.
    So it gives the same bits each time, and it reads no gradient of keys that belong to no document.
    """
    return tokens.index_select(0, index)


@torch.library.custom_op("fxtune::select_keys_backward", mutates_args=())
def select_keys_backward(gradient: Tensor, copies: Tensor) -> Tensor:
    """The gradient of `tokens`, from the gradient [keys, heads, d] of the selected keys."""
    own, *others = copies.unbind()
    total = gradient.index_select(0, own)
    for copy in others:
        of_copy = gradient.index_select(0, copy.clamp(min=0))
        total = total + torch.where((copy >= 0)[:, None, None], of_copy, 0.0)
    return total


@select_keys.register_fake
def _(tokens: Tensor, index: Tensor, _: Tensor) -> Tensor:
    return tokens.new_empty(index.shape[0], *tokens.shape[1:])  # len() would fix the number of keys in the graph


@select_keys_backward.register_fake
def _(gradient: Tensor, copies: Tensor) -> Tensor:
    return gradient.new_empty(copies.shape[1], *gradient.shape[1:])


select_keys.register_autograd(
    lambda ctx, gradient: (select_keys_backward(gradient, ctx.saved_tensors[0]), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]),
)
