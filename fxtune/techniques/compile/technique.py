"""torch.compile, decoder layer by decoder layer or the decoder as a whole, and a report of what the compiler did.

By layer, all layers of a kind share one compiled graph, so compiling one costs what compiling the model's depth would not.
What it buys: norms, RoPE, SwiGLU and residuals are fused into few kernels (10-16 % of a step on an H200). As a whole, the
compile time grows with the depth (minutes at 32 layers), and the CPU has nothing left to do between layers, which is what
small models wait for; `mode=reduce_overhead` goes on and records the decoder as CUDA graphs, one launch in place of hundreds.
The head and the loss stay outside. Parameter names stay as they are.

`cuda_graphs` records more with less: forward, head, loss and backward of a micro-batch, whatever is compiled, as one launch
(kernels/recorded.py). It pays where the device is done with a layer before the host has launched the next; `auto` compares
the two by the layer's arithmetic (LAUNCHING). A pass can be recorded if nothing in it asks the device and all shapes are static.

Shapes are static unless `dynamic` says otherwise: each length of a row compiles once, which is why packing or a few buckets
are asked for. A graph break or a recompilation is told with its place and its reason (fxtune/techniques/compile/report.py), and the run fails
beyond `max_graph_breaks` and `max_recompiles`: both cost time and change no number, so nobody would notice.

CUDA graphs write their results to the same memory each time. So a decoder's output is used before the next micro-batch runs
(each call is marked as a new step), and gradients are added to memory of the optimizer's own (`keep_gradients`): torch takes
the recorded backward pass's memory for the first micro-batch's gradient and adds nothing to it (pytorch#169545, #96693).

What was compiled is kept in ~/.cache/fxtune/inductor ($XDG_CACHE_HOME; TORCHINDUCTOR_CACHE_DIR names another place), in a
folder for each state of our own operators (fxtune/system/compiler_cache.py), so a second start compiles nothing anew: 3.3 s in place of
25.3 s for two layers of the tiny Llama of the tests on one CPU core.

A forward with a KV cache (generation) runs uncompiled: every token would be another shape. Mixtures of experts compile where
transformers multiplies their experts in groups (`grouped_mm`, its own choice), not where it loops over them.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.models.structure import backbone, decoder_layers, observed, skeleton
from fxtune.system.compiler_cache import use_cache_folder
from fxtune.system.facts import c_compiler
from fxtune.techniques.attention.backends import BY_DOCUMENTS
from fxtune.techniques.base import Evidence, Switch, Technique
from fxtune.techniques.compile import residual_pass
from fxtune.techniques.compile.report import CompileMonitor, CompileReport

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

MOST_LENGTHS = 8
LAUNCHING = 2e-3
"""Seconds a layer below which forward and backward take the host about as long as the device: some 150 launches."""
RATE = 4e14
"""Floating-point operations a second that the device is taken to do in training: an H200's. A slower one is kept busy sooner."""
RECORDABLE = ("flash4", "flash3", "flash2")
"""Attention that never asks the device where documents begin. `cudnn` does for packed rows, masks are made by asking."""
ASKING = ("dynamic", "longrope")
"""RoPE whose frequencies depend on the longest row so far: transformers asks the device for it, and makes the tensor anew."""


class Scope(str, Enum):
    layers = "layers"
    model = "model"


class CompileMode(str, Enum):
    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"


class Dynamic(str, Enum):
    never = "never"
    auto = "auto"
    always = "always"


MODES = {
    CompileMode.default: "default",
    CompileMode.reduce_overhead: "reduce-overhead",
    CompileMode.max_autotune: "max-autotune-no-cudagraphs",
}
SHAPES = {Dynamic.never: False, Dynamic.auto: None, Dynamic.always: True}


