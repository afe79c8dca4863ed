"""torch.compile, by decoder layer or for the decoder as a whole, and a report of what the compiler did.

With `scope=layers` all layers of a kind share one compiled graph, so the compile time does not grow with the depth.
Norms, RoPE, SwiGLU and residuals are fused into few kernels. This saves 10 to 16 % of a step on an H200. With
`scope=model` compiling takes minutes at 32 layers, but the CPU has nothing to do between layers.
`mode=reduce_overhead` also records the decoder as CUDA graphs. The head and the loss are not compiled. Parameter names
do not change.

`cuda_graphs` records forward pass, head, loss and backward pass of a micro-batch as one launch (cuda_graphs.py). A run
gets faster if its device finishes a layer before the host has launched the next layer. `auto` calculates this from the
layer's arithmetic (LAUNCH_SECONDS). All shapes must be static, and the host must not read from the device.

Vision encoders are compiled by layer. One graph serves images of all sizes, because a micro-batch has a different
number of patches each time. A vision encoder whose attention splits by images on the host is not compiled
(attention/vision_encoder.py). A frozen vision encoder runs without gradient, so evaluation uses the same graph.

Shapes of rows are static unless `dynamic` says otherwise, so each length of a row compiles once. A graph break or a
recompilation costs time and changes no number. Nobody would notice it, so report.py reports its place and reason. With
`fullgraph` the first graph break ends the run. More than MAX_RECOMPILES recompilations always end it.

CUDA graphs write their results to the same memory each time. So each call of a decoder is marked as a new step, and
gradients are added to memory that the optimizer owns (`keep_gradients`). Otherwise torch would use the recorded
backward pass's memory as the first micro-batch's gradient and add nothing to it (pytorch#169545, #96693).

Compiled code is kept on disk for later starts (compiler_cache.py). Generation with a KV cache runs uncompiled, because
every token would be a new shape.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, UnavailableError
from fxtune.facts.execution import Execution
from fxtune.facts.options import AUTO, CompileMode, CompileOptions, Dynamic, Scope, Switch
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.image_decoder.host_arguments import takes_bounds
from fxtune.models.kinds.image_decoder.parts import encoder_layers, vision_encoders
from fxtune.models.kinds.known import images_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import backbone, decoder_layers, in_mode, outputs, skeleton, without_dropout
from fxtune.system.files.compiler_cache import use_cache_folder
from fxtune.system.machine.facts import c_compiler
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.techniques.attention import recurrent, vision_encoder
from fxtune.techniques.attention.backends.registry import BACKENDS
from fxtune.techniques.base import NO_IMAGE, Evidence, Technique
from fxtune.techniques.compile import residual_pass
from fxtune.techniques.compile.report import MAX_RECOMPILES, TOWER, CompileMonitor, CompileReport
from fxtune.techniques.lora.targets import matches
from fxtune.techniques.rope import BY_LONGEST, rope_types
from fxtune.upstream import torch as upstream

MAX_LENGTHS = 8
LAUNCH_SECONDS = 2e-3
"""The time that the host takes to launch the roughly 150 kernels of a layer's forward and backward pass."""
FLOPS = 4e14
"""The FLOP/s of an H200 in training. `auto` assumes them for any device; a slower one is busy for longer."""
PROBE_IMAGES = 512
"""The number of small images with which verify() compiles a vision encoder that takes all patches in one list."""


MODES = {"default": "default", "reduce_overhead": "reduce-overhead", "max_autotune": "max-autotune-no-cudagraphs"}
DYNAMIC = {Dynamic.never: False, Dynamic.auto: None, Dynamic.always: True}


