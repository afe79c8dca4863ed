"""The report of torch.compile's work, and what it makes an error."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging

import pytest
import torch
from support.cases import slow_but
from support.compiled import compiled, learn, row

from fxtune.errors import ConfigError
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.techniques.compile import report
from fxtune.techniques.compile.report import CompileMonitor
from fxtune.techniques.pipeline import make_probe
from fxtune.upstream.torch import COMPILER_LOG


def test_report_has_lines_for_people_and_is_json(quick):
    technique, model = compiled()
    learn(model, row(model))
    report = technique.report()
    assert json.loads(json.dumps(dataclasses.asdict(report)))["graphs"] == 2
    assert report.seconds > 0
    first, again = report.lines()
    assert first.startswith("compiled by layer (mode default): 2 graphs in ")
    assert "0 graph breaks, 1 recompilations; rows 1x64: 2; disk cache" in first
    assert again.startswith("  compiled again: ")
    assert "requires_grad mismatch" in again


def test_code_compiled_by_others_is_not_counted(quick):
    technique, model = compiled()
    learn(model, row(model))
    before = technique.report()
    torch.compile(torch.sin)(torch.ones(3))
    assert technique.report() == before


def broken(model, layer=0):
    """A layer that reads a number from the device and branches on it."""
    part = decoder_layers(model)[layer]
    part.mlp.register_forward_hook(lambda module, given, out: out if out.sum().item() < 1e9 else -out)


@pytest.mark.slow
def test_second_model_of_a_process_has_its_own_code_and_report(quick):
    for _ in range(2):
        technique, model = compiled()
        seen = list(technique.verify(PreparedModel(model), make_probe(model)))
        assert all(observation.acted for observation in seen), seen
        assert technique.report().graphs == 2


def test_a_graph_break_under_fullgraph_says_where_and_why(quick):
    _, model = compiled()
    broken(model)
    with pytest.raises(ConfigError) as told:
        learn(model, row(model))
    text = str(told.value)
    assert "techniques.compile.fullgraph: the layer cannot be one graph" in text
    assert "compile/test_report.py:" in text
    assert "item()" in text
    assert "fullgraph=false" in text


@pytest.mark.slow
def test_graph_breaks_are_reported(quick):
    technique, model = compiled(fullgraph=False)
    broken(model)
    learn(model, row(model))
    (seen,) = technique.report().breaks
    assert "compile/test_report.py:" in seen.where
    assert "item()" in seen.reason
    assert any("graph break at" in line for line in technique.report().lines())


@pytest.mark.slow
def test_too_many_recompilations_fail(quick, monkeypatch):
    monkeypatch.setattr(report, "MAX_RECOMPILES", 3)
    _, model = compiled()
    counter = decoder_layers(model)[0]
    counter.calls = 0

    def count(module, given):
        counter.calls += 1

    counter.mlp.register_forward_pre_hook(count)  # a number in a guard that is another one each time
    for _ in range(3):
        learn(model, row(model))
    with pytest.raises(ConfigError, match="rows of 1x64 were compiled again 4 times:") as told:
        learn(model, row(model))
    assert "self.calls == 2 # counter.calls += 1 # " in str(told.value)
    assert "dynamic=always" in str(told.value)


def warn():
    """Have torch analyse a kernel that it does not understand (here because arguments are missing), so that it warns.
    On a GPU torch 2.11 did so for this kernel, Liger's RMSNorm, and compiled wrong code.
    """
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel

    (getattr(wrap, "identify_accessed_tensors", None) or wrap.identify_mutated_tensors)(
        _rms_norm_forward_kernel, {}, {}
    )


@pytest.fixture
def printed():
    """What torch's compiler logs; the logger's level is restored afterwards."""
    logger, handler, records = logging.getLogger(COMPILER_LOG), logging.Handler(), []
    before, handler.emit = logger.level, records.append
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize(("fullgraph", "silent"), [(False, True), (True, False)])
def test_kernel_whose_writes_torch_cannot_determine_is_an_error(fullgraph, silent, printed, monkeypatch):
    def warns(graph, inputs):
        warn()
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=warns))
    if silent:  # as TORCH_LOGS=-dynamo does
        logging.getLogger(COMPILER_LOG).setLevel(logging.ERROR)
    _, model = compiled(fullgraph=fullgraph)
    with pytest.raises(ConfigError, match="the Triton kernel _rms_norm_forward_kernel writes") as told:
        learn(model, row(model))
    assert "Turn off the option that runs this kernel" in str(told.value)
    assert not printed, "one message, and no traceback before it"


@pytest.mark.parametrize("dynamic", slow_but([False, True], True))
def test_such_a_kernel_in_a_backward_pass_is_an_error_and_is_not_cached(dynamic, monkeypatch, tmp_path):
    """torch compiles that pass when it runs; with dynamic shapes it compiles it earlier, and ignores errors."""
    from torch._inductor import compile_fx

    lower = compile_fx.fx_codegen_and_compile

    def lowers(*args, **kwargs):
        if kwargs["is_backward"]:
            warn()
        return lower(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", lowers)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monitor = CompileMonitor("layer", "default")
    monitor.start()
    for _ in range(2):  # the second start finds what the first has left on the disk
        torch._dynamo.reset()
        compiled = torch.compile(torch.mm, fullgraph=True, dynamic=dynamic)
        with pytest.raises(ConfigError, match="the Triton kernel _rms_norm_forward_kernel writes"):
            monitor.call(
                compiled, *(torch.ones(size, requires_grad=True) for size in ((5, 4), (4, 6)))
            ).sum().backward()


def test_other_errors_are_not_changed(monkeypatch):
    def fails(graph, inputs):
        raise ValueError("of the backend")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fails))
    _, model = compiled()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="of the backend"):
        learn(model, row(model))
