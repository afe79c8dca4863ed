"""`fxtune verify`: does everything that the recipe asks for act, and is the loss right?

    fxtune verify +recipe=quickstart           # build the model as training does, observe it, take one step of real data
    fxtune verify +recipe=quickstart --loss    # and compare loss and gradients with plain transformers, document by document
    fxtune verify +recipe=quickstart --each    # the same with each technique off in turn: which one is it?

The first rows are those that training itself looks at before its first step (Technique.verify). The others need data or a
backward pass: what is supervised, what is trained, whether the real rows keep their documents apart, what a step costs.
Nothing is written, no run folder is claimed and no tracker started. Exit code 1: something did not act.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.plan import Plan
from fxtune.data.read.formats import RowFormat
from fxtune.diagnostics import parity
from fxtune.errors import CheckError, StorageError
from fxtune.models.structure import observed, parameter_counts
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.console import say, table, tick
from fxtune.system.units import GIB
from fxtune.techniques.base import Evidence
from fxtune.tracking.display import evidence_table
from fxtune.training.builder import RunBuilder
from fxtune.training.oom_advice import MemoryPhase

if TYPE_CHECKING:
    from fxtune.config.root import Config

STEPS = 4
"""Steps whose rows are looked at; the model sees the first micro-batch only."""
SAMPLE = 4096
"""Elements of each trained tensor that are watched for movement: a copy of all would not fit beside an 8B model."""
WHOLE = {RowFormat.text, RowFormat.tokens}
"""Formats in which every token may be supervised."""
MANY_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def run(config: Config, loss: bool = False, each: bool = False, json: Optional[str] = None) -> None:
    """Print what was observed. Raises CheckError where something did not act; other errors as training has them.

    `loss`: also compare with plain transformers; `each`: and with each technique off in turn; `json`: a file for all of it.
    """
    setting = RunBuilder(config)
    with setting.oom_context("Checking", MemoryPhase.training):
        _run(setting, loss or each, each, json)


def _run(setting: RunBuilder, loss: bool, each: bool, file: Optional[str]) -> None:
    _, data = setting.read()
    for note in [*setting.config.techniques.ignored_options(), *setting.decided]:
        say(note)
    made = setting.language_model(setting.build())
    seen = [*setting.observe(made), *observe_data(data), *observe_step(setting, made, data.training)]
    del made
    gc.collect()
    say(evidence_table(seen, "What was asked for, and what was observed"))
    compared: list[parity.Compared] = []
    if loss:
        compared = parity.compare(setting, data.training, each, say)
        say(comparison_table(compared))
        say(parity.explained(setting))
    failed = [f"  {one.technique}: asked for {one.asked}; seen: {one.observed}" for one in seen if not one.acted]
    failed += [f"  loss: {one.name}: {', '.join(one.beyond())}" for one in compared if not one.within]
    if file is not None:
        _write(Path(file), setting, seen, compared, not failed)
    if failed:
        raise CheckError(f"{len(failed)} of {len(seen) + len(compared)} are not as asked for:\n" + "\n".join(failed))
    say(f"All {len(seen) + len(compared)} as asked for.")


def observe_data(data: PreparedData) -> Iterator[Evidence]:
    """What is supervised in the first steps' rows, and how much of them is padding."""
    plan = data.training
    steps = min(STEPS, plan.steps)
    batches = [plan.batch(step, micro) for step in range(steps) for micro in range(plan.micro_batches(step))]
    tokens, room = sum(batch.tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
    supervised = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    # The first token of a document is nobody's target: where all others are, everything is supervised.
    most = tokens - sum(
        len(row)
        for step in range(steps)
        for micro in range(plan.micro_batches(step))
        for row in plan.contents(step, micro)
    )
    whole = all(one.format in WHOLE for one in data.tables)
    counted = sum(plan.supervised(step) for step in range(steps))
    asked = "some tokens supervised" if whole else "some tokens supervised, and not all of them"
    yield Evidence(
        "data",
        f"{asked}, as many as the plan divides by",
        f"{supervised:,} of {tokens:,} tokens ({supervised / max(tokens, 1):.1%}) in the first {steps} steps, "
        f"{counted:,} in the plan",
        0 < supervised == counted and (whole or supervised < most),
    )
    lengths = sorted({batch.input_ids.shape[1] for batch in batches})
    yield Evidence(
        "data",
        "packed rows" if plan.stream.settings.packing else "one document a row",
        f"{1 - tokens / room:.1%} padding in rows of {', '.join(f'{n:,}' for n in lengths[:4])}"
        f"{' ...' if len(lengths) > 4 else ''} tokens",
        True,
    )


def observe_step(setting: RunBuilder, language_model: LanguageModel, plan: Plan) -> Iterator[Evidence]:
    """One micro-batch of real data, forward and backward, and one step of the optimizer. The model is of no use afterwards."""
    device, model = setting.world.device, language_model.model
    batch = plan.batch(0, 0).to(device)
    if isolated := _isolation(setting, language_model, batch):
        yield isolated
    scale = parity.loss_scale(setting, batch.supervised)
    train_step = setting.train_step(language_model, CausalLM(), scale, recorded=False)
    optimizer = train_step.optimizer
    before = {name: _sample(parameter) for parameter, name in optimizer.names.items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model.train()
    metrics = train_step.backward([batch], batch.supervised)
    gradients = {name: parameter.grad for parameter, name in optimizer.names.items()}
    yield _trained(setting, model, gradients)
    train_step.clip(metrics)
    size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    yield Evidence(
        "loss",
        "loss and gradient of the first batch are finite",
        f"{metrics['loss'].item():.4f} nats a supervised token (guessing among all {size:,} tokens: {math.log(size):.2f}), "
        f"gradient of norm {metrics['grad_norm'].item():.3g}",
        bool(metrics["finite"]),
    )
    del gradients
    train_step.update(metrics, setting.config.optimizer.lr)
    moved = _owners(
        {name: not torch.equal(_sample(parameter), before[name]) for parameter, name in optimizer.names.items()}
    )
    noun = "adapted modules" if len(moved) < len(before) else "tensors"
    yield Evidence(
        "optimizer",
        f"{setting.config.optimizer.name.value} moves what is trained",
        f"{sum(moved.values())} of {len(moved)} {noun} moved in one step at lr {setting.config.optimizer.lr:g}",
        any(moved.values()),
    )
    if device.type == "cuda":
        peak, room = torch.cuda.max_memory_allocated(device), setting.facts.memory
        yield Evidence(
            "memory",
            f"a step of {batch.input_ids.shape[0]} x {batch.input_ids.shape[1]:,} tokens fits",
            f"{peak / GIB:.2f} GiB at its peak, of {room / GIB:.0f} GiB",
            peak <= room,
        )


def _trained(setting: RunBuilder, model: nn.Module, gradients: dict[str, torch.Tensor | None]) -> Evidence:
    """That exactly the adapters (or everything) is trained, and that a gradient reaches all of it.

    A new LoRA adapter's B is zero, so its A has a gradient of zeros: one half of each must have one that is not.
    Experts that no token of the batch went to have none, and are not asked for one.
    """
    adapters = setting.techniques.lora.enabled
    strays = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad != (not adapters or "lora_" in name or "modules_to_save" in name)
    ]
    numbers = parameter_counts(model)
    count, total = sum(numbers[name] for name in gradients), sum(numbers.values())
    reached = _owners({name: gradient is not None and bool(gradient.any()) for name, gradient in gradients.items()})
    without = [owner for owner, there in reached.items() if not there]
    experts = any(setting.facts.text.get(key) for key in MANY_EXPERTS)
    seen = (
        f"{count:,} of {total:,} parameters ({count / total:.2%}), {len(strays)} not as asked; a gradient in "
        f"{len(reached) - len(without)} of {len(reached)} {'adapted modules' if adapters else 'tensors'}"
    )
    return Evidence(
        "parameters",
        "the adapters are trained and nothing else" if adapters else "all parameters are trained",
        seen
        + "".join(f"; not as asked: {name}" for name in strays[:1])
        + "".join(f"; none in {name}" for name in without[:1]),
        bool(gradients) and not strays and len(without) < len(reached) and (experts or not without),
    )


def _owners(tensors: dict[str, bool]) -> dict[str, bool]:
    """By adapted module (or by tensor, where there is no adapter): whether it holds for one of its tensors at least."""
    owners: dict[str, bool] = {}
    for name, holds in tensors.items():
        owner = name.partition(".lora_")[0]
        owners[owner] = owners.get(owner, False) or holds
    return owners


def _isolation(setting: RunBuilder, language_model: LanguageModel, batch: Batch) -> Evidence | None:
    """Change every token of one document of a real row, and see whether the loss of the others moves. None: nothing to see.

    Technique.verify does this on a few tokens; kernels may take another path at the real length.
    """
    flat = batch.position_ids.flatten()
    document = (flat == 0).long().cumsum(0) - 1
    row = torch.arange(len(flat), device=flat.device) // batch.input_ids.shape[1]
    counts = torch.bincount(document[batch.supervised_at], minlength=int(document.max()) + 1).tolist()
    rows = row[flat == 0].tolist()
    pairs = [
        first
        for first, here in enumerate(rows)
        if counts[first] and any(counts[after] and rows[after] == here for after in range(first + 1, len(rows)))
    ]
    if not setting.facts.packing or not pairs:
        return None
    inside = document == pairs[0]
    size = language_model.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    changed = torch.where(inside.view_as(batch.input_ids), (batch.input_ids + 1) % size, batch.input_ids)
    with observed(language_model.model), torch.no_grad(), setting.techniques.precision.context(setting.world.device):
        own, others = (
            [language_model.summed_loss(replace(part, input_ids=ids)).item() for ids in (batch.input_ids, changed)]
            for part in (_only(batch, inside), _only(batch, ~inside))
        )
    moved, leaked = (abs(after - before) for before, after in (own, others))
    return Evidence(
        "data",
        "documents of a real row do not see each other",
        f"other tokens in one of {len(counts)} documents moved its own loss by {moved:.2g} nats, that of the others "
        f"by {leaked:.2g}",
        moved > 0 and leaked <= 1e-3 * moved,
    )


def _only(batch: Batch, inside: torch.Tensor) -> Batch:
    """The batch with no target but those at the flattened positions `inside`."""
    kept = inside[batch.supervised_at]
    return replace(
        batch,
        targets=batch.targets.masked_fill(~inside.view_as(batch.targets), IGNORE_INDEX),
        supervised_at=batch.supervised_at[kept],
        labels=batch.labels[kept],
    )


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().flatten()[:SAMPLE].clone()


def comparison_table(compared: list[parity.Compared]) -> Any:
    columns = ["variant", "loss", "loss off by", "gradient off by", "worst parameter", "within"]
    rows: list[list[object]] = [
        [
            one.name,
            f"{one.loss:.6f}",
            f"{one.loss_off:.1e}",
            f"{one.gradient_off:.1e}",
            f"{one.worst_off:.1e} {_short(one.worst)}",
            tick(one.within),
        ]
        for one in compared
    ]
    rows[0][2:5] = ["the reference", "", ""]
    return table("The same global batch, side by side", columns, rows)


def _short(name: str) -> str:
    """A parameter's name without what all of them have."""
    return re.sub(r"^(base_model\.)?(model\.)*|\.default|\.weight$", "", name)


def _write(
    file: Path, setting: RunBuilder, seen: list[Evidence], compared: list[parity.Compared], acted: bool
) -> None:
    whole = {
        "acted": acted,
        "decided": setting.decided,
        "techniques": setting.techniques.options(),
        "evidence": [dataclasses.asdict(one) for one in seen],
        "loss": [dataclasses.asdict(one) for one in compared],
    }
    try:
        file.write_text(json.dumps(whole, indent=1, default=str) + "\n")
    except OSError as error:
        raise StorageError(
            f"--json {file} cannot be written: {error}. Give a file in a folder that is there."
        ) from error
