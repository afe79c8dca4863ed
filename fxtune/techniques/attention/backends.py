"""The table of attention backends: what each supports, and why it cannot run under given facts. Where one cannot,
transformers would in most cases silently use another kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxtune.facts.run import Facts
from fxtune.kernels.flash4 import VERSION as FLASH4_VERSION
from fxtune.system.units import GIB
from fxtune.techniques.attention.packed import CUDNN, FLASH4, SDPA

SINKS = {"flint", "gpt_oss", "granite_swa", "granitemoe_swa"}
"""Models with an extra learned score in each softmax."""
LARGEST_MASK = GIB
"""The most bytes for transformers' mask of packed rows."""
HUB = "hub:"

Reason = tuple[str, str]
"""The cause and the change that helps, both without a full stop."""


@dataclass(frozen=True)
class Backend:
    """The requirements and features of one implementation. The defaults are those of a fused kernel on a GPU."""

    implementation: str  # its name in transformers' registry
    what: str  # its name in messages
    ran: str  # a pattern of its operator's or its kernel's name in the profiler
    packages: tuple[tuple[str, str, str], ...] = ()  # (package, version or "" for any, how to install it)
    capability: tuple[tuple[int, int], tuple[int, int]] = ((8, 0), (99, 0))  # first supported, first unsupported
    gpu: bool = True
    half: bool = True  # only float16 and bfloat16
    head_dim: int = 256  # the largest; 0: any
    window: bool = True
    softcap: bool = False
    dropout: bool = False
    sinks: bool = False
    deterministic: bool = True  # whether its backward pass can give the same bits each time
    operator: str = ""  # the operator of aten that it calls by its private name
    flag: str = "_supports_flash_attn"  # the attribute of a model class of transformers that says it can call this

    def refuses(self, facts: Facts) -> Iterator[Reason]:
        """Each reason why this cannot run under `facts`."""
        model, kind = facts.text, _kind(facts)
        first, end = self.capability
        if self.gpu and facts.device != "cuda":
            yield "needs a GPU, and this run is on a CPU", "Use sdpa or eager"
        elif self.gpu and facts.capability and not first <= facts.capability < end:
            yield (
                f"does not support {facts.device_name} (compute capability {_dotted(facts.capability)}; it supports "
                f"{_dotted(first)} to below {_dotted(end)})",
                "Use sdpa, or auto",
            )
        if self.operator and not hasattr(torch.ops.aten, self.operator):
            yield f"needs torch.ops.aten.{self.operator}, which torch {torch.__version__} lacks", "Use auto"
        for package, version, install in self.packages:
            found = facts.packages.get(package)
            if package in facts.broken:
                yield f"needs {package}, which {facts.lacks(package)}", "Use auto, or another backend"
            elif found is None:
                yield f"needs the package {package}", f"Install it: {install}"
            elif version and found != version:
                yield f"needs {package} {version}, and {found} is installed", f"Install it: {install}"
        if self.half and facts.compute_dtype not in ("float16", "bfloat16"):
            yield (
                f"computes in float16 and bfloat16, not in {facts.compute_dtype}",
                "Set model.dtype=bfloat16, or techniques.precision.autocast=bfloat16",
            )
        yield from self._heads(facts)
        chunk = model.get("attention_chunk_size", 0) if "chunked_attention" in (model.get("layer_types") or ()) else 0
        if chunk and self.flag == "_supports_flash_attn" and facts.sequence_length > chunk:
            yield (
                f"has no chunked attention, and {kind} has chunks of {chunk} tokens",
                "Use flex or eager, or shorten data.sequence_length",
            )
        for has, name, value in (
            (self.softcap, "soft cap on attention scores", model.get("attn_logit_softcapping")),
            (self.dropout, "dropout in attention", _dropout(model)),
            (self.window, "sliding window", _window(facts)),
            (self.sinks, "attention sinks", kind in SINKS),
        ):
            if value and not has:
                shown = "" if value is True else f" ({value})"
                yield f"does not support {kind}'s {name}{shown}", "Use eager, or auto"
        if facts.deterministic and not self.deterministic:
            yield "does not guarantee the same bits each time", "Set run.deterministic=false, or use auto"
        yield from self._more(facts)
        if not offers(kind, self.flag):
            yield f"is not available for {kind} in transformers", "Use auto"

    def _heads(self, facts: Facts) -> Iterator[Reason]:
        wrong = [width for width in _head_dims(facts.text) if width > self.head_dim or width % 8]
        if self.head_dim and wrong:
            heads = f"takes heads of up to {self.head_dim} in steps of 8, and {_kind(facts)}'s have {wrong[0]}"
            yield heads, "Use eager, or auto"

    def _more(self, facts: Facts) -> Iterator[Reason]:
        yield from ()


