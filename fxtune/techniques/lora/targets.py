"""Which modules of a model get adapters, which do not, and why.

`all-linear` means every linear of the decoder except for routers, the gates of Qwen's delta rule and the head. Routers
and gates are recognized by name. An adapter on a router would change which experts a token gets. Servers drop adapters
on the gates, or refuse them. A vision encoder or a projector gets adapters only if an option says so.

transformers keeps the experts of a layer as one tensor. For the families that peft knows, peft reads `gate_proj`,
`up_proj` and `down_proj` as names of these tensors. Dense linears of the same names would then get no adapter. So
add_adapters() passes the selected modules to peft, and peft does not read their names as names of experts.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.errors import ConfigError, nearest
from fxtune.facts.execution import Adapters
from fxtune.facts.options import ALL_LINEAR, AdapterInit, LoraOptions
from fxtune.facts.run import Facts
from fxtune.models import structure
from fxtune.models.dims import built
from fxtune.models.experts import is_described
from fxtune.models.kinds.image_decoder.parts import for_images, image_modules, projectors, vision_encoders
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.mixers import GATES
from fxtune.models.peft_adapter import lost_on_loading, matching_modules
from fxtune.models.prepared import AdapterTargets, kinds
from fxtune.techniques.lora import trained_tokens
from fxtune.techniques.quantized_modules import is_quantized
from fxtune.upstream.peft import alone, read_as_experts, targets_as_they_are

EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Linears of one expert, as checkpoints name them."""
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types whose kernels read the weight of out_proj and do not call its module."""
NAME = re.compile(r"[\w.-]+")


def matches(path: str, entry: str) -> bool:
    """Whether `entry` names the module `path`. An entry of letters, digits, `_`, `-` and dots is the full name or the
    end of it. Any other entry is a regular expression for the full name."""
    return structure.is_named(path, entry) if NAME.fullmatch(entry) else re.fullmatch(entry, path) is not None


def select(model: Any, lora: LoraOptions) -> AdapterTargets:
    """Select what `lora` adapts in `model`. The model has no adapters yet, and may be on the meta device.

    Raises ConfigError if target_modules name a part of a tensor of all experts.
    """
    named, all_linear = dict(model.named_modules()), ALL_LINEAR in lora.target_modules
    weights = [path for path, weight in model.named_parameters() if weight.dim() == 3 and ".experts." in path]
    chosen, adaptable = AdapterTargets(), list[str]()
    if weights or _files_are_converted(model):
        config, names = _read_as_experts(model, lora)
        chosen.taken = frozenset(names - config.target_modules)
        targets = config.target_parameters or () if weights else ()
        adaptable = [path for path, _ in model.named_parameters() if any(matches(path, entry) for entry in targets)]
        # peft knows the names of experts in some families only, and the names of their tensors in no family.
        selected = [
            path for path in weights if all_linear or any(matches(path, entry) for entry in lora.target_modules)
        ]
        adaptable += [path for path in selected if path not in adaptable and is_described(named, path)]
    reasons = _Reasons(model, lora)
    for path, module in named.items():
        is_linear = _is_linear(module) or (is_router(path, named) and hasattr(module, "weight"))
        if not path or (all_linear and not is_linear):
            continue
        if not (why := reasons.untargeted(path) or reasons.excluded(path)):
            chosen.modules.append(path)
        elif is_linear:
            chosen.left[why].append(path)
    for path in dict.fromkeys([*adaptable, *weights]):
        unknown = "experts in a tensor that peft does not know" if all_linear else "target_modules"
        if why := reasons.excluded(path) if path in adaptable else unknown:
            chosen.left[why].append(path)
        else:
            chosen.experts.append(path)
    return chosen


def refusals(model: Any, lora: LoraOptions, token_ids: Sequence[int] = ()) -> list[str]:
    """A reason for each entry of the options that matches nothing in `model`, and for modules that cannot learn.

    `token_ids`: the tokens whose rows are trained, if they are known.
    """
    if mismatches := list(_mismatches(model, lora, bool(lora.train_tokens or token_ids))):
        return mismatches
    chosen = select(model, lora)
    nothing = f"target_modules: nothing is adapted{chosen.describe()}. Name other modules."
    return [] if chosen.modules or chosen.experts else [nothing]


def _mismatches(model: Any, lora: LoraOptions, trains_rows: bool) -> Iterator[str]:
    for option in ("target_modules", "modules_to_save", "exclude_modules", "rank_pattern", "alpha_pattern"):
        for entry in getattr(lora, option):
            try:
                re.compile(entry)
            except re.error as error:
                yield f"{option}: {entry} is no regular expression: {error}. Correct it."
                return
    try:
        chosen = select(model, lora)
    except ConfigError as error:
        yield str(error).removeprefix("techniques.lora.")
        return
    named, adapted = dict(model.named_modules()), [*chosen.modules, *chosen.experts]
    linears = {_leaf(path) for path, module in named.items() if _is_linear(module)}
    kinds = sorted(linears | {_leaf(path) for path in chosen.tensors})
    for option in ("target_modules", "modules_to_save", "exclude_modules"):
        for entry in getattr(lora, option):
            names = [*named, *(chosen.experts if option == "target_modules" else ())]
            if entry not in (ALL_LINEAR, *chosen.taken) and not any(matches(path, entry) for path in names if path):
                yield f"{option}: {entry} is no module of this model. {_near(entry, kinds)}"
    for option in ("rank_pattern", "alpha_pattern"):
        for entry in getattr(lora, option):
            if not any(re.match(rf"(.*\.)?({entry})$", path) for path in adapted):  # as peft matches them
                yield f"{option}: {entry} matches no module with an adapter. {_near(entry, kinds)}"
    depth = len(structure.decoder_layers(model))
    if beyond := [index for index in lora.layers_to_transform if index >= depth]:
        yield f"layers_to_transform: {beyond[0]} is no layer of this model. It has layers 0 to {depth - 1}."
    unable = {"dropout": lora.dropout, "dora": lora.dora, "init": lora.factored and lora.init.value}
    for option, value in unable.items() if chosen.experts else ():
        if value:
            yield (
                f"{option}: {value}, which peft does not offer for experts in one tensor. Leave it out, or set "
                "techniques.lora.exclude_modules=[experts]."
            )
    places, ends = _Places(model), (structure.output_head(model), model.get_input_embeddings())
    saved = [path for path in named if any(matches(path, entry) for entry in lora.modules_to_save)]
    for option, paths in (("target_modules", chosen.modules), ("modules_to_save", saved)):
        lost = [
            path
            for path in paths
            if (places.why_left(path, lora) or not places.is_known(path)) and not any(named[path] is e for e in ends)
        ]
        if lost:
            beside = _beside(lost[0], places.decoder)
            change = f"Set techniques.lora.exclude_modules=[{beside}]" if option == "target_modules" else "Take it out"
            yield (
                f"{option}: {len(lost)} modules in {beside}, such as {lost[0]}, would get no gradient, because text "
                f"does not reach {beside}. {change}."
            )
    if trains_rows:
        trained = {**dict.fromkeys(saved, "modules_to_save"), **dict.fromkeys(chosen.modules, "target_modules")}
        yield from trained_tokens.refusals(model, trained)
    weights = {path: getattr(named[path], "weight", None) for path in chosen.modules}
    # A block has no weight, and the weight of a norm has one dimension.
    if block := next((path for path, weight in weights.items() if weight is None or weight.dim() < 2), ""):
        kind = type(named[block]).__name__
        yield f"target_modules: {block} is a {kind}, which is no linear. Name linears: {', '.join(kinds)}."
    for path in chosen.modules:
        if is_router(path, named) and type(named[path]).forward is not nn.Linear.forward:
            yield f"target_modules: {path} is a {type(named[path]).__name__}, which is no plain linear. Take it out."


def add_adapters(
    model: Any,
    chosen: AdapterTargets,
    lora: LoraOptions,
    token_ids: Sequence[int],
    device: torch.device,
    revision: str | None = None,
) -> Any:
    """Return a PeftModel with an adapter on each module of `chosen` and trained rows for `token_ids`. Raises peft's
    ValueError.

    `revision`: the base's commit. The saved adapter names it.
    """

    def named_by(entries: Iterable[str], every: Iterable[tuple[str, Any]]) -> list[str]:
        return [path for path, _ in every if path and any(matches(path, entry) for entry in entries)]

    config = _read_as_experts(model, lora)[0] if chosen.experts else _peft_config(model, lora, [])
    config.trainable_token_indices = trained_tokens.indices(model, [*token_ids]) if token_ids else None
    plain = all(NAME.fullmatch(entry) for entry in lora.target_modules)
    as_written = plain and named_by(lora.target_modules, model.named_modules()) == chosen.modules
    of_modules = {entry for entry in lora.target_modules if named_by([entry], model.named_modules())}
    config.target_modules = of_modules if as_written else set(chosen.modules)
    names = sorted(config.target_parameters or ())
    as_named = named_by(names, model.named_parameters()) == chosen.experts
    config.target_parameters = names if as_named else chosen.experts
    # Factorizations (PiSSA, OLoRA) and norms (DoRA) are computed in full precision, even if training uses autocast.
    no_autocast = torch.autocast(device.type, enabled=False)
    # peft puts the adapters where the parameters are, so those without memory appear to be on `device`. expand() takes
    # no memory.
    on_device = _standing_in(
        model,
        {parameter for parameter in model.parameters() if parameter.is_meta},
        lambda empty: torch.empty((), dtype=empty.dtype, device=device).expand(empty.shape),
    )
    with warnings.catch_warnings(), no_autocast, alone() as peft, targets_as_they_are(), on_device:
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config, revision=revision)
    # Some linears have the names of experts. The saved config names their weights, so that peft finds them again.
    moved = [f"{path}.weight" for path in chosen.modules if _leaf(path) in chosen.taken]
    config.target_modules = {name for name in config.target_modules if _leaf(name) not in chosen.taken}
    config.target_parameters = [*config.target_parameters, *moved] or None
    modules = [path for path in chosen.modules if _leaf(path) not in chosen.taken]
    config.rank_pattern = matching_modules(config.rank_pattern, config.r, modules)
    config.alpha_pattern = matching_modules(config.alpha_pattern, config.lora_alpha, modules)
    return adapted


def require_loadable(adapted: Any, chosen: AdapterTargets) -> None:
    """Raise ConfigError if peft would lose adapters when it loads `adapted`, a result of add_adapters(), again."""
    if not (lost := lost_on_loading(adapted)):
        return
    import peft
    import transformers

    not_loaded = [path.removesuffix(".base_layer") for path in lost]
    adapted_paths = [*chosen.modules, *(path.rpartition(".")[0] for path in chosen.experts)]
    loaded = [path for path in adapted_paths if path not in not_loaded]
    entries = sorted({_entry_without(path, loaded) for path in not_loaded})
    change = f"Set techniques.lora.exclude_modules=[{','.join(entries)}], or name other modules in target_modules."
    if not loaded:
        change = "Use another version of peft or transformers, or train without adapters."
    raise ConfigError(
        f"techniques.lora.target_modules: peft {peft.__version__} with transformers {transformers.__version__} cannot "
        f"load the adapters of {len(lost)} modules again, such as {lost[0]}, because it renames their tensors "
        f"({kinds(not_loaded)}). {change}"
    )


def _entry_without(path: str, others: list[str]) -> str:
    """The shortest entry of exclude_modules that leaves out `path` and none of `others`."""
    parent, leaf = path.split(".")[-2:] if "." in path else ("", path)
    entries = [entry for entry in (parent, leaf, f"{parent}.{leaf}") if not entry.strip(".").isdigit() and entry]
    return next((entry for entry in entries if not any(_inside(module, [entry]) for module in others)), path)


@contextmanager
def _standing_in(
    model: nn.Module, empty: Collection[nn.Parameter], made: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[None]:
    """In this context made(parameter) takes the place of each parameter of `empty`, which have no memory."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in empty
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = nn.Parameter(made(parameter), parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in places:
            parameter.requires_grad_(module._parameters[name].requires_grad)  # type: ignore[union-attr]
            module._parameters[name] = parameter


def _files_are_converted(model: Any) -> bool:
    """Whether transformers converts the files of this family, such as a mixture's. If it does, peft may read names of
    linears as names of experts, even in a model without experts."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(getattr(model.config, "model_type", None)) is not None


def _peft_config(model: Any, lora: LoraOptions, target_modules: list[str]) -> Any:
    saved = [*lora.modules_to_save, *kind_of(model.config).head_modules(model.config)]
    with alone() as peft:
        return peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=target_modules,
            rank_pattern=dict(lora.rank_pattern),
            alpha_pattern=dict(lora.alpha_pattern),
            modules_to_save=[name for name in saved if name != "classifier"] or None,  # peft adds it for this task
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            init_lora_weights=True if lora.init is AdapterInit.default else lora.init.value,
            task_type=kind_of(model.config).adapter_task,
        )


def _read_as_experts(model: Any, lora: LoraOptions) -> tuple[Any, set[str]]:
    """Returns peft's config with the tensors of experts as its `target_parameters`, and the names that peft got."""
    names = set(EXPERT_LINEARS if ALL_LINEAR in lora.target_modules else filter(NAME.fullmatch, lora.target_modules))
    config = _peft_config(model, lora, sorted(names))
    try:
        read_as_experts(config, model)
    except ValueError as error:
        raise ConfigError(f"techniques.lora.target_modules: {error}") from error
    return config, names


@functools.cache
def gate_up_parts(model_type: str) -> int:
    """The rank, in multiples of r, that peft gives an adapter of gate and up in one tensor. It is 2 for families whose
    gate and up peft knows as two linears."""
    with alone() as peft:
        config, model = peft.LoraConfig(r=1, target_modules=list(EXPERT_LINEARS)), nn.Module()
    model.config = SimpleNamespace(model_type=model_type)  # type: ignore[assignment]
    read_as_experts(config, model)
    return max((config.rank_pattern or {}).values(), default=1)


@contextmanager
def calls_observed(model: nn.Module, chosen: AdapterTargets) -> Iterator[None]:
    """Move modules of `chosen` that are not called in this context to `chosen.left`: their adapters would do nothing.

    Modules of experts stay, because perhaps no token was routed to them. Modules for images stay, because
    leave_unused() tries them.
    """
    places = _Places(model)
    called = {path for path in chosen.modules if ".experts." in path or places.is_beside(path)}
    with structure.hooked(
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.add(path))
        for path in chosen.modules
    ):
        yield
    for path in [path for path in chosen.modules if path not in called]:
        chosen.modules.remove(path)
        chosen.left["their module is never called"].append(path)