@dataclass
class Compile(CompileOptions, Technique):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._monitor = self._new_monitor()

    def check(self, facts: Facts) -> Iterator[str]:
        if facts.packing and recurrent.by_document(facts):
            yield (
                "enabled: recurrent layers run packed documents one by one, in shapes that change with each batch. "
                "Set data.packing=false."
            )
        attends = facts.techniques.attention.enabled
        if facts.device == "cuda" and not attends and recurrent.is_served(facts.model):
            yield (
                "enabled: without techniques.attention the recurrent layers run fla-core's own functions, which torch "
                "cannot compile. Set techniques.attention.enabled=true."
            )
        if self.dynamic is Dynamic.never and not facts.rows and not facts.packing:
            yield (
                "enabled: rows of any length would each compile again. Set data.packing=true, or data.buckets, or "
                "dynamic=always."
            )
        if self.dynamic is Dynamic.never and len(facts.rows) > MAX_LENGTHS:
            yield (
                f"enabled: {len(facts.rows)} lengths of a row compile a graph each. Give data.buckets and "
                f"data.length_schedule at most {MAX_LENGTHS}, or set dynamic=always."
            )
        if self.mode is CompileMode.reduce_overhead:
            yield from (f"mode: {reason}" for reason in self._reasons_against_reduce_overhead(facts))
        if self.mode is CompileMode.max_autotune and facts.deterministic:
            yield (
                "mode: max_autotune chooses kernels by timing, so two runs may compute differently. Use default, or "
                "run.deterministic=false."
            )
        if self.cuda_graphs is Switch.on:
            yield from (
                f"cuda_graphs: {reason}, or set this to off." for reason in self._reasons_against_recording(facts)
            )
        yield from (f"enabled: {missing}, or set it to false." for missing in _missing_compiler(facts))

    def resolve(self, facts: Facts) -> str | None:
        if self.cuda_graphs is not Switch.auto:
            return None
        seconds = _layer_seconds(facts)
        digits = 0 if seconds > LAUNCH_SECONDS else 1
        busy = f"a layer keeps the device busy for {seconds * 1e3:.{digits}f} ms of a micro-batch"
        why_not = next(self._reasons_against_recording(facts), None)
        if why_not is None and seconds > LAUNCH_SECONDS:
            why_not = f"{busy}, longer than its launches take"
        self.cuda_graphs = Switch.off if why_not else Switch.on
        reason = why_not or f"{busy}, about as long as its launches"
        return f"cuda_graphs {self.cuda_graphs.value} ({reason})" if facts.device == "cuda" else None

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        return replace(execution, compiled=True, holds_gradients=self.keep_gradients)

    def _reasons_against_recording(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why a training pass cannot be recorded, with what to change."""
        if facts.device != "cuda":
            yield f"CUDA graphs need a GPU, and the device is {facts.device}. Use auto"
        if not facts.rows:
            yield "each length of a row is recorded, and rows have any length. Set data.packing=true, or data.buckets"
        if facts.image_features:
            yield "the images of a micro-batch have another number of patches each time. Use auto"
        if self.mode is CompileMode.reduce_overhead:
            yield "mode=reduce_overhead records its own CUDA graphs. Set mode=default"
        if facts.in_backward:
            yield "weights are updated in hooks, and a replayed graph calls no hooks. Set optimizer.in_backward=off"
        if facts.degrees.context > 1:
            yield "ranks exchange pieces of rows inside a pass (parallel.context). Set parallel.context=1"
        if facts.degrees.shard > 1:
            yield "ranks gather weights inside a pass (parallel.shard). Set parallel.shard=1"
        if not self.fullgraph or self.dynamic is not Dynamic.never:
            yield "a recording needs fullgraph=true and dynamic=never. Set them"
        if "float16" in (facts.dtype, facts.compute_dtype):
            yield "float16's loss scale changes between passes. Use bfloat16"
        checkpointing = facts.techniques.checkpointing
        if checkpointing.enabled and checkpointing.policy not in ("none", "auto"):
            yield (
                f"recomputation (techniques.checkpointing.policy={checkpointing.policy.value}) saves the random "
                "state, which cannot be recorded. Set policy=none"
            )
        if _dropout_in_recomputed_head(facts):
            yield (
                "the fused loss runs the head's adapter again in the backward pass with the same dropout, and the "
                "random state cannot be recorded. Set techniques.lora.dropout=0, or "
                "techniques.liger.enabled=false"
            )
        if types := rope_types(facts) & BY_LONGEST:  # transformers makes a new tensor for a longer row
            yield f"RoPE of type {types.pop()} reads the row length from the device. Use another techniques.rope.type"
        attention = facts.techniques.attention
        name = attention.backend if attention.enabled else AUTO
        if name != AUTO and not (name in BACKENDS and BACKENDS[name].records(facts)):
            other = next(backend.name for backend in BACKENDS.values() if backend.recordable)
            yield (
                f"attention by {name} reads from the device where documents begin. Use "
                f"techniques.attention.backend={other}"
            )

    def _reasons_against_reduce_overhead(self, facts: Facts) -> Iterator[str]:
        if facts.device != "cuda":
            yield f"reduce_overhead records CUDA graphs, and the device is {facts.device}. Use default."
        if self.scope is Scope.layers:
            yield (
                "reduce_overhead by layer would record each layer, because their weights have different addresses. "
                "Set scope=model, or mode=default."
            )
        if facts.degrees.context > 1:
            yield "reduce_overhead records CUDA graphs, and ranks exchange pieces of rows in them. Set mode=default."
        if self.dynamic is not Dynamic.never:
            yield f"reduce_overhead records one graph for each length. Set dynamic=never (it is {self.dynamic.value})."
        if not self.fullgraph:
            yield (
                "reduce_overhead records graphs, and at a graph break their memory is overwritten while it is read. "
                "Set fullgraph=true, or mode=default."
            )

    def apply(self, model: PreparedModel, world: World) -> None:
        from transformers import Cache

        use_cache_folder()
        residual_pass.install()
        # A sweep builds several models in one process. torch would reuse an earlier model's code: the report would not
        # count this code, and its CUDA graphs would hold the earlier model's memory.
        torch.compiler.reset()
        self._monitor = self._new_monitor()
        self._monitor.start()
        lengths = MAX_LENGTHS + 1  # one more for the length of a small row in verify()
        limit = lengths * (MAX_RECOMPILES + 1) + 1  # so high that MAX_RECOMPILES fails before torch's own limit
        upstream.raise_recompile_limit(limit)
        by_layer = self.scope is Scope.layers
        for part in decoder_layers(model.module) if by_layer else [backbone(model.module)]:
            compiled = self._compiled(part.forward, MODES[self.mode.value], DYNAMIC[self.dynamic])
            if self.mode is CompileMode.reduce_overhead:
                compiled = partial(_next_step, compiled)
            compiled = partial(self._monitor.call, compiled)
            part.forward = partial(_unless_caching, part.forward, compiled, Cache, not by_layer)
        # In the vision encoder CUDA graphs would record each number of patches.
        mode = "default" if self.mode is CompileMode.reduce_overhead else MODES[self.mode.value]
        for layer in _encoder_layers(model.module):
            compiled = self._compiled(layer.forward, mode)
            layer.forward = _EncoderLayer(layer, partial(self._monitor.call_for, TOWER, compiled))

    def _compiled(self, forward: Callable[..., Any], mode: str, dynamic: bool | None = None) -> Callable[..., Any]:
        how: dict[str, Any] = {"mode": mode}
        if mode == "default" and torch.are_deterministic_algorithms_enabled():
            # By timing, the compiler decides whether to pad matrices whose width is no multiple of 8. In deterministic
            # mode it never pads. Products of Qwen2.5-VL's vision encoder are 3,420 wide and need it.
            how = {"options": {"force_shape_pad": True}}
        return torch.compile(forward, fullgraph=self.fullgraph, dynamic=dynamic, **how)

    def drop(self) -> None:
        """Free the recordings of mode=reduce_overhead. Later calls compile all code again, from the cache on disk."""
        if self.enabled and self.mode is CompileMode.reduce_overhead:
            torch.compiler.reset()
            self._monitor.allow_recompiling()

    def report(self) -> CompileReport:
        """A report of what the compiler has done with the model of the last apply()."""
        return self._monitor.report()

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Compile in one forward pass and profile the next one, in which torch marks each entry into compiled code.

        Raises UnavailableError if the compiler fails. Only a run of the model's code shows what it cannot compile.
        """
        try:
            yield from self._observe(model, probe)
        except (ConfigError, upstream.compiler_error()) as error:
            if out_of_memory_reason(error):
                raise
            raise UnavailableError(str(error)) from error

    def _observe(self, prepared: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        model = prepared.module
        run = prepared.first_pass.run if prepared.first_pass else partial(outputs, model, **probe)
        evidence, by_layer = partial(Evidence, "compile"), self.scope is Scope.layers
        parts = len(decoder_layers(model)) if by_layer else 1
        records = self.mode is CompileMode.reduce_overhead
        with without_dropout(model), torch.enable_grad():
            # reduce_overhead needs two passes before the counted one: the second records CUDA graphs. The proof of
            # Liger's kernels may have compiled the graphs already.
            entries, new_graphs = _entries(run, records + (self.report().graphs == 0))
            if new_graphs:
                entries, new_graphs = _entries(run, 0)
        runs = f"{parts} layers run" if by_layer else "the decoder runs"
        yield evidence(
            f"{runs} compiled code, without compiling again",
            f"{entries} entries into compiled code in one forward, {new_graphs} graphs compiled again",
            entries >= parts and new_graphs == 0,
        )
        if layers := _encoder_layers(model):
            yield self._observe_vision_encoder(model, len(layers))
        report = self.report()
        yield evidence(
            "no graph break" if self.fullgraph else "graphs, with breaks between them allowed (fullgraph=false)",
            f"{report.graphs} graphs in {report.seconds:.1f} s, {len(report.breaks)} graph breaks"
            + "".join(f"; {graph_break.where}: {graph_break.reason}" for graph_break in report.breaks),
            report.graphs > 0 and not (self.fullgraph and report.breaks),
        )
        if records:
            yield evidence(
                "recorded as CUDA graphs",
                "; ".join([f"{report.skipped_cuda_graphs} graphs not recorded", *report.why_skipped]),
                report.skipped_cuda_graphs == 0,
            )

    def _observe_vision_encoder(self, model: Any, layers: int) -> Evidence:
        """Evidence from two passes over many small images: torch tunes a kernel once, for the first sizes it meets."""
        known, asked = images_of(model.config), "the vision encoder is compiled"
        with torch.compiler.set_stance("force_eager"):
            if not (example := known.probe(model)):
                return Evidence("compile", asked, NO_IMAGE, True)
        images = PROBE_IMAGES if example["pixel_values"].dim() == 2 else 2
        with in_mode(model, training=True), torch.enable_grad():
            entries, new_graphs = _entries(lambda: known.features(model, images), 1)
        seen = f"{entries} entries for {layers} layers, {new_graphs} graphs compiled again"
        return Evidence("compile", asked, seen, entries >= layers and new_graphs == 0)

    def _new_monitor(self) -> CompileMonitor:
        scope = "layer" if self.scope is Scope.layers else "decoder"
        return CompileMonitor(scope, self.mode.value)


def _entries(run: Callable[[], Any], before: int) -> tuple[int, int]:
    """Call `run` `before` times, then once more. Returns how often this last call enters compiled code, and how many
    graphs it compiles."""
    stats = upstream.counters()["stats"]
    for _ in range(before):
        run()
    graphs = stats["unique_graphs"]
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        run()
    entries = sum("Torch-Compiled Region" in event.name for event in profile.function_events or ())
    return entries, stats["unique_graphs"] - graphs


def _encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of all vision encoders; none if the attention of one splits by images on the host."""
    if any(takes_bounds(part) and not vision_encoder.attends_at_once(part) for part in vision_encoders(model)):
        return []
    return encoder_layers(model)


class _EncoderLayer:
    """A layer's forward() that calls compiled code with images of any size. If nothing needs a gradient, it switches
    gradients off, because torch compiles code with gradient and code without gradient separately."""

    def __init__(self, layer: nn.Module, compiled: Callable[..., Any]) -> None:
        self.compiled, self.called = compiled, False
        self.parts = list(layer.children())
        self.trained = any(weight.requires_grad for weight in layer.parameters())

    def __call__(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.called:  # transformers installs its hooks when the vision encoder first runs
            for part in self.parts:
                upstream.remove_recorders(part)
            self.called = True
        with torch.set_grad_enabled(torch.is_grad_enabled() and (self.trained or states.requires_grad)):
            return self.compiled(*_of_any_size((states, *args)), **_of_any_size(kwargs))


def _of_any_size(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return upstream.of_any_size(values)
    if isinstance(values, dict):
        return {name: _of_any_size(value) for name, value in values.items()}
    return type(values)(map(_of_any_size, values)) if type(values) in (list, tuple) else values


def _layer_seconds(facts: Facts) -> float:
    """Seconds of a decoder layer's forward and backward pass on the device, estimated from its matmuls alone."""
    shape = Shape.of(facts.model)
    weights = sum(count * (kind.narrow + kind.wide + kind.down) for kind, count in shape.counts) / shape.layers
    passes = 4 if facts.techniques.lora.enabled else 6
    return float(passes * weights * facts.tokens / FLOPS)


def _dropout_in_recomputed_head(facts: Facts) -> bool:
    """Whether the fused loss recomputes a head that has an adapter with dropout (objectives/language_model.py)."""
    lora, liger = facts.techniques.lora, facts.techniques.liger
    if not (lora.enabled and lora.dropout and liger.runs("fused_linear_cross_entropy")):
        return False
    model: Any = skeleton(facts.model)
    head = model.get_output_embeddings() if model is not None else None
    names = [name for name, module in model.named_modules() if module is head] if head is not None else ["lm_head"]
    return any(matches(name, target) for name in names for target in lora.target_modules)


def _missing_compiler(facts: Facts) -> Iterator[str]:
    """Yield what torch.compile lacks. On a CPU it needs a C++ compiler. On a GPU Triton compiles C to launch its
    kernels. Both need Python's headers."""
    needs, package = "torch.compile needs", "Install it (Debian: apt install"
    if facts.device == "cuda":
        if not c_compiler():
            yield f"{needs} a C compiler to launch its kernels (gcc, clang, $CC), and finds none. {package} gcc)"
    else:
        compiler = os.environ.get("CXX", "g++")
        if not shutil.which(compiler) and not shutil.which("clang++"):
            yield f"{needs} a C++ compiler, and {compiler} is not on the PATH. {package} g++)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield f"{needs} Python's headers ({header}). {package} python3-dev)"


def _unless_caching(
    uncompiled: Callable[..., Any],
    compiled: Callable[..., Any],
    cache: type,
    is_decoder: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # A decoder makes a KV cache unless use_cache is false. A layer gets the cache as an argument, whose name varies.
    caching = any(isinstance(value, cache) for value in (*args, *kwargs.values()))
    caching = caching or (is_decoder and kwargs.get("use_cache") is not False)
    return (uncompiled if caching else compiled)(*args, **kwargs)


def _next_step(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.compiler.cudagraph_mark_step_begin()
    return compiled(*args, **kwargs)
