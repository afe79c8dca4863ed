"""What torch.compile did to a function: how many graphs, where it broke and why, what it compiled again and why.

torch says these things in logs that nobody reads, or not at all: a graph break or a recompilation costs time and changes no
number, so a run is slow and looks right. `Watch` stands at each call of a compiled function and reads torch's own counters
(`torch._dynamo.utils.counters`, `graph_break_reasons`, `get_compilation_metrics`, as in torch 2.11 to 2.13) when a call
compiled something; a call that did not costs two dictionary look-ups. What others compile meanwhile is not counted.

One thing does change numbers: a Triton kernel of which torch cannot tell what it writes. It takes all its inputs for written,
says so in a warning, and what it makes of that may be wrong (kernels/liger_operators.py has the case). Here it is an error.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxtune.errors import ConfigError

KEPT = 4096
"""Compilations that torch keeps its figures of; 64 unless told."""
LOGGER, UNTOLD = "torch._dynamo", "assuming every input is mutated"
"""Where torch warns, and with what words, that it cannot tell what a kernel writes."""


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
    """Forward graphs; each that is trained has a backward graph beside it."""
    breaks: list[GraphBreak]
    recompiles: list[str]
    """One line a kind of reason: which function, why, how many times."""
    lengths: dict[str, int]
    """Graphs by the shape of the rows, as `1x4096`."""
    seconds: float
    """Spent compiling, forward and backward, from disk or anew."""
    from_disk: int
    """Kernels' code that the cache on disk had."""
    anew: int
    """Kernels' code that was made in this process."""
    cache: str
    skipped_cuda_graphs: int
    """With CUDA graphs: how many were not recorded, as torch counts them."""
    why_skipped: list[str]

    @property
    def recompilations(self) -> int:
        """How often rows of a length that was compiled for already were compiled for again."""
        return sum(self.lengths.values()) - len(self.lengths)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For people, most important first."""
        state = "cold" if not self.from_disk else "warm" if not self.anew else "warm in part"
        rows = ", ".join(f"{shape}: {count}" for shape, count in self.lengths.items())
        yield (
            f"compiled by {self.scope} (mode {self.mode}): {self.graphs} graphs in {self.seconds:.1f} s, "
            f"{len(self.breaks)} graph breaks, {self.recompilations} recompilations; rows {rows}; disk cache {state} "
            f"({self.cache})"
        )
        yield from (f"  graph break at {each.where}: {each.reason}" for each in self.breaks)
        yield from (f"  compiled again: {each}" for each in self.recompiles)
        if self.skipped_cuda_graphs:
            yield f"  not recorded as CUDA graphs: {self.skipped_cuda_graphs}. " + "; ".join(self.why_skipped)


@dataclass
class Watch:
    """The calls of one model's compiled functions, and the budget that they have."""

    scope: str
    mode: str
    max_graph_breaks: int
    max_recompiles: int
    graphs: int = 0
    breaks: dict[GraphBreak, int] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    """Why something was compiled again, and how often that was so."""
    lengths: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    """torch's numbers of our compilations; the backward pass of one has the same number."""
    since: float = field(default_factory=time.time)
    """torch counts from the beginning again after a reset."""
    skips: int = 0
    """Graphs of this process that torch had not recorded as CUDA graphs before us."""
    told: dict[Any, int] = field(default_factory=dict)
    """How many failures of guards torch had noted, by code, when we looked last."""

    def begin(self) -> None:
        """Before the first call."""
        logger = logging.getLogger(LOGGER)
        logger.addFilter(_UNTOLD)  # once, however often it is asked for
        if not logger.isEnabledFor(logging.WARNING):  # TORCH_LOGS=-dynamo would keep the warning from us, too
            logger.disabled = False
            logger.setLevel(logging.WARNING)
        torch._dynamo.utils.set_compilation_metrics_limit(KEPT)
        self.skips = self._skips()
        self._skip_failures()

    def call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it. Raises ConfigError where it cannot be compiled as asked, or where compiling goes beyond the budget."""
        from torch._dynamo import exc, utils  # a second's import, for those who compile

        stats, reasons = utils.counters["stats"], utils.graph_break_reasons
        graphs, known, begun = stats["unique_graphs"], len(reasons), time.time()
        _UNTOLD.take()  # another's
        try:
            result = compiled(*args, **kwargs)
        except Exception as error:
            if untold := _UNTOLD.take():
                raise ConfigError(untold) from error
            if isinstance(error, (exc.Unsupported, exc.UserError, exc.FailOnRecompileLimitHit)):
                raise ConfigError(self._cannot(error)) from error
            raise
        if (
            untold := _UNTOLD.take()
        ):  # of a backward pass compiled ahead (dynamic shapes), whose errors torch only logs
            raise ConfigError(untold)
        if stats["unique_graphs"] != graphs or len(reasons) != known:
            self.graphs += stats["unique_graphs"] - graphs
            self._note(_shape(args, kwargs), reasons[known:], begun)
            self._spend()
        return result

    def forgive(self) -> None:
        """What is compiled from here on is not compiled again: torch was told to forget all of it."""
        self.lengths.clear()
        self._skip_failures()

    def report(self) -> CompileReport:
        ours = [metric for metric in _compilations(self.since) if metric.compile_id in self.ids]
        return CompileReport(
            self.scope,
            self.mode,
            self.graphs,
            list(self.breaks),
            [f"{reason} ({times}x)" if times > 1 else reason for reason, times in self.again.items()],
            dict(self.lengths),
            _sum(ours, "duration_us") / 1e6,
            _sum(ours, "inductor_fx_local_cache_hit_count"),
            _sum(ours, "inductor_fx_local_cache_miss_count"),
            os.environ.get("TORCHINDUCTOR_CACHE_DIR", "off"),
            self._skips() - self.skips,
            sorted({why for metric in ours if (why := getattr(metric, "cudagraph_skip_reason", None))}),
        )

    @staticmethod
    def _skips() -> int:
        return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])

    def _note(self, shape: str, reasons: list[Any], begun: float) -> None:
        self.lengths[shape] += 1
        for reason in reasons:
            frame = reason.user_stack[-1] if reason.user_stack else None
            where = f"{_short(frame.filename)}:{frame.lineno}" if frame else "an unknown place"
            seen = GraphBreak(where, reason.reason.strip().splitlines()[0])
            self.breaks[seen] = self.breaks.get(seen, 0) + 1
        for code, failures in torch._dynamo.utils.guard_failures.items():
            # A guard for each graph that was there already: together they say what was new in this call.
            if new := dict.fromkeys(_why(failure) for failure in failures[self.told.get(code, 0) :]):
                self.again[
                    f"{code.co_name} ({_short(code.co_filename)}:{code.co_firstlineno}): {'; '.join(list(new)[:4])}"
                ] += 1
        self._skip_failures()
        self.ids |= {metric.compile_id for metric in _compilations(begun) if metric.compile_id}

    def _skip_failures(self) -> None:
        """Those up to now are not ours, or are counted."""
        self.told = {code: len(failures) for code, failures in torch._dynamo.utils.guard_failures.items()}

    def _spend(self) -> None:
        """Hold what was compiled so far against the budget."""
        if len(self.breaks) > self.max_graph_breaks:
            places = "\n".join(f"  {each.where}: {each.reason}" for each in self.breaks)
            raise ConfigError(
                f"techniques.compile.max_graph_breaks={self.max_graph_breaks}, and the compiler broke off at "
                f"{len(self.breaks)} places:\n{places}\nChange what runs there, or allow as many breaks."
            )
        shape, graphs = self.lengths.most_common(1)[0]
        if graphs - 1 > self.max_recompiles:
            why = "\n".join(f"  {each}" for each in self.report().recompiles)
            raise ConfigError(
                f"techniques.compile.max_recompiles={self.max_recompiles}, and rows of {shape} were compiled again "
                f"{graphs - 1} times:\n{why}\nA value in a guard that changes from call to call does that: hold it "
                "still, use dynamic=always where it is a length, or allow as many."
            )

    def _cannot(self, error: BaseException) -> str:
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            why = "\n".join(f"  {each}" for each in self.report().recompiles)
            return (
                f"techniques.compile.max_recompiles: torch gave up after so many compilations of one function:\n{why}"
            )
        stack = getattr(error, "real_stack", None)
        where = f"{_short(stack[-1].filename)}:{stack[-1].lineno} in {stack[-1].name}: " if stack else ""
        text = str(error).strip()
        told = [
            line.strip()
            for line in text.splitlines()
            if line.strip().startswith(("Explanation:", "Hint:", "Caused by:"))
        ]
        return (
            f"techniques.compile.fullgraph: the {self.scope} cannot be one graph.\n  {where}{text.splitlines()[0]}\n"
            + "".join(f"  {line}\n" for line in told[:3])
            + "Set fullgraph=false and max_graph_breaks to how many you accept, or turn off what runs there."
        )


class _Untold(logging.Filter):
    """Breaks a compilation off where torch warns that it cannot tell what a kernel writes, before anything of it is kept, and
    before the warning's traceback is printed, which is why this is a filter and no handler.
    """

    seen = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if UNTOLD not in record.getMessage():
            return True
        error = record.exc_info[1] if record.exc_info else None
        last = str(error).strip().splitlines()[-1:] if error else []
        self.seen = (
            f"techniques.compile.enabled: torch {torch.__version__} cannot tell what the Triton kernel "
            f"{_kernel(error) or 'of this model'} writes ({''.join(last) or 'no reason given'}), and would take all "
            "its inputs for written, which has given wrong numbers. Turn off what runs that kernel, or set this to "
            "false."
        )
        raise _refusal()(self.seen)

    def take(self) -> str:
        """What was seen since the last time."""
        seen, self.seen = self.seen, ""
        return seen


_UNTOLD = _Untold()


def _kernel(error: BaseException | None) -> str:
    """The name of the kernel that torch was looking at when it met `error`: from the function of torch's that caught it."""
    kernel: Any = error.__traceback__.tb_frame.f_locals.get("kernel") if error and error.__traceback__ else None
    while hasattr(kernel, "fn"):  # an autotuner has a kernel, which has a Python function
        kernel = kernel.fn
    return getattr(kernel, "__name__", "")


