"""How much work training is, and how fast it is being done: model FLOPs, tokens/s, MFU, memory, time spent waiting.

Model FLOPs are the ones that the mathematics needs, so that a method which computes more (recomputed activations, padding,
attention to masked keys) scores lower, not higher:

- a matmul of a trained weight with N parameters costs 6N a token (forward 2, input gradient 2, weight gradient 2), of a
  frozen one 4N: it has no weight gradient (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). An embedding lookup is no
  matmul; a tied output head is one. The head counts at supervised positions only: no other needs logits.
- causal attention over a document of S tokens costs 2 S^2 d a head and layer forward (two matmuls, half of each masked) and
  2.5 times that backward, where the scores are computed again: 3.5 forward costs in all, as in Dao 2023 (arXiv 2307.08691,
  section 4.1). Documents packed into one row do not see each other, so lengths are squared one by one; a sliding window
  of W keys leaves S W - W^2/2 of S^2/2 pairs.

MFU is this rate over the device's *dense* peak for the dtype of the matmuls. Where either is not known, it is not shown.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn

from fxtune.system.host import process_age
from fxtune.system.units import GIB
from fxtune.techniques.estimate.cards import peak_flops

ATTENTION_PASSES = 3.5  # forward 1, backward 2.5


@dataclass(frozen=True)
class TrainingCost:
    """Model FLOPs of forward and backward."""

    per_token: float
    """Matmuls of the body, for each token."""
    per_target: float
    """Matmuls of the output head, for each supervised token."""
    attention: tuple[tuple[int | None, float], ...]
    """(window in keys or None, FLOPs for each pair of a query and a key), one entry for each kind of layer."""

    def flops(self, lengths: np.ndarray, supervised: int) -> float:
        """Of documents with these lengths in tokens, `supervised` of whose tokens are targets."""
        lengths = np.asarray(lengths, np.float64)
        total = self.per_token * lengths.sum() + self.per_target * supervised
        for window, per_pair in self.attention:
            seen = lengths if window is None else np.minimum(lengths, window)
            total += per_pair * (lengths * seen - seen * seen / 2).sum()
        return float(total)


def training_cost(model: nn.Module) -> TrainingCost | None:
    """Count `model`'s matmuls as it stands, adapters included, by which of its weights require a gradient.

    None where these formulas do not hold: mixtures of experts, latent attention, models without attention heads. Small
    change is left out: norms, activations, RoPE, softmax, DoRA's weight norms, the router of nothing.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    attention = _attention(config.get_text_config())
    if attention is None:
        return None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    in_head = {id(module) for module in head.modules()} if head is not None else set()
    body = top = 0.0
    for name, module in model.named_modules():
        if (
            ".original_module" in f".{name}"
        ):  # PEFT keeps the weights that `modules_to_save` replaced; they compute nothing
            continue
        sizes = _matmul(module)
        if sizes is None:
            continue
        trained = any(weight.requires_grad for weight in module.parameters(recurse=False))
        flops = (6.0 if trained else 4.0) * sizes[0] * sizes[1]
        if id(module) in in_head:
            top += flops
        else:
            body += flops
    return TrainingCost(body, top, attention)


