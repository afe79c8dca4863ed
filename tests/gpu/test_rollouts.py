"""A run on rollouts on a GPU: each log line has the figures of the step that it names."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_log_line_has_the_figures_of_its_step(tmp_path):
    words = ["+recipe=rl_quickstart", "train.max_steps=3", "train.eval_every=0", "data.eval_fraction=0"]
    words += ["data.questions.path=null", "train.log_every=1", "run.dir=run", "run.report=false"]
    subprocess.run([sys.executable, "-m", "fxtune", *words], check=True, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {line["train/step"]: line["rollout/reward"] for line in lines if "rollout/reward" in line}
    stored = sorted((tmp_path / "run" / "rollouts").glob("step-*/step.json"))
    assert logged == {n: json.loads(file.read_text())["figures"]["reward"] for n, file in enumerate(stored, 1)}
