"""Liger's Triton kernels (arXiv 2410.10989): norms, RoPE and gated products in one kernel each, and a head without logits.

Written out in torch, an RMSNorm is six kernels that each read and write all hidden states, and autograd keeps several of
their results. Liger's kernel is one, and keeps the input alone. Without torch.compile that is a tenth of a step and some GiB.
Under torch.compile the compiler fuses the same operations; whether Liger is still faster is a matter of the card and the sizes,
so `auto` measures both there, once for each (kernels/liger_timing.py), and keeps the times in the cache folder.

Liger's own `apply_liger_kernel_to_*` replaces classes and functions of transformers for the whole process, so that a plain model
built later is plain no more. Here each module of this one model gets a class of its own, a subclass of what it was, with
another forward: names, weights, isinstance and adapters are as before. RoPE is a function of the attention's module; that
attention gets a copy of its forward which sees another function under that name.

Two of them are our own and need neither a GPU nor the package: `rope` (kernels/rotary.py), which torch.compile takes into its
graph as it is, and `fused_linear_cross_entropy` (kernels/linear_cross_entropy.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.models.structure import backbone, decoder_layers, observed
from fxtune.system.atomic_files import replace_text
from fxtune.system.compiler_cache import use_cache_folder
from fxtune.system.host import cache_home
from fxtune.system.oom import out_of_memory_reason
from fxtune.system.profiler import operators
from fxtune.techniques.base import Evidence, Switch, Technique
from fxtune.techniques.liger import forwards, timing

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

PACKAGE = "liger-kernel"
INSTALL = "pip install 'liger-kernel>=0.8.5'"
FEW_LOGITS = 2**26
"""Bytes of float32 logits of a micro-batch below which holding them costs nothing worth a second thought."""


@dataclass(frozen=True)
class Family:
    """How a family of models does what Liger's kernels do. After liger_kernel.transformers.monkey_patch, version 0.8.5."""

    norms: int
    """A layer's norms, those of queries and keys included."""
    offset: float = 0.0
    """What is added to a norm's weight."""
    casting: str = "llama"
    """`llama`: rounded before the weight is multiplied; `gemma`: all of it in float32."""
    in_place: bool = True
    """Whether a norm's backward pass may overwrite the gradient that it gets: not where a residual reads it too."""
    layer_norm: bool = False
    gated: bool = True
    """Whether the MLP is down(act(gate(x)) * up(x))."""
    heads_normed: bool = False
    """Whether norms of queries and keys stand between their projections and RoPE."""


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "granite", "smollm3", "phi3"), Family(norms=2)),
    "qwen3": Family(norms=4, heads_normed=True),
    **dict.fromkeys(("olmo2", "olmo3"), Family(norms=4, casting="gemma", in_place=False, heads_normed=True)),
    "gemma": Family(norms=2, offset=1.0, casting="gemma"),
    "gemma2": Family(norms=4, offset=1.0, casting="gemma", in_place=False),
    "gemma3_text": Family(norms=6, offset=1.0, casting="gemma", in_place=False, heads_normed=True),
    "phi": Family(norms=1, layer_norm=True, gated=False),
    "starcoder2": Family(norms=2, layer_norm=True, gated=False),
}
"""By the config's model_type."""
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
GATED = ("swiglu", "geglu")
WHAT = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm", "rope": "RoPE", "swiglu": "SwiGLU", "geglu": "GeGLU (tanh)"}
"""The operations that get a kernel."""
OURS = "rope"
"""The one of them whose kernel is our own."""
KERNELS = {
    "rms_norm": "_rms_norm_forward_kernel",
    "layer_norm": "_layer_norm_forward_kernel",
    "rope": r"^fxtune::rotary(_qkv)?$",
    "swiglu": "_swiglu_(fused_gate_up_)?forward_kernel",
    "geglu": "_geglu_tanh_forward_kernel",
}
"""What the profiler calls their forward kernels, in compiled code too, or the operator that runs one."""


