"""RoPE scaling (YaRN, linear, dynamic NTK, Llama 3), written into the config before the model is built.

A rotary embedding turns dimension pair i of a query or key at position m by the angle m * inv_freq[i]. A model that was
trained on L positions has never seen larger angles of the slow pairs, so a longer context needs their frequencies lowered.
Each type here is a rule for inv_freq; YaRN also scales the logits by its attention factor. The rules are written out below
from their papers, and `verify` compares them with what the built model holds: a scaling that is set too late, or without
its original length, changes nothing or the wrong thing, and transformers says nothing.

Models whose layer types have a rotary embedding each (Gemma 3) get the scaling on their full-attention layers only: a
sliding window never sees a distance that it was not trained on.

A model or an adapter that was trained with a scaling carries it in its config.json (see model.save), which transformers and
vLLM read. Asking for the same once more changes nothing; asking for another takes the original length to be named.

Sources: YaRN, arXiv 2309.00071 (section 3.2 and its released code); Llama 3.1, the released `apply_scaling`; linear,
arXiv 2306.15595; dynamic NTK, arXiv 2309.00071 appendix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.techniques.base import Evidence, Technique

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

FULL = "full_attention"
CLOSE = 1e-5
"""Relative error of a frequency in float32 that counts as none; another scaling is off by 1e-2 and more."""


class RopeType(str, Enum):
    yarn = "yarn"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"


@dataclass
class Rope(Technique):
    type: RopeType = RopeType.yarn
    factor: float = field(default=1.0, metadata={"min": 1})
    """The new context as a multiple of the original one."""
    original_max_position_embeddings: Optional[int] = field(default=None, metadata={"min": 1})
    """The context that the model was trained on; null: the model config's max_position_embeddings, or where a scaling like
    this one is there already, what that one started from."""
    beta_fast: float = 32.0
    """yarn only: pairs that turn more often than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn only: pairs that turn less often than this are slowed down by `factor`; between the two, by a part of it."""
    attention_factor: Optional[float] = None
    """yarn only: the scale of queries and of keys, so its square is that of the logits; null: 0.1 ln(factor) + 1."""
    low_freq_factor: float = 1.0
    """llama3 only: as beta_slow."""
    high_freq_factor: float = 4.0
    """llama3 only: as beta_fast."""

    def check(self, facts: Facts) -> Iterator[str]:
        config = facts.model.get("text_config") or facts.model
        kind = config.get("model_type", "this model")
        if not config.get("rope_parameters"):
            yield f"enabled: {kind} has no rotary position embeddings to scale. Set it to false."
            return
        if kind == "phi3":
            yield (
                "enabled: a phi3 config keeps no RoPE type but longrope (transformers reads any other back as that), so "
                "the result could not be loaded. Set it to false."
            )
        current = _flat(config["rope_parameters"])
        if current is None:
            yield f"enabled: {kind} has rotary embeddings by layer type and none for {FULL}. Set it to false."
            return
        if "mrope_section" in current:
            yield f"enabled: {kind} splits its rotary dimensions among axes (mrope). Set it to false."
        if not self.factor > 1:
            yield f"factor: {self.factor} lengthens nothing. Set it to the new context over the original one, above 1."
        before, original = current.get("rope_type", "default"), self._original(config)
        if (
            before != "default"
            and self.original_max_position_embeddings is None
            and self._written(current, original) != current
        ):
            yield (
                f"original_max_position_embeddings: {kind} already scales its RoPE ({before}, {_scaling(current)}). To "
                "replace that, say which context the factor is a multiple of. To keep it, set enabled to false."
            )
        elif original is None or original < 1:
            yield f"original_max_position_embeddings: {original}, and it must be a positive number of tokens."
        elif facts.sequence_length > self.factor * original > 0:
            yield (
                f"factor: {self.factor} x {original} positions = {self.factor * original:.0f}, fewer than "
                f"data.sequence_length={facts.sequence_length}. Set it to at least "
                f"{math.ceil(facts.sequence_length / original * 100) / 100}."
            )
        if self.type is RopeType.dynamic and current is not config["rope_parameters"]:
            yield f"type: dynamic is not defined for rotary embeddings by layer type ({kind}). Use yarn or linear."
        yield from self._options()

    def _options(self) -> Iterator[str]:
        fresh = Rope()
        for name, owner in (
            ("beta_fast", RopeType.yarn),
            ("beta_slow", RopeType.yarn),
            ("attention_factor", RopeType.yarn),
            ("low_freq_factor", RopeType.llama3),
            ("high_freq_factor", RopeType.llama3),
        ):
            if self.type is not owner and getattr(self, name) != getattr(fresh, name):
                yield f"{name}: type={self.type.value} does not read it, only {owner.value} does. Remove it."
        if self.type is RopeType.yarn and not self.beta_fast > self.beta_slow > 0:
            yield f"beta_fast: {self.beta_fast} must be above beta_slow={self.beta_slow}, and that above 0."
        if self.attention_factor is not None and not self.attention_factor > 0:
            yield f"attention_factor: {self.attention_factor} must be above 0."
        if self.type is RopeType.llama3 and not self.high_freq_factor > self.low_freq_factor > 0:
            yield (
                f"high_freq_factor: {self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}, and that "
                "above 0."
            )

    def configure(self, hf_config: Any) -> None:
        """Write all of rope_parameters at once: rope_theta kept, and the original length beside the raised one."""
        config = hf_config.get_text_config()
        original = self._original(config.to_dict())
        assert original is not None, "check() refuses this"
        current = _flat(config.rope_parameters)
        assert current is not None, "check() refuses this"
        nested = current is not config.rope_parameters
        parameters = self._written(current, original)
        config.rope_parameters = {**config.rope_parameters, FULL: parameters} if nested else parameters
        # Dynamic NTK measures growth from max_position_embeddings, so raising it would switch the scaling off.
        grown = original if self.type is RopeType.dynamic else round(self.factor * original)
        config.max_position_embeddings = grown

    def _written(self, current: dict[str, Any], original: int | None) -> dict[str, Any]:
        """The rope parameters that this scaling is, over a model's `current` ones and its `original` context."""
        parameters: dict[str, Any] = {
            key: current[key] for key in ("rope_theta", "partial_rotary_factor") if key in current
        }
        parameters.update(rope_type=self.type.value, factor=float(self.factor))
        if self.type in (RopeType.yarn, RopeType.llama3):
            parameters["original_max_position_embeddings"] = original
        if self.type is RopeType.yarn:
            parameters.update(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
            if self.attention_factor is not None:
                parameters["attention_factor"] = self.attention_factor
        if self.type is RopeType.llama3:
            parameters.update(low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)
        return parameters

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Dynamic only: forget the longest row seen so far before each forward.

        transformers keeps it, which makes a step depend on all the steps before it, and a resumed run unlike an unbroken one.
        """
        if self.type is RopeType.dynamic:
            for _, rotary in _rotaries(model):
                rotary.register_forward_pre_hook(_forget)
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        parameters = _flat(config.rope_parameters) or {}
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(head * parameters.get("partial_rotary_factor", 1.0))
        original = self.original_max_position_embeddings or round(
            config.max_position_embeddings / (1 if self.type is RopeType.dynamic else self.factor)
        )
        length = round(self.factor * original)
        inv_freq, attention = self.frequencies(dim, parameters["rope_theta"], original, length)
        asked = (
            f"{self.type.value}: {original} -> {length} positions, attention factor {attention:.4f}, "
            f"inv_freq {digest(inv_freq, inv_freq)}"
        )
        rotaries = _rotaries(model)
        if not rotaries:
            yield Evidence("rope", asked, "no rotary embedding in the built model", False)
        for prefix, rotary in rotaries:
            if self.type is RopeType.dynamic:
                device = next(model.parameters()).device
                rotary(torch.zeros(1, device=device), torch.tensor([[0, length - 1]], device=device))
            seen = getattr(rotary, f"{prefix}inv_freq").double().cpu()
            scale = float(getattr(rotary, f"{prefix}attention_scaling"))
            if self.type is RopeType.dynamic:
                _forget(rotary, ())
            if seen.shape != inv_freq.shape:
                yield Evidence("rope", asked, f"inv_freq of {len(seen)} pairs in place of {len(inv_freq)}", False)
                continue
            error = ((seen - inv_freq).abs() / inv_freq).max().item()
            yield Evidence(
                "rope",
                asked,
                f"inv_freq {digest(seen, inv_freq)}, within {error:.1e} of the formula; attention factor {scale:.4f}",
                error < CLOSE and abs(scale - attention) < 1e-6,
            )

    def frequencies(self, dim: int, base: float, original: int, length: int) -> tuple[torch.Tensor, float]:
        """The reference: inv_freq (float64, [dim/2]) and the attention factor, for a rotary embedding of `dim` dimensions.

        `base` is rope_theta, `original` the context trained on, `length` the row's length (dynamic only).
        """
        plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if self.type is RopeType.linear:
            return plain / self.factor, 1.0
        if self.type is RopeType.dynamic:
            grown = base * (self.factor * max(length, original) / original - (self.factor - 1)) ** (dim / (dim - 2))
            return grown ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
        if self.type is RopeType.llama3:
            turns = original * plain / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = kept.clamp(0, 1)
            return kept * plain + (1 - kept) * plain / self.factor, 1.0

        def pair_that_turns(times: float) -> float:
            return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), dim - 1)
        slowed = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        attention = self.attention_factor if self.attention_factor is not None else 0.1 * math.log(self.factor) + 1
        return plain * (1 - slowed) + plain / self.factor * slowed, attention

    def _original(self, config: dict[str, Any]) -> int | None:
        """The context that the factor is a multiple of: the one named, that of such a scaling in place, or the model's."""
        positions: int | None = config.get("max_position_embeddings")
        if self.original_max_position_embeddings or positions is None:
            return self.original_max_position_embeddings or positions
        current = _flat(config["rope_parameters"]) or {}
        kept = positions if self.type is RopeType.dynamic or not self.factor > 1 else round(positions / self.factor)
        before = current.get("original_max_position_embeddings", kept)
        return before if self._written(current, before) == current else positions


def own_scaling(config: dict[str, Any]) -> str | None:
    """How a language model scales its RoPE without being asked to, from its config as a plain dict; None: it does not."""
    current = _flat(config.get("rope_parameters") or {}) or {}
    if current.get("rope_type", "default") == "default":
        return None
    return f"{current['rope_type']} ({_scaling(current)}), up to {config.get('max_position_embeddings')} positions"


def digest(inv_freq: torch.Tensor, formula: torch.Tensor) -> str:
    """A short name for frequencies: 12 hexadecimal digits of the SHA-256 of their float32 values.

    Devices and libraries round the last bits otherwise, so a value that agrees with the formula's is taken as that: the names
    of two tensors are equal exactly where each pair of frequencies is, on any device.
    """
    agreed = torch.where((inv_freq - formula).abs() < CLOSE * formula, formula, inv_freq)
    return hashlib.sha256(agreed.float().numpy().tobytes()).hexdigest()[:12]


def _flat(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters of the full-attention layers: those of all layers, or the one entry of a dict by layer type."""
    nested = any(isinstance(value, dict) for value in parameters.values())
    return parameters.get(FULL) if nested else parameters


def _scaling(parameters: dict[str, Any]) -> str:
    shown = ("factor", "original_max_position_embeddings")
    return ", ".join(f"{key}={value}" for key, value in parameters.items() if key in shown)


def _rotaries(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The text model's rotary modules, each with the prefix of its buffers' names."""
    kind = model.config.get_text_config().model_type  # type: ignore[union-attr, operator]
    return [
        (prefix, module)
        for module in model.modules()
        for prefix in ("", f"{FULL}_")
        if hasattr(module, f"{prefix}inv_freq")
        and hasattr(module, f"{prefix}attention_scaling")
        and getattr(getattr(module, "config", None), "model_type", kind) == kind
    ]


def _forget(rotary: Any, arguments: Any) -> None:
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)
