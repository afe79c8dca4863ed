"""`fxtune tune` on a GPU: real trials, one of which runs out of memory, and a recipe that runs as measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
SHAPE = (
    "+recipe=quickstart",
    "model.init=random",
    "model.architecture={hidden_size: 2048, intermediate_size: 5632, "
    "num_hidden_layers: 4, num_attention_heads: 16, num_key_value_heads: 4, head_dim: 128, vocab_size: 32000, "
    "max_position_embeddings: 8192}",
    "model.dtype=bfloat16",
    "data.sequence_length=2048",
    "data.questions.path=null",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
)
"""The quickstart's data with a Llama whose steps keep the GPU busy."""


def fxtune(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": PATHS, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *words],
        capture_output=True,
        cwd=folder,
        text=True,
        timeout=580,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timed
@pytest.mark.slow
def test_tune_finds_the_fastest_setting_and_it_runs_as_measured(tmp_path):
    words = [
        "tune",
        *SHAPE,
        "--axes",
        "compile,checkpointing,micro_batch,workers",
        "--steps",
        "4",
        "--json",
        str(tmp_path / "found.json"),
        "--minutes",
    ]
    out = fxtune(tmp_path, *words, "4")
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    measured = [row for row in found["rows"] if row["tokens_per_second"]]
    assert len(measured) >= 3, out  # on a busy host each takes a minute
    assert all(row["loss_off"] <= 1e-2 for row in measured)
    best = next(row for row in measured if row["deltas"] == found["winner"])
    assert best["tokens_per_second"] >= found["rows"][0]["tokens_per_second"]
    peak = max(answer["peak"] for answer in best["answers"])
    assert peak < 1.25 * best["forecast_gib"] + 0.5, (
        "the forecast rules candidates out, so it must not be far below the measured peak"
    )

    file = tmp_path / "recipes" / "quickstart_tuned.yaml"
    assert set(yaml.safe_load(file.read_text())) <= {"defaults", "model", "data", "train", "loader", "techniques"}
    fxtune(tmp_path, "bench", "+recipe=quickstart_tuned", "--steps", "4", "--json", str(tmp_path / "again.json"))
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=0.15)

    assert "from the cache" in fxtune(tmp_path, *words, "0.5")  # in seconds; there is no time for what is not cached


def test_out_of_memory_trial_is_a_result(tmp_path):
    """A micro-batch of 8 rows with all its logits does not fit in 3 GiB, and the forecast is not used here."""
    script = tmp_path / "without_forecast.py"
    script.write_text(
        "import sys\nfrom fxtune.tuning import search_space\nfrom fxtune.cli.main import main\n"
        "search_space.MARGIN = 9.0\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    words = [
        "tune",
        *SHAPE,
        "run.memory_gib=3",
        "techniques.liger.enabled=false",
        "techniques.checkpointing.enabled=false",
        "train.micro_batch_size=1",
        "--axes",
        "micro_batch",
        "--steps",
        "2",
        "--minutes",
        "15",
        "--json",
        str(tmp_path / "found.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": PATHS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        cwd=tmp_path,
        text=True,
        timeout=1200,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    full = [row for row in found["rows"] if row["verdict"].startswith("out of memory")]
    assert full, found["rows"]
    assert found["rows"][0]["tokens_per_second"] > 0
    assert all(answer["peak"] <= 3.0 for row in found["rows"] for answer in row["answers"])
