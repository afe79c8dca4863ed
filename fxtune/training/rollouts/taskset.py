"""Learns from a taskset of verifiers 0.4 (verifiers.v1) whose tasks have one answer. rows() makes a row of each task.
The column `task` of a row has the task's data, from which the reward `verifiers` makes the task again, as `verifiers
replay` does. verifiers takes seconds to import, so a run imports it only in the processes that compute rewards."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from multiprocessing import parent_process
from typing import Any

from fxtune.errors import first_line
from fxtune.training.rollouts.reward_functions import END_OF_THOUGHT, Columns, column_of, text_of


def taskset_reward(
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: Columns,
    *,
    taskset: str,
    config: Mapping[str, Any] | None = None,
    column: str = "task",
    log_metric: Any = lambda name, value: None,
    **_: Any,
) -> list[float]:
    """The weighted sum of the task's rewards. `taskset`: its id, the name of a package. `config`: options of the
    taskset. `column`: has the task's data. The task's rewards and metrics are logged by name."""
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError("the package verifiers is not installed. Install it: pip install verifiers==0.4.0")
    if not completions and parent_process() is None:  # the check of a recipe
        return []
    loaded = _load(taskset, json.dumps(config or {}))
    tasks = [_task(loaded, data) for data in column_of(columns, column)]
    traces = [_trace(*each) for each in zip(tasks, map(text_of, completions), map(len, completion_ids), strict=True)]

    async def score() -> None:
        await asyncio.gather(*(task.score(trace) for task, trace in zip(tasks, traces, strict=True)))

    asyncio.run(score())
    for trace in traces:
        for name, value in ({key: one.score for key, one in trace.rewards.items()} | trace.metrics).items():
            log_metric(name, value)
    return [trace.reward for trace in traces]


def rows(taskset: str, config: Mapping[str, Any] | None = None, most: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each task of a taskset, at most `most`. Arguments as in taskset_reward(). Raises ValueError."""
    loaded = _load(taskset, json.dumps(config or {}))
    if most is None and not loaded.bounded:
        raise ValueError(f"the taskset `{taskset}` has no end. Give the number of rows in `most`")
    for task in islice(loaded, most):
        data = task.data.model_dump(mode="json")
        if not task.data.prompt or _task(loaded, data).data != task.data:
            raise ValueError(f"task {task.data.idx} of `{taskset}` has no prompt, or has data that is no JSON")
        yield {"prompt": [one.model_dump(mode="json", exclude_none=True) for one in _prompt(task)], "task": data}


@lru_cache(maxsize=8)
def _load(taskset: str, config: str) -> Any:
    """`config`: JSON. Raises ValueError for a taskset that does not load, or whose tasks need more than an answer."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type

        loaded = load_taskset(taskset_config_type(taskset).model_validate({**json.loads(config), "id": taskset}))
        kind, environment = loaded.task_type(), environment_class(taskset)
        hooks = kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize
        tools = [*loaded.toolsets(loaded.config), *kind.toolsets(loaded.config.task)]
    except Exception as error:
        raise ValueError(f"the taskset `{taskset}` does not load: {first_line(error)}") from error
    agents, runtime = environment is not vf.SingleAgentEnv, kind.NEEDS_CONTAINER or hooks
    if need := "several agents" if agents else "tools" if tools else "a runtime" if runtime else "":
        raise ValueError(f"the taskset `{taskset}` needs {need}, and fxtune learns from tasks with one answer only")
    return loaded


def _task(loaded: Any, data: Any) -> Any:
    """Raises ValueError for wrong data, and for a reward that needs a runtime: verifiers would leave it out."""
    kind = loaded.task_type()
    try:
        task = kind(kind.data_type().model_validate(data), loaded.config.task)
    except ValueError as error:
        raise ValueError(f"the column has no data of a {kind.__name__}: {' '.join(str(error).split())}") from error
    for reward in [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            raise ValueError(f"the reward `{reward.__qualname__}` needs a runtime, and fxtune has none")
    return task


def _prompt(task: Any) -> list[Any]:
    import verifiers.v1 as vf

    prompt, system = task.data.prompt, task.data.system_prompt
    own = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    return [vf.SystemMessage(content=system), *own] if system else own


def _trace(task: Any, text: str, tokens: int) -> Any:
    """The trace of a finished task: its prompt, and an answer of this text and number of tokens."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.types import Usage

    thoughts, _, answer = text.rpartition(END_OF_THOUGHT)
    prompt, reply = _prompt(task), vf.AssistantMessage(content=answer, reasoning_content=thoughts or None)
    nodes = [vf.MessageNode(message=one, parent=at - 1 if at else None) for at, one in enumerate([*prompt, reply])]
    nodes[-1].sampled = True
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        calls=[vf.ModelCall(node=len(prompt), usage=Usage(prompt_tokens=0, completion_tokens=tokens))],
        state=state_cls(type(task))(),
        is_completed=True,
        ok=True,
    )
