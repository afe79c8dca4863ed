"""Adds a recipe's tokens (`model.add_tokens`) to the tokenizer of its base, and their rows to embedding and head.

The new rows of the embedding and the head start as the mean of the base's rows. transformers by default computes the
covariance of the whole table and draws the new rows around that mean with 1e-9 times this covariance. The mean alone
needs one pass over the table and is the same on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from fxtune.errors import ConfigError

MULTIPLE = 64
"""A table grows to a multiple of this number of rows. With other sizes, tensor cores are several times slower."""
BLOCK = 1024
"""Rows that are added up at a time."""
MOST = 65536
"""The largest number of rows that may be added to a table. It keeps a damaged config from filling the memory."""


def add_tokens(tokenizer: Any, tokens: list[str], rows: int, name: str) -> None:
    """Add special tokens to `tokenizer`. `rows`: how many tokens the model embeds. `name`: the tokenizer's name in
    messages.

    Raises ConfigError if a token is empty, named twice, or already known to both the tokenizer and the model.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if not token.strip() or tokens.count(token) > 1:
            raise ConfigError(
                f"model.add_tokens: {token!r} is {'named twice' if token.strip() else 'no token'}. Remove it."
            )
        if vocabulary.get(token, rows) < rows:
            raise ConfigError(
                f"model.add_tokens: {name} has the token {token} already. Remove it; techniques.lora.train_tokens "
                "trains the rows of existing tokens."
            )
    new = [AddedToken(token, special=True, normalized=False) for token in tokens if token not in vocabulary]
    tokenizer.add_tokens(new, special_tokens=True)


def about_added_tokens(
    tokenizer: Any, tokens: list[str], rows: int, grown: int, used: Collection[int]
) -> Iterator[str]:
    """Yield lines on added tokens: their ids and rows, and which of them occur in no document. `rows`, `grown`: rows
    of the base's embedding and of the model's. `used`: ids of the special tokens in the data."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    named = ", ".join(f"{token} ({id_})" for token, id_ in ids.items())
    where = f"the embedding and the head grow from {rows:,} rows to {grown:,}, the new rows start as the mean"
    yield f"model.add_tokens: {named}; {where if grown > rows else 'spare rows of the base'}"
    if unused := [token for token, id_ in ids.items() if id_ not in used]:
        yield (
            f"model.add_tokens: no document has {', '.join(unused)}, whose rows learn no "
            "meaning (in a chat only the chat template writes special tokens; in a message they are text)"
        )


def rows_for(tokenizer: Any, rows: int) -> int:
    """How many rows a table needs for all ids of `tokenizer`. `rows`: how many rows it has, and keeps if they
    suffice."""
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    return rows if needed <= rows else -(-needed // MULTIPLE) * MULTIPLE


def mean_of_rows(table: torch.Tensor) -> torch.Tensor:
    """The mean of the rows of `table`, computed in float32 and in blocks, because torch would copy the whole table."""
    return (torch.stack([block.float().sum(0) for block in table.split(BLOCK)]).sum(0) / len(table)).to(table.dtype)


@torch.no_grad()
def grow(model: Any, rows: int) -> None:
    """Grow the embedding and the head of `model` to `rows` rows, and change its config. Raises ConfigError if
    transformers cannot resize them."""
    before = len(model.get_input_embeddings().weight)
    if rows - before > MOST:
        raise ConfigError(f"model: its {before:,} rows cannot grow to {rows:,}. At most {MOST:,} tokens can be added.")
    try:
        model.resize_token_embeddings(rows, mean_resizing=False)
    except (NotImplementedError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model.add_tokens: transformers cannot grow the embedding of a {type(model).__name__}. Use another model."
        ) from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in {weight for end in ends if end is not None for weight in end.parameters(recurse=False)}:
        parameter[before:] = mean_of_rows(parameter[:before])
    if any(len(end.weight) != rows for end in ends if end is not None):
        raise ConfigError(
            f"model.add_tokens: transformers has not grown both tables of a {type(model).__name__}. Use another model."
        )
