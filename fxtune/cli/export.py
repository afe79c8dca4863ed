"""`fxtune export RUN --to TARGET`: what a run has trained, in the form that a server takes.

    fxtune export quickstart --to vllm               # the command that serves the adapter, or the merged model
    fxtune export quickstart --to model FOLDER       # a folder for transformers: the same as fxtune merge
    fxtune export quickstart/step-87 --to vllm       # any checkpoint

RUN is a run's folder or name, a checkpoint, the folder of an adapter or a model, or an adapter's hub id. Nothing is
written over. vLLM gets an adapter beside its base if it computes such an adapter as it was trained (`--merged`: always
the merged model).
"""

from __future__ import annotations

from typing import Any

from fxtune.cli.answer import ANSWER
from fxtune.errors import ConfigError
from fxtune.outputs.export import export
from fxtune.outputs.targets.target import ExportOptions
from fxtune.system.terminal.console import say


def run(run: str, folder: str | None = None, *, to: str = "", trust_remote_code: bool = False, **options: Any) -> None:
    """Export `run` for the target `to`. `options`: fields of ExportOptions. Raises the errors of export()."""
    if not to:
        raise ConfigError("fxtune export needs a target: add --to vllm, gguf or ollama.")
    done = export(run, to, folder, ExportOptions(**options), trust_remote_code)
    ANSWER.put({"folder": str(done.folder), "kind": done.kind, "command": done.command, "notes": done.notes})
    for note in done.notes:
        say(note)
    say(f"The {done.kind} is in {done.folder}")
    if done.command:
        say(f"Serve it: {done.command}")