def leave_unused(model: Any, chosen: AdapterTargets, device: torch.device) -> None:
    """Move modules for images that do not change the features of an image from `chosen` to `chosen.left`: a last layer
    that the projector does not read, or the head of a vision encoder that was made to classify. `device`: the model's
    device. Its weights may have no memory yet."""
    places = _Places(model)
    beside = [path for path in chosen.modules if places.is_beside(path)]
    if not beside:
        return
    outputs: dict[str, torch.Tensor] = {}

    def note(path: str, output: torch.Tensor) -> torch.Tensor:
        outputs[path] = output.requires_grad_() if output.is_leaf else output
        return output

    hooks = (
        model.get_submodule(path).register_forward_hook(lambda *given, path=path: note(path, given[-1]))
        for path in beside
    )
    empty = {weight for weight in for_images(model) if weight.is_meta}
    zeros = _standing_in(model, empty, partial(torch.zeros_like, device=device))
    with structure.hooked(hooks), zeros, structure.without_dropout(model), torch.enable_grad():
        features = images_of(model.config).features(model)
        total = torch.stack([feature.float().sum() for feature in features]).sum()
        gradients = torch.autograd.grad(total, list(outputs.values()), allow_unused=True)
    reached = {path for path, gradient in zip(outputs, gradients, strict=True) if gradient is not None}
    for path in beside:
        if path not in reached:
            chosen.modules.remove(path)
            chosen.left["no feature of an image depends on them"].append(path)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a subclass of torch's linear computes something else (a product by groups in DeepSeek V4)."""
    kind: Any = type(module)
    return isinstance(module, nn.Linear) and not is_quantized(module) and not _is_plain(kind)


