"""Which attention kernel runs, and the proof that packed documents do not see each other.

Packed rows carry no attention mask. Kernels that take documents of any length, one after the other, read where each begins
from `cu_seqlens` (kernels/packed_attention.py); for the others transformers reads it from `position_ids`, which restart at 0
in each document, and builds a mask. A model or a kernel that ignores both trains with no error and a worse result (0.03-0.15
of final loss in reports), so `verify` does not trust it: it changes the tokens of one document and requires the logits of
every other one to stay as they were.

What it gives, forward and backward in TFLOP/s, measured on an H200 with 32 query and 8 key heads of 128, causal:

              4 x 4k   1 x 64k
    flash4       522       609   FlashAttention-4, package flash-attn-4
    cudnn        488       547   cuDNN's, in torch. Packed rows take one call a document, so `auto` leaves it for whole ones
    sdpa         264       326   the FlashAttention-2 that is built into torch

`flash3` and `flash2` are the packages' through transformers; `flex` compiles a kernel for a block mask; `eager` writes the
scores out, which costs rows x heads x length^2 memory and serves everything. `hub:ORG/KERNEL@COMMIT` takes a compiled kernel
from the Hugging Face hub. Each says in BACKENDS what it cannot do. transformers would fall back from most of that in silence,
so none of it is left to transformers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError
from fxtune.kernels import packed_attention
from fxtune.kernels.flash4 import VERSION as FLASH4_VERSION
from fxtune.kernels.packed_attention import CUDNN, FLASH4, SDPA
from fxtune.kernels.profiled import Seen, operators, short
from fxtune.technique import Evidence, Technique, observed
from fxtune.world import Facts

ISOLATING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MOST_DOCUMENTS = 4
"""How many documents of the probe are changed, one at a time."""
RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"}
SINKS = {"gpt_oss"}
"""Models whose softmax has one more, learned score."""
LARGEST_MASK = 2**30
"""Bytes. transformers' mask for packed rows has rows x length^2 of them."""
HUB = "hub:"
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}(:\w+)?")

Reason = tuple[str, str]
"""What is wrong, and what to change. Both end without a full stop."""


@dataclass(frozen=True)
class Backend:
    """What one implementation needs and leaves out. The defaults are those of a fused kernel on a GPU."""

    implementation: str
    """Its name in transformers' registry."""
    what: str
    ran: str
    """Matches the operator that the profiler sees when it runs, or its kernel on the device."""
    packages: tuple[tuple[str, str, str], ...] = ()
    """(package, version or "" for any, how to install it)."""
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 0))
    """The first GPU generation that it serves, and the first that it does not."""
    gpu: bool = True
    half: bool = True
    """Computes in float16 and bfloat16 only."""
    head_dim: int = 256
    """Largest; 0: any."""
    window: bool = True
    softcap: bool = False
    dropout: bool = False
    sinks: bool = False
    deterministic: bool = True
    flag: str = "_supports_flash_attn"
    """What a transformers model says of itself if it hands such a function all that it needs."""

    def refuses(self, facts: Facts) -> Iterator[Reason]:
        """Each reason why this cannot run under `facts`."""
        model = facts.text
        kind = model.get("model_type", "this model")
        if self.gpu and facts.device != "cuda":
            yield "needs a GPU, and this run is on a CPU", "Use sdpa or eager"
        elif self.gpu and facts.capability and not self.capability[0] <= facts.capability < self.capability[1]:
            yield (f"does not serve {facts.device_name} (compute capability {_dotted(facts.capability)}; it serves "
                   f"{_dotted(self.capability[0])} to below {_dotted(self.capability[1])})"), "Use sdpa, or auto"
        for package, version, install in self.packages:
            if package not in facts.packages:
                yield f"needs the package {package}", f"Install it: {install}"
            elif version and facts.packages[package] != version:
                yield f"is built on {package} {version}, and {facts.packages[package]} is here", f"Install it: {install}"
        if self.half and facts.compute_dtype not in ("float16", "bfloat16"):
            yield (f"computes in float16 and bfloat16, not in {facts.compute_dtype}",
                   "Set model.dtype=bfloat16, or techniques.precision.autocast=bfloat16")
        yield from self._heads(facts)
        if self.flag == "_supports_flash_attn" and "chunked_attention" in (model.get("layer_types") or ()) and (
                facts.sequence_length > model.get("attention_chunk_size", 0)):
            yield (f"has no chunked attention, and {kind} has chunks of {model.get('attention_chunk_size')} tokens",
                   "Use flex or eager, or shorten data.sequence_length")
        for has, name, value in ((self.softcap, "soft cap on attention scores", model.get("attn_logit_softcapping")),
                                 (self.dropout, "dropout in attention", _dropout(model)),
                                 (self.window, "sliding window", _window(facts)),
                                 (self.sinks, "attention sinks", kind in SINKS)):
            if value and not has:
                yield f"leaves out {kind}'s {name}" + ("" if value is True else f" ({value})"), "Use eager, or auto"
        if facts.deterministic and not self.deterministic:
            yield "gives other bits each time", "Set run.deterministic=false"
        yield from self._more(facts)
        if not _offers(kind, self.flag):
            yield f"is not there for {kind} in transformers", "Use auto"

    def _heads(self, facts: Facts) -> Iterator[Reason]:
        for width in _head_dims(facts.text):
            if self.head_dim and (width > self.head_dim or width % 8):
                yield (f"takes heads of up to {self.head_dim} in steps of 8, and {facts.text.get('model_type', 'this model')}'s "
                       f"have {width}"), "Use eager, or auto"
                return

    def _more(self, facts: Facts) -> Iterator[Reason]:
        yield from ()


