"""A canary of rollouts, for `fxtune verify --canary`: if long answers are rewarded, the sampler's answers grow longer.

Advantages with a wrong sign, or a server that loads adapters and does not use them (ms-swift#9855), leave the lengths
as they are. The canary trains in memory, and removes its answers and adapters.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from fxtune.config.root import Config
from fxtune.data.batches.loader import Loader
from fxtune.diagnostics.sampler_report import beside_run
from fxtune.objectives.policy import Policy, RewardConfig
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal.console import say
from fxtune.techniques.base import Evidence
from fxtune.training.builder import RunBuilder
from fxtune.training.rollouts.collector import make_collector
from fxtune.training.rollouts.folder import Rollouts
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.rollouts.vllm import require_ready
from fxtune.training.trial import steps_only

STEPS = 10
"""Number of steps after which the answers must be longer."""
RATE = 1e-3
"""The least learning rate of adapters. At a recipe's rate a rise may take many steps."""
ERRORS = 4.0
"""The answers are longer if their mean length grew by this number of standard errors."""


def observe_canary(config: Config) -> Evidence:
    """Reward the length of answers until the sampler's answers are longer. Each step has the same prompts and seeds,
    so weights that are not used give the same answers again. Raises the errors of training."""
    assert isinstance(config.objective, Policy)
    rewards = [RewardConfig("length", options={"most": config.sampler.max_tokens})]
    objective = replace(
        config.objective, rewards=rewards, teacher="", overlong=0, keep_truncated=True, patience=STEPS + 2
    )
    builder = RunBuilder(
        steps_only(replace(config, objective=objective, sampler=replace(config.sampler, ahead=False)), 1)
    )
    world, lengths = builder.world, list[np.ndarray]()
    tokenizer, data = builder.read()
    if config.sampler.is_vllm:
        world.from_main(partial(require_ready, config, tokenizer), "looking for vLLM")
    model, _ = builder.proven_model()
    own, train_step = builder.config, builder.train_step(model, builder.config.objective)
    rate = max(own.optimizer.lr, RATE) if own.techniques.lora.enabled else own.optimizer.lr
    with beside_run(config) as folder:
        rollouts = Rollouts(world.from_main(lambda: folder, "making a folder"), data.images)
        rows, precision = RowsPerPass(world.device), builder.techniques.precision
        collector = make_collector(own, model, tokenizer, rollouts, precision, world, rows, say)
        with closing(collector):
            while True:
                plan = RolloutPlan.of(data.training, rollouts, own.data)
                collector.collect(plan, 0)
                answers = world.from_main(lambda: list(rollouts.answers(0)), "reading answers")
                lengths.append(np.array([len(answer["ids"]) for answer in answers], np.float64))
                grown, is_idle = lengths[-1] - lengths[0], bool(collector.figures["rollout/idle"])
                rise = float(grown.mean() / max(grown.std() / np.sqrt(len(grown)), 1e-9))
                if rise >= ERRORS or is_idle or len(lengths) > STEPS:
                    break
                train_step.model.model.train()
                loading, step_plan = replace(own.loader, num_workers=0), plan.of_step(0)
                with closing(Loader(builder.own(step_plan), loading, world.device)) as loader:
                    for batches in loader.steps():
                        train_step(step_plan, batches, rate)
                world.from_main(lambda: rollouts.remove(0), "removing answers")
    first, last = (values.mean() for values in (lengths[0], lengths[-1]))
    seen = f"{collector.sampler.name}: {first:.1f} tokens on average, {last:.1f} after {len(lengths) - 1} steps"
    seen += "; answers to a prompt are equally long, so nothing is learned: raise sampler.max_tokens" * is_idle
    return Evidence("sampler", "answers grow longer if their length is the reward", seen, rise >= ERRORS)
