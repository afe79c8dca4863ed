"""Throughput of training: model FLOPs, tokens/s, MFU, memory, and the time spent waiting for data.

Model FLOPs count only the work that the model needs, so extra work (recomputed activations, padding, attention to
masked keys) lowers MFU:

- A matmul with N trained parameters costs 6N per token (forward 2, input gradient 2, weight gradient 2). A matmul with
  frozen parameters costs 4N (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). A tied output head is a matmul, an
  embedding lookup is not. The head counts only at supervised positions, because no other position needs logits.
- Causal attention over a document of S tokens costs 2 S^2 d per head and layer in the forward pass (two matmuls, half
  of each masked). The backward pass recomputes the scores and costs 2.5 times as much (Dao 2023, arXiv 2307.08691,
  section 4.1).
  Each document of a packed row is squared by itself; a sliding window of W keys leaves S W - W^2/2 of S^2/2 pairs.
- Linear attention with a decaying state costs the same for each token, however long the document is. Counted are three
  times its forward pass, and the products that the kernels compute again in the backward pass (upstream/fla.py). A
  convolution over a few tokens counts as a matmul with its weights.
- The linears of a vision encoder count for each patch of an image, the projector's for each feature. All L patches of
  an image, or of a tile, see each other: 4 L^2 d per head and layer in the forward pass. Frozen parts cost only a
  forward pass (models/kinds/image_decoder/cost.py). An image's features are tokens of its document, so the decoder
  counts them as it counts text.
- A forward pass without gradient, such as the reference's, costs 2N per token and 2 S^2 d.

MFU is model FLOPs per second divided by the device's *dense* peak for the dtype of the matmuls. Without one of the two
there is no MFU.
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
from typing import Any

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.plan import Plan
from fxtune.estimate.cards import peak_flops
from fxtune.models.dims import Shape
from fxtune.models.experts import described_per_token, follows_interface
from fxtune.models.flops import ATTENTION_PASSES, matmul_sizes, weight_flops
from fxtune.models.kinds.image_decoder.cost import ImageCost, ImageParts
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import decoder_layers
from fxtune.system.terminal.units import GIB

MIXERS = {"full_attention", "sliding_attention", "attention", "hybrid", "linear_attention", "mamba", "conv"}
COUNTED = MIXERS | {"moe", "mlp"}
"""Values of `layer_types` for which the formulas may hold. Attention to chunks or to chosen tokens is not counted."""


@dataclass(frozen=True)
class TrainingCost:
    """Model FLOPs of forward and backward, and of forward passes without gradient."""

    per_token: float
    """FLOPs of the layers' matmuls and recurrences, per token."""
    per_target: float
    """FLOPs of the output head's matmul, per supervised token."""
    attention: tuple[tuple[int | None, float], ...]
    """(window in keys or None, FLOPs per pair of a query and a key) for each kind of layer."""
    image_cost: ImageCost | None = None
    """The cost of images; None if the model reads no images."""

    def flops(self, lengths: np.ndarray, supervised: int) -> float:
        """FLOPs for documents with these `lengths` in tokens and `supervised` target tokens in total. The vision
        encoder is not included."""
        lengths = np.asarray(lengths, np.float64)
        total = self.per_token * lengths.sum() + self.per_target * supervised
        for window, per_pair in self.attention:
            seen = lengths if window is None else np.minimum(lengths, window)
            total += per_pair * (lengths * seen - seen * seen / 2).sum()
        return float(total)


def training_cost(model: nn.Module, forward_passes: int = 0) -> TrainingCost | None:
    """Count the matmuls of `model` and its adapters, with the backward pass of weights that require a gradient.

    `forward_passes`: passes without gradient over the same tokens, in each step.

    In a mixture of experts, only the experts that a token uses count. Returns None if the formulas do not hold: for
    experts outside of transformers' interface, and for layers that mix tokens in another way, such as Mamba-1. Norms,
    activations, RoPE, routers and softmax are negligible and left out."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    shape = _shape(model, config)
    if shape is None:
        return None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    in_head = {id(module) for module in head.modules()} if head is not None else set()
    of_recurrences = (
        count * ((3 + forward_passes) * forward + again)
        for kind, count in shape.counts
        for forward, again in (each.flops for each in kind.recurrences)
    )
    where = {"body": sum(of_recurrences, 0.0), "head": 0.0}
    used = described_per_token(model, config.get_text_config())
    if used is None:
        return None
    images, base = kind_of(config).images, getattr(model, "get_base_model", lambda: model)()
    is_stored = images is not None and isinstance(getattr(base.model, "get_image_features", None), StoredFeatures)
    image_parts = ImageParts.of(images, base) if images else None
    of_images = {id(module) for module in image_parts or ()}
    modules: list[Any] = list(model.modules())
    wrappers = [module for module in modules if hasattr(module, "num_experts") and hasattr(module, "lora_A")]
    of_experts: dict[int, int] = {
        id(part): wrapper.num_experts
        for wrapper in wrappers
        for part in (*wrapper.lora_A.modules(), *wrapper.lora_B.modules())
    }
    for name, module in model.named_modules():
        if ".original_module" in f".{name}":  # the weights that PEFT's `modules_to_save` replaced are not used
            continue
        if id(module) in of_images:
            continue
        if follows_interface(module):
            where["body"] += used * sum(
                weight_flops(weight.requires_grad, forward_passes) * weight[0].numel()
                for weight in module.parameters(recurse=False)
                if weight.dim() == 3
            )
            continue
        sizes = matmul_sizes(module)
        if isinstance(module, nn.Conv1d):
            sizes = module.weight[0].numel(), module.out_channels
        if sizes is None:
            continue
        trained = any(weight.requires_grad for weight in module.parameters(recurse=False))
        flops = weight_flops(trained, forward_passes) * sizes[0] * sizes[1]
        if id(module) in of_experts:  # an adapter of all experts in one matrix
            flops *= used / of_experts[id(module)]
        where["head" if id(module) in in_head else "body"] += flops
    image_cost = image_parts.training_cost(forward_passes) if image_parts and not is_stored else None
    attention = _attention(shape, ATTENTION_PASSES + forward_passes)
    return TrainingCost(where["body"], where["head"], attention, image_cost)


def _shape(model: nn.Module, config: Any) -> Shape | None:
    """The shape of the model; None if the formulas do not hold for it."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if any(kind not in COUNTED for kind in kinds):
        return None
    linears = [id(part) for layer in decoder_layers(model) for part in layer.modules() if matmul_sizes(part)]
    if len(set(linears)) < len(linears):  # layers share modules, and each module would count once
        return None
    shape = Shape.of(config.to_dict())
    mixes = any(kind.attentions or kind.recurrences or kind.convolved for kind in shape.kinds)
    return shape if mixes and all(kind.is_known for kind in shape.kinds) else None