class Flash4(Backend):
    def _heads(self, facts: Facts) -> Iterator[Reason]:
        """Hopper takes 8 to 256; Blackwell to 128, DeepSeek's 192 with 128, and 256 (flash_attn/cute/interface.py)."""
        widths = _head_dims(facts.text)
        most = 256 if (facts.capability or (9, 0))[0] == 9 else 128
        if widths and (max(widths) > most or any(width % 8 or width < 8 for width in widths)) and not (
                most == 128 and facts.capability and facts.capability[0] < 12 and widths in ({256}, {128, 192})):
            yield (f"takes heads of 8 to {most} in steps of 8 here, and this model's have {max(widths)}"), "Use sdpa, or auto"

    def _more(self, facts: Facts) -> Iterator[Reason]:
        if facts.deterministic and (facts.capability or (9, 0))[0] >= 12:
            yield "has no deterministic backward pass on this GPU", "Set run.deterministic=false, or use sdpa"


class Cudnn(Backend):
    def _more(self, facts: Facts) -> Iterator[Reason]:
        compiled = facts.techniques.get("compile", {})
        if facts.packing and compiled and compiled.get("fullgraph"):
            yield ("takes packed rows one document at a time, which a whole compiled graph cannot hold",
                   "Set techniques.compile.fullgraph=false, or use flash4 or sdpa")
        if facts.text.get("kv_lora_rank"):
            yield "takes values as wide as keys only", "Use flash4, or auto"


class Sdpa(Backend):
    """Built into torch. On a GPU in half precision the FlashAttention-2 in it; else with transformers' mask."""

    def refuses(self, facts: Facts) -> Iterator[Reason]:
        instead = list(BY_DOCUMENTS.refuses(facts))
        if facts.device == "cuda" and not instead:
            return
        yield from super().refuses(facts)
        if facts.device == "cuda" and facts.packing and _mask_bytes(facts) > LARGEST_MASK:
            yield (f"would build a mask of {_mask_bytes(facts) / 2**30:.1f} GiB for packed rows of {facts.sequence_length} "
                   f"tokens, because its kernel for documents {instead[0][0]}",
                   "Set model.dtype=bfloat16, shorten data.sequence_length, or use flex")


class Eager(Backend):
    def _more(self, facts: Facts) -> Iterator[Reason]:
        # bfloat16 scores, the mask added, a softmax in float32
        scores = 8 * facts.text.get("num_attention_heads", 0) * _mask_bytes(facts)
        if facts.device == "cuda" and facts.memory and scores > facts.memory:
            yield (f"writes out the scores of each layer and their softmax, {scores / 2**30:,.0f} GiB in rows of "
                   f"{facts.sequence_length} tokens",
                   "Use auto, or shorten data.sequence_length")


FA3 = "build it from github.com/Dao-AILab/flash-attention, folder hopper, or use techniques.attention.backend=flash4"
BY_DOCUMENTS = Backend(SDPA, "FlashAttention-2, built into torch", r"^aten::_flash_attention_forward$")
BACKENDS: dict[str, Backend] = {
    "flash4": Flash4(FLASH4, "FlashAttention-4", r"^fxtune::flash4$", capability=((9, 0), (13, 0)), softcap=True,
                     packages=(("flash-attn-4", FLASH4_VERSION, "pip install 'fxtune[flash]'"),)),
    "flash3": Backend("flash_attention_3", "FlashAttention-3", r"flash_attn_3::\w*fwd|FlashAttnFwdSm90", softcap=True,
                      capability=((9, 0), (10, 0)), packages=(("flash-attn-3", "", FA3),)),
    "cudnn": Cudnn(CUDNN, "cuDNN's attention", r"^aten::_scaled_dot_product_cudnn_attention$", head_dim=128, window=False,
                   deterministic=False),
    "flash2": Backend("flash_attention_2", "FlashAttention-2", r"flash_attn::_flash_attn_(varlen_)?forward|void flash::flash_fwd",
                      softcap=True, dropout=True,
                      packages=(("flash-attn", "", "pip install flash-attn --no-build-isolation (compiles for an hour)"),)),
    "sdpa": Sdpa("sdpa", "scaled_dot_product_attention of torch", r"^aten::scaled_dot_product_attention$", gpu=False, half=False,
                 head_dim=0, dropout=True, flag="_supports_sdpa"),
    "flex": Backend("flex_attention", "torch's compiler, for a block mask", "", half=False, softcap=True, sinks=True, head_dim=0,
                    flag="_supports_flex_attn"),
    "eager": Eager("eager", "plain operations", r"^aten::softmax$", gpu=False, half=False, head_dim=0, softcap=True, dropout=True,
                   sinks=True, flag=""),
}
"""The fastest first."""


