"""Measures what a failing network costs a run, and checks that no data is lost: every failure of the hub and of W&B,
on loopback.

    python scripts/faults/outages.py [--json FILE]

Hub: the seconds from the request for a model, its weights, a tokenizer and a dataset until all are loaded or an error
says what to do, with and without a cache from an earlier run. W&B: the seconds that the training process spends on the
start, on the slowest of ten log lines and on the end of the run, and whether the server has each of the ten steps once
after the command that fxtune printed. The processes use the real libraries (huggingface_hub, wandb); the servers are
in tests/support/servers.py.
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
FETCH = """
import time
from fxtune.system import hub
from fxtune.errors import UserError
begun = time.monotonic()
try:
    hub.fetch(hub.locate("nobody/tiny"), ["model.safetensors"])
    hub.locate("nobody/tiny", key="model.tokenizer")
    hub.resolve_commit("nobody/data", None, "dataset")
    became = "continues"
except UserError as error:
    became = f"exit code {error.exit_code}"
print(f"\\n{time.monotonic() - begun:.2f}|{became}")
"""
STEPS = 10


def fetch_from_hub(url: str, home: str) -> tuple[float, str]:
    """(seconds, outcome) of a process that fetches from the hub at `url` with the cache in `home`."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True, check=True)
    seconds, became = done.stdout.splitlines()[-1].split("|")
    return float(seconds), became


def hub_outages() -> list[dict[str, Any]]:
    rows = []
    with serving(Hub(FILES)) as server, tempfile.TemporaryDirectory() as cache:
        fetch_from_hub(server.url, cache)
        for fault in FAULTS:
            server.mode = fault
            url = refused() if fault == "refused" else server.url
            with tempfile.TemporaryDirectory() as empty:
                cached, uncached = fetch_from_hub(url, cache), fetch_from_hub(url, empty)
            rows.append(
                {
                    "hub": fault,
                    "cached": cached[0],
                    "outcome": cached[1],
                    "not cached": uncached[0],
                    "outcome ": uncached[1],
                }
            )
    return rows


def start_tracker(folder: Path, notes: list[str], step: int = 0) -> Tracker:
    config_dict = {
        "run": {"name": "outage"},
        "tracking": {"wandb": {"project": "unit", "entity": None, "group": None, "tags": []}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config_dict))
    config = TrackingConfig(wandb=WandbConfig(mode=WandbMode.online, project="unit"))
    return Tracker(config, folder, "outage", config_dict, note=notes.append, resume_step=step)


def wandb_outage(fault: str | int, half_way: bool) -> dict[str, Any]:
    """One run during which W&B fails: from the start, or after half of the steps in a resumed run."""
    notes: list[str] = []
    with serving(Wandb()) as server, tempfile.TemporaryDirectory() as place:
        os.environ["WANDB_BASE_URL"] = refused() if fault == "refused" and not half_way else server.url
        first = 1
        if half_way:
            with start_tracker(Path(place), notes) as tracker:
                for step in range(1, STEPS // 2 + 1):
                    tracker.log(step, {"train/loss": 1.0})
            first = STEPS // 2 + 1
        else:
            server.mode = fault
        begun = time.monotonic()
        tracker = start_tracker(Path(place), notes, first - 1)
        started = time.monotonic() - begun
        while half_way and not tracker._clients[0].ready:
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
        command = shlex.split(notes[-1].partition("To upload it: ")[2])
        with contextlib.ExitStack() as again:
            if half_way and fault == "refused":  # the server returns on another port with its rows
                rows, server = server.rows, again.enter_context(serving(Wandb()))
                server.rows = rows
            server.mode = "works"
            os.environ["WANDB_BASE_URL"] = server.url
            if command:
                subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
            run = (Path(place) / "wandb" / "id").read_text()
            logged = [row["train/step"] for row in server.history(run)]
        history = "each step once" if logged == list(range(1, STEPS + 1)) else f"INCOMPLETE: {logged}"
    return {
        "W&B": f"{fault}{', half-way' if half_way else ''}",
        "start": started,
        "slowest line": slowest,
        "end": ended,
        "command": " ".join(command[:2]) or "none needed",
        "history": history,
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
        rows = hub_outages()
        show(rows)
        links = [wandb_outage(fault, False) for fault in FAULTS] + [wandb_outage(fault, True) for fault in FAULTS[1:]]
        show(links)
    if options.json:
        Path(options.json).write_text(json.dumps([*rows, *links], indent=1))


if __name__ == "__main__":
    main()
