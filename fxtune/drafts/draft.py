"""`fxtune new`: a recipe for the user's rows on a card, with reasons for its keys."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.config import compose, discovery
from fxtune.config.root import Config
from fxtune.drafts import recipe
from fxtune.drafts.rows import Rows, spread
from fxtune.errors import ConfigError, StorageError
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer, with_shipped_config
from fxtune.models.shipped import shipped_configs
from fxtune.system.machine.facts import MachineFacts, installed_packages
from fxtune.system.machine.packages import PACKAGES
from fxtune.system.terminal.units import GIB
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
PAIR_RATE = 5.0e-6
"""The learning rate of LoRA on pairs and judged answers, as in recipes/llama_dpo.yaml."""
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
    """A recipe in the making: {key: value} and {key: reason}."""

    keys: dict[str, Any]
    reasons: dict[str, str]

    def set(self, key: str, value: Any, why: str = "") -> None:
        self.keys[key] = value
        if why:
            self.reasons[key] = why


def draft(name: str, rows: Rows, model: str | None, card: MachineFacts) -> tuple[Draft, Rows]:
    """(a recipe for `rows`, the rows in the format in which the recipe reads them). `model`: a hub id or a folder;
    None: the largest model below that fits `card`.

    Raises ConfigError if no model fits, and the errors of reading the rows and the model.
    """
    found = Draft({}, {})
    if rows.objective != "causal_lm":
        found.set("objective", rows.objective, f"rows of {rows.format.name}")
    chosen = _model(rows, model, card)
    rows = rows.as_chats(load_tokenizer(chosen))
    lengths = rows.lengths(chosen)
    _data(found, name, rows, lengths, chosen)
    _training(found, rows, lengths)
    _fit(found, chosen, card, model is None)
    return found, rows


def _data(found: Draft, name: str, rows: Rows, lengths: np.ndarray, model: ModelConfig) -> None:
    source = {"path": rows.source.path} | ({"columns": dict(rows.source.columns)} if rows.source.columns else {})
    named = "".join(f", `{old}` is read as {new}" for old, new in rows.source.columns.items())
    found.set("data.sources", [source], f"{rows.count:,} rows of {rows.format.name}{named}")
    found.set("data.sequence_length", *_length(lengths, model))
    if rows.format.answers:
        found.set("data.on_long", "truncate", "the beginning of a long prompt is cut, never an answer")
    if rows.held_out:
        held = source | {"split": rows.held_out, "limit": HELD_OUT}
        found.set("data.eval_sources", [held], f"the first rows of the folder's split {rows.held_out}, to evaluate on")
    elif rows.count >= 50:
        share = round(min(0.1, max(0.02, HELD_OUT / rows.count)), 3)
        found.set(
            "data.eval_fraction", share, f"about {round(share * rows.count):,} rows are held out, to evaluate on"
        )
    if rows.are_chats and rows.count >= 5 * QUESTIONS:
        file = discovery.LOCAL / f"{name}_questions.jsonl"
        found.set("data.questions.path", str(file), f"{QUESTIONS} of your rows, asked before and after training")
    if rows.held_out or "data.questions.path" in found.keys:
        found.set("data.on_overlap", "drop", "rows that are held out or asked are not trained on")


def _length(lengths: np.ndarray, model: ModelConfig) -> tuple[int, str]:
    """data.sequence_length and its reason: the 99th percentile of `lengths`, rounded up to a multiple of 128."""
    most = int(np.percentile(lengths, 99))
    text = load_config(with_shipped_config(model, plans=True)).get_text_config()
    limit = int(getattr(text, "max_position_embeddings", 0) or 2**24)
    length = min(max(256, -(-most // 128) * 128), limit)
    longer = float((lengths > length).mean())
    return length, f"99 % of the documents have at most {most:,} tokens; {longer:.1%} are longer"


def _training(found: Draft, rows: Rows, lengths: np.ndarray) -> None:
    epochs = next((epochs for below, epochs in EPOCHS if rows.count < below), 1)
    tokens = float(lengths.mean()) * max(1, len(rows.format.answers))
    found.set("train.epochs", epochs, f"{rows.count:,} rows, {int(tokens * rows.count):,} tokens")
    packed = max(1.0, found.keys["data.sequence_length"] / tokens)
    if epochs * rows.count < STEPS * packed:
        found.set("data.packing", False, f"a document a row: packed rows would give fewer than {STEPS} steps")
        packed = 1.0
    documents = 32
    while documents > 1 and epochs * rows.count / documents < STEPS:
        documents //= 2
    batch = 1 << int(np.log2(max(1.0, documents / packed)))
    steps = int(epochs * rows.count / packed / batch)
    found.set(
        "train.global_batch_size", batch, f"rows of a step: about {batch * packed:.0f} documents, {steps:,} steps"
    )
    if rows.objective == "causal_lm":
        found.set("optimizer.lr", "auto", "from the size of the model and the adapters (docs/learning_rate.md)")
    else:
        found.set("optimizer.lr", PAIR_RATE, "of a published recipe for preferences with LoRA")


def _model(rows: Rows, model: str | None, card: MachineFacts) -> ModelConfig:
    if model is not None:
        return ModelConfig(path=model)
    if card.device == "cpu":
        return ModelConfig(path=TINY_MODELS[rows.has_images])
    for name in IMAGE_MODELS if rows.has_images else TEXT_MODELS:
        config = _config({"techniques": BUNDLES[0], "data.sequence_length": 2048})
        shape = ModelConfig(path=None, init=Init.random, architecture=shipped_configs()[name].config)
        config = replace(config, model=shape)
        if _fits(forecast_run(config, card, 1, None)):
            return ModelConfig(path=name)
    raise ConfigError(f"No model of `fxtune new` fits {card.device_name}. Name one: --model ID.")


def _fit(found: Draft, model: ModelConfig, card: MachineFacts, proposed: bool) -> None:
    """Set the techniques and the largest micro-batch that fits. `proposed`: the user has named no model."""
    if card.device == "cpu":
        found.set("model.path", model.path, "ships with fxtune; with a card, --gpu NAME" if proposed else "")
        found.set("techniques", ["lora"], "adapters; without a GPU the fast bundle has nothing to act on")
        found.set("train.micro_batch_size", found.keys["train.global_batch_size"])
        return
    found.set("model.path", model.path, f"the largest proposed model that fits, of {MODELS_DATE}" if proposed else "")
    for bundle in BUNDLES:
        best: tuple[int, RunForecast] | None = None
        for micro in _divisors(found.keys["train.global_batch_size"]):
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


def _divisors(batch: int) -> Iterator[int]:
    micro = 1
    while micro <= min(batch, 64):
        yield micro
        micro *= 2


def _config(keys: dict[str, Any]) -> Config:
    with tempfile.TemporaryDirectory(prefix="fxtune-new-") as folder:
        file = Path(folder) / "draft.yaml"
        file.write_text(recipe.text([], keys), encoding="utf-8")
        return compose.load([f"+recipe='{file}'"])


def write(found: Draft, name: str, rows: Rows, command: str) -> None:
    """Write the recipe and its questions. Raises StorageError if one of the files exists."""
    questions = Path(found.keys.get("data.questions.path", ""))
    if questions.is_file():
        raise StorageError(f"{questions} exists and is not overwritten. Give another name.")
    title = f"{found.keys['model.path']} on {rows.source.path}"
    written = f"Written by `{command}`. Each line is a guess that you can change."
    comments = [title, "", f"  fxtune +recipe={name}", "", written]
    recipe.write(name, recipe.text(comments, found.keys, found.reasons))
    if questions.name:
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in spread(rows, QUESTIONS)]
        questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
