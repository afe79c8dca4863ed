"""Keeps packed documents apart in recurrent layers: state-space models, linear attention, short convolutions.

Such a layer carries a state from token to token. In a packed row the state would pass from one document into the next.
So each document becomes a separate row, padded to the longest document; the layer's own code runs on these rows, and
its outputs are put back. Each document starts from an empty state, whatever the kernel, and no token reads a token of
another document. The padding comes last, and a state does not flow back to the tokens before it.

The cost is the layer's work on the padding (documents times the longest document), and each forward pass waits for the
device to know the number and the lengths of the documents. So `data.packing=auto` pads these models; `true` packs
them. The small model of isolation.py shows whether this is enough: layers that mix tokens in another way (attention to
chunks of earlier tokens) are still refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.models.structure import backbone, decoder_layers, skeleton

DECAYS = ("A_log", "slope_rate", "recurrent_param")
"""Parameters or buffers for the decay of a state: Mamba's and the delta rule's, MiniMax's, Griffin's."""


class Documents:
    """Where the documents of the rows of the newest forward pass are."""

    def __init__(self) -> None:
        self.take: Tensor | None = None
        """int64 [documents, longest]: flattened positions, the last one repeated. None: each row is one document."""
        self.back: Tensor | None = None
        """int64 [rows x length]: the place of each token in `take`."""

    def read(self, position_ids: Tensor | None) -> None:
        """Take the documents from `position_ids` [rows, length], which restart at 0 in each. Waits for the device."""
        self.take = self.back = None
        if position_ids is None or position_ids.dim() != 2:
            return
        starts = (position_ids == 0).flatten().nonzero().flatten()
        if len(starts) <= len(position_ids):
            return
        total = position_ids.numel()
        lengths = torch.diff(starts, append=starts.new_tensor([total]))
        within = torch.arange(int(lengths.max()), device=starts.device)
        self.take = starts[:, None] + torch.minimum(within, lengths[:, None] - 1)
        document = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
        self.back = document * len(within) + torch.arange(total, device=starts.device) - starts[document]


def mixers(model: nn.Module) -> list[nn.Module]:
    """The recurrent parts of the layers: modules that own a convolution over tokens or the decay of a state."""
    parts: list[nn.Module] = []
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves or any(hasattr(module, name) for name in DECAYS):
            parts.append(module)
    inner = {id(part) for module in parts for part in module.modules() if part is not module}
    return [module for module in parts if id(module) not in inner]


def has_mixers(config: dict[str, Any]) -> bool:
    """Whether a model of this config (`Facts.model`) has recurrent layers that separate() knows."""
    try:
        model = skeleton(config)
    except (KeyError, TypeError, ValueError):  # no model has such a config: building it reports why
        return False
    return model is not None and bool(mixers(model))


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


def separate(model: nn.Module) -> int:
    """Run the recurrent parts of `model` document by document, in place. Returns their number."""
    parts, documents = mixers(model), Documents()
    for part in parts:
        part.forward = functools.partial(_by_document, documents, part.forward)
    if parts:
        # Mamba does not hand position_ids to its decoder.
        for module in {model, backbone(model)}:
            hook = functools.partial(_before_pass, documents, module is model)
            module.register_forward_pre_hook(hook, with_kwargs=True)
    return len(parts)


def _before_pass(documents: Documents, whole: bool, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if whole or kwargs.get("position_ids") is not None:
        documents.read(kwargs.get("position_ids"))


def _by_document(documents: Documents, own: Any, *args: Any, **kwargs: Any) -> Any:
    """`own` for its hidden states [rows, length, d], the first argument, with a row for each document."""
    states = args[0] if args else kwargs["hidden_states"]
    if documents.take is None or documents.back is None or states.shape[:2].numel() != len(documents.back):
        return own(*args, **kwargs)
    rows = states.flatten(0, 1)[documents.take]
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
    first = first.flatten(0, 1)[documents.back].view(*states.shape[:2], -1)
    return (first, *output[1:]) if isinstance(output, tuple) else first