@functools.cache
def _is_plain(kind: type[nn.Linear]) -> bool:
    """Whether a small linear of this class gives the results of torch's linear (Falcon's class does)."""
    if kind.forward is nn.Linear.forward:
        return True
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        x = torch.randn(2, 5, 4, dtype=torch.float64)  # autocast and fast matmuls do not round float64
        try:
            linear = kind(4, 3).double()
            return torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-5)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # the class does not take just two sizes
            return False


def adapters_of(lora: LoraOptions, facts: Facts) -> Adapters:
    """The sizes of the adapters that `lora` selects, calculated from the model's shape alone."""
    names = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")
    options: dict[str, Any] = {name: tuple(getattr(lora, name)) for name in names}
    options |= {name: getattr(lora, name) for name in ("r", "vision", "projector")}
    return _adapters(built(facts.model), tuple(options.items()), tuple(lora.rank_pattern.items()))


@functools.lru_cache(maxsize=64)
def _adapters(model: Any, options: tuple[Any, ...], ranks: tuple[tuple[str, int], ...]) -> Adapters:
    values: dict[str, Any] = {name: [*value] if isinstance(value, tuple) else value for name, value in options}
    lora = LoraOptions(rank_pattern=dict(ranks), **values)
    chosen, beside = select(model, lora), {*image_modules(model)}
    named = [(path, model.get_submodule(path)) for path in chosen.modules]
    modules = [(path, module) for path, module in named if hasattr(module, "weight")]  # others are refused
    counts = [(_rank_of(lora, path) * sum(module.weight.shape), module in beside) for path, module in modules]
    # Gate and up are one product. peft may give its adapter a multiple of the rank.
    joined = lora.r * gate_up_parts(str(getattr(model.config, "model_type", "")))
    tensors = [(path, model.get_parameter(path).shape) for path in chosen.experts]
    experts = sum(
        _rank_of(lora, path, joined if path.endswith("gate_up_proj") else lora.r) * count * (inward + outward)
        for path, (count, inward, outward) in tensors
    )
    images = sum(count for count, is_beside in counts if is_beside)
    whole = sum(count for count, _ in counts) + experts
    return Adapters(whole, experts, images, lora.r, partial(_rank_of, lora), lora.vision, lora.projector)


