"""Compares one step of reinforcement learning on the same rollouts: fxtune and TRL, in float32, on a CPU.

    pip install --target trl --no-deps trl==1.16.0
    PYTHONPATH=trl python scripts/study/equal_policy.py                 # all cases
    PYTHONPATH=trl python scripts/study/equal_policy.py --cases dapo gspo

The model is the tiny one that ships with fxtune. The script draws answers to four prompts. The sampler's
log-probabilities are the model's own and noise, so that ratios lie on both sides of the bounds. fxtune's collector
scores these answers and writes them as the rollouts of a step. TRL gets the same ids, log-probabilities and rewards
from a `rollout_func`, and takes the step in its own training loop, in micro-batches. No optimizer step changes the
model before the gradients are read.

TRL runs as it is. Where it departs from a case of fxtune, it runs again with the departure corrected, which must make
loss and gradients equal: `Departure` says what TRL does. The differences are |fxtune - TRL| / |TRL|, for gradients
over all parameters. The exit code is 1 if a difference is above 1e-5 in the last run of a case.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from fxtune.config.compose import load  # noqa: E402
from fxtune.training.builder import RunBuilder  # noqa: E402
from fxtune.training.rollouts.collector import Collector  # noqa: E402
from fxtune.training.rollouts.episodes import Episodes, Sampled  # noqa: E402
from fxtune.training.rollouts.folder import Answer, Rollouts  # noqa: E402
from fxtune.training.rollouts.plan import RolloutPlan  # noqa: E402

TINY = ROOT / "fxtune" / "assets" / "tiny"
PROMPTS = ["Say yes.", "A red lamp for Anna, please.", "Who is it?", "Count to three."]
ANSWERS, LONGEST, MICRO_BATCH, NOISE, BOUND = 6, 24, 6, 0.4, 1e-5
"""Answers to a prompt, tokens of the longest answer, answers of TRL's micro-batches, the standard deviation of the
noise in nats, and the largest relative difference of loss and gradients."""
Parameters = dict[str, torch.Tensor]


class Departure(str, Enum):
    """A place where TRL departs from the case. The value says what TRL does."""

    sequence_mask = (
        "takes the ratio to its own model, which is 1, and multiplies an answer's loss by the ratio of the whole "
        "answer to the sampler, or by 0 if that is above 3 (`sequence_mask`)"
    )
    equal_groups = "counts the tokens of a group with equal rewards in the divisor"


@dataclass(frozen=True)
class Case:
    keys: tuple[str, ...]
    """fxtune's."""
    options: dict[str, Any]
    """TRL's."""
    departures: tuple[Departure, ...] = (Departure.sequence_mask,)
    has_equal_group: bool = False
    """All answers to the last prompt have the same reward."""


DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
CASES = {
    "grpo": Case(("objective=grpo",), {"loss_type": "grpo"}),
    "dr_grpo": Case(("objective=dr_grpo",), {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": Case(("objective=dapo",), DAPO),
    "gspo": Case(
        ("objective=gspo",),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": Case(("objective=cispo",), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "dapo, temperature 0.7": Case(("objective=dapo", "sampler.temperature=0.7"), {**DAPO, "temperature": 0.7}),
    "dapo, an equal group": Case(("objective=dapo",), DAPO, (*Departure,), has_equal_group=True),
    "dapo, correction=truncate": Case(
        ("objective=dapo", "objective.correction=truncate", "objective.correction_limit=1.5"),
        {
            **DAPO,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 1.5,
        },
        (),
    ),
    "dapo, correction=mask": Case(
        ("objective=dapo", "objective.correction=mask", "objective.correction_limit=1.5"),
        {
            **DAPO,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 1 / 1.5,
            "vllm_importance_sampling_clip_max": 1.5,
        },
        (),
    ),
    "dapo, correction=none": Case(
        ("objective=dapo", "objective.correction=none"), {**DAPO, "vllm_importance_sampling_correction": False}, ()
    ),
}


@dataclass
class Rollout:
    """An answer to a prompt, both in tokens, and what TRL gets with it."""

    group: int
    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    reward: float = 0.0


@dataclass
class Stored:
    """A sampler that gives drawn answers."""

    temperature: float
    has_equal_group: bool
    name: str = "drawn answers"
    repeats: bool = True
    sync_seconds: float = 0.0
    given: list[Rollout] = field(default_factory=list)

    def sample(self, episodes: Episodes, weights_version: str) -> Callable[[], list[Answer]]:
        model, random = tiny_model(), np.random.default_rng(0)
        for number, request in enumerate(episodes.begin()):
            group = number // ANSWERS
            is_equal = self.has_equal_group and group == len(PROMPTS) - 1
            length = 5 if is_equal else int(random.integers(2, LONGEST + 1))
            ids = [*random.integers(3, 1000, length - 1).tolist(), 2]
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt, *ids]])).logits[0, len(request.prompt) - 1 : -1]
            own = (logits / self.temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            noise = torch.from_numpy(random.normal(0, NOISE, length)).float()
            self.given.append(Rollout(group, request.prompt, ids, (own + noise).clamp(max=0).tolist()))
        episodes.go_on([Sampled(each.ids, each.log_probs, True) for each in self.given])
        return lambda: episodes.answers

    def has(self, weights_version: str) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


def tiny_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def step_of_fxtune(case: Case, folder: Path) -> tuple[float, Parameters, list[Rollout]]:
    """(loss, gradients, the answers with their rewards)"""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in PROMPTS))
    words = [
        "model=tiny",
        *case.keys,
        f"objective.rewards=[{{name: length, options: {{most: {LONGEST}}}}}]",
        "objective.max_gap=10",
        f"data.sources=[{{path: {folder / 'rows.jsonl'}}}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.sequence_length=128",
        f"sampler.answers={ANSWERS}",
        f"sampler.max_tokens={LONGEST}",
        "sampler.reward_workers=1",
        "train.micro_batch_size=1",
        f"train.global_batch_size={len(PROMPTS)}",
        "train.max_steps=1",
        "techniques.lora.enabled=false",
        "tracking.display=none",
        "run.device=cpu",
    ]
    builder = RunBuilder(load(words))
    tokenizer, data = builder.read()
    model, _ = builder.proven_model()
    config, objective, rollouts = builder.config, builder.config.objective, Rollouts(folder / "rollouts")
    plan = RolloutPlan.of(data.training, rollouts, config.data)
    sampler = Stored(config.sampler.temperature, case.has_equal_group)
    precision = builder.techniques.precision
    collector = Collector(config, model, sampler, rollouts, precision, builder.world, tokenizer, print)
    with contextlib.closing(collector):
        collector.collect(plan, 0)
    for rollout, answer in zip(sampler.given, rollouts.answers(0), strict=True):
        rollout.reward = answer["reward"]
    own = plan.of_step(0)
    batches = [own.batch(0, index) for index in range(own.micro_batches(0))]
    found = builder.train_step(model, objective).backward(batches, objective.normalizer(own, 0))
    gradients = {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}
    return found["loss"].item(), gradients, sampler.given