def _matmul(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a module that multiplies by a matrix of its own; None for any other.

    Recognised by its attributes, so that quantised and fused linears count with their logical size, not their bytes.
    A wrapper that carries the same attributes, such as PEFT's, is passed over for what it wraps.
    """

    def sizes(candidate: nn.Module) -> tuple[int, int] | None:
        found = (getattr(candidate, "in_features", None), getattr(candidate, "out_features", None))
        if type(candidate).__name__ == "Conv1D":  # GPT-2's linear, transposed
            found = (getattr(candidate, "nx", None), getattr(candidate, "nf", None))
        return found if isinstance(found[0], int) and isinstance(found[1], int) else None  # type: ignore[return-value]

    inner = any(sizes(child) for child in module.modules() if child is not module)
    return None if inner else sizes(module)


def _attention(config: Any) -> tuple[tuple[int | None, float], ...] | None:
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if not isinstance(heads, int) or not isinstance(layers, int) or experts or getattr(config, "kv_lora_rank", None):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_pair = ATTENTION_PASSES * 4.0 * heads * size  # two matmuls of 2 FLOPs a pair and channel
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
        near, far = kinds.count("sliding_attention"), kinds.count("full_attention")
        if near + far != layers:
            return None
        return tuple((reach, per_pair * count) for reach, count in ((window, near), (None, far)) if count)
    if any(kind not in ("full_attention", "sliding_attention") for kind in getattr(config, "layer_types", None) or ()):
        return None
    return ((None, per_pair * layers),)


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: what tensors took on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss, which a process on Linux can inherit from the one that started it.
        high = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if high:
            return int(high[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


class StartupTimer:
    """Where the time from the command to the first line of figures goes: what is compiled in the first steps is in it."""

    begun: ClassVar[bool] = False
    """Whether a run of this process has begun: one of a sweep after the first does not count from the process's start."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        before = 0.0 if StartupTimer.begun else process_age()
        StartupTimer.begun = True
        self._last = clock()
        self.seconds: dict[str, float] = {"imports": before} if before else {}

    def done(self, stage: str) -> None:
        """What ran since the last call was `stage`."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def summary(self) -> str:
        """One line: all of it, and each stage that took half a second or more."""
        parts = [f"{stage} {round(seconds)}" for stage, seconds in self.seconds.items() if seconds >= 0.5]
        return f"from the start to here: {sum(self.seconds.values()):.0f} s" + (
            f" ({', '.join(parts)})" if parts else ""
        )


class Work(Protocol):
    """What a meter asks of a data plan."""

    def lengths(self, step: int) -> np.ndarray:
        """The lengths in tokens of the documents of a step."""

    def supervised(self, step: int) -> int:
        """The targets of a step."""


class Meter:
    """Counts the work of the steps between two readings. Touches no tensor, so it never waits for the device.

    `tokens` and `supervised_tokens`: what the run had seen before this process, so that totals go on after a resume.
    `dtype`: of the matmuls, where autocast makes it another than that of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Work,
        device: torch.device,
        tokens: int = 0,
        supervised_tokens: int = 0,
        dtype: torch.dtype | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = training_cost(model)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_flops(name, dtype or _matmul_dtype(model))
        self.tokens, self.supervised_tokens = tokens, supervised_tokens
        self._plan, self._device, self._clock = plan, device, clock
        self._reset()

    def add(self, step: int, waited: float) -> None:
        """`step` of the plan has been issued; `waited`: seconds in which the loop stood still for its data."""
        lengths, supervised = self._plan.lengths(step), self._plan.supervised(step)
        tokens = int(lengths.sum())
        self.tokens += tokens
        self.supervised_tokens += supervised
        self._steps += 1
        self._tokens += tokens
        self._waited += waited
        if self.cost:
            self._flops += self.cost.flops(lengths, supervised)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside (an evaluation, a checkpoint) out of the rates."""
        self._synchronize()  # else steps still running on the device would be counted as the pause's time
        began = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            self._began += self._clock() - began

    def read(self) -> dict[str, float]:
        """The metrics of the steps since the last reading. To be called after the loop has waited for the device."""
        seconds = max(self._clock() - self._began, 1e-9)
        figures = {
            "train/tokens": float(self.tokens),
            "train/supervised_tokens": float(self.supervised_tokens),
            "train/tokens_per_second": self._tokens / seconds,
            "train/step_seconds": seconds / max(self._steps, 1),
            "train/data_wait": min(self._waited / seconds, 1.0),
        }
        if self.cost and self.peak:
            figures["train/mfu"] = self._flops / seconds / self.peak
        figures["train/memory_gib"] = memory_gib(self._device)
        if self._device.type == "cuda":
            # What the allocator holds: far above memory_gib means fragmentation, and an out-of-memory to come.
            figures["train/memory_reserved_gib"] = torch.cuda.max_memory_reserved(self._device) / GIB
        self._reset()
        return figures

    def _reset(self) -> None:
        self._began = self._clock()
        self._steps = self._tokens = 0
        self._waited = self._flops = 0.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _matmul_dtype(model: nn.Module) -> str:
    """The dtype that most of the matmuls run in, `tf32` included."""
    share: dict[torch.dtype, int] = {}
    for module in model.modules():
        sizes = _matmul(module)
        weight = getattr(module, "weight", None)
        if sizes and isinstance(weight, torch.Tensor):
            dtype = weight.dtype if weight.dtype.is_floating_point else getattr(model.config, "dtype", None)
            if isinstance(dtype, torch.dtype):
                share[dtype] = share.get(dtype, 0) + sizes[0] * sizes[1]
    dtype = max(share, key=lambda each: share[each]) if share else torch.float32
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")