def _rank_of(lora: LoraOptions, path: str, rank: int | None = None) -> int:
    """The rank of the adapter of the module `path`: the entry of rank_pattern that matches the end of the full name,
    as in peft. If no entry matches, the rank is `rank`, or techniques.lora.r if `rank` is None."""
    ranks = (value for pattern, value in lora.rank_pattern.items() if re.match(rf"(.*\.)?({pattern})$", path))
    return next(ranks, lora.r if rank is None else rank)


def is_router(path: str, named: dict[str, nn.Module]) -> bool:
    """Whether the module at `path` chooses experts. `named`: the model's modules by path."""
    parent, _, leaf = path.rpartition(".")
    return "router" in path.split(".") or (leaf == "gate" and f"{parent}.experts" in named)


def _inside(path: str, entries: Iterable[str]) -> bool:
    """Whether one of `entries` names this module or a module around it."""
    ends = [match.start() for match in re.finditer(r"\.|$", path)]
    return any(matches(path[:end], entry) for entry in entries for end in ends)


def _path(model: nn.Module, part: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is part)


class _Reasons:
    """Tells why a module gets no adapter. Each answer is empty for a module that gets an adapter."""

    def __init__(self, model: Any, lora: LoraOptions) -> None:
        self.model, self.lora, self.named = model, lora, dict(model.named_modules())
        self.head, self.whole, self.places = structure.output_head(model), structure.head_parts(model), _Places(model)
        index_of = {layer: index for index, layer in enumerate(structure.decoder_layers(model))}
        self.layers = {f"{path}.": index_of[module] for path, module in self.named.items() if module in index_of}

    def excluded(self, path: str) -> str:
        """The option that excludes a selected module or tensor; empty if no option does."""
        if _inside(path, self.lora.exclude_modules):
            return "exclude_modules"
        if not self.lora.layers_to_transform:
            return ""
        layer = next((index for prefix, index in self.layers.items() if path.startswith(prefix)), None)
        return "" if layer in self.lora.layers_to_transform else "layers_to_transform"

    def untargeted(self, path: str) -> str:
        """Why the options do not select a module; empty if they do."""
        all_linear, module = ALL_LINEAR in self.lora.target_modules, self.named[path]
        if module in self.whole or _inside(path, self.lora.modules_to_save):
            return "trained in full"
        if not all_linear and not any(matches(path, entry) for entry in self.lora.target_modules):
            return "target_modules"
        if why := self.places.why_left(path, self.lora):
            return why
        if not all_linear:
            return ""
        if module is self.head:
            return "trained in full" if kind_of(self.model.config).trains_head else "the head"
        if not self.places.is_known(path):
            return "not in the decoder"
        if path.endswith(".out_proj") and self.model.config.model_type in MAMBA:
            return "peft adapts no out_proj of Mamba"
        if path.endswith(".altup.correction_coefs"):  # Gemma 3n clamps a copy of the weight
            return "training reads their weight past the module"
        if is_router(path, self.named):
            return "routers"
        if _leaf(path) in GATES:
            return "gates of the delta rule"
        return "it computes something else than a linear" if _has_own_forward(module) else ""


