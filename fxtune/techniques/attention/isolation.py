"""Whether a model keeps packed documents apart, tried on a small model before weights are loaded.

Some models of transformers make their mask without `position_ids` (gpt-oss, Falcon, OPT, BLOOM in 5.17), so the
documents of a packed row see each other. No config says so. So fxtune tries a model of the same kind with few layers
and random weights: a change to one document must not move the logits of the others. fxtune's tests try the kinds in
PROVEN, so a run does not. Each run still proves isolation on the real model (technique.py).
"""

from __future__ import annotations

import functools
import json
from math import nan
from typing import Any, NamedTuple

import torch
from torch import nn

from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.probe import relative_distance
from fxtune.models.structure import outputs, without_dropout
from fxtune.techniques.attention import recurrent
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.inputs import KeyBounds, model_inputs

_PROVEN = """cohere2 deepseek_v3 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox granite llama llama4_text mistral mixtral
olmo2 phi phi3 qwen2 qwen3 qwen3_moe smollm3"""
_PROVEN_WITH_IMAGES = "qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text"
"""Decoders of models that read images. They have no head by themselves.
tests/models/kinds/image_decoder/test_images.py tries each."""
_PROVEN_HYBRIDS = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Decoders with recurrent layers, in which documents cannot share a prompt."""
PROVEN = frozenset(f"{_PROVEN} {_PROVEN_WITH_IMAGES}".split()) | _PROVEN_HYBRIDS
"""The `model_type` of kinds that keep documents apart. tests/techniques/attention/test_isolation.py tries each."""
LEAK = 1e-3
"""The largest movement of other documents' logits, relative to the movement of the changed document's logits."""
PROMPT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
"""The largest relative difference between the logits after a shared prompt and the logits of the same document alone,
with TF32. In 16 bits 5e-2 is allowed."""
LOOKS_AHEAD = 1e-4
"""The most that a changed token may move the logits before it, relative to the movement of its own logits."""
MOST_DOCUMENTS = 4
"""The largest number of documents that movement() changes, one at a time."""
_SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "intermediate_size", "ffn_dim"), 64),
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}


def document_numbers(inputs: dict[str, Any]) -> torch.Tensor:
    """int64 [rows, tokens]: the number of each token's document in its row. `inputs`: arguments of a forward pass."""
    positions: torch.Tensor = inputs["position_ids"]
    positions = positions[0] if positions.dim() == 3 else positions  # with M-RoPE text positions come before the axes
    return (positions == positions.amin()).long().cumsum(-1) - 1  # RoBERTa's positions begin after 0


def movement(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, float, float]:
    """Change the tokens of one document at a time. Returns the number of documents, the smallest movement of a changed
    document's own logits, and the largest movement of other documents' logits.

    All forward passes have the same shape, so logits that do not depend on the changed tokens keep their bits.
    """
    ids, document = inputs["input_ids"], document_numbers(inputs)
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    before = outputs(model, **inputs).float()
    leaked, moved = 0.0, float("inf")
    count = int(document.max()) + 1
    for index in range(min(count, MOST_DOCUMENTS)):
        inside = document == index
        changed = torch.where(inside, (ids + 1) % vocabulary, ids)
        shift = (outputs(model, **{**inputs, "input_ids": changed}).float() - before).abs().amax(-1)
        leaked = max(leaked, shift[~inside].max().item())
        moved = min(moved, shift[inside].max().item())
    return count, moved, leaked


def image_movement(model: nn.Module) -> tuple[float, float]:
    """Change the pixels of an image in the second of three documents in one row. Returns how far the last logits of
    the second document moved, and the largest movement of the other documents' logits."""
    config: Any = model.config
    known = images_of(config)
    ids, images = known.row(model)
    documents = [(ids[:, :3], {}), (ids, images), (ids[:, -3:], {})]
    lengths = torch.tensor([document.shape[1] for document, _ in documents])
    positions = torch.cat([torch.arange(int(length), device=ids.device) for length in lengths])[None]
    starts = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32, device=ids.device)
    rope = known.rope_positions(config)
    on_axes = torch.cat([rope(row[0], given) for row, given in documents], -1)[:, None] if rope else None
    row = torch.cat([document for document, _ in documents], 1)
    inputs = model_inputs(model, row, positions, starts, images=images, rope_positions=on_axes)
    before = outputs(model, **inputs).float()
    after = outputs(model, **{**inputs, "pixel_values": inputs["pixel_values"].neg()}).float()
    shift = (after - before).abs().amax(-1)[0]
    first, second, third = shift.split(lengths.tolist())
    return second[-1].item(), max(first.max().item(), third.max().item())