class Flash4(Backend):
    def _heads(self, facts: Facts) -> Iterator[Reason]:
        """Hopper supports 8 to 256. Blackwell supports 8 to 128, DeepSeek's 192 with 128, and 256
        (flash_attn/cute/interface.py)."""
        widths, generation = _head_dims(facts.text), (facts.capability or (9, 0))[0]
        most = 256 if generation == 9 else 128
        special = 9 < generation < 12 and widths in ({256}, {128, 192})
        if not special and any(width > most or width % 8 for width in widths):
            heads = f"takes heads of 8 to {most} in steps of 8 here, and this model's have {max(widths)}"
            yield heads, "Use sdpa, or auto"

    def _more(self, facts: Facts) -> Iterator[Reason]:
        if facts.deterministic and (facts.capability or (9, 0))[0] >= 12:
            yield "has no deterministic backward pass on this GPU", "Set run.deterministic=false, or use sdpa"
        if _kind(facts) in SINKS and (facts.capability or (9, 0))[0] >= 12:
            yield f"does not support {_kind(facts)}'s attention sinks on this GPU", "Use flex, or auto"


class Cudnn(Backend):
    def _more(self, facts: Facts) -> Iterator[Reason]:
        compiler = facts.techniques.compile
        if facts.packing and compiler.enabled and compiler.fullgraph:
            yield (
                "runs packed rows document by document, which cannot be one compiled graph",
                "Set techniques.compile.fullgraph=false, or use flash4 or sdpa",
            )
        if facts.text.get("kv_lora_rank"):
            yield "needs values as wide as keys", "Use flash4, or auto"


class Flex(Backend):
    def _more(self, facts: Facts) -> Iterator[Reason]:
        if facts.degrees.context > 1:
            yield "makes its mask of one piece of a row (parallel.context)", "Use flash4, sdpa or eager"


class Sdpa(Backend):
    """torch's scaled_dot_product_attention. On a GPU in half precision torch's built-in FlashAttention-2 reads where
    documents begin; elsewhere transformers builds a mask."""

    def refuses(self, facts: Facts) -> Iterator[Reason]:
        on_gpu, problem = facts.device == "cuda", next(BY_DOCUMENTS.refuses(facts), None)
        if on_gpu and not problem:
            return
        yield from super().refuses(facts)
        if on_gpu and problem and facts.packing and _mask_bytes(facts) > LARGEST_MASK:
            yield (
                f"would build a mask of {_mask_bytes(facts) / GIB:.1f} GiB for packed rows of {facts.sequence_length} "
                f"tokens, because its kernel for packed documents {problem[0]}",
                "Set model.dtype=bfloat16, shorten data.sequence_length, or use flex",
            )


class Eager(Backend):
    def _more(self, facts: Facts) -> Iterator[Reason]:
        # Scores in bfloat16 without the mask and with it, and a float32 softmax: 8 bytes each.
        scores = 8 * facts.text.get("num_attention_heads", 0) * _mask_bytes(facts)
        if facts.device == "cuda" and facts.memory and scores > facts.memory:
            yield (
                f"stores the scores of each layer and their softmax, {scores / GIB:,.0f} GiB in rows of "
                f"{facts.sequence_length} tokens",
                "Use auto, or shorten data.sequence_length",
            )


