"""Folders of runs as training writes them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

STEPS = 40


def record(folder: Path, changes: dict[str, Any] | None = None, **values: Any) -> Path:
    """Write the files of a finished run of 100 s: 10 s of start-up, 80 s of steps, 8 s of evaluations.

    `changes`: metrics in place of those of every log line, or None to leave one out. `values`: other files' values, by
    name: config, setting, about, evidence, result, and lines, added to the metrics.
    """
    folder.mkdir(parents=True)
    config = {
        "run": {"name": folder.name, "dir": str(folder)},
        "optimizer": {"lr": 1e-3},
        "train": {"eval_every": 20, "log_every": 10},
        "checkpoint": {"every": 20},
        "loader": {"num_workers": None},
    }
    rows = []
    for step in range(10, STEPS + 1, 10):
        row = {
            "time": 1.7e9 + 10 + 2 * step,
            "train/step": step,
            "train/loss": 4.0 / step,
            "train/lr": 1e-3,
            "train/grad_norm": 1.0,
            "train/tokens": 1000.0 * step,
            "train/supervised_tokens": 400.0 * step,
            "train/tokens_per_second": 500.0,
            "train/ranks": 1.0,
            "train/step_seconds": 2.0,
            "train/data_wait": 0.01,
            "train/forward_backward_seconds": 1.9,
            "train/update_seconds": 0.05,
            "train/memory_gib": 0.5,
            "time/total_seconds": 10 + 2.2 * step,
            "time/training_seconds": 2.2 * step,
            "time/evaluation_seconds": 4.0 * (step // 20),
            **(changes or {}),
        }
        rows.append({name: value for name, value in row.items() if value is not None})
        if step == 10:
            rows.append(
                {"time": 1.7e9 + 10, "train/step": 10, "startup/imports_seconds": 4.0, "startup/model_seconds": 6.0}
            )
        if step % 20 == 0:
            rows.append({"time": 1.7e9 + 11 + 2 * step, "train/step": step, "eval/loss": 5.0 / step})
    rows += values.get("lines", [])
    length = {"name": "chats.jsonl", "documents": 8, "tokens": 4000, "supervised_tokens": 1600, "bad_rows": 1}
    length |= {"median": 480, "percentile_95": 700, "longest": 800, "edges": [100, 300, 801], "counts": [3, 5]}
    source = {"name": "chats.jsonl", "tokens": 4000, "share": 1.0}
    plan = {"padding_share": 0.2, "sources": [source], "lengths": [length]}
    about = {"command": "fxtune +recipe=mine", "fxtune": "0.1.0", "python": "3.11", "system": "Linux"}
    about |= {"training": plan, "held_out": None}
    machine = {"device": "cpu", "torch": "2.13"}
    files = {
        "setting.json": {"machine": machine, "rows": {"packing": True}} | values.get("setting", {}),
        "about.json": about | values.get("about", {}),
        "evidence.json": values.get("evidence", [evidence("lora", "rank 16")]),
        "result.json": {
            "train/step": STEPS,
            "train/loss": 0.1,
            "time/total_seconds": 100.0,
            "time/training_seconds": 88.0,
        }
        | values.get("result", {}),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | values.get("config", {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    for when, answer in (("before", "dunno"), ("after", "right")):
        row = {"question": "What?", "right": "right", "answer": answer}
        (folder / f"answers_{when}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def evidence(technique: str, asked: str, observed: str = "seen", acted: bool = True) -> dict[str, Any]:
    return {"technique": technique, "asked": asked, "observed": observed, "acted": acted}
