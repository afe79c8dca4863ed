"""Replaces the linears, experts, head and embeddings of a built model by modules with packed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.options import QuantizeOptions, Switch, WeightFormat
from fxtune.models.experts import experts_of
from fxtune.models.prepared import PreparedModel, Quantization
from fxtune.models.replacement import places, put
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.units import GIB
from fxtune.techniques.experts.quantized import (
    TENSORS,
    QuantizedExperts,
    Storage,
    hold_mxfp4,
    in_place_of,
    quantize_experts,
    quantize_tensor,
)
from fxtune.techniques.experts.quantized import stored_bytes as bytes_of_experts
from fxtune.techniques.quantize.selection import experts_type, linears_of
from fxtune.techniques.quantized_modules import (
    dequantized,
    embedding_of,
    head_of,
    is_quantized,
    quantized,
    stored_bytes,
)

Take = Callable[[str, torch.Tensor], None]
"""A function that gets a weight's name and the weight, and keeps no reference to the weight."""


def quantize_model(
    options: QuantizeOptions, prepared: PreparedModel, world: World, each_weight: Callable[[Take], None] | None = None
) -> None:
    """Quantize `prepared` on world.device and fill in its field `quantization`. Linears are replaced one by one, so
    the device holds at most one extra linear (in fp8 three times the size of one).

    `each_weight`: for a model without memory, hands the weights of its linears and experts to a function. Experts that
    the checkpoint stores in MXFP4 are read later, without a change.
    """
    model, compute = prepared.module, getattr(torch, options.compute_dtype.value)
    takes_experts, ships = options.experts is Switch.on, prepared.ships_mxfp4
    targets = list(linears_of(options, model, takes_experts))
    if not targets and not takes_experts:  # check() cannot see models that bring their own code
        raise ConfigError("techniques.quantize.enabled: this model has no linears to quantize. Set it to false.")
    experts, count = list(experts_of(model)) if takes_experts else [], len(targets)
    replaced = [linear.weight for *_, linear in targets]
    replaced += [getattr(layer, name) for layer in experts for name in TENSORS]
    before = sum(weight.nbytes for weight in replaced)
    share = sum(weight.numel() for weight in replaced) / sum(weight.numel() for weight in model.parameters())
    del replaced  # each weight is freed as soon as it is quantized
    kind = experts_type(options, ships)
    storage = compute, world.device, options.keeps_transposes

    # Experts come first: in MXFP4 they have other names in the checkpoint, and reading weights compares all names.
    divided = world.degrees.shard > 1
    as_shipped = ships and kind is WeightFormat.mxfp4 and bool(divided or each_weight)
    of_experts = compute, torch.device("meta") if divided else world.device, options.keeps_transposes
    unread: dict[str, Callable[[torch.Tensor], float]] | None = {} if each_weight else None
    packed, worst = _replace_experts(model, experts, "" if as_shipped else kind.value, of_experts, unread)
    error, off = _replace_linears(options.type, storage, targets, each_weight, unread or {})
    worst = max(worst, off)
    after = sum(map(stored_bytes, filter(is_quantized, model.modules()))) + sum(map(bytes_of_experts, packed))
    ends = _quantize_ends(options, model, compute, world)

    _move(model, world.device)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # the next allocations would split the blocks that the 16-bit weights had
        torch.cuda.reset_peak_memory_stats(world.device)  # the reported peak is the peak of training
    # peft reads these two attributes before it wraps linears.
    model.is_loaded_in_4bit = options.type is WeightFormat.nf4
    model.is_loaded_in_8bit = options.type is WeightFormat.int8
    shipped = ""
    if experts and ships and kind is WeightFormat.mxfp4:
        shipped = "read as they are" if as_shipped else "unpacked and packed again"
    prepared.quantization = Quantization(
        linears=count,
        before=before,
        after=after,
        error=error,
        share=share,
        ends=ends,
        experts=len(experts),
        experts_as=kind.value,
        experts_error=worst,
        shipped=shipped,
    )


def _replace_experts(
    model: nn.Module,
    experts: list[Any],
    kind: str,
    storage: Storage,
    unread: dict[str, Callable[[torch.Tensor], float]] | None,
) -> tuple[list[QuantizedExperts], float]:
    """Replace each module of `experts` by experts in `kind`. An empty `kind` means MXFP4 as in the checkpoint. Returns
    the new modules and their largest error. `unread`: a dict if weights are read later; None: weights are there. It
    gets, by name, the function that will quantize each weight."""
    where, paths = (places(model), {part: path for path, part in model.named_modules()}) if experts else ({}, {})
    packed: list[QuantizedExperts] = []
    worst = 0.0
    with phase("Quantizing the weights", len(experts), "layers with experts", announce=False) as work:
        for layer in work.over(experts):
            if not kind:
                made = hold_mxfp4(layer, storage[0])
            elif unread is None:
                made, error = quantize_experts(layer, kind, storage)
                worst = max(worst, error)
            else:
                made = in_place_of(layer, kind, storage[0])
                for name in TENSORS:
                    unread[f"{paths[layer]}.{name}"] = partial(quantize_tensor, made, name, kind, storage)
            put(where, layer, made)
            packed.append(made)
    return packed, worst


def _replace_linears(
    kind: WeightFormat,
    storage: Storage,
    targets: list[tuple[str, nn.Module, str, nn.Linear]],
    each_weight: Callable[[Take], None] | None,
    experts: Mapping[str, Callable[[torch.Tensor], float]],
) -> tuple[float, float]:
    """Replace each linear of `targets`, and empty this list. Returns two errors |dequantized - weight| / |weight|: of
    the first linear (NaN if no linear has memory), and the largest error of a tensor of experts. `experts`: by name,
    the function that quantizes a tensor of experts and returns its error."""
    error, worst, device = math.nan, 0.0, storage[1]
    waiting = {f"{path}.weight": (parent, name, linear) for path, parent, name, linear in targets}
    targets.clear()

    def replace(path: str, weight: torch.Tensor) -> None:
        nonlocal error, worst
        if path in experts:
            worst = max(worst, experts[path](weight))
            return
        parent, name, linear = waiting.pop(path)
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False) if each_weight else linear.weight
        made = quantized(linear, kind.value, *storage)
        if math.isnan(error) and not linear.weight.is_meta:
            whole = linear.weight.detach().to(device).float()
            error = ((dequantized(made).float() - whole).norm() / whole.norm()).item()
        setattr(parent, name, made)

    if each_weight is not None:
        each_weight(replace)
    with phase("Quantizing the weights", len(waiting), "linears", announce=False) as work:
        for path in work.over(list(waiting)):
            replace(path, waiting[path][2].weight)
    return error, worst


def _quantize_ends(options: QuantizeOptions, model: Any, compute: torch.dtype, world: World) -> list[str]:
    """Replace the head and the embeddings if their options are on. Returns a few words about each replacement."""
    head, embedding, notes = model.get_output_embeddings(), model.get_input_embeddings(), []
    shared = None
    if options.embeddings:
        made = embedding_of(embedding, compute, world.device)
        model.set_input_embeddings(made)
        shared = made if head is not None and head.weight is embedding.weight else None
        notes.append(f"embeddings {stored_bytes(made) / GIB:.3g} GiB")
    if options.head:
        last = head_of(head, compute, world.device, shared)
        model.set_output_embeddings(last)
        notes.append("head with the embeddings' codes" if shared else f"head {stored_bytes(last) / GIB:.3g} GiB")
    return notes


def _move(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device`. Parameters stay the same objects, so tied parameters stay tied."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device != device and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
