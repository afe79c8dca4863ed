"""Refreshes a run, from drift to promotion. lineage.json keeps each decision, so that a killed refresh can go on."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from fxtune import __version__
from fxtune.checkpoint.lineage import Lineage, open_lineage
from fxtune.checkpoint.run_folder import RESULT
from fxtune.config import compose
from fxtune.config.root import Config
from fxtune.config.validate import TRUST
from fxtune.data.tokenized.profile import PERCENTILES, Profile
from fxtune.distributed.launch import launch
from fxtune.errors import ConfigError, Ended, readable, writing
from fxtune.models.load import ModelConfig, starting_from
from fxtune.objectives.base import GroupObjective
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.reference import Reference
from fxtune.outputs.refresh_data import RefreshData
from fxtune.outputs.run_output import ADAPTER_FILE, run_folder
from fxtune.settle.ranks import ranks_of
from fxtune.system.files.atomic_files import replace_text
from fxtune.system.terminal.console import say, table
from fxtune.system.terminal.redact import redact, redact_arguments

PROMOTED, NO_DRIFT, REJECTED, REPLACED = "promoted", "no drift", "rejected", "replaced"
DRIFT, TRAINING, PROMOTING, LEFT = "drift", "training", "promoting", "left"
"""The decisions in lineage.json. PROMOTED, NO_DRIFT and REJECTED are final. An unfinished refresh has DRIFT, TRAINING
or PROMOTING. It gets LEFT when another refresh begins. The command also answers REPLACED, which the file never has."""
FREE = ("sources", "workers", "cache_dir", "questions", "general", "mix", "on_bad_row")
"""Keys of `data` that a refresh may set. The other keys define the old rows."""
DECIDED = {
    "run.dir": "the folder is beside the run's folder",
    "run.resume": "the same command goes on by itself",
    **dict.fromkeys(("model.path", "model.revision", "model.init"), "a refresh takes the run's model"),
    "model.adapter": "a refresh takes the run's adapter",
    "train.epochs": "refresh.epochs says how long it trains",
    "train.max_steps": "refresh.epochs says how long it trains",
    "train.pause_after": "a refresh trains to the end",
    "train.eval_every": "a refresh evaluates 20 times, for early stopping",
    "train.stop.metric": "a refresh stops by the held-out loss, which its gate compares",
    **dict.fromkeys(("run.export", "checkpoint.keep_best"), "a refresh exports its best evaluation"),
}
"""Keys that a refresh decides, and why."""
SCRIPTS = 3
"""Number of scripts in the table of old and new rows."""


def refresh(
    run: str, overrides: Sequence[str], force: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Refresh `run` with `overrides`, and return the entry of lineage.json, with its decision.

    Raises ConfigError if the run does not exist or is not finished, and for keys that a refresh decides; DataError if
    the rows cannot be used; and the errors of a run.
    """
    _check(overrides)
    lineage = open_lineage(run_folder(run))
    try:
        return _Refresh(lineage, list(overrides), force, trust_remote_code).decide()
    finally:
        lineage.release()


def _check(overrides: Sequence[str]) -> None:
    """Raise ConfigError for keys that a refresh decides, and if no new rows are named."""
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    if not any(key == "data.sources" for key in keys):
        raise ConfigError("fxtune refresh needs the new rows: refresh RUN 'data.sources=[{path: new.jsonl}]'")
    for key in keys:
        if key in DECIDED:
            raise ConfigError(f"`{key}` cannot be set here: {DECIDED[key]}.")
        section, _, name = key.partition(".")
        if key in ("recipe", "data", "model") or (section == "data" and name.split(".")[0] not in FREE):
            raise ConfigError(f"`{key}` cannot be set here: a refresh reads its rows, old and new, as the run did.")


