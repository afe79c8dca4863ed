"""One attention backend: its features, its operators in the profiler, and the reasons why it cannot run.

Where a backend cannot run, transformers would in most cases silently use another kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.system.machine.packages import Package
from fxtune.techniques.attention import packed
from fxtune.techniques.attention.packed import Core

SINKS = {"flint", "gpt_oss", "granite_swa", "granitemoe_swa"}
"""Models with an extra learned score in each softmax."""

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

Reason = tuple[str, str]
"""(cause, change that helps), both without a full stop."""


@dataclass(frozen=True)
class Backend:
    """The requirements and features of one backend. The defaults describe a fused kernel on a GPU."""

    name: str
    """The backend's name in recipes."""
    implementation: str
    """The backend's name in transformers' registry of attention functions."""
    what: str
    """The backend's name in messages."""
    ran: str = ""
    """A pattern for the name of the backend's operator or kernel in the profiler."""
    operators: tuple[str, ...] = ()
    """The backend's operators, as rules of activation checkpointing name them."""
    core: Core | None = None
    """The backend's attention over packed documents, if fxtune registers it with transformers (packed.py)."""
    package: Package | None = None
    """The package that the backend needs."""
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 0))
    """The first compute capability that the backend supports, and the first higher one that it does not support."""
    gpu: bool = True
    half: bool = True
    """Whether the backend computes only in float16 and bfloat16."""
    head_dim: int = 256
    """The largest width of a head. 0 means any width."""
    window: bool = True
    bidirectional: bool = True
    """Whether a token may attend to later tokens."""
    softcap: bool = False
    dropout: bool = False
    sinks: bool = False
    pieces: bool = True
    """Whether the backend works with rows that ranks share (parallel.context)."""
    deterministic: bool = True
    """Whether the backward pass can give the same bits each time."""
    shares: bool = False
    """Whether `core` takes bounds of keys, so that documents can share tokens (data/batches/shared_prompts.py)."""
    recordable: bool = False
    """Whether a CUDA graph can record the backend: the host never reads the bounds of documents."""
    fused: bool = True
    """Whether the backend stores no scores, and does not copy keys and values for each query head."""
    flag: str = "_supports_flash_attn"
    """The attribute of transformers' model classes that says whether a model can call this backend."""
    part_of: str = ""
    """The implementation of another backend that may call the same operator."""
    elsewhere: bool = False
    """Whether other parts of a model than attention run this operator, too."""

    def refusals(self, facts: Facts) -> Iterator[Reason]:
        """Yield each reason why this backend cannot run under `facts`."""
        model, kind = facts.text, kind_of(facts)
        first, end = self.capability
        if self.gpu and facts.device != "cuda":
            yield "needs a GPU, and this run is on a CPU", "Use sdpa or eager"
        elif self.gpu and facts.capability and not first <= facts.capability < end:
            yield (
                f"does not support {facts.device_name} (compute capability {_dotted(facts.capability)}; it supports "
                f"{_dotted(first)} to below {_dotted(end)})",
                "Use sdpa, or auto",
            )
        if (package := self.package) is not None:
            version = facts.packages.get(package.name)
            if package.name in facts.broken:
                yield f"needs {package.name}, which {facts.lacks(package.name)}", "Use auto, or another backend"
            elif version is None:
                yield f"needs the package {package.name}", f"Install it: {package.install}"
            elif package.version and version != package.version:
                needs = f"needs {package.name} {package.version}, and {version} is installed"
                yield needs, f"Install it: {package.install}"
        if self.half and facts.compute_dtype not in ("float16", "bfloat16"):
            yield (
                f"computes in float16 and bfloat16, not in {facts.compute_dtype}",
                "Set model.dtype=bfloat16, or techniques.precision.autocast=bfloat16",
            )
        yield from self.refused_heads(facts)
        chunk = model.get("attention_chunk_size", 0) if "chunked_attention" in (model.get("layer_types") or ()) else 0
        if chunk and self.given_bounds and facts.sequence_length > chunk:
            yield (
                f"has no chunked attention, and {kind} has chunks of {chunk} tokens",
                "Use flex or eager, or shorten data.sequence_length",
            )
        for has, name, value in (
            (self.softcap, "soft cap on attention scores", model.get("attn_logit_softcapping")),
            (self.dropout, "dropout in attention", next((model[name] for name in DROPOUTS if model.get(name)), None)),
            (self.bidirectional, "attention to later tokens", not Shape.of(facts.model).causal),
            (self.window, "sliding window", _window(facts)),
            (self.sinks, "attention sinks", kind in SINKS),
        ):
            if value and not has:
                shown = "" if value is True else f" ({value})"
                yield f"does not support {kind}'s {name}{shown}", "Use eager, or auto"
        if facts.deterministic and not self.deterministic:
            yield "does not guarantee the same bits each time", "Set run.deterministic=false, or use auto"
        if facts.image_features and facts.images_see_both_ways and not self.takes_masks:
            yield f"takes no mask for the images of {kind}, whose tokens see each other", "Use sdpa or eager, or auto"
        if facts.degrees.context > 1 and not self.pieces:
            yield "makes its mask of one piece of a row (parallel.context)", "Use flash4, sdpa or eager"
        yield from self.more_refusals(facts)
        if not offers(kind, self.flag):
            yield f"is not available for {kind} in transformers", "Use auto"

    def refused_heads(self, facts: Facts) -> Iterator[Reason]:
        wrong = [width for width in head_widths(facts) if width > self.head_dim or width % 8]
        if self.head_dim and wrong:
            heads = f"takes heads of up to {self.head_dim} in steps of 8, and {kind_of(facts)}'s have {wrong[0]}"
            yield heads, "Use eager, or auto"

    def more_refusals(self, facts: Facts) -> Iterator[Reason]:
        """Yield the reasons that no field expresses."""
        yield from ()

    def why_passed_over(self, facts: Facts) -> str | None:
        """Why `auto` does not choose this backend under `facts`, or None if it may."""
        return next((cause for cause, _ in self.refusals(facts)), None)

    def running(self, facts: Facts) -> Backend:
        """The backend that runs if a recipe asks for this one."""
        return self

    def records(self, facts: Facts) -> bool:
        """Whether a CUDA graph can record this backend under `facts`."""
        return self.recordable

    def prepare(self) -> None:
        """Register the implementation with transformers. Call this before the model is built."""
        if self.core is not None:
            packed.register(self.implementation, self.core, self.sinks, self.dropout)

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count calls that the profiler does not see. Only backends with such calls override this method."""
        yield [0]

    @property
    def given_bounds(self) -> bool:
        """Whether transformers passes the bounds of documents to this backend."""
        return self.core is not None or self.flag == "_supports_flash_attn"

    def given_mask(self, seen: Tensor) -> Optional[Tensor]:
        """The mask that transformers passes on to this backend, or None if the backend takes no mask.

        `seen`: bool [rows, 1, length, length], true where a token attends."""
        return seen if self.core is not None else None

    @property
    def takes_masks(self) -> bool:
        return self.given_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool)) is not None

    def row_mask(self, query: Tensor, cu_seqlens: Tensor, window: int) -> Optional[Tensor]:
        """The mask of whole rows that the backend needs, or None if it separates documents by `cu_seqlens`."""
        return None


def offers(kind: str, flag: str) -> bool:
    """Whether transformers' class for this model type has the flag. A model with code of its own counts as having only
    sdpa's flag."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if kind not in CONFIG_MAPPING:
        return flag in ("", "_supports_sdpa")
    config: Any = CONFIG_MAPPING[kind]
    # The decoder of a model that reads images may have no class with a head.
    classes = next((classes for classes in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING) if config in classes), None)
    if classes is None:
        return flag in ("", "_supports_sdpa")
    return not flag or bool(getattr(classes[config], flag, False))


def kind_of(facts: Facts) -> str:
    return str(facts.text.get("model_type", "this model"))


def head_widths(facts: Facts) -> set[int]:
    """The widths of all heads: of queries and of values, in each layer."""
    return Shape.of(facts.model).head_widths


def _window(facts: Facts) -> int:
    """The sliding window, or 0 if no row is longer than the window or no layer has one."""
    window = max((each.window for each in Shape.of(facts.model).attentions), default=0)
    return window if facts.sequence_length > window else 0


def mask_bytes(facts: Facts) -> int:
    """Bytes of transformers' mask of packed rows."""
    return facts.micro_batch_size * facts.sequence_length**2


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
