"""Low-rank adapters through peft: LoRA (arXiv 2106.09685), rsLoRA, DoRA. Off: full fine-tuning.

A frozen linear W gets a trained detour: W x + alpha/r * B A x, with A [r, in] and B [out, r]. B starts at zero, so the
model starts as its base. Adapters are float32 also over a bfloat16 base: they are small (0.5 % of an 8B model at r=16), and
bfloat16 has 8 bits of mantissa, so an update of 1/256 of a weight or less would be rounded away. `precision.autocast` makes
their matmuls fast again.

PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775) start A and B from a factorisation of W and take the product out of
the frozen weight, so they too start as their base; whoever loads such an adapter repeats that factorisation.

Linear by linear an adapter costs several passes over activations. `fused` runs those that read the same input, and a whole
gated MLP, as one operator each (fxtune/techniques/lora/fuse.py, kernels/fused_lora.py): the same mathematics, with the adapters' products
in the dtype that the base computes in (float32 is added up inside), as autocast has them. `matmul` says whose kernel multiplies
by their frozen weights and by the head (fxtune/techniques/lora/gemm_choice.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models.peft_adapter import start
from fxtune.models.structure import observed, parameter_counts, skeleton
from fxtune.techniques.base import Evidence, Switch, Technique
from fxtune.techniques.lora import fuse as fusing
from fxtune.techniques.lora import gemm_choice

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

ALL_LINEAR = "all-linear"
ROUNDINGS = 8
"""How many times what one rounding of its input does to the logits a model with adapters may be from its base: it rounds in each
layer."""


class AdapterInit(str, Enum):
    default = "default"
    gaussian = "gaussian"
    pissa = "pissa"
    olora = "olora"


class Matmul(str, Enum):
    auto = "auto"
    cublas = "cublas"
    cute = "cute"


@dataclass
class Lora(Technique):
    r: int = field(default=16, metadata={"min": 1})
    alpha: float = field(default=32.0, metadata={"above": 0})
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the linears to adapt, or `all-linear` (all but the head)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) in place of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Decompose weights into magnitude and direction (arXiv 2402.09353)."""
    init: AdapterInit = AdapterInit.default
    """`default`: A uniform, B zero; `gaussian`: A normal, B zero; `pissa`, `olora`: from the weights themselves."""
    fused: Switch = Switch.auto
    """Run adapters of q, k and v, and whole MLPs, as one operator each. `auto`: on a GPU, where it can act (on a CPU a step
    takes up to a quarter longer with it); linears that it cannot serve run as peft runs them."""
    matmul: Matmul = Matmul.auto
    """Whose kernel multiplies by the 16-bit weights of fused adapters and by the fused loss's head: `cublas`, as everywhere else,
    or `cute`, quack-kernels' for Hopper, which does large products in 2 to 7 % less time. `auto`: cute where it can act."""

    def __post_init__(self) -> None:
        self._may_not_fuse = False  # where `auto` became on: a model of none but unusual modules is no error
        self._may_be_cublas = False  # where `auto` became cute: a kernel that does not compile is no error
        self._not_compiled = ""

    def check(self, facts: Facts) -> Iterator[str]:
        if self.r < 1:
            yield f"r: {self.r} must be at least 1."
        if not self.alpha > 0:
            yield f"alpha: {self.alpha} must be above 0."
        if not 0 <= self.dropout < 1:
            yield f"dropout: {self.dropout} must be in [0, 1)."
        if not self.target_modules:
            yield f"target_modules: empty, so nothing is adapted. Use [{ALL_LINEAR}]."
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            yield f"target_modules: {ALL_LINEAR} stands for all of them. Use it alone, or names alone."
        if self.dora and self.init in (AdapterInit.pissa, AdapterInit.olora):
            yield (
                f"init: {self.init.value} moves weight into the adapter, and DoRA measures its magnitudes on the weight. "
                "Use default with dora."
            )
        if self.fused is Switch.on and (hindrance := fusing.hindrance(facts)):
            yield f"fused: {hindrance}. Use auto or off."
        if self.matmul is Matmul.cute and (why := self._without_cute(facts)):
            yield f"matmul: cute, but {why}. Or use auto."
        config = facts.model.get("text_config") or facts.model
        tied = {"lm_head", "embed_tokens"} & {*self.modules_to_save, *self.target_modules}
        if tied and (config.get("tie_word_embeddings") or facts.model.get("tie_word_embeddings")):
            yield (
                "modules_to_save: this model's head and embedding are one tensor, and adapting "
                f"{' and '.join(sorted(tied))} would part them. Take it out of modules_to_save and target_modules."
            )
        if self.modules_to_save or ALL_LINEAR not in self.target_modules:
            yield from self._unmatched(skeleton(facts.model))

    def _unmatched(self, model: nn.Module | None) -> Iterator[str]:
        """A reason for each name that stands for no module of `model`."""
        if model is None:
            return
        names = [name for name, _ in model.named_modules()]
        linears = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        for option, wanted in (("target_modules", self.target_modules), ("modules_to_save", self.modules_to_save)):
            for name in wanted:
                if name != ALL_LINEAR and not any(there == name or there.endswith(f".{name}") for there in names):
                    yield f"{option}: {name} is no module of this model. Its linears are {', '.join(linears)}."

    def resolve(self, facts: Facts) -> str | None:
        return "; ".join(note for note in (self._resolve_fused(facts), self._resolve_matmul(facts)) if note) or None

    def _resolve_fused(self, facts: Facts) -> str | None:
        if self.fused is not Switch.auto:
            return None
        why = "nothing is won on a CPU" if facts.device == "cpu" else fusing.hindrance(facts)
        if not why and facts.techniques.mlp_kernel(facts) == "liger":
            why = "techniques.liger has the MLPs"
        self.fused, self._may_not_fuse = (Switch.off if why else Switch.on), True
        return f"fused {self.fused.value} ({why or 'q, k, v and MLPs as one operator each'})"

    def _resolve_matmul(self, facts: Facts) -> str | None:
        """After `fused`. Nothing is told where there is no choice: without fused adapters, and on a CPU."""
        if self.matmul is not Matmul.auto:
            return None
        why = self._without_cute(facts)
        self.matmul, self._may_be_cublas = (Matmul.cublas if why else Matmul.cute), True
        if self.fused is not Switch.on or facts.device == "cpu":
            return None
        return f"matmul {self.matmul.value} ({why or 'the faster kernel for large products on this card'})"

    def _without_cute(self, facts: Facts) -> str | None:
        """Why quack's kernel cannot multiply."""
        if self.fused is Switch.off:
            return "techniques.lora.fused=off leaves all products to peft's linears"
        return fusing.hindrance(facts) or gemm_choice.hindrance(facts)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Wrap the model (PeftModel), freezing the base. The random state of the caller decides A.

        From here on `matmul` is what multiplies, also where `auto` had chosen a kernel that does not compile: another one rounds
        otherwise, so that a run which goes on must find the same (sameness.py).
        """
        import peft

        if reasons := list(self._unmatched(model)):
            raise ConfigError("\n".join(f"techniques.lora.{reason}" for reason in reasons))
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft takes any number
            lora_dropout=self.dropout,
            target_modules=ALL_LINEAR if ALL_LINEAR in self.target_modules else list(self.target_modules),
            modules_to_save=list(self.modules_to_save) or None,
            use_rslora=self.rslora,
            use_dora=self.dora,
            init_lora_weights=True if self.init is AdapterInit.default else self.init.value,
            task_type="CAUSAL_LM",
        )
        before = _sketch(model)
        # What a rounding error does to these logits: in random weights, and over fp8, it grows from layer to layer.
        noise = _distance(_sketch(model, nudge=torch.finfo(before.dtype).eps), before)
        try:
            # Factorisations (PiSSA, OLoRA) and norms (DoRA) are taken in full precision, whatever training computes in.
            with warnings.catch_warnings(), torch.autocast(world.device.type, enabled=False):
                warnings.simplefilter("ignore")
                adapted: Any = peft.get_peft_model(model, config, revision=getattr(model, "base_revision", None))
        except ValueError as error:
            raise ConfigError(f"techniques.lora.target_modules: {error}") from error
        _train_in_float32(adapted)
        adapted.base_logits, adapted.base_noise = before, noise
        if self.fused is Switch.on:
            adapted.fusion = fusing.fuse(adapted)
            if self.matmul is Matmul.cute:
                self._not_compiled = gemm_choice.take(adapted, self._may_be_cublas) or ""
                self.matmul = Matmul.cublas if self._not_compiled else self.matmul
        return adapted

    def start_from(self, model: Any, adapter: str) -> None:
        """Load the weights of the adapter `adapter` (a folder or a hub id) into `model`, which apply() made.

        Raises ConfigError where the adapter was made with other options, StorageError where its weights do not fit.
        """
        factored = self.init in (AdapterInit.pissa, AdapterInit.olora)
        start(
            model,
            adapter,
            {
                "r": self.r,
                "alpha": self.alpha,
                "rslora": self.rslora,
                "dora": self.dora,
                "init": self.init.value if factored else AdapterInit.default.value,
                "modules_to_save": sorted(self.modules_to_save),
            },
        )

    def verify(self, model: Any, probe: dict[str, Any]) -> Iterator[Evidence]:
        from peft.tuners.lora import LoraLayer

        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        counts = parameter_counts(model)
        trained = sum(counts[name] for name, parameter in model.named_parameters() if parameter.requires_grad)
        foreign = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and "lora_" not in name and "modules_to_save" not in name
        ]
        total = sum(counts.values())
        yield Evidence(
            "lora",
            f"adapters of rank {self.r} on {', '.join(self.target_modules)}, the base frozen",
            f"{len(layers)} modules, {trained:,} of {total:,} parameters trained ({100 * trained / total:.2f} %), "
            f"{len(foreign)} of them in the base",
            bool(layers) and trained > 0 and not foreign,
        )
        if self.fused is Switch.on:
            yield self._ran_fused(model, probe)
            if self.matmul is Matmul.cute or self._not_compiled:
                yield self._multiplied(model)
        # Of an embedding's adapter peft starts the other half at zero.
        halves = [
            parameter for name, parameter in model.named_parameters() if "lora_B" in name or "lora_embedding_A" in name
        ]
        nonzero = sum(bool(half.any()) for half in halves)
        if start := getattr(model, "adapter_start", None):
            yield Evidence(
                "lora", f"start from {start}", f"{nonzero} of {len(halves)} matrices B are not zero", nonzero > 0
            )
            return
        before = model.base_logits
        shift = _distance(_sketch(model), before)
        factored = self.init in (AdapterInit.pissa, AdapterInit.olora)
        # B = 0 adds exactly nothing, but a fused operator rounds at other places, and so do tiles of one (mlp_tiles).
        allowed = {torch.float32: 1e-4}.get(before.dtype, 5e-2) + ROUNDINGS * model.base_noise
        yield Evidence(
            "lora",
            f"init {self.init.value}: the model starts as its base",
            f"{len(halves) - nonzero} of {len(halves)} matrices B are zero, logits {shift:.1e} from the base's "
            f"({model.base_noise:.1e} is what a rounding of its input does)",
            shift <= allowed and (nonzero == len(halves) if factored else nonzero == 0),
        )

    def _ran_fused(self, model: Any, probe: dict[str, Any]) -> Evidence:
        """The operators of a forward pass, seen where they are dispatched."""
        with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            seen = fusing.calls(lambda: model(**probe))
        ran, wanted = sum(seen.values()), sum(model.fusion.groups.values())
        told = ", ".join(f"{name} {count} times" for name, count in seen.items()) or "none"
        # A mixture's experts run where a token goes to them.
        fits = ran == wanted or (model.fusion.experts and 0 < ran < wanted)
        return Evidence(
            "lora",
            f"adapters fused: {wanted} operators a forward pass ({model.fusion.told()})",
            f"{told} ran",
            fits and (wanted > 0 or self._may_not_fuse),
        )

    def _multiplied(self, model: Any) -> Evidence:
        """Whose kernel multiplies by the model's weights. Also where `auto` had to fall back, which is told and no error."""
        if self._not_compiled:
            return Evidence(
                "lora",
                "matmul auto: quack's kernel where it compiles",
                f"cuBLAS, since that did not compile here ({self._not_compiled})",
                True,
            )
        told, was = gemm_choice.ran(model)
        return Evidence(
            "lora", "matmul cute: large products by quack's kernel", told, self._may_be_cublas if was is None else was
        )