@dataclass
class Liger(Technique):
    rms_norm: Switch = Switch.auto
    """`auto` here and below: on with a GPU, and under torch.compile where it is measured to be faster than compiled code."""
    layer_norm: Switch = Switch.auto
    rope: Switch = Switch.auto
    """Our own, and any device will do. `auto`: on with a GPU, unless torch.compile fuses RoPE with norms of queries and keys."""
    swiglu: Switch = Switch.auto
    geglu: Switch = Switch.auto
    """For the tanh form of GELU, which is Gemma's."""
    fused_linear_cross_entropy: Switch = Switch.auto
    """Loss and head in one operation that never holds the logits. `auto`: where a micro-batch's would be over 64 MiB."""
    chunk_rows: Optional[int] = field(default=None, metadata={"min": 1})
    """Rows whose logits it holds at once; null: as many as fit into 1 GiB."""

    def check(self, facts: Facts) -> Iterator[str]:
        if self.chunk_rows is not None and self.fused_linear_cross_entropy is Switch.off:
            yield (
                "chunk_rows: read by fused_linear_cross_entropy, which is off. Set that to on or auto, or leave chunk_rows "
                "out."
            )
        wanted = {name: switch for name in WHAT if (switch := Switch(getattr(self, name))) is not Switch.off}
        if not wanted:
            return
        kind = facts.text.get("model_type", "this model")
        if kind not in FAMILIES:
            yield (
                f"enabled: Liger's kernels are known for {', '.join(sorted(FAMILIES))}, and this is {kind}. Set "
                f"{', '.join(wanted)} to off (fused_linear_cross_entropy serves any model), or enabled to false."
            )
            return
        asked = [name for name, switch in wanted.items() if switch is Switch.on]
        has = _operations(facts.text)
        for name in asked:
            if name not in has:
                yield f"{name}: {kind} with this config has no {WHAT[name]} of Liger's kind. Use auto or off."
        if facts.device != "cuda":
            yield from (
                f"{name}: Liger's kernels are Triton's and need a GPU. Use auto or off."
                for name in asked
                if name != OURS
            )
        elif PACKAGE not in facts.packages and (theirs := [name for name in wanted if name != OURS]):
            yield f"enabled: the package {PACKAGE} is not installed: {INSTALL}. Or set {', '.join(theirs)} to off."
        if facts.techniques.mlp_kernel(facts) == "lora":
            yield from (
                f"{name}: techniques.lora.fused=on makes an MLP one operator, with its own. Set one of them to off."
                for name in asked
                if name in GATED
            )

    def resolve(self, facts: Facts) -> str | None:
        notes = []
        for name in WHAT:
            if getattr(self, name) is Switch.auto:
                on, why = self._choose(name, facts)
                setattr(self, name, Switch.on if on else Switch.off)
                if why:
                    notes.append(f"{name} {'on' if on else 'off'} ({why})")
        if self.fused_linear_cross_entropy is Switch.auto:
            size = facts.tokens * facts.text.get("vocab_size", 0) * 4
            on = size > FEW_LOGITS
            self.fused_linear_cross_entropy = Switch.on if on else Switch.off
            self.chunk_rows = self.chunk_rows if on else None
            notes.append(
                f"fused_linear_cross_entropy {'on' if on else 'off'} (a micro-batch's logits are up to "
                f"{size / 2**30:.2g} GiB in float32)"
            )
        if Switch.on not in [self.fused_linear_cross_entropy, *(getattr(self, name) for name in WHAT)]:
            return f"nothing of it acts here: {', '.join(notes) or 'each kernel is off'}"
        return ", ".join(notes) or None

    def _choose(self, name: str, facts: Facts) -> tuple[bool, str]:
        if name not in _operations(facts.text):
            return False, ""
        if name in GATED and facts.techniques.mlp_kernel(facts) == "lora":
            return False, "techniques.lora.fused has it in its own operator"
        if facts.device != "cuda":
            return False, "Triton needs a GPU"
        if not facts.techniques.compile.enabled:
            return True, "nothing else fuses it without torch.compile"
        if name == OURS:
            if FAMILIES[facts.text["model_type"]].heads_normed or facts.text.get("qk_layernorm"):
                return False, "torch.compile fuses it with the norms of queries and keys"
            return True, "our own kernel moves fewer bytes than torch.compile's"
        if facts.deterministic:
            return False, "torch.compile fuses it; run.deterministic=true leaves nothing to the clock"
        found = _times(name, facts)
        if found is None:
            return False, "torch.compile fuses it; neither could be measured here"
        compiled, liger = found
        if liger is None:
            return False, "Liger's does not compile here"
        return liger < compiled, f"measured: compiled {compiled:.3f} ms, Liger {liger:.3f} ms"

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        switched = [name for name in WHAT if getattr(self, name) is Switch.on]
        if not switched:
            return model
        family = FAMILIES[model.config.get_text_config().model_type]  # type: ignore[union-attr, operator]
        for module in backbone(model).modules():
            for name in switched:
                if forward := _forward(name, module, family):
                    module.__class__ = forwards.variant(type(module), name, forward)  # type: ignore[arg-type]
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        switched = [name for name in WHAT if getattr(self, name) is Switch.on]
        if not switched:
            return
        launched = _launches(model, probe)
        layers = len(decoder_layers(model))
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        for name in switched:
            wanted = runs = layers
            if name.endswith("norm"):
                wanted = runs = 1 + layers * _norms(config.to_dict())
            elif name == "rope" and getattr(config, "no_rope_layers", None):
                runs = sum(map(bool, config.no_rope_layers))
            placed = sum(getattr(module, "liger", None) == name for module in backbone(model).modules())
            if launched is None:
                yield Evidence(
                    "liger",
                    f"{name}: {wanted} in place",
                    f"{placed} in place; the profiler sees no kernels here, so whether they run was not observed",
                    placed >= wanted,
                )
                continue
            which = " of fxtune::rotary" if name == OURS else ""
            yield Evidence(
                "liger",
                f"{name}: {wanted} in place, {runs} run{which} in a forward pass",
                f"{placed} in place, {launched[name]} run",
                placed >= wanted and launched[name] >= runs,
            )