def step_of_trl(case: Case, departures: Sequence[Departure], given: list[Rollout], folder: Path) -> Any:
    """(loss, gradients) of TRL. `departures`: those to correct."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    options = dict(case.options)
    if Departure.sequence_mask in departures:
        options["vllm_importance_sampling_correction"] = False
    if Departure.equal_groups in departures:
        rewards = [{each.reward for each in given if each.group == group} for group in range(len(PROMPTS))]
        given = [each for each in given if len(rewards[each.group]) > 1]
    losses, gradients = list[float](), Parameters()

    class Reading(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients.update({name: each.grad.clone() for name, each in model.named_parameters()})

    class Corrected(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> torch.Tensor:
            if Departure.sequence_mask in departures:
                inputs = {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]}
            loss: torch.Tensor = super().compute_loss(model, inputs, *rest, **named)
            losses.append(loss.item())
            return loss

    def stored(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        waiting = {PROMPTS[group]: [each for each in given if each.group == group] for group in range(len(PROMPTS))}
        found: list[Rollout] = [waiting[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [each.prompt for each in found],
            "completion_ids": [each.ids for each in found],
            "logprobs": [each.log_probs for each in found],
            "reward": [each.reward for each in found],
        }

    groups = sorted({each.group for each in given})
    trainer = Corrected(
        model=tiny_model(),
        reward_funcs=lambda completions, reward, **_: reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=len(given) // MICRO_BATCH,
            num_generations=ANSWERS,
            max_completion_length=LONGEST,
            max_steps=1,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPTS[group]} for group in groups]),
        processing_class=AutoTokenizer.from_pretrained(TINY, padding_side="left"),
        rollout_func=stored,
        callbacks=[Reading()],
    )
    # As with vLLM, without a server: the answers come from `stored`, which counts as having the newest weights.
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        trainer.train()
    return sum(losses), gradients


def norm(gradients: Parameters) -> float:
    return float(torch.cat([each.flatten().double() for each in gradients.values()]).norm())


def distance(mine: Parameters, theirs: Parameters) -> float:
    """|mine - theirs| / |theirs| over all parameters."""
    assert mine.keys() == theirs.keys()
    return norm({name: mine[name] - other for name, other in theirs.items()}) / norm(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], help="(default: all)")
    args = parser.parse_args()
    worst = 0.0
    print("| case | loss | gradient norm | TRL as it is: gradient | TRL corrected: loss | gradient | TRL |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name in args.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="equal-policy-") as scratch:
            loss, gradients, given = step_of_fxtune(case, Path(scratch))
            apart = []
            for departures in dict.fromkeys([(), case.departures]):
                their_loss, theirs = step_of_trl(case, departures, given, Path(scratch))
                apart.append((abs(loss - their_loss) / abs(their_loss), distance(gradients, theirs)))
        worst = max(worst, *apart[-1])
        figures = [f"{loss:.6f}", f"{norm(gradients):.4f}"]
        figures += [f"{each:.1e}" for each in (apart[0][1], *apart[-1])]
        print(f"| {name} | {' | '.join(figures)} | {'; '.join(case.departures)} |", flush=True)
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
