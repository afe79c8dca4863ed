"""Trains rows of the embedding and the head beside adapters (`techniques.lora.train_tokens`), through peft's own
`trainable_token_indices`. All other rows keep the base's bits.

peft keeps the rows of the chosen tokens as one float32 matrix [tokens, hidden]. In each pass peft copies the whole
table and writes these rows into the copy. The copy and its gradient take 2 GB for 128k tokens of width 4,096 in
bfloat16, and the head makes them for each chunk of the loss. Here the base's table runs unchanged. For the chosen
tokens the results of the trained rows replace the table's results: the same mathematics, for a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.errors import ConfigError, did_you_mean
from fxtune.models.added_tokens import mean_of_rows
from fxtune.models.peft_adapter import fetch_adapter, read_options
from fxtune.models.probe import relative_distance
from fxtune.models.structure import outputs, without_dropout

KEY = "techniques.lora.train_tokens"


def ids_of(tokens: Sequence[str], tokenizer: Any) -> list[int]:
    """The ids of `tokens`, ascending. Raises ConfigError if the tokenizer lacks a token."""
    vocabulary, special = tokenizer.get_vocab(), [str(token) for token in tokenizer.added_tokens_decoder.values()]
    for token in tokens:
        if token not in vocabulary:
            raise ConfigError(f"{KEY}: the tokenizer has no token {token}{did_you_mean(token, special)}")
    return sorted({vocabulary[token] for token in tokens})


def ids_of_adapter(adapter: str) -> list[int]:
    """The ids of the tokens whose rows `adapter` (a folder or a hub id) trains, ascending. Raises the
    errors of read_options()."""
    options = read_options(fetch_adapter(adapter), adapter, "model.adapter")
    entries = options.get("trainable_token_indices") or []
    return sorted({token for ids in entries.values() for token in ids} if isinstance(entries, dict) else entries)


def refusals(model: Any, trained: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason why rows of `model` cannot be trained. `model` has no adapters yet. `trained`: path of a
    module that is trained in another way -> the option that trains it."""
    for path, table in _tables(model).items():
        if option := trained.get(path):
            yield f"train_tokens: {option} already trains {path}. Take it out there, or set train_tokens to null."
        elif not _is_lookup(table) and not isinstance(table, nn.Linear):
            yield f"train_tokens: peft trains no rows of {path}, a {type(table).__name__}. Set train_tokens to null."


def indices(model: Any, ids: list[int]) -> list[int] | dict[str, list[int]]:
    """The value of peft's `trainable_token_indices`. A list stands for the embedding and for a head that is the same
    tensor. A head with another weight needs an entry of its own."""
    tables = _tables(model)
    if len(tables) == 1 or len({id(table.weight) for table in tables.values()}) == 1:
        return ids
    paths = [path for path, _ in model.named_modules()]
    leaves = {path: path.rpartition(".")[2] for path in tables}
    # peft takes each module whose path ends with a given name. An ambiguous name is replaced by the path.
    return {leaf if sum(other.endswith(leaf) for other in paths) == 1 else path: ids for path, leaf in leaves.items()}


@torch.no_grad()
def start_zero_rows(model: Any, ids: Sequence[int]) -> None:
    """Set each row of the tokens `ids` that is zero to the mean of all rows.

    The first norm divides by the length of its input. So the gradient of a zero row in the embedding is larger by the
    inverse root of the norm's eps: 2e9 in a small Llama whose other rows have gradients of 3e-3. Clipping would shrink
    all other gradients to nothing.
    """
    for weight in {table.weight for table in _tables(model).values()}:
        zero = [] if weight.is_meta else [number for number in ids if not weight[number].any()]
        if zero:
            weight[zero] = mean_of_rows(weight)


def prepare(adapted: Any) -> None:
    """Make the rows that peft trains float32, like adapters, and run the base's tables without a copy.

    Raises ConfigError if peft has not wrapped both tables.
    """
    for table in (adapted.get_input_embeddings(), adapted.get_output_embeddings()):
        if table is not None and not hasattr(table, "token_adapter"):
            raise ConfigError(f"{KEY}: peft trains no rows of this model's {type(table).__name__}. Set it to null.")
    for layer in _layers(adapted):
        for name, rows in layer.trainable_tokens_delta.items():
            rows.data = rows.data.float()
            # These ids are sorted, because _forward() searches them. They are no part of the saved state.
            layer.register_buffer("trained_ids", torch.tensor(layer.token_indices[name], device=rows.device), False)
    _run_apart(adapted)


def read_rows(adapted: Any) -> None:
    """Copy the trained rows from the base. Its weights were read after the rows got their memory."""
    start_zero_rows(adapted, [int(number) for layer in _layers(adapted)[:1] for number in layer.trained_ids])
    with torch.no_grad():
        for layer in _layers(adapted):
            for name, rows in layer.trainable_tokens_delta.items():
                rows.copy_(layer.base_layer.weight[layer.trained_ids])
                layer.trainable_tokens_original[name].copy_(rows)


