"""Writes the metrics of a run: always to metrics.jsonl, and to Weights & Biases and TensorBoard if configured.

Training goes on if a tracker fails: `Tracker.log` never raises and never waits. W&B runs in a process of its own
that reads metrics.jsonl (wandb_client.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Optional

from filelock import FileLock

from fxtune.checkpoint.run_folder import read_config, require_own_files
from fxtune.errors import ConfigError, Stopped, StorageError
from fxtune.facts.run import Facts
from fxtune.system.atomic_files import replace_text
from fxtune.system.progress import phase
from fxtune.system.redact import redact, redact_arguments
from fxtune.system.signals import SIGNALS
from fxtune.tracking.jsonl import MetricsFile
from fxtune.tracking.wandb_client import WandbClient, api_key_at_hand
from fxtune.tracking.wandb_worker import GOES_ON, STEP

SYNC_PATIENCE = 15.0
"""Seconds that `fxtune sync` waits for W&B's first answer."""
UPLOAD_PATIENCE = 6 * 3600.0
"""Seconds that the upload of `fxtune sync` may take."""
SHORT_PATIENCE = 3.0
"""Seconds that a stopped run waits for W&B: a scheduler does not wait for long, and the run is resumed later."""


class WandbMode(str, Enum):
    disabled = "disabled"
    auto = "auto"
    online = "online"
    offline = "offline"


class DisplayKind(str, Enum):
    auto = "auto"
    rich = "rich"
    plain = "plain"
    none = "none"


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.disabled
    """`auto`: WANDB_MODE if it is set; otherwise online with an API key (WANDB_API_KEY or netrc), offline without."""
    project: str = "fxtune"
    """The project of W&B that gets the run."""
    entity: Optional[str] = None
    """The team or user of W&B. Null: the key's own."""
    group: Optional[str] = None
    """Runs of one group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    init_timeout: float = field(default=5.0, metadata={"above": 0})
    """Seconds that W&B's server has to answer before the run goes offline. Training does not wait for it."""


@dataclass
class CostConfig:
    """Prices, in any one currency. Without prices no cost is shown."""

    card_hour: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of one GPU for an hour (on the CPU: of one process), as clouds have it."""
    kwh: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of a kilowatt-hour, for machines of your own. Only energy that can be read is counted."""

    def of(self, card_seconds: float, joules: float | None) -> float | None:
        """The cost of this time of cards and this energy; None without a price, or if the priced amount is unknown."""
        parts = []
        if self.card_hour is not None:
            parts.append(self.card_hour * card_seconds / 3600)
        if self.kwh is not None and joules is not None:
            parts.append(self.kwh * joules / 3.6e6)
        return sum(parts) if parts else None


@dataclass
class TrackingConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    """Also write TensorBoard event files into RUN/tensorboard. Needs the extra fxtune[tensorboard]."""
    display: DisplayKind = DisplayKind.auto
    """`auto`: a live display on a terminal, one line per log interval elsewhere."""
    cost: CostConfig = field(default_factory=CostConfig)


def check(config: TrackingConfig, facts: Facts) -> Iterator[str]:
    """Yield each reason why this tracking config cannot work here, and what to change. Imports no tracker."""
    if config.tensorboard and "tensorboard" not in facts.packages:
        yield _TENSORBOARD_MISSING
    wandb = config.wandb
    if wandb.mode is WandbMode.disabled:
        return
    if "wandb" not in facts.packages:
        yield f"tracking.wandb.mode={wandb.mode.value}, but wandb is not installed: pip install wandb"
    if not 0 < len(wandb.project) <= 128 or set(wandb.project) & set("/\\#?%:"):
        yield f"tracking.wandb.project={wandb.project!r}: W&B takes 1 to 128 characters, none of them / \\ # ? % :"
    for tag in wandb.tags:
        if not 0 < len(tag) <= 64:
            yield f"tracking.wandb.tags: {tag!r} has {len(tag)} characters; W&B takes 1 to 64"


_TENSORBOARD_MISSING = (
    "tracking.tensorboard=true, but tensorboard is not installed: "
    'pip install "fxtune[tensorboard]", or set tracking.tensorboard=false'
)