@dataclass
class Compile(Technique):
    scope: Scope = Scope.layers
    """`layers`: each decoder layer by itself, one graph for all of a kind. `model`: the whole decoder in one graph."""
    mode: CompileMode = CompileMode.default
    """`reduce_overhead` records CUDA graphs, for small models (scope=model); `max_autotune` times several kernels for each
    matmul: minutes more at the start."""
    fullgraph: bool = True
    """Fail on a graph break, in place of going on slowly."""
    dynamic: Dynamic = Dynamic.never
    """`never`: a graph for each length of a row. `always`: one for all lengths, somewhat slower; `auto`: for the first length
    one of its own, one for all others."""
    cuda_graphs: Switch = Switch.auto
    """Record forward and backward of a micro-batch, and launch them at once. `auto`: for models so small that the device waits
    for launches."""
    max_graph_breaks: int = field(default=0, metadata={"min": 0})
    """With fullgraph=false: fail where the compiler breaks off at more places than this."""
    max_recompiles: int = field(default=8, metadata={"min": 0})
    """Fail where rows of one length are compiled again more often than this. Training, evaluation, the first layer (whose
    input needs no gradient) and each kind of layer take one each."""

    def __post_init__(self) -> None:
        self._monitor = self._new_monitor()

    def check(self, facts: Facts) -> Iterator[str]:
        if self.dynamic is Dynamic.never:
            if not facts.rows and not facts.packing:
                yield (
                    "enabled: rows of any length would each compile anew. Set data.packing=true, or data.buckets, or "
                    "dynamic=always."
                )
            if len(facts.rows) > MOST_LENGTHS:
                yield (
                    f"enabled: {len(facts.rows)} data.buckets compile a graph each. Use at most {MOST_LENGTHS}, or "
                    "dynamic=always."
                )
        if self.fullgraph and self.max_graph_breaks:
            yield "max_graph_breaks: with fullgraph the first graph break fails. Set fullgraph=false, or this to 0."
        if self.mode is CompileMode.reduce_overhead:
            yield from self._without_cuda_graphs(facts)
        if self.mode is CompileMode.max_autotune and facts.deterministic:
            yield (
                "mode: max_autotune picks kernels by the clock, so two runs may compute differently, and "
                "run.deterministic=true rules that out (torch would not try them). Use default."
            )
        if self.cuda_graphs is Switch.on:
            yield from (f"cuda_graphs: {why}." for why in self._not_recorded(facts))
        yield from _without_compiler(facts)

    def resolve(self, facts: Facts) -> str | None:
        if self.cuda_graphs is not Switch.auto:
            return None
        seconds = _layer_seconds(facts)
        why = next(self._not_recorded(facts), None)
        if why is None and seconds > LAUNCHING:
            why = f"a layer keeps the device busy for {seconds * 1e3:.0f} ms of a micro-batch, longer than its launches take"
        self.cuda_graphs = Switch.off if why else Switch.on
        why = (
            why
            or f"a layer keeps the device busy for {seconds * 1e3:.1f} ms of a micro-batch, about what its launches take"
        )
        return f"cuda_graphs {self.cuda_graphs.value} ({why})" if facts.device == "cuda" else None

    def _not_recorded(self, facts: Facts) -> Iterator[str]:
        """Why a training pass cannot be recorded, and what to change."""
        if facts.device != "cuda":
            yield f"CUDA graphs need a GPU, and the device is {facts.device}. Use auto or off"
        if not facts.rows:
            yield "each length of a row is recorded, and these have any. Set data.packing=true, or data.buckets, or this to off"
        if self.mode is CompileMode.reduce_overhead:
            yield "mode=reduce_overhead records CUDA graphs of its own. Set mode=default, or this to off"
        if not self.fullgraph or self.dynamic is not Dynamic.never:
            yield "a recording needs fullgraph=true and dynamic=never. Set them, or this to off"
        if "float16" in (facts.dtype, facts.compute_dtype):
            yield "float16's loss scale changes between passes. Use bfloat16, or set this to off"
        checkpointing = facts.techniques.checkpointing
        if checkpointing.enabled and checkpointing.policy not in ("none", "auto"):
            yield (
                f"recomputation (techniques.checkpointing.policy={checkpointing.policy.value}) saves the state of random numbers, which "
                "cannot be recorded. Set policy=none, or this to off"
            )
        if _draws_in_the_head(facts):
            yield (
                "the fused loss runs the head's adapter again in the backward pass with the same dropout, and the state of "
                "random numbers cannot be recorded. Set techniques.lora.dropout=0, or "
                "techniques.liger.fused_linear_cross_entropy=off, or this to off"
            )
        if asking := [kind for kind in _rope_kinds(facts) if kind in ASKING]:
            yield (
                f"RoPE of type {asking[0]} asks the device how long rows are. Use a techniques.rope.type of fixed "
                "frequencies, or set this to off"
            )
        attention = facts.techniques.attention
        backend = attention.backend if attention.enabled else "auto"
        packed_sdpa = backend == "sdpa" and not list(BY_DOCUMENTS.refuses(facts))
        if not (backend in (*RECORDABLE, "auto") or packed_sdpa or (backend == "cudnn" and not facts.packing)):
            yield (
                f"attention by {backend} asks the device where documents begin. Use techniques.attention.backend="
                f"{RECORDABLE[0]}, or set this to off"
            )

    def _without_cuda_graphs(self, facts: Facts) -> Iterator[str]:
        if facts.device != "cuda":
            yield f"mode: reduce_overhead records CUDA graphs, and the device is {facts.device}. Use default."
        if self.scope is Scope.layers:
            yield (
                "mode: reduce_overhead by layer would record each of the layers anew, for their weights lie in other places. "
                "Set scope=model, or mode=default."
            )
        if self.dynamic is not Dynamic.never:
            yield f"mode: reduce_overhead records one graph for each length. Set dynamic=never (it is {self.dynamic.value})."
        if not self.fullgraph:
            yield (
                "mode: reduce_overhead records graphs, and around a graph break their memory is overwritten while it is "
                "read. Set fullgraph=true, or mode=default."
            )

    @property
    def keep_gradients(self) -> bool:
        """Whether the optimizer must add gradients to memory of its own, see above."""
        return self.enabled and (self.mode is CompileMode.reduce_overhead or self.records)

    @property
    def records(self) -> bool:
        """Whether training passes are recorded. After resolve()."""
        return self.enabled and self.cuda_graphs is Switch.on

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        use_cache_folder()
        residual_pass.install()
        # Code of a model before this one in the process (a sweep's) would be taken for this one's: it would run, uncounted, and
        # hold that model's memory where it is recorded as CUDA graphs.
        torch._dynamo.reset()
        self._monitor = self._new_monitor()
        self._monitor.start()
        lengths = MOST_LENGTHS + 1  # the probe's is one more
        limit = lengths * (self.max_recompiles + 1) + 1  # the budget speaks before torch gives up
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, name, max(getattr(torch._dynamo.config, name), limit))
        for part in decoder_layers(model) if self.scope is Scope.layers else [backbone(model)]:
            compiled: Callable[..., Any] = torch.compile(
                part.forward, mode=MODES[self.mode], fullgraph=self.fullgraph, dynamic=SHAPES[self.dynamic]
            )
            if self.mode is CompileMode.reduce_overhead:
                compiled = partial(_next_step, compiled)
            part.forward = partial(
                _dispatched, part.forward, partial(self._monitor.call, compiled), self.scope is Scope.model
            )
        return model

    def drop(self) -> None:
        """Forget what mode=reduce_overhead has recorded, so that its memory is free; all is compiled again, from the disk."""
        if self.enabled and self.mode is CompileMode.reduce_overhead:
            torch._dynamo.reset()
            self._monitor.allow_recompiling()

    def report(self) -> CompileReport:
        """What the compiler did so far to the model that apply() was given."""
        return self._monitor.report()

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Profile one forward after a first one that compiles: torch marks each entry into compiled code."""
        parts = len(decoder_layers(model)) if self.scope is Scope.layers else 1
        with observed(model), torch.enable_grad():
            for _ in range(
                2 if self.mode is CompileMode.reduce_overhead else 1
            ):  # CUDA graphs are recorded in the second
                model(**probe)
            compiled_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                model(**probe)
        anew = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled_before
        regions = sum("Torch-Compiled Region" in event.name for event in profile.function_events or ())
        wanted = f"{parts} layers run" if self.scope is Scope.layers else "the decoder runs"
        yield Evidence(
            "compile",
            f"{wanted} compiled code, without compiling again",
            f"{regions} entries into compiled code in one forward, {anew} graphs compiled anew",
            regions >= parts and anew == 0,
        )
        seen = self.report()
        yield Evidence(
            "compile",
            f"at most {self.max_graph_breaks} graph breaks",
            f"{seen.graphs} graphs in {seen.seconds:.1f} s, {len(seen.breaks)} graph breaks"
            + "".join(f"; {each.where}: {each.reason}" for each in seen.breaks),
            seen.graphs > 0 and len(seen.breaks) <= self.max_graph_breaks,
        )
        if self.mode is CompileMode.reduce_overhead:
            yield Evidence(
                "compile",
                "recorded as CUDA graphs",
                "; ".join([f"{seen.skipped_cuda_graphs} graphs not recorded", *seen.why_skipped]),
                seen.skipped_cuda_graphs == 0,
            )

    def _new_monitor(self) -> CompileMonitor:
        return CompileMonitor(
            "layer" if self.scope is Scope.layers else "decoder",
            self.mode.value,
            self.max_graph_breaks,
            self.max_recompiles,
        )


def _layer_seconds(facts: Facts) -> float:
    """What forward and backward of a decoder layer take for a micro-batch, by the arithmetic of its matmuls alone."""
    text = facts.text
    width = text.get("hidden_size", 0)
    heads = text.get("num_attention_heads") or 1
    size = text.get("head_dim") or width // heads
    attention = 2 * width * size * (heads + (text.get("num_key_value_heads") or heads))
    weights = attention + 3 * width * (text.get("intermediate_size") or 4 * width)
    passes = 4 if facts.techniques.lora.enabled else 6
    return float(passes * weights * facts.tokens / RATE)


def _rope_kinds(facts: Facts) -> list[str]:
    """The types of RoPE that the model will have, in transformers' words."""
    if facts.techniques.rope.enabled:
        return [facts.techniques.rope.type.value]
    own = facts.text.get("rope_parameters") or {}  # one for all layers, or by the type of layer
    return [str(one.get("rope_type", "default")) for one in (own, *own.values()) if isinstance(one, dict)]


