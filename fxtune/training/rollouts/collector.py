"""Collects the rollouts of a step: the model answers the step's prompts, rewards score the answers, and answers with
advantages are written to the disk. A step that is on the disk is read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxtune.config.root import Config
from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.data.config import SourceConfig
from fxtune.data.formats.chat_format import is_chat, with_parsed_lists
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read.row import Row
from fxtune.data.tokenized.ends import template_ends
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, NumbersError
from fxtune.models.end_tokens import end_tokens
from fxtune.models.structure import without_dropout
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.policy import EQUAL, SMALL, Advantage, OnBadReward, Policy
from fxtune.system.process.oom import RowsPerPass
from fxtune.techniques.base import Evidence
from fxtune.techniques.precision import Precision
from fxtune.training.answers import Question
from fxtune.training.data.stored_numbers import weights_checksum
from fxtune.training.rollouts.folder import Answer, Asked, Rollouts
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.rollouts.sampler import ModelSampler, Request, Sampled, Sampler, seed_of
from fxtune.training.rollouts.scoring import Call, Group, RewardWorkers, Scores
from fxtune.training.rollouts.vllm import VllmSampler
from fxtune.training.visits import visit

PROMPT = ("prompt", "messages", "conversations", "conversation")
"""Columns of a row that hold its prompt; the first one counts. The others are arguments of rewards."""


class Collector:
    """Collects rollouts of `model`. `config`: the run's, with all rows decided. `note`: prints a line. Call
    close() at the end."""

    def __init__(
        self,
        config: Config,
        model: LanguageModel,
        sampler: Sampler,
        rollouts: Rollouts,
        precision: Precision,
        world: World,
        tokenizer: Any,
        note: Callable[[str], None],
    ) -> None:
        self.config, self.model, self.sampler, self.rollouts = config, model, sampler, rollouts
        self.precision, self.world, self.tokenizer, self.note = precision, world, tokenizer, note
        assert isinstance(config.objective, Policy)
        self.objective = config.objective
        self.figures: dict[str, float] = {}
        """The figures of the newest step, for its log line."""
        self._read: dict[Path, list[Row]] = {}
        names = [reward.name for reward in self.objective.rewards]
        counts = [names[:at].count(name) for at, name in enumerate(names)]
        self.keys = [f"{name}_{n + 1}" if n else name for name, n in zip(names, counts, strict=True)]
        """The name of each reward in figures."""
        rewards = zip(self.keys, self.objective.rewards, strict=True)
        calls = [Call(reward.name, dict(reward.options), key) for key, reward in rewards]
        self.workers = RewardWorkers(calls, config.sampler.reward_seconds, config.sampler.reward_workers)

    def close(self) -> None:
        self.workers.close()
        self.sampler.close()

    def collect(self, plan: RolloutPlan, step: int) -> None:
        """Write the rollouts of `step`, unless they are on the disk, and set `figures`. All ranks call this together.

        Raises ConfigError for a reward that fails, and NumbersError if the sampler's log-probabilities are not the
        model's, or if nothing was learned for too many steps.
        """
        version = weights_checksum(self.model.model, trained=True)
        stored = self.world.from_main(lambda: self.rollouts.has(step), "looking for rollouts")
        if not stored:
            self._sample(plan, step, version)
        found = self.world.from_main(lambda: self.rollouts.figures(step), "reading rollouts")
        alike = found["shards"] == self.world.degrees.shard  # the checksum is of one rank's part
        if stored and self.world.main and alike and found["weights"] != version:
            self.note(
                f"Step {step + 1} learns from stored answers. {found['sampler']} wrote these answers with other "
                "weights than the model has now, so from here on the run differs from its first course."
            )
        self.figures = {f"rollout/{name}": value for name, value in found["figures"].items()}
        try:
            self._check_gap(plan, step)
        except NumbersError:
            if not stored:  # the same command samples them again
                self.world.from_main(lambda: self.rollouts.remove(step), "removing rollouts")
            raise
        self._check_progress(step)

    def evidence(self) -> Evidence:
        """What was observed of the newest step."""
        mean, high = (self.figures[f"rollout/{name}"] for name in ("gap", "gap_p99"))
        again = "sampled again, they are the same" if self.sampler.repeats else "sampled again, they may differ"
        seen = (
            f"log-probabilities of its tokens are {mean:.1e} nats from the model's on average, 99 % within "
            f"{high:.1e}; stored answers are learned with the same bits; {again}"
        )
        return Evidence("sampler", f"{self.sampler.name}: answers of the trained weights", seen, acted=True)

    def _sample(self, plan: RolloutPlan, step: int, version: str) -> None:
        began, answers_each = time.perf_counter(), self.config.sampler.answers
        places = plan.prompts(step)
        asked = [Asked.of(plan.tables[source], document) for source, document in places]
        # The place in the step counts, because a step over the end of an epoch may have a prompt twice.
        groups, numbers = range(len(places)), range(answers_each)
        seeds = [seed_of(self.config.run.seed, step, group, number) for group in groups for number in numbers]
        prompts = [each for each in asked for _ in range(answers_each)]
        requests = [Request(each.prompt, seed, each.images) for each, seed in zip(prompts, seeds, strict=True)]
        sampled = self.sampler.sample(requests, version)
        written = time.perf_counter()

        held = list[tuple[list[Answer], dict[str, float]]]()  # on rank 0

        def score() -> None:
            answers = self._answers(sampled, seeds, answers_each)
            figures = self._score(answers, places, plan)
            tokens, seconds = sum(len(answer.ids) for answer in answers), max(written - began, 1e-9)
            figures |= {
                "tokens": float(tokens),
                "sampling_seconds": seconds,
                "reward_seconds": time.perf_counter() - written,
                "sampled_tokens_per_second": tokens / seconds,
            }
            data = self.config.data
            self.rollouts.stage(step, asked, answers, data.sequence_length if data.shares_prompts else None)
            held.append((answers, figures))

        self.world.from_main(score, "waiting for the rewards")
        idle = self.world.from_main(lambda: held[0][1]["idle"] > 0, "looking at the advantages")
        teacher = self._teach(plan, step) if self.objective.teacher and not idle else None

        def finish() -> None:
            (answers, figures) = held[0]
            lengths = np.array([len(answer.ids) for answer in answers if answer.advantage is not None], np.float64)
            weights = self.objective.reduction.weights(lengths, self.config.sampler.max_tokens)
            if teacher is not None:
                own = sum(sum(answer.log_probs) for answer in answers if answer.advantage is not None)
                figures["teacher_kl"] = float((own - teacher.sum()) / lengths.sum())
            about = {"weights": version, "shards": self.world.degrees.shard, "sampler": self.sampler.name}
            about["figures"] = figures
            self.rollouts.finish(step, answers, weights, about, teacher, self.objective.teacher_weight)

        self.world.from_main(finish, "waiting for rank 0 to write rollouts")

    def _teach(self, plan: RolloutPlan, step: int) -> np.ndarray:
        """The log-probability that the teacher gives to each sampled token of a staged step, float32 [tokens of its
        table]; 0 for other tokens."""
        whole = plan.staged(step)
        own, found = whole.for_rank(self.world.data_rank, self.world.data_ranks), list[tuple[np.ndarray, np.ndarray]]()

        def read(batch: Batch, _: int, position: int, is_counted: bool) -> None:
            seen = self.objective.teacher_log_probs(self.model, batch)[batch.labels != IGNORE_INDEX]
            spec, table = own.batch_spec(step, position), own.tables[0]
            at = [
                start + 1 + np.flatnonzero(table.supervised[start + 1 : start + length])
                for start, length in zip(spec.start, spec.length, strict=True)
            ]
            if is_counted:
                found.append((np.concatenate(at), seen.float().cpu().numpy()))

        with closing(Loader(own, replace(self.config.loader, num_workers=0), self.world.device)) as loader:
            visit(self.model, loader, self.precision, self.world, "Asking the teacher", read, first=step)
        numbers = np.zeros(len(whole.tables[0].ids), np.float32)
        for part in self.world.gather(found, "collecting the teacher's numbers"):
            for at, values in part:
                numbers[at] = values
        return numbers

    def evaluate(self, plan: Plan) -> dict[str, float]:
        """The mean figures of one answer to each prompt of `plan`, an evaluation. All ranks call this together. Raises
        ConfigError for a reward that fails."""
        data = self.config.data
        shares = zip(data.sources, data.held_out_shares, strict=True)
        sources = [source for source, share in shares if share] + data.eval_sources
        places = [place for step in range(plan.steps) for place in plan.documents(step, 0)]
        asked = [Asked.of(plan.tables[source], document) for source, document in places]
        seeds = [seed_of(self.config.run.seed, -1, number) for number in range(len(places))]
        requests = [Request(each.prompt, seed, each.images) for each, seed in zip(asked, seeds, strict=True)]
        sampled = self.sampler.sample(requests, weights_checksum(self.model.model, trained=True))

        def work() -> dict[str, float]:
            answers = self._answers(sampled, seeds)
            groups = [
                _group(self._rows(sources[source], plan.tables[source])[document], [answer])
                for (source, document), answer in zip(places, answers, strict=True)
            ]
            return self._means(self._rewarded(groups, answers))

        return self.world.from_main(work, "waiting for the rewards")

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> float:
        """The mean reward of one answer to each question. The column `answer` of a row that has none is the right
        answer. All ranks call this together. Raises ConfigError for a reward that fails."""

        def work() -> float:
            groups, made = list[Group](), list[Answer]()
            for at, (question, text) in enumerate(zip(questions, answers, strict=True)):
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                row = question.row or Row(f"question {at + 1}", {"prompt": question.text})
                made.append(Answer("", at, ids, [], True, 0, text))
                group = _group(row, made[-1:])
                groups.append(replace(group, columns={"answer": question.answer, **group.columns}))
            return self._means(self._rewarded(groups, made))["reward"]

        return self.world.from_main(work, "waiting for the rewards")

    def _answers(self, sampled: Sequence[Sampled], seeds: Sequence[int], each: int = 1) -> list[Answer]:
        """The answers without rewards. `each`: the number of answers to a prompt."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [
            Answer("", at // each, one.ids, one.log_probs, one.finished, seed, decode(one.ids))
            for at, (one, seed) in enumerate(zip(sampled, seeds, strict=True))
        ]

    def _score(
        self, answers: Sequence[Answer], places: Sequence[tuple[int, int]], plan: RolloutPlan
    ) -> dict[str, float]:
        """Set the rewards and advantages of the answers. Returns the figures of the step."""
        by_group = [list[Answer]() for _ in places]
        for answer in answers:
            by_group[answer.group].append(answer)
        data = self.config.data
        groups = [
            _group(self._rows(data.sources[source], plan.tables[source])[document], own)
            for (source, document), own in zip(places, by_group, strict=True)
        ]
        scores = self.workers.score(groups)
        for group, own, found in zip(groups, by_group, scores, strict=True):
            self._reward(group, own, found)
        return self._advantages(by_group, scores, groups)

    def _rewarded(self, groups: Sequence[Group], answers: Sequence[Answer]) -> list[Answer]:
        """The answers that have rewards, one to each prompt. Raises ConfigError if there is none."""
        found = list(zip(groups, answers, self.workers.score(groups), strict=True))
        for group, answer, scores in found:
            self._reward(group, [answer], scores)
        if usable := [answer for _, answer, scores in found if not scores.problem and answer.is_judged]:
            return usable
        raise _no_rewards(found[0][0], found[0][2])

    def _reward(self, group: Group, answers: Sequence[Answer], scores: Scores) -> None:
        """Set the rewards of the answers to one prompt."""
        if scores.problem and self.objective.on_bad_reward is OnBadReward.error:
            raise ConfigError(
                f"objective.rewards: {scores.problem}. The prompt: {group.where}. Correct the reward, or set "
                "objective.on_bad_reward=drop to leave such prompts out."
            )
        if scores.problem:
            self.note(f"Left out the answers to {group.where}: {scores.problem}.")
        for at, answer in enumerate(answers):
            answer.where = group.where
            answer.rewards = {name: values[at] for name, values in scores.rewards.items()}
            answer.extra = {name: values[at] for name, values in scores.extra.items() if at < len(values)}
            known = [
                config.weight * value
                for key, config in zip(self.keys, self.objective.rewards, strict=True)
                if (value := answer.rewards.get(key)) is not None
            ]
            answer.reward = self.objective.answer_reward(sum(known), len(answer.ids), self.config.sampler.max_tokens)

    def _advantages(
        self, groups: Sequence[Sequence[Answer]], scores: Sequence[Scores], groups_of_rows: Sequence[Group]
    ) -> dict[str, float]:
        """Set the advantages of the answers to learn from. Returns the figures of the step."""
        objective, equal = self.objective, 0
        usable = [
            judged
            for group, found in zip(groups, scores, strict=True)
            if not found.problem and (judged := [answer for answer in group if answer.is_judged])
        ]
        if not usable:
            raise _no_rewards(groups_of_rows[0], scores[0])
        for group in usable:
            rewards = np.array([answer.reward for answer in group], np.float64)
            is_equal = bool(np.ptp(rewards) <= EQUAL)
            equal += is_equal
            if is_equal and not objective.teacher:
                continue
            if not is_equal and objective.advantage is Advantage.max and rewards.mean() <= SMALL:
                raise ConfigError(
                    f"objective.advantage=max divides by the mean reward, and the answers to {group[0].where} have "
                    f"the mean {rewards.mean():.3g}. Give rewards above 0, or set objective.advantage=centre."
                )
            advantages = np.zeros(len(group)) if is_equal else objective.advantage.of(rewards)
            for answer, advantage in zip(group, advantages.tolist(), strict=True):
                if answer.finished or objective.keep_truncated:
                    answer.advantage = advantage
        answers = [answer for group in usable for answer in group]
        idle = all(answer.advantage is None for answer in answers)
        if idle:  # a step needs tokens: these have no gradient
            for answer in usable[0]:
                answer.advantage = 0.0
        spread = [np.std([answer.reward for answer in group]) for group in usable]
        figures = self._means(answers) | {
            "reward_deviation": float(np.mean(spread)),
            "equal_groups": 0.0 if objective.teacher else equal / len(usable),
            "left_out": 1 - len(usable) / len(groups),
            "idle": float(idle),
        }
        logged: dict[str, list[float]] = {}
        for found in scores:
            for name, values in found.metrics.items():
                logged.setdefault(name, []).extend(values)
        return figures | {f"metric/{name}": float(np.mean(values)) for name, values in logged.items()}

    def _means(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Mean figures of scored answers."""
        figures = {
            "reward": float(np.mean([answer.reward for answer in answers])),
            "truncated": float(np.mean([not answer.finished for answer in answers])),
            "length": float(np.mean([len(answer.ids) for answer in answers])),
        }
        for key in self.keys:
            own = [value for answer in answers if (value := answer.rewards.get(key)) is not None]
            if own:
                figures[f"reward/{key}"] = float(np.mean(own))
        return figures

    def _rows(self, source: SourceConfig, table: TokenTable) -> list[Row]:
        """The rows of a source, by the number of their prompt."""
        if table.folder not in self._read:
            self._read[table.folder] = list(usable_rows(source, table, self.config.data))
        return self._read[table.folder]

    @torch.no_grad()
    def _check_gap(self, plan: RolloutPlan, step: int) -> None:
        """Compare the sampler's log-probabilities of the first micro-batch with the model's, and add them to the
        figures. Raises NumbersError if they are far apart."""
        own = plan.of_step(step).for_rank(self.world.data_rank, self.world.data_ranks)
        batch = own.batch(step, 0).to(self.world.device)
        eager, precision = torch.compiler.set_stance("force_eager"), self.precision.context(self.world.device)
        with without_dropout(self.model.model), eager, precision:
            seen = self.model.log_probs(batch)
        assert batch.sampled is not None
        gaps = (seen - batch.sampled).abs().float().cpu().numpy()
        everyone = np.concatenate(self.world.gather(gaps, "comparing log-probabilities"))
        mean, high = float(everyone.mean()), float(np.percentile(everyone, 99))
        self.figures |= {"rollout/gap": mean, "rollout/gap_p99": high}
        if not mean <= self.objective.max_gap:
            raise NumbersError(
                f"Step {step + 1}: the sampler's log-probabilities of a token are {mean:.3g} nats from the model's on "
                f"average, more than objective.max_gap={self.objective.max_gap:g}. The sampler has other weights, "
                "another temperature, or too coarse a dtype. Compare the server's model, --dtype and --logprobs-mode "
                f"(processed_logprobs) with this run, or raise the bound. The answers: {self.rollouts.folder}."
            )

    def _check_progress(self, step: int) -> None:
        """Raise NumbersError if no prompt of the last `patience` steps had answers with different rewards."""
        patience = self.objective.patience
        if step + 1 < patience or self.figures["rollout/equal_groups"] < 1:
            return

        def idle() -> bool:
            earlier = range(step - patience + 1, step + 1)
            return all(
                self.rollouts.has(earlier_step) and self.rollouts.figures(earlier_step)["figures"]["equal_groups"] == 1
                for earlier_step in earlier
            )

        if self.world.from_main(idle, "looking at earlier rewards"):
            reward = self.figures["rollout/reward"]
            raise NumbersError(
                f"For {patience} steps all answers to a prompt had the same reward ({reward:.3g} on average in the "
                "last step), so nothing is learned. Look at the answers (fxtune report), give prompts that are easier "
                "or harder, or another reward; sampler.answers and sampler.temperature make answers differ more."
            )


def _no_rewards(group: Group, scores: Scores) -> ConfigError:
    return ConfigError(
        f"objective.rewards: no prompt has rewards. {scores.problem or 'Nothing applies'}. The first prompt: "
        f"{group.where}. Correct the rewards."
    )


def _group(row: Row, answers: Sequence[Answer]) -> Group:
    values = with_parsed_lists(row.value or {})
    prompt = next((values[name] for name in PROMPT if values.get(name) is not None), "")
    if isinstance(prompt, str) and is_chat(prompt):
        prompt = json.loads(prompt)
    if isinstance(prompt, list) and prompt[-1].get("role", prompt[-1].get("from")) in ("assistant", "gpt"):
        prompt = prompt[:-1]  # of a question with its right answer
    is_text = isinstance(prompt, str)
    completions = [answer.text if is_text else [{"role": "assistant", "content": answer.text}] for answer in answers]
    columns = {key: value for key, value in values.items() if key not in PROMPT}
    return Group(row.where, prompt, completions, [answer.ids for answer in answers], columns)


def make_collector(
    config: Config,
    model: LanguageModel,
    tokenizer: Any,
    rollouts: Rollouts,
    precision: Precision,
    world: World,
    rows_per_pass: RowsPerPass,
    images: ImageProcessor | None,
    note: Callable[[str], None],
) -> Collector:
    """A collector with the sampler of the recipe, `config` with all rows decided. Raises HardwareError if vLLM does
    not start."""
    prepared = model.prepared
    known = end_tokens(prepared.module.generation_config)
    ends = {*template_ends(tokenizer, config.data), *known, tokenizer.eos_token_id} - {None}
    sampler: Sampler
    if config.sampler.is_vllm:
        sampler = VllmSampler(prepared, config, world, ends, rollouts.folder, config.techniques.lora.r)
    else:
        pad = tokenizer.pad_token_id or 0
        sampler = ModelSampler(prepared, config.sampler, precision, world, rows_per_pass, ends, pad, images)
        sampler.repeats = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return Collector(config, model, sampler, rollouts, precision, world, tokenizer, note)
