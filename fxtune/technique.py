"""The contract of a technique: one optimisation or method that a recipe can ask for.

A technique is one file and one dataclass. Its fields are its options, so the recipe's YAML is its constructor. It answers
three questions: can this act here (`check`, before a weight is loaded), how is it done (`configure` on the Hugging Face
config, `apply` on the model), and did it act (`verify`, by observation of the built model). Asked for and not done is an
error, never a print. An option's `auto` is decided once, by `resolve`, so that the other four read concrete values only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.kernels.packed_attention import OURS, no_mask

if TYPE_CHECKING:
    from fxtune.world import Facts, World


@dataclass(frozen=True)
class Evidence:
    """One observation: what was asked for, what was seen on the built model, and whether the two agree."""

    technique: str
    asked: str
    observed: str
    acted: bool


@dataclass
class Technique:
    enabled: bool = False
    """Whether this technique is asked for. Everything else here is read only when it is."""

    def check(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why this cannot run under `facts`: the option's name, a colon, and what to change.

        Nothing yielded: it can.
        """
        yield from ()

    def resolve(self, facts: Facts) -> str | None:
        """Replace each `auto` by what it means under `facts`, in place. Returns what was chosen and why; None: nothing was.

        Called on a copy of what the recipe asks for, after check() and before configure(). Where nothing can be chosen, an
        `auto` stays, and check() says why.
        """
        return None

    def configure(self, hf_config: Any) -> None:
        """Edit the Hugging Face config in place, before the model exists."""

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Change the built model and return it."""
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Yield what can be observed on the built model. `probe`: keyword arguments of `model` for one small packed row."""
        yield from ()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal language model, first to last, adapters or not: what one checkpoints and compiles."""
    depth = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def skeleton(config: dict[str, Any]) -> nn.Module | None:
    """The model of this config (`Facts.model`) without its weights, or None where only the author's own code can build it.

    To be read only: whoever asks for the same config gets the same model.
    """
    from transformers import CONFIG_MAPPING

    return (
        _skeleton(json.dumps(config, sort_keys=True, default=str))
        if config.get("model_type") in CONFIG_MAPPING
        else None
    )


@functools.lru_cache(maxsize=4)
def _skeleton(architecture: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = json.loads(architecture)
    kind = values.pop("model_type")
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    return model


def backbone(model: nn.Module) -> nn.Module:
    """The decoder inside a causal language model, adapters or not: tokens in, the last hidden states out, no head."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    found: nn.Module = base.get_decoder()
    return found


def model_inputs(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor
) -> dict[str, Any]:
    """The keyword arguments for one forward pass in training: what Batch holds, under transformers' names.

    Documents are kept apart by `position_ids`, from which transformers builds a mask, or by `cu_seqlens`, for attention that
    takes documents of any length one after the other. `use_cache=False` keeps compiled layers from recompiling on the cache's
    state.
    """
    given: dict[str, Any] = dict(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    attention = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if attention in OURS:
        given["attention_mask"] = no_mask(input_ids)
    elif (
        "flash" not in attention and "/" not in attention
    ):  # a slash: a kernel of the hub, which transformers calls likewise
        return given
    elif torch.are_deterministic_algorithms_enabled():
        given["deterministic"] = True  # transformers hands it to the FlashAttention package
    # A row's length in place of the longest document's: one number for all batches, so compiled code stays.
    longest = input_ids.shape[1]
    given.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=longest, max_length_k=longest)
    return given


@contextmanager
def observed(model: nn.Module) -> Iterator[None]:
    """Look at a model without changing it: no dropout, and the training flag and the random state as before."""
    was_training = model.training
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