def as_peft(adapted: nn.Module) -> None:
    """Run the trained rows by peft's own code."""
    for layer in _layers(adapted):
        vars(layer).pop("forward_adapters", None)


def without_gradient(adapted: nn.Module, input_ids: torch.Tensor) -> set[str]:
    """The names of matrices of trained rows that get no gradient from a batch: matrices of an embedding that is not
    also the head, if none of their tokens is in `input_ids`."""
    layers = {path: layer for path, layer in adapted.named_modules() if hasattr(layer, "trainable_tokens_delta")}
    if any(layer.tied_adapter is not None for layer in layers.values()):
        return set()
    unread = (
        path
        for path, layer in layers.items()
        if _is_lookup(layer.base_layer) and not torch.isin(layer.trained_ids, input_ids).any()
    )
    return {f"{path}.trainable_tokens_delta.{name}" for path in unread for name in layers[path].trainable_tokens_delta}


class Observed(NamedTuple):
    learning: int
    """Rows with a gradient, over all matrices."""
    expected: int
    from_peft: float
    """Relative distance from the logits of peft's own code, with rows that differ from the base's."""
    from_base: float


def observe(adapted: Any, probe: Mapping[str, Any]) -> Observed:
    """Run `probe` with trained tokens in it. Observe how many rows get a gradient, and how far rows move the
    logits."""
    layers = [layer for layer in _layers(adapted) if layer.tied_adapter is None]
    matrices = [next(iter(layer.trainable_tokens_delta.values())) for layer in layers]
    ids = probe["input_ids"].clone()
    shown = layers[0].trained_ids[: ids.shape[1]]
    ids[0, : len(shown)] = shown
    probe = {**probe, "input_ids": ids}
    with without_dropout(adapted), torch.compiler.set_stance("force_eager"):
        with torch.enable_grad():
            total = outputs(adapted, **probe).float().logsumexp(-1).sum()
            gradients = torch.autograd.grad(total, matrices)
        learning = sum(int(gradient.any(-1).sum()) for gradient in gradients)
        in_head = [len(layers) == 1 or not _is_lookup(layer.base_layer) for layer in layers]
        expected = sum(len(matrix) if head else len(shown) for matrix, head in zip(matrices, in_head, strict=True))
        before = [matrix.detach().clone() for matrix in matrices]
        with torch.no_grad():
            try:
                for matrix in matrices:  # the rows of a new adapter equal the base's
                    matrix.copy_(matrix.roll(1, -1) + matrix.abs().mean() + 0.01)
                torch.clear_autocast_cache()  # autocast keeps casts of weights that get a gradient
                own = outputs(adapted, **probe)
                as_peft(adapted)
                peft = outputs(adapted, **probe)
            finally:
                _run_apart(adapted)
                for matrix, rows in zip(matrices, before, strict=True):
                    matrix.copy_(rows)
                torch.clear_autocast_cache()
            base = outputs(adapted, **probe)
    return Observed(learning, expected, relative_distance(own, peft), relative_distance(own, base))


def _forward(layer: Any, x: torch.Tensor, active: Sequence[str], *args: Any, **kwargs: Any) -> torch.Tensor:
    """TrainableTokensLayer.forward_adapters() without a copy of the table."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    result: torch.Tensor = layer.base_layer(x, *args, **kwargs)
    if layer.disable_adapters or layer.merged or not active:
        return result
    rows, ids = layer.trainable_tokens_delta[active[0]], layer.trained_ids
    if not _is_lookup(layer.base_layer):
        logits = F.linear(x, rows.to(x.dtype))
        bias = layer.base_layer.bias
        logits = logits if bias is None else logits + bias[ids]
        return result.index_copy_(-1, ids, logits.to(result.dtype))  # nothing else holds `result`
    at = torch.searchsorted(ids, x).clamp(max=len(ids) - 1)
    # Float32 until the end: a row may occur often, and its gradients must add up in float32.
    vectors = F.embedding(at, rows)
    if (scale := getattr(layer.base_layer, "embed_scale", None)) is not None:  # of Gemma
        vectors = vectors.to(result.dtype) * torch.as_tensor(scale).to(result.device, result.dtype)
    return torch.where((ids[at] == x)[..., None], vectors.to(result.dtype), result)


def _run_apart(adapted: nn.Module) -> None:
    for layer in _layers(adapted):
        layer.forward_adapters = partial(_forward, layer)


def _tables(model: Any) -> dict[str, Any]:
    """The embedding and the head, by name."""
    ends = [
        getattr(getattr(end, "token_adapter", None), "base_layer", end)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    return {path: module for path, module in model.named_modules() if any(module is end for end in ends)}


def _is_lookup(table: Any) -> bool:
    return isinstance(table, nn.Embedding)


def _layers(adapted: nn.Module) -> list[Any]:
    return [module for module in adapted.modules() if hasattr(module, "trainable_tokens_delta")]