def _draws_in_the_head(facts: Facts) -> bool:
    """Whether the loss computes a head again that has an adapter with dropout (Loss.sum)."""
    lora, liger = facts.techniques.lora, facts.techniques.liger
    if not (lora.enabled and lora.dropout and liger.enabled and liger.fused_linear_cross_entropy is Switch.on):
        return False
    model: Any = skeleton(facts.model)
    head = model.get_output_embeddings() if model is not None else None
    names = [name for name, module in model.named_modules() if module is head] if head is not None else ["lm_head"]
    return any(f".{name}".endswith(f".{target}") for name in names for target in lora.target_modules)


def _without_compiler(facts: Facts) -> Iterator[str]:
    """On a CPU torch.compile writes C++; on a GPU Triton compiles C to launch its kernels. Both read Python's headers."""
    if facts.device == "cuda":
        if not c_compiler():
            yield (
                "enabled: torch.compile needs a C compiler to launch its kernels, and none is on the PATH (gcc, clang or "
                "$CC). Install one (Debian: apt install gcc), or set it to false."
            )
    else:
        compiler = os.environ.get("CXX", "g++")
        if not shutil.which(compiler) and not shutil.which("clang++"):
            yield (
                f"enabled: torch.compile needs a C++ compiler, and {compiler} is not on the PATH. Install it (Debian: apt "
                "install g++), or set it to false."
            )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield (
            f"enabled: torch.compile needs {header}. Install Python's headers (Debian: apt install python3-dev), or set "
            "it to false."
        )


def _dispatched(
    plain: Callable[..., Any], compiled: Callable[..., Any], whole: bool, *args: Any, **kwargs: Any
) -> Any:
    # A decoder makes the cache itself where it is not told otherwise; a layer is handed one.
    caching = kwargs.get("past_key_values") is not None or (whole and kwargs.get("use_cache") is not False)
    return (plain if caching else compiled)(*args, **kwargs)


def _next_step(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.compiler.cudagraph_mark_step_begin()
    return compiled(*args, **kwargs)
