"""RoPE scaling (YaRN, linear, dynamic NTK, Llama 3), written into the config before the model is built.

A rotary embedding rotates dimension pair i of a query or key at position m by the angle m * inv_freq[i]. In training
on L positions the slow pairs never reach large angles, so a longer context needs lower frequencies for these pairs.
Each type of scaling is a rule for inv_freq. YaRN also scales the logits by its attention factor. `frequencies`
computes the rules from their papers, and `verify` compares the result with the built model. This comparison is needed:
if a scaling is set too late, or without its original length, transformers silently applies no scaling or a wrong one.

Models with a rotary embedding for each layer type (Gemma 3) get the scaling on their full-attention layers only. A
model or an adapter that was trained with a scaling has this scaling in its config.json (see export/save.py). A recipe
that asks for the same scaling changes nothing. A recipe that asks for another scaling must give the original length.

Sources: YaRN: arXiv 2309.00071, section 3.2 and its released code. Dynamic NTK: the appendix of the same paper. Llama
3.1: the released `apply_scaling`. Linear: arXiv 2306.15595.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.facts.options import RopeOptions, RopeType
from fxtune.facts.run import Facts
from fxtune.models.dims import layer_config
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.base import Evidence, Technique

FULL = "full_attention"
CLOSE = 1e-5
"""Largest relative error of a float32 frequency. The frequencies of another scaling differ by 1e-2 or more."""


BY_LONGEST = {RopeType.dynamic.value, "longrope"}
"""Types whose frequencies depend on the longest row that the model has seen so far."""
PARAMETERS: dict[RopeType, dict[str, float | None]] = {
    RopeType.yarn: {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    RopeType.llama3: {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""The parameters of each type, with their usual values."""


@dataclass
class Rope(RopeOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        config = facts.text
        kind = config.get("model_type", "this model")
        if not config.get("rope_parameters"):
            yield f"enabled: {kind} has no rotary position embeddings to scale. Set it to false."
            return
        if kind == "phi3":
            yield (
                "enabled: transformers reads any RoPE type in a phi3 config as longrope, so the result could not be "
                "loaded. Set it to false."
            )
        current = _flat(config["rope_parameters"])
        if current is None:
            yield f"enabled: {kind} has rotary embeddings by layer type and none for {FULL}. Set it to false."
            return
        if current.get("rope_type") == "proportional":
            yield (
                f"enabled: {kind} rotates a part of each head by the frequencies of the whole head (proportional "
                "RoPE), which these scalings do not know. Set it to false."
            )
            return
        if "mrope_section" in current:
            yield f"enabled: {kind} splits its rotary dimensions among axes (mrope). Set it to false."
        if not self.factor > 1:
            yield (
                f"factor: {self.factor} does not extend the context. Set it to the new context over the original one, "
                "above 1."
            )
        before, original = current.get("rope_type", "default"), self._original(config)
        unnamed = self.original_max_position_embeddings is None
        if before != "default" and unnamed and self._written(current, original) != current:
            yield (
                f"original_max_position_embeddings: {kind} already scales its RoPE ({before}, {_scaling(current)}). "
                "To replace that scaling, give the context that `factor` multiplies. To keep it, set enabled to "
                "false."
            )
        elif original is None or original < 1:
            yield f"original_max_position_embeddings: {original} is no number of tokens. Set it."
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
        known = PARAMETERS.get(self.type, {})
        for name in self.parameters:
            if name not in known:
                has = f"has {', '.join(known)}" if known else "has no parameters"
                yield f"parameters: type={self.type.value} {has}, and not {name}. Remove it."
        for above, below in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            if above in known and not self._parameter(above) > self._parameter(below):
                yield f"parameters: {above}={self._parameter(above)} must be above {below}={self._parameter(below)}."

    def _parameter(self, name: str) -> float:
        """The value of the parameter `name`, from the recipe or the usual one."""
        value = {**PARAMETERS[self.type], **self.parameters}[name]
        assert value is not None, name
        return value

    def configure(self, hf_config: Any) -> None:
        """Replace rope_parameters, keep rope_theta, and raise max_position_embeddings."""
        config = hf_config.get_text_config()
        original, current = self._original(config.to_dict()), _flat(config.rope_parameters)
        assert original is not None, "check() refuses this"
        assert current is not None, "check() refuses this"
        nested = current is not config.rope_parameters
        parameters = self._written(current, original)
        config.rope_parameters = {**config.rope_parameters, FULL: parameters} if nested else parameters
        # Dynamic NTK compares rows with max_position_embeddings, so raising it would switch the scaling off.
        config.max_position_embeddings = original if self.type is RopeType.dynamic else round(self.factor * original)

    def _written(self, current: dict[str, Any], original: int | None) -> dict[str, Any]:
        """The rope parameters of this scaling for a model that has the parameters `current` and the trained context
        `original`."""
        parameters: dict[str, Any] = {
            key: current[key] for key in ("rope_theta", "partial_rotary_factor") if key in current
        }
        parameters |= {"rope_type": self.type.value, "factor": float(self.factor)}
        if owned := {**PARAMETERS.get(self.type, {}), **self.parameters}:
            parameters["original_max_position_embeddings"] = original
        return parameters | {name: value for name, value in owned.items() if value is not None}

    def apply(self, model: PreparedModel, world: World) -> None:
        """For dynamic RoPE, let each forward pass forget the longest row, so that no step depends on earlier steps."""
        if self.type is RopeType.dynamic:
            for _, rotary in _rotaries(model.module):
                rotary.register_forward_pre_hook(_reset)

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        config = model.module.config.get_text_config()
        parameters = _flat(config.rope_parameters) or {}
        kinds = getattr(config, "layer_types", None) or []
        layer = layer_config(config, kinds.index(FULL) if FULL in kinds else 0)
        head = getattr(layer, "head_dim", None) or config.hidden_size // layer.num_attention_heads
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
        rotaries = _rotaries(model.module)
        if not rotaries:
            yield Evidence("rope", asked, "no rotary embedding in the built model", False)
        for prefix, rotary in rotaries:
            if self.type is RopeType.dynamic:
                device = next(model.module.parameters()).device
                rotary(torch.zeros(1, device=device), torch.tensor([[0, length - 1]], device=device))
            seen = getattr(rotary, f"{prefix}inv_freq").double().cpu()
            scale = float(getattr(rotary, f"{prefix}attention_scaling"))
            if self.type is RopeType.dynamic:
                _reset(rotary, ())
            if seen.shape != inv_freq.shape:
                yield Evidence("rope", asked, f"inv_freq has {len(seen)} pairs, not {len(inv_freq)}", False)
                continue
            error = ((seen - inv_freq).abs() / inv_freq).max().item()
            yield Evidence(
                "rope",
                asked,
                f"inv_freq {digest(seen, inv_freq)}, within {error:.1e} of the formula; attention factor {scale:.4f}",
                error < CLOSE and abs(scale - attention) < 1e-6,
            )

    def frequencies(self, dim: int, base: float, original: int, length: int) -> tuple[torch.Tensor, float]:
        """Compute the expected inv_freq (float64, [dim/2]) and attention factor of a rotary embedding.

        `dim`: its number of dimensions; `base`: rope_theta; `original`: the trained context; `length`: the row's
        length, which only dynamic reads.
        """
        plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if self.type is RopeType.linear:
            return plain / self.factor, 1.0
        if self.type is RopeType.dynamic:
            grown = base * (self.factor * max(length, original) / original - (self.factor - 1)) ** (dim / (dim - 2))
            return grown ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
        if self.type is RopeType.llama3:
            rotations = original * plain / (2 * math.pi)
            low_rotations = self._parameter("low_freq_factor")
            share = (rotations - low_rotations) / (self._parameter("high_freq_factor") - low_rotations)
            share = share.clamp(0, 1)  # the weight of the unscaled frequency
            return share * plain + (1 - share) * plain / self.factor, 1.0

        def pair_with(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_with(self._parameter("beta_fast"))), 0)
        high = min(math.ceil(pair_with(self._parameter("beta_slow"))), dim - 1)
        slowed = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        attention = self.parameters.get("attention_factor", 0.1 * math.log(self.factor) + 1)
        return plain * (1 - slowed) + plain / self.factor * slowed, attention

    def _original(self, config: dict[str, Any]) -> int | None:
        """The context that `factor` multiplies: the option's; else the original length in the config, if the config
        already has this scaling; else the model's max_position_embeddings."""
        positions: int | None = config.get("max_position_embeddings")
        if self.original_max_position_embeddings or positions is None:
            return self.original_max_position_embeddings or positions
        current = _flat(config["rope_parameters"]) or {}
        trained = positions if self.type is RopeType.dynamic or not self.factor > 1 else round(positions / self.factor)
        before = current.get("original_max_position_embeddings", trained)
        return before if self._written(current, before) == current else positions


