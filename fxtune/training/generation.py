"""Writes text with the trained model: a batch of prompts, padded on the left, with a cache of keys and values. The
first forward pass of a batch reads the images of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from fxtune.data.formats.values import RowError
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference
from fxtune.distributed.world import World
from fxtune.errors import DataError
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import cache_keyword, device_of, image_arguments, without_dropout
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal.progress import Phase
from fxtune.training.agreement import together

Choose = Callable[[torch.Tensor], torch.Tensor]
"""A function from the logits [rows, vocabulary] of the next tokens to the ids of these tokens, int64 [rows]."""


class Asked(Protocol):
    """A prompt, with its images in the order of their tokens."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def images(self) -> Sequence[ImageReference]: ...


One = TypeVar("One", bound=Asked)
Written = TypeVar("Written")


def write(
    model: PreparedModel,
    ends: set[int],
    pad: int,
    max_new_tokens: int,
    prompts: Sequence[Asked],
    choose: Choose,
    images: ImageProcessor | None = None,
    context: AbstractContextManager[None] | None = None,
) -> torch.Tensor:
    """The tokens that the model writes after each prompt, int64 [prompts, written]. Tokens after a token of `ends`
    mean nothing. Writing stops when each row has such a token, or at the limit.

    `images`: the processor for prompts with images. `context`: for the model's passes, such as autocast. The model's
    mode and the random state do not change. Raises DataError if an image file has changed.
    """
    # Eager code: compiled layers would be recompiled for each length of the cache.
    eager, inside = torch.compiler.set_stance("force_eager"), context or nullcontext()
    with without_dropout(model.module), torch.no_grad(), eager, inside:
        return model.with_head(lambda: _write(model.module, ends, pad, max_new_tokens, prompts, choose, images))


def likeliest(world: World) -> Choose:
    """A function that chooses the likeliest tokens. If weights are divided, all ranks take rank 0's tokens: if two
    logits are almost equal, ranks may choose different tokens. If a rank's answers ended earlier for that reason, the
    other ranks would wait for it in a gather of weights or in the exchange of experts' tokens."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.argmax(-1)
        return chosen if world.degrees.shard == 1 else world.copy_first(chosen, "choosing a token")

    return choose


def in_batches(
    prompts: Sequence[One],
    ask: Callable[[Sequence[One]], list[Written]],
    world: World,
    rows_per_pass: RowsPerPass,
    name: str,
    rows: int,
    work: Phase,
) -> list[Written]:
    """The answers of ask() to batches of prompts of similar length, in the order of `prompts`. `name`, `rows`: see
    RowsPerPass.run(). `work` advances by each answer."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].prompt))
    answers: dict[int, Written] = {}
    while order:
        left = [prompts[index] for index in order]
        written = rows_per_pass.run(name, rows, partial(_dealt_out, world, left, ask))
        answers.update(zip(order, written, strict=False))
        order = order[len(written) :]
        work.advance(len(written))
    return [answers[index] for index in range(len(prompts))]


def _dealt_out(
    world: World, prompts: Sequence[One], ask: Callable[[Sequence[One]], list[Written]], rows: int
) -> list[Written]:
    """The answers to the first prompts: rank 0 asks the first `rows` prompts, rank 1 the next `rows`, and so on. Ranks
    that hold parts of the weights cannot answer alone. They ask the first `rows` prompts together, and rank 0's
    answers count."""
    if world.degrees.shard > 1:
        answers = together(world, lambda: ask(prompts[:rows]), doing="writing answers")
        return world.broadcast(answers, "taking rank 0's answers")
    mine = prompts[rows * world.rank : rows * (world.rank + 1)]
    written = together(world, lambda: ask(mine) if mine else [], doing="writing answers")
    return [answer for part in world.gather(written, "collecting answers") for answer in part]


def _write(
    model: nn.Module,
    ends: set[int],
    pad: int,
    max_new_tokens: int,
    asked: Sequence[Asked],
    choose: Choose,
    images: ImageProcessor | None,
) -> torch.Tensor:
    device, config = device_of(model), model.config
    known = kind_of(config).images
    prompts = [list(each.prompt) for each in asked]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    shown, rope_positions = _read_images(model, asked, images, ids, positions)
    stops = torch.tensor(sorted(ends), device=device)
    keyword = cache_keyword(model)
    cache, done, written = None, torch.zeros(len(prompts), dtype=torch.bool, device=device), []
    for _ in range(max_new_tokens):
        # The head runs for the last position only, because the logits of a whole prompt can take gigabytes.
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=known.positions(config, positions, rope_positions) if known else positions,
            use_cache=True,
            logits_to_keep=1,
            **{keyword: cache},
            **shown,
        )
        cache, chosen = output[keyword], choose(output.logits[:, -1])
        written.append(chosen)
        done |= torch.isin(chosen, stops)
        if done.all():
            break
        ids, positions, shown = chosen[:, None], positions[:, -1:] + 1, {}
        if rope_positions is not None:  # text goes on after an image's largest position
            rope_positions = rope_positions[:, :, -1:].amax(0).expand(3, -1, -1) + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return torch.stack(written, dim=1)


def _read_images(
    model: nn.Module,
    asked: Sequence[Asked],
    processor: ImageProcessor | None,
    ids: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """The arguments for images, and M-RoPE positions (int64 [3, rows, tokens] or None), of the first forward pass over
    left-padded prompts. `positions`: positions of the text, [rows, tokens]."""
    tensors = [_tensors(each, processor) for each in asked]
    if not any(tensors):
        return {}, None
    assert processor is not None
    merged = processor.merge([own for own in tensors if own])
    arguments = {
        **image_arguments(model, merged, ids.device),
        **images_of(model.config).token_types(model.config, ids),
    }
    if processor.rope_positions is None:
        return arguments, None
    rope_positions = positions.repeat(3, 1, 1)
    for row, (each, own) in enumerate(zip(asked, tensors, strict=True)):
        prompt = torch.tensor(each.prompt)
        rope_positions[:, row, -len(prompt) :] = processor.rope_positions(prompt, own).to(ids.device)
    return arguments, rope_positions


def _tensors(asked: Asked, processor: ImageProcessor | None) -> dict[str, torch.Tensor]:
    """The image tensors of a prompt; empty if it has no images."""
    if not asked.images:
        return {}
    assert processor is not None, "the prompts were read with a processor"
    try:
        return processor.read(asked.images)
    except RowError as reason:
        raise DataError(
            f"{reason}. It was read before the first step. Restore the file and start the run again, which resumes it."
        ) from None
