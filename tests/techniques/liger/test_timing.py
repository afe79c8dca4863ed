"""Times of an operation inside compiled code: torch.compile's version against Liger's kernel."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from support.architectures import (
    enable,
)
from support.liger import GPU, resolved

from fxtune.techniques.base import Switch
from fxtune.techniques.liger import timing
from fxtune.techniques.liger.technique import OPERATIONS


def test_under_compile_auto_measures_once_and_caches_the_times(monkeypatch, tmp_path):
    cases = []

    def times(case):
        cases.append(case)
        return {"rms_norm": (0.4, 0.5), "swiglu": (0.3, 0.25), "geglu": (1.0, None)}[case.operation]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "times", times)
    known = {
        **GPU,
        "dtype": "bfloat16",
        "rows": (4096,),
        "micro_batch_size": 2,
        "techniques": enable(compile={}, lora={"fused": "off"}),
    }
    for _ in range(2):
        chosen, note = resolved(known)
        assert [getattr(chosen, name).value for name in OPERATIONS] == ["off", "off", "on", "on", "off"]
        assert "rms_norm off (measured: compiled 0.400 ms, Liger 0.500 ms)" in note
        assert "swiglu on (measured: compiled 0.300 ms, Liger 0.250 ms)" in note
        assert "rope on (fxtune's own kernel moves fewer bytes" in note
    assert [(case.operation, case.rows, case.width, case.dtype, case.trained) for case in cases] == [
        ("rms_norm", 8192, 64, "bfloat16", False),
        ("swiglu", 8192, 96, "bfloat16", False),
    ]
    assert len(json.loads((tmp_path / "fxtune" / "liger_times.json").read_text())) == 2
    resolved({**known, "device_name": "B200"})
    resolved({**known, "packages": {**GPU["packages"], "torch": "2.13"}})
    assert len(cases) == 6, "another card and another torch are measured again"
    assert "geglu off (Liger's does not compile here)" in resolved(known, "gemma")[1]
    assert cases[-1].operation == "geglu"
    assert (cases[-2].offset, cases[-2].casting) == (1.0, "gemma")


def test_times_are_measured_again_if_the_cache_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "times", lambda case: (2.0, 1.0))
    assert resolved({**GPU, "techniques": enable(compile={})})[0].swiglu is Switch.on


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "triton", "cublas"],
)
def test_without_free_memory_nothing_is_measured_or_cached(error, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps(monkeypatch, {"liger": error})
    chosen, note = resolved({**GPU, "techniques": enable(compile={})})
    assert chosen.rms_norm is chosen.swiglu is Switch.off
    assert "rms_norm off (torch.compile fuses it; neither could be measured here)" in note
    assert not [*tmp_path.rglob("liger_times.json")]


def steps(monkeypatch, errors):
    """Patch timing so that a step needs no GPU, or raises the error in `errors` for `compiled` or `liger`."""
    pytest.importorskip("triton")
    given = itertools.cycle(("compiled", "liger"))

    def made(case, operation):
        error = errors.get(next(given))

        def step():
            if error:
                raise error

        return step, []

    monkeypatch.setattr(timing, "_step", made)
    monkeypatch.setattr("triton.testing.do_bench", lambda *_, **__: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_kernel_that_does_not_compile_has_no_time(monkeypatch):
    """Inside an operator Triton raises its own errors, which are not RuntimeErrors."""
    errors = pytest.importorskip("triton.runtime.errors")
    steps(monkeypatch, {"liger": errors.OutOfResources(300000, 232448, "shared memory")})
    assert timing.times(timing.Case("swiglu", 8, 8, "float32", False)) == (1.0, None)


@pytest.mark.parametrize(
    "error",
    [torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), RuntimeError("of another kind")],
)
def test_other_errors_of_a_measurement_are_raised_and_not_cached(error, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps(monkeypatch, {"liger": error})
    with pytest.raises(type(error), match=str(error)):
        resolved({**GPU, "techniques": enable(compile={})})
    assert not [*tmp_path.rglob("liger_times.json")]


def test_under_compile_without_a_gpu_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen, note = resolved({**GPU, "techniques": enable(compile={})})
    assert chosen.rms_norm is Switch.off
    assert "neither could be measured here" in note
