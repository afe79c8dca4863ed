"""Checks that a resumed run has the same decisions for each `auto`, base weights, data and machine as at its start.

run_folder.py compares the recipe. Everything else that affects the run is written to `setting.json` when the run
starts, and compared when it resumes. So a resumed run ends with the same bits as an uninterrupted one:

- Each `auto` keeps its decision: a card with less free memory today would decide differently.
- With other files of the base model or other tokens of a source the run is refused, with a line for each difference.
- Another card, torch or package version may round differently: a note, or with run.deterministic=true a refusal.

A run without a checkpoint starts again, so nothing is compared. Before all this, the ranks compare their recipes, and
rank 0 finds the run's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from fxtune.checkpoint import folder as checkpoint_folder
from fxtune.checkpoint.run_folder import (
    CHECKPOINTS,
    HOW_TO_START_ANEW,
    SETTING,
    RunFolder,
    claim,
    differences,
    write_json,
)
from fxtune.config.root import Config, completed
from fxtune.config.validate import Validator
from fxtune.data.config import DataConfig
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.launch import require_equal_parts
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, readable
from fxtune.facts.options import AUTO, Techniques
from fxtune.facts.run import Facts
from fxtune.models.load import Init, ModelConfig
from fxtune.models.prepared import PreparedModel
from fxtune.optim.config import OptimizerConfig, OptimizerName, library
from fxtune.system.files.atomic_files import read_json
from fxtune.tracking import worker
from fxtune.training.builder import RunBuilder

SAMPLES = 64
"""How many 4 KiB blocks of a weights file are hashed, together with its size. Hashing a whole file of 16 GB would take
a minute."""
BLOCK = 4096
CAUSES = {"data": ", its rows, the tokenizer or the chat template"}
TRACKERS = {tracker.package for tracker in worker.TRACKERS.values()}
"""Packages of trackers. They do not affect numbers."""
DRAWS = {"draws": "one seed a weight"}
"""The entry in setting.json that says how stochastic rounding draws its random bits."""
Options = TypeVar("Options")


class ResumeCheck:
    """The check of the run in `folder`. `resumes`: whether the run has a checkpoint. If so, `setting.json` is read and
    not written.

    Raises StorageError if `setting.json` exists and cannot be read.
    """

    def __init__(
        self, folder: Path, resumes: bool, strict: bool, note: Callable[[str], None], writes: bool = True
    ) -> None:
        """`writes`: whether this rank writes `setting.json`."""
        self.folder, self.strict, self.note, self.writes = folder, strict, note, writes
        self.now: dict[str, dict[str, str]] = {}
        self.before: dict[str, Any] = {}
        if resumes and (folder / SETTING).exists():
            with readable(
                str(folder),
                "It holds the run's decision for each `auto` and the fingerprint of its data. Restore it; or remove "
                "it, and the run resumes without this comparison.",
            ):
                self.before = read_json(folder / SETTING)

    def earlier_decisions(self, configured: Options, today: Options) -> Options | None:
        """`configured` with each `auto` as decided when the run started; None if `today`, with today's decisions, is
        the same.

        The folder may come from a stranger. So explicit values of the recipe are kept, and a recorded value that no
        recipe may have raises StorageError.
        """
        changes = {}
        recorded = self._section("techniques")
        for entry in dataclasses.fields(configured) if recorded else ():  # type: ignore[arg-type]
            technique = getattr(configured, entry.name)
            if technique.enabled == AUTO and entry.name not in recorded:  # the technique could not act at the start
                changes[entry.name] = dataclasses.replace(technique, enabled=False)
        for name, was in recorded.items():
            technique, decided = getattr(configured, name, None), getattr(today, name, None)
            if not dataclasses.is_dataclass(technique) or isinstance(technique, type) or not isinstance(was, dict):
                continue
            if "auto" not in _as_json(list(dataclasses.asdict(technique).values())):
                continue
            decisions = {key: _as_json(getattr(decided, key)) for key in was if hasattr(technique, key)}
            different = {
                key: self._parse_recorded(name, technique, key, was[key])
                for key, value in decisions.items()
                if value != was[key]
            }
            if different:
                changes[name] = dataclasses.replace(technique, **different)
                # Some values are decided on the built model. They are still `auto` today.
                aside = {key: f" (today it would be {now})" * (now != AUTO) for key, now in decisions.items()}
                values = (f"{key}={was[key]}{aside[key]}" for key in different)
                self.note(f"{name}: as when the run was started, {', '.join(values)}")
        return dataclasses.replace(configured, **changes) if changes else None  # type: ignore[type-var]

    def earlier_rows(self, data: DataConfig) -> DataConfig:
        """`data` with each `auto` decided as when the run started."""
        rows = self._section("rows")
        if data.share_prompts == AUTO and self.before:  # runs of earlier versions shared no prompts
            data = dataclasses.replace(data, share_prompts=rows.get("share_prompts") is True)
        packing, buckets = rows.get("packing"), rows.get("buckets", [])
        if data.packing != AUTO or not isinstance(packing, bool):
            return data
        if not isinstance(buckets, list) or not all(type(length) is int and length > 1 for length in buckets):
            raise StorageError(f"{self.folder / SETTING}: rows.buckets={buckets} are no lengths. Restore the file.")
        return dataclasses.replace(data, packing=packing, buckets=buckets)

    def earlier_rate(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """`optimizer` with the learning rate that was decided when the run started. `optimizer`: has lr=auto."""
        rate = self._section("rate").get("lr")
        if rate is None:  # setting.json was removed
            return optimizer
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise StorageError(f"{self.folder / SETTING}: rate.lr={rate} is no learning rate. Restore the file.")
        self.note(f"optimizer.lr: {rate:g}, as auto chose it when the run was started")
        return dataclasses.replace(optimizer, lr=rate)

    def earlier_threads(self) -> int | None:
        """The number of CPU threads at the run's start, because sums depend on this number. None for a new run, or on
        a GPU."""
        threads = str(self._section("machine").get("threads", ""))
        return int(threads) if threads.isdecimal() else None

    def earlier_determinism(self, wanted: Any, run: Any) -> bool | None:
        """Whether the kernels of a resumed run are deterministic; None for a new run. `wanted`: today's
        run.deterministic; `run`: the section `run` of the config at the run's start. Raises ConfigError if the recipe
        now asks for other kernels."""
        if not self.before:
            return None
        asked = run.get("deterministic") if isinstance(run, dict) else None
        first = asked if isinstance(asked, bool) else self._section("kernels").get("deterministic") is True
        if wanted not in (AUTO, first):
            raise ConfigError(
                f"run.deterministic={str(wanted).lower()}: {self.folder} was started with "
                f"{'' if first else 'non'}deterministic kernels and goes on with them. Set it to auto, or start anew "
                f"with {HOW_TO_START_ANEW}."
            )
        return first

    def _parse_recorded(self, name: str, technique: Any, key: str, value: Any) -> Any:
        """A recorded value, converted to the type of the technique's field, because JSON has no enums."""
        validator = Validator(type(technique), lambda _: str(self.folder / SETTING))
        if (slot := validator.find((key,))) is not None:
            validator.check(slot, value, ("techniques", name, key))
        if validator.problems:
            raise StorageError(
                f"{validator.problems[0]}. Use the version of fxtune that the run was started with, or restore "
                "the file as it was."
            )
        kind = type(getattr(technique, key))
        return kind(value) if issubclass(kind, Enum) else value

    def check_config(
        self, model: ModelConfig, optimizer: OptimizerConfig, techniques: Mapping[str, Any], facts: Facts
    ) -> None:
        """compare() everything that is known before rows and weights are read. `techniques`: the options of the
        enabled techniques."""
        self._compare_techniques(techniques)
        if optimizer.name is OptimizerName.adamw_8bit:
            self.compare("optimizer", {"library": library(optimizer, facts)})
        if optimizer.stochastic_rounding:
            self.compare("rounding", DRAWS, refuse=False)
        self.compare("model", {"dtype": facts.dtype, **_weight_digests(model)})
        # What rounding depends on: the device, torch and its threads, and the packages that compute.
        machine = {
            "device": facts.device_name if facts.device == "cuda" else "cpu",
            **({"threads": str(torch.get_num_threads())} if facts.device == "cpu" else {}),
            **{package: version for package, version in facts.packages.items() if package not in TRACKERS},
            "torch": torch.__version__,
        }
        self.compare("machine", machine, refuse=False)

    def check_data(self, tables: Iterable[TokenTable], rate: float | None) -> None:
        """compare() the tokens of each training source, and the learning rate if it is `auto` in the recipe."""
        self.compare("data", describe_tables(tables))
        if rate is not None:
            self.compare("rate", {"lr": rate})

    def _compare_techniques(self, options: Mapping[str, Any]) -> None:
        """compare() the options of the enabled techniques."""
        self.compare("techniques", options, defaults=_as_json(dataclasses.asdict(Techniques())))

    def compare(
        self,
        section: str,
        now: Mapping[str, Any],
        refuse: bool = True,
        defaults: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Compare a section with its values at the start of the run, and keep its values for setting.json. Raises
        ConfigError with each difference. Without `refuse` it prints a note instead, unless the recipe has
        run.deterministic=true.

        `defaults`: values by technique for options that setting.json lacks. It lacks options that the version of
        fxtune at the run's start did not know.
        """
        self.now[section] = _as_json(dict(now))
        before = {
            key: {**defaults[key], **value} if key in defaults and isinstance(value, dict) else value
            for key, value in self._section(section).items()
        }
        changed = differences({section: before}, {section: self.now[section]}) if before else []
        if changed and (refuse or self.strict):
            why = CAUSES.get(section, "") if refuse else " (with run.deterministic=true it must not)"
            raise ConfigError(
                f"{self.folder} cannot be resumed with the same bits: its {section} changed since it was "
                f"started{why}:\n"
                + "\n".join(changed)
                + f"\nRestore it as it was, or start anew with {HOW_TO_START_ANEW}."
            )
        if changed:
            self.note(
                "Since the run was started this changed, so its figures may differ in their last digits from here on: "
                + "; ".join(line.strip() for line in changed)
            )

    def check_model(self, model: PreparedModel, techniques: Mapping[str, Any]) -> None:
        """compare() the built model. At the start of a run it writes `setting.json`. Raises StorageError."""
        self._compare_techniques(techniques)  # again: an automatic choice changes if it fails to compile
        self.compare("built", {"revision": model.base_revision})
        self.compare("products", {"by": model.gemm or "torch"}, refuse=False)
        if not self.before and self.writes:
            write_json(self.folder / SETTING, self.now)

    def _section(self, name: str) -> dict[str, Any]:
        section = self.before.get(name)
        return section if isinstance(section, dict) else {}


def describe_tables(tables: Iterable[TokenTable]) -> dict[str, str]:
    """A summary of the tokens of each training source, as setting.json stores it."""
    return {
        f"{number} {table.name}": f"{len(table):,} documents, {table.fingerprint[:16]}"
        for number, table in enumerate(tables)
    }


def _weight_digests(model: ModelConfig) -> dict[str, str]:
    """A digest of each weights file of a local base model, from the file's size and samples of its content. Raises
    StorageError if a file cannot be read. For a model from the hub, check_model() compares the revision."""
    digests = {}
    local = model.path and model.init is not Init.random and Path(os.path.expanduser(model.path))
    for file in sorted(local.glob("*.safetensors")) if local else ():
        with readable(f"{file} cannot be read", "Use a complete copy of the model."), file.open("rb") as stream:
            size = file.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            for number in range(SAMPLES):
                stream.seek(max(size - BLOCK, 0) * number // (SAMPLES - 1))
                digest.update(stream.read(BLOCK))
        digests[file.name] = digest.hexdigest()[:16]
    return digests


def _as_json(value: Any) -> Any:
    """`value` as it would be after writing it to JSON and reading it back."""
    return json.loads(json.dumps(value, default=str))


def require_same_recipe(world: World, recipe: dict[str, Any]) -> None:
    """Raise ConfigError if the ranks were started with different recipes."""
    if world.size > 1:
        for rank, other in enumerate(world.gather(recipe, "comparing recipes")):
            if lines := differences(other, recipe):
                raise ConfigError(
                    f"The recipe of rank {world.rank} differs from the recipe of rank {rank}:\n"
                    + "\n".join(lines)
                    + "\nStart all ranks with the same command and files."
                )


def claim_folder(world: World, config: Config, recipe: dict[str, Any]) -> RunFolder:
    """Find the run's folder. Rank 0 finds and locks it; the other ranks get its path."""
    run = config.run

    def work() -> RunFolder | None:
        return claim(run.name, run.dir, run.resume.value, recipe, completed) if world.main else None

    claimed = world.main_first(work, "waiting for rank 0 to find the run folder")
    path, resumed, before, extends = world.broadcast(
        (claimed.path, claimed.resumed, claimed.config, claimed.extends) if claimed else (Path(), False, {}, False)
    )
    return claimed or RunFolder(path, resumed, None, before, extends)


def build_for_run(config: Config, folder: RunFolder, note: Callable[[str], None]) -> tuple[RunBuilder, ResumeCheck]:
    """The builder of the run in `folder`, and the check that a resumed run is the same run. In a resumed run each
    `auto` keeps its decision from the start."""
    resumes = folder.resumed and any(checkpoint_folder.paths(folder.path / CHECKPOINTS))
    check = ResumeCheck(folder.path, resumes, config.run.strict, note, writes=folder.lock is not None)
    undecided = config.data.packing == AUTO
    shares = config.data.share_prompts == AUTO
    if resumes:
        config = dataclasses.replace(config, data=check.earlier_rows(config.data))
    if resumes and config.optimizer.lr == AUTO:
        config = dataclasses.replace(config, optimizer=check.earlier_rate(config.optimizer))
    first = check.earlier_threads(), check.earlier_determinism(config.run.deterministic, folder.config.get("run"))
    builder = RunBuilder(config, False, *first)
    # This is checked only for runs, because other commands use one rank.
    if reasons := list(config.parallel.degree_refusals(builder.world.degrees)):
        raise ConfigError("\n".join(reasons))
    require_equal_parts(builder.world.degrees, config.train.micro_batches)
    if techniques := check.earlier_decisions(config.techniques, builder.techniques):
        builder = RunBuilder(dataclasses.replace(config, techniques=techniques), False, *first)
    builder.keeps_decisions = bool(check.before)
    data, rows = builder.config.data, dict[str, Any]()
    if undecided:
        rows |= {"packing": data.packing, "buckets": list(data.buckets)}
    if shares and data.shares_prompts:
        rows["share_prompts"] = True
    if rows:
        check.compare("rows", rows)
    if plugins := config.plugins():
        check.compare("plugins", plugins)
    check.compare("kernels", {"deterministic": builder.facts.deterministic})
    if builder.techniques.quantize.enabled:  # this depends on the free memory
        check.compare("quantize", {"keeps_transposes": builder.techniques.quantize.keeps_transposes}, refuse=False)
    check.check_config(config.model, config.optimizer, builder.techniques.options(), builder.facts)
    return builder, check