def is_isolated(moved: float, leaked: float) -> bool:
    return moved > 0 and leaked <= LEAK * moved


class SharedPrompt(NamedTuple):
    """The observations on two answers that share a prompt in one row."""

    difference: float
    """The relative distance between the second answer's logits here and in a row without the first answer."""
    limit: float
    moved: float
    """The largest movement of logits in the first document after a change to its answer."""
    leaked: float
    """The largest movement of the logits of the prompt and the second answer after this change."""

    @property
    def is_exact(self) -> bool:
        return self.difference <= self.limit and is_isolated(self.moved, self.leaked)


def share_prompt(model: nn.Module) -> SharedPrompt:
    """Observe two answers that share a prompt. The backend must take bounds of keys."""
    prompt, first, second = 9, 6, 7
    device = next(model.parameters()).device
    ids = kind_of(model.config).small_row(model, prompt + first + second)["input_ids"]
    token, border = torch.arange(ids.shape[1], device=device), prompt + first
    keys = KeyBounds(
        torch.tensor([0, border, prompt + len(token)], dtype=torch.int32, device=device),
        torch.cat([token[:border], token[:prompt], token[border:]]),
        torch.stack(
            [torch.where(token < border, token, token + prompt), torch.where(token < prompt, token + border, -1)]
        ),
    )
    positions = torch.where(token < border, token, token - first)[None]
    starts = torch.tensor([0, border, len(token)], dtype=torch.int32, device=device)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return outputs(model, **model_inputs(model, ids, positions, starts, keys=keys))[0]

    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    changed = torch.where((token >= prompt) & (token < border), (ids + 1) % vocabulary, ids)
    shared = logits(ids)
    shift = (logits(changed).float() - shared.float()).abs().amax(-1)
    alone = torch.cat([ids[:, :prompt], ids[:, border:]], 1)
    whole = torch.arange(prompt + second, device=device)[None]
    end = torch.tensor([0, prompt + second], dtype=torch.int32, device=device)
    expected = outputs(model, **model_inputs(model, alone, whole, end))[0][prompt:]
    difference = relative_distance(shared[border:].float(), expected.float())
    own, others = shift[:border], torch.cat([shift[:prompt], shift[border:]])
    return SharedPrompt(difference, PROMPT_TOLERANCE.get(shared.dtype, 5e-2), own.max().item(), others.max().item())


class Trial(NamedTuple):
    """The observations on a small model."""

    packed: str | None
    """Why documents in one row may see each other; None if they do not."""
    shared: str | None
    """Why answers in one row cannot share their prompt; None if they can, or if bounds were not tried."""
    looks_ahead: float
    """How far a changed last token moved earlier logits, relative to its own logits; NaN if the model was not
    tried."""


def why_not_isolated(hf_config: Any, by_bounds: bool = False) -> str | None:
    """Why documents in one row may see each other in a model of this config, or None if transformers' mask separates
    them. `by_bounds`: a kernel of packed.py may separate them instead, by the documents' bounds."""
    text = hf_config.get_text_config()
    if text.model_type in PROVEN:
        return None
    why = try_small_model(text).packed
    return None if why and by_bounds and not try_small_model(text, by_bounds).packed else why


def why_not_shared(text: dict[str, Any]) -> str | None:
    """Why two answers in one row cannot share their prompt in a model of this config (`Facts.text`), with a kernel
    that takes bounds of keys; None if they can."""
    proven = text.get("model_type") in PROVEN - _PROVEN_HYBRIDS
    return None if proven else try_small_model(text, by_bounds=True).shared


def why_not_causal(hf_config: Any) -> str | None:
    """Why a model of this config is not causal (as an encoder), or None if it is causal. If logits depended on later
    tokens, the loss would fall and the model would learn nothing."""
    text = hf_config.get_text_config()
    if kind_of(hf_config).bidirectional:  # models/kinds/known.py refuses an encoder for predictions
        return None
    if text.model_type in PROVEN or not try_small_model(text).looks_ahead > LOOKS_AHEAD:
        return None
    return (
        f"in {text.model_type} of transformers with this config, a token's logits depend on later tokens, so it "
        "cannot be trained to predict them"
    )


