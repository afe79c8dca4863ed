"""A report of torch.compile's work: the number of graphs, and the places and reasons of breaks and recompilations.

torch reports this in logs that nobody reads. `CompileMonitor` calls the compiled functions. After a call that compiled
something it reads torch's own counters (as in torch 2.11 to 2.14); any other call costs two dictionary look-ups. Code
that others compile is not counted.

If torch cannot determine which inputs a Triton kernel writes, it assumes all of them and only warns; the resulting
code may be wrong, as for Liger's RMSNorm in torch 2.11. Here this is an error.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxtune.errors import ConfigError
from fxtune.upstream import torch as upstream

METRICS_LIMIT = 4096
"""Compilations whose metrics torch keeps; its default is 64."""
TOWER = "of images"
"""Stands for the shape of rows where layers of a vision encoder are compiled."""
VARIANTS = 4
"""How many times MAX_RECOMPILES is allowed there: for one image and for several, and for the proof's arguments."""
MAX_RECOMPILES = 8
"""Rows of one length may be compiled again so often. Training, evaluation, the first layer (whose input needs no
gradient) and each kind of layer take one recompilation each."""


@dataclass(frozen=True)
class GraphBreak:
    where: str
    """file:line"""
    reason: str


@dataclass(frozen=True)
class CompileReport:
    scope: str
    mode: str
    graphs: int
    """Forward graphs; in training each has a backward graph, too."""
    breaks: list[GraphBreak]
    recompiles: list[str]
    """One line for each reason: which function, why, how many times."""
    lengths: dict[str, int]
    """Graphs by the shape of the rows, such as `1x4096`; TOWER for images of any size."""
    seconds: float
    """Spent compiling forward and backward, including loading from disk."""
    from_disk: int
    """Kernels that the cache on disk had."""
    anew: int
    """Kernels that were compiled in this process."""
    cache: str
    skipped_cuda_graphs: int
    """With CUDA graphs: how many graphs torch did not record."""
    why_skipped: list[str]

    @property
    def recompilations(self) -> int:
        """How often rows of an already compiled length were compiled again."""
        return sum(self.lengths.values()) - len(self.lengths)

    def lines(self) -> Iterator[str]:
        """The report as lines for the terminal, the most important first."""
        state = "cold" if not self.from_disk else "warm" if not self.anew else "partly warm"
        rows = ", ".join(f"{shape}: {count}" for shape, count in self.lengths.items())
        yield (
            f"compiled by {self.scope} (mode {self.mode}): {self.graphs} graphs in {self.seconds:.1f} s, "
            f"{len(self.breaks)} graph breaks, {self.recompilations} recompilations; rows {rows}; disk cache {state} "
            f"({self.cache})"
        )
        yield from (f"  graph break at {graph_break.where}: {graph_break.reason}" for graph_break in self.breaks)
        yield from (f"  compiled again: {reason}" for reason in self.recompiles)
        if self.skipped_cuda_graphs:
            yield f"  not recorded as CUDA graphs: {self.skipped_cuda_graphs}. " + "; ".join(self.why_skipped)


