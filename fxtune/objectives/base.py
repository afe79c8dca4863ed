"""The interface of objectives: the loss that training minimises.

An objective reads log-probabilities of supervised tokens from a LanguageModel, for each token or summed over a
document. It returns a sum for each micro-batch. The training step divides the sums by `normalizer`, which counts the
whole step. A mean of means would give a token more weight in a micro-batch with few tokens (transformers#34191), and
the loss would depend on the split of a step into micro-batches.

An objective is a dataclass. Its fields are its options: `beta: float = 0.1` is the key `objective.beta`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import OmegaConf

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.data.chat.template_source import template_of_pairs
from fxtune.data.config import DataConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.models.load import FrozenModelConfig, ModelConfig
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.objectives.registry import OBJECTIVES

CONTRACT = "a float32 sum that can be differentiated, and float32 sums without gradient"


@dataclass
class Objective:
    """The loss that training minimises. `objective=NAME` chooses it; the other keys are its options."""

    name: str = field(default="causal_lm", metadata={"kind": str, "words": OBJECTIVES})
    """`causal_lm`: cross-entropy of the supervised tokens. Plugins add others (docs/plugins.md)."""
    needs: ClassVar[Needs] = Needs()
    interface: ClassVar[type[LanguageModel]] = LanguageModel
    """The class of the model that loss() gets. It must have the head that `needs` names."""
    logit_tensors: ClassVar[int] = 0
    """How many float32 tensors of a chunk of logits loss() holds at once (kernels/divergence.py). 0: it reads
    cross-entropies or scores, and no logits."""
    unit: ClassVar[str] = "mean loss"
    """The unit of a mean loss, for messages and axes."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """The metrics of loss() that `fxtune help objective` lists, and a line about each."""
    compared: ClassVar[tuple[str, ...]] = ()
    """Metrics whose held-out values are shown before and after training. Empty: no evaluation precedes training."""

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The differentiable loss of a micro-batch, a float32 scalar, and further metrics, float32 scalars without
        gradient.

        Loss and metrics are sums on the device. Divided by `normalizer` they are means. A metric `name` is logged as
        `train/name` and `eval/name`, and every batch must have the same metrics. This method must not wait for the
        device, because a pass may be recorded as a CUDA graph.
        """
        raise NotImplementedError

    def normalizer(self, plan: Plan, step: int) -> float:
        """The divisor of a step's sums over all micro-batches and ranks. It is computed from the plan alone."""
        raise NotImplementedError

    def step_values(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """The numbers of a micro-batch on which all losses of its step depend, float32 [slots, numbers], without
        gradient: one row for each document of `batch.cu_seqlens`. Rows that do not count are zeros.

        With `needs.whole_step`, a pass without gradient calls this method for all micro-batches of a step or of an
        evaluation, before the losses.
        """
        raise NotImplementedError

    def step_parts(self, values: torch.Tensor) -> torch.Tensor:
        """Compute, from the values of all micro-batches and ranks, what loss() reads about each document: float32
        [rows, numbers], without gradient.

        `values`, float32 [rows, numbers]: the rows of step_values(). Some rows are zeros: they have no document or do
        not count. The documents of a group follow each other; the order of groups has no meaning. This method is
        called once for a step. It must not wait for the device.
        """
        raise NotImplementedError

    def step_part(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """The rows of step_parts() for the documents of `batch`. A micro-batch that stands alone is a whole step."""
        if batch.step_part is not None:
            return batch.step_part
        with torch.no_grad():
            return self.step_parts(self.step_values(model, batch))

    @property
    def forward_passes(self) -> int:
        """The number of forward passes without gradient for each training pass: one for step_values()."""
        return int(self.needs.whole_step)

    def for_plan(self) -> Objective:
        """This objective for a plan, which loads no weight: a config that ships with fxtune is enough."""
        return self

    def frozen_model(self, trained: ModelConfig) -> FrozenModelConfig | None:
        """A frozen model that computes each micro-batch beside the `trained` model; None if there is none. Its tokens
        must be the trained model's tokens."""
        return None

    @property
    def stored_tokens(self) -> int:
        """How many of the frozen model's likeliest tokens are stored for each supervised token, before the first step.
        0: none, and the frozen model computes each micro-batch."""
        return 0

    def prepare(self, model: LanguageModel, build_frozen: Callable[[], LanguageModel]) -> None:
        """Give `model`, which loss() will get, the parts that the objective adds. `build_frozen`: builds
        frozen_model()."""

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further figures of an evaluation, computed on the host. `means`: the means of `loss` and of each metric."""
        return {}

    def informed(self, tables: Sequence[TokenTable]) -> tuple[Objective, list[str]]:
        """This objective with what it takes from the rows to train on (accept()'s tables), and lines about that."""
        return self, []

    def from_rows(self) -> dict[str, Any]:
        """The options that informed() has set. They are kept with the run, for commands that read other rows."""
        return {}

    def set_template(self, tokenizer: Any, data: DataConfig) -> None:
        """Give `tokenizer` the chat template of the run and of its export. Raises DataError for a wrong file."""
        form = FORMATS.get(self.needs.row_format)
        if form is not None and form.writes_pairs:
            tokenizer.chat_template = template_of_pairs(tokenizer, data.chat_template)

    def configured(self, hf_config: Any) -> Any:
        """The config of the model to build. Raises ConfigError if the base has a head for something else."""
        return hf_config

    def conclude(self, hf_config: Any, figures: Mapping[str, float]) -> None:
        """Write into the config of a trained model what its evaluation has decided. `figures`: eval/loss and so on."""

    def measured(
        self, model: LanguageModel, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
        """loss(), and what judge() reads of a micro-batch: float32 [documents, numbers], or None."""
        return *self.loss(model, batch), None

    def judge(self, values: np.ndarray) -> dict[str, float]:
        """Figures of an evaluation that need all its documents, by name. `values`: the rows of measured() of all
        micro-batches, in any order."""
        return {}

    def verdict(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
        """Yield lines on the figures of evaluations before and after training. `before` may be empty."""
        parts = [
            f"{name} {f'{before[name]:.3f} -> ' if name in before else ''}{after[name]:.3f}"
            for name in self.compared
            if name in after
        ]
        if parts:
            yield f"Held out: {', '.join(parts)}" + " (before -> after training)" * bool(before)

    def refusals(self, facts: Facts) -> Iterator[str]:
        """Yield each reason, with its key, why this objective cannot run under `facts`."""
        yield from self.needs.refusals(self.name, facts.degrees)

    @property
    def judges_held_out(self) -> bool:
        """Whether an evaluation of held-out rows has a loss, so that one model is better than another."""
        return True

    def keeps_start(self, adapters: bool, epochs: float) -> bool:
        """Whether a run of `epochs` keeps a copy of its first adapters. `adapters`: whether it trains any."""
        return False

    def plan_refusals(self, plan: Plan) -> Iterator[str]:
        """Yield each reason why nothing can be learned from the documents of a training plan. accept() also sees the
        held-out documents."""
        yield from ()

    def plan_notes(self, plan: Plan) -> Iterator[str]:
        """Yield a line on each property of the documents of a training plan that a user should know."""
        yield from ()

    def held_out_notes(self, plan: Plan) -> Iterator[str]:
        """Yield a line on each property of the held-out documents that a user should know."""
        yield from ()

    def data_config(self, data: DataConfig) -> DataConfig:
        """`data` with options of this objective that decide how rows are tokenized."""
        return data

    def accept(
        self, tables: Sequence[TokenTable], held_out: Sequence[TokenTable], data: DataConfig
    ) -> tuple[list[TokenTable], list[TokenTable]]:
        """The tables to train on and the tables to evaluate on: the sources' tables, or tables made from these. `data`
        gives the length of rows, and what happens to longer groups.

        Raises one ConfigError that names each table whose rows this objective cannot learn from.
        """
        if refusals := list(self.needs.row_refusals(self.name, [*tables, *held_out])):
            raise ConfigError("\n".join(refusals))
        return list(tables), list(held_out)


@dataclass(frozen=True)
class GroupLosses:
    """The loss and the metrics of each group of a micro-batch. One document of each group has them in its slot."""

    counted: torch.Tensor
    """bool [slots]: true for one document of each group. Other slots of `losses` and `metrics` are meaningless."""
    losses: torch.Tensor
    """float32 [slots]. Only gradients of these losses are used."""
    metrics: Mapping[str, torch.Tensor]
    """By name, a tensor float32 [slots]."""
    values: torch.Tensor | None = None
    """What Objective.judge() reads: float32 [slots, numbers]."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(self.counted, values, 0.0).sum()


@dataclass
class GroupObjective(Objective):
    """An objective in which each group counts once, independent of the length of its documents. A subclass defines
    group_losses()."""

    @abstractmethod
    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        """The loss of each group, without the routers' loss."""

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self._sums(model, batch, self.group_losses(model, batch))

    def measured(
        self, model: LanguageModel, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
        groups = self.group_losses(model, batch)
        return *self._sums(model, batch, groups), None if groups.values is None else groups.values[groups.counted]

    def _sums(
        self, model: LanguageModel, batch: Batch, groups: GroupLosses
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = groups.total(groups.losses)
        auxiliary, routers = model.router_terms(batch, groups.counted.sum())
        sums = {name: groups.total(values.detach()) for name, values in groups.metrics.items()}
        return (loss if auxiliary is None else loss + auxiliary), {**sums, **routers}

    def normalizer(self, plan: Plan, step: int) -> float:
        return float(plan.groups(step))


def from_options(options: Mapping[str, Any]) -> Objective:
    """Make the objective `options["name"]` with the other options. Raises ConfigError for an unknown name, and
    OmegaConf's errors for a wrong option. A Validator has usually reported both before."""
    made: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OBJECTIVES[options["name"]]), options))
    assert isinstance(made, Objective)
    return made


def contract_broken(returned: Any, normalizer: Any) -> str:
    """How the results of loss() and normalizer() break the protocol of objectives; empty if they keep it."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        return f"loss() returned {type(returned).__name__}, not (loss, metrics)"
    loss, metrics = returned
    for name, value in {"the loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.dim() or value.dtype is not torch.float32:
            kind = f"{list(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            return f"{name} is {kind}, not a scalar of float32"
        if value.requires_grad != (value is loss):
            return f"{name} {'has a' if value.requires_grad else 'has no'} gradient"
        if not value.isfinite():
            return f"{name} is {value.item()}"
    if not isinstance(normalizer, (int, float)) or not normalizer > 0:
        return f"normalizer() returned {normalizer!r}, not a number above 0"
    return ""
