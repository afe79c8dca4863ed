"""torch.compile, decoder layer by decoder layer.

All layers of a kind share one compiled graph, so compiling one costs what compiling the model's depth would not. What it
buys: norms, RoPE, SwiGLU and residuals are fused into few kernels (10-16 % of a step on an H200). Shapes are static: each
length of a row compiles once, which is why packing or a few buckets are asked for. Parameter names stay as they are.

A forward with a KV cache (generation) runs uncompiled: every token would be another shape.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.technique import Evidence, Technique, decoder_layers, observed
from fxtune.world import Facts, World

MOST_LENGTHS = 8
GRAPHS = 64
"""How many graphs one layer's code may have: lengths x (training, evaluation, the probe's) x kinds of layers."""


class CompileMode(str, Enum):
    default = "default"
    max_autotune = "max_autotune"


@dataclass
class Compile(Technique):
    mode: CompileMode = CompileMode.default
    """`max_autotune` times several kernels for each matmul: minutes more at the start."""
    fullgraph: bool = True
    """Fail on a graph break, in place of going on slowly."""

    def check(self, facts: Facts) -> Iterator[str]:
        if not facts.rows and not facts.packing:
            yield "enabled: rows of any length would each compile anew. Set data.packing=true, or data.buckets."
        if len(facts.rows) > MOST_LENGTHS:
            yield f"enabled: {len(facts.rows)} data.buckets compile a graph each. Use at most {MOST_LENGTHS}."
        compiler = os.environ.get("CXX", "g++")
        if not shutil.which(compiler) and not shutil.which("clang++"):
            yield (f"enabled: torch.compile needs a C++ compiler, and {compiler} is not on the PATH. Install it (Debian: apt "
                   "install g++), or set it to false.")
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if facts.device == "cpu" and not header.exists():
            yield (f"enabled: torch.compile needs {header}. Install Python's headers (Debian: apt install python3-dev), or set "
                   "it to false.")

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        mode = "default" if self.mode is CompileMode.default else "max-autotune-no-cudagraphs"
        for layer in decoder_layers(model):
            compiled = torch.compile(layer.forward, mode=mode, fullgraph=self.fullgraph, dynamic=False)
            layer.forward = partial(_dispatched, layer.forward, compiled)
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Profile one forward after a first one that compiles: torch marks each entry into compiled code."""
        layers = len(decoder_layers(model))
        with observed(model), torch.enable_grad():
            model(**probe)
            compiled_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                model(**probe)
        anew = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled_before
        regions = sum("Torch-Compiled Region" in event.name for event in profile.function_events or ())
        yield Evidence("compile", f"{layers} layers run compiled code, without compiling again",
                       f"{regions} entries into compiled code in one forward, {anew} graphs compiled anew",
                       regions >= layers and anew == 0)


def _dispatched(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (plain if kwargs.get("past_key_values") is not None else compiled)(*args, **kwargs)