@dataclass
class Attention(Technique):
    enabled: bool = True
    backend: str = "auto"
    """auto | flash4 | flash3 | flash2 | cudnn | sdpa | flex | eager | hub:ORG/KERNEL@COMMIT. `auto`: the fastest that is correct
    here; what it chose and why is printed."""
    trust_remote_code: bool = False
    """With hub:...: run compiled code of that kernel's author. Needs a full commit hash."""

    _by_documents = False  # sdpa: whether its kernel for documents serves here. No field: resolve() decides it

    def check(self, facts: Facts) -> Iterator[str]:
        kind = facts.text.get("model_type", "this model")
        others = set(facts.text.get("layer_types") or ()) - ISOLATING_LAYERS
        if facts.packing and (others or kind in RECURRENT):
            yield (f"backend: the {', '.join(sorted(others)) or 'recurrent'} layers of {kind} carry state from one packed "
                   "document into the next, with any backend. Set data.packing=false.")
        if self.backend == "auto":
            if all(list(backend.refuses(facts)) for backend in BACKENDS.values()):
                yield "backend: auto finds none that serves. " + "; ".join(
                    f"{name} {next(backend.refuses(facts))[0]}" for name, backend in BACKENDS.items()) + "."
        elif self.backend.startswith(HUB):
            yield from self._check_hub(facts)
        elif self.backend not in BACKENDS:
            near = difflib.get_close_matches(self.backend, BACKENDS, 1)
            yield (f"backend: there is no {self.backend}" + (f". Did you mean {near[0]}?" if near else
                   f". There are auto, {', '.join(BACKENDS)} and hub:ORG/KERNEL@COMMIT."))
        else:
            for cause, change in BACKENDS[self.backend].refuses(facts):
                yield f"backend: {self.backend} {cause}. {change}."

    def _check_hub(self, facts: Facts) -> Iterator[str]:
        if not PINNED.fullmatch(self.backend.removeprefix(HUB)):
            yield (f"backend: {self.backend} is not pinned. A kernel of the hub is compiled code, so name the commit that you "
                   "trust: hub:ORG/KERNEL@ and its 40 digits.")
        if not self.trust_remote_code:
            yield (f"trust_remote_code: false, but backend={self.backend} runs compiled code of its author. Set it to true if "
                   "you trust that commit.")
        for cause, change in _hub(self.backend).refuses(facts):
            yield f"backend: {self.backend} {cause}. {change}."

    def resolve(self, facts: Facts) -> str | None:
        note = None
        if self.backend == "auto":
            passed = []
            for name, backend in BACKENDS.items():
                if name == "cudnn" and facts.packing:
                    reason = "takes packed rows one document at a time"
                elif (refused := next(backend.refuses(facts), None)) is None:
                    self.backend = name
                    break
                else:
                    reason = refused[0]
                passed.append(f"{name} {reason}")
            if self.backend != "auto":
                note = f"auto took {self.backend}, the fastest that is correct here" + (
                    f" ({'; '.join(passed)})" if passed and facts.device == "cuda" else "")
        self._by_documents = (self.backend == "sdpa" and facts.device == "cuda"
                              and not list(BY_DOCUMENTS.refuses(facts)))
        return note

    def configure(self, hf_config: Any) -> None:
        implementation = self._implementation(hf_config)
        if implementation in packed_attention.OURS:
            packed_attention.register()
        elif self.backend.startswith(HUB):
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            try:
                lazy_import_flash_attention(implementation, allow_all_kernels=True)  # agreed to by trust_remote_code
            except (ImportError, OSError, ValueError) as error:
                raise ConfigError(f"techniques.attention.backend={self.backend} cannot be loaded: {error} Check its name, the "
                                  "network and HF_HUB_OFFLINE, or set it to auto.") from error
        hf_config._attn_implementation = implementation

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        wanted = self._implementation(model.config)
        layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
        # What compiled layers were traced from: compiling them for the probe's length as well would take minutes.
        with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            seen, told = _operators(model, probe, layers)
            yield Evidence("attention", f"{self.backend}: {_named(wanted).what}", told, wanted in seen)
            if (probe["position_ids"] == 0).sum() > 1:
                yield self._isolation(model, probe)

    @staticmethod
    def _isolation(model: nn.Module, probe: dict[str, Any]) -> Evidence:
        """Change one document at a time. Each forward has the same shape, so untouched logits come back bit for bit."""
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
        return Evidence("attention", "packed documents do not see each other",
                        f"changing {min(count, MOST_DOCUMENTS)} of {count} documents, one by one, moved its own logits by at "
                        f"least {moved:.2g}, the others' by at most {leaked:.2g}",
                        moved > 0 and leaked <= 1e-3 * moved)

    def _implementation(self, hf_config: Any) -> str:
        """transformers' name of what is asked for. A pipeline that nobody resolved takes what transformers would."""
        if self.backend.startswith(HUB):
            return self.backend.removeprefix(HUB)
        if self._by_documents:
            return SDPA
        text = hf_config.get_text_config()
        if self.backend == "auto":
            return "eager" if getattr(text, "attn_logit_softcapping", None) or not _offers(
                text.model_type, "_supports_sdpa") else "sdpa"
        return BACKENDS[self.backend].implementation


