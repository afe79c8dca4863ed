"""Keeps packed documents apart in recurrent layers: state-space models, linear attention, short convolutions.

Such a layer carries a state from token to token. In a packed row the state would pass from one document into the next.
The layers of most hybrid families run operators that start each document from an empty state (linear.py and
lightning.py).

In any other layer (Mamba-1, Griffin, a GPU without the package of the kernels) each document becomes a separate row,
padded to the longest document; the layer's own code runs on these rows, and its outputs are put back.
The padding comes last, and a state does not flow back to the tokens before it. The cost is the layer's work on the
padding (documents times the longest document), and each forward pass waits for the device to know the number and the
lengths of the documents. So `data.packing=auto` pads such models; `true` packs them.

The small model of isolation.py shows whether this is enough: layers that mix tokens in another way (attention to
chunks of earlier tokens) are still refused.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.facts.options import Autocast
from fxtune.facts.run import Facts
from fxtune.kernels import fla_package
from fxtune.models.dims import DECAYS
from fxtune.models.mixers import mixers
from fxtune.models.structure import backbone, decoder_layers, skeleton
from fxtune.system.process.profiler import observe_operators, short_name
from fxtune.techniques.attention import lightning, linear


class Documents:
    """Where the documents of the rows of the newest forward pass are."""

    def __init__(self) -> None:
        self.gather: Tensor | None = None
        """int64 [documents, longest]: flattened positions, the last one repeated. None: each row is one document."""
        self.scatter: Tensor | None = None
        """int64 [rows x length]: the place of each token in `gather`."""
        self.operator_inputs: dict[str, Tensor] = {}
        """The arguments for operators (linear.documents_of()); empty: each row is one document."""
        self.inside = False
        """Whether a forward pass of the whole model is under way."""

    def read(self, arguments: dict[str, Any], pads: bool) -> None:
        """Find the documents of a forward pass. They come from linear.documents_of() if the caller passed it.
        Otherwise they are read from `position_ids` [rows, length], which restart at 0 in each; the host then waits for
        the device. `pads`: whether layers need `gather`.

        With M-RoPE `position_ids` are [4, rows, length]: positions of the text, and three axes, on which tokens of an
        image have equal positions. The axes say nothing about documents."""
        self.gather, self.scatter, self.operator_inputs = None, None, {}
        if linear.CHUNKS in arguments:
            self.operator_inputs = {name: arguments[name] for name in (linear.BOUNDS, linear.CHUNKS)}
        positions = arguments.get("position_ids")
        if positions is not None and positions.dim() == 3 and len(positions) == 4:
            positions = positions[0]
        if positions is None or positions.dim() != 2 or (self.operator_inputs and not pads):
            return
        starts = (positions == 0).flatten().nonzero().flatten()
        if len(starts) <= len(positions):
            return
        total = positions.numel()
        lengths = torch.diff(starts, append=starts.new_tensor([total]))
        self.operator_inputs = self.operator_inputs or linear.documents_of(
            F.pad(lengths.cumsum(0), (1, 0)).int(), total
        )
        within = torch.arange(int(lengths.max()), device=starts.device)
        self.gather = starts[:, None] + torch.minimum(within, lengths[:, None] - 1)
        document = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
        self.scatter = document * len(within) + torch.arange(total, device=starts.device) - starts[document]


def by_document(facts: Facts) -> bool:
    """Whether recurrent layers of this model would run the documents of a packed row one by one."""
    parts = _mixers_of(facts.model)
    return bool(parts) and not (linear.has_kernels(facts) and all(map(_is_served, parts)))


def refusals(facts: Facts) -> Iterator[str]:
    """Yield why a model with states that decay (gated delta rule, KDA, state-space model) cannot run in float16."""
    precision = facts.techniques.precision
    autocast = precision.enabled and precision.autocast is Autocast.float16
    decays = any(
        hasattr(module, name) for part in _mixers_of(facts.model) for module in part.modules() for name in DECAYS
    )
    if decays and (facts.dtype == "float16" or autocast):
        key = "model.dtype" if facts.dtype == "float16" else "techniques.precision.autocast"
        other = "float32" if facts.dtype == "float16" else "none"
        kind = facts.text.get("model_type")
        yield f"{key}: the recurrent layers of {kind} overflow in float16 and become NaN. Use bfloat16 or {other}."


def is_served(config: dict[str, Any]) -> bool:
    """Whether linear.py's operators serve recurrent layers of a model of this config (`Facts.model`)."""
    return any(map(_is_served, _mixers_of(config)))


