"""TRL's trainers of preferences, for scripts that compare fxtune with TRL on the built-in pairs.

TRL has a venv of its own, without fxtune. A script starts itself there by `ask`, which hands over a request and brings
back the answer. The imports of this file are lazy, because fxtune's venv has no TRL.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "fxtune" / "assets" / "tiny"
DATA = {name: ROOT / "fxtune" / "assets" / "data" / f"preferences_{name}.jsonl" for name in ("train", "test")}
"""The files of `builtin:preferences_train` and `builtin:preferences_test`."""
CHOICES = ("chosen", "rejected")
TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo": ("trl", "DPO", {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": ("trl", "DPO", {"loss_type": ["ipo"], "beta": 0.1}),
    "kto": ("trl", "KTO", {"beta": 0.1}),
    "orpo": ("trl.experimental.orpo", "ORPO", {"beta": 0.1}),
    "simpo": (
        "trl.experimental.cpo",
        "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "reward": ("trl", "Reward", {"center_rewards_coefficient": 0.01}),
}
"""fxtune's objective -> TRL's module, the name of its trainer, and the options with fxtune's default values."""

Row = dict[str, Any]


def pairs(name: str) -> list[Row]:
    """The pairs of DATA, their answers as turns of a chat."""
    lines = [json.loads(line) for line in DATA[name].read_text().splitlines()]
    return [{**line, **{side: [{"role": "assistant", "content": line[side]}] for side in CHOICES}} for line in lines]


def judged_alone(pairs: list[Row]) -> list[Row]:
    """Rows of KTO for both tools: all chosen answers as good ones, then all rejected answers as bad ones."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for side in CHOICES
        for pair in pairs
    ]


def write_rows(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trainer_class(objective: str) -> Any:
    module, name, _ = TRAINERS[objective]
    return getattr(importlib.import_module(module), f"{name}Trainer")


def settings(objective: str, folder: str, **options: Any) -> Any:
    """TRL's config of a run in float32 on a CPU, with `options` beside the options of TRAINERS."""
    module, name, defaults = TRAINERS[objective]
    return getattr(importlib.import_module(module), f"{name}Config")(
        output_dir=folder,
        weight_decay=0.0,
        max_length=512,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        **{**defaults, **options},
    )


def base(objective: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if objective == "reward":
        return AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY, padding_side="left")


def ask(python: Path, script: str, request: dict[str, Any]) -> Any:
    """Run `script --inside FILE` by `python`; what `reply` has written there."""
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps(request))
        command = [python, script, "--inside", file]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def reply(file: Path, answer: Callable[[Any], Any]) -> None:
    """Put the answer to the request in the place of the request, for ask()."""
    file.write_text(json.dumps(answer(json.loads(file.read_text()))))