@functools.cache
def _refusal() -> type[ConfigError]:
    from torch._dynamo.exc import ShortenTraceback

    class Refusal(ConfigError, ShortenTraceback):
        """Torch's compilers wrap all errors but their own kind: as one of these it leaves a backward pass as what it is."""

        def __init__(self, text: str) -> None:
            ShortenTraceback.__init__(self, text, first_useful_frame=None)

    return Refusal


def _compilations(since: float) -> list[Any]:
    """torch's figures of what was compiled, here and in other places, from the time `since` on."""
    return [
        metric for metric in torch._dynamo.utils.get_compilation_metrics() if (metric.start_time or 0) >= since - 0.001
    ]


def _sum(metrics: list[Any], name: str) -> int:
    """Of a figure that not every compilation has, nor every release of torch."""
    return sum(getattr(metric, name, None) or 0 for metric in metrics)


def _why(reason: str) -> str:
    """The guard that failed, without torch's number of the graph before it, which differs each time."""
    first = " ".join(reason.strip().splitlines()[0].partition("(HINT")[0].split())
    number, _, rest = first.partition(": ")
    return rest if "/" in number and rest else first


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Rows x tokens of the first tensor of a call: hidden states of a layer, token ids of a decoder."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return "x".join(str(size) for size in next(tensors).shape[:2])


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