def rope_types(facts: Facts) -> set[str]:
    """The types of RoPE that the model will have, as transformers names them."""
    if facts.techniques.rope.enabled:
        return {facts.techniques.rope.type.value}
    own = facts.text.get("rope_parameters") or {}  # parameters of all layers, or a dict by layer type
    return {str(options.get("rope_type", "default")) for options in (own, *own.values()) if isinstance(options, dict)}


def own_scaling(config: dict[str, Any]) -> str | None:
    """A description of the RoPE scaling that a language model's config (a plain dict) has; None without scaling."""
    current = _flat(config.get("rope_parameters") or {}) or {}
    if current.get("rope_type", "default") == "default":
        return None
    return f"{current['rope_type']} ({_scaling(current)}), up to {config.get('max_position_embeddings')} positions"


def digest(inv_freq: torch.Tensor, formula: torch.Tensor) -> str:
    """12 hexadecimal digits of the SHA-256 of the frequencies in float32.

    Devices and libraries round the last bits differently. So a frequency that is close to the formula's value is
    replaced by that value. Then two digests are equal, on any device, exactly if all frequencies agree.
    """
    agreed = torch.where((inv_freq - formula).abs() < CLOSE * formula, formula, inv_freq)
    return hashlib.sha256(agreed.float().numpy().tobytes()).hexdigest()[:12]


def _flat(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters of full-attention layers. `parameters`: one set for all layers, or a dict by layer type."""
    nested = any(isinstance(value, dict) for value in parameters.values())
    return parameters.get(FULL) if nested else parameters


def _scaling(parameters: dict[str, Any]) -> str:
    shown = ("factor", "original_max_position_embeddings")
    return ", ".join(f"{key}={value}" for key, value in parameters.items() if key in shown)


def _rotaries(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(prefix, module) for each rotary module of the text model. `prefix` begins the names of the module's buffers."""
    kind = model.config.get_text_config().model_type  # type: ignore[union-attr, operator]
    return [
        (prefix, module)
        for module in model.modules()
        for prefix in ("", f"{FULL}_")
        if hasattr(module, f"{prefix}inv_freq")
        and hasattr(module, f"{prefix}attention_scaling")
        and getattr(getattr(module, "config", None), "model_type", kind) == kind
    ]


def _reset(rotary: Any, arguments: Any) -> None:
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)
