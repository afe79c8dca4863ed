"""What a run records about itself for reports."""

import json
import sys

import numpy as np

from fxtune.objectives.causal_lm import CausalLM
from fxtune.training.run.about import describe_run


def test_it_has_the_command_and_the_data(narrow, build, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fxtune", "+recipe=a b", "tracking.wandb.api_key=secret"])
    narrow.data.eval_fraction = 0.2
    data = build(narrow).data
    found = json.loads(json.dumps(describe_run(data, [3], None, CausalLM(), {})))
    assert found["command"].startswith("fxtune '+recipe=a b'")
    assert "secret" not in found["command"]
    (lengths,) = found["training"]["lengths"]
    real = np.diff(data.tables[0].offsets)
    assert sum(lengths["counts"]) == lengths["documents"] == 48
    assert lengths["edges"][0] == real.min()
    assert lengths["edges"][-1] == lengths["longest"] + 1
    assert lengths["tokens"] == real.sum()
    assert found["training"]["sources"][0]["share"] == 1
    assert found["held_out"]["supervised_tokens"] > 0


def test_a_program_of_the_user_is_no_command(narrow, build, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--token=secret"])
    assert describe_run(build(narrow).data, [], None, CausalLM(), {})["command"] is None
