"""`fxtune new`: a recipe for the user's rows on a card, with reasons for its keys."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser

from fxtune.config import compose, discovery
from fxtune.config.needs import NEEDS
from fxtune.config.overrides import ChoiceKind, unquoted
from fxtune.config.root import Config
from fxtune.data.batches.epochs import EpochStream, StreamSettings
from fxtune.data.batches.segments import Side, is_on_side
from fxtune.data.config import AUTO, Dedup, SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.table import TokenTable
from fxtune.drafts import recipe
from fxtune.drafts.rows import MOST_ROWS, Rows, spread
from fxtune.errors import ConfigError, StorageError, writing
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer, with_shipped_config
from fxtune.models.shipped import shipped_configs
from fxtune.objectives.registry import OBJECTIVES
from fxtune.system.machine.facts import MachineFacts, installed_packages
from fxtune.system.machine.packages import PACKAGES
from fxtune.system.terminal.units import GIB, counted
from fxtune.training.data.run_data import rows_to_read
from fxtune.training.forecast.run_forecast import RunForecast, forecast_run

EPOCHS = ((1_000, 3), (10_000, 2))
"""(a number of rows, epochs for files with fewer rows). Larger files get 1 epoch."""
STEPS = 100
"""A run should have at least this many steps. A step has 32 documents, or fewer to reach this number."""
ROOM = 0.9
"""The share of the card's free memory that a proposed micro-batch may take."""
HELD_OUT = 200
"""Rows to hold out. The share is at least 2 % and at most 10 % of all rows."""
QUESTIONS = 20
BUNDLES = (["lora", "fast"], ["qlora", "fast"])
"""Techniques to try: the fastest first, the smallest in memory last."""
HEAD_RATE, TINY_HEAD_RATE = 1.0e-4, 2.0e-3
"""The learning rates of LoRA with a head for classes, ranks or vectors: TRL's default for reward models
(docs/reward_models.md); and for the models that ship with fxtune, between the rates of their recipes."""
LEAST_QUERIES = 16
"""A step has about this many queries or more: each has to find its positive among the positives of the step."""
MODELS_DATE = "2026-11-28"
TEXT_MODELS = (
    *("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"),
)
"""Chat models of one family, the largest first, with an open licence and no gate. Their configs ship with fxtune
(models/shipped.py)."""
IMAGE_MODELS = (
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3-VL-2B-Instruct",
)
TINY_MODELS = {False: "builtin:tiny", True: "builtin:tiny-vision"}
"""{whether rows have images: the model to propose without a GPU}."""


@dataclass
class Draft:
    """A recipe in the making: {key: value} and {key: reason}. A key that is there stays: the user gave it."""

    keys: dict[str, Any]
    reasons: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """What the user should know of the rows, for the screen."""

    def set(self, key: str, value: Any, why: str = "") -> None:
        self.keys.setdefault(key, value)
        if why:
            self.reasons.setdefault(key, why)


def given(source: dict[str, Any], model: str | None, overrides: list[str]) -> tuple[Draft, Config]:
    """(a draft with the keys in `overrides`, the config with which rows are read). `source`: the entry of
    data.sources. `model`: a hub id or a folder, or None. Raises ConfigError."""
    choices = compose.prepare(overrides)
    kinds = (ChoiceKind.group, ChoiceKind.key)
    if wrong := [choice.text for choice in choices if choice.kind not in kinds or choice.key == "data.sources"]:
        raise ConfigError(f"`{wrong[0]}`: `fxtune new` takes keys and groups, and data.sources.0.KEY of its rows.")
    parse, later = OverridesParser.create().parse_override, {need.key for need in NEEDS}
    sections = ("data", "model", "objective")  # the other keys may need what is guessed from the rows
    now = [choice.text for choice in choices if choice.key.split(".")[0] in sections and choice.key not in later]
    config = _config({"data.sources": [source]}, now)
    keys = {choice.key: unquoted(parse(choice.text).value()) for choice in choices}
    config.model.path = model or (config.model.path if {"model", "model.path"} & keys.keys() else None)
    keys = {key: value for key, value in keys.items() if not key.startswith("data.sources.")}
    return Draft(keys, dict.fromkeys(keys, "as the command says")), config


