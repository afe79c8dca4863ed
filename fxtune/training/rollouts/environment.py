"""Environments of a plugin in a worker process: one for each answer, from its first call of a tool to its reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from fxtune.plugins import ENVIRONMENTS, tools_of


def environment_reward(completions: list[Any], environments: Sequence[Any] = (), **_: Any) -> list[float | None]:
    """What get_reward() of each answer's environment returns. None for a row without an environment."""
    return [None if each is None else now(each.get_reward()) for each in environments]


def begun(name: str, row: dict[str, Any]) -> Any:
    """The environment `name`, set to a row. Raises ValueError if it changes the prompt, and its own errors."""
    environment = ENVIRONMENTS[name]()
    if now(environment.reset(**row)) is not None:
        raise ValueError("reset() returned a value; the prompt is the row's, so write the value there")
    return environment


def reply(environment: Any, tool: str, arguments: dict[str, Any] | None) -> str:
    """What the model reads after a call: the result as text, or the error, as in TRL."""
    try:
        if arguments is None:
            raise ValueError("the arguments are no JSON object")
        if tool not in tools_of(type(environment)):
            raise ValueError(f"Tool {tool} not found.")
        return str(now(getattr(environment, tool)(**arguments)))
    except Exception as error:  # noqa: BLE001  a tool is the user's code, and the model may call it wrongly
        return str({"error": str(error)})


def now(value: Any) -> Any:
    """`value`, or its result if it is awaitable."""

    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value
