"""Liger's Triton kernels (arXiv 2410.10989): norms, RoPE and gated products as one kernel each, and a loss without
logits.

In eager torch an RMSNorm is six kernels that each read and write all hidden states, and autograd keeps several of
their results. Liger's RMSNorm is one kernel and keeps only the input. torch.compile fuses the same operations, and
also the residual sum before a norm. Its code was faster in each measurement. So under torch.compile the compiler does
norms and products.

Liger's own `apply_liger_kernel_to_*` replaces classes and functions of transformers for the whole process. fxtune
puts Liger's modules into this one model (modules.py): names and weights stay.

Two operations are fxtune's own and need neither a GPU nor the package: `rope` (kernels/rotary.py) and
`fused_linear_cross_entropy` (kernels/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.facts.execution import Execution
from fxtune.facts.options import AUTO, LigerKernel, LigerOptions
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import backbone, decoder_layers, outputs, skeleton, without_dropout
from fxtune.system.process.profiler import observe_operators
from fxtune.system.terminal.units import GIB
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.liger import modules
from fxtune.techniques.liger.modules import Family
from fxtune.techniques.lora.fuse import mlp_kernel
from fxtune.upstream import transformers as upstream

PACKAGE = "liger-kernel"
ROPE, PRODUCTS = "rope", ("swiglu", "geglu")
INSTALL = "pip install 'liger-kernel>=0.8.5'"
SMALL_LOGITS = 2**26
"""A micro-batch's float32 logits are kept as a whole up to this size in bytes, because they cost next to nothing."""
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "granite", "smollm3"), Family(norms=2)),
    "phi3": Family(norms=2, joint=True),
    "qwen3": Family(norms=4, heads_normed=True),
    **dict.fromkeys(("olmo2", "olmo3"), Family(norms=4, casting="gemma", in_place=False, heads_normed=True)),
    "gemma": Family(norms=2, offset=1.0, casting="gemma"),
    "gemma2": Family(norms=4, offset=1.0, casting="gemma", in_place=False),
    "gemma3_text": Family(norms=6, offset=1.0, casting="gemma", in_place=False, heads_normed=True),
    "phi": Family(norms=1, layer_norm=True, gated=False),
    "starcoder2": Family(norms=2, layer_norm=True, gated=False),
}
"""The config's model_type -> family."""
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
OPERATIONS = {
    "rms_norm": ("RMSNorm", "_rms_norm_forward_kernel"),
    "layer_norm": ("LayerNorm", "_layer_norm_forward_kernel"),
    "rope": ("RoPE", r"^fxtune::rotary(_qkv)?$"),
    "swiglu": ("SwiGLU", "_swiglu_forward_kernel"),
    "geglu": ("GeGLU (tanh)", "_geglu_tanh_forward_kernel"),
}
"""Operation -> (its name in messages, a pattern for its forward kernel or operator in the profiler)."""
FUSED_LOSS = LigerKernel.fused_linear_cross_entropy.value