def wandb_mode(config: WandbConfig) -> str:
    """`online`, `offline` or `disabled`, by the configured mode and this machine's credentials. Never prompts."""
    mode = config.mode.value
    if config.mode is WandbMode.auto:
        mode = os.environ.get("WANDB_MODE", "").lower()
        mode = mode if mode in ("online", "offline", "disabled") else "online"
    return "offline" if mode == "online" and not api_key_at_hand() else mode


class Tracker:
    """Writes a run's metrics to every place that the config names.

    `resume_step`: the optimizer steps that the resumed run has done; `logged`: the last logged one (see MetricsFile).
    `wandb_id`: the id of the W&B run to continue. `note` gets one-line messages, from the thread that calls this
    object. Raises only ConfigError, if TensorBoard is configured and not installed.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: str | Path,
        run_name: str,
        resolved_config: dict[str, Any],
        wandb_id: str | None = None,
        resume_step: int = 0,
        logged: int | None = None,
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        self.run_dir = Path(run_dir)
        self._note = note
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._summary: dict[str, Any] = {}
        self._tensorboard = self._open_tensorboard(resume_step) if config.tensorboard else None
        self._resume_step = resume_step
        self._file = MetricsFile(self.run_dir, resume_step, logged, self._notes.put)
        self._wandb: WandbClient | None = None
        self.wandb_id: str | None = None
        """The id of the W&B run, which a checkpoint saves; None if W&B is disabled."""
        mode = wandb_mode(config.wandb)
        if mode != "disabled":
            self.wandb_id = wandb_run_id(self.run_dir, wandb_id)
            if mode == "offline" and config.wandb.mode is not WandbMode.offline:
                self._notes.put(
                    "W&B: no API key at hand (WANDB_API_KEY, or `wandb login`), so the run is kept offline"
                )
            self._wandb = _client(
                config.wandb, self.wandb_id, self.run_dir, run_name, resolved_config, (mode, "offline"), self._notes
            )
        self._pass_notes_on()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record `metrics` (name -> number or text) as of `step` finished optimizer steps."""
        if step == self._resume_step and frozenset(metrics) in self._file.kept:
            return  # the run was killed after it wrote these figures, and has computed them again
        values = {STEP: step, **{name: _json_value(value) for name, value in metrics.items()}}
        self._file.write({"time": round(time.time(), 3), **values})
        if self._tensorboard:
            self._log_to_tensorboard(step, values)
        self._pass_notes_on()

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Set the figures that W&B shows for the whole run, in its table of runs."""
        self._summary |= {name: _json_value(value) for name, value in figures.items()}

    def finish(self, figures: Mapping[str, Any] | None = None, exit_code: int = 0) -> None:
        """Set the summary and close everything. Safe to call twice.

        Waits for W&B's last upload: at most half a minute, or SHORT_PATIENCE if the run was stopped.
        """
        self.summary(figures or {})
        if self._tensorboard:
            try:
                self._tensorboard.close()
            except Exception as error:  # noqa: BLE001  a third party's writer must not fail a finished run
                self._notes.put(f"TensorBoard: {error}")
            self._tensorboard = None
        self._file.close()  # before W&B ends, because its process reads metrics.jsonl to the end
        client, self._wandb = self._wandb, None
        if client:
            try:
                waiting = SIGNALS.interruptible() if exit_code == 0 else contextlib.nullcontext()
                with waiting, phase("Waiting for W&B's last upload", announce=False):
                    client.finish(exit_code, self._summary, SHORT_PATIENCE if exit_code in (GOES_ON, 130) else None)
            except Stopped:  # the run is finished; the signal stops only the upload
                if not client.finish(exit_code, self._summary, SHORT_PATIENCE):
                    again = f"fxtune sync {shlex.quote(str(self.run_dir))}"
                    self._notes.put(f"W&B was left behind. To send the missing steps: {again}")
        self._pass_notes_on()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        unnamed = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.finish(exit_code=0 if error is None else getattr(error, "exit_code", unnamed))

    def _pass_notes_on(self) -> None:
        while not self._notes.empty():
            self._note(redact(self._notes.get()))  # an error's text may hold an address with a password

    def _open_tensorboard(self, resume_step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_TENSORBOARD_MISSING) from error
        purge = resume_step + 1 if resume_step else None  # hides the lines of steps that are done again
        try:
            return SummaryWriter(log_dir=str(self.run_dir / "tensorboard"), purge_step=purge, flush_secs=10)
        except OSError as error:
            self._notes.put(f"TensorBoard's files cannot be written ({error}); training goes on without them")
            return None

    def _log_to_tensorboard(self, step: int, values: dict[str, Any]) -> None:
        assert self._tensorboard is not None
        try:
            for name, value in values.items():
                if name != STEP and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(name, value, step)
        except Exception as error:  # noqa: BLE001  re-raised by its writer thread, from whatever broke there
            self._notes.put(f"TensorBoard stopped at step {step} ({error}); training goes on")
            self._tensorboard = None


class NoTracker(Tracker):
    """The tracker of all ranks but one: it records nothing."""

    def __init__(self) -> None:
        self.wandb_id = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def summary(self, figures: Mapping[str, Any]) -> None:
        pass

    def finish(self, figures: Mapping[str, Any] | None = None, exit_code: int = 0) -> None:
        pass


def upload(run_dir: Path, note: Callable[[str], None]) -> None:
    """Send W&B the rows of the run in `run_dir` that it does not have. No process may be training that run.

    Raises ConfigError (no such run, no API key) and StorageError (the folder is not as fxtune writes it, or W&B did
    not accept every row).
    """
    if not ((run_dir / "config.yaml").exists() and (run_dir / "metrics.jsonl").exists()):
        raise ConfigError(f"{run_dir} holds no run (config.yaml and metrics.jsonl). Give a folder such as runs/NAME.")
    if not api_key_at_hand():
        raise ConfigError("There is no API key for W&B at hand: set WANDB_API_KEY, or `wandb login`.")
    require_own_files(run_dir)
    with FileLock(run_dir / ".lock", timeout=0):
        plain = read_config(run_dir) or {}
        try:
            settings = {key: plain["tracking"]["wandb"][key] for key in ("project", "entity", "group", "tags")}
            config = WandbConfig(WandbMode.online, **settings, init_timeout=SYNC_PATIENCE)
            name = str(plain["run"]["name"])
        except (KeyError, TypeError) as error:
            raise StorageError(
                f"{run_dir / 'config.yaml'} is not the config of a run of this version of fxtune: its run.name or "
                "tracking.wandb is missing. Bring it back."
            ) from error
        notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        run_id = wandb_run_id(run_dir, None)
        client = _client(config, run_id, run_dir, name, plain, ("online",), notes, UPLOAD_PATIENCE)
        client.finish(0 if (run_dir / "result.json").exists() else 1, {}, UPLOAD_PATIENCE)
    while not notes.empty():
        note(redact(notes.get()))
    if client.trouble:
        raise StorageError(f"{run_dir}: {redact(client.trouble)}. Nothing is lost: give the same command again later.")


def _client(
    config: WandbConfig,
    wandb_id: str,
    run_dir: Path,
    run_name: str,
    resolved_config: dict[str, Any],
    modes: tuple[str, ...],
    notes: queue.SimpleQueue[str],
    upload_timeout: float | None = None,
) -> WandbClient:
    init = {
        "id": wandb_id,
        "name": run_name,
        **{key: getattr(config, key) for key in ("project", "entity", "group", "tags")},
        "config": resolved_config,
        "allow_val_change": True,
    }
    argv = [sys.argv[0], *redact_arguments(sys.argv[1:])]
    return WandbClient(redact(init), run_dir, argv, modes, config.init_timeout, notes, upload_timeout)


def wandb_run_id(run_dir: Path, given: str | None) -> str:
    """The id of this folder's W&B run. It is kept in a file, for a run that is killed before its first checkpoint."""
    file = run_dir / "wandb" / "id"
    known = given
    with contextlib.suppress(OSError, UnicodeDecodeError):
        # The folder may be a stranger's: read no pipe, and no link to a file of ours.
        if file.is_file() and not file.is_symlink():
            known = known or file.read_text(encoding="utf-8").strip()
    known = known or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)  # a seed must not repeat an id
    with contextlib.suppress(OSError):  # if the folder cannot be written, W&B says so itself
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, known)
    return known


def _json_value(value: Any) -> int | float | str | bool | None:
    """`value` as JSON can hold it: tensors and numpy scalars become Python numbers, other types text."""
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (int, float, str, bool)) else str(value)