def _operators(model: nn.Module, probe: dict[str, Any], layers: int) -> tuple[set[str], str]:
    """The implementations that ran in each of the layers in one forward pass, as the profiler saw it; and that in words."""
    own = str(model.config._attn_implementation)  # type: ignore[union-attr]
    patterns = {backend.implementation: backend.ran for backend in (*BACKENDS.values(), BY_DOCUMENTS, _named(own)) if backend.ran}
    with _flex_calls() if own == "flex_attention" else nullcontext([0]) as flex:
        ran = operators(lambda: model(**probe), patterns)
        ran["flex_attention"] = Seen(flex[0] // 2)  # operators() calls twice
    ran = {name: seen for name, seen in ran.items() if seen.calls}
    if "sdpa" in ran:  # and the kernel that it chose
        ran = {name: seen for name, seen in ran.items() if name not in (SDPA, CUDNN)}
    if len(ran) > 1:  # a softmax beside a kernel is a router's
        ran.pop("eager", None)
    told = " and ".join(f"{seen.calls} calls of {_named(name).what}" for name, seen in ran.items()) or "no attention operator"
    kernels = sorted({short(kernel) for seen in ran.values() for kernel in seen.kernels})
    return ({name for name, seen in ran.items() if seen.calls >= layers},
            f"{told} in {layers} layers" + (f", on the device: {', '.join(kernels)}" if kernels else ""))


@contextmanager
def _flex_calls() -> Iterator[list[int]]:
    """Counts calls of transformers' flex attention, which is no operator of its own where nothing is compiled."""
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


def _named(implementation: str) -> Backend:
    """By transformers' name; one that is not in the table is a kernel of the hub."""
    for backend in [*BACKENDS.values(), BY_DOCUMENTS]:
        if backend.implementation == implementation:
            return backend
    return _hub(HUB + implementation)


def _hub(asked: str) -> Backend:
    name = asked.removeprefix(HUB)
    return Backend(name, f"the hub's {name}", r"(?i)flash|attn|attention|fmha", softcap=True,
                   packages=(("kernels", "", "pip install kernels"),))


def _offers(kind: str, flag: str) -> bool:
    """Whether transformers' class for this model type says so. Of a class that comes with its model, only sdpa is expected."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = AutoModelForCausalLM._model_mapping
    if not flag:
        return True
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in classes:
        return flag == "_supports_sdpa"
    return bool(getattr(classes[CONFIG_MAPPING[kind]], flag, False))


def _head_dims(text: dict[str, Any]) -> set[int]:
    """Of queries and keys, and of values; of layers of different kinds."""
    if text.get("kv_lora_rank"):  # multi-head latent attention
        return {text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0), text.get("v_head_dim", 0)} - {0}
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text["hidden_size"] // heads if heads and text.get("hidden_size") else 0)
    return {width, text.get("global_head_dim") or width} - {0}


def _dropout(text: dict[str, Any]) -> float:
    return next((text[name] for name in ("attention_dropout", "attn_pdrop") if text.get(name)), 0.0)


def _window(facts: Facts) -> int:
    """The sliding window, 0 where no row is longer or no layer has one."""
    window, layers = facts.text.get("sliding_window") or 0, facts.text.get("layer_types")
    used = window and (layers is None or "sliding_attention" in layers)
    return window if used and facts.sequence_length > window else 0


def _mask_bytes(facts: Facts) -> int:
    return facts.micro_batch_size * facts.sequence_length ** 2


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
