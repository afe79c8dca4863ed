"""Finds, creates and locks the folder of a run, so that no run is overwritten and no two runs write to one folder.

    runs/NAME/  config.yaml  setting.json  evidence.json  metrics.jsonl  checkpoints/  adapter/ (or model/)
                rollouts/, if the run learns from its own answers
                requirements.lock, what is installed  about.json  energy.json  compile.json, if anything is compiled
                result.json, written last  report.html
                libraries.log, if a library warned of something

folder_lock.py has the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fxtune.checkpoint.folder_lock import HOLDER, LOCK, FolderLock
from fxtune.errors import FILE, FOLDER, ConfigError, StorageError, UserError, kind_of, readable, writing
from fxtune.system.files import environment
from fxtune.system.files.atomic_files import json_or_empty, read_json, replace_text

FREE_ON_RESUME = (
    "run.deterministic",  # setting.json has its decision
    "run.dir",
    "run.resume",
    "run.device",
    "run.export",
    "run.gpus",
    "run.report",
    "parallel.replicate",
    "parallel.shard",
    "parallel.context",
    "tracking",
    "refresh",
    "eval",
    "loader",
    "checkpoint",
    "optimizer.in_backward",
    "optimizer.offload",
    "train.log_every",
    "train.max_minutes",
    "train.pause_after",
    *(f"sampler.{key}" for key in ("url", "venv", "arguments", "sleep", "request_seconds")),
    *(f"sampler.{key}" for key in ("reward_seconds", "reward_workers")),
    "data.workers",
    "data.cache_dir",
    "data.questions",
    "data.general",
    "data.eval_limit",
    "data.on_overlap",  # the plan's fingerprint covers the rows that this key leaves out
    "data.template_time",  # the plan's fingerprint covers the tokens that this key changes
)
"""Keys that may differ when a run is resumed, because they do not change the trained weights."""
LENGTH = ("max_steps", "epochs")
"""Keys of `train` that say how long a run is. A run may be extended if its config differs in these keys only."""
RUNS = Path("runs")
"""The folder of runs, below the working directory, unless run.dir names another place."""
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints inside the run's folder."""
HOW_TO_START_ANEW = "run.resume=never, or another run.dir where that is set"
RESULT = "result.json"
"""The last figures of a run. The file marks the run as finished."""
METRICS = "metrics.jsonl"
"""The figures of a run, one JSON object for each log line."""
SETTING = "setting.json"
"""The run's decisions on what its recipe left open, its data and its machine (training/run/resume_check.py)."""
EVIDENCE = "evidence.json"
"""For each option: what the recipe asked for, and what was observed."""
ABOUT = "about.json"
"""The command of the run, its versions, and its data in figures, for reports."""
OBJECTIVE = "objective"
"""The key in about.json for read_objective()."""
TEMPLATE_TIME = "template_time"
"""The key in about.json. Its value is the time that chat templates wrote into the tokens."""
PICTURES = "question_images"
"""The folder with small copies of the images of the first questions: DIGEST.jpg, by the hash of an image's file."""
ROLLOUTS = "rollouts"
"""The folder with the answers of each step, in a run that learns from its own answers (training/rollouts)."""
ROLLOUT_ANSWERS = "answers.jsonl"
"""The answers of a step, in the step's folder."""
REPORT = "report.html"
"""A page about the run (fxtune/reports/page.py)."""
_FILES = (".json", ".jsonl", ".yaml")
ALIVE = "is in use by a run that is alive"


