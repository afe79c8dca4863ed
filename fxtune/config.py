"""The root config, the way from YAML and the command line to it, and the vetting of recipes.

`Config` is the whole vocabulary of a recipe. Hydra composes, `typed()` turns the result into these dataclasses, and past
this file no DictConfig is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from fxtune.checkpoint import CheckpointConfig
from fxtune.data.loader import LoaderConfig
from fxtune.data.sources import DataConfig
from fxtune.model import ModelConfig
from fxtune.optimizer import OptimizerConfig
from fxtune.pipeline import Pipeline
from fxtune.schedule import ScheduleConfig
from fxtune.tracking import TrackingConfig
from fxtune.world import Device


class Resume(str, Enum):
    auto = "auto"
    never = "never"
    must = "must"


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run: its folder under runs/, its name in W&B. A recipe's own name by default."""
    dir: Optional[str] = None
    """The run's folder; null: runs/NAME, and runs/NAME-2 and so on when that one is taken."""
    seed: int = 0
    resume: Resume = Resume.auto
    """`auto`: go on with an unfinished run of the same config, else start; `never`: always start; `must`: fail if there is none."""
    deterministic: bool = False
    """Use only deterministic kernels (torch.use_deterministic_algorithms)."""
    device: Device = Device.auto


@dataclass
class TrainConfig:
    max_steps: Optional[int] = None
    """Optimizer steps. With epochs too, whichever comes first; with neither, one epoch."""
    epochs: Optional[float] = None
    micro_batch_size: int = 1
    """Rows in one forward and backward."""
    global_batch_size: int = 8
    """Rows in one optimizer step; a multiple of micro_batch_size."""
    eval_every: int = 0
    """Evaluate each time this many steps are done; 0: only at the end."""
    log_every: int = 1
    """Steps between two log lines. The only place where the loop waits for the device."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this norm; 0: off."""
    max_skipped_steps: int = 5
    """Stop after this many steps in a row whose loss or gradient was not finite (none of them touches the weights)."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    techniques: Pipeline = field(default_factory=Pipeline)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
