"""Policy gradients: the model learns from rewards of its own answers, or from a teacher that rates their tokens.

In each step the model writes several answers to each of some prompts, and rewards score them
(fxtune/training/rollouts). An answer's advantage says how much better it is than the other answers to its prompt.
Training makes the tokens of good answers likelier:

    clipped     loss = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        PPO, GRPO, DAPO, GSPO
    weighted    loss = - stop_gradient(clip(r)) A log p(token)                   CISPO, RLOO

r is the ratio of the trained model's probability to the sampler's probability of the token. The sampler's kernels and
its rounding differ from the trainer's, so r is not exactly 1 in the first pass, and `correction` says what happens:
`ratio` (the default) trains on this ratio, as tinker and prime-rl do. The other values take the ratio to the trained
model itself, which is 1, and `truncate` and `mask` multiply the loss by the bounded ratio to the sampler (TIS,
IcePop). No value needs a pass of an older model, because no two optimizer steps learn
from the same answers.

A teacher adds `teacher_weight` (log p_teacher(token) - log p_sampler(token)) to the advantage of each token. Without
rewards this is on-policy distillation: the student learns, on texts that it writes itself, the teacher's likelihoods.
With `teacher=base` it is a penalty on the distance from the base, the estimator k1 of their KL, as part of the reward.

The advantages that are stored with a step's tokens hold the weight of `reduction`, too. So the loss is a sum over
tokens that is divided by the number of tokens of the step, whatever the reduction is:

    tokens      each token counts the same (DAPO, arXiv:2503.14476)
    answers     each answer counts the same, the mean over its tokens (GRPO, arXiv:2402.03300)
    max_length  the sum over tokens, divided by the answers times sampler.max_tokens (Dr. GRPO, arXiv:2503.20783)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Optional

import numpy as np
import torch

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.facts.run import Facts
from fxtune.models.reference import ReferenceModel
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.objectives.teacher import BASE, WithTeacher
from fxtune.plugins import REWARD_ARGUMENTS, REWARDS, reward_problem

SMALL = 1e-4
"""Added to the deviation of a group's rewards, as in TRL."""
EQUAL = 1e-6
"""The rewards of a group are equal if they differ by no more than this."""
LARGEST = 20.0
"""The largest logarithm of a ratio. The ratio and its gradient would overflow far above it."""


class Advantage(str, Enum):
    centre = "centre"
    std = "std"
    leave_one_out = "leave_one_out"
    max = "max"

    def of(self, rewards: np.ndarray) -> np.ndarray:
        """The advantages of the answers to one prompt. `rewards`: float64 [answers]."""
        centred: np.ndarray = rewards - rewards.mean()
        if self is Advantage.std:
            return centred / (rewards.std(ddof=1) + SMALL)
        if self is Advantage.leave_one_out:
            return centred * len(rewards) / (len(rewards) - 1)
        if self is Advantage.max:
            return centred / max(abs(rewards.mean()), SMALL)
        return centred


class Surrogate(str, Enum):
    clipped = "clipped"
    weighted = "weighted"


class Ratio(str, Enum):
    token = "token"
    sequence = "sequence"


class Correction(str, Enum):
    ratio = "ratio"
    truncate = "truncate"
    mask = "mask"
    none = "none"


