"""How many numbers the adapters of techniques.lora have, computed from the model's shape before a weight is read."""

from __future__ import annotations

import functools
import re
from functools import partial
from typing import Any

from fxtune.facts.execution import Adapters
from fxtune.facts.options import LoraOptions
from fxtune.facts.run import Facts
from fxtune.models.dims import built
from fxtune.models.structure import projectors, towers
from fxtune.techniques.lora.targets import gate_up_parts, select


def adapters_of(lora: LoraOptions, facts: Facts) -> Adapters:
    """The adapters on what `lora` selects of the model."""
    names = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")
    options: dict[str, Any] = {name: tuple(getattr(lora, name)) for name in names}
    options |= {name: getattr(lora, name) for name in ("r", "vision", "projector")}
    return _adapters(built(facts.model), tuple(options.items()), tuple(lora.rank_pattern.items()))


@functools.lru_cache(maxsize=64)
def _adapters(model: Any, options: tuple[Any, ...], ranks: tuple[tuple[str, int], ...]) -> Adapters:
    values: dict[str, Any] = {name: [*value] if isinstance(value, tuple) else value for name, value in options}
    lora = LoraOptions(rank_pattern=dict(ranks), **values)
    chosen, parts = select(model, lora), [*towers(model), *projectors(model)]
    beside = {id(module) for part in parts for module in part.modules()}
    modules = [(path, model.get_submodule(path)) for path in chosen.modules]
    counts = [(_rank_of(lora, path) * sum(module.weight.shape), id(module) in beside) for path, module in modules]
    # peft may give the adapter of gate and up, which are one product, a multiple of the rank.
    joined = lora.r * gate_up_parts(str(getattr(model.config, "model_type", "")))
    tensors = [(path, model.get_parameter(path).shape) for path in chosen.experts]
    experts = sum(
        _rank_of(lora, path, joined if path.endswith("gate_up_proj") else lora.r) * count * (inward + outward)
        for path, (count, inward, outward) in tensors
    )
    images = sum(count for count, is_beside in counts if is_beside)
    whole = sum(count for count, _ in counts) + experts
    return Adapters(whole, experts, images, lora.r, partial(_rank_of, lora), lora.vision, lora.projector)


def _rank_of(lora: LoraOptions, path: str, rank: int | None = None) -> int:
    """The rank of the adapter of the module `path`: the entry of rank_pattern, whose patterns peft compares with the
    end of the full name, or else `rank` (None: techniques.lora.r)."""
    ranks = (value for pattern, value in lora.rank_pattern.items() if re.match(rf"(.*\.)?({pattern})$", path))
    return next(ranks, lora.r if rank is None else rank)
