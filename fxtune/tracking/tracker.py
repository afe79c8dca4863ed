"""Writes the metrics of a run: always to metrics.jsonl, and to the trackers that the config names.

Training goes on if a tracker fails: `Tracker.log` never raises and never waits. Each tracker runs in a separate
process that reads metrics.jsonl (client.py, worker.py)."""

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
from fxtune.system.files.atomic_files import replace_text
from fxtune.system.machine.facts import installed_packages
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.redact import redact
from fxtune.tracking.client import Notes, TrackerClient, api_key_at_hand
from fxtune.tracking.jsonl import MetricsFile
from fxtune.tracking.worker import GOES_ON, STEP, TRACKERS

SYNC_PATIENCE = 15.0
"""Seconds that `fxtune sync` waits for W&B's first answer."""
UPLOAD_PATIENCE = 6 * 3600.0
"""Seconds that the upload of `fxtune sync` may take."""
SHORT_PATIENCE = 3.0
"""Seconds that a stopped run waits for a tracker: a scheduler does not wait for long, and the run is resumed later."""


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
    """The team or user of W&B. Null: the owner of the API key."""
    group: Optional[str] = None
    """Runs of one group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    init_timeout: float = field(default=5.0, metadata={"above": 0})
    """Seconds that W&B's server has to answer before the run goes offline. Training does not wait for the answer."""


@dataclass
class CostConfig:
    """Prices, in any one currency. Without prices no cost is shown."""

    card_hour: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of one GPU for an hour, as clouds charge it. On the CPU: the price of one process."""
    kwh: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of a kilowatt-hour, for your own machines. Only energy that can be read is counted."""

    def of(self, card_seconds: float, joules: float | None) -> float | None:
        """The cost of the cards' time and the energy; None without a price, or if the priced amounts are unknown."""
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
    mlflow: Optional[str] = None
    """The experiment of MLflow that gets the run, at MLFLOW_TRACKING_URI. Needs the extra fxtune[mlflow]."""
    trackio: Optional[str] = None
    """The project of Trackio on this machine that gets the run (TRACKIO_DIR). Needs the extra fxtune[trackio]."""
    display: DisplayKind = DisplayKind.auto
    """`auto`: a live display on a terminal, one line per log interval elsewhere."""
    cost: CostConfig = field(default_factory=CostConfig)


def check(config: TrackingConfig, facts: Facts) -> Iterator[str]:
    """Yield each reason why this tracking config cannot work here, and what to change. Imports no tracker."""
    for name in _options(config):
        if (package := TRACKERS[name].package) not in facts.packages:
            wanted = package if name == "wandb" else f'"fxtune[{name}]"'
            yield f"tracking.{name} needs the package {package}, which is not installed: pip install {wanted}"
    wandb = config.wandb
    if wandb.mode is WandbMode.disabled:
        return
    if not 0 < len(wandb.project) <= 128 or set(wandb.project) & set("/\\#?%:"):
        yield f"tracking.wandb.project={wandb.project!r}: W&B takes 1 to 128 characters, none of them / \\ # ? % :"
    for tag in wandb.tags:
        if not 0 < len(tag) <= 64:
            yield f"tracking.wandb.tags: {tag!r} has {len(tag)} characters; W&B takes 1 to 64"


def _options(config: TrackingConfig) -> dict[str, dict[str, Any]]:
    """The options of each configured tracker, by its key in worker.TRACKERS."""
    wandb = {key: getattr(config.wandb, key) for key in ("project", "entity", "group", "tags", "init_timeout")}
    options = {
        "wandb": wandb if wandb_mode(config.wandb) != "disabled" else None,
        "tensorboard": {} if config.tensorboard else None,
        "mlflow": {"experiment": config.mlflow} if config.mlflow else None,
        "trackio": {"project": config.trackio} if config.trackio else None,
    }
    return {name: own for name, own in options.items() if own is not None}


