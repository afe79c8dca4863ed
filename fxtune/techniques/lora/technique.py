"""Low-rank adapters through peft: LoRA (arXiv 2106.09685), rsLoRA, DoRA. Off: full fine-tuning.

A frozen linear W gets a trained addition: W x + alpha/r * B A x, with A [r, in] and B [out, r]. B starts at zero, so
the model starts as its base. Adapters are float32 also over a bfloat16 base. They are small (0.5 % of an 8B model at
r=16), and bfloat16 has 8 bits of mantissa, so it would round away an update of 1/256 of a weight or less.
`precision.autocast` makes their matmuls fast again.

PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775) compute A and B from a factorization of W and subtract their
product from the frozen weight, so they too start as their base. Loading such an adapter repeats the factorization.

In peft an adapter costs several passes over the activations of each linear. `fused` runs linears that read the same
input, and a whole gated MLP, as one operator each (fuse.py, kernels/fused_lora.py). It is the same mathematics, with
the adapters' products in the dtype of the base (accumulated in float32), as under autocast. `matmul` selects the GEMM
backend for frozen weights and the head (gemm_backend.py).
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
from fxtune.models.peft_adapter import load_adapter
from fxtune.models.structure import observed, parameter_counts, skeleton
from fxtune.system.console import say
from fxtune.techniques.base import Evidence, Switch, Technique
from fxtune.techniques.lora import fuse as fusing
from fxtune.techniques.lora import gemm_backend
from fxtune.techniques.lora.families import probe_logits, relative_distance

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

ALL_LINEAR = "all-linear"
ROUNDINGS = 8
"""Logits with new adapters may differ from the base's by this many times the effect of one rounding of the input: each
layer rounds.
"""


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
    """Run adapters of q, k and v, and whole MLPs, as one operator each. `auto`: on a GPU, where possible (on a CPU a
    step takes up to a quarter longer with it). Linears that cannot be fused run as in peft.
    """
    matmul: Matmul = Matmul.auto
    """GEMM backend for the 16-bit weights of fused adapters and for the fused loss's head: `cublas`, or `cute`, a
    kernel of quack-kernels for Hopper that computes large products in 2 to 7 % less time. `auto`: cute where it is
    available.
    """

    def __post_init__(self) -> None:
        # Whether `auto` became `on`, or `cute`. Then it is no error if nothing can be fused, or if the kernel does not
        # compile.
        self._fused_by_auto = self._cute_by_auto = False
        self._not_compiled = ""
        """Why quack's kernel did not compile."""

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
            yield f"target_modules: {ALL_LINEAR} already stands for every linear. Use it alone, or only names."
        if self.dora and self.init in (AdapterInit.pissa, AdapterInit.olora):
            yield (
                f"init: {self.init.value} moves weight into the adapter, and DoRA measures its magnitudes on the "
                "weight. Use default with dora."
            )
        if self.fused is Switch.on and (why := fusing.obstacle(facts)):
            yield f"fused: {why}. Use auto or off."
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
        """A reason for each name that matches no module of `model`."""
        if model is None:
            return
        names = [name for name, _ in model.named_modules()]
        linears = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        for option, wanted in (("target_modules", self.target_modules), ("modules_to_save", self.modules_to_save)):
            for name in wanted:
                if name != ALL_LINEAR and not any(path == name or path.endswith(f".{name}") for path in names):
                    yield f"{option}: {name} is no module of this model. Its linears are {', '.join(linears)}."

    def resolve(self, facts: Facts) -> str | None:
        return "; ".join(note for note in (self._resolve_fused(facts), self._resolve_matmul(facts)) if note) or None

    def _resolve_fused(self, facts: Facts) -> str | None:
        if self.fused is not Switch.auto:
            return None
        why = "no gain on a CPU" if facts.device == "cpu" else fusing.obstacle(facts)
        if not why and facts.techniques.mlp_kernel(facts) == "liger":
            why = "techniques.liger has the MLPs"
        self.fused, self._fused_by_auto = (Switch.off if why else Switch.on), True
        return f"fused {self.fused.value} ({why or 'q, k, v and MLPs as one operator each'})"

    def _resolve_matmul(self, facts: Facts) -> str | None:
        """Call it after _resolve_fused(). Returns no note without fused adapters or on a CPU: there is no choice."""
        if self.matmul is not Matmul.auto:
            return None
        why = self._without_cute(facts)
        self.matmul, self._cute_by_auto = (Matmul.cublas if why else Matmul.cute), True
        if self.fused is not Switch.on or facts.device == "cpu":
            return None
        return f"matmul {self.matmul.value} ({why or 'the faster kernel for large products on this card'})"

    def _without_cute(self, facts: Facts) -> str | None:
        """Why quack's kernel is not available."""
        if self.fused is Switch.off:
            return "techniques.lora.fused=off leaves all products to peft's linears"
        return fusing.obstacle(facts) or gemm_backend.obstacle(facts)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Wrap the model in a PeftModel and freeze the base. The random state of the caller decides A.

        Afterwards `matmul` is the backend in use: if the kernel that `auto` chose does not compile, it is cublas. The
        backends round differently, so a resumed run must use the same one (training/resume_check.py).
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
        before = probe_logits(model)
        # The effect of a rounding error on these logits. With random weights, and over fp8, it grows by each layer.
        noise = relative_distance(probe_logits(model, nudge=torch.finfo(before.dtype).eps), before)
        try:
            # Factorizations (PiSSA, OLoRA) and norms (DoRA) are computed in full precision, whatever training uses.
            with warnings.catch_warnings(), torch.autocast(world.device.type, enabled=False):
                warnings.simplefilter("ignore")
                adapted: Any = peft.get_peft_model(model, config, revision=getattr(model, "base_revision", None))
        except ValueError as error:
            raise ConfigError(f"techniques.lora.target_modules: {error}") from error
        _train_in_float32(adapted)
        adapted.base_logits, adapted.base_noise = before, noise
        if self.fused is Switch.on:
            adapted.fusion = fusing.fuse(adapted)
            for note in adapted.fusion.notes:
                say(f"techniques.lora.fused: {note}.")
            if self.matmul is Matmul.cute:
                self._not_compiled = gemm_backend.enable(adapted, self._cute_by_auto) or ""
                self.matmul = Matmul.cublas if self._not_compiled else self.matmul
        return adapted

    def start_from(self, model: Any, adapter: str) -> None:
        """Load the weights of `adapter` (a folder or a hub id) into `model`, which apply() made.

        Raises ConfigError if the adapter was made with other options, StorageError if its weights do not fit.
        """
        factored = self.init in (AdapterInit.pissa, AdapterInit.olora)
        load_adapter(
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
        strays = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and "lora_" not in name and "modules_to_save" not in name
        ]
        total = sum(counts.values())
        yield Evidence(
            "lora",
            f"adapters of rank {self.r} on {', '.join(self.target_modules)}, the base frozen",
            f"{len(layers)} modules, {trained:,} of {total:,} parameters trained ({100 * trained / total:.2f} %), "
            f"{len(strays)} of them in the base",
            bool(layers) and trained > 0 and not strays,
        )
        if self.fused is Switch.on:
            yield self._ran_fused(model, probe)
            if self.matmul is Matmul.cute or self._not_compiled:
                yield self._multiplied(model)
        # In an embedding's adapter peft initializes A with zeros, not B.
        zeros = [
            parameter for name, parameter in model.named_parameters() if "lora_B" in name or "lora_embedding_A" in name
        ]
        nonzero = sum(bool(half.any()) for half in zeros)
        if start := getattr(model, "adapter_start", None):
            yield Evidence(
                "lora", f"start from {start}", f"{nonzero} of {len(zeros)} matrices B are not zero", nonzero > 0
            )
            return
        before = model.base_logits
        shift = relative_distance(probe_logits(model), before)
        factored = self.init in (AdapterInit.pissa, AdapterInit.olora)
        # B = 0 adds exactly nothing, but a fused operator, and each of its tiles (mlp_tiles), rounds differently.
        allowed = {torch.float32: 1e-4}.get(before.dtype, 5e-2) + ROUNDINGS * model.base_noise
        yield Evidence(
            "lora",
            f"init {self.init.value}: the model starts as its base",
            f"{len(zeros) - nonzero} of {len(zeros)} matrices B are zero, logits {shift:.1e} from the base's "
            f"({model.base_noise:.1e} is what a rounding of its input does)",
            shift <= allowed and (nonzero == len(zeros) if factored else nonzero == 0),
        )

    def _ran_fused(self, model: Any, probe: dict[str, Any]) -> Evidence:
        """The operators of a forward pass, counted where they are dispatched."""
        with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            seen = fusing.count_operators(lambda: model(**probe))
        ran, wanted = sum(seen.values()), sum(model.fusion.operators.values())
        counts = ", ".join(f"{name} {count} times" for name, count in seen.items()) or "none"
        # Experts of a mixture run if a token is routed to them.
        fits = ran == wanted or (model.fusion.experts and 0 < ran < wanted)
        return Evidence(
            "lora",
            f"adapters fused: {wanted} operators a forward pass ({model.fusion.describe()})",
            f"{counts} ran",
            fits and (wanted > 0 or self._fused_by_auto),
        )

    def _multiplied(self, model: Any) -> Evidence:
        """The GEMM backend in use. If `auto` had to fall back to cuBLAS, that is reported and is no error."""
        if self._not_compiled:
            return Evidence(
                "lora",
                "matmul auto: quack's kernel where it compiles",
                f"cuBLAS, since that did not compile here ({self._not_compiled})",
                True,
            )
        seen, by_cute = gemm_backend.observe(model)
        acted = self._cute_by_auto if by_cute is None else by_cute
        return Evidence("lora", "matmul cute: large products by quack's kernel", seen, acted)


def _train_in_float32(adapted: Any) -> None:
    """Cast the copies that modules_to_save trains to float32, their inputs too, and their outputs back to the base's
    dtype. peft leaves the copies in the base's dtype.
    """
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
