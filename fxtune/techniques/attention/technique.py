"""Selects the attention kernel, and proves that packed documents do not see each other.

Packed rows carry no attention mask. Kernels for documents of any length read from `cu_seqlens` where each begins
(packed.py). For other kernels transformers reads it from `position_ids`, which restart at 0 in each document, and
builds a mask. A model or a kernel that ignores both trains without an error, and reaches a worse result (0.03 to 0.15
of final loss in reports). So `verify` changes the tokens of one document and requires the logits of every other
document to stay the same.

Speed, forward and backward in TFLOP/s, measured on an H200 with 32 query and 8 key heads of 128, causal:

              4 x 4k   1 x 64k
    flash4       522       609   FlashAttention-4, package flash-attn-4
    cudnn        488       547   cuDNN's, in torch. It runs packed rows document by document, so `auto` skips it there
    sdpa         264       326   torch's built-in FlashAttention-2

`flash3` and `flash2` are the packages' kernels, called by transformers; `flex` compiles a kernel for a block mask;
`eager` stores the scores, which takes rows x heads x length^2 memory, and supports everything. `hub:ORG/KERNEL@COMMIT`
takes a compiled kernel from the Hugging Face hub. backends.py lists what each supports, because transformers silently
replaces a kernel that is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.errors import ConfigError, nearest
from fxtune.models.structure import observed
from fxtune.system.compiler_cache import use_cache_folder
from fxtune.system.profiler import Observed, observe_operators, short_name
from fxtune.techniques.attention import packed
from fxtune.techniques.attention.backends import BACKENDS, BY_DOCUMENTS, HUB, hub, named, offers
from fxtune.techniques.attention.packed import CUDNN, SDPA
from fxtune.techniques.base import Evidence, Technique

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

ISOLATING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MOST_DOCUMENTS = 4
"""Documents of the probe that are changed, one at a time."""
RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"}
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}(:\w+)?")


@dataclass
class Attention(Technique):
    enabled: bool = True
    backend: str = "auto"
    """auto | flash4 | flash3 | flash2 | cudnn | sdpa | flex | eager | hub:ORG/KERNEL@COMMIT. `auto`: the fastest that
    is correct here; its choice and the reasons are printed."""
    trust_remote_code: bool = False
    """hub:... only: run compiled code of that kernel's author. Needs a full commit hash."""

    _by_documents = False  # whether sdpa's kernel for packed documents runs; no option: resolve() sets it

    def check(self, facts: Facts) -> Iterator[str]:
        kind = facts.text.get("model_type", "this model")
        others = set(facts.text.get("layer_types") or ()) - ISOLATING_LAYERS
        if facts.packing and (others or kind in RECURRENT):
            yield (
                f"backend: the {', '.join(sorted(others)) or 'recurrent'} layers of {kind} carry state from one "
                "packed document into the next with any backend. Set data.packing=false."
            )
        if self.backend == "auto":
            if all(list(backend.refuses(facts)) for backend in BACKENDS.values()):
                yield (
                    "backend: auto finds no backend that can run. "
                    + "; ".join(f"{name} {next(backend.refuses(facts))[0]}" for name, backend in BACKENDS.items())
                    + "."
                )
        elif self.backend.startswith(HUB):
            yield from self._check_hub(facts)
        elif self.backend not in BACKENDS:
            near = nearest(self.backend, BACKENDS)
            known = f"There are auto, {', '.join(BACKENDS)} and hub:ORG/KERNEL@COMMIT."
            yield f"backend: there is no {self.backend}. {f'Did you mean {near}?' if near else known}"
        else:
            for cause, change in BACKENDS[self.backend].refuses(facts):
                yield f"backend: {self.backend} {cause}. {change}."

    def _check_hub(self, facts: Facts) -> Iterator[str]:
        if not PINNED.fullmatch(self.backend.removeprefix(HUB)):
            yield (
                f"backend: {self.backend} is not pinned. A kernel of the hub is compiled code, so give the commit "
                "that you trust: hub:ORG/KERNEL@ and its 40 digits."
            )
        if not self.trust_remote_code:
            yield (
                f"trust_remote_code: false, but backend={self.backend} runs compiled code of its author. Set it to "
                "true if you trust that commit."
            )
        for cause, change in hub(self.backend).refuses(facts):
            yield f"backend: {self.backend} {cause}. {change}."

    def resolve(self, facts: Facts) -> str | None:
        note = None
        if self.backend == "auto":
            passed = []
            for name, backend in BACKENDS.items():
                if name == "cudnn" and facts.packing:
                    reason = "runs packed rows document by document"
                elif (refused := next(backend.refuses(facts), None)) is None:
                    self.backend = name
                    break
                else:
                    reason = refused[0]
                passed.append(f"{name} {reason}")
            if self.backend != "auto":
                note = f"auto chose {self.backend}, the fastest that is correct here" + (
                    f" ({'; '.join(passed)})" if passed and facts.device == "cuda" else ""
                )
        self._by_documents = (
            self.backend == "sdpa" and facts.device == "cuda" and not list(BY_DOCUMENTS.refuses(facts))
        )
        return note

    def configure(self, hf_config: Any) -> None:
        implementation = self._implementation(hf_config)
        if implementation in packed.OURS:
            packed.register()
        elif self.backend.startswith(HUB):
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            try:
                lazy_import_flash_attention(
                    implementation, allow_all_kernels=True
                )  # check() requires trust_remote_code
            except (ImportError, OSError, ValueError) as error:
                raise ConfigError(
                    f"techniques.attention.backend={self.backend} cannot be loaded: {error} Check its name, the "
                    "network and HF_HUB_OFFLINE, or set it to auto."
                ) from error
        elif self.backend == "flex":
            use_cache_folder()  # transformers compiles it
        hf_config._attn_implementation = implementation

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        wanted = self._implementation(model.config)
        layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
        # Without compiled code: compiling the layers for the probe's length, too, would take minutes.
        with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            seen, observation = _operators(model, probe, layers)
            yield Evidence("attention", f"{self.backend}: {named(wanted).what}", observation, wanted in seen)
            if (probe["position_ids"] == 0).sum() > 1:
                yield self._isolation(model, probe)

    @staticmethod
    def _isolation(model: nn.Module, probe: dict[str, Any]) -> Evidence:
        """Change one document at a time. All forwards have the same shape, so unaffected logits stay equal bit for
        bit."""
        ids, positions = probe["input_ids"], probe["position_ids"]
        document = (positions == 0).long().cumsum(-1) - 1
        vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        before = model(**probe).logits.float()
        leaked, moved = 0.0, float("inf")
        count = int(document.max()) + 1
        for index in range(min(count, MOST_DOCUMENTS)):
            inside = document == index
            changed = torch.where(inside, (ids + 1) % vocabulary, ids)
            shift = (model(**{**probe, "input_ids": changed}).logits.float() - before).abs().amax(-1)
            leaked = max(leaked, shift[~inside].max().item())
            moved = min(moved, shift[inside].max().item())
        return Evidence(
            "attention",
            "packed documents do not see each other",
            f"changing {min(count, MOST_DOCUMENTS)} of {count} documents, one by one, moved its own logits by at "
            f"least {moved:.2g}, the others' by at most {leaked:.2g}",
            moved > 0 and leaked <= 1e-3 * moved,
        )

    def _implementation(self, hf_config: Any) -> str:
        """The backend's name in transformers. An unresolved `auto` takes transformers' default."""
        if self.backend.startswith(HUB):
            return self.backend.removeprefix(HUB)
        if self._by_documents:
            return SDPA
        text = hf_config.get_text_config()
        if self.backend == "auto":
            return (
                "eager"
                if getattr(text, "attn_logit_softcapping", None) or not offers(text.model_type, "_supports_sdpa")
                else "sdpa"
            )
        return BACKENDS[self.backend].implementation


