"""torch.compile by layer: the same numbers from compiled code, one graph a kind of layer, generation left alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from architectures import built, facts_of, lora, random_model

from fxtune.errors import ConfigError
from fxtune.pipeline import make_probe
from fxtune.techniques.checkpointing import Checkpointing
from fxtune.techniques.compile import Compile
from fxtune.world import Facts

PACKED = Facts(packing=True)


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients_and_one_graph_serves_all(tmp_path):
    model, plain, pipeline = random_model("llama", num_hidden_layers=6), lora(), lora()
    pipeline.compile, pipeline.checkpointing = Compile(enabled=True), Checkpointing(enabled=True)
    reference, compiled = built(plain, model), built(pipeline, model)
    assert list(compiled.state_dict()) == list(reference.state_dict())
    (evidence,) = pipeline.compile.verify(compiled, make_probe(compiled))
    assert evidence.acted, evidence
    row = {"input_ids": torch.arange(64).unsqueeze(0), "position_ids": (torch.arange(64) % 20).unsqueeze(0)}
    graphs = []
    for step in range(3):
        for one in (reference, compiled):
            one.train()
            one(**row, use_cache=False).logits.logsumexp(-1).sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert step == 0 or graphs[-1] == graphs[0], "no step compiles again"
    assert graphs[0] <= 8, "graphs do not multiply with the layers"
    theirs = dict(reference.named_parameters())
    for name, parameter in compiled.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)
    assert compiled.eval().generate(input_ids=row["input_ids"][:, :4], max_new_tokens=4).shape == (1, 8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs[-1], "generation runs uncompiled"


def test_layers_that_are_not_compiled_are_noticed():
    pipeline = lora()
    model = built(pipeline, random_model("llama"))
    pipeline.compile = Compile(enabled=True)
    with pytest.raises(ConfigError, match="seen: 0 entries into compiled code"):
        pipeline.prove(model, make_probe(model))


def test_rows_of_any_length_are_refused(monkeypatch):
    asked = Compile(enabled=True)
    assert "rows of any length" in next(asked.check(Facts()))
    assert "9 data.buckets" in next(asked.check(Facts(rows=tuple(range(1, 10)))))
    assert not list(asked.check(PACKED))
    assert not list(asked.check(facts_of(random_model("llama"), packing=False, rows=(32, 64))))


def test_a_machine_without_a_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "needs a C++ compiler, and g++ is not on the PATH" in next(Compile(enabled=True).check(PACKED))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h" in list(Compile(enabled=True).check(PACKED))[1]
    assert len(list(Compile(enabled=True).check(dataclasses.replace(PACKED, device="cuda")))) == 1
