"""Signals to a run on a GPU: during compilation, between recorded passes, and while a checkpoint is copied."""

from __future__ import annotations

import json
import signal

import pytest
from support.harness import command, start, wait_for
from support.killing import Processes

WORDS = (
    *("techniques.compile.enabled=true", "data.buckets=[128]", "model.dtype=bfloat16", "train.epochs=100"),
    *("checkpoint.every=0", "checkpoint.keep=100"),
)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_stopped_gpu_run_saves_and_resumes(tmp_path, graphs):
    words = command(tmp_path, *WORDS, f"techniques.compile.cuda_graphs={graphs}")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log.txt"

    def lines() -> list[dict]:
        text = metrics.read_text() if metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def stop(process, how: signal.Signals) -> str:
        process.send_signal(how)
        assert process.wait(120) == 75, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text()
        return [line for line in log.read_text().splitlines() if line.startswith("fxtune:")][-1]

    with Processes() as processes:
        compiling = processes.start(words, tmp_path)
        assert compiling.until("compiles"), log.read_text()[-3000:]
        assert "ended before" in stop(processes.process, signal.SIGTERM)
    steps = 0
    for how in (signal.SIGUSR1, signal.SIGTERM):
        running = start(words, tmp_path)
        wait_for(lambda wanted=steps + 20: lines() and lines()[-1]["train/step"] >= wanted, running, timeout=180)
        said = stop(running, how)
        steps = lines()[-1]["train/step"]
        assert f"saved after step {steps} of" in said
        assert (tmp_path / "run" / "checkpoints" / f"step-{steps:08d}" / "manifest.json").exists()
    assert start(words, tmp_path).wait(240) == 0, log.read_text()[-3000:]
    seen = [line["train/step"] for line in lines() if "train/loss" in line]
    assert seen == list(range(1, seen[-1] + 1)), "a step is missing or logged twice"