def _attention(shape: Shape, passes: float) -> tuple[tuple[int | None, float], ...]:
    """The value of TrainingCost.attention."""
    found: dict[int | None, float] = {}
    for each, count in shape.attentions.items():  # two matmuls of 2 FLOPs a pair and channel
        found[each.window or None] = found.get(each.window or None, 0.0) + passes * 4.0 * each.products * count
    return tuple(found.items())


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: the memory of tensors on a GPU, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    status = Path("/proc/self/status")  # on Linux ru_maxrss may be inherited from the parent process
    if status.exists() and (high := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(high[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


class Meter:
    """Counts the work of the steps between two calls of read(). It reads no tensor, so it never waits for the device.

    `tokens` and `supervised_tokens`: totals of the run before this process. `dtype`: the autocast dtype, if any.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        device: torch.device,
        tokens: int = 0,
        supervised_tokens: int = 0,
        dtype: torch.dtype | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: int = 1,
        forward_passes: int = 0,
    ) -> None:
        """`ranks`: how many devices share the steps. The figures count the work of all devices; MFU is their mean.
        `forward_passes`: see training_cost()."""
        self.cost, self.ranks = training_cost(model, forward_passes), ranks
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_flops(name, dtype or _matmul_dtype(model))
        self.tokens, self.supervised_tokens = tokens, supervised_tokens
        self.plan, self._device, self._clock = plan, device, clock
        self._has_images = False
        self._reset()

    def add(self, step: int, waited: float) -> None:
        """Count `step` of the plan. `waited`: seconds that the loop waited for its data."""
        lengths, supervised = self.plan.lengths(step), self.plan.supervised(step)
        tokens = int(lengths.sum())
        self.tokens += tokens
        self.supervised_tokens += supervised
        self._steps += 1
        self._tokens += tokens
        self._waited += waited
        if self.cost:
            self._flops += self.cost.flops(lengths, supervised) - self.cost.flops(self.plan.shared(step), 0)
        images = self.plan.images(step)
        self._images += len(images.features)
        self._has_images |= self._images > 0
        if self.cost and self.cost.image_cost and len(images.features):
            cost = self.cost.image_cost
            self._flops += cost.flops(cost.shape.work(images.features, images.heights, images.widths))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body (an evaluation, a checkpoint) from the rates."""
        self._synchronize()  # so that steps still running on the device do not count as part of the pause
        began = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            self._began += self._clock() - began

    def read(self, waited: float | None = None) -> dict[str, float]:
        """The metrics of the steps since the last read(). Call it after the loop has waited for the device. `waited`:
        the longest wait of a rank for data, in seconds; None: this process is the only one."""
        seconds = max(self._clock() - self._began, 1e-9)
        figures = {
            "train/tokens": float(self.tokens),
            "train/supervised_tokens": float(self.supervised_tokens),
            "train/tokens_per_second": self._tokens / seconds,
            "train/ranks": float(self.ranks),
            "train/step_seconds": seconds / max(self._steps, 1),
            "train/data_wait": min((self._waited if waited is None else waited) / seconds, 1.0),
        }
        if self._has_images:
            figures["train/images_per_second"] = self._images / seconds
        if self.ranks > 1:
            figures["train/tokens_per_second_per_rank"] = self._tokens / seconds / self.ranks
        if self.cost and self.peak:
            figures["train/mfu"] = self._flops / seconds / self.peak / self.ranks
        figures["train/memory_gib"] = memory_gib(self._device)
        if self._device.type == "cuda":
            # The allocator's memory. If it is far above memory_gib, memory is fragmented.
            figures["train/memory_reserved_gib"] = torch.cuda.max_memory_reserved(self._device) / GIB
        self._reset()
        return figures

    def _reset(self) -> None:
        self._began = self._clock()
        self._steps = self._tokens = self._images = 0
        self._waited = self._flops = 0.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _matmul_dtype(model: nn.Module) -> str:
    """The dtype of most matmul weights, by size; `tf32` for float32 weights if TF32 is on."""
    share: dict[torch.dtype, int] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (sizes := matmul_sizes(module)) and isinstance(weight, torch.Tensor):
            dtype = weight.dtype if weight.dtype.is_floating_point else getattr(model.config, "dtype", None)
            if isinstance(dtype, torch.dtype):
                share[dtype] = share.get(dtype, 0) + sizes[0] * sizes[1]
    dtype = max(share, key=lambda each: share[each]) if share else torch.float32
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")