def draft(found: Draft, name: str, rows: Rows, model: ModelConfig, card: MachineFacts) -> tuple[Rows, TokenTable]:
    """Fill `found`, a recipe for `rows`. Returns (the rows in the format in which the recipe reads them, their
    documents). If `model` has no path, the recipe has the largest model below that fits `card`.

    Raises ConfigError if no model fits, and the errors of reading the rows and the model.
    """
    if rows.objective != "causal_lm":
        found.set("objective", rows.objective, f"rows of {rows.format.name}")
    chosen = replace(model, path=model.path or _model(rows, card))
    rows = rows.as_chats(load_tokenizer(chosen))
    table = rows.tokenized(chosen)
    # A group has a row, and is packed whole. Answers may have a row each.
    lengths = np.diff(table.offsets if rows.format.answers else table.by_group.offsets)
    config, noun = _section_config(found, "objective", "sampler"), rows.format.noun
    if config.objective.needs.rollouts:
        lengths, noun = lengths + config.sampler.max_tokens, f"{noun}, each with sampler.max_tokens for its answer,"
    found.set("data.sequence_length", *_length(lengths, chosen, noun))
    if rows.format.answers:
        found.set("data.on_long", "truncate", "the beginning of a long prompt is cut, never an answer")
    elif rows.format.is_group and lengths.max() > found.keys["data.sequence_length"]:
        found.set("data.on_long", "drop", "a group is never cut")
    _data(found, name, rows, table, chosen)
    _fit(found, chosen, card, model.path is None, _training(found, name, rows, table, chosen))
    return rows, table


def _section_config(found: Draft, *sections: str) -> Config:
    """The config of these sections of a draft, and of defaults."""
    return _config({key: value for key, value in found.keys.items() if key.split(".")[0] in sections})


def _stream(found: Draft, rows: Rows, model: ModelConfig) -> EpochStream:
    """The rows of an epoch of the run, from the first MOST_ROWS rows of the file."""
    config = _section_config(found, "data", "objective", "sampler")
    data = rows_to_read(config)
    if data.share_prompts == AUTO:
        data = replace(data, share_prompts=config.objective.needs.answers_share_prompts)
    (share,) = data.held_out_shares
    side, distinct = Side.train if share else Side.all, data.dedup is not Dedup.off or None
    common = (data.sequence_length, data.packs, data.on_long, share, side, None, 0)
    settings = StreamSettings(*common, distinct=distinct, share_prompts=data.shares_prompts or None)
    return EpochStream(config.objective.accept([rows.tokenized(model, data)], [], data)[0], settings)


def _data(found: Draft, name: str, rows: Rows, table: TokenTable, model: ModelConfig) -> None:
    plain = json.loads(json.dumps(asdict(rows.source)))
    source = {key: value for key, value in plain.items() if value != asdict(SourceConfig())[key]}
    named = "".join(f", `{old}` is read as {new}" for old, new in rows.source.columns.items())
    times = np.unique(table.by_row.digests, return_counts=True)[1]
    if equal := int(times[times > 1].sum()):
        found.notes.append(f"{equal:,} of {len(table.by_row):,} rows are equal to another row")
        named += f"; {found.notes[-1]}"
    found.set("data.sources", [source], f"{counted(rows.count, f'rows of {rows.format.name}')}{named}")
    stream = _stream(found, rows, model)
    counts, used = stream.counts[0], stream.tables[0].by_group
    fates = ((counts.dropped, "not trained"), (counts.truncated, "cut"))
    if fate := " and ".join(counted(count, f"{rows.format.noun} are {fate}") for count, fate in fates if count):
        lost = counts.lost_tokens / max(len(table.ids), 1)
        found.notes.append(f"{fate}, {lost:.1%} of the tokens: data.sequence_length and data.on_long decide this")
        found.reasons["data.sequence_length"] += f"; {found.notes[-1]}"
    if rows.held_out:
        held = source | {"split": rows.held_out, "limit": HELD_OUT}
        found.set("data.eval_sources", [held], f"the first rows of the folder's split {rows.held_out}, to evaluate on")
    elif rows.count >= 50 and "data.eval_sources" not in found.keys:
        share = found.keys.get("data.eval_fraction", round(min(0.1, max(0.02, HELD_OUT / rows.count)), 3))
        hashes = used.held_out_by[np.unique(stream.segments.group)]
        chosen = is_on_side(Side.held_out, np.unique(hashes) if used.split.pieces else hashes, share)
        scale = max(1.0, rows.count / MOST_ROWS)
        number = f"{'about ' * (scale > 1)}{counted(round(int(chosen.sum()) * scale), 'rows are held out')}"
        if "data.eval_fraction" in found.keys or 0 < chosen.sum() < len(chosen):
            found.set("data.eval_fraction", share, f"{number} by their content, to evaluate on")
    if rows.are_chats and len(times) >= 5 * QUESTIONS:  # rows that are equal to a question are not trained on
        file = str(_questions(name))
        found.set("data.questions.path", file, f"at most {QUESTIONS} of your rows, asked before and after training")
    if rows.held_out or found.keys.get("data.questions.path"):
        found.set("data.on_overlap", "drop", "rows that are held out or asked are not trained on")