@dataclass
class RunFolder:
    path: Path
    resumed: bool
    """Whether the folder holds an unfinished run of the same config."""
    lock: FolderLock | None
    """None on ranks that only read: rank 0 has the lock and writes."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config that the run was started with, as config.yaml has it."""
    extends: bool = False
    """Whether the config differs only in its length from the config of the run in the folder, finished or not."""
    passed_over: list[str] = field(default_factory=list)
    """The newest unfinished run of this name that has another config: its path, and a line for each difference."""
    finished_before: Path | None = None
    """The newest finished run of this name that is shorter, and whose config differs in nothing else."""

    @property
    def finished(self) -> bool:
        return (self.path / RESULT).exists()

    def result(self) -> dict[str, Any]:
        """The last figures of a finished run. Raises StorageError if they cannot be read."""
        file = self.path / RESULT
        remedy = "Remove it to finish the run again from its last checkpoint."
        with readable(f"{file}, which says that this run is finished, cannot be read", remedy):
            return read_json(file)

    def finish(self, result: dict[str, Any]) -> None:
        """Mark the run as finished, with its last figures. Raises StorageError."""
        self.write(RESULT, result)

    def write(self, name: str, value: Any) -> None:
        """Let rank 0 write a JSON file in the run's folder; see write_json()."""
        if self.lock is not None:
            write_json(self.path / name, value)

    def extend(self, config: dict[str, Any]) -> None:
        """Let rank 0 replace the run's config by `config` for the rest of the run. The earlier config and figures are
        kept as config-1.yaml and result-1.json, config-2.yaml and so on. Raises StorageError."""
        self.extends = False
        if self.lock is None:
            return
        number = 1 + sum(1 for _ in self.path.glob("config-*.yaml"))
        with writing(f"{self.path} cannot be written"):
            shutil.copyfile(self.path / "config.yaml", self.path / f"config-{number}.yaml")
            if self.finished:
                os.replace(self.path / RESULT, self.path / f"result-{number}.json")
            _write_config(self.path, config)

    def abandon(self) -> None:
        """Remove the folder if the run failed before its first metrics, so that the corrected command reuses it."""
        if self.lock is not None and not self.resumed and not (self.path / METRICS).exists():
            with contextlib.suppress(OSError):  # the folder stays if it has other files or the disk is gone
                for name in ("config.yaml", SETTING, EVIDENCE, ABOUT, environment.FILE, "energy.json", HOLDER, LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
                if self.path.parent == RUNS:
                    RUNS.rmdir()  # it stays if it has other runs

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file of a run, completely or not at all. Raises StorageError."""
    write_text(file, json.dumps(value, indent=1))


def write_text(file: Path, text: str) -> None:
    """Write a file of a run as write_json() does."""
    with writing(f"{file} cannot be written", "and the same command goes on from the last checkpoint"):
        replace_text(file, text)


Completed = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that adds the defaults of keys which a config of an earlier version lacks."""


def claim(
    name: str, folder: str | None, resume: str, config: dict[str, Any], completed: Completed = dict
) -> RunFolder:
    """Find this run's folder, lock it and write the complete `config` into it.

    Without `folder` the run's folder is runs/NAME, runs/NAME-2 and so on. resume: `auto` resumes the newest unfinished
    run of the same config or takes a new folder; `never` always takes a new folder; `must` fails if there is no run to
    resume. It is an error if `folder` has other contents than this run.
    """
    root = Path(os.path.expanduser(folder)) if folder else RUNS / name
    with _usable(root):
        if folder is None:
            return _claim_numbered(root, resume, config, completed)
        found = _open(root)
        if found is None:
            raise StorageError(
                f"{root} {ALIVE}{FolderLock(root).holder()}. Wait for it, or set run.dir to another folder."
            )
        try:
            return _claim_given(found, resume, config, completed)
        except (OSError, UserError):
            found.release()
            raise


def sweep_folder(root: Path, resume: str, config: dict[str, Any], completed: Completed = dict) -> Path:
    """The folder of one job of `fxtune -m`. It is the newest of ROOT, ROOT-2 and so on with a run of this config,
    finished or not. Without such a run, or with resume=never, it is the next free folder. So the same command
    continues where it stopped, and a command with other settings gets new folders. Raises StorageError."""
    with _usable(root):
        taken = {number: path for number, path in _existing(root).items() if (path / "config.yaml").exists()}
        for _, path in sorted(taken.items(), reverse=True) if resume != "never" else ():
            with contextlib.suppress(StorageError):  # an unreadable config counts as a different one
                if not differences(completed(read_config(path) or {}), config):
                    return path
    return _numbered(root, max(taken) + 1) if taken and resume != "must" else root


def _usable(root: Path) -> contextlib.AbstractContextManager[None]:
    return writing(f"The run folder {root} cannot be used", "or set run.dir to a folder that can be written")


def config_digest(config: dict[str, Any]) -> str:
    """A digest of the values that change the trained weights. Two configs with equal digests can resume one another's
    runs."""
    return hashlib.sha256(json.dumps(_learned(config), sort_keys=True).encode()).hexdigest()


def _claim_given(found: RunFolder, resume: str, config: dict[str, Any], completed: Completed) -> RunFolder:
    root = found.path
    before = read_config(root)
    if before is None:
        if resume == "must":
            raise ConfigError(f"run.resume=must, but {root} holds no run. Check run.dir, or use run.resume=auto.")
        if any((root / CHECKPOINTS).glob("step-*")):
            raise StorageError(
                f"{root} has checkpoints and no config.yaml, which says what run they are of. Bring it back, or set "
                "run.dir to a new folder."
            )
        return _start(found, config)
    if resume == "never":
        raise ConfigError(
            f"{root} already holds a run, and run.resume=never would write over it. "
            "Set run.dir to a new folder, or use run.resume=auto to go on with it."
        )
    completed_before = completed(before)
    if changed := differences(completed_before, config):
        found.extends = _differ_in_length(completed_before, config)
    if changed and not found.extends:
        raise ConfigError(
            f"{root} holds a run of another config, so it cannot go on with this one:\n"
            + "\n".join(changed)
            + "\nPut these back, or set run.dir to a new folder."
        )
    found.resumed, found.config = True, before
    return found


def _differ_in_length(before: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether two configs are equal, or differ only in the length of the run."""
    train = before.get("train") or {}
    length = {key: (config.get("train") or {}).get(key) for key in LENGTH}
    return isinstance(train, dict) and not differences({**before, "train": {**train, **length}}, config)


def _is_longer(before: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether `config` is `before` with more steps or epochs; null is no limit."""
    if before == config or not _differ_in_length(before, config):
        return False
    less, more = ([(each.get("train") or {}).get(key) or math.inf for key in LENGTH] for each in (before, config))
    numbers = all(isinstance(value, (int, float)) for value in less)  # an old file may hold anything
    return numbers and less != more and all(map(operator.le, less, more))


def _claim_numbered(root: Path, resume: str, config: dict[str, Any], completed: Completed) -> RunFolder:
    numbers = _existing(root)
    taken = max(numbers, default=0)  # earlier folders may have been deleted
    unlike, finished = list[str](), list[Path]()
    for number in sorted(numbers, reverse=True) if resume != "never" else ():
        path = numbers[number]
        try:
            before = read_config(path)
        except StorageError as error:
            unlike = unlike or [str(error)]
            continue
        if before is None:
            if any((path / CHECKPOINTS).glob("step-*")):
                unlike = unlike or [f"{path} has checkpoints, but its config.yaml is missing."]
            continue
        changed = differences(completed(before), config)
        if (path / RESULT).exists():
            finished += [path] * _is_longer(completed(before), config)
            continue
        if not changed:
            if found := _open(path):
                found.resumed, found.config = True, before
                return found
            raise StorageError(
                f"{path} has a run of this config and {ALIVE}{FolderLock(path).holder()}. Wait for it, or end it. "
                "run.resume=never starts another run."
            )
        unlike = unlike or ([f"{path}:", *changed] if changed else [])
    if resume == "must":
        raise ConfigError(
            f"run.resume=must, but no unfinished run of this config lies in {root}*."
            + ("\nThe newest unfinished one differs: " + "\n".join(unlike) if unlike else "")
        )
    while True:  # if two processes take the same number, mkdir fails in the slower process
        taken += 1
        path = _numbered(root, taken)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        found = _open(path)
        if found is not None:
            found.passed_over, found.finished_before = unlike, next(iter(finished), None)
            return _start(found, config)


def _existing(root: Path) -> dict[int, Path]:
    """The existing paths among ROOT, ROOT-2, ROOT-3 and so on, by number."""
    ours = re.compile(re.escape(root.name) + r"(?:-([1-9]\d*))?")
    return {int(match[1] or 1): path for path in root.parent.glob("*") if (match := ours.fullmatch(path.name))}


def _numbered(root: Path, number: int) -> Path:
    return root if number == 1 else root.with_name(f"{root.name}-{number}")


def _open(path: Path) -> RunFolder | None:
    path.mkdir(parents=True, exist_ok=True)
    require_own_files(path)
    lock = FolderLock(path)
    return RunFolder(path, resumed=False, lock=lock) if lock.acquire() else None


def _start(found: RunFolder, config: dict[str, Any]) -> RunFolder:
    _write_config(found.path, config)
    found.config = config
    return found


def _write_config(path: Path, config: dict[str, Any]) -> None:
    replace_text(path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def read_objective(path: Path) -> dict[str, Any]:
    """The options of the objective that the rows of the run in `path` have decided, such as the names of classes."""
    found = json_or_empty(path / ABOUT).get(OBJECTIVE)
    return found if isinstance(found, dict) else {}


def read_template_time(path: Path) -> str | None:
    """The time that chat templates wrote into the tokens of the run in `path`; None if the run has no tokens yet."""
    time = json_or_empty(path / ABOUT).get(TEMPLATE_TIME)
    return time if isinstance(time, str) else None


def read_trained_tokens(path: Path) -> list[str] | None:
    """The tokens that techniques.lora.train_tokens=auto chose when the run in `path` was started; None if it chose no
    tokens."""
    try:
        tokens = read_json(path / SETTING)["techniques"]["lora"]["train_tokens"]
    except (ValueError, LookupError, TypeError):
        return None
    return tokens if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens) else None


def read_config(path: Path, name: str = "config.yaml") -> dict[str, Any] | None:
    """The config of the run in `path`, or None if there is no run. Raises StorageError if it cannot be read."""
    file = path / name
    if not file.exists():
        return None
    remedy = "Bring it back, or set run.dir to a new folder."
    with readable(f"{file}, the config of the run there, cannot be read", remedy):
        if not file.is_file():
            raise ValueError("it is no regular file")
        text = file.read_text(encoding="utf-8")
        try:
            depth = 0
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if isinstance(event, yaml.AliasEvent) or depth > 24:  # these can make a few lines endless
                    line = event.start_mark.line + 1
                    raise ValueError(f"line {line} is not as fxtune writes it (an alias, or more than 24 levels)")
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
        if not isinstance(config, dict):
            raise ValueError("it is empty or no config")
    return config


def holds_run(path: Path) -> bool:
    return (path / "config.yaml").exists()


def metric_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of the run's metrics, in order. The run may be writing the last line. Raises
    StorageError if the file cannot be read."""
    file = path / METRICS
    if not file.exists():
        return
    with (
        readable(f"{file} cannot be read", "Change its permissions, or bring it back."),
        file.open(encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), dict):
                    yield row


def require_own_files(path: Path) -> None:
    """Raise StorageError if the run folder has a pipe or a device, which would block when opened, or a link that leads
    out of the folder. A link to checkpoints on another disk is allowed."""
    for entry in path.iterdir():
        if entry.is_symlink() and entry.name != CHECKPOINTS and not entry.resolve().is_relative_to(path.resolve()):
            raise StorageError(
                f"{entry} is a link to {entry.resolve()}, out of the run folder, and would be written to. Remove "
                "the link, or set run.dir to another folder."
            )
        if entry.name == CHECKPOINTS and not entry.exists():
            raise StorageError(
                f"{entry} is a link to {entry.readlink()}, which is not there. Mount that disk, or correct the link."
            )
        kinds = {FOLDER} if entry.name == CHECKPOINTS else {FILE} if entry.suffix in _FILES else {FILE, FOLDER}
        if (kind := kind_of(entry)) not in {None, *kinds}:
            raise StorageError(
                f"{entry} is {kind}, and a run has something else there. Remove it, or set run.dir to another folder."
            )


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each different key that changes the trained weights: `  optimizer.lr: 0.0002 -> 0.0001`."""
    old, new = _learned(before), _learned(now)
    return [
        f"  {key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    ]


def _learned(config: Any, prefix: str = "") -> dict[str, Any]:
    """The values of `config` by dotted key, without the keys of FREE_ON_RESUME."""
    if any(f"{prefix}.".startswith(f"{free}.") for free in FREE_ON_RESUME):
        return {}
    if not isinstance(config, (dict, list)):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, inner in config.items() if isinstance(config, dict) else enumerate(config):
        flat |= _learned(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
