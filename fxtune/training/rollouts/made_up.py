"""Rollouts with made-up answers, for commands that take a step but sample nothing: `fxtune verify` and `fxtune bench`.

An answer's tokens, log-probabilities and advantages are random numbers by the run's seed. Its length is drawn evenly
from 1 to sampler.max_tokens. So a step has the shapes of training, and its loss and gradients are compared with plain
transformers on ratios on both sides of the bounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fxtune.config.root import Config
from fxtune.data.batches.epochs import EpochStream
from fxtune.data.batches.layout import BatchSizes
from fxtune.data.batches.plan import Plan
from fxtune.training.rollouts.folder import Answer, Asked, Rollouts
from fxtune.training.rollouts.plan import RolloutPlan

LOG_PROB = -2.0
"""The mean of the made-up log-probabilities."""


def made_up_plan(config: Config, prompts: Plan, folder: Path) -> Plan:
    """A plan with as many steps as `prompts`. The first step has sampler.answers different answers to each prompt of
    step 0, and the later steps take the same rows again. `folder`: where the answers are written."""
    random, sampler = np.random.default_rng(config.run.seed), config.sampler
    rollouts, answers = Rollouts(folder), list[Answer]()
    plan = RolloutPlan.of(prompts, rollouts, config.data)
    asked = [Asked.of(prompts.tables[source], document) for source, document in plan.prompts(0)]
    tokens = np.unique(np.concatenate([each.prompt for each in asked]))
    for group in range(len(asked)):
        for number in range(sampler.answers):
            length = int(random.integers(1, sampler.max_tokens + 1))
            ids, log_probs = random.choice(tokens, length).tolist(), random.normal(LOG_PROB, 0.5, length).tolist()
            if config.data.has_tools:  # the results of tools are not learned
                log_probs[length // 3 : length // 2] = [None] * (length // 2 - length // 3)
            advantage = float(random.normal())
            answers.append(Answer("", group, ids, log_probs, True, number, advantage=advantage))
    lengths = np.array([answer.length for answer in answers], np.float64)
    longest = config.data.sequence_length if config.data.shares_prompts else None
    rollouts.stage(0, asked, answers, longest)
    rollouts.finish(0, answers, config.objective.reduction.weights(lengths, sampler.max_tokens), {})
    stream = EpochStream([rollouts.table(0)], plan.settings)
    micro = prompts.sizes.micro_batch_size
    rows = max(len(stream.epoch(0)) * stream.rows_of_group // micro, 1) * micro
    sizes = BatchSizes(micro, rows, prompts.steps, None, config.data.row_lengths(), prompts.sizes.pad_id)
    return Plan(stream, sizes)