def _length(lengths: np.ndarray, model: ModelConfig, noun: str) -> tuple[int, str]:
    """data.sequence_length and its reason: the 99th percentile of `lengths`, rounded up to a multiple of 128."""
    most = int(np.percentile(lengths, 99))
    text = load_config(with_shipped_config(model, plans=True)).get_text_config()
    limit = int(getattr(text, "max_position_embeddings", 0) or 2**24)
    length = min(max(256, -(-most // 128) * 128), limit)
    longer = float((lengths > length).mean())
    return length, f"99 % of the {noun} have at most {most:,} tokens; {longer:.1%} are longer"


def _training(found: Draft, name: str, rows: Rows, table: TokenTable, model: ModelConfig) -> int:
    """Set epochs, batch and learning rate. Returns the number of rows that a micro-batch must be a multiple of."""
    epochs = next((epochs for below, epochs in EPOCHS if rows.count < below), 1)
    stream, scale, answers = _stream(found, rows, model), max(1.0, rows.count / MOST_ROWS), len(rows.format.answers)
    tokens = counted(int(stream.segments.length.sum() * scale), "tokens")
    found.set("train.epochs", epochs, f"{counted(rows.count, 'rows')}, {tokens} in an epoch")
    epochs = found.keys["train.epochs"] or 1
    if found.keys.get("data.questions.path") == str(_questions(name)) and not rows.held_out:
        scale *= max(0.0, 1 - QUESTIONS / rows.count)
    # Without packing a micro-batch is a multiple of a group's documents, and groups differ in size.
    if len(table.by_group) * (answers or 1) == len(table) and epochs * len(stream.epoch(0)) * scale < STEPS:
        found.set("data.packing", False, f"a document a row: packed rows would give fewer than {STEPS} steps")
        stream = _stream(found, rows, model)
    count, packed = len(stream.segments) * scale, len(stream.segments) / len(stream.epoch(0))
    documents, least = 32, LEAST_QUERIES if rows.format.is_compared else 2 if answers else 1
    while documents > least and epochs * count / documents < STEPS:
        documents //= 2
    rounded = np.ceil if rows.format.is_compared else np.floor
    groups = 1 << int(rounded(np.log2(max(1.0, documents / packed))))
    held, steps = counted(round(groups * packed), rows.format.noun), int(epochs * count / packed / groups)
    about = f"rows of a step: about {held}, {counted(steps, 'steps')}"
    found.set("train.global_batch_size", groups * stream.rows_of_group, about)
    objective: Any = OBJECTIVES[rows.objective]
    if not objective.needs.reads_groups:
        found.set("optimizer.lr", "auto", "from the size of the model and the adapters (docs/learning_rate.md)")
    elif objective.needs.writes:
        found.set("optimizer.lr", objective.needs.pair_rate, "of a published recipe for preferences with LoRA")
    else:
        rate = TINY_HEAD_RATE if (model.path or "").startswith("builtin:") else HEAD_RATE
        found.set("optimizer.lr", rate, "of LoRA with such a head; try others (fxtune sweep)")
    return stream.rows_of_group


def _model(rows: Rows, card: MachineFacts) -> str:
    if card.device == "cpu":
        return TINY_MODELS[rows.has_images]
    for name in IMAGE_MODELS if rows.has_images else TEXT_MODELS:
        config = _config({"techniques": BUNDLES[0], "data.sequence_length": 2048})
        shape = ModelConfig(path=None, init=Init.random, architecture=shipped_configs()[name].config)
        config = replace(config, model=shape)
        if _fits(forecast_run(config, card, 1, None)):
            return name
    raise ConfigError(f"No model of `fxtune new` fits {card.device_name}. Name one: --model ID.")


def _fit(found: Draft, model: ModelConfig, card: MachineFacts, proposed: bool, least: int) -> None:
    """Set the techniques and the largest micro-batch that fits, a multiple of `least` rows. `proposed`: the user has
    named no model."""
    if card.device == "cpu":
        found.set("model.path", model.path, "ships with fxtune; with a card, --gpu NAME" if proposed else "")
        found.set("techniques", ["lora"], "adapters; without a GPU the fast bundle has nothing to act on")
        found.set("train.micro_batch_size", found.keys["train.global_batch_size"])
        return
    found.set("model.path", model.path, f"the largest proposed model that fits, of {MODELS_DATE}" if proposed else "")
    batch = found.keys["train.global_batch_size"]
    sizes = [least << power for power in range(7) if batch % (least << power) == 0] or [batch]
    for bundle in [found.keys["techniques"]] if "techniques" in found.keys else BUNDLES:
        best: tuple[Any, RunForecast] | None = None
        for micro in [found.keys["train.micro_batch_size"]] if "train.micro_batch_size" in found.keys else sizes:
            config = _config({**found.keys, "techniques": bundle, "train.micro_batch_size": micro})
            config = replace(config, model=with_shipped_config(config.model, plans=True))
            forecast = forecast_run(config, card, 1, None)
            if not _fits(forecast):
                break
            best = micro, forecast
        if best is not None:
            micro, forecast = best
            facts = forecast.facts
            memory = f"{forecast.need.device / GIB:.0f} of {facts.free_memory / GIB:.0f} GiB"
            here = installed_packages()  # the forecast takes a named card's machine to have all of them
            missing = [PACKAGES[name] for name in config.techniques.packages(facts) if name not in here]
            first = "".join(f"; first `{package.install}`, for {package.purpose}" for package in missing)
            found.set("techniques", bundle, f"{memory} of {card.device_name} by forecast{first}")
            found.set("train.micro_batch_size", micro, "the largest that fits")
            return
    raise ConfigError(
        f"{model.path} does not fit {card.device_name}, not even with qlora. `fxtune plan` says what would."
    )


def _fits(forecast: RunForecast) -> bool:
    return forecast.need.device <= ROOM * forecast.facts.free_memory


def _config(keys: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    with tempfile.TemporaryDirectory(prefix="fxtune-new-") as folder:
        file = Path(folder) / "draft.yaml"
        file.write_text(recipe.text([], keys), encoding="utf-8")
        return compose.load([f"+recipe='{file}'", *overrides])


def _questions(name: str) -> Path:
    return discovery.LOCAL / f"{name}_questions.jsonl"


def require_new(name: str) -> None:
    """Raise StorageError if the recipe `name` or its questions exist."""
    if there := [file for file in (discovery.LOCAL / f"{name}.yaml", _questions(name)) if file.exists()]:
        raise StorageError(f"{there[0]} exists and is not overwritten. Give another name.")


def write(found: Draft, name: str, rows: Rows, table: TokenTable, command: str) -> None:
    """Write the recipe and its questions. Raises StorageError if the recipe exists."""
    title = f"{found.keys['model.path']} on {rows.source.path}"
    written = f"Written by `{command}`. Each line is a guess that you can change."
    comments = [title, "", f"  fxtune +recipe={name}", "", written]
    path = recipe.write(name, recipe.text(comments, found.keys, found.reasons))
    if found.keys.get("data.questions.path") == str(questions := _questions(name)):
        bad = {row["where"] for row in table.read_bad_rows(open_source(rows.source).file_names)}
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in spread(rows, QUESTIONS, bad)]
        with discovery.removed_if_unfinished(path, questions), writing(f"{questions} cannot be written"):
            questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
