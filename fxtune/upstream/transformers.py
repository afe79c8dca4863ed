"""Private parts of transformers. See the package's docstring for the form of an entry."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fxtune.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor, nn


# The name of a config's attention.
#
# What: `_attn_implementation`, a property of configs and of the configs inside them.
# Why: `attn_implementation=` of from_pretrained() is public, but fxtune builds models from configs, and an existing
#   config has only this property.


def attention_of(config: Any) -> str:
    """The name of the attention function that a model of this config calls."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Let models of this config call the attention function `name`, in place."""
    config._attn_implementation = name


# RoPE of one model.
#
# What: the code of an attention's forward, which calls `apply_rotary_pos_emb` by that name in its Python module.
# Why: replacing the function in the module would change each model of the process. transformers' registry
#   `use_kernelized_func` does nothing without the package `kernels`. A forward in fxtune would copy what fifteen
#   families do between projections and attention. That code changes in each release.

ROPE = "apply_rotary_pos_emb"


def rotates_by_name(kind: type[nn.Module]) -> bool:
    """Whether with_rotation() can replace the RoPE of this class of attention."""
    return ROPE in getattr(getattr(_renamed(kind.forward), "__code__", None), "co_names", ())


@functools.cache
def with_rotation(forward: Any, function: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """A copy of an attention's method `forward` that calls `function` in place of apply_rotary_pos_emb. For classes
    that call the function by its name (rotates_by_name())."""
    return _with_functions(_renamed(forward), {ROPE: function})


def _with_functions(forward: Any, functions: Mapping[str, Any]) -> Any:
    """A copy of `forward` that calls `functions` by these names in place of its module's."""
    # The globals belong to a registered module, because torch.compile looks up a function's globals by their
    # module's name.
    numbers = "_".join(f"{id(function):x}" for function in functions.values())
    module = types.ModuleType(f"{forward.__module__}__{forward.__qualname__.replace('.', '_')}_{numbers}")
    module.__dict__.update({**forward.__globals__, **functions, "__name__": module.__name__})
    module = sys.modules.setdefault(module.__name__, module)
    copy = types.FunctionType(
        forward.__code__, module.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


# The operators of a recurrent layer.
#
# What: the code of its forward, which calls module functions such as `causal_conv1d_fn` by their names.
# Why: as for RoPE. transformers' own choice among implementations is made once, when a family's file is imported.


def calls(forward: Any) -> frozenset[str]:
    """The names of the functions and attributes that this method of a layer uses."""
    return frozenset(inspect.unwrap(forward).__code__.co_names)


@functools.cache
def with_operators(forward: Any, replacements: tuple[tuple[str, Callable[..., Any]], ...]) -> Any:
    """A copy of `forward` in which those functions that it calls and `replacements` names are what the replacement
    makes of them."""
    plain = inspect.unwrap(forward)  # below what accelerate's hooks and former names of arguments need
    made = {name: make(plain.__globals__[name]) for name, make in replacements if name in calls(forward)}
    return _with_functions(plain, made)


def rotation_of(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The function that an attention of this class calls for RoPE: its family's, or one given to with_rotation()."""
    return getattr(_renamed(kind.forward), "__globals__", {}).get(ROPE)


def _renamed(forward: Any) -> Any:
    """`forward` without transformers' wrapper for former names of keywords. Other wrappers stay: they may compute
    something."""
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


# The eager attention of a family.
#
# What: the function `eager_attention_forward` in the Python module of an attention class.
# Why: transformers' registry has all attention functions except `eager`. Each family defines its own.


def eager_attention(kind: type) -> Callable[..., Any]:
    """The function that an attention of this class calls for `eager`. Raises UnavailableError if there is none, as in
    code that came with a model."""
    for parent in kind.__mro__:
        function: Callable[..., Any] | None = getattr(
            sys.modules.get(parent.__module__), "eager_attention_forward", None
        )
        if function is not None:
            return function
    raise UnavailableError(f"the code of {kind.__name__} has no eager_attention_forward")


def load_hub_attention(name: str) -> None:
    """Load an attention kernel of the hub. Raises ImportError, OSError and ValueError as transformers does.

    What: `lazy_import_flash_attention`. Why: transformers calls it when a model runs. Called earlier, its error says
    in time that a kernel cannot be loaded.
    """
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    lazy_import_flash_attention(name, allow_all_kernels=True)


# Routers of a mixture.
#
# What: `can_record_outputs` of a model, which says which modules return router logits; `load_balancing_loss_func` in
#   the model's Python module.
# Why: no registry says which module is a router, nor what a family's auxiliary loss is.


def recorded_outputs(decoder: nn.Module) -> Mapping[str, Any]:
    """For each output that transformers records, by its name, the modules of a decoder that return it."""
    return getattr(decoder, "can_record_outputs", None) or {}


def router_loss(model: nn.Module) -> Callable[..., Any] | None:
    """A mixture's function of the auxiliary loss: (logits of all routers, number of experts, experts used). None if
    there is no such loss."""
    # torch gives a model with divided weights a subclass of the family's class, defined in a module of torch.
    files = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((loss for file in files if (loss := getattr(file, "load_balancing_loss_func", None))), None)


# The tiles of an image of LLaVA-OneVision.
#
# What: `image_size_to_num_patches` of its modeling file.
# Why: the function searches the config's `image_grid_pinpoints`, and the processor does not return the result.


def tiles_of_image(size: list[int], pinpoints: list[list[int]], side: int) -> int:
    """The tiles of an image of `size` (height, width), the whole image included. `side`: pixels of a tile's side."""
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    return image_size_to_num_patches(size, pinpoints, side)


# Names of tensors in a checkpoint's files.
#
# What: `_weight_conversions`, the conversions by which a model was read; revert_weight_conversion(), which undoes
#   them; get_model_conversion_mapping(), which lists for each tensor of a model its tensors in the files, the
#   operations that join these, and older names;
#   `_keys_to_ignore_on_load_unexpected`, `_keys_to_ignore_on_save`, `all_tied_weights_keys` and
#   remove_tied_weights_from_state_dict(), which say what files hold.
# Why: save_pretrained() does all of this, but only for a whole model in one process' memory.


def forget_conversions(model: nn.Module) -> None:
    """Let save_pretrained() write this model's tensors by their names in the model."""
    # transformers deletes this attribute after some conversions, and reads a missing attribute as None.
    model._weight_conversions = None  # type: ignore[assignment]


def as_stored(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of a model, converted to the names and shapes that files of its family have."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def find_conversions(model: Any) -> None:
    """Store in an empty model how its family's files differ from it, for renamed() and as_stored(). transformers does
    not know the class that the model has after torch has divided it."""
    if mapping := _conversions_of(model):
        model._weight_conversions = mapping


def _conversions_of(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


class Joined(NamedTuple):
    """A tensor of a model that transformers converts from tensors of the files."""

    operations: tuple[tuple[Any, ...], ...]
    """For each operation (name of its class, *arguments)."""
    sources: dict[str, list[str]]
    """The names in the files for each source pattern of the conversion, in the order of the patterns."""


EXPERTS_APART = (("MergeModulelist", 0),), (("MergeModulelist", 0), ("Concatenate", 1))
"""Operations that stack the experts' matrices: one matrix of each expert, or several that are joined (gate and up)."""
TURNED_EXPERTS = (("Transpose", 1, 2, True),)
"""The operation for files with experts [experts, in, out]: a transpose."""


def renamed(model: Any, stored: Iterable[str]) -> tuple[dict[str, str], dict[str, Joined]]:
    """How transformers reads the tensors `stored` in files of `model`: {name in the model: name in the files} of
    tensors that are at most renamed, and {name in the model: Joined} of tensors that are converted.

    The model keeps only those results of find_conversions() that acted on a tensor, as in from_pretrained().
    """
    from transformers.core_model_loading import WeightRenaming, dot_natural_key

    changes = getattr(model, "_weight_conversions", None) or []
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if _converts(change)]
    names: dict[str, str] = {}
    joined: dict[str, Joined] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = key, None
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        for converter in converters:
            name, pattern = converter.rename_source_key(name)
            if pattern is not None:
                sources: dict[str, list[str]] = {known: [] for known in converter.source_patterns}
                joined.setdefault(name, Joined(_operations(converter), sources)).sources[pattern].append(key)
                break
        else:
            names[name] = key
    model._weight_conversions = [change for change in changes if change.was_used()]
    return names, joined


def other_conversions(model: Any) -> set[str]:
    """The conversions of weights of this model's files, in words, except EXPERTS_APART and TURNED_EXPERTS."""
    found = {_operations(change) for change in _conversions_of(model) if _converts(change)}
    return {words(operations) for operations in found.difference(EXPERTS_APART, [TURNED_EXPERTS])}


def words(operations: Iterable[tuple[Any, ...]]) -> str:
    """A conversion's operations as a text, written as in transformers' documentation."""
    return ", ".join(f"{name}({', '.join(map(str, arguments))})" for name, *arguments in operations)


def _converts(change: Any) -> bool:
    from transformers.core_model_loading import WeightConverter

    return isinstance(change, WeightConverter)


def _operations(converter: Any) -> tuple[tuple[Any, ...], ...]:
    options = ("dim", "dim0", "dim1", "check_dims")
    return tuple(
        (type(step).__name__, *(getattr(step, option) for option in options if hasattr(step, option)))
        for step in converter.operations
    )


def not_in_files(model: Any) -> list[str]:
    """Patterns of names that this model does not read, though files may have them. Tied weights are among them."""
    tied = [
        f"^{re.escape(prefix + name)}$"
        for name in model.all_tied_weights_keys
        for prefix in ("", f"{model.base_model_prefix}.")
    ]
    return [*tied, *(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]


def saved_names(model: Any, state: Mapping[str, Tensor]) -> list[str]:
    """The names in `state`, a model's tensors, that its files have. Of tied weights only one name is in the files.

    transformers recognizes tied weights by their memory, so no tensor may be on the meta device.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = set(model._keys_to_ignore_on_save or ())
    return list(remove_tied_weights_from_state_dict({n: t for n, t in state.items() if n not in left_out}, model))


def import_code_of_models() -> None:
    """Let this process import the code that came with models.

    What: `init_hf_modules`. Why: a pickled tokenizer with code of its own needs the folder of this code on the path.
    """
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()


# The processor of a vision model.
#
# What: check_argument_for_proper_class() of processors, which accepts only video processors of transformers' class.
# Why: transformers' video processors need torchvision, which is not in every environment (PyPI's does not load beside
#   the CPU build of torch). The processors of Qwen's models cannot be made without one, although images need none.


class _NoVideo(dict[str, Any]):
    """Stands for a video processor, and is saved as an empty object. Rows with videos are bad rows."""


def read_processor(folder: Path, tokenizer: Any, config: Any) -> Any:
    """transformers' processor for a model of this config, with `tokenizer`. A processor turns text with images into
    ids, and images into tensors. The files of its image processor are in `folder`.

    Raises KeyError if transformers has no processor for this config, and otherwise what transformers raises.
    """
    # Imported from its module: without torchvision the package transformers 5.17 has only a stand-in for this class.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    from fxtune.upstream.image_processing import with_fewer_passes

    kind: Any = PROCESSOR_MAPPING[type(config)]
    accept_any = {"check_argument_for_proper_class": lambda processor, name, argument: type(argument)}
    own: Any = type(kind.__name__, (kind,), accept_any)
    # The PIL backend, so that the pixels do not depend on whether torchvision is installed.
    try:
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except ValueError:
        if (kind_of_pil := _hidden_image_processor(folder, config)) is None:
            raise
        image_processor = kind_of_pil.from_pretrained(folder)
    image_processor = with_fewer_passes(image_processor)
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    given, _ = kind.get_processor_dict(folder)
    processor = own.from_args_and_dict([parts.get(name) or _NoVideo() for name in kind.get_attributes()], given)
    processor.__class__ = kind  # so that it pickles
    return processor


def _hidden_image_processor(folder: Path, config: Any) -> Any:
    """The class of the image processor in `folder`, imported from its module; None if there is no such class. Without
    torchvision the package transformers 5.17 has only a stand-in for the class of Idefics3 and SmolVLM, although this
    class needs no torchvision."""
    from transformers.image_processing_base import ImageProcessingMixin

    values, _ = ImageProcessingMixin.get_image_processor_dict(folder)
    name = str(values.get("image_processor_type")).removesuffix("Fast") + "Pil"
    try:
        module = importlib.import_module(
            f"transformers.models.{config.model_type}.image_processing_pil_{config.model_type}"
        )
    except ImportError:
        return None
    return getattr(module, name, None)
