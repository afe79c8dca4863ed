"""Collects the rollouts of a step: the model answers the step's prompts, rewards score the answers, and answers with
advantages are written to the disk. A step that is on the disk is read again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
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
from fxtune.data.chat.tool_turns import ToolTurns
from fxtune.data.config import SourceConfig
from fxtune.data.formats.chat_format import is_chat, with_parsed_lists
from fxtune.data.read.row import Row
from fxtune.data.tokenized.ends import template_ends
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, NumbersError, UserError
from fxtune.models.end_tokens import end_tokens
from fxtune.models.load import load_tokenizer
from fxtune.models.structure import without_dropout
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.policy import EQUAL, SMALL, Advantage, OnBadReward, Policy
from fxtune.system.process.oom import RowsPerPass
from fxtune.techniques.base import Evidence
from fxtune.techniques.precision import Precision
from fxtune.training.answers import Question
from fxtune.training.data.stored_numbers import weights_checksum
from fxtune.training.rollouts.episodes import Episodes, seed_of
from fxtune.training.rollouts.folder import Answer, Asked, Rollouts
from fxtune.training.rollouts.pending import Background, PendingStep, Scored
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.rollouts.sampler import ModelSampler, Sampler
from fxtune.training.rollouts.scoring import Call, Group, RewardWorkers, Scores
from fxtune.training.rollouts.teacher_server import TeacherServer
from fxtune.training.rollouts.vllm import VllmSampler, require_ready
from fxtune.training.visits import visit

PROMPT = ("prompt", "messages", "conversations", "conversation")
"""Columns of a row that hold its prompt; the first one counts. The others are arguments of rewards."""


class Collector:
    """Collects rollouts of `model`. `config`: the run's, with all rows decided. Call close() at the end."""

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
        self.tools = ToolTurns(tokenizer, config.data) if config.data.has_tools else None
        self.teacher_server: TeacherServer | None = None
        if self.objective.teacher_is_server:
            self.teacher_server = TeacherServer(self.objective.teacher, config.sampler)
        self.figures: dict[str, float] = {}
        """The figures of the newest step, for its log line."""
        self._read: dict[Path, list[Row]] = {}
        self._background = Background() if config.sampler.ahead else None
        self._sampling: PendingStep | None = None
        """The step that is sampled ahead."""
        self._newest, self._version = -1, ""
        """The step that was collected last, and the weights before it. -1 and empty: none yet."""
        names = [reward.name for reward in self.objective.rewards]
        counts = [names[:at].count(name) for at, name in enumerate(names)]
        self.keys = [f"{name}_{n + 1}" if n else name for name, n in zip(names, counts, strict=True)]
        """The name of each reward in figures."""
        rewards = zip(self.keys, self.objective.rewards, strict=True)
        calls = [Call(reward.name, dict(reward.options), key) for key, reward in rewards]
        limits = config.sampler.reward_seconds, config.sampler.reward_workers
        self.workers = RewardWorkers(calls, *limits, self._refuse_bad_reward)

    def close(self) -> None:
        self.workers.close()
        self.sampler.close()

    def collect(self, plan: RolloutPlan, step: int) -> None:
        """Write the rollouts of `step`, unless they are on the disk, and set `figures`. With sampler.ahead, begin to
        sample the next step. All ranks call this together.

        Raises ConfigError for a reward that fails, and NumbersError if the sampler's log-probabilities are not the
        model's, or if nothing was learned for too many steps.
        """
        ahead, began = self.config.sampler.ahead, time.perf_counter()
        if step == self._newest and self._has(step):  # the step is repeated with fewer rows, or with other kernels
            return
        version = weights_checksum(self.model.model, trained=True)
        sampling, self._sampling = self._sampling, None
        is_new = sampling is not None or not self._has(step)
        if is_new:
            self._end(sampling or self._begin(plan, step, self._weights_of(step, version)))
        waited = time.perf_counter() - began
        found = self.world.from_main(lambda: self.rollouts.figures(step), "reading rollouts")
        alike = found["shards"] == self.world.degrees.shard  # the checksum is of one rank's part
        expected = self._version if ahead and step else version
        if not is_new and self.world.main and alike and expected and found["weights"] != expected:
            self.note(
                f"Step {step + 1} learns from stored answers. {found['sampler']} wrote these answers with other "
                "weights than this run would use, so from here on the run differs from its first course."
            )
        self._newest, self._version = step, version
        self.figures = {f"rollout/{name}": value for name, value in found["figures"].items()}
        if ahead:
            self.figures["rollout/wait_seconds"] = waited
        try:
            self._check_gap(plan, step)
        except NumbersError:
            if is_new:  # the same command samples them again
                self.world.from_main(lambda: self.rollouts.remove(step), "removing rollouts")
            raise
        self._check_progress(step)
        if ahead and step + 1 < plan.steps and not self._has(step + 1):
            self._sampling = self._begin(plan, step + 1, version)

    def evidence(self) -> Evidence:
        """What was observed of the newest step."""
        mean, high = (self.figures[f"rollout/{name}"] for name in ("gap", "gap_p99"))
        repeats = self.sampler.repeats and self.tools is None
        again = f"sampled again, they {'are the same' if repeats else 'may differ'}"
        seen = (
            f"log-probabilities of its tokens are {mean:.1e} nats from the model's on average, 99 % within "
            f"{high:.1e}; stored answers are learned with the same bits; {again}"
        )
        weights = "the weights of a step earlier" if self.config.sampler.ahead else "the trained weights"
        return Evidence("sampler", f"{self.sampler.name}: answers of {weights}", seen, acted=True)

    def _has(self, step: int) -> bool:
        return self.world.from_main(lambda: self.rollouts.has(step), "looking for rollouts")

    def _weights_of(self, step: int, version: str) -> str:
        """The weights that sample `step`. `version`: of the model. A resumed run with sampler.ahead finds the weights
        of the step before in the files of the sampler."""
        if not self.config.sampler.ahead or step == 0:
            return version
        kept = self.world.from_main(lambda: self.rollouts.ahead(step), "looking for earlier weights")
        if kept and self.world.from_main(lambda: self.sampler.has(kept), "looking for earlier weights"):
            return kept
        self.note(
            f"Step {step + 1} is sampled by the present weights, because the weights of the step before are gone. "
            "So from here on the run differs from its first course."
        )
        return version

    def _begin(self, plan: RolloutPlan, step: int, version: str) -> PendingStep:
        """Begin to sample and score the rollouts of `step` with the weights `version`."""
        began, answers_each = time.perf_counter(), self.config.sampler.answers
        places = plan.prompts(step)
        asked = [Asked.of(plan.tables[source], document) for source, document in places]
        # The place in the step counts, because a step over the end of an epoch may have a prompt twice.
        groups, numbers = range(len(places)), range(answers_each)
        seeds = [seed_of(self.config.run.seed, step, group, number) for group in groups for number in numbers]
        asks = self._groups(plan, self.config.data.sources, places)
        episodes = Episodes(asked, seeds, self.config.sampler, asks, self.workers, self.tools)
        ask = self.sampler.sample(episodes, version)
        if self.config.sampler.ahead:
            self.world.from_main(lambda: self.rollouts.write_ahead(step, version), "naming the sampler's weights")

        def work() -> Scored:
            answers = ask()
            written, found = time.perf_counter(), episodes.groups
            self._complete(found, answers)
            scores = self.workers.score(found)
            sync, rewards = self.sampler.sync_seconds, time.perf_counter() - written
            return Scored(answers, found, scores, sync, written - began - sync, rewards)

        aside = self._background if self.world.main else None
        return PendingStep(plan, step, version, asked, aside.begin(work) if aside else work)

    def _wait(self) -> None:
        """Wait until the sampler is free. An error counts when the step that is sampled ahead is collected."""
        if self._sampling is not None and self.world.main:
            with suppress(UserError):
                self._sampling.result()

    def _end(self, sampling: PendingStep) -> None:
        """Write the rollouts that _begin() has begun."""
        plan, step, asked = sampling.plan, sampling.step, sampling.asked
        held = list[tuple[list[Answer], dict[str, float]]]()  # on rank 0

        def judge() -> None:
            scored = sampling.result()
            tokens, seconds = sum(answer.length for answer in scored.answers), max(scored.sampling_seconds, 1e-9)
            figures = self._advantages(scored) | {
                "tokens": float(tokens),
                "sync_seconds": scored.sync_seconds,
                "sampling_seconds": seconds,
                "reward_seconds": scored.reward_seconds,
                "sampled_tokens_per_second": tokens / seconds,
            }
            data = self.config.data
            self.rollouts.stage(step, asked, scored.answers, data.sequence_length if data.shares_prompts else None)
            held.append((scored.answers, figures))

        self.world.from_main(judge, "waiting for answers and rewards")
        idle = self.world.from_main(lambda: held[0][1]["idle"] > 0, "looking at the advantages")
        teacher = self._teach(plan, step) if self.objective.teacher and not idle else None

        def finish() -> None:
            (answers, figures) = held[0]
            lengths = np.array([answer.length for answer in answers if answer.advantage is not None], np.float64)
            weights = self.objective.reduction.weights(lengths, self.config.sampler.max_tokens)
            if teacher is not None:
                own = sum(sum(filter(None, answer.log_probs)) for answer in answers if answer.advantage is not None)
                figures["teacher_kl"] = float((own - teacher.sum()) / lengths.sum())
            about = {"weights": sampling.version, "shards": self.world.degrees.shard, "sampler": self.sampler.name}
            about["figures"] = figures
            self.rollouts.finish(step, answers, weights, about, teacher, self.objective.teacher_weight)

        self.world.from_main(finish, "waiting for rank 0 to write rollouts")

    def _teach(self, plan: RolloutPlan, step: int) -> np.ndarray:
        """The log-probability that the teacher gives to each sampled token of a staged step, float32 [tokens of its
        table]; 0 for other tokens."""
        if (server := self.teacher_server) is not None:
            return self.world.from_main(
                lambda: server.log_probs(self.rollouts.staged(step)), "waiting for the teacher"
            )
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
        self._wait()
        groups = self._groups(plan, sources, places)
        episodes = Episodes(asked, seeds, self.config.sampler, groups, self.workers, self.tools)
        ask = self.sampler.sample(episodes, weights_checksum(self.model.model, trained=True))

        def work() -> dict[str, float]:
            answers = ask()
            self._complete(episodes.groups, answers)
            return self._means(self._rewarded(episodes.groups, answers))

        return self.world.from_main(work, "waiting for answers and rewards")

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> float:
        """The mean reward of one answer to each question. The column `answer` of a row that has none is the right
        answer. All ranks call this together. Raises ConfigError for a reward that fails."""

        def work() -> float:
            groups, made = list[Group](), list[Answer]()
            for at, (question, text) in enumerate(zip(questions, answers, strict=True)):
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                row = question.row or Row(f"question {at + 1}", {"prompt": question.text})
                made.append(Answer("", at, ids, [], True, 0, text))
                groups.append(_group(row))
                groups[-1].columns.setdefault("answer", question.answer)
            self._complete(groups, made)
            return self._means(self._rewarded(groups, made))["reward"]

        self._wait()
        return self.world.from_main(work, "waiting for the rewards")

    def _groups(self, plan: Plan, sources: Sequence[SourceConfig], places: Sequence[tuple[int, int]]) -> list[Group]:
        """The prompts at `places`: (source, document), on rank 0."""
        return [
            _group(self._rows(sources[source], plan.tables[source])[document], sources[source].environment or "")
            for source, document in (places if self.world.main else ())
        ]

    def _complete(self, groups: Sequence[Group], answers: Sequence[Answer]) -> None:
        """Give the prompts their answers, for rewards."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for answer in answers:
            group, answer.text = groups[answer.group], answer.text or decode(answer.ids)
            chat = answer.messages or [{"role": "assistant", "content": answer.text}]
            group.completions.append(answer.text if isinstance(group.prompt, str) else chat)
            group.ids.append(answer.ids)

    def _by_prompt(self, answers: Sequence[Answer]) -> list[Sequence[Answer]]:
        each = self.config.sampler.answers
        return [answers[at : at + each] for at in range(0, len(answers), each)]

    def _rewarded(self, groups: Sequence[Group], answers: Sequence[Answer]) -> list[Answer]:
        """The answers that have rewards, one to each prompt. Raises ConfigError if there is none."""
        found = list(zip(groups, answers, self.workers.score(groups), strict=True))
        for group, answer, scores in found:
            self._reward(group, [answer], scores)
        if usable := [answer for _, answer, scores in found if not scores.problem and answer.is_judged]:
            return usable
        raise _no_rewards(found[0][0], found[0][2])

    def _refuse_bad_reward(self, group: Group, scores: Scores) -> None:
        """Raise ConfigError if a failing reward ends the run."""
        if self.objective.on_bad_reward is OnBadReward.error:
            raise ConfigError(
                f"objective.rewards: {scores.problem}. The prompt: {group.where}. Correct the reward, or set "
                "objective.on_bad_reward=drop to leave such prompts out."
            )

    def _reward(self, group: Group, answers: Sequence[Answer], scores: Scores) -> None:
        """Set the rewards of the answers to one prompt."""
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

    def _advantages(self, scored: Scored) -> dict[str, float]:
        """Set the rewards of the answers, and the advantages of the answers to learn from. Returns the figures of the
        step."""
        objective, equal, scores, usable = self.objective, 0, scored.scores, list[Sequence[Answer]]()
        for group, own, found in zip(scored.groups, self._by_prompt(scored.answers), scores, strict=True):
            self._reward(group, own, found)
            if not found.problem and (judged := [answer for answer in own if answer.is_judged]):
                usable.append(judged)
        if not usable:
            raise _no_rewards(scored.groups[0], scores[0])
        for own in usable:
            rewards = np.array([answer.reward for answer in own], np.float64)
            is_equal = bool(np.ptp(rewards) <= EQUAL)
            equal += is_equal
            if is_equal and not objective.teacher:
                continue
            if not is_equal and objective.advantage is Advantage.max and rewards.mean() <= SMALL:
                raise ConfigError(
                    f"objective.advantage=max divides by the mean reward, and the answers to {own[0].where} have "
                    f"the mean {rewards.mean():.3g}. Give rewards above 0, or set objective.advantage=centre."
                )
            advantages = np.zeros(len(own)) if is_equal else objective.advantage.of(rewards)
            for answer, advantage in zip(own, advantages.tolist(), strict=True):
                if answer.finished or objective.keep_truncated:
                    answer.advantage = advantage
        answers = [answer for own in usable for answer in own]
        idle = all(answer.advantage is None for answer in answers)
        if idle:  # a step needs tokens: these have no gradient
            for answer in usable[0]:
                answer.advantage = 0.0
        spread = [np.std([answer.reward for answer in own]) for own in usable]
        figures = self._means(answers) | {
            "reward_deviation": float(np.mean(spread)),
            "equal_groups": 0.0 if objective.teacher else equal / len(usable),
            "left_out": 1 - len(usable) / len(scores),
            "idle": float(idle),
        }
        logged: dict[str, list[float]] = {}
        for found in scores:
            for name, values in found.metrics.items():
                logged.setdefault(name, []).extend(values)
        return figures | {f"metric/{name}": float(np.mean(values)) for name, values in logged.items()}

    def _means(self, answers: Sequence[Answer]) -> dict[str, float]:
        figures = {
            "reward": float(np.mean([answer.reward for answer in answers])),
            "truncated": float(np.mean([not answer.finished for answer in answers])),
            "length": float(np.mean([answer.length for answer in answers])),
        }
        if turns := [sum("name" not in one for one in answer.messages) for answer in answers if answer.messages]:
            figures["turns"] = float(np.mean(turns))
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
            learned = (
                " With sampler.ahead the distance also has one step of learning in it." * self.config.sampler.ahead
            )
            raise NumbersError(
                f"Step {step + 1}: the sampler's log-probabilities of a token are {mean:.3g} nats from the model's on "
                f"average, more than objective.max_gap={self.objective.max_gap:g}. The sampler has other weights, "
                "another temperature, or too coarse a dtype. Compare the server's model, --dtype and --logprobs-mode "
                f"(processed_logprobs) with this run, or raise the bound.{learned} Answers: {self.rollouts.folder}."
            )

    def _check_progress(self, step: int) -> None:
        """Raise NumbersError if no answer of the last `patience` steps had an advantage."""
        patience = self.objective.patience
        if step + 1 < patience or self.figures["rollout/idle"] < 1:
            return

        def idle() -> bool:
            earlier = range(step - patience + 1, step + 1)
            return all(
                self.rollouts.has(earlier_step) and self.rollouts.figures(earlier_step)["figures"]["idle"] == 1
                for earlier_step in earlier
            )

        if self.world.from_main(idle, "looking at earlier rewards"):
            reward = self.figures["rollout/reward"]
            cut = ", or were cut off at sampler.max_tokens" * (not self.objective.keep_truncated)
            raise NumbersError(
                f"For {patience} steps all answers to a prompt had the same reward ({reward:.3g} on average in the "
                f"last step){cut}, so nothing is learned. Look at the answers (fxtune report), give prompts that are "
                "easier or harder, or another reward; sampler.answers and sampler.temperature make them differ more."
            )


def _no_rewards(group: Group, scores: Scores) -> ConfigError:
    return ConfigError(
        f"objective.rewards: no prompt has rewards. {scores.problem or 'Nothing applies'}. The first prompt: "
        f"{group.where}. Correct the rewards."
    )


def _group(row: Row, environment: str = "") -> Group:
    """The group of a row, without answers."""
    values = with_parsed_lists(row.value or {})
    prompt = next((values[name] for name in PROMPT if values.get(name) is not None), "")
    if isinstance(prompt, str) and is_chat(prompt):
        prompt = json.loads(prompt)
    if isinstance(prompt, list) and prompt[-1].get("role", prompt[-1].get("from")) in ("assistant", "gpt"):
        prompt = prompt[:-1]  # of a question with its right answer
    columns = {key: value for key, value in values.items() if key not in PROMPT}
    return Group(row.where, prompt, [], [], columns, environment)


def require_servers(config: Config) -> None:
    """Raise ConfigError if the servers of the recipe, or of its teacher, are not there or do not fit, or if the chat
    template does not fit the sources' environments."""
    assert isinstance(config.objective, Policy)
    tokenizer = load_tokenizer(config.model)
    if config.data.has_tools:
        ToolTurns(tokenizer, config.data)
    if config.sampler.is_vllm:
        require_ready(config, tokenizer)
    if config.objective.teacher_is_server:
        TeacherServer(config.objective.teacher, config.sampler).require_ready(config, tokenizer)


def make_collector(
    config: Config,
    model: LanguageModel,
    tokenizer: Any,
    rollouts: Rollouts,
    precision: Precision,
    world: World,
    rows_per_pass: RowsPerPass,
    note: Callable[[str], None],
) -> Collector:
    """A collector with the sampler of the recipe, `config` with all rows decided. Raises HardwareError if vLLM does
    not start."""
    prepared = model.prepared
    known = end_tokens(prepared.module.generation_config)
    ends = {*template_ends(tokenizer, config.data), *known, tokenizer.eos_token_id} - {None}
    ends |= {ToolTurns(tokenizer, config.data).end} if config.data.has_tools else set()
    sampler: Sampler
    if config.sampler.is_vllm:
        sampler = VllmSampler(prepared, config, world, ends, rollouts.folder, config.techniques.lora.r)
    else:
        pad = tokenizer.pad_token_id or 0
        sampler = ModelSampler(prepared, config.sampler, precision, world, rows_per_pass, ends, pad, rollouts.images)
        sampler.repeats = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return Collector(config, model, sampler, rollouts, precision, world, tokenizer, note)