def _operations(text: dict[str, Any]) -> set[str]:
    """The operations of Liger's that the model of this config has."""
    family = FAMILIES.get(text.get("model_type", ""))
    if family is None:
        return set()
    activation = text.get("hidden_activation" if text["model_type"] in ("gemma2", "gemma3_text") else "hidden_act")
    gated = {ACTIVATIONS[activation]} if family.gated and activation in ACTIVATIONS else set()
    return {"layer_norm" if family.layer_norm else "rms_norm", "rope"} | gated


def _norms(text: dict[str, Any]) -> int:
    return FAMILIES[text["model_type"]].norms + 2 * bool(text.get("qk_layernorm"))


def _forward(name: str, module: nn.Module, family: Family) -> Callable[..., Any] | None:
    """The forward by Liger's kernel that `module` gets, or None where it is nothing that `name` replaces."""
    kind: Any = type(module)
    if name == "rms_norm" and kind.__name__.endswith("RMSNorm"):
        eps = getattr(module, "variance_epsilon", None) or module.eps
        return forwards.rms_norm(float(eps), family.offset, family.casting, family.in_place)  # type: ignore[arg-type]
    if name == "layer_norm" and kind is nn.LayerNorm and module.weight is not None and module.bias is not None:
        return forwards.layer_norm(float(module.eps))  # type: ignore[arg-type]
    if name in ("swiglu", "geglu"):
        if hasattr(module, "gate_up_proj"):
            return forwards.swiglu_at_once() if name == "swiglu" else forwards.geglu_at_once()
        if hasattr(module, "gate_proj"):
            return forwards.swiglu() if name == "swiglu" else forwards.geglu()
    if name == "rope" and kind.__name__.endswith("Attention"):
        return forwards.rotated(kind)
    return None


def _launches(model: nn.Module, probe: dict[str, Any]) -> dict[str, int] | None:
    """How often the kernel of each operation ran in one forward pass; None where the profiler may not see the device."""
    with observed(model), torch.enable_grad():  # as in training, so that compiled code is that of training
        seen = operators(lambda: model(**probe), {**KERNELS, "anything": "."})
    if next(model.parameters()).is_cuda and not seen["anything"].kernels:
        return None
    return {name: seen[name].calls for name in KERNELS}


def _times(name: str, facts: Facts) -> tuple[float, float | None] | None:
    """Milliseconds compiled and by Liger's kernel, from the cache or measured now; None where there is no GPU to ask, or no
    room on it.
    """
    text, family = facts.text, FAMILIES[facts.text["model_type"]]
    norm = name.endswith("norm")
    width, dtype = (text["hidden_size"], facts.dtype) if norm else (text["intermediate_size"], facts.compute_dtype)
    case = timing.Case(
        name,
        min(facts.tokens, timing.MOST_ROWS),
        width,
        dtype,
        trained=norm and not facts.techniques.lora.enabled,
        offset=family.offset,
        casting=family.casting,
    )
    versions = {package: facts.packages.get(package) for package in ("torch", PACKAGE)}
    key = json.dumps([facts.device_name, versions, asdict(case)], sort_keys=True)
    file = cache_home() / "liger_times.json"
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        if not torch.cuda.is_available():
            return None
        use_cache_folder()
        try:
            known[key] = timing.times(case)
        except RuntimeError as error:
            if out_of_memory_reason(error) is None:
                raise
            return None  # under a limit (run.memory_gib); another day there may be room, so it is not kept
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(known, indent=1), shared=True)
        except OSError:
            pass  # a cache: measured again next time
    compiled, liger = known[key]
    return compiled, liger
