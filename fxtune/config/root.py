"""The dataclasses of the config: one field for each group of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from fxtune.checkpoint.manager import CheckpointConfig
from fxtune.data.batches.loader import LoaderConfig
from fxtune.data.config import DataConfig
from fxtune.distributed.world import Device
from fxtune.models.load import ModelConfig
from fxtune.optim.config import OptimizerConfig
from fxtune.optim.schedule import ScheduleConfig
from fxtune.techniques.pipeline import Pipeline
from fxtune.tracking.tracker import TrackingConfig


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
    seed: int = field(default=0, metadata={"min": 0})
    resume: Resume = Resume.auto
    """`auto`: go on with an unfinished run of the same config, else start; `never`: start; `must`: fail if there is none."""
    deterministic: bool = False
    """The same bits each time on the same machine: only kernels that give them, and nothing that is chosen by the clock or by the
    memory that happens to be free. What cannot is refused (docs/faults.md)."""
    device: Device = Device.auto
    memory_gib: Optional[float] = field(default=None, metadata={"above": 0})
    """Let torch have at most this much of the GPU's memory, in GiB; null: all of it. As if the card were smaller."""


class Spikes(str, Enum):
    report = "report"
    skip = "skip"
    off = "off"


class OutOfMemory(str, Enum):
    halve = "halve"
    stop = "stop"


@dataclass
class TrainConfig:
    max_steps: Optional[int] = field(default=None, metadata={"min": 1})
    """Optimizer steps. With epochs too, whichever comes first; with neither, one epoch."""
    epochs: Optional[float] = field(default=None, metadata={"above": 0})
    micro_batch_size: int = field(default=1, metadata={"min": 1})
    """Rows in one forward and backward."""
    global_batch_size: int = field(default=8, metadata={"min": 1})
    """Rows in one optimizer step; a multiple of micro_batch_size."""
    eval_every: int = field(default=0, metadata={"min": 0})
    """Evaluate each time this many steps are done; 0: only at the end."""
    log_every: int = field(default=1, metadata={"min": 1})
    """Steps between two log lines. The only place where the loop waits for the device."""
    max_grad_norm: float = field(default=1.0, metadata={"min": 0})
    """Clip the gradient to this norm; 0: off."""
    max_skipped_steps: int = field(default=5, metadata={"min": 1})
    """Stop after this many steps in a row whose loss or gradient was not finite (none of them touches the weights). While
    float16 looks for its loss scale, steps are skipped and do not count here."""
    spikes: Spikes = Spikes.report
    """Steps whose loss is far above that of the steps before: `report` them with their samples, `skip` them too, so that they do
    not touch the weights (decided on the device), or `off`."""
    spike_window: int = field(default=64, metadata={"min": 1})
    """A spike is judged by the losses of this many steps before it, once there is a quarter of them."""
    spike_threshold: float = field(default=8.0, metadata={"above": 0})
    """A loss is a spike above their median by this many times their spread (1.4826 x the median absolute deviation)."""
    out_of_memory: OutOfMemory = OutOfMemory.halve
    """Where memory runs out in training, evaluation or answers. `halve`: half as many rows at once from there on; a step is taken
    again, with its global batch and its loss as they are. `stop`: an error."""


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