def _train_in_float32(adapted: Any) -> None:
    """Give what modules_to_save trains float32 weights as well, between two casts: peft leaves them in the base's dtype."""
    from peft.utils import ModulesToSaveWrapper

    dtype = next(
        one.dtype for name, one in adapted.named_parameters() if one.is_floating_point() and "lora_" not in name
    )

    def cast(value: Any, to: torch.dtype) -> Any:
        return value.to(to) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    wrappers = [module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper)]
    for wrapper in wrappers if dtype is not torch.float32 else []:
        trained = wrapper.modules_to_save["default"].float()
        trained.register_forward_pre_hook(lambda _, inputs: tuple(cast(value, torch.float32) for value in inputs))
        trained.register_forward_hook(lambda _, inputs, output: cast(output, dtype))


def _sketch(model: Any, nudge: float = 0.0) -> torch.Tensor:
    """Logits of eight fixed tokens under the autocast around this call: what the model computes, small enough to keep.

    `nudge`: how far, relative to its size, each number of the embedded tokens is moved.
    """
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size

    def moved(_: Any, __: Any, states: torch.Tensor) -> torch.Tensor:
        up = torch.arange(states.shape[-1], device=device) % 2 * 2 - 1
        return states * (1 + nudge * up).to(states.dtype)

    hook = model.get_input_embeddings().register_forward_hook(moved) if nudge else None
    try:
        with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        if hook:
            hook.remove()
    return logits


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()