class _Places:
    """Tells which part of a model contains a module."""

    def __init__(self, model: nn.Module) -> None:
        self.decoder = _path(model, structure.backbone(model))
        self._projectors = [_path(model, part) for part in projectors(model)]
        self._encoders = [_path(model, part) for part in vision_encoders(model)]
        unread = {id(weight) for weight in structure.beside_text(model)}
        self._unread = {name.rpartition(".")[0] for name, weight in model.named_parameters() if id(weight) in unread}

    def is_known(self, path: str) -> bool:
        """Whether tokens or images reach the module."""
        return self.is_beside(path) or (_is_below(path, self.decoder) and path not in self._unread)

    def is_beside(self, path: str) -> bool:
        """Whether images alone reach the module."""
        return any(_is_below(path, part) for part in (*self._projectors, *self._encoders))

    def why_left(self, path: str, lora: LoraOptions) -> str:
        """The option that leaves a module for images without an adapter; empty if no option does. Projectors come
        first, because a projector may be part of a vision encoder."""
        if any(_is_below(path, part) for part in self._projectors):
            return "" if lora.projector else "techniques.lora.projector=off"
        if any(_is_below(path, part) for part in self._encoders):
            return "" if lora.vision else "techniques.lora.vision=off"
        return ""


def _is_below(path: str, parent: str) -> bool:
    return not parent or f"{path}.".startswith(f"{parent}.")


def _beside(path: str, decoder: str) -> str:
    """The name of the outermost module around `path` that does not contain the decoder."""
    pairs = zip(path.split("."), [*decoder.split("."), *[""] * path.count(".")], strict=False)
    return next(part for part, own in pairs if part != own)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _near(entry: str, names: list[str]) -> str:
    guess = nearest(entry, names)
    choice = f"Its linears are {', '.join(names)}."
    return f"Did you mean {guess}? {choice}" if guess else f"Take it out, or name another one. {choice}"
