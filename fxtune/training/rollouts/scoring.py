"""Computes rewards and calls tools in worker processes. If one hangs or ends its process, a message names its row.

Rewards have TRL's signature. They get the answers to one prompt at a time. So a message can name the prompt's row, and
workers score several prompts at once. A worker imports torch only if a reward does.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError, HardwareError, UserError, first_line
from fxtune.plugins import ENVIRONMENTS, REWARDS, reward_problem, tools_of
from fxtune.system.process.signals import leave_signals_to_main_process
from fxtune.system.terminal.library_log import LIBRARY_LOG

_ENVIRONMENTS: dict[tuple[int, int], Any] = {}
"""The environments of a worker, by Group.key and the number of the answer."""


@dataclass(frozen=True)
class Call:
    """A reward of the recipe."""

    name: str
    options: dict[str, Any]
    key: str = ""
    """The name in figures and messages, if a recipe has several rewards of one name."""

    @property
    def label(self) -> str:
        return self.key or self.name


@dataclass
class Group:
    """The answers to one prompt."""

    where: str
    prompt: Any
    """A text, or a list of messages."""
    completions: list[Any]
    ids: list[list[int]]
    columns: dict[str, Any]
    """The other columns of the prompt's row."""
    environment: str = ""
    """The environment of the row's source; empty: no environment."""
    key: int = 0
    """The id of the answers' environments, which stay in one process until the answers are scored."""
    calls: dict[int, list[Any]] | None = None
    """{number of the answer: its tool calls (data/chat/tool_turns.py)}. None: the answers are complete."""


@dataclass
class Scores:
    """The rewards of the answers to one prompt."""

    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """{name: values} of the rewards' calls log_extra(name, values)."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """{name: values} of the rewards' calls log_metric(name, value)."""
    replies: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """{number of the answer: (tool, result) of each call in Group.calls}."""
    problem: str = ""
    """Why there are no rewards; empty if there are."""


class RewardWorkers:
    """Worker processes. `seconds`: the time limit for the answers to one prompt. `failed`: called as soon as a group
    has a problem; if it raises an error, score() ends and waits for no other group. Call close() at the end."""

    def __init__(
        self,
        calls: Sequence[Call],
        seconds: float,
        processes: int,
        failed: Callable[[Group, Scores], None] = lambda group, scores: None,
    ) -> None:
        self.calls, self.seconds, self.processes, self.failed = list(calls), seconds, processes, failed
        self._workers: dict[Connection, BaseProcess] = {}
        self._homes: dict[int, Connection | str] = {}
        """{Group.key: the process with the environments, or why this process ended}."""
        self._closed = False

    def score(self, groups: Sequence[Group]) -> list[Scores]:
        """The scores of each group, in order. A group whose reward fails has a `problem`."""
        if not self.calls and not any(group.environment for group in groups):
            return [Scores() for _ in groups]
        found: list[Scores | None] = [None] * len(groups)
        waiting = list(range(len(groups)))
        busy: dict[Connection, tuple[int, float]] = {}
        running: dict[Connection, str] = {}
        while waiting or busy:
            for at in waiting[:]:
                home = self._homes.get(groups[at].key)
                if isinstance(home, str):
                    found[at] = Scores(problem=home)
                    waiting.remove(at)
                elif len(busy) < self.processes and home not in busy:
                    pipe = home or next((pipe for pipe in self._workers if pipe not in busy), None) or self._start()
                    try:
                        pipe.send(groups[at])
                    except OSError:  # an idle process has ended
                        self._end(pipe, "the process")
                        continue
                    busy[pipe], running[pipe] = (at, time.monotonic() + self.seconds), "reward"
                    waiting.remove(at)
                    self._homes.pop(groups[at].key, None)
                    if groups[at].calls is not None:
                        self._homes[groups[at].key] = pipe
            if not busy:
                continue
            ready = wait(list(busy), max(min(until for _, until in busy.values()) - time.monotonic(), 0))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    answer = Scores(problem=f"the {running[pipe]} ended its process")
                    self._end(pipe, f"{answer.problem} ({groups[busy[pipe][0]].where})")
                if isinstance(answer, Scores):
                    found[at := busy.pop(pipe)[0]] = answer
                    if answer.problem and groups[at].calls is not None:
                        self._homes[groups[at].key] = answer.problem
                    if answer.problem:
                        self.failed(groups[at], answer)
                else:  # the name of the reward or tool that starts
                    running[pipe] = answer
            # A result that arrived while another process started is in time.
            late = [pipe for pipe, (_, until) in busy.items() if until <= time.monotonic() and not pipe.poll()]
            for pipe in late:
                problem = f"the {running[pipe]} took longer than sampler.reward_seconds={self.seconds:g}"
                found[at := busy.pop(pipe)[0]] = scores = Scores(problem=problem)
                self._end(pipe, f"{problem} ({groups[at].where})")
                self.failed(groups[at], scores)
        return [scores for scores in found if scores is not None]

    def close(self) -> None:
        self._closed = True
        for pipe in list(self._workers):
            self._end(pipe)

    def _start(self) -> Connection:
        if self._closed:  # by the main thread, while another thread scores
            raise HardwareError("The run ends, so rewards are no longer computed.")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = theirs, self.calls, LIBRARY_LOG.file
        # Not a daemon, because a reward may start processes. The worker ends with this process: see _worker_main().
        process = context.Process(target=_worker_main, args=arguments, daemon=False)
        process.start()
        if not self._workers:
            atexit.register(self.close)
        self._workers[ours] = process
        theirs.close()  # only the worker holds this end, so the pipe ends with the worker
        try:
            problem = ours.recv()
        except EOFError:
            problem = HardwareError(
                "A process that computes rewards ended at its start. In a script of yours, call fxtune under "
                '`if __name__ == "__main__":`, because such a process imports the script.'
            )
        if problem is not None:
            self._end(ours)
            raise problem
        return ours

    def _end(self, pipe: Connection, problem: str = "") -> None:
        lost = {key: f"its environment ended: {problem}" for key, home in self._homes.items() if home is pipe}
        self._homes.update(lost)
        process = self._workers.pop(pipe, None)
        if process is None:  # another thread has ended it
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # _worker_main() made it the leader of a group
        process.kill()
        process.join()
        pipe.close()