class Reduction(str, Enum):
    tokens = "tokens"
    answers = "answers"
    max_length = "max_length"

    def weights(self, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
        """The weight of each answer's tokens in a sum that is divided by all tokens of the step, float64 [answers].
        `lengths`: the tokens of each answer of the step. `max_tokens`: the longest possible answer."""
        mean = lengths.sum() / len(lengths)
        if self is Reduction.answers:
            return mean / lengths
        return np.full(len(lengths), mean / max_tokens if self is Reduction.max_length else 1.0)


class OnBadReward(str, Enum):
    error = "error"
    drop = "drop"


@dataclass
class RewardConfig:
    name: str = "???"
    """A reward of fxtune (`fxtune help objective.rewards`), or of a plugin (docs/rl.md)."""
    weight: float = field(default=1.0, metadata={"min": -1e6, "max": 1e6})
    """The factor of this reward in the sum of all rewards."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the reward: {column: solution}."""

    def refusal(self) -> str:
        """Why there is no such reward with these options; empty if there is."""
        if self.name not in REWARDS:
            return f"objective.rewards: {REWARDS.unknown(self.name)}"
        parameters = inspect.signature(REWARDS[self.name]).parameters
        is_ours = self.name not in REWARDS.added()
        if not is_ours and any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return ""  # the rows' columns are keywords, too
        known = [
            key for key, one in parameters.items() if one.kind is not one.VAR_KEYWORD and key not in REWARD_ARGUMENTS
        ]
        shown = f"Its options: {', '.join(known) or 'none'}."
        if unknown := [key for key in self.options if key not in known]:
            return f"objective.rewards: {self.name} has no option `{unknown[0]}`. {shown}"
        empty = inspect.Parameter.empty
        needed = [key for key in known if parameters[key].default is empty and key not in self.options]
        if needed and is_ours:
            return f"objective.rewards: {self.name} needs the option `{needed[0]}`. {shown}"
        return reward_problem(self.name, self.options)


@dataclass
class Policy(WithTeacher):
    needs: ClassVar[Needs] = Needs(labels=None, whole_documents=True, row_format="prompt", rollouts=True)
    unit: ClassVar[str] = "loss per sampled token"
    metrics: ClassVar[Mapping[str, str]] = {
        "entropy": "- log-probability of the sampled tokens, in nats: an estimate of the entropy; near 0, all answers "
        "to a prompt are the same, and nothing more is learned",
        "kl": "KL(sampler | trained model) of a token in nats, by the estimator k3: how far the step's answers are "
        "from the model that learns from them",
        "gap": "mean distance of the two models' log-probabilities of a sampled token, in nats",
        "clipped": "share of tokens whose ratio is outside of the bounds and whose gradient is 0, or cut",
    }
    compared: ClassVar[tuple[str, ...]] = ("reward",)
    rewards: list[RewardConfig] = field(default_factory=list)
    """What an answer is worth: the weighted sum of these rewards."""
    on_bad_reward: OnBadReward = OnBadReward.error
    """What happens if a reward raises an error, takes too long, or gives no finite number. `error`: the run ends, and
    the message names the row. `drop`: the answers to this prompt are left out, and a line says so."""
    teacher_weight: float = field(default=1.0, metadata={"above": 0})
    """The weight of the teacher's part of the advantages. For `teacher=base` beside rewards: 0.01 to 0.1."""
    advantage: Advantage = Advantage.centre
    """How rewards become advantages, within the answers to a prompt. `centre`: reward - mean. `std`: this divided by
    the standard deviation (GRPO). `leave_one_out`: reward - mean of the other answers (RLOO). `max`: (reward - mean) /
    mean, for rewards from 0 on (MaxRL, arXiv:2602.02710)."""
    surrogate: Surrogate = Surrogate.clipped
    """`clipped`: the pessimistic bound of PPO. `weighted`: log-probabilities, weighted by the clipped ratio."""
    ratio: Ratio = Ratio.token
    """`token`: a ratio for each token. `sequence`: one for each answer, the geometric mean over its tokens (GSPO)."""
    clip_low: Optional[float] = field(default=0.2, metadata={"min": 0, "max": 1})
    """A ratio below 1 - clip_low is clipped to this bound. null: no lower bound."""
    clip_high: Optional[float] = field(default=0.28, metadata={"min": 0})
    """A ratio above 1 + clip_high is clipped to this bound. null: no upper bound."""
    correction: Correction = Correction.ratio
    """What is done about the distance of sampler and trainer. `ratio`: the ratio is to the sampler. `truncate`: the
    loss is multiplied by the ratio to the sampler, at most correction_limit. `mask`: likewise, and 0 outside of 1 /
    correction_limit to correction_limit. `none`: nothing."""
    correction_limit: float = field(default=2.0, metadata={"min": 1})
    """The bound of `truncate` and `mask`."""
    reduction: Reduction = Reduction.tokens
    """What counts the same in a step: each of its `tokens`, or each of its `answers`. `max_length`: each token, and
    the sum is divided by the answers times sampler.max_tokens, so that long answers are not favoured."""
    overlong: int = field(default=0, metadata={"min": 0})
    """Over the last `overlong` tokens before sampler.max_tokens an answer's reward falls by 0 to 1 (DAPO's soft
    punishment). 0: none."""
    keep_truncated: bool = True
    """Learn from answers that sampler.max_tokens cut off. False: these answers count only in their group's mean."""
    max_gap: float = field(default=0.1, metadata={"above": 0})
    """The largest mean distance, in nats, of the log-probabilities that sampler and trainer give to a sampled token.
    Above it the run ends: the sampler has other weights."""
    patience: int = field(default=20, metadata={"min": 1})
    """The run ends after this many steps in a row in which the rewards of each prompt were equal."""

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert batch.sampled is not None, "the batch has no rollouts"
        assert batch.advantages is not None
        log_probs, advantages, counts = model.log_probs(batch), batch.advantages, batch.labels != IGNORE_INDEX
        fixed = log_probs.detach()
        distance = torch.where(counts, fixed - batch.sampled, 0.0)
        log_ratio = log_probs - (batch.sampled if self.correction is Correction.ratio else fixed)
        log_ratio = torch.where(counts, log_ratio, 0.0)
        if self.ratio is Ratio.sequence:
            means = batch.document_sums(log_ratio) / batch.document_sums(counts.float()).clamp(min=1)
            log_ratio = means[batch.document_of_target().clamp(max=len(means) - 1)]
        ratio = log_ratio.clamp(max=LARGEST).exp()
        low = None if self.clip_low is None else 1 - self.clip_low
        high = None if self.clip_high is None else 1 + self.clip_high
        bounded = ratio if low is None and high is None else ratio.clamp(low, high)
        if self.surrogate is Surrogate.weighted:
            losses, cut = -bounded.detach() * advantages * log_probs, bounded != ratio
        else:
            losses, pessimistic = -ratio * advantages, -bounded * advantages
            losses, cut = torch.maximum(losses, pessimistic), pessimistic > losses
        if self.correction in (Correction.truncate, Correction.mask):
            weight, limit = distance.exp(), self.correction_limit
            outside = (weight > limit) | (weight < 1 / limit)
            kept = torch.where(outside, 0.0, weight) if self.correction is Correction.mask else weight.clamp(max=limit)
            losses = losses * kept
        loss = torch.where(counts, losses, 0.0).sum()
        auxiliary, routers = model.router_terms(batch, counts.sum())
        metrics = {
            "entropy": -torch.where(counts, fixed, 0.0),
            "kl": distance.exp() - 1 - distance,
            "gap": distance.abs(),
            "clipped": torch.where(counts, cut, False).float(),
        }
        sums = {name: values.sum().detach() for name, values in metrics.items()}
        return (loss if auxiliary is None else loss + auxiliary), {**sums, **routers}

    @property
    def judges_held_out(self) -> bool:
        return bool(self.rewards)  # a teacher does not judge held-out answers

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        yield from filter(None, (reward.refusal() for reward in self.rewards))
        if not self.rewards and self.teacher in ("", BASE):
            yield (
                "objective.rewards: there is none, so no answer is better than another. Name one, for example "
                "'objective.rewards=[{name: exact}]', or another model in objective.teacher."
            )

    def prepare(self, model: LanguageModel, build_frozen: Callable[[], LanguageModel]) -> None:
        if self.teacher == BASE:
            model.reference = ReferenceModel(model.prepared, keeps_start=False)
        elif self.teacher and not self.teacher_is_server:
            model.teacher = build_frozen()

    def teacher_log_probs(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """The log-probability that the teacher gives to each target, float32 [supervised], without gradient."""
        teacher: LanguageModel = model.teacher or model
        if teacher is model:
            return model.reference_log_probs(batch)
        teacher.temperature = model.temperature
        with torch.no_grad():
            return teacher.log_probs(batch)

    def answer_reward(self, reward: float, length: int, max_tokens: int) -> float:
        """The reward of an answer of `length` tokens, with the punishment of `overlong`."""
        over = length - (max_tokens - self.overlong)
        return reward - min(max(over, 0) / self.overlong, 1.0) if self.overlong else reward
