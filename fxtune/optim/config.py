"""Optimizers by name: their options, which optimizer reads which option, and the reasons why an optimizer cannot
run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Optional

from omegaconf import FloatNode

from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.system.machine.facts import APEX, MachineFacts, c_compiler

AUTO = "auto"
SCHEDULEFREE, BITSANDBYTES, TORCHAO = "schedulefree", "bitsandbytes", "torchao"
QUANT = "Install it with pip install 'fxtune[quant]'"


class OptimizerName(str, Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    adamw_schedulefree = "adamw_schedulefree"
    apex_adamw = "apex_adamw"
    sgd = "sgd"
    adafactor = "adafactor"
    lion = "lion"
    muon = "muon"


class Moments(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class OptimizerConfig:
    name: OptimizerName = OptimizerName.adamw
    """`adamw_8bit` keeps AdamW's moments in 8 bits (with bitsandbytes, or with torchao for stochastic_rounding).
    `adamw_schedulefree` averages its weights instead of decaying the learning rate (arXiv 2405.15682), so it needs
    schedule.name=constant. `apex_adamw` is FusedAdam of NVIDIA's Apex. `muon` updates matrices with Muon, scaled so
    that an AdamW learning rate fits, and all other weights with AdamW."""
    lr: Any = field(default=2e-4, metadata={"kind": float, "above": 0, "words": (AUTO,)})
    """Peak learning rate. `auto` computes it from the size of the model, the adapters and the documents in a step, by
    a published rule for AdamW and supervised text (docs/learning_rate.md); a line shows how. `fxtune lr` tests
    rates."""
    lr_vision: Optional[float] = field(default=None, metadata={"above": 0})
    """Peak learning rate of the parts for images, on the same schedule: the vision encoder and its projector, whole or
    with adapters. null: full fine-tuning does not train these parts, and adapters on them have the rate `lr`."""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """Decoupled weight decay (weight x lr x weight_decay a step). The exception is torch's SGD, which adds weight x
    weight_decay to the gradient, and so to the momentum. Norms, biases and other 1-d parameters are not decayed."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999], metadata={"min": 0, "below": 1})
    """AdamW's and Lion's two decay rates (Lion's authors advise 0.9, 0.99)."""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """Added to the denominator of AdamW's update."""
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    """SGD's and Muon's momentum."""
    stochastic_rounding: bool = False
    """Round updates of bfloat16 weights up or down at random, so that small updates add up instead of being lost.
    `adamw` and `adamw_8bit` can do this."""
    moments: Moments = Moments.float32
    """The dtype of the moments of `adamw` with stochastic_rounding. `bfloat16` takes half the memory, 4 bytes a
    weight. These moments are rounded stochastically, too."""
    offload: bool = False
    """Keep the moments of `adamw` in page-locked memory of the host, in full fine-tuning on a GPU. Weights must not be
    divided over GPUs. While a weight is updated, its moments and the moments of the next weights are also on the GPU,
    of at most two weights of each size. With in_backward the copies overlap with the backward pass."""
    in_backward: Switch = Switch.auto
    """Update each weight in the backward pass, as soon as its gradient is complete, and free the gradient. So full
    fine-tuning holds the gradients of about one layer. Needs train.max_grad_norm=0 and one micro-batch a step on one
    card. `auto`: if these conditions hold and, by the forecast, all gradients at once would not fit."""

    def __post_init__(self) -> None:
        if self.lr != AUTO:  # take what OmegaConf takes for a float: 1, "1e-4"
            self.lr = FloatNode().validate_and_convert(self.lr)


ZERO_INITS = ("default", "gaussian")
"""The values of techniques.lora.init with which an adapter starts at zero."""


class Traits(NamedTuple):
    """Properties of an optimizer that hold on every machine."""

    reads: tuple[str, ...]
    """Options that this optimizer reads besides lr and weight_decay."""
    moments: float
    """Numbers that the optimizer keeps for each parameter."""
    has_lr_rule: bool = False
    """Whether lr=auto has a rule. All kinds of AdamW have it, and Muon, because its updates are scaled to AdamW's."""


TRAITS = {
    OptimizerName.adamw: Traits(("betas", "eps"), 2.0, has_lr_rule=True),
    OptimizerName.adamw_8bit: Traits(("betas", "eps"), 0.5, has_lr_rule=True),
    OptimizerName.adamw_schedulefree: Traits(("betas", "eps"), 2.0, has_lr_rule=True),
    OptimizerName.apex_adamw: Traits(("betas", "eps"), 2.0, has_lr_rule=True),
    OptimizerName.sgd: Traits(("momentum",), 1.0),
    OptimizerName.adafactor: Traits((), 0.01),
    OptimizerName.lion: Traits(("betas",), 1.0),
    OptimizerName.muon: Traits(("momentum", "betas", "eps"), 1.0, has_lr_rule=True),
}


