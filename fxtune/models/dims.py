"""The sizes of a decoder, read from the model that transformers builds from its config on the meta device.

A config does not show all sizes. Their names differ from family to family, and the layers of one model may differ in
heads, windows and kind (attention, Mamba, a dense MLP, experts). The built modules have every size. The largest models
are built in 0.3 s.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxtune.models.experts import experts_per_token
from fxtune.models.flops import matmul_sizes
from fxtune.models.kinds.encoder import first_position
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import beside_text, decoder_layers, skeleton
from fxtune.upstream import fla

DECAYS = ("A_log", "slope_rate", "recurrent_param")
"""Parameters or buffers for the decay of a state: Mamba's and the delta rule's, MiniMax's, Griffin's."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention in a layer."""

    heads: int
    key_heads: int
    width: int
    """Width of a query's and a key's head."""
    value_width: int
    window: int = 0
    """How many keys a query sees to each side that it sees, itself included; 0: all."""
    causal: bool = True
    """Whether a query sees no later keys."""

    @property
    def products(self) -> float:
        """The mean of two widths: of all heads in the products with keys, and in the products with values. Twice as
        much if a query also sees later keys, because formulas count the pairs of causal attention."""
        return self.heads * (self.width + self.value_width) / 2 * (1 if self.causal else 2)


@dataclass(frozen=True)
class Recurrence:
    """Linear attention with a decaying state in a layer (kernels/linear_attention.py)."""

    heads: int
    key_heads: int
    width: int
    """Width of a query's and a key's head."""
    value_width: int
    which: str
    """The rule of the state: delta, kda or scan."""

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs for a token: of the forward pass, and of what the backward pass computes again."""
        forward, again = fla.flops(self.which, self.width, self.value_width)
        return self.heads * forward, self.heads * again

    @property
    def decays(self) -> int:
        """Elements of a token's decays."""
        return self.heads * (self.width if self.which == "kda" else 1)

    @property
    def beside(self) -> int:
        """Elements per token that a layer keeps around the recurrence: its result before and after the norm (a scan:
        its values and result); for a delta rule also queries and keys after their norms, and the steps."""
        results = 2 * self.heads * self.value_width
        return results if self.which == "scan" else results + 2 * self.key_heads * self.width + self.heads

    @property
    def matrices(self) -> int:
        """Elements per token that the kernels keep beside sums of decays: for each head a row of each matrix
        [CHUNK, CHUNK]."""
        return self.heads * fla.CHUNK * {"scan": 0, "delta": 1, "kda": 2}[self.which]


