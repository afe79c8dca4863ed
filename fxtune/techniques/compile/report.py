"""A report of torch.compile's work: the number of graphs, and the places and reasons of breaks and recompilations.

torch reports these facts in logs that nobody reads. `CompileMonitor` calls the compiled functions. After a call that
compiled something, it reads torch's own counters (as they are in torch 2.11 to 2.15). Any other call costs two
dictionary look-ups. The report does not count code that other parts of the process compile.

If torch cannot determine which inputs a Triton kernel writes, it assumes that the kernel writes all of them, and only
warns. The compiled code may then be wrong, as for Liger's RMSNorm in torch 2.11. fxtune makes this warning an error.
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
"""The number of compilations whose metrics torch keeps. torch's default is 64."""
TOWER = "of images"
"""The name for layers of a vision encoder in place of a shape of rows."""
VARIANTS = 4
"""A vision encoder may be compiled again VARIANTS x MAX_RECOMPILES times: for one image, for several images, and for
the arguments of the proof."""
MAX_RECOMPILES = 8
"""How often rows of one length may be compiled again. Training, evaluation, the first layer (whose input needs no
gradient) and each kind of layer take one recompilation each."""


@dataclass(frozen=True)
class GraphBreak:
    where: str
    """The place in the code, as file:line."""
    reason: str


@dataclass(frozen=True)
class CompileReport:
    scope: str
    mode: str
    graphs: int
    """The number of forward graphs. In training each of them has a backward graph, too."""
    breaks: list[GraphBreak]
    recompiles: list[str]
    """A line for each reason: the function, why it was compiled again, and how often."""
    lengths: dict[str, int]
    """The number of graphs for each shape of rows, such as `1x4096`. The key TOWER stands for images of any size."""
    seconds: float
    """Seconds of compiling forward and backward graphs and of loading kernels from disk."""
    from_disk: int
    """The number of kernels that were loaded from the cache on disk."""
    anew: int
    """The number of kernels that were compiled in this process."""
    cache: str
    skipped_cuda_graphs: int
    """How many graphs torch did not record as CUDA graphs, if it should record them."""
    why_skipped: list[str]

    @property
    def recompilations(self) -> int:
        """How often rows were compiled again although their length had been compiled before."""
        return sum(self.lengths.values()) - len(self.lengths)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for the terminal, the most important one first."""
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
    """How often each reason made torch compile something again."""
    lengths: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    """torch's ids of the compilations of this model. A backward pass has the id of its forward pass."""
    since: float = field(default_factory=time.time)
    """When counting began. torch numbers compilations from 0 again after a reset, so the time tells which are new."""
    skips_before: int = 0
    """How many graphs torch had left unrecorded before counting began."""
    counted_failures: dict[Any, int] = field(default_factory=dict)
    """How many of torch's guard failures of each code object are counted already, or belong to other code."""

    def start(self) -> None:
        """Begin to count. This method must run before the first call()."""
        logger = logging.getLogger(upstream.COMPILER_LOG)
        logger.addFilter(_UNKNOWN_WRITES)
        if not logger.isEnabledFor(logging.WARNING):  # TORCH_LOGS=-dynamo would also hide the warning from the filter
            logger.disabled = False
            logger.setLevel(logging.WARNING)
        upstream.keep_compilations(METRICS_LIMIT)
        self.skips_before = _cuda_graph_skips()
        self._skip_failures()

    def call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return compiled(...). Raises ConfigError if the function cannot be compiled as the recipe says, or if it was
        compiled too often."""
        return self.call_for(_shape(args, kwargs), compiled, *args, **kwargs)

    def call_for(self, shape: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call() that counts for the key `shape` of `lengths`: one graph of a vision encoder serves all images."""
        stats, reasons = upstream.counters()["stats"], upstream.graph_breaks()
        graphs_before, breaks_before, begun = stats["unique_graphs"], len(reasons), time.time()
        _UNKNOWN_WRITES.take()  # drop a message that another function left
        try:
            result = compiled(*args, **kwargs)
        except Exception as error:
            if message := _UNKNOWN_WRITES.take():
                raise ConfigError(message) from error
            if isinstance(error, upstream.compiler_errors()):
                raise ConfigError(self._explain(error)) from error
            raise
        # With dynamic shapes torch has compiled the backward pass in this call. It logs errors of that and goes on.
        if message := _UNKNOWN_WRITES.take():
            raise ConfigError(message)
        if stats["unique_graphs"] != graphs_before or len(reasons) != breaks_before:
            self.graphs += stats["unique_graphs"] - graphs_before
            self._count(shape, reasons[breaks_before:], begun)
            self._check_limit()
        return result

    def allow_recompiling(self) -> None:
        """After torch.compiler.reset() all code is compiled once more. Do not count this as recompilations."""
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
            # torch records a failed guard for each graph that exists. Together they show what this call changed.
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
    """Stops a compilation when torch warns that it cannot determine what a kernel writes. A filter runs before torch
    keeps any code and before the warning's traceback is printed; a handler would be too late."""

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
        """Return the message that came since the last call of take(), or an empty text."""
        message, self.message = self.message, ""
        return message


_UNKNOWN_WRITES = _UnknownWrites()


def _kernel(error: BaseException | None) -> str:
    """The name of the kernel that torch was analysing. torch's function that caught `error` has it in its frame."""
    kernel: Any = error.__traceback__.tb_frame.f_locals.get("kernel") if error and error.__traceback__ else None
    while hasattr(kernel, "fn"):  # an autotuner wraps a kernel, which wraps a Python function
        kernel = kernel.fn
    return getattr(kernel, "__name__", "")


def _compilations(since: float) -> list[Any]:
    """torch's metrics of all compilations in this process since the time `since`."""
    return [metric for metric in upstream.compilations() if (metric.start_time or 0) >= since - 0.001]


def _sum(metrics: list[Any], name: str) -> int:
    """The sum of the metric `name`. A compilation that lacks it counts as 0."""
    return sum(getattr(metric, name) or 0 for metric in metrics)


def _cuda_graph_skips() -> int:
    return int(upstream.counters()["inductor"]["cudagraph_skips"])


def _failed_guard(reason: str) -> str:
    """The guard that failed. torch's number of the graph in front of it is left out, because it differs each time."""
    first = " ".join(reason.strip().splitlines()[0].partition("(HINT")[0].split())
    number, _, rest = first.partition(": ")
    return rest if "/" in number and rest else first


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The shape of a call's first tensor as "rows x tokens". It holds a decoder's token ids or a layer's hidden states
    (in Gemma 3n several hidden states for each token)."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    first = next(tensors)
    return "x".join(map(str, first.shape[:-1] if first.dim() > 2 else first.shape))


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