@dataclass
class CompileMonitor:
    """Calls the compiled functions of one model, counts what is compiled, and fails beyond MAX_RECOMPILES."""

    scope: str
    mode: str
    graphs: int = 0
    breaks: Counter[GraphBreak] = field(default_factory=Counter)
    recompiles: Counter[str] = field(default_factory=Counter)
    """Reasons for which something was compiled again."""
    lengths: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    """torch's ids of our compilations; a backward pass has the id of its forward pass."""
    since: float = field(default_factory=time.time)
    """When counting began. torch's ids start again after a reset, so the time excludes earlier compilations."""
    skips_before: int = 0
    """Graphs that torch had not recorded as CUDA graphs when counting began."""
    counted_failures: dict[Any, int] = field(default_factory=dict)
    """By code object: how many of torch's guard failures are counted already, or belong to others' code."""

    def start(self) -> None:
        """Begin to count. Call it before the first call()."""
        logger = logging.getLogger(upstream.COMPILER_LOG)
        logger.addFilter(_UNKNOWN_WRITES)
        if not logger.isEnabledFor(logging.WARNING):  # TORCH_LOGS=-dynamo would also hide the warning from the filter
            logger.disabled = False
            logger.setLevel(logging.WARNING)
        upstream.keep_compilations(METRICS_LIMIT)
        self.skips_before = _cuda_graph_skips()
        self._skip_failures()

    def call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """compiled(...). Raises ConfigError if it cannot be compiled as the recipe says, or if it is
        compiled too often."""
        return self._call(_shape(args, kwargs), compiled, *args, **kwargs)

    def call_in_vision_encoder(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call() for a layer of a vision encoder, whose graph serves images of all sizes."""
        return self._call(TOWER, compiled, *args, **kwargs)

    def _call(self, shape: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stats, reasons = upstream.counters()["stats"], upstream.graph_breaks()
        graphs_before, breaks_before, begun = stats["unique_graphs"], len(reasons), time.time()
        _UNKNOWN_WRITES.take()  # left by another function
        try:
            result = compiled(*args, **kwargs)
        except Exception as error:
            if message := _UNKNOWN_WRITES.take():
                raise ConfigError(message) from error
            if isinstance(error, upstream.compiler_errors()):
                raise ConfigError(self._explain(error)) from error
            raise
        # With dynamic shapes torch compiles the backward pass now, and only logs its errors.
        if message := _UNKNOWN_WRITES.take():
            raise ConfigError(message)
        if stats["unique_graphs"] != graphs_before or len(reasons) != breaks_before:
            self.graphs += stats["unique_graphs"] - graphs_before
            self._count(shape, reasons[breaks_before:], begun)
            self._check_limit()
        return result

    def allow_recompiling(self) -> None:
        """Call it after torch._dynamo.reset(): compiling all code once more does not count as recompilations."""
        self.lengths.clear()
        self._skip_failures()

    def report(self) -> CompileReport:
        ours = [metric for metric in _compilations(self.since) if metric.compile_id in self.ids]
        return CompileReport(
            self.scope,
            self.mode,
            self.graphs,
            list(self.breaks),
            [f"{reason} ({times}x)" if times > 1 else reason for reason, times in self.recompiles.items()],
            dict(self.lengths),
            _sum(ours, "duration_us") / 1e6,
            _sum(ours, "inductor_fx_local_cache_hit_count"),
            _sum(ours, "inductor_fx_local_cache_miss_count"),
            os.environ.get("TORCHINDUCTOR_CACHE_DIR", "off"),
            _cuda_graph_skips() - self.skips_before,
            sorted({why for metric in ours if (why := metric.cudagraph_skip_reason)}),
        )

    def _count(self, shape: str, reasons: list[Any], begun: float) -> None:
        self.lengths[shape] += 1
        for reason in reasons:
            frame = reason.user_stack[-1] if reason.user_stack else None
            where = f"{_short(frame.filename)}:{frame.lineno}" if frame else "an unknown place"
            self.breaks[GraphBreak(where, reason.reason.strip().splitlines()[0])] += 1
        for code, failures in upstream.guard_failures().items():
            # torch records a failed guard for each existing graph: together they show what was new in this call.
            uncounted = failures[self.counted_failures.get(code, 0) :]
            if new := dict.fromkeys(map(_failed_guard, uncounted)):
                where = f"{_short(code.co_filename)}:{code.co_firstlineno}"
                self.recompiles[f"{code.co_name} ({where}): {'; '.join(list(new)[:4])}"] += 1
        self._skip_failures()
        self.ids |= {metric.compile_id for metric in _compilations(begun) if metric.compile_id}

    def _skip_failures(self) -> None:
        self.counted_failures = {code: len(failures) for code, failures in upstream.guard_failures().items()}

    def _check_limit(self) -> None:
        shape, graphs = max(self.lengths.items(), key=lambda item: item[1] / (VARIANTS if item[0] == TOWER else 1))
        if graphs - 1 > MAX_RECOMPILES * (VARIANTS if shape == TOWER else 1):
            raise ConfigError(
                f"techniques.compile: rows of {shape} were compiled again {graphs - 1} times:\n{self._reasons()}\n"
                "A value in a guard changes from call to call: keep it constant, or use dynamic=always if it is a "
                "length."
            )

    def _reasons(self) -> str:
        return "\n".join(f"  {reason}" for reason in self.report().recompiles)

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, upstream.recompile_limit_error()):
            return "techniques.compile: torch gave up after too many compilations of one function:\n" + self._reasons()
        stack = getattr(error, "real_stack", None)
        where = f"{_short(stack[-1].filename)}:{stack[-1].lineno} in {stack[-1].name}: " if stack else ""
        first, *others = [line.strip() for line in str(error).strip().splitlines()]
        hints = [line for line in others if line.startswith(("Explanation:", "Hint:", "Caused by:"))]
        return (
            f"techniques.compile.fullgraph: the {self.scope} cannot be one graph.\n  {where}{first}\n"
            + "".join(f"  {line}\n" for line in hints[:3])
            + "Set fullgraph=false, or turn off the option that runs there."
        )


class _UnknownWrites(logging.Filter):
    """Stops a compilation when torch warns that it cannot determine what a kernel writes: before torch keeps any code
    and before the warning's traceback is printed, unlike a handler."""

    message = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if not upstream.is_unknown_writes(record):
            return True
        error = record.exc_info[1] if record.exc_info else None
        last = str(error).strip().splitlines()[-1:] if error else []
        self.message = (
            f"techniques.compile.enabled: torch {torch.__version__} cannot determine what the Triton kernel "
            f"{_kernel(error) or 'of this model'} writes ({''.join(last) or 'no reason given'}), and would compute "
            "wrong numbers. Turn off the option that runs this kernel, or set techniques.compile.enabled=false."
        )
        raise upstream.unwrapped_error(ConfigError)(self.message)

    def take(self) -> str:
        """The message since the last call; empty if there was none."""
        message, self.message = self.message, ""
        return message


_UNKNOWN_WRITES = _UnknownWrites()


def _kernel(error: BaseException | None) -> str:
    """The name of the kernel that torch was analysing, from the frame of torch's function that caught `error`."""
    kernel: Any = error.__traceback__.tb_frame.f_locals.get("kernel") if error and error.__traceback__ else None
    while hasattr(kernel, "fn"):  # an autotuner wraps a kernel, which wraps a Python function
        kernel = kernel.fn
    return getattr(kernel, "__name__", "")


def _compilations(since: float) -> list[Any]:
    """torch's metrics of all compilations of this process from the time `since` on."""
    return [metric for metric in upstream.compilations() if (metric.start_time or 0) >= since - 0.001]


def _sum(metrics: list[Any], name: str) -> int:
    """Not every compilation has each metric."""
    return sum(getattr(metric, name) or 0 for metric in metrics)


def _cuda_graph_skips() -> int:
    return int(upstream.counters()["inductor"]["cudagraph_skips"])


def _failed_guard(reason: str) -> str:
    """The guard that failed, without torch's number of the graph in front, which differs each time."""
    first = " ".join(reason.strip().splitlines()[0].partition("(HINT")[0].split())
    number, _, rest = first.partition(": ")
    return rest if "/" in number and rest else first


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Rows x tokens of a call's first tensor: token ids of a decoder, hidden states of a layer (Gemma 3n: several for
    each token)."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    first = next(tensors)
    return "x".join(map(str, first.shape[:-1] if first.dim() > 2 else first.shape))


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
