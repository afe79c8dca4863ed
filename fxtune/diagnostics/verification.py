"""The checks of `fxtune verify`. It observes each technique on the built model, the rows, and one step, and compares
loss and gradients with plain transformers."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxtune.config.root import Config
from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.plan import Plan
from fxtune.diagnostics import parity
from fxtune.diagnostics.canary import observe_canary
from fxtune.distributed.world import World
from fxtune.errors import CheckError, ConfigError
from fxtune.models.dims import Shape
from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.structure import beside_text, is_adapter, parameter_counts, without_dropout
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.terminal.console import say, table, tick
from fxtune.system.terminal.units import GIB
from fxtune.techniques.base import Evidence
from fxtune.techniques.lora import trained_tokens
from fxtune.tracking.display import evidence_table
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.trial import trial_data

STEPS = 4
"""Number of steps whose rows are examined. The model gets the first micro-batch only."""
SAMPLE = 4096
"""Number of elements of each trained tensor that are compared before and after a step. A whole copy may not fit."""


@dataclass(frozen=True)
class Verification:
    """What was observed, before the first step of a run and in one step."""

    decided: list[str]
    """What `auto` chose, and why."""
    techniques: dict[str, Any]
    evidence: list[Evidence]
    compared: list[parity.Compared]
    """Comparisons of loss and gradients with plain transformers; empty if none was asked for."""

    @property
    def failed(self) -> list[str]:
        """A line for each thing that is not as asked for."""
        lines = [
            f"  {row.technique}: asked for {row.asked}; seen: {row.observed}" for row in self.evidence if not row.acted
        ]
        off = (variant for variant in self.compared if not variant.within)
        return lines + [f"  loss: {variant.name}: {', '.join(variant.beyond())}" for variant in off]

    def require_acted(self) -> None:
        """Print that everything is as asked for. Raises CheckError if something is not."""
        count = len(self.evidence) + len(self.compared)
        if failed := self.failed:
            raise CheckError(f"{len(failed)} of {count} are not as asked for:\n" + "\n".join(failed))
        say(f"All {count} as asked for.")


def verify(config: Config, loss: bool = False, each: bool = False, canary: bool = False) -> Verification:
    """Build the model as training does, observe it in one step, and print what was seen. `loss`: also compare loss and
    gradients with plain transformers. `each`: compare also with each technique off in turn. `canary`: also take steps
    with the length of answers as the reward. Raises the errors of training."""
    if canary and not config.objective.needs.rollouts:
        raise ConfigError("--canary trains on the length of sampled answers: it is for recipes of objective=policy.")
    config = replace(config, data=replace(config.data, length_schedule=[]))  # all steps have the longest rows
    builder = RunBuilder(config)
    with builder.oom_context("Checking", MemoryPhase.training):
        _, data = trial_data(builder)
        say(*config.techniques.ignored_options(), *builder.notes)
        if builder.facts.in_backward:
            say("verify keeps all gradients at once, so it needs memory for gradients that the run does not need")
        model, evidence = builder.observed_model(data.training, anew=True)
        evidence += builder.prove_objective(model, builder.config.objective, data.training)
        seen = [*evidence, *observe_data(data), *observe_step(builder, model, data.training)]
        del model
        gc.collect()
        seen = of_all_ranks(builder.world, [*seen, *([observe_canary(config)] if canary else [])])
        say(evidence_table(seen, "What was asked for, and what was observed"))
        compared: list[parity.Compared] = []
        if loss or each:
            compared = parity.compare(builder, data.training, each, say)
            say(_comparison_table(compared), parity.describe_bounds(builder, compared))
    return Verification(list(builder.notes), builder.techniques.options(), seen, compared)


def of_all_ranks(world: World, seen: list[Evidence]) -> list[Evidence]:
    """The evidence of rank 0, and the failed evidence of other ranks."""
    ranks = enumerate(world.gather(seen, "comparing what the ranks have seen"))
    failed = [(rank, row) for rank, rows in ranks if rank for row in rows if not row.acted]
    return [*seen, *(replace(row, observed=f"rank {rank}: {row.observed}") for rank, row in failed)]


def observe_data(data: PreparedData) -> Iterator[Evidence]:
    """Yield the evidence of supervised tokens and padding in the rows of the first steps."""
    plan, steps = data.training, min(STEPS, data.training.steps)
    micro_batches = [(step, micro) for step in range(steps) for micro in range(plan.micro_batches(step))]
    batches = [plan.batch(*index) for index in micro_batches]
    tokens, slots = sum(batch.tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
    supervised = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    # The first token of a document is never a target. If all others are, everything is supervised.
    most = tokens - sum(len(row) for index in micro_batches for row in plan.contents(*index))
    may_be_all = not any(table.format.is_chat or table.format.answers for table in data.tables)
    planned = sum(plan.supervised(step) for step in range(steps))
    asked = "some tokens supervised" if may_be_all else "some tokens supervised, and not all of them"
    labels = [batch.document_labels for batch in batches if batch.document_labels is not None]
    has_labels = any(bool((~label.isnan()).any()) for label in labels)
    yield Evidence(
        "data",
        f"{asked}, as many as the plan divides by",
        f"{supervised:,} of {tokens:,} tokens ({supervised / max(tokens, 1):.1%}) in the first {steps} steps, "
        f"{planned:,} in the plan",
        (supervised > 0 or has_labels) and supervised == planned and (may_be_all or supervised < most),
    )
    lengths = [f"{length:,}" for length in sorted({batch.input_ids.shape[1] for batch in batches})]
    yield Evidence(
        "data",
        "packed rows" if plan.stream.settings.packing else "one document per row",
        f"{1 - tokens / slots:.1%} padding in rows of {', '.join(lengths[:4])}{' ...' if lengths[4:] else ''} tokens",
        True,
    )


def observe_step(builder: RunBuilder, language_model: LanguageModel, plan: Plan) -> Iterator[Evidence]:
    """Take a step with one micro-batch of real data, and yield the evidence of forward pass, backward pass and
    optimizer. The model cannot be used afterwards."""
    device, model, options = builder.world.device, language_model.model, builder.config.optimizer
    world = builder.world
    batch = builder.own(plan).batch(0, 0).to(device)
    # If ranks share a row, techniques/attention/context.py has already shown that its documents are isolated.
    if world.context_ranks == 1 and (isolation := _observe_isolation(builder, language_model, batch)):
        yield isolation
    objective = builder.config.objective
    # This step has one micro-batch on each rank.
    rows = plan.sizes.micro_batch_size * world.data_ranks
    normalizer = objective.normalizer(Plan(plan.stream, replace(plan.sizes, global_batch_size=rows, stages=())), 0)
    scale = parity.loss_scale(builder, batch.supervised)
    train_step = builder.train_step(language_model, objective, scale, recorded=False)
    names = train_step.optimizer.names
    before = {name: _sample(parameter) for parameter, name in names.items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model.train()
    metrics = train_step.sum_over_ranks(train_step.backward([batch], normalizer))
    gradients = {name: parameter.grad for parameter, name in names.items()}
    yield _observe_gradients(builder, model, gradients, batch)
    train_step.clip(metrics)
    size, found = _vocabulary(language_model), f"a {objective.unit} of {metrics['loss'].item():.4f}"
    if isinstance(objective, CausalLM):
        guess = f"(guessing among all {size:,} tokens: {math.log(size):.2f})"
        found = f"{metrics['loss'].item():.4f} {objective.unit} {guess}"
    yield Evidence(
        "loss",
        "loss and gradient of the first batch are finite",
        f"{found}, gradient of norm {metrics['grad_norm'].item():.3g}",
        bool(metrics["finite"]),
    )
    train_step.update(metrics, options.lr)
    meter = builder.meter(model, plan)
    meter.add(0, 0.0)
    tokens, known = meter.read()["train/tokens"], "known" if meter.cost else "not known, so a run logs no MFU"
    observed = f"{tokens:,.0f} tokens; its FLOPs are {known}"
    yield Evidence("throughput", "the work of a step is counted", observed, tokens > 0)
    moved = _any_by_module(
        {name: not torch.equal(_sample(parameter), before[name]) for parameter, name in names.items()}
    )
    if away := train_step.optimizer.host_moments:
        kept = [moment for moments in away.moments.values() for moment in moments.values()]
        seen = f"{sum(moment.nbytes for moment in kept) / GIB:.2f} GiB in {len(kept)} tensors of pinned memory"
        pinned = bool(kept) and all(moment.is_pinned() for moment in kept)
        yield Evidence("optimizer.offload", "moments in host memory", seen, pinned)
    noun = "adapted modules" if len(moved) < len(before) else "tensors"
    yield Evidence(
        "optimizer",
        f"{options.name.value} moves what is trained",
        f"{sum(moved.values())} of {len(moved)} {noun} moved in one step at lr {options.lr:g}",
        any(moved.values()),
    )
    if world.size > 1 and world.degrees.shard == 1:
        train_step.average()
        sums = [sum(_sample(parameter).double().sum().item() for parameter in names)]
        same = len({repr(own) for own in world.gather(sums, "comparing weights")}) == 1
        yield Evidence(
            "ranks",
            "all ranks hold the same weights after the step",
            f"{world.degrees}: {'equal sums' if same else 'other sums'} of what is trained",
            same,
        )
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), builder.facts.memory
        yield Evidence(
            "memory",
            f"a step of {batch.input_ids.shape[0]} x {batch.input_ids.shape[1]:,} tokens fits",
            f"peak {peak / GIB:.2f} GiB, of {total / GIB:.0f} GiB",
            peak <= total,
        )


def _observe_gradients(
    builder: RunBuilder, model: nn.Module, gradients: dict[str, torch.Tensor | None], batch: Batch
) -> Evidence:
    """Whether exactly the adapters (or all parameters) are trained, and a gradient reaches all of them.

    A new LoRA adapter's B is zero, so the gradient of A is zero; the gradient of B must not be zero. An expert without
    tokens in the batch needs no gradient. Trained rows of an embedding need none if their tokens have no effect on the
    loss. If the batch has images, vision encoder and projector need a gradient in one tensor, and not in all: a
    projector may not read the last layers of a vision encoder.
    """
    adapters, frozen = builder.techniques.lora.enabled, {id(parameter) for parameter in beside_text(model)}
    if builder.config.optimizer.lr_vision is not None:
        frozen -= {id(parameter) for parameter in for_images(model)}
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad != (is_adapter(name) if adapters else id(parameter) not in frozen)
    ]
    sizes = parameter_counts(model)
    count, total = sum(sizes[name] for name in gradients), sum(sizes.values())
    images = {id(parameter) for parameter in for_images(model)}
    of_images = {name for name, parameter in model.named_parameters() if id(parameter) in images}
    nonzero = {name: grad is not None and bool(grad.any()) for name, grad in gradients.items()}
    apart = of_images | trained_tokens.without_gradient(model, _read_ids(batch))
    reached = _any_by_module({name: there for name, there in nonzero.items() if name not in apart})
    if batch.images is not None and (towers := of_images & nonzero.keys()):
        reached["the parts for images"] = any(nonzero[name] for name in towers)
    without = [name for name, there in reached.items() if not there]
    experts = Shape.of(builder.facts.model).expert_count > 1
    seen = (
        f"{count:,} of {total:,} parameters ({count / total:.2%}), {len(wrong)} not as asked; a gradient in "
        f"{len(reached) - len(without)} of {len(reached)} {'adapted modules' if adapters else 'tensors'}"
    )
    seen += "".join(f"; not as asked: {name}" for name in wrong[:1]) + "".join(
        f"; none in {name}" for name in without[:1]
    )
    return Evidence(
        "parameters",
        "the adapters are trained and nothing else" if adapters else "all parameters are trained",
        seen,
        bool(gradients) and not wrong and len(without) < len(reached) and (experts or not without),
    )


def _read_ids(batch: Batch) -> torch.Tensor:
    """The ids [tokens] of the tokens with an effect on the loss: their document has a target at or after them."""
    tokens, ends = batch.input_ids.numel(), batch.cu_seqlens.long()[1:]
    positions = torch.arange(tokens, device=ends.device)
    targets = torch.zeros(tokens, dtype=torch.long, device=ends.device)
    targets[batch.supervised_at] = 1
    before = torch.cat([targets.new_zeros(1), targets.cumsum(0)])
    end = ends[torch.searchsorted(ends, positions, right=True).clamp(max=len(ends) - 1)]
    return batch.input_ids.flatten()[before[end] > before[positions]]


def _any_by_module(tensors: dict[str, bool]) -> dict[str, bool]:
    """Whether any tensor of each adapted module is true. A tensor without an adapter is a module by itself."""
    modules: dict[str, bool] = {}
    for name, value in tensors.items():
        module = name.partition(".lora_")[0]
        modules[module] = modules.get(module, False) or value
    return modules


def _observe_isolation(builder: RunBuilder, language_model: LanguageModel, batch: Batch) -> Evidence | None:
    """Change the tokens of one document of a real row, and observe whether the row's other documents stay the same. At
    the real length other kernels may run than in Technique.verify(). None if no row has two documents with targets."""
    tokens, starts = batch.input_ids.numel(), batch.cu_seqlens.long()
    document = torch.searchsorted(starts[1:], torch.arange(tokens, device=starts.device), right=True)
    counts = torch.bincount(document[batch.supervised_at], minlength=len(starts) - 1).tolist()
    rows = (starts[:-1] // batch.input_ids.shape[1]).tolist()
    # The candidate has targets, and so has a later document of its row. If prompts are shared, the candidate needs two
    # targets, because a changed token moves only later targets.
    least = 1 if batch.key_copies is None else 2
    candidates = (
        first
        for first, here in enumerate(rows)
        if counts[first] >= least
        and any(count and row == here for count, row in zip(counts[first + 1 :], rows[first + 1 :], strict=True))
    )
    candidate = next(candidates, None)
    if not builder.facts.packing or candidate is None:
        return None
    inside = document == candidate
    is_changed = inside if batch.key_copies is None else inside & (batch.key_copies[1:] < 0).all(0)
    vocabulary = _vocabulary(language_model)
    next_ids = (batch.input_ids + 1) % vocabulary
    if batch.images is not None:  # the tokens of images stay, because each token stands for a feature
        image = builder.settled.hf_config.image_token_id
        is_changed = is_changed & (batch.input_ids != image).flatten()
        next_ids = torch.where(next_ids == image, (image + 1) % vocabulary, next_ids)
    changed = torch.where(is_changed.view_as(batch.input_ids), next_ids, batch.input_ids)
    precision = builder.techniques.precision.context(builder.world.device)
    with without_dropout(language_model.model), torch.no_grad(), precision:
        own, others = (
            [language_model.total(replace(part, input_ids=ids)).item() for ids in (batch.input_ids, changed)]
            for part in (_with_targets_at(batch, inside), _with_targets_at(batch, ~inside))
        )
    moved, leaked = (abs(after - before) for before, after in (own, others))
    return Evidence(
        "data",
        "documents of a real row do not see each other",
        f"other tokens in one of {len(document.unique())} documents changed its {language_model.unit} by {moved:.2g}, "
        f"the {language_model.unit} of the other documents by {leaked:.2g}",
        moved > 0 and leaked <= 1e-3 * moved,
    )


def _with_targets_at(batch: Batch, positions: torch.Tensor) -> Batch:
    """The batch with targets only where `positions` (bool, flattened) is true."""
    kept = positions[batch.supervised_at]
    targets = batch.targets.masked_fill(~positions.view_as(batch.targets), IGNORE_INDEX)
    return replace(batch, targets=targets, supervised_at=batch.supervised_at[kept], labels=batch.labels[kept])


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().flatten()[:SAMPLE].clone()


def _vocabulary(language_model: LanguageModel) -> int:
    return int(language_model.model.config.get_text_config().vocab_size)


def _comparison_table(compared: list[parity.Compared]) -> Any:
    columns = ["variant", "loss", "loss off by", "gradient off by", "worst parameter", "within"]
    rows: list[list[object]] = []
    for variant in compared:
        # The name without the parts that all parameters have.
        worst = re.sub(r"^(base_model\.)?(model\.)*|\.default|\.weight$", "", variant.worst)
        errors = [f"{variant.loss_off:.1e}", f"{variant.gradient_off:.1e}", f"{variant.worst_off:.1e} {worst}"]
        errors = errors if rows else ["the reference", "", ""]
        rows.append([variant.name, f"{variant.loss:.6f}", *errors, tick(variant.within)])
    return table("The same global batch in each variant", columns, rows)
