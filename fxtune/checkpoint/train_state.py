"""The state of a run as numbers and text: state.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional


@dataclass
class TrainState:
    """Everything that a resumed run needs besides weights and moments."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Real tokens seen, without padding."""
    supervised_tokens: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    """The state of training/step_monitor.py: skipped steps, and the losses that spike detection keeps."""
    evaluation_due: bool = False
    """Whether the evaluation of this step is still due, because a signal interrupted it."""
    best_loss: Optional[float] = None
    """Lowest evaluation loss so far."""
    best_step: Optional[int] = None
    """The step of the best evaluation. It has the lowest loss, or the best value of train.stop.metric."""
    best_match: Optional[float] = None
    """The value of train.stop.metric at best_step, if the metric is not the loss."""
    branch_step: Optional[int] = None
    """The step at which a decay of the learning rate begins or has begun. The checkpoint of this step is kept, because
    the run can be extended from there."""
    schedule: dict[str, int] = field(default_factory=dict)
    """The lengths of the Schedule (optim/schedule.py), with later decisions about the end of the run."""
    ending: dict[str, Any] = field(default_factory=dict)
    """The state of training/run/end.py: for how long evaluations have not improved, and why the run ends early."""
    clock: dict[str, float] = field(default_factory=dict)
    """The state of training/monitors/clock.py: seconds of the run so far."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The last value of each metric."""
    wandb_id: Optional[str] = None
    data_fingerprint: str = ""
    """Fingerprint of the data plan. A resumed run must have the same fingerprint."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The parts of the optimizer's state that are not tensors."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows per forward pass of `training`, `evaluation` and `questions`; only the numbers that running out of memory
    reduced (system/process/oom.py)."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """float16's loss scale and its count of good steps; empty for other dtypes."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainState:
        """The state with these values. Raises ValueError if a value is unknown or has a wrong type."""
        defaults = asdict(cls())
        for name, value in values.items():
            if name not in defaults:
                raise ValueError(f"state.json has `{name}`, which this version of fxtune does not know")
            kind = type(defaults[name])
            if defaults[name] is not None and type(value) is not kind and not (kind is float and type(value) is int):
                raise ValueError(f"state.json: `{name}` is not of its type")
        for name in ("best_loss", "best_step", "best_match", "branch_step"):
            if not isinstance(values.get(name), (int, float, type(None))):
                raise ValueError(f"state.json: `{name}` is no number")
        for name, kinds in (("schedule", (int,)), ("clock", (int, float)), ("ending", (int, float, str))):
            if any(type(value) not in kinds for value in values.get(name, {}).values()):
                raise ValueError(f"state.json: `{name}` is not as fxtune writes it")
        if any(type(rows) is not int or rows < 1 for rows in values.get("rows", {}).values()):
            raise ValueError("state.json: `rows` are no numbers of rows")
        return cls(**values)


def without_clock(state: str) -> dict[str, Any]:
    """A TrainState in JSON as plain data, without the seconds of the run."""
    return {name: value for name, value in json.loads(state).items() if name != "clock"}