FA3 = "build it from github.com/Dao-AILab/flash-attention, folder hopper, or use techniques.attention.backend=flash4"
BY_DOCUMENTS = Backend(
    SDPA,
    "FlashAttention-2, built into torch",
    r"^aten::_flash_attention_forward$",
    operator="_flash_attention_forward",
)
BACKENDS: dict[str, Backend] = {
    "flash4": Flash4(
        FLASH4,
        "FlashAttention-4",
        r"^fxtune::flash4$",
        capability=((9, 0), (13, 0)),
        softcap=True,
        sinks=True,
        packages=(("flash-attn-4", FLASH4_VERSION, "pip install 'fxtune[flash]'"),),
    ),
    "flash3": Backend(
        "flash_attention_3",
        "FlashAttention-3",
        r"flash_attn_3::\w*fwd|FlashAttnFwdSm90",
        softcap=True,
        capability=((9, 0), (10, 0)),
        packages=(("flash-attn-3", "", FA3),),
    ),
    "cudnn": Cudnn(
        CUDNN,
        "cuDNN's attention",
        r"^aten::_scaled_dot_product_cudnn_attention$",
        operator="_scaled_dot_product_cudnn_attention",
        head_dim=128,
        window=False,
        deterministic=False,
    ),
    "flash2": Backend(
        "flash_attention_2",
        "FlashAttention-2",
        r"flash_attn::_flash_attn_(varlen_)?forward|void flash::flash_fwd",
        softcap=True,
        dropout=True,
        packages=(("flash-attn", "", "pip install flash-attn --no-build-isolation (compiles for an hour)"),),
    ),
    "sdpa": Sdpa(
        "sdpa",
        "scaled_dot_product_attention of torch",
        r"^aten::scaled_dot_product_attention$",
        gpu=False,
        half=False,
        head_dim=0,
        dropout=True,
        flag="_supports_sdpa",
    ),
    "flex": Flex(
        "flex_attention",
        "torch's compiler, for a block mask",
        "",
        half=False,
        softcap=True,
        sinks=True,
        head_dim=0,
        flag="_supports_flex_attn",
    ),
    "eager": Eager(
        "eager",
        "plain operations",
        r"^aten::softmax$",
        gpu=False,
        half=False,
        head_dim=0,
        softcap=True,
        dropout=True,
        sinks=True,
        flag="",
    ),
}
"""The fastest first."""


def named(implementation: str) -> Backend:
    """The backend with this name in transformers; a name outside the table is a kernel of the hub."""
    for backend in [*BACKENDS.values(), BY_DOCUMENTS]:
        if backend.implementation == implementation:
            return backend
    return hub(HUB + implementation)


def hub(backend: str) -> Backend:
    """The backend of `hub:NAME` or NAME."""
    name = backend.removeprefix(HUB)
    return Backend(
        name,
        f"the hub's {name}",
        r"(?i)flash|attn|attention|fmha",
        softcap=True,
        packages=(("kernels", "", "pip install kernels"),),
        deterministic=False,
    )


def offers(kind: str, flag: str) -> bool:
    """Whether transformers' class for this model type has the flag. Classes that come with their model have only
    sdpa's."""
    from transformers import CONFIG_MAPPING
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as classes

    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in classes:
        return flag in ("", "_supports_sdpa")
    return not flag or bool(getattr(classes[CONFIG_MAPPING[kind]], flag, False))


def _kind(facts: Facts) -> str:
    return str(facts.text.get("model_type", "this model"))


def _head_dims(text: dict[str, Any]) -> set[int]:
    """All head dimensions: of queries and keys, of values, and of each layer type."""
    if text.get("kv_lora_rank"):  # multi-head latent attention
        return {text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0), text.get("v_head_dim", 0)} - {0}
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text["hidden_size"] // heads if heads and text.get("hidden_size") else 0)
    return {width, text.get("global_head_dim") or width} - {0}


def _dropout(text: dict[str, Any]) -> float:
    return next((text[name] for name in ("attention_dropout", "attn_pdrop") if text.get(name)), 0.0)


def _window(facts: Facts) -> int:
    """The sliding window; 0 if no row is longer or no layer has one."""
    window, layers = facts.text.get("sliding_window") or 0, facts.text.get("layer_types")
    used = window and (layers is None or "sliding_attention" in layers)
    return window if used and facts.sequence_length > window else 0


def _mask_bytes(facts: Facts) -> int:
    return facts.micro_batch_size * facts.sequence_length**2


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
