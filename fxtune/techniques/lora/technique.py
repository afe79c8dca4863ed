"""Low-rank adapters through peft: LoRA (arXiv 2106.09685), rsLoRA, DoRA. Without them a run trains all weights.

A frozen linear W gets a trained addition: W x + alpha/r * B A x, with A [r, in] and B [out, r]. B starts at zero, so
the model starts as its base. Adapters are float32 even over a bfloat16 base. They are small (0.5 % of an 8B model at
r=16), and bfloat16 would round away an update of 1/256 of a weight or less.

PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775) compute A and B from a factorization of W and subtract their
product from the frozen weight, so the model still starts as its base. peft repeats the factorization when it loads
such an adapter.

In peft an adapter costs several passes over the activations of each linear. `fused` runs linears that read the same
input as one operator, and a whole gated MLP as another one (fuse.py, kernels/fused_lora.py). The mathematics is the
same, with the adapters' products in the dtype of the base, as under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.execution import Execution
from fxtune.facts.options import ALL_LINEAR, AUTO, AdapterInit, LoraOptions, Switch
from fxtune.facts.run import Facts
from fxtune.kernels.matmul import CUTE
from fxtune.models import structure
from fxtune.models.kinds.image_decoder.parts import vision_encoders
from fxtune.models.mixers import gates_note
from fxtune.models.peft_adapter import load_adapter, require_same_options
from fxtune.models.prepared import Fusion, PreparedModel
from fxtune.models.probe import Answer, probe_logits, relative_distance
from fxtune.models.untrained_tokens import untrained_rows
from fxtune.system.terminal.console import say
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.experts.adapted import group_experts, observe_experts
from fxtune.techniques.lora import fuse as fusing
from fxtune.techniques.lora import gemm_backend, targets, trained_tokens

_evidence = partial(Evidence, "lora")
ROUNDINGS = 8
"""Logits with new adapters may differ from the base's logits by this many times the effect of one rounding of the
input, because each layer rounds."""


@dataclass
class Lora(LoraOptions, Technique):
    def __post_init__(self) -> None:
        self._fused_by_auto = False  # whether `auto` decided: then a model with nothing to fuse is no error
        self._by_quack = False  # whether quack's kernel multiplies; resolve() decides
        self._not_compiled = ""  # why quack's kernel did not compile
        self.token_ids: list[int] = []
        """The ids of train_tokens and model.add_tokens; find_tokens() or choose_tokens() sets them."""
        self._added: list[str] = []

    def check(self, facts: Facts) -> Iterator[str]:
        if not self.target_modules:
            yield f"target_modules: empty, so nothing is adapted. Use [{ALL_LINEAR}]."
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            yield f"target_modules: {ALL_LINEAR} already stands for every linear. Use it alone, or only names."
        if self.dora and self.factored:
            yield (
                f"init: {self.init.value} moves weight into the adapter, and DoRA measures its magnitudes on the "
                "weight. Use default with dora."
            )
        if self.fused is Switch.on and (why := fusing.refusal(facts)):
            yield f"fused: {why}. Use auto or off."
        if self.train_tokens == []:
            yield f"train_tokens: empty, so no row is trained. Name tokens, or use {AUTO} or null."
        tied = {"lm_head", "embed_tokens"} & {*self.modules_to_save, *self.target_modules}
        if tied and facts.tied_embeddings:
            yield (
                "modules_to_save: this model's head and embedding are one tensor, and adapting "
                f"{' and '.join(sorted(tied))} would separate them. Take it out of modules_to_save and target_modules."
            )
        # Plain adapters on all linears fit any model, so no skeleton is built for them.
        entries = (self.modules_to_save, self.exclude_modules, self.layers_to_transform)
        patterns = (self.rank_pattern, self.alpha_pattern)
        kinds = (self.dropout, self.dora, self.factored, self.train_tokens)
        shape = structure.skeleton(facts.model) if self.vision or self.projector else None
        if (self.vision or self.projector) and (shape is None or not vision_encoders(shape)):
            names = " and ".join(name for name in ("vision", "projector") if getattr(self, name))
            yield f"{names}: on, and {facts.text.get('model_type')} reads no images. Set it to off."
        if self.target_modules != [ALL_LINEAR] or any([*entries, *patterns, *kinds]):
            model = structure.skeleton(facts.model)
            yield from targets.refusals(model, self, self.token_ids) if model is not None else ()

    def resolve(self, facts: Facts) -> str | None:
        return "; ".join(filter(None, (self._resolve_fused(facts), self._resolve_products(facts)))) or None

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        return replace(execution, adapters=targets.adapters_of(self, facts), fused=self.fused is Switch.on)

    def _resolve_fused(self, facts: Facts) -> str | None:
        if self.fused is not Switch.auto:
            return None
        why = "no gain on a CPU" if facts.device == "cpu" else fusing.refusal(facts)
        if not why and fusing.mlp_kernel(facts) == "liger":
            why = "techniques.liger has the MLPs"
        self.fused, self._fused_by_auto = (Switch.off if why else Switch.on), True
        return f"fused {self.fused.value} ({why or 'q, k, v and MLPs as one operator each'})"

    def _resolve_products(self, facts: Facts) -> str | None:
        """Decide which kernel multiplies by 16-bit weights of fused adapters and of the fused loss's head."""
        if self.fused is not Switch.on:
            return None
        why = fusing.refusal(facts) or gemm_backend.refusal(facts)
        self._by_quack = not why
        if why:
            return f"products by cuBLAS ({why})" if facts.device != "cpu" else None
        return "large products by quack's kernel, the faster one here"

    def packages(self, facts: Facts) -> Iterator[str]:
        yield "torchao"  # transformers imports it if it is installed
        if self.fused is not Switch.off and not (fusing.refusal(facts) or gemm_backend.refusal(facts)):
            yield gemm_backend.PACKAGE

    def apply(self, model: PreparedModel, world: World) -> None:
        """Wrap the module in a PeftModel and freeze the base. The caller's random state decides A.

        If quack's kernel does not compile, cuBLAS multiplies. The two kernels round differently, so a resumed run
        reports a changed kernel (training/run/resume_check.py).
        """
        base = model.module
        if reasons := targets.refusals(base, self, self.token_ids):
            raise ConfigError("\n".join(f"techniques.lora.{reason}" for reason in reasons))
        chosen = targets.select(base, self)
        if self.token_ids:
            trained_tokens.start_zero_rows(base, self.token_ids)
        with targets.calls_observed(base, chosen), structure.running_on_text(base):
            before = probe_logits(base)
        targets.leave_unused(base, chosen, world.device)
        model.targets = chosen
        model.base_answer = None if before.is_meta else Answer.of(base, before, relative_distance)
        try:
            adapted = targets.add_adapters(base, chosen, self, self.token_ids, world.device, model.base_revision)
        except ValueError as error:
            raise ConfigError(f"techniques.lora.target_modules: {error}") from error
        targets.require_loadable(adapted, chosen)
        if note := gates_note({path.rpartition(".")[2] for path in chosen.modules}):
            say(f"techniques.lora.target_modules: {note}")
        _train_in_float32(adapted)
        if self.token_ids:
            trained_tokens.prepare(adapted)
        model.module = adapted
        group_experts(adapted)
        if self.fused is Switch.on:
            model.fusion = fusing.fuse(adapted)
            for note in model.fusion.notes:
                say(f"techniques.lora.fused: {note}.")
            if self._by_quack:
                self._not_compiled = gemm_backend.enable(adapted, world.device) or ""
                model.gemm = "" if self._not_compiled else CUTE

    def find_tokens(self, tokenizer: Callable[[], Any], adapter: str | None, added: Sequence[str] = ()) -> None:
        """Find the ids of train_tokens before the base is read. Without an `adapter` to start from, choose_tokens()
        decides `auto` later.

        `tokenizer`: a function that loads the tokenizer. `added`: model.add_tokens. Their rows are trained, too,
        unless modules_to_save trains both tables. Raises ConfigError if the tokenizer lacks a token, or if `adapter`
        trains other tokens.
        """
        self._added = [] if {"embed_tokens", "lm_head"} <= {*self.modules_to_save} else list(added)
        if tokens := [*self._added, *(self.train_tokens if self.train_tokens not in (None, AUTO) else ())]:
            self.token_ids = trained_tokens.ids_of(tokens, tokenizer())
        if adapter is None:
            return
        saved = trained_tokens.ids_of_adapter(adapter)
        if self.train_tokens == AUTO:
            self._train(saved, tokenizer())
        elif saved != self.token_ids:
            named = zip(saved, tokenizer().convert_ids_to_tokens(saved), strict=True)
            names = [
                token or f"id {number}, which is in no tokenizer without model.add_tokens" for number, token in named
            ]
            raise ConfigError(
                f"model.adapter={adapter} was made with other options:\n  techniques.lora.train_tokens: "
                f"{tokens or None} in the recipe, {names or None} in the adapter\n"
                "To train this adapter further, set techniques.lora.train_tokens="
                f"{AUTO + ', which takes the tokens of the adapter' if saved else 'null'}."
            )

    def choose_tokens(self, base: Any, tokenizer: Callable[[], Any], special_tokens: Sequence[int]) -> None:
        """Decide `auto`: it stands for the tokens of `special_tokens` whose rows in `base` were never trained."""
        if self.train_tokens != AUTO:
            return
        base.requires_grad_(False)  # adapters will freeze it, too
        untrained = sorted({token for rows in untrained_rows(base, special_tokens).values() for token in rows})
        self._train(untrained, tokenizer())
        seen = "the base has trained all special tokens of the data, so no rows are trained"
        say(f"techniques.lora.train_tokens: {'auto trains ' + ', '.join(self.train_tokens) if untrained else seen}.")

    def _train(self, ids: list[int], tokenizer: Any) -> None:
        self.train_tokens = tokenizer.convert_ids_to_tokens(ids) or None
        self.token_ids = sorted({*ids, *tokenizer.convert_tokens_to_ids(self._added)})

    def check_start(self, adapter: str) -> None:
        """Raise start_from()'s ConfigError for the options that can be compared before the base is loaded."""
        require_same_options(adapter, {name: getattr(self, name) for name in ("r", "alpha", "rslora", "dora")})

    def start_from(self, model: PreparedModel, adapter: str) -> None:
        """Load the weights of `adapter` (a folder or a hub id) into the module that apply() made.

        Raises ConfigError if the adapter was made with other options, and StorageError if its weights do not fit.
        """
        names = ("r", "alpha", "rslora", "dora", "exclude_modules", "layers_to_transform")
        options = {name: getattr(self, name) for name in names}
        init = self.init.value if self.factored else AdapterInit.default.value
        options = {**options, "init": init}
        load_adapter(model.module, adapter, options)
        model.adapter_start = adapter

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import ParamWrapper

        adapted, selected = model.module, model.targets
        assert selected is not None, "apply() has chosen them"
        with structure.observing(adapted, gradients=True):
            learns = any(parameter.requires_grad for parameter in adapted.parameters())
            if learns and not structure.outputs(adapted, **probe).requires_grad:
                raise ConfigError(
                    f"techniques.lora.enabled: the code of {adapted.config.model_type} in transformers computes no "
                    "gradient for adapters while its embeddings are frozen. Set it to false, or use another model."
                )
        layers = {path: module for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
        wrappers = [path for path, module in layers.items() if isinstance(module, ParamWrapper)]
        modules = {path.removeprefix("base_model.model.") for path in layers if path not in wrappers}
        complete = modules == {*selected.modules} and len(wrappers) == len(selected.experts)
        counts = structure.parameter_counts(adapted)
        learning = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        strays = [name for name in learning if not structure.is_adapter(name)]
        trained, total = sum(counts[name] for name in learning), sum(counts.values())
        yield _evidence(
            f"adapters of rank {self.r} on {', '.join(self.target_modules)}, the base frozen",
            f"{len(layers)} modules, {trained:,} of {total:,} parameters trained ({100 * trained / total:.2f} %), "
            f"{len(strays)} of them in the base: {selected.describe()}",
            complete and trained > 0 and not strays,
        )
        if selected.experts:
            yield self._experts(adapted, probe)
        if self.token_ids:
            yield self._trains_rows(adapted, probe)
        if model.fusion is not None:
            yield self._ran_fused(adapted, model.fusion, probe)
            if self._by_quack:
                yield self._multiplied(adapted)
        # In an embedding's adapter peft initializes A with zeros, not B.
        zeros = [half for name, half in adapted.named_parameters() if "lora_B" in name or "lora_embedding_A" in name]
        nonzero = sum(bool(half.any()) for half in zeros)
        if model.adapter_start:
            seen = f"{nonzero} of {len(zeros)} matrices B are not zero"
            yield _evidence(f"start from {model.adapter_start}", seen, nonzero > 0)
            return
        if model.base_answer is None:  # the base had no weights yet when it got its adapters
            with adapted.disable_adapter():
                model.base_answer = Answer.of(adapted, None, relative_distance)
        before, noise = model.base_answer.logits, model.base_answer.noise
        shift = relative_distance(probe_logits(adapted), before)
        # B = 0 adds exactly nothing, but a fused operator and each of its tiles (mlp_tiles) round differently. Grouped
        # experts compute in the dtype of their weights, so they differ from code that uses autocast (Beam's).
        rounds = bool(selected.experts) and torch.is_autocast_enabled(before.device.type)
        allowed = (1e-4 if before.dtype is torch.float32 and not rounds else 5e-2) + ROUNDINGS * noise
        yield _evidence(
            f"init {self.init.value}: the model starts as its base",
            f"{len(zeros) - nonzero} of {len(zeros)} matrices B are zero, logits {shift:.1e} from the base's "
            f"({noise:.1e} is what a rounding of its input does)",
            shift <= allowed and (nonzero == len(zeros) if self.factored else nonzero == 0),
        )

    def _experts(self, model: Any, probe: dict[str, Any]) -> Evidence:
        """Observe the gradients of experts' adapters. An expert that no token reaches has no gradient."""
        seen = observe_experts(model, probe)
        return _evidence(
            "adapters of experts learn from each token that reaches them",
            f"{seen.experts:,} experts in {seen.layers} layers have adapters, {seen.grouped} run grouped matmuls; "
            f"of {seen.reached:,} experts that a small row reaches, {seen.learning:,} have a gradient",
            seen.learning == seen.reached > 0,
        )

    def _trains_rows(self, model: Any, probe: dict[str, Any]) -> Evidence:
        """Observe the gradients of the rows. Compare the logits of changed rows here and in peft's own code."""
        seen = trained_tokens.observe(model, probe)
        limit = 1e-4 if structure.base_dtype(model) is torch.float32 else 5e-2
        return _evidence(
            f"rows of {len(self.token_ids)} tokens are trained as peft trains them (train_tokens)",
            f"{seen.learning} of {seen.expected} rows have a gradient; with other rows the logits are "
            f"{seen.from_base:.1e} from the base's and {seen.from_peft:.1e} from peft's",
            seen.learning == seen.expected and seen.from_peft <= limit and seen.from_base > seen.from_peft,
            "lora.train_tokens",
        )

    def _ran_fused(self, model: Any, fusion: Fusion, probe: dict[str, Any]) -> Evidence:
        """Count the fused operators that a forward pass dispatches."""
        with structure.observing(model):
            seen = fusing.count_operators(lambda: structure.outputs(model, **probe))
        ran, expected = sum(seen.values()), sum(fusion.operators.values())
        counts = ", ".join(f"{name} {count} times" for name, count in seen.items()) or "none"
        # An expert of a mixture runs only if a token is routed to it.
        fits = ran == expected or (fusion.experts and 0 < ran < expected)
        return _evidence(
            f"adapters fused: {expected} operators a forward pass ({fusion.describe()})",
            f"{counts} ran",
            fits and (expected > 0 or self._fused_by_auto),
            "lora.fused",
        )

    def _multiplied(self, model: Any) -> Evidence:
        """Observe which kernel computes large products. cuBLAS in place of quack's kernel is no error."""
        if self._not_compiled:
            seen = f"cuBLAS, since quack's kernel did not compile here ({self._not_compiled})"
            return _evidence("large products by quack's kernel where it compiles", seen, True)
        seen, by_quack = gemm_backend.observe(model)
        return _evidence("large products by quack's kernel", seen, by_quack is not False)


def _train_in_float32(adapted: Any) -> None:
    """Cast the copies that modules_to_save trains to float32. Their inputs are cast to float32 in each call, and their
    outputs back to the base's dtype. peft leaves the copies in the base's dtype."""
    from peft.utils import ModulesToSaveWrapper

    dtype = structure.base_dtype(adapted)

    def cast(value: Any, to: torch.dtype) -> Any:
        return value.to(to) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    wrappers = [module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper)]
    for wrapper in wrappers if dtype is not torch.float32 else []:
        trained = wrapper.modules_to_save["default"].float()
        trained.register_forward_pre_hook(lambda _, inputs: tuple(cast(value, torch.float32) for value in inputs))
        trained.register_forward_hook(lambda _, inputs, output: cast(output, dtype))