def _worker_main(pipe: Connection, calls: list[Call], log: Path | None) -> None:
    os.setsid()
    leave_signals_to_main_process()
    LIBRARY_LOG.collect_in_worker(log)
    try:
        functions = [REWARDS[call.name] for call in calls]
        for call in calls:  # this also imports packages, before the time limit of the first answers begins
            if problem := reward_problem(call.name, call.options):
                raise ConfigError(problem)
    except UserError as error:
        pipe.send(error)
        return
    pipe.send(None)
    with suppress(EOFError, OSError):  # the main process has ended
        while True:
            pipe.send(_score(functions, calls, pipe.recv(), pipe.send))


def _score(functions: Sequence[Any], calls: Sequence[Call], group: Group, begins: Callable[[str], None]) -> Scores:
    """The scores of a group, or the results of its calls. `begins`: gets the name of each part that starts."""
    scores, doing, own = Scores(), group.environment, list[Any]()
    try:
        for number in range(len(group.completions)) if group.calls is None else group.calls:
            environment = _ENVIRONMENTS.pop((group.key, number), None)
            if environment is None and group.environment:
                begins(f"environment {doing}")
                environment = ENVIRONMENTS[doing]()
                if _now(environment.reset(prompt=group.prompt, **group.columns)) is not None:
                    raise ValueError("reset() returned a value, and prompts are read before it runs")
            own.append(environment)
            for tool, arguments in (group.calls or {}).get(number, ()):
                begins(f"tool {tool}")
                scores.replies.setdefault(number, []).append((tool, _reply(environment, tool, arguments)))
                _ENVIRONMENTS[group.key, number] = environment
        for function, call in zip(functions, calls, strict=True) if group.calls is None else ():
            doing = call.label
            begins(f"reward {doing}")
            scores.rewards[doing] = _values(function, call, group, own, scores)
    except Exception as error:  # noqa: BLE001  this is the user's code and can raise anything
        return Scores(problem=f"{doing}: {first_line(error)}{_line(error)}")
    return scores


def _reply(environment: Any, tool: str, arguments: dict[str, Any] | None) -> str:
    """The text that the model reads after a call: the result, or the error, as in TRL."""
    try:
        if tool not in tools_of(type(environment)) or arguments is None:
            raise ValueError(f"There is no tool {tool}, or its arguments are no JSON object.")
        found = str(_now(getattr(environment, tool)(**arguments)))
    except Exception as error:  # noqa: BLE001  this is the user's code, and the model may call it wrongly
        found = str({"error": str(error)})
    return found.encode(errors="replace").decode()  # a lone surrogate has no tokens


def _values(function: Any, call: Call, group: Group, own: Sequence[Any], scores: Scores) -> list[float | None]:
    count = len(group.completions)
    columns = {name: [value] * count for name, value in group.columns.items()}
    sent: dict[str, Any] = columns if call.name in REWARDS.added() else {"columns": columns}
    sent |= {"prompts": [group.prompt] * count, "completions": group.completions, "completion_ids": group.ids}
    sent["environments"] = own
    sent["log_extra"] = lambda name, values: scores.extra.update({name: [_plain(value) for value in values]})
    sent["log_metric"] = lambda name, value: scores.metrics.setdefault(name, []).append(float(value))
    signature = inspect.signature(function)
    sent |= call.options
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        sent = {name: value for name, value in sent.items() if name in signature.parameters}
    try:
        signature.bind(**sent)
    except TypeError as error:
        given = ", ".join(group.columns) or "none"
        raise TypeError(f"{error} (columns of the row: {given}; options stand in objective.rewards)") from error
    values = _now(function(**sent))
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"it returned {values!r}; it must return a list with a number or None for each completion")
    values = [_now(value) for value in values]
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions")
    for value in values:
        if isinstance(value, str) or (value is not None and not math.isfinite(float(value))):
            raise ValueError(f"it returned {value!r}, which is no finite number")
    return [None if value is None else float(value) for value in values]


def _now(value: Any) -> Any:
    """`value`, or its result if it is awaitable."""

    async def result() -> Any:
        return await value

    return _loop().run_until_complete(result()) if inspect.isawaitable(value) else value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of a worker. Connections that an async reset() opens stay usable in later calls."""
    return asyncio.new_event_loop()


def _plain(value: Any) -> Any:
    """A value that JSON can express."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _line(error: BaseException) -> str:
    """The place in the reward's file where `error` was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or Path(__file__).parent in Path(frame.tb_frame.f_code.co_filename).parents:
        return ""  # a reward of fxtune
    return f" ({frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno})"