def try_small_model(text: Any, by_bounds: bool = False) -> Trial:
    """Try a small model of this kind. `text`: a decoder's config of transformers, or `Facts.text`. `by_bounds`: run
    flash4's plain reference, which takes bounds of keys."""
    from transformers import CONFIG_MAPPING

    values = text if isinstance(text, dict) else text.to_dict()
    kind = str(values.get("model_type"))
    if isinstance(text, dict) and kind not in CONFIG_MAPPING:
        return _untried(kind, "is not known")
    config_class: Any = CONFIG_MAPPING[kind] if isinstance(text, dict) else type(text)
    return _try_small_model(json.dumps(values, sort_keys=True, default=str), config_class, by_bounds)


def _untried(kind: str, why: str) -> Trial:
    return Trial(
        f"whether {kind} keeps documents in one row apart {why}",
        f"whether {kind} lets answers share a prompt {why}",
        nan,
    )


@functools.lru_cache(maxsize=4)
def _try_small_model(values: str, kind: Any, by_bounds: bool = False) -> Trial:
    text = kind(**{key: value for key, value in json.loads(values).items() if key != "model_type"})
    name = text.model_type
    try:
        config = _small(text)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = kind_of(config).auto.from_config(config, dtype=torch.float32)
            bidirectional = kind_of(config).bidirectional
            recurrent.separate(model)
            ids = torch.arange(2, 26).unsqueeze(0)
            positions = torch.cat([torch.arange(length) for length in (7, 8, 9)]).unsqueeze(0)
            with without_dropout(model), torch.no_grad():
                if by_bounds:
                    FLASH4.prepare()
                    model.set_attn_implementation(FLASH4.implementation)
                row: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
                if by_bounds or bidirectional:
                    row = model_inputs(model, ids, positions, torch.tensor([0, 7, 15, 24], dtype=torch.int32))
                shares = not by_bounds or bidirectional or share_prompt(model).is_exact
                _, moved, leaked = movement(model, row)
                # Change the last token. How far do earlier tokens' logits move, relative to the last token's logits?
                before, changed = outputs(model, input_ids=ids, use_cache=False).float(), ids.clone()
                changed[:, -1] += 1
                shift = (outputs(model, input_ids=changed, use_cache=False).float() - before).abs()
                looks_ahead = (shift[:, :-1].max() / shift[:, -1].max()).item()
    except Exception as error:  # noqa: BLE001  other keys may depend on the changed ones: any error is possible
        return _untried(name, f"could not be tried ({type(error).__name__})")
    apart = is_isolated(moved, leaked)
    return Trial(
        None if apart else f"in {name} of transformers, documents in one row see each other",
        f"in {name} of transformers, answers that share a prompt have other logits" if not shares else None,
        looks_ahead,
    )


def _small(config: Any) -> Any:
    """A small copy of `config`. It has enough layers to show each kind of layer, and narrow parts where the rest does
    not depend on their width. If layers of `config` share keys and values with earlier layers, some of the copy's
    layers do, too."""
    total, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    kinds = next(
        (found for key in ("layer_types", "layers_block_type") if (found := getattr(config, key, None))), ["every"]
    )
    layers = min(max(2, *(kinds.index(kind) + 1 for kind in set(kinds))), total)
    kept = sorted({*range(layers), *range(max(total - shared, total - layers), total)})
    values, names = config.to_dict(), getattr(config, "attribute_map", {})
    for key, value in values.items():  # lists with an entry for each layer: kinds, sizes, numbers of heads
        if isinstance(value, list) and len(value) == total:
            values[key] = [value[layer] for layer in kept]
        if key == "per_layer_config":
            given = {int(layer): own for layer, own in value.items()}
            values[key] = {new: given[layer] for new, layer in enumerate(kept) if layer in given}
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    if shared:
        values["num_kv_shared_layers"] = sum(layer >= total - shared for layer in kept)
    values |= {key: size for name, size in _SMALL.items() if isinstance(values.get(key := names.get(name, name)), int)}
    return type(config)(**{key: value for key, value in values.items() if key != "model_type"})