class _Refresh:
    def __init__(self, lineage: Lineage, overrides: list[str], force: bool, trust: bool) -> None:
        self.lineage, self.overrides, self.force, self.trust = lineage, overrides, force, trust
        self.kind = "adapter"
        """`adapter` or `model`: what the run has exported, and the name of its folder in the run."""

    def decide(self) -> dict[str, Any]:
        """Do what remains of the refresh. Returns the entry of lineage.json, with its decision."""
        lineage, last = self.lineage, self._last()
        if last.get("decision") == PROMOTING:
            self._promote(last)
        parent = lineage.serving
        before, config = self._configs(parent)
        data = RefreshData(parent, before.data, config, self._start(config))
        key = {
            "parent": os.path.relpath(parent, lineage.folder),
            self.kind: _digest(parent / self.kind),
            "data": data.digests(),
            "keys": redact_arguments([text for text in self.overrides if not text.startswith("data.sources=")]),
        }
        served = last.get("decision") == PROMOTED and lineage.serving == self._candidate(last)
        if served and all(last.get(name) == key[name] for name in ("data", "keys")):
            say(f"{parent} was promoted with these rows already.")
            return last
        if not len(data.unknown) and not self.force:
            say(f"All {data.known:,} {data.noun} of data.sources are known to {parent}: there is nothing new in them.")
            return {**key, "decision": NO_DRIFT, "known_documents": data.known}
        data.require_enough(parent)
        if not self.force and not key.items() <= last.items():  # another refresh may have been tested since
            tested = (old for old in reversed(lineage.refreshes) if old.get("decision") in (NO_DRIFT, REJECTED))
            last = next((old for old in tested if key.items() <= old.items()), last)
        entry, decided = last, last.get("decision")
        if {name: last.get(name) for name in key} != key or decided == LEFT:
            entry = self._begin(key, data, parent)
        elif decided in (DRIFT, TRAINING):
            say(f"Refresh {entry['number']} goes on.")
        elif decided == PROMOTED and self.force:
            entry = self._begin(key, data, parent)
        elif decided == PROMOTED:
            say(
                f"run-{entry['number']} was promoted with these rows and does not serve any more: {parent} does. "
                "--force trains with them again."
            )
            return {**entry, "decision": REPLACED}
        else:
            say(f"Refresh {entry['number']} has tested these rows already.")
        if entry["decision"] == DRIFT or (entry["decision"] == NO_DRIFT and self.force):
            self._prepare(entry, data, parent)
        if entry["decision"] == TRAINING:
            self._train(entry, config)
            self._judge(entry, data, parent)
        drift = entry["drift"]
        say(
            f"{'Drift' if drift['found'] else 'No drift'}: the loss on the new rows is {drift['new_loss']:.4f}, and "
            f"{drift['old_loss']:.4f} on the old held-out rows; p = {drift['p']:.2g} (permutation test; drift is p up "
            f"to refresh.alpha={config.refresh.alpha:g})."
        )
        if not config.objective.needs.reads_groups and not isinstance(config.objective, CausalLM):
            say(f"These losses are of the rows' text; a refresh does not test the loss of {config.objective.name}.")
        if "gate" in entry:
            _say_gate(entry, config, data.noun)
        return entry

    def _last(self) -> dict[str, Any]:
        return self.lineage.refreshes[-1] if self.lineage.refreshes else {}

    def _candidate(self, entry: dict[str, Any]) -> Path:
        """The folder of the run that an entry trains."""
        return self.lineage.folder / f"run-{entry['number']}"

    def _configs(self, parent: Path) -> tuple[Config, Config]:
        """(the config of the run that serves, the same config with the command's keys)."""
        if not parent.is_dir():
            link = self.lineage.folder / "current"
            raise ConfigError(
                f"{parent}, to which {link} leads, is not there any more. Bring it back, or replace the link."
            )
        before = compose.of_run(parent, self.trust)
        if not (parent / RESULT).exists():
            raise ConfigError(f"{parent} is not finished, so it cannot be refreshed. Give its command again first.")
        self.kind = "adapter" if before.techniques.lora.enabled else "model"
        weights = parent / self.kind
        if not (weights / (ADAPTER_FILE if self.kind == "adapter" else "config.json")).exists():
            raise ConfigError(f"{weights} is gone, so {parent} cannot be refreshed. Bring it back.")
        config = compose.of_run(parent, self.trust, self.overrides)
        if config.techniques.lora.enabled != before.techniques.lora.enabled:
            raise ConfigError(f"`techniques.lora.enabled` cannot be set here: {parent} has exported its {self.kind}.")
        if config.objective.needs.reads_groups and not isinstance(config.objective, GroupObjective):
            raise ConfigError(
                f"{parent} learns from groups of documents (objective={config.objective.name}), and a refresh "
                "compares models by the loss of each group. This objective gives only the sum over groups. Train "
                "a new run on old and new rows, with model.adapter or model.path as its start."
            )
        if config.data.mix.long_share is not None:
            raise ConfigError(
                f"{parent} mixes short and long documents (data.mix), and a refresh mixes old and new rows. Set "
                "data.mix.long_share=null to mix by these alone."
            )
        config.model = starting_from(config.model, weights)
        config.data.length_schedule = []  # the model has been trained on the longest rows already
        return before, config

    def _start(self, config: Config) -> ModelConfig:
        """The reference that an objective with a reference compares both models with. It is the reference of the
        lineage's first run, so that the losses of all refreshes have one scale."""
        objective, first = config.objective, self.lineage.first
        if not objective.needs.reference:
            return config.model
        if not first.is_dir():
            raise ConfigError(
                f"{first} is gone, and objective={objective.name} compares the old and the new model with the model "
                "that this run started from. Bring it back, or train a new run on old and new rows."
            )
        begun = compose.of_run(first, self.trust)
        if begun.techniques.lora.enabled and getattr(begun.objective, "reference", None) is Reference.base:
            return dataclasses.replace(begun.model, adapter=None)
        return begun.model

    def _begin(self, key: dict[str, Any], data: RefreshData, parent: Path) -> dict[str, Any]:
        """Test for drift, and add an entry with the figures to the lineage."""
        lineage, last = self.lineage, self._last()
        if last.get("decision") in (DRIFT, TRAINING):
            last["decision"] = LEFT
            say(f"{self._candidate(last)}, which was begun with other rows or keys, is left as it is.")
        old, new = data.profiles()
        entry = {
            "number": lineage.next_number(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "fxtune": __version__,
            **key,
            "known_documents": data.known,
        }
        if data.known:
            say(f"{data.known:,} {data.noun} of data.sources are known to the run, and are left out.")
        drift = data.drift(parent / self.kind)
        entry["drift"] = {**dataclasses.asdict(drift), "token_distance": old.distance(new)}
        entry["decision"] = DRIFT if drift.found else NO_DRIFT
        say(_drift_table(entry["drift"], old, new, data.noun))
        lineage.refreshes.append(entry)
        lineage.save()
        return entry

    def _prepare(self, entry: dict[str, Any], data: RefreshData, parent: Path) -> None:
        """Write the new rows and the recipe of the run that learns from them."""
        folder, name = self.lineage.folder, self._candidate(entry).name
        rows = data.write_new_rows(folder, name)
        config = data.candidate(parent / self.kind, self._candidate(entry), rows)
        values = redact(compose.as_recipe(config)[0])
        text = f"# The run of refresh {entry['number']} of {parent}\n# @package _global_\n"
        with writing(f"{folder / name}.yaml cannot be written"):
            replace_text(folder / f"{name}.yaml", text + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        entry["decision"] = TRAINING
        self.lineage.save()

    def _train(self, entry: dict[str, Any], config: Config) -> None:
        """Start or resume the run of an entry, and train to its end. `config`: the second config of _configs()."""
        if (self._candidate(entry) / RESULT).exists():
            return
        words = [
            compose.path_override("+recipe", self._candidate(entry).with_suffix(".yaml")),
            compose.path_override("run.dir", self._candidate(entry)),
            *(text for text in self.overrides if text.startswith("data.cache_dir=")),
            *(word for word in compose.as_recipe(config)[1] if TRUST in word),
        ]
        config = compose.load(words)
        gc.collect()  # frees the model that the drift was measured with
        if ranks_of(config) > 1:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the ranks need the memory that the tests took
            if code := launch(ranks_of(config), ["train", *words]):
                raise Ended(code)
        else:
            from fxtune.training import trainer

            trainer.run(config)

    def _judge(self, entry: dict[str, Any], data: RefreshData, parent: Path) -> None:
        """Compare the old and the new model. If the new model passes the gate, it serves from now on."""
        gate = data.gate(parent / self.kind, self._candidate(entry) / self.kind)
        entry["gate"] = dataclasses.asdict(gate)
        entry["decision"] = PROMOTING if gate.passed else REJECTED
        self.lineage.save()
        if gate.passed:
            self._promote(entry)

    def _promote(self, entry: dict[str, Any]) -> None:
        self.lineage.serve(self._candidate(entry))
        entry["decision"] = PROMOTED
        self.lineage.save()


def _digest(weights: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(weights.glob("*.safetensors")):
        with readable(f"{weights} cannot be read", "Use a complete run."), file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def _drift_table(drift: dict[str, Any], old: Profile, new: Profile, noun: str) -> Any:
    rows = [
        [noun, f"{drift['old_documents']:,}", f"{drift['new_documents']:,}"],
        [f"loss, mean over {noun}", f"{drift['old_loss']:.4f}", f"{drift['new_loss']:.4f}"],
        [f"tokens ({', '.join(f'{percentile} %' for percentile in PERCENTILES)})", *map(_lengths, (old, new))],
        ["supervised", f"{old.supervised:.0%}", f"{new.supervised:.0%}"],
        ["scripts of the letters", *map(_scripts, (old, new))],
        ["distance of the token distributions", "", f"{drift['token_distance']:.2f}"],
    ]
    return table("Old held-out rows and new rows", ["", "old", "new"], rows)


def _lengths(of: Profile) -> str:
    return ", ".join(f"{length:,}" for length in of.lengths)


def _scripts(of: Profile) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in list(of.scripts.items())[:SCRIPTS])


def _say_gate(entry: dict[str, Any], config: Config, noun: str) -> None:
    gate, alpha, bound, gain = entry["gate"], config.refresh.alpha, config.refresh.bound, config.refresh.gain
    shown = {
        "old": f"less than {bound:g} worse: p = {gate['p_kept']:.2g}",
        "new": f"better by more than {gain:g}: p = {gate['p_better']:.2g}",
    }
    rows = [
        [f"{side} held-out rows", f"{gate[f'{side}_documents']:,}", *map("{:.4f}".format, gate[f"{side}_loss"]), text]
        for side, text in shown.items()
    ]
    if losses := gate.get("general_loss"):  # early versions of fxtune did not measure it
        bound_there = "" if config.refresh.forgotten is None else f"at most {config.refresh.forgotten:g} worse"
        rows.append(["general text", "", *(f"{loss:.4f}" for loss in losses), bound_there])
    columns = ["", noun, "old model", "new model", f"shown at refresh.alpha={alpha:g}"]
    unit = f"mean loss of the {noun}" if config.objective.needs.reads_groups else "loss per token"
    say(table(f"Old and new model, {unit}", columns, rows))
    if entry["decision"] == PROMOTED:
        say(f"Promoted: run-{entry['number']} serves now.")
        return
    reasons = [
        reason
        for reason, p in (
            (f"it is not shown to be less than {bound:g} worse on the old rows", gate["p_kept"]),
            (f"it is not shown to be better on the new rows by more than {gain:g}", gate["p_better"]),
        )
        if p > alpha
    ]
    if gate.get("forgot"):
        reasons.append(
            f"its loss on general text rose by more than refresh.forgotten={config.refresh.forgotten:g} (general rows "
            "among data.sources or a smaller optimizer.lr move it less)"
        )
    say(f"Rejected: {'; '.join(reasons)}. Nothing is replaced.")
