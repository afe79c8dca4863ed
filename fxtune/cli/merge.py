"""`fxtune merge`: writes a LoRA adapter and its base as one safetensors model, for plain transformers.

    fxtune merge quickstart              # the adapter of a run, into runs/quickstart/merged
    fxtune merge quickstart FOLDER       # or into another folder
    fxtune merge quickstart/step-87      # any checkpoint, into runs/quickstart/merged-step-87
    fxtune merge me/lamps FOLDER         # an adapter of the hub, or the folder of an adapter
    fxtune merge +recipe=NAME            # the adapter of the recipe's newest run

A checkpoint of a full fine-tuning has nothing to merge. It is written as a model.

A weight W becomes W + alpha/r * B A. The sum is computed in float32 and rounded once to the base's stored dtype, one
layer at a time, so merging needs no more memory than the model.
"""

from __future__ import annotations

from pathlib import Path

from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.outputs.export import export
from fxtune.outputs.merge import newest_adapter
from fxtune.outputs.targets.target import ExportOptions


def run(config: Config, unmerged: bool = False, trust_remote_code: bool = False) -> Path:
    """Merge the adapter of the recipe's newest run into the run's folder. Raises ConfigError if no run has one."""
    if unmerged:
        raise ConfigError("--unmerged writes the adapter of a checkpoint: fxtune merge RUN/step-70")
    trust_remote_code |= config.model.trust_remote_code
    return of_output(str(newest_adapter(config)), trust_remote_code=trust_remote_code)


def of_output(
    adapter: str, folder: str | None = None, *, trust_remote_code: bool = False, unmerged: bool = False
) -> Path:
    """Merge the adapter of a run, a checkpoint, a folder or the hub into a new folder. Raises the errors of
    export()."""
    options = ExportOptions(unmerged=unmerged)
    return export(adapter, "model", folder, options, trust_remote_code).folder