@dataclass(frozen=True)
class Layer:
    """A decoder layer: a mixer of tokens (attention, Mamba, a convolution), an MLP, or both. Widths and weights are
    those that one token uses. Of the experts, only the chosen ones count."""

    attentions: tuple[Attention, ...]
    recurrences: tuple[Recurrence, ...]
    convolved: int
    """Channels of convolutions over a few tokens."""
    is_known: bool
    """Whether these are all that mixes tokens in the layer. False for Mamba-1 and other recurrences."""
    q: int
    """The input width of the mixer's last linear. In attention it is the width of all query heads."""
    k: int
    """Half of the output width of the mixer's other linears beyond q. In attention it is the width of all key heads,
    or of all value heads."""
    inner: int
    """Width of the MLP. For an MLP without a gate, two thirds of its width."""
    narrow: int
    """Weights of the mixer's linears."""
    wide: int
    """Weights of the MLP's linears that read the hidden states: gate and up."""
    down: int
    """Weights of the MLP's linears that write hidden states."""
    linears: tuple[tuple[str, ...], ...]
    """Names of the linears in the layer, in four tuples: the mixer's linears that read hidden states, the mixer's
    linears that write them, and the same two tuples for the MLP."""
    normalizes: bool
    """Whether attention normalizes queries and keys."""
    parameters: int
    """Parameters of all modules of the layer."""
    experts: int
    """Number of experts without shared experts; 1: a dense MLP."""
    used: int
    """Number of experts that a token uses."""
    expert_inner: int
    """Width of one expert's MLP."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    hidden: int
    vocabulary: int
    tied: bool
    """Whether the head and the embedding of tokens are one tensor. True also for a model without a head."""
    kinds: tuple[Layer, ...]
    """The different layers of the decoder, each once."""
    order: tuple[int, ...]
    """For each layer, first to last, its index in `kinds`."""
    linear_parameters: int
    """Parameters of the linears of all layers, experts included."""
    expert_parameters: int
    """Parameters of the experts in all layers; 0 without experts."""
    other_parameters: int
    """The other parameters that text reaches, in embeddings, the head, norms, convolutions and biases."""
    largest_linear: int
    """Weights of the largest linear of a layer, without experts."""
    largest_table: int
    """Weights of the largest embedding or head."""

    @staticmethod
    def of(config: dict[str, Any]) -> Shape:
        """The shape of the model of this config (`Facts.model`). Raises ConfigError as built() does."""
        return _shape(built(config))

    @property
    def layers(self) -> int:
        return len(self.order)

    @functools.cached_property
    def counts(self) -> list[tuple[Layer, int]]:
        """The different layers, each with how often the decoder has it."""
        found = Counter(self.order)
        return [(kind, found[index]) for index, kind in enumerate(self.kinds)]

    @property
    def recurrences(self) -> tuple[str, ...]:
        """The rules of its recurrences: delta, kda, scan."""
        return tuple(sorted({each.which for kind in self.kinds for each in kind.recurrences}))

    @functools.cached_property
    def attentions(self) -> Counter[Attention]:
        """The different attentions, each with how often the decoder has it."""
        found = Counter[Attention]()
        for layer, count in self.counts:
            for attention in layer.attentions:
                found[attention] += count
        return found

    @property
    def causal(self) -> bool:
        return all(each.causal for each in self.attentions)

    @functools.cached_property
    def head_widths(self) -> set[int]:
        """The widths of query heads and of value heads in all layers."""
        return {width for each in self.attentions for width in (each.width, each.value_width)}

    @functools.cached_property
    def expert_count(self) -> int:
        """Experts of a layer; 1: all MLPs are dense."""
        return max(layer.experts for layer in self.kinds)


LLAMA = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
LLAMA += ["num_key_value_heads", "head_dim", "tie_word_embeddings"]


def built(config: dict[str, Any]) -> nn.Module:
    """The model of this config on the meta device. If transformers has no code for the model's type, because the
    author ships it, the result is a Llama of the sizes that the config names. Raises ConfigError if transformers
    cannot build it."""
    text = config.get("text_config") or config
    model = skeleton(config)
    if model is None:
        model = skeleton({"model_type": "llama", **{name: text[name] for name in LLAMA if text.get(name)}})
        assert model is not None
    return model


def key_copies(heads: int, key_heads: int, ranks: int) -> int:
    """How often each key head is sent if `ranks` ranks divide the heads. Every rank then gets the key heads of its
    query heads. The result is the least divisor of heads / key_heads for which `ranks` divides key_heads * copies, or
    else heads / key_heads itself."""
    groups = heads // key_heads
    fitting = (copies for copies in range(1, groups) if groups % copies == key_heads * copies % ranks == 0)
    return next(fitting, groups)


@functools.lru_cache(maxsize=16)
def _shape(model: Any) -> Shape:
    text, layers, table = model.config.get_text_config(), decoder_layers(model), model.get_input_embeddings().weight
    hidden = getattr(text, "hidden_size", 0) or table.shape[1]
    each = [_layer(layer, index, text, hidden) for index, layer in enumerate(layers)]
    mixed = any(layer.attentions or layer.recurrences for layer in each)
    if not mixed and (heads := getattr(text, "num_attention_heads", 0)):
        # Attention modules of older families do not have their sizes as attributes.
        width = getattr(text, "head_dim", None) or hidden // heads
        plain = Attention(heads, getattr(text, "num_key_value_heads", None) or heads, width, width)
        each = [replace(layer, attentions=(plain,), is_known=True) for layer in each]
    if kind_of(model.config).bidirectional:
        each = [
            replace(layer, attentions=tuple(replace(one, causal=False) for one in layer.attentions)) for layer in each
        ]
    kinds = tuple(dict.fromkeys(each))
    weighted: list[Any] = [module for layer in layers for module in layer.modules() if hasattr(module, "weight")]
    linears = {module.weight for module in weighted if matmul_sizes(module)}
    experts = {weight for layer in layers for weight in _experts(layer)}
    around = {*model.parameters()} - {*beside_text(model)}
    tables = around - {weight for layer in layers for weight in layer.parameters()}
    head = model.get_output_embeddings()
    return Shape(
        hidden,
        len(table),
        head is None or head.weight is table,
        kinds,
        tuple(map(kinds.index, each)),
        _count(linears) + _count(experts),
        _count(experts),
        _count(around) - _count(linears) - _count(experts),
        max((weight.numel() for weight in linears), default=0),
        max(weight.numel() for weight in tables),
    )


def _count(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


def _experts(layer: nn.Module) -> list[nn.Parameter]:
    """The tensors that hold the matrices of a layer's experts, [experts, ., .]."""
    parts = [module for module in layer.modules() if isinstance(getattr(module, "num_experts", None), int)]
    inside = {id(weight): weight for part in parts for weight in part.parameters() if weight.dim() == 3}
    return list(inside.values())