def _is_served(part: nn.Module) -> bool:
    return lightning.serves(part) or linear.serves(part, any(hasattr(part, name) for name in DECAYS))


def _mixers_of(config: dict[str, Any]) -> list[nn.Module]:
    try:
        model = skeleton(config)
    except (KeyError, TypeError, ValueError):  # no model has such a config: building it reports why
        return []
    return [] if model is None else mixers(model)


def kinds_without(config: dict[str, Any], text: dict[str, Any], kinds: set[str]) -> set[str]:
    """The entries of `kinds` (values of `layer_types`) whose layers have no recurrent part that separate() knows."""
    model = skeleton(config)
    if model is None:
        return kinds
    known_parts = {id(part) for part in mixers(model)}
    layers = zip(text.get("layer_types") or (), decoder_layers(model), strict=False)
    return {
        kind
        for kind, layer in layers
        if kind in kinds and not any(id(part) in known_parts for part in layer.modules())
    }


def separate(model: nn.Module, operators: bool = True, packed: bool = True) -> None:
    """Keep the documents of packed rows apart in the recurrent parts of `model`, in place. `operators`: whether they
    run here (linear.has_kernels()); then rows that are not packed run them, too."""
    parts, documents = mixers(model), Documents()
    served = [part for part in parts if operators and _is_served(part)]
    for part in served:
        (lightning if lightning.serves(part) else linear).attach(part)
    for part in parts if packed else ():
        if part not in served:
            part.forward = functools.partial(_by_document, documents, part.forward)
    if parts and (packed or served):
        # Mamba does not hand all arguments to its decoder.
        for module in {model, backbone(model)}:
            hook = functools.partial(_before_pass, documents, module is model, packed and len(served) < len(parts))
            module.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_hook(functools.partial(_after_pass, documents), always_call=True)
    called = [{linear.RECURRENCE} if lightning.serves(part) else linear.operators(part) for part in served]
    model.recurrent_operators = Counter(itertools.chain(*called))  # type: ignore[assignment]


def observe(model: nn.Module, probe: dict[str, Any]) -> tuple[str, str, bool] | None:
    """Evidence for the recurrent layers after separate(): which kernels run, how often each operator was called in one
    forward pass, and whether that is at least once a layer. None without operators."""
    layers: Counter[str] | None = getattr(model, "recurrent_operators", None)
    if not layers:
        return None
    seen = observe_operators(lambda: model(**probe), {name: f"^fxtune::{name}$" for name in layers})
    calls = ", ".join(f"{seen[name].calls} calls of {name} in {count} layers" for name, count in layers.items())
    kernels = sorted({short_name(kernel) for each in seen.values() for kernel in each.kernels})
    on_gpu = next(model.parameters()).is_cuda
    return (
        f"recurrent layers: {fla_package.describe(*layers) if on_gpu else 'a plain loop over tokens'}",
        calls + (f", on the device: {', '.join(kernels)}" if kernels else ""),
        all(seen[name].calls >= count for name, count in layers.items()),
    )


def _before_pass(
    documents: Documents, whole: bool, pads: bool, _: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if whole:
        documents.inside = True
    if whole or not documents.inside or kwargs.get("position_ids") is not None:
        continued = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        # A cache has a state for each row. Positions of a prompt with padding on its left begin with several zeros.
        documents.read({} if continued or kwargs.get("use_cache") else kwargs, pads)
    if not documents.operator_inputs:
        return args, kwargs
    # A config may switch a cache on, whose states are a row's.
    return args, {**kwargs, **documents.operator_inputs, "use_cache": False}


def _after_pass(documents: Documents, *_: Any) -> None:
    documents.inside = False


def _by_document(documents: Documents, own: Any, *args: Any, **kwargs: Any) -> Any:
    """`own` for its hidden states [rows, length, d], the first argument, with a row for each document."""
    states = args[0] if args else kwargs["hidden_states"]
    if documents.gather is None or documents.scatter is None or states.shape[:2].numel() != len(documents.scatter):
        return own(*args, **kwargs)
    rows = states.flatten(0, 1)[documents.gather]
    kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs  # it has the packed rows
    if kwargs.get("position_ids") is not None:
        within = torch.arange(rows.shape[1], device=rows.device)
        kwargs["position_ids"] = within.expand(len(rows), -1)
    if args:
        args = (rows, *args[1:])
    else:
        kwargs["hidden_states"] = rows
    output = own(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    first = first.flatten(0, 1)[documents.scatter].view(*states.shape[:2], -1)
    return (first, *output[1:]) if isinstance(output, tuple) else first
