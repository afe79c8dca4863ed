"""The state of a run. It is saved to checkpoints during the run, and loaded from the newest checkpoint when the run
resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.manager import Checkpoint, CheckpointConfig, Checkpoints
from fxtune.checkpoint.run_folder import CHECKPOINTS, HOW_TO_START_ANEW, SETTING, RunFolder, config_digest, read_config
from fxtune.checkpoint.train_state import TrainState
from fxtune.config.root import Config, StopMetric
from fxtune.distributed.background import BackgroundGroup
from fxtune.distributed.chunks import divided_like, is_divided, local
from fxtune.distributed.heartbeat import SAVING
from fxtune.errors import ConfigError, StorageError
from fxtune.facts.execution import OptimizerState
from fxtune.optim.optimizer import moment_bytes
from fxtune.optim.schedule import Schedule
from fxtune.system.terminal.progress import phase
from fxtune.training.monitors.clock import RunClock
from fxtune.training.step import TrainStep
from fxtune.training.step_monitor import StepMonitor

PIECE = 2**22
"""How many numbers are summed at once. torch makes a copy of them in float64."""


class RunState:
    """The state of the run in `folder`. `note` prints one-line messages for the user.

    The loop keeps `state` up to date. save() adds the state of the optimizer, the loss scale and the monitor.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        train_step: TrainStep,
        monitor: StepMonitor,
        clock: RunClock,
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.note, self.monitor, self.clock = folder, note, monitor, clock
        self.train_step, self.optimizer, self.loss_scale = train_step, train_step.optimizer, train_step.loss_scale
        self.world, self.model = train_step.world, train_step.model.model
        self._weights = trained_weights(self.model)
        recipe = config_digest(read_config(folder.path, "config-1.yaml") or folder.config)  # before it was extended
        self.checkpoints = Checkpoints(folder.path / CHECKPOINTS, config, recipe, note, BackgroundGroup(self.world))
        self.checkpoints.prepare(self.weights(), train_step.keeps_rank_state)
        self.state = TrainState()
        self.saved = 0
        """The last step for which a save was started."""
        self._saved_rows: dict[str, int] = {}
        self._holds_best = False
        """Whether the weights of `state` were replaced by the best or the averaged weights. Nothing is saved after
        that."""

    @phase("Loading the checkpoint", announce=False, part="checkpoint")
    def load(self, fingerprint: str) -> TrainState:
        """Load weights, moments and state of the newest checkpoint. Without a checkpoint, make a new state.

        `fingerprint`: the data plan's. Raises ConfigError if the checkpoint belongs to other data or if the ranks
        differ, StorageError if there are checkpoints but none is complete.
        """
        self.state = self._load_newest(fingerprint)
        self._compare_ranks()
        self.clock.load(self.state.clock)
        return self.state

    def _load_newest(self, fingerprint: str) -> TrainState:
        saved = None
        if self.folder.resumed:
            saved = self.checkpoints.load_newest(self.weights())
        if saved is None:
            if self.folder.resumed:
                self.note(f"{self.folder.path} has no checkpoint, so it starts again from its first step.")
            return TrainState(data_fingerprint=fingerprint)
        if saved.state.data_fingerprint != fingerprint:
            raise ConfigError(
                f"The data changed since {self.folder.path} was started (its rows, the questions whose copies are "
                f"left out, the tokenizer or the chat template). Restore the data as it was, or start anew with "
                f"{HOW_TO_START_ANEW}. If nothing changed and {SETTING} is missing there, restore that file: it says "
                "how rows were made (data.packing, data.share_prompts)."
            )
        with _readable(saved):
            self._restore(saved)
            self.monitor.load(saved.state.step, saved.state.numbers)
        self.note(f"Resuming {self.folder.path} after step {saved.state.step} ({HOW_TO_START_ANEW}, starts anew).")
        self.saved, self._saved_rows = saved.state.step, dict(saved.state.rows)
        return saved.state

    def _restore(self, saved: Checkpoint) -> None:
        copy_weights(saved.weights, self.weights())
        moments = stored.of_all_ranks(saved.moments)
        self.optimizer.load(moments, saved.state.optimizer)
        if (ranks := stored.by_rank(saved.moments)) and self.train_step.keeps_rank_state:
            states = {0: moments, **ranks}
            self.train_step.load_rank_states([states[rank] for rank in range(len(states))], saved.state.optimizer)
            if len(states) != self.world.size:
                self.note(
                    f"The run was saved by {len(states)} ranks and goes on with {self.world.size}. The separate state "
                    "of each rank cannot be kept exactly, so losses differ from here on (docs/distributed.md)."
                )
        self.loss_scale.load(saved.state.loss_scale)

    def schedule(self, planned: Schedule) -> Schedule:
        """The schedule of the run: `planned` from its config, or the schedule that was decided since the run
        started."""
        if not self.state.schedule:
            self.state.schedule = planned.saved()
            return planned
        try:
            return planned.resumed(self.state.schedule)
        except ValueError as error:
            raise StorageError(
                f"The checkpoint of step {self.state.step} in {self.checkpoints.folder}: {error}. Remove it, and the "
                "run resumes from the one before."
            ) from error

    def go_back(self, step: int) -> TrainState | None:
        """Restore weights, moments and the loss window from this run's checkpoint of `step`. The rest of the state
        stays. Returns the state of the checkpoint, or None if it cannot be read."""
        try:
            saved = self.checkpoints.read(step, self.weights(), with_moments=True)
        except ValueError as reason:
            self.note(f"The checkpoint of step {step} cannot be read: {reason}.")
            return None
        self.average()  # ends local steps before their weights are replaced
        self.checkpoints.wait_for_copy()
        with _readable(saved):
            self._restore(saved)
            self.monitor.spikes.load(saved.state.numbers["window"])
        return saved.state

    def _compare_ranks(self) -> None:
        """Raise ConfigError if the ranks are about to train different recipes, data or weights."""
        if self.world.size == 1:
            return
        mine = {
            "the recipe": self.checkpoints.recipe,
            "the data": self.state.data_fingerprint,
            "the trained weights": repr(self._sum_of_weights()),
        }
        ranks = self.world.gather(mine, "comparing what the ranks train")
        for subject, value in mine.items():
            if different := [rank for rank, others in enumerate(ranks) if others[subject] != value]:
                raise ConfigError(
                    f"Rank {different[0]} differs from rank {self.world.rank} in {subject}. Start all ranks with the "
                    "same command and files."
                )

    def _sum_of_weights(self) -> float:
        """The sum of all trained weights in float64. They are summed in pieces, because a copy of all weights in
        float64 would be large."""
        divided: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for weight in self.weights().values():
            (divided if is_divided(weight) else others).extend(_sums(local(weight)))
        total = torch.zeros((), dtype=torch.double, device=self.world.device)
        if divided:
            total = self.world.sum(sum(divided, total), "comparing weights", self.world.weights_group)
        return float(sum(others, total))

    def save(self) -> None:
        """Save the state: copy it, and write the copy to the disk while the next steps run. All ranks call this
        together."""
        assert not self.train_step.torn, "some weights are a step ahead of the state"
        since = time.perf_counter()
        self.world.heartbeat.doing(SAVING)
        self.average()
        state = self.state
        moments, state.optimizer = self.optimizer.state()
        moments = {full: self._like_its_weight(full, moment) for full, moment in moments.items()}
        if self.train_step.keeps_rank_state:
            rank, tensors = self.world.rank, self.train_step.rank_state()
            own = {name: tensor for name, tensor in tensors.items() if rank or name not in moments}
            moments |= {stored.name_of_rank(rank, name): tensor for name, tensor in own.items()}
        state.loss_scale, state.numbers = self.loss_scale.state(), self.monitor.state()
        state.clock = self.clock.state()
        names = self.optimizer.names
        averages = {names[parameter]: average for parameter, average in self.optimizer.averages().items()}
        self.checkpoints.save(state, {**self.weights(), **averages}, moments, since)
        self.saved, self._saved_rows = state.step, dict(state.rows)

    def average(self) -> None:
        """Give all ranks the same weights, after local steps. All ranks call this together."""
        if not self.train_step.ranks_agree:
            self.checkpoints.wait_for_copy()
            self.train_step.average()

    def ensure_saved(self) -> None:
        """Save the current state unless it is saved already, and wait until it is on the disk. Retries a failed save
        once. Raises StorageError. All ranks call this together."""
        failed = self.checkpoints.settle()
        unsaved = bool(failed or self.state.step > self.saved or self.state.rows != self._saved_rows)
        if self.train_step.keeps_rank_state:  # all ranks take part in a save
            unsaved = bool(self.world.agree(int(unsaved)))
        if self.state.step and not self._holds_best and unsaved:
            self.save()
        self.checkpoints.wait()

    def load_best(self) -> tuple[int, dict[str, Any]]:
        """Load the best weights by train.stop.metric for the export. Returns their step and its figures. If they have
        no checkpoint, the last weights stay. Nothing is saved after this."""
        step, best = self.state.step, self.state.best_step
        self.use_averages()
        if best in (None, step) or not self.checkpoints.config.keep_best:
            return step, self.state.figures
        try:
            found = self.checkpoints.read(best, self.weights())
            copy_weights(found.weights, self.weights())
        except ValueError as reason:
            self.note(f"The best checkpoint, of step {best}, cannot be read ({reason}), so the last one is exported.")
            return step, self.state.figures
        self._holds_best = True
        return best, found.state.figures

    def use_averages(self) -> None:
        """Replace the weights by the optimizer's averages of weights, if it has any. Nothing is saved after this."""
        if self.optimizer.averaging is not None and not self._holds_best:
            self.checkpoints.wait_for_copy()  # the copy must have the old weights
            self.optimizer.use_averages()
            self._holds_best = True

    def check_room(self, steps: int, optimizer: OptimizerState, export_all: bool, evaluates: bool) -> None:
        """Raise StorageError if the disk has no room for the checkpoints of `steps` steps and the export: the whole
        model with `export_all`, otherwise the trained weights. `optimizer`: the state that it keeps. `evaluates`:
        whether evaluations decide which weights are best."""
        if self.state.step < steps:
            size = sum(weight.nbytes for weight in self.weights().values())
            own = sum(local(weight).nbytes for weight in self.weights().values())
            moments = moment_bytes(optimizer, self.optimizer.parts) * size // max(own, 1)
            moments = self.train_step.all_rank_bytes(moments)
            every = self.checkpoints.config.every or steps
            saves = -(-steps // every) - self.state.step // every
            self.checkpoints.check_room(size + moments, self._export_bytes(export_all), saves, evaluates)

    def make_room(self, export_all: bool) -> None:
        """Remove the oldest checkpoints if the disk has no room for the export. The best and the newest checkpoint
        stay."""
        self.checkpoints.make_room(self._export_bytes(export_all), self.state.best_step, self.state.branch_step)

    def _export_bytes(self, export_all: bool) -> int:
        return sum(weight.nbytes for weight in (self.model.parameters() if export_all else self.weights().values()))

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, as the model had them at the start. A divided module has other parameter
        objects while its weights are gathered for a pass."""
        return self._weights

    def _like_its_weight(self, full: str, moment: torch.Tensor) -> torch.Tensor:
        """The moment named `full`, as a divided tensor if its weight is divided. The optimizer itself keeps only this
        rank's rows."""
        weight = self._weights[full.rpartition("/")[0]]
        if not is_divided(weight) or moment.dim() == 0:
            return moment
        assert moment.shape == local(weight).shape, f"{full} is neither a number nor shaped like its weight"
        return divided_like(moment, weight)


def _sums(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sum of each PIECE numbers of `weight`, in float64 on its device."""
    for part in weight.detach().reshape(-1).split(PIECE):
        yield part.sum(dtype=torch.double)


@contextmanager
def _readable(saved: Checkpoint) -> Iterator[None]:
    """A context that raises StorageError if its body cannot use the state of `saved`."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise StorageError(
            f"{saved.path}: its state is not as fxtune writes it ({type(error).__name__}: {error}). Remove this "
            "checkpoint, and the run resumes from the one before."
        ) from error


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained weights of a model by name: the weights in a checkpoint."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def copy_weights(saved: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of a checkpoint's weights, `saved`, into the `weights` of a model."""
    for name, weight in weights.items():
        local(weight).copy_(saved[name])


def weights_note(step: int, state: TrainState, config: Config) -> str:
    """A phrase that says why the weights of `step` are exported. Empty if no evaluation has found best weights.
    `state`: the state at the end of the run of `config`."""
    if state.best_step is None:
        return ""
    if state.best_match is not None:
        best, which = f"{state.best_match:.1%}", f"highest {config.train.stop.metric.words}"
    elif config.objective.needs.rollouts:  # the loss of rollouts is their negated reward
        best, which = f"{0.0 - (state.best_loss or 0.0):.4f}", "highest held-out reward"
    else:
        best, which = f"{state.best_loss or 0.0:.4f}", f"lowest {StopMetric.loss.words}"
    if step == state.best_step:
        return f"weights of step {step}, which have the {which}, {best}"
    return f"weights of step {step}, the last; the {which} was {best}, at step {state.best_step}"
