"""What a network that fails costs a run, and what is complete afterwards: the hub and W&B in every bad mood, on loopback.

    python scripts/faults/outages.py [--json FILE]

The hub: seconds from asking for a model, its weights, a tokenizer and a dataset until all are there or an error says what to
do, with and without what an earlier run fetched. W&B: seconds that starting, the slowest of ten lines and the end of the run
took of the training process, and how many of the ten steps the server has when the command that fxtune printed was run, each
once. Real processes of the real libraries (huggingface_hub, wandb); the servers are tests/support/servers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.servers import Hub, Wandb, refused, serving

from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode

FAULTS: tuple[str | int, ...] = ("works", "refused", "silent", "drips", "breaks", 500, 429, 401)
FILES = {"config.json": b"{}", "tokenizer.json": b"{}" * 500, "model.safetensors": bytes(100_000)}
ASK = """
import time
from fxtune.system import hub
from fxtune.errors import UserError
begun = time.monotonic()
try:
    hub.fetch(hub.locate("nobody/tiny"), ["model.safetensors"])
    hub.locate("nobody/tiny", key="model.tokenizer")
    hub.resolve_commit("nobody/data", None, "dataset")
    became = "goes on"
except UserError as error:
    became = f"exit code {error.exit_code}"
print(f"\\n{time.monotonic() - begun:.2f}|{became}")
"""
STEPS = 10


def ask_hub(url: str, home: str) -> tuple[float, str]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    seconds, became = done.stdout.splitlines()[-1].split("|")
    return float(seconds), became


def hub() -> list[dict[str, Any]]:
    rows = []
    with serving(Hub(FILES)) as server, tempfile.TemporaryDirectory() as cache:
        ask_hub(server.url, cache)
        for fault in FAULTS:
            server.mode = fault
            url = refused() if fault == "refused" else server.url
            with tempfile.TemporaryDirectory() as empty:
                there, absent = ask_hub(url, cache), ask_hub(url, empty)
            rows.append(
                {
                    "hub": fault,
                    "fetched before": there[0],
                    "became": there[1],
                    "not fetched": absent[0],
                    "became ": absent[1],
                }
            )
    return rows


def track(folder: Path, notes: list[str], step: int = 0) -> Tracker:
    plain = {
        "run": {"name": "outage"},
        "tracking": {"wandb": {"project": "unit", "entity": None, "group": None, "tags": []}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    config = TrackingConfig(wandb=WandbConfig(mode=WandbMode.online, project="unit"))
    return Tracker(config, folder, "outage", plain, note=notes.append, resume_step=step)


def wandb(fault: str | int, half_way: bool) -> dict[str, Any]:
    """One run of which W&B fails from the beginning, or after half of its steps, when it has taken the run once more."""
    notes: list[str] = []
    with serving(Wandb()) as server, tempfile.TemporaryDirectory() as place:
        os.environ["WANDB_BASE_URL"] = refused() if fault == "refused" and not half_way else server.url
        first = 1
        if half_way:
            with track(Path(place), notes) as tracker:
                for step in range(1, STEPS // 2 + 1):
                    tracker.log(step, {"train/loss": 1.0})
            first = STEPS // 2 + 1
        else:
            server.mode = fault
        begun = time.monotonic()
        tracker = track(Path(place), notes, first - 1)
        started = time.monotonic() - begun
        while half_way and tracker._wandb and not tracker._wandb.folder:
            time.sleep(0.05)
        server.mode = fault
        if half_way and fault == "refused":
            server.shutdown()
            server.server_close()
        slowest = 0.0
        for step in range(first, STEPS + 1):
            begun = time.monotonic()
            tracker.log(step, {"train/loss": 1.0})
            slowest = max(slowest, time.monotonic() - begun)
        begun = time.monotonic()
        tracker.finish()
        ended = time.monotonic() - begun
        words = shlex.split(notes[-1].partition("To upload it: ")[2])
        with contextlib.ExitStack() as again:
            if half_way and fault == "refused":  # it comes back under another port, with what it had
                rows, server = server.rows, again.enter_context(serving(Wandb()))
                server.rows = rows
            server.mode = "works"
            os.environ["WANDB_BASE_URL"] = server.url
            if words:
                subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
            run = (Path(place) / "wandb" / "id").read_text()
            seen = [row["train/step"] for row in server.history(run)]
        whole = "each step once" if seen == list(range(1, STEPS + 1)) else f"NOT WHOLE: {seen}"
    return {
        "W&B": f"{fault}{', half-way' if half_way else ''}",
        "start": started,
        "slowest line": slowest,
        "end": ended,
        "command": " ".join(words[:2]) or "none needed",
        "history": whole,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.2f} s" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "WANDB_API_KEY": "k" * 40, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        rows = hub()
        show(rows)
        links = [wandb(fault, False) for fault in FAULTS] + [wandb(fault, True) for fault in FAULTS[1:]]
        show(links)
    if options.json:
        Path(options.json).write_text(json.dumps([*rows, *links], indent=1))


if __name__ == "__main__":
    main()
