"""`fxtune export RUN --to TARGET`: what a run has trained, in the form that a server takes.

    fxtune export quickstart --to vllm               # the command that serves the adapter, or the merged model
    fxtune export quickstart --to gguf --quantize q8_0,q4_k_m    # files for llama.cpp
    fxtune export quickstart --to ollama             # a file and its Modelfile
    fxtune export quickstart --to model FOLDER       # a folder for transformers: the same as fxtune merge
    fxtune export quickstart/step-87 --to vllm       # any checkpoint

RUN is a run's folder or name, a checkpoint, the folder of an adapter or a model, or an adapter's hub id. No model is
written over: the same command again only asks the server. What a target cannot serve is said at once.

vLLM gets an adapter beside its base if it computes such an adapter as it was trained (`--merged`: always the merged
model). llama.cpp converts and quantises: name its folder by --llama-cpp or LLAMA_CPP. Then the server itself answers
the run's questions, beside plain transformers: llama-server for GGUF files; vLLM at --url or in the folder --venv.
"""

from __future__ import annotations

from typing import Any

from fxtune.cli.answer import ANSWER
from fxtune.errors import CheckError, ConfigError
from fxtune.outputs.export import export
from fxtune.outputs.targets.target import ExportOptions
from fxtune.reports.exports import COLUMNS, export_rows
from fxtune.system.terminal.console import say, table


def run(run: str, folder: str | None = None, *, to: str = "", trust_remote_code: bool = False, **options: Any) -> None:
    """Export `run` for the target `to`. `options`: fields of ExportOptions. Raises the errors of export()."""
    if not to:
        raise ConfigError("fxtune export needs a target: add --to vllm, gguf or ollama.")
    done = export(run, to, folder, ExportOptions(**options), trust_remote_code)
    ANSWER.put(vars(done) | {"files": {kind: str(file) for kind, file in done.files.items()}})
    for note in done.notes:
        say(note)
    proven = {name: found for name, found in done.proofs.items() if "not_proven" not in found}
    if proven:
        say(table("The server's answers beside plain transformers", COLUMNS, export_rows(proven)))
    for name in done.proofs.keys() - proven.keys():
        say(f"{name}: exported, not proven: {done.proofs[name]['not_proven']}")
    say(f"The {done.kind} is in {done.folder}")
    if done.command:
        say(f"Serve it: {done.command}")
    if done.problems:
        found = "; ".join(done.problems)
        raise CheckError(f"The export is not proven to answer as trained: {found}. It stays in {done.folder}.")