def refusals(config: OptimizerConfig, facts: Facts) -> Iterator[str]:
    """Yield each reason, with its key, why this optimizer cannot run under `facts`. Needs no weights."""
    if config.lr == AUTO:
        yield from no_rule(config, facts)
    eight_bit, chosen = config.name is OptimizerName.adamw_8bit, library(config, facts)
    if eight_bit and chosen not in facts.packages:
        yield f"optimizer.name: adamw_8bit needs {chosen}, which {facts.lacks(chosen)}. {QUANT}, or use adamw."
    if eight_bit and facts.degrees.shard > 1 and not facts.techniques.lora.enabled:
        yield (
            "optimizer.name: adamw_8bit scales its moments in blocks that span rows, so another number of ranks could "
            "not read a checkpoint of divided weights. Use adamw, lion, muon or sgd, or set parallel.shard=1."
        )
    if config.name is OptimizerName.adamw_schedulefree and SCHEDULEFREE not in facts.packages:
        yield (
            f"optimizer.name: adamw_schedulefree needs the package schedulefree, which {facts.lacks(SCHEDULEFREE)}. "
            "Install it with pip install schedulefree, or use adamw."
        )
    if config.name is OptimizerName.adamw_schedulefree and facts.degrees.shard > 1:
        yield (
            f"optimizer.name: adamw_schedulefree has not been tried with divided weights, and this run has "
            f"{facts.degrees}. Use adamw, or parallel.shard=1."
        )
    if config.name is OptimizerName.adamw_schedulefree and config.betas[0] == 0:
        yield "optimizer.betas: adamw_schedulefree has no averages with a first value of 0. Its default is 0.9."
    if config.name is OptimizerName.apex_adamw and (why := facts.apex_refusal()):
        yield f"optimizer.name: apex_adamw is FusedAdam of Apex. {why[0].upper()}{why[1:]}, or use adamw."
    lora = facts.techniques.lora
    if config.lr_vision is not None and not facts.reads_images:
        yield f"optimizer.lr_vision: {facts.text.get('model_type')} reads no images. Set it to null."
    elif config.lr_vision is not None and lora.enabled and not (lora.vision or lora.projector):
        yield (
            "optimizer.lr_vision: adapters are on the language model alone. Set techniques.lora.vision=on or "
            "techniques.lora.projector=on, or lr_vision=null."
        )
    if config.stochastic_rounding:
        if config.name not in (OptimizerName.adamw, OptimizerName.adamw_8bit):
            yield (
                f"optimizer.stochastic_rounding: {config.name.value} does not have it. Use adamw or adamw_8bit, or "
                "set it to false."
            )
        if facts.techniques.lora.enabled:
            yield "optimizer.stochastic_rounding: adapters are trained in float32, which needs none. Set it to false."
        elif facts.dtype != "bfloat16":
            yield (
                f"optimizer.stochastic_rounding: it is for bfloat16 weights, and these are {facts.dtype}. Set it to "
                "false, or model.dtype to bfloat16."
            )
    if config.moments is not Moments.float32 and not (
        config.name is OptimizerName.adamw and config.stochastic_rounding
    ):
        yield (
            f"optimizer.moments: {config.moments.value} is read by adamw with stochastic_rounding=true only. Set "
            "them, or leave it out."
        )
    if config.offload:
        if config.name is not OptimizerName.adamw:
            name = config.name.value
            yield f"optimizer.offload: {name} keeps its moments on the GPU. Use adamw, or set it to false."
        if facts.device != "cuda":
            yield "optimizer.offload: this run has no GPU, so all moments are in host memory already. Set it to false."
        if facts.techniques.lora.enabled:
            yield "optimizer.offload: adapters have few moments, which stay on the GPU. Set it to false."
        if facts.degrees.shard > 1:
            yield (
                f"optimizer.offload: parallel.shard={facts.degrees.shard} divides the moments over the GPUs. Set it "
                "to false, or parallel.shard to 1."
            )
    if facts.degrees.shard > 1 and config.name is OptimizerName.adafactor and not facts.techniques.lora.enabled:
        yield (
            "optimizer.name: adafactor keeps means over whole matrices, and parallel.shard="
            f"{facts.degrees.shard} leaves each rank rows of them. Use adamw, lion, muon or sgd, train adapters "
            "(techniques.lora.enabled=true), or set parallel.shard=1."
        )
    compiled = config.stochastic_rounding or (eight_bit and chosen == TORCHAO)
    if facts.device == "cuda" and compiled and not c_compiler():
        yield (
            "optimizer.name: this update is compiled on a GPU, and there is no C compiler on the PATH (gcc, clang or "
            "$CC). Install one (Debian: apt install gcc), or use adamw without stochastic_rounding."
        )


def no_rule(config: OptimizerConfig, facts: Facts) -> Iterator[str]:
    """Yield each reason why no rule for lr=auto applies."""
    give = "Give a number (`fxtune lr` tests rates)"
    if not TRAITS[config.name].has_lr_rule:
        yield f"optimizer.lr: auto has a rule for AdamW and none for {config.name.value}. {give}."
    if facts.reads_groups:
        yield (
            "optimizer.lr: auto has a rule for supervised text, and this objective compares or scores documents. Give "
            "a number (docs/preferences.md, docs/companions.md and docs/reward_models.md have rates)."
        )
    if not facts.text.get("hidden_size"):
        yield f"optimizer.lr: auto needs the model's hidden size, and its config has no hidden_size. {give}."
    lora = facts.techniques.lora
    if lora.enabled and lora.init.value not in ZERO_INITS:
        yield (
            f"optimizer.lr: auto has a rule for adapters that start at zero, and techniques.lora.init="
            f"{lora.init.value} starts elsewhere. {give}, or use init=default."
        )


def packages(config: OptimizerConfig, facts: Facts) -> Iterator[str]:
    """Yield the optional packages that this optimizer would use."""
    if config.name is OptimizerName.adamw_8bit:
        yield library(config, facts)
    elif config.name is OptimizerName.apex_adamw:
        yield APEX


def library(config: OptimizerConfig, facts: MachineFacts) -> str:
    """The package of adamw_8bit. By default it is bitsandbytes, because torchao's update is compiled when a run
    starts. It is torchao if bitsandbytes is not installed, or for stochastic rounding, which bitsandbytes lacks."""
    return TORCHAO if config.stochastic_rounding or BITSANDBYTES not in facts.packages else BITSANDBYTES