@dataclass
class Liger(LigerOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        named = self.kernels != AUTO
        if facts.head != "lm" and self.runs(FUSED_LOSS):
            yield f"kernels: the head `{facts.head}` has no logits of a vocabulary. Remove {FUSED_LOSS}, or use auto."
        demanded = self._replacing()
        if named and not demanded:
            return
        kind = facts.text.get("model_type", "this model")
        if kind not in FAMILIES:
            if self.enabled == AUTO and not named:
                return  # the fused loss serves any model
            yield (
                f"kernels: Liger's are known for {', '.join(sorted(FAMILIES))}, and this is {kind}. Use "
                f"[{FUSED_LOSS}], which serves any model, or set enabled to false."
            )
            return
        for name in demanded:
            if why := self._refusal(name, facts):
                yield f"kernels: {name}: {why}. Remove it, or use auto."
        needs_package = demanded != [ROPE] if named else self.enabled != AUTO
        absent = PACKAGE not in facts.packages and PACKAGE not in facts.broken
        if needs_package and absent and facts.device == "cuda":
            yield f"kernels: the package {PACKAGE} is not installed: {INSTALL}. Or use [{ROPE}, {FUSED_LOSS}]."

    def _refusal(self, name: str, facts: Facts) -> str | None:
        """Why the kernel `name` cannot run under `facts`, or None if it can. The recipe names this kernel."""
        if name not in _operations(facts.text):
            return f"this model's config has no {OPERATIONS[name][0]} that Liger computes"
        if name == ROPE:
            return _unrotatable(facts)
        if facts.device != "cuda":
            return "Liger's kernels are written in Triton and need a GPU"
        if facts.techniques.compile.enabled:
            return "torch.compile fuses the same operations, faster than Liger's kernel"
        if name in PRODUCTS and mlp_kernel(facts) == "lora":
            return "techniques.lora.fused=on runs the MLP, with its product, as one operator"
        return f"{PACKAGE} {facts.lacks(PACKAGE)}" if PACKAGE in facts.broken else None

    def packages(self, facts: Facts) -> Iterator[str]:
        asked = OPERATIONS if self.kernels == AUTO else self._replacing()
        if facts.device == "cuda" and (_operations(facts.text) & {*asked}) - {ROPE}:
            yield PACKAGE

    def resolve(self, facts: Facts) -> str | None:
        if self.kernels != AUTO:
            return None if self.kernels else "no kernel runs here: kernels is empty"
        notes, chosen = [], []
        kind = facts.text.get("model_type", "this model")
        if kind not in FAMILIES:
            notes.append(f"its kernels off (they are known for other models than {kind})")
        for name in OPERATIONS:
            on, why = self._choose(name, facts)
            chosen += [name] if on else []
            if why:
                notes.append(f"{name} {'on' if on else 'off'} ({why})")
        size = facts.tokens * facts.text.get("vocab_size", 0) * 4
        on = size > SMALL_LOGITS and facts.head == "lm"
        chosen += [FUSED_LOSS] if on else []
        why = f"a micro-batch's logits are up to {size / GIB:.2g} GiB in float32"
        why = why if facts.head == "lm" else "the head has no logits of a vocabulary"
        notes.append(f"{FUSED_LOSS} {'on' if on else 'off'} ({why})")
        self.kernels = chosen
        return f"{'' if chosen else 'no kernel runs here: '}{', '.join(notes)}"

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        return replace(
            execution,
            fused_norms=self.runs("rms_norm"),
            fused_gate=self.runs("swiglu"),
            fused_loss=self.runs("fused_linear_cross_entropy"),
        )

    def _choose(self, name: str, facts: Facts) -> tuple[bool, str]:
        """Whether `auto` runs the operation `name` by its kernel, and why."""
        if name not in _operations(facts.text):
            return False, ""
        if name in PRODUCTS and mlp_kernel(facts) == "lora":
            return False, "techniques.lora.fused computes it in its own operator"
        if facts.device != "cuda":
            return False, "Triton needs a GPU"
        if name == "rope" and (why := _unrotatable(facts)):
            return False, why
        if name != "rope" and PACKAGE in facts.broken:
            return False, f"{PACKAGE} {facts.lacks(PACKAGE)}"
        if name != "rope" and self.enabled == AUTO and PACKAGE not in facts.packages:
            return False, f"the package {PACKAGE} is not installed"
        if not facts.techniques.compile.enabled:
            return True, "nothing else fuses it without torch.compile"
        if name == "rope":
            if FAMILIES[facts.text["model_type"]].heads_normed or facts.text.get("qk_layernorm"):
                return False, "torch.compile fuses it with the norms of queries and keys"
            return True, "fxtune's own kernel moves fewer bytes than torch.compile's"
        return False, "torch.compile fuses it"

    def _replacing(self) -> list[str]:
        """The kernels in use that replace modules. The list is empty while `auto` is undecided."""
        return [name for name in OPERATIONS if self.runs(name)]

    def apply(self, model: PreparedModel, world: World) -> None:
        if enabled := self._replacing():
            family = FAMILIES[model.module.config.get_text_config().model_type]
            for name in enabled:
                modules.replace_modules(backbone(model.module), name, family)

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count the replaced modules, and the runs of their kernels in one forward pass."""
        if not (enabled := self._replacing()):
            return
        launches = _launches(model, probe)
        layers, config = len(decoder_layers(model.module)), model.module.config.get_text_config()
        for name in enabled:
            expected = runs = layers
            if name.endswith("norm"):
                norms = FAMILIES[config.model_type].norms + 2 * bool(getattr(config, "qk_layernorm", False))
                expected = runs = 1 + layers * norms
            elif name == "rope" and getattr(config, "no_rope_layers", None):
                runs = sum(map(bool, config.no_rope_layers))
            replaced = sum(modules.operation_of(module) == name for module in backbone(model.module).modules())
            asked, observation, acted = f"{name}: {expected} replaced", f"{replaced} replaced", replaced >= expected
            if launches is None:
                observation += "; the profiler sees no kernels here, so their runs were not observed"
            else:
                asked += f", {runs} runs{' of fxtune::rotary' if name == 'rope' else ''} in a forward pass"
                observation += f", {launches[name]} runs"
                acted = acted and launches[name] >= runs
            yield Evidence("liger", asked, observation, acted, f"liger.{name}", lasting=launches is not None)


def _operations(text: dict[str, Any]) -> set[str]:
    """The names in OPERATIONS that a model with this config has."""
    family = FAMILIES.get(text.get("model_type", ""))
    if family is None:
        return set()
    activation = text.get("hidden_activation" if text["model_type"] in ("gemma2", "gemma3_text") else "hidden_act")
    gated = {ACTIVATIONS[activation]} if family.gated and activation in ACTIVATIONS else set()
    if family.joint:
        gated -= {"geglu"}  # Liger has no module for a joint GeGLU
    return {"layer_norm" if family.layer_norm else "rms_norm", "rope"} | gated


def _unrotatable(facts: Facts) -> str | None:
    """Why the RoPE of this model cannot be replaced, or None if it can."""
    if (model := skeleton(facts.model)) is None:
        return None
    kinds = (type(module) for module in backbone(model).modules() if modules.is_attention(module))
    kind = next((kind for kind in kinds if not upstream.rotates_by_name(kind)), None)
    return f"{kind.__name__} calls no {upstream.ROPE}" if kind is not None else None


def _launches(model: PreparedModel, probe: dict[str, Any]) -> dict[str, int] | None:
    """Runs of each operation's kernel in one forward pass of training's code, which may be compiled, or None if the
    profiler sees no kernels of the GPU."""
    module, patterns = model.module, {name: pattern for name, (_, pattern) in OPERATIONS.items()}
    run = model.first_pass.run if model.first_pass else partial(outputs, module, **probe)
    with without_dropout(module), torch.enable_grad():
        seen = observe_operators(run, {**patterns, "anything": "."})
    if next(module.parameters()).is_cuda and not seen["anything"].kernels:
        return None
    return {name: seen[name].calls for name in OPERATIONS}