def _layer(layer: nn.Module, index: int, text: Any, hidden: int) -> Layer:
    named = dict(layer.named_modules())
    found = {path: _attention(module, index, text, hidden) for path, module in named.items()}
    attentions = tuple(attention for attention in found.values() if attention)
    decaying = [module for module in layer.modules() if any(hasattr(module, name) for name in DECAYS)]
    recurrences = tuple(recurrence for module in decaying if (recurrence := _recurrence(module)))
    convolved = sum(module.in_channels for module in layer.modules() if isinstance(module, nn.Conv1d))
    mixers = {path.split(".")[0] for path, module in named.items() if found[path] or _mixes(path, module)}
    # First index: 0 for the mixer, 1 for the MLP. Second index of `weights` and `names`: 0 for linears that read
    # hidden states, 1 for linears that write them. `kept`: the sum of the widths on the other side of these linears.
    kept, weights, names = [0, 0], [[0, 0], [0, 0]], [[[], []], [[], []]]  # type: ignore[var-annotated]
    q = 0
    for path, module in named.items():
        if sizes := matmul_sizes(module):
            inward, outward = sizes
            is_mlp = path.split(".")[0] not in mixers
            writes = outward == hidden and not (inward == hidden and path.rpartition(".")[2][0] in "qkv")
            kept[is_mlp] += inward if writes else outward
            weights[is_mlp][writes] += inward * outward
            names[is_mlp][writes].append(path)
            q = max(q, inward if writes and not is_mlp else 0)
    q = sum(each.heads * each.value_width for each in attentions) or q
    experts, expert_inner, used = _experts(layer), 0, 1
    if experts:
        used = experts_per_token(named.values(), text) or 1
        of_one = [weight[0].numel() for weight in experts]
        expert_inner = of_one[-1] // hidden
        kept[1] += used * sum(of_one) // hidden
        weights[1][0] += used * sum(of_one[:-1])
        weights[1][1] += used * of_one[-1]
    return Layer(
        attentions,
        recurrences,
        convolved,
        len(recurrences) == len(decaying) and (not mixers or bool(attentions or recurrences or convolved)),
        q,
        max(kept[0] // 2 - q, 0),
        kept[1] // 3,
        sum(weights[0]),
        weights[1][0],
        weights[1][1],
        tuple(tuple(paths) for part in names for paths in part),
        bool(attentions) and any(path.endswith((".q_norm", ".q_layernorm")) for path in named),
        _count(layer.parameters()),
        len(experts[0]) if experts else 1,
        used,
        expert_inner,
    )


def _mixes(path: str, module: nn.Module) -> bool:
    """Whether a module of a layer mixes tokens. Attention is recognized by its name, a convolution by its class."""
    return isinstance(module, nn.Conv1d) or "attn" in path or "attention" in path


def _attention(module: Any, index: int, text: Any, hidden: int) -> Attention | None:
    """The attention that `module` of layer `index` computes; None if the module is no softmax attention. Softmax
    attentions of transformers have the width of their heads, and a scale or an `is_causal`. Linear attention has the
    width only."""
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    if not isinstance(width, int) or not (hasattr(module, "scaling") or hasattr(module, "is_causal")):
        return None
    value = getattr(module, "v_head_dim", None) or width
    heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
    if heads is None:
        sizes = [found for child in module.children() if (found := matmul_sizes(child))]
        writing = [inward for inward, outward in sizes if outward == hidden]
        heads = next((inward for inward in writing if inward != hidden), hidden) // value
    groups = getattr(module, "num_key_value_groups", 1)
    return Attention(heads, heads // groups, width, value, _window(module, index, text))


def _recurrence(module: Any) -> Recurrence | None:
    """The recurrence whose decays `module` computes; None if it is not linear attention with heads."""
    if hasattr(module, "num_v_heads"):
        return Recurrence(module.num_v_heads, module.num_k_heads, module.head_k_dim, module.head_v_dim, "delta")
    heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
    width = getattr(module, "head_dim", None)
    if heads is None or width is None:
        return None
    which = "scan" if hasattr(module, "ssm_state_size") or hasattr(module, "slope_rate") else "kda"
    return Recurrence(heads, heads, getattr(module, "ssm_state_size", width), width, which)


def layer_config(text: Any, index: int) -> Any:
    """A layer's config, from the text model's config. Since transformers 5.24 each layer may have its own config."""
    own, layers = getattr(text, "per_layer_config", None), getattr(text, "num_hidden_layers", None) or 0
    return text if own is None or index >= layers else own[index]  # BLT's config has no count of all layers


def _window(module: Any, index: int, text: Any) -> int:
    kinds = getattr(text, "layer_types", None)
    window = getattr(module, "sliding_window", None) or getattr(layer_config(text, index), "sliding_window", None) or 0
    if kinds and index < len(kinds):
        return window if "sliding" in kinds[index] else 0
    if hasattr(module, "sliding_window"):
        return module.sliding_window or 0
    return window if getattr(text, "use_sliding_window", True) else 0


def position_limit(text: dict[str, Any]) -> int | None:
    """The longest document that a model was trained on or has position embeddings for; None: the config names no
    limit."""
    limit = next((text[name] for name in ("max_position_embeddings", "n_positions") if text.get(name)), None)
    return limit and limit - first_position(text)
