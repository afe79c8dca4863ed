"""Which attention kernel runs, and the proof that packed documents do not see each other.

Packed rows carry no attention mask. transformers reads the document boundaries from `position_ids` (they restart at 0 in
each document) when it gets no mask and no cache, and builds a block-diagonal causal mask. A model or a kernel that ignores
this trains with no error and a worse result (0.03-0.15 of final loss in reports), so `verify` does not trust it: it changes
the tokens of one document and requires the logits of every other one to stay as they were.

`sdpa` is torch's scaled_dot_product_attention; `eager` writes the scores out, which costs rows x heads x length^2 memory
and serves models with features that sdpa leaves out, such as soft-capped scores (Gemma 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxtune.technique import Evidence, Technique, observed
from fxtune.world import Facts

ISOLATING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MOST_DOCUMENTS = 4
"""How many documents of the probe are changed, one at a time."""
RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"}


class Backend(str, Enum):
    auto = "auto"
    sdpa = "sdpa"
    eager = "eager"


@dataclass
class Attention(Technique):
    enabled: bool = True
    backend: Backend = Backend.auto
    """`auto`: the fastest that is correct here; what it chose and why is printed."""

    def check(self, facts: Facts) -> Iterator[str]:
        config = facts.model.get("text_config") or facts.model
        kind = config.get("model_type", "this model")
        if self.backend is Backend.sdpa and config.get("attn_logit_softcapping"):
            yield f"backend: sdpa leaves out the soft cap on {kind}'s attention scores. Use eager, or auto, which picks it."
        others = set(config.get("layer_types") or ()) - ISOLATING_LAYERS
        if facts.packing and (others or kind in RECURRENT):
            yield (f"backend: the {', '.join(sorted(others)) or 'recurrent'} layers of {kind} carry state from one packed "
                   "document into the next, with any backend. Set data.packing=false.")

    def configure(self, hf_config: Any) -> None:
        hf_config._attn_implementation = self._choose(hf_config)[0]

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        wanted, why = self._choose(model.config)
        asked = f"{self.backend.value}: {wanted} ({why})" if self.backend is Backend.auto else wanted
        with observed(model), torch.no_grad():
            layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
            with _Count() as count, torch.compiler.set_stance("force_eager"):
                model(**probe)
            seen = "sdpa" if count.calls >= layers else "eager" if count.calls == 0 else "mixed"
            yield Evidence("attention", asked,
                           f"{seen}: {count.calls} calls of scaled_dot_product_attention in {layers} layers", seen == wanted)
            if (probe["position_ids"] == 0).sum() > 1:
                yield self._isolation(model, probe)

    @staticmethod
    def _isolation(model: nn.Module, probe: dict[str, Any]) -> Evidence:
        """Change one document at a time. Each forward has the same shape, so untouched logits come back bit for bit."""
        ids, positions = probe["input_ids"], probe["position_ids"]
        document = (positions == 0).long().cumsum(-1) - 1
        vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        before = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        leaked, moved = 0.0, float("inf")
        count = int(document.max()) + 1
        for index in range(min(count, MOST_DOCUMENTS)):
            inside = document == index
            changed = torch.where(inside, (ids + 1) % vocabulary, ids)
            shift = (model(input_ids=changed, position_ids=positions, use_cache=False).logits.float() - before).abs().amax(-1)
            leaked = max(leaked, shift[~inside].max().item())
            moved = min(moved, shift[inside].max().item())
        return Evidence("attention", "packed documents do not see each other",
                        f"changing {min(count, MOST_DOCUMENTS)} of {count} documents, one by one, moved its own logits by at "
                        f"least {moved:.2g}, the others' by at most {leaked:.2g}",
                        moved > 0 and leaked <= 1e-3 * moved)

    def _choose(self, hf_config: Any) -> tuple[str, str]:
        """The implementation by transformers' name, and why."""
        if self.backend is not Backend.auto:
            return self.backend.value, "asked for"
        if getattr(hf_config.get_text_config(), "attn_logit_softcapping", None):
            return "eager", "sdpa leaves out this model's soft cap on attention scores"
        if not _takes_sdpa(hf_config):
            return "eager", "transformers has no sdpa for this model"
        return "sdpa", "the fastest that torch has built in"


class _Count(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def _takes_sdpa(hf_config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    return type(hf_config) not in mapping or bool(getattr(mapping[type(hf_config)], "_supports_sdpa", False))