def wandb_mode(config: WandbConfig) -> str:
    """`online`, `offline` or `disabled`, by the configured mode and this machine's credentials. Never prompts."""
    mode = config.mode.value
    if config.mode is WandbMode.auto:
        mode = os.environ.get("WANDB_MODE", "").lower()
        mode = mode if mode in ("online", "offline", "disabled") else "online"
    return "offline" if mode == "online" and not api_key_at_hand() else mode


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes a run's metrics to every place that the config names.

    `resume_step`: the optimizer steps that the resumed run has done. `logged`: the last logged step (see MetricsFile).
    `wandb_id`: the id of the run to continue, in all trackers. `note` gets one-line messages, from the thread that
    calls this object.
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
        self._notes: Notes = queue.SimpleQueue()
        self._summary: dict[str, Any] = {}
        self._resume_step = resume_step
        self._file = MetricsFile(self.run_dir, resume_step, logged, self._notes.put)
        if wandb_mode(config.wandb) == "offline" and config.wandb.mode is not WandbMode.offline:
            self._notes.put("W&B: no API key at hand (WANDB_API_KEY, or `wandb login`), so the run is kept offline")
        run = {"name": run_name, "config": resolved_config, "id": wandb_id}
        self._clients = _connect(config, self.run_dir, run, self._notes)
        self.wandb_id: str | None = next((client.id for client in self._clients), None)
        """The id of the run in all trackers; None without a tracker. A checkpoint saves it."""
        self._pass_notes_on()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record `metrics`, numbers or texts by name, after `step` optimizer steps."""
        if step == self._resume_step and frozenset(metrics) in self._file.kept:
            return  # the run was killed after it wrote these figures, and has computed them again
        values = {STEP: step, **{name: _json_value(value) for name, value in metrics.items()}}
        self._file.write({"time": round(time.time(), 3), **values})
        self._pass_notes_on()

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Set the figures of the whole run, which W&B shows in its table of runs."""
        self._summary |= {name: _json_value(value) for name, value in figures.items()}

    def finish(self, figures: Mapping[str, Any] | None = None, exit_code: int = 0) -> None:
        """Set the summary and close everything. Safe to call twice.

        Waits for the trackers' last uploads: at most half a minute, or SHORT_PATIENCE if the run was stopped.
        """
        self.summary(figures or {})
        self._file.close()  # before the trackers end, because their processes read metrics.jsonl to the end
        clients, self._clients = self._clients, []
        for client in clients:
            client.end(exit_code, self._summary)
        for client in clients:
            try:
                waiting = SIGNALS.interruptible() if exit_code == 0 else contextlib.nullcontext()
                with waiting, phase(f"Waiting for {client.title}'s last upload", announce=False):
                    client.wait(SHORT_PATIENCE if exit_code in (GOES_ON, 130) else None)
            except Stopped:  # the run is finished; the signal stops only the upload
                if not client.wait(SHORT_PATIENCE):
                    again = f"fxtune sync {shlex.quote(str(self.run_dir))}"
                    self._notes.put(f"{client.title} was left behind. To send the missing steps: {again}")
        self._pass_notes_on()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        unnamed = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.finish(exit_code=0 if error is None else getattr(error, "exit_code", unnamed))

    def _pass_notes_on(self) -> None:
        while not self._notes.empty():
            self._note(redact(self._notes.get()))  # an error's text may hold an address with a password


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


def upload(run_dir: Path, note: Callable[[str], None]) -> list[str]:
    """Send the run's trackers the rows of `run_dir` that they do not have. No process may be training that run.

    Returns the trackers' names. Raises ConfigError if the run, a package or the API key is missing. Raises
    StorageError if the folder is not as fxtune writes it, or if a tracker did not accept every row.
    """
    if not ((run_dir / "config.yaml").exists() and (run_dir / "metrics.jsonl").exists()):
        raise ConfigError(f"{run_dir} holds no run (config.yaml and metrics.jsonl). Give a folder such as runs/NAME.")
    require_own_files(run_dir)
    with FileLock(run_dir / ".lock", timeout=0):
        plain = read_config(run_dir) or {}
        try:
            recorded = plain["tracking"]
            wandb = {key: recorded["wandb"][key] for key in ("project", "entity", "group", "tags")}
            others = [recorded.get(tracker) for tracker in ("tensorboard", "mlflow", "trackio")]
            online = WandbConfig(WandbMode.online, **wandb, init_timeout=SYNC_PATIENCE)
            config = TrackingConfig(online, *others)
            if recorded["wandb"].get("mode") == "disabled" and len(_options(config)) > 1:
                config.wandb.mode = WandbMode.disabled
            name = str(plain["run"]["name"])
        except (KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{run_dir / 'config.yaml'} is not the config of a run of this version of fxtune: its run.name or "
                "tracking.wandb is missing. Bring it back."
            ) from error
        if reasons := list(check(config, Facts(packages=installed_packages()))):
            raise ConfigError("\n".join(reasons))
        if config.wandb.mode is WandbMode.online and not api_key_at_hand():
            raise ConfigError("There is no API key for W&B at hand: set WANDB_API_KEY, or `wandb login`.")
        notes: Notes = queue.SimpleQueue()
        clients = _connect(config, run_dir, {"name": name, "config": plain, "id": None}, notes, UPLOAD_PATIENCE)
        for client in clients:
            client.end(0 if (run_dir / "result.json").exists() else 1, {})
        for client in clients:
            client.wait(UPLOAD_PATIENCE)
    while not notes.empty():
        note(redact(notes.get()))
    if trouble := "; ".join(client.trouble for client in clients if client.trouble):
        raise StorageError(f"{run_dir}: {redact(trouble)}. Nothing is lost: give the same command again later.")
    return [client.title for client in clients]


def _connect(
    config: TrackingConfig, run_dir: Path, run: dict[str, Any], notes: Notes, patience: float = 0
) -> list[TrackerClient]:
    """The clients of all configured trackers. `run`: its `name` and `config`, and its `id`, if known."""
    clients = []
    for name, own in _options(config).items():
        modes = (wandb_mode(config.wandb), "offline") if name == "wandb" and not patience else ("online",)
        run |= {"id": run_id(run_dir, name, run["id"])}
        clients.append(TrackerClient(name, redact(run | own), run_dir, modes, notes, patience))
    return clients


def run_id(run_dir: Path, tracker: str, given: str | None) -> str:
    """The id of the run in a tracker. A file keeps it, because a run may be killed before its first checkpoint."""
    file = run_dir / tracker / "id"
    known = given
    with contextlib.suppress(OSError, UnicodeDecodeError):
        # The folder may come from a stranger: read no pipe, and no link to a file of this user.
        if file.is_file() and not file.is_symlink():
            known = known or file.read_text(encoding="utf-8").strip()
    known = known or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)  # a seed must not repeat an id
    with contextlib.suppress(OSError):  # if the folder cannot be written, the tracker says so itself
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, known)
    return known


def _json_value(value: Any) -> int | float | str | bool | None:
    """`value` as JSON can hold it: tensors and numpy scalars become Python numbers, other types text."""
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (int, float, str, bool)) else str(value)
