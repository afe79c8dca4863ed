"""Decides whether rows are packed or padded, and collects the facts of a run from recipe, model and machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fxtune.config.root import Config
from fxtune.data.config import AUTO, DataConfig, ImageFeatures
from fxtune.distributed.parallel import Degrees
from fxtune.facts.options import Dynamic, Switch
from fxtune.facts.run import Facts
from fxtune.models import load as models
from fxtune.models.kinds.known import kind_of
from fxtune.optim.optimizer import state_of
from fxtune.system.machine.facts import MachineFacts
from fxtune.techniques.attention import isolation


def decide_rows(
    config: Config, machine: MachineFacts, hf_config: Any, ranks: int = 1
) -> tuple[DataConfig, list[str], Facts]:
    """Decide `data.packing` and `data.share_prompts`. Returns the data config with both as true or false, a line with
    the reason for each `auto` that became false, and the facts of one of `ranks` ranks. No technique is resolved in
    these facts."""
    data, compile, images = config.data, config.techniques.compile, kind_of(hf_config).images
    facts = Facts.of(
        machine,
        model=hf_config.to_dict(),
        images_see_both_ways=images is not None and images.sees_both_ways(hf_config),
        head=config.objective.needs.head,
        reads_groups=config.objective.needs.reads_groups,
        reads_images=images is not None,
        stores_images=data.image_features is ImageFeatures.stored,
        adds_tokens=bool(config.model.add_tokens),
        ships_mxfp4=models.ships_mxfp4(config.model, hf_config),
        dtype=str(models.resolve_dtype(config.model, machine.capability)).removeprefix("torch."),
        sequence_length=data.sequence_length,
        micro_batch_size=config.train.micro_batch_size,
        trains_images=config.optimizer.lr_vision is not None and not config.techniques.lora.enabled,
        optimizer=state_of(config.optimizer),
        step_rows=config.train.largest_batch,
        in_backward=config.optimizer.in_backward is Switch.on,
        deterministic=config.run.strict,
        degrees=Degrees(replicate=ranks),
        keeps_start=config.objective.keeps_start(config.techniques.lora.enabled, config.train.epochs or 1.0),
        logit_tensors=config.objective.logit_tensors,
        is_frozen=isinstance(config.model, models.FrozenModelConfig),
        sum_bytes=config.parallel.sum_bytes,
        techniques=config.techniques,
    )
    note = []
    if data.packing == AUTO:
        why = "data.buckets has lengths to pad to" if data.buckets else config.techniques.why_padded(facts)
        by_bounds = config.techniques.attention.reads_bounds(replace(facts, packing=True))
        why = why or isolation.why_not_isolated(hf_config, by_bounds)
        data = replace(data, packing=why is None)
        padding = "each row holds one document, with padding"
        if why and compile.enabled and compile.dynamic is Dynamic.never and not data.buckets:
            lengths = sorted({max(data.sequence_length // part, 2) for part in (8, 4, 2, 1)})
            data = replace(data, buckets=lengths)  # each of these lengths compiles once
            padding += f" to {', '.join(map(str, lengths))} tokens"
        note = [f"packing: off, because {why}; {padding}"] if why else []
    facts = replace(facts, packing=data.packs, rows=data.row_lengths())
    if data.share_prompts == AUTO:
        why = why_whole(config, facts)
        if facts.images_see_both_ways and not why and config.objective.needs.answers_share_prompts:
            why = (
                f"the tokens of an image in {hf_config.model_type} see each other, which needs the prompt of each "
                "answer in its row (rows without images can share: true)"
            )
        data = replace(data, share_prompts=config.objective.needs.answers_share_prompts and why is None)
        note += [f"share_prompts: off, because {why}"] if why else []
    return data, note, replace(facts, shares_prompts=data.shares_prompts)


def refusals(config: Config, facts: Facts) -> Iterator[str]:
    """Yield why rows cannot have the prompt of answers only once, if the recipe demands `data.share_prompts=true`."""
    if config.data.share_prompts is True and (why := why_whole(config, facts)):
        yield (
            f"data.share_prompts: true, but {why}. Set it to auto. A run that was started with shared prompts goes on "
            "only where they can be shared."
        )


def why_whole(config: Config, facts: Facts) -> str | None:
    """Why rows must repeat the prompt for each answer; None if the prompt can be shared, or if the objective does not
    learn from answers to a prompt."""
    if not config.objective.needs.answers_share_prompts:
        return None
    if not facts.packing:
        return "rows are not packed"
    return config.techniques.attention.why_not_shared(facts)