def _operators(model: nn.Module, probe: dict[str, Any], layers: int) -> tuple[set[str], str]:
    """The implementations that ran in all layers of one forward pass, by the profiler; and a description of it."""
    own = str(model.config._attn_implementation)  # type: ignore[union-attr]
    patterns = {
        backend.implementation: backend.ran
        for backend in (*BACKENDS.values(), BY_DOCUMENTS, named(own))
        if backend.ran
    }
    with _flex_calls() if own == "flex_attention" else nullcontext([0]) as flex:
        ran = observe_operators(lambda: model(**probe), patterns)
        ran["flex_attention"] = Observed(flex[0] // 2)  # observe_operators() calls the model twice
    ran = {name: seen for name, seen in ran.items() if seen.calls}
    if "sdpa" in ran:  # do not count the kernel that sdpa chose a second time
        ran = {name: seen for name, seen in ran.items() if name not in (SDPA, CUDNN)}
    if len(ran) > 1:  # then the softmax is that of a router
        ran.pop("eager", None)
    calls = (
        " and ".join(f"{seen.calls} calls of {named(name).what}" for name, seen in ran.items())
        or "no attention operator"
    )
    kernels = sorted({short_name(kernel) for seen in ran.values() for kernel in seen.kernels})
    return (
        {name for name, seen in ran.items() if seen.calls >= layers},
        f"{calls} in {layers} layers" + (f", on the device: {', '.join(kernels)}" if kernels else ""),
    )


@contextmanager
def _flex_calls() -> Iterator[list[int]]:
    """Counts calls of transformers' flex attention, which is not an operator in eager mode."""
    from transformers import AttentionInterface

    original = AttentionInterface._global_mapping["flex_attention"]
    count = [0]

    def counted(*given: Any, **options: Any) -> Any:
        count[0] += 1
        return original(*given, **options)

    AttentionInterface.register("flex_attention", counted)
    try:
        yield count
    finally:
        AttentionInterface.register("flex_attention", original)
