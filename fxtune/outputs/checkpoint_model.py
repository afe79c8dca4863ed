"""Builds the model of any checkpoint of a run from the run's own config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.checkpoint.manager import read
from fxtune.checkpoint.run_folder import ABOUT, CHECKPOINTS, SETTING, read_config
from fxtune.checkpoint.train_state import TrainState
from fxtune.config import compose
from fxtune.config.root import Config
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError
from fxtune.facts.options import DType, Switch
from fxtune.models import load as models
from fxtune.models.end_tokens import add_end_tokens, read_end_tokens
from fxtune.models.prepared import PreparedModel
from fxtune.system.files.atomic_files import read_json
from fxtune.system.files.hub import locate_adapter
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.run.about import ENDS
from fxtune.training.run.state import copy_weights, trained_weights, weights_note
from fxtune.upstream.transformers import set_attention


def run_of(checkpoint: Path) -> Path:
    """The run that the checkpoint belongs to. Raises ConfigError if it lies in no run folder."""
    run = checkpoint.parent.parent
    if checkpoint.parent.name != CHECKPOINTS or not (run / "config.yaml").exists():
        raise ConfigError(f"{checkpoint} lies in no run folder, whose config.yaml says what its weights belong to.")
    return run


def load_checkpoint(checkpoint: Path, model: nn.Module) -> TrainState:
    """Load the trained weights of a checkpoint into `model`. Raises StorageError if it is damaged or does not fit."""
    try:
        found = read(checkpoint, trained_weights(model), with_moments=False)
    except ValueError as reason:
        raise StorageError(f"{checkpoint}: {reason}. Use another checkpoint of the run.") from reason
    copy_weights(found.weights, trained_weights(model))
    return found.state


def exported_model(checkpoint: Path, trust_remote_code: bool = False) -> tuple[PreparedModel, Any, dict[str, Any]]:
    """(model, tokenizer, facts for its model card) of a checkpoint, on the CPU, for save_model().

    The weights have the dtype of the run. Only adapters and RoPE scaling are applied, because no other technique
    changes the exported files. So a machine without a GPU can export. Raises the errors of compose.of_run().
    """
    run = run_of(checkpoint)
    config = compose.of_run(run, trust_remote_code)
    techniques = config.techniques
    pipeline = Pipeline(rope=techniques.rope, lora=replace(techniques.lora, fused=Switch.off))
    pipeline.attention.enabled = pipeline.precision.enabled = False
    source = replace(config.model, dtype=_dtype(run, config))
    hf_config = config.objective.configured(models.load_config(source, config.objective.needs.head))
    set_attention(hf_config, "eager")  # the attention kernels that the config names may not be installed
    tokenizer = models.load_tokenizer(source, hf_config)
    config.objective.set_template(tokenizer, config.data)
    model = assemble(pipeline, source, hf_config, World(torch.device("cpu")), config.run.seed)
    state = load_checkpoint(checkpoint, model.module)
    config.objective.conclude(model.module.config, state.figures)
    add_end_tokens(model, _ends(run, config))
    card = {
        "data": state.data_fingerprint,
        "weights": weights_note(state.step, state, config) or f"weights of step {state.step}",
        "figures": state.figures,
        "config": read_config(run),
    }
    return model, tokenizer, card


def _ends(run: Path, config: Config) -> list[int]:
    """The end tokens of the adapter that the run started from, and the end tokens of the run's data."""
    earlier = read_end_tokens(locate_adapter(config.model.adapter).folder) if config.model.adapter else []
    try:
        return [*earlier, *map(int, read_json(run / ABOUT)[ENDS])]
    except (ValueError, KeyError, TypeError):
        return earlier


def _dtype(run: Path, config: Config) -> DType:
    """The dtype of the weights in the run. `auto` has chosen it for the run's machine."""
    try:
        return DType(read_json(run / SETTING)["model"]["dtype"])
    except (ValueError, KeyError, TypeError):  # an early version of fxtune started the run
        return config.model.dtype
