"""Encoders: models in which each token of a document attends to all tokens of the document.

An encoder cannot be trained to predict tokens, because each token sees the later ones. It gives vectors of tokens, and
with transformers' AutoModelForSequenceClassification numbers for a document. The head of such a model has two or more
modules: they turn the vector of the document's first token, or the mean over its tokens, into numbers. A base has the
first of these modules or none; training draws the others.

Documents begin with the tokenizer's first special token ([CLS], <s>), so each document's first token has the vector.
RoBERTa counts positions from pad_token_id + 1 on, so it has embeddings for fewer positions than its config says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.models.kinds.decoder import layer_lists
from fxtune.models.kinds.embedder import Embedder
from fxtune.models.kinds.scorer import Scorer, active

HEAD = ("classifier.", "head.", "dense.", "bert.pooler.")
"""Beginnings of the names of a head's weights. A base may lack them."""
INPUTS = ["input_ids", "attention_mask"]
"""The outputs of tokenizer(text, second). BERT's token types are no inputs here, so exported tokenizers give none."""
UNUSED = ("cls.", "lm_head.", "decoder.")
"""Beginnings of the names of heads over a vocabulary."""
UNUSED_PARTS = ("pooler.", "embeddings.position_ids")
"""Parts of the names of weights and buffers that only some classes of a family have."""


@dataclass(frozen=True)
class Family:
    """What differs between the encoders of transformers."""

    features: Callable[[Any, Tensor], Tensor]
    """(model, vectors [n, d]) -> [n, d]: the modules of the head before its last linear."""
    last: str
    """The path of the head's last linear."""
    head: tuple[str, ...]
    """The modules of the head, as peft's `modules_to_save` names them."""
    counts_from_padding: bool = False
    """Whether positions begin at pad_token_id + 1."""
    masks_by_layer: bool = False
    """Whether the model takes a mask for each kind of layer."""


def _roberta(model: Any, states: Tensor) -> Tensor:
    head = active(model.classifier)
    states = head.dropout(states).to(head.dense.weight.dtype)
    return head.dropout(torch.tanh(head.dense(states)))


_ROBERTA = Family(_roberta, "classifier.out_proj", ("classifier",), counts_from_padding=True)
FAMILIES = {
    "bert": Family(
        lambda model, states: model.dropout(model.bert.pooler(states[:, None])), "classifier", ("pooler", "classifier")
    ),
    "eurobert": Family(
        lambda model, states: model.activation(model.dense(states)), "classifier", ("dense", "classifier")
    ),
    "modernbert": Family(
        lambda model, states: model.drop(model.head(states)), "classifier", ("head", "classifier"), masks_by_layer=True
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""The encoders, by `model_type`."""

USE = """It scores a text, the higher the better by the preferences that it has learned.

```python
score = model(**tokenizer(text, return_tensors="pt")).logits[0, 0]
```"""


class Encoder(Embedder):
    """An encoder that gives vectors, or an encoder as a base: its config may name a head over the vocabulary, which is
    left out."""

    bidirectional = True

    @property
    def families(self) -> Collection[str]:
        return self.classes.keys() & FAMILIES.keys()

    def takes(self, config: Any, own_code: bool = True) -> bool:
        return config.model_type in FAMILIES and not getattr(config, "is_decoder", False)

    def read_tokenizer(self, folder: Path, trust_remote_code: bool, **options: Any) -> Any:
        return super().read_tokenizer(folder, trust_remote_code, model_input_names=INPUTS)

    def first_position(self, config: Any) -> int:
        return first_position(config.to_dict())

    def masks(self, config: Any, mask: Callable[[int], Tensor]) -> Tensor | dict[str, Tensor]:
        if not FAMILIES[config.model_type].masks_by_layer:
            return mask(0)
        # transformers counts the window to both sides without the token itself, and its layers add the token.
        return {"full_attention": mask(0), "sliding_attention": mask(config.sliding_window + 1)}

    def backbone(self, model: Any) -> nn.Module:
        return model.base_model

    def layers(self, model: Any) -> list[nn.Module]:
        return [layer for layers in layer_lists(self.backbone(model), model.config) for layer in layers]

    def head_of(self, model: Any) -> nn.Module | None:
        return None

    def beside_text(self, model: Any) -> list[nn.Parameter]:
        pooler = getattr(model, "pooler", None)
        return [] if pooler is None else list(pooler.parameters())

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        unused = UNUSED if self.trains_head else UNUSED + HEAD
        return [name for name in unexpected if name.startswith(unused) or any(part in name for part in UNUSED_PARTS)]

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        return [name for name in missing if name.startswith("pooler.")]  # no vector needs these weights


class EncoderScorer(Scorer, Encoder):
    """An encoder whose head gives numbers for a document."""

    task_tells_head = False
    pads_by_token = False
    score_use = USE
    read_tokenizer = Encoder.read_tokenizer
    unused_weights = Encoder.unused_weights

    def takes(self, config: Any, own_code: bool = True) -> bool:
        known = self.classes.get(config.model_type)
        return super().takes(config, own_code) and known in (config.architectures or ())

    def head_of(self, model: Any) -> nn.Module | None:
        head: Any = model
        for name in FAMILIES[model.config.model_type].last.split("."):
            head = getattr(active(head), name)
        return head

    def head_modules(self, config: Any) -> tuple[str, ...]:
        return FAMILIES[config.model_type].head

    def numbers(self, model: Any, states: Tensor, first: Tensor, last: Tensor) -> Tensor:
        features = FAMILIES[model.config.model_type].features
        # How a head takes a document: by its first token (cls, bos), or by the mean of its tokens (mean).
        pooling = getattr(model.config, "classifier_pooling", "cls")
        if pooling == "late":  # EuroBERT: the mean of the tokens' numbers, which are the numbers of the mean
            pooled = document_means(features(model, states), first, last)
        else:
            one = document_means(states, first, last).to(states.dtype) if pooling == "mean" else states[first]
            pooled = features(model, one)
        linear: Any = active(self.head_of(model))
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(pooled.float(), linear.weight.float(), linear.bias.float())

    def outputs(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The head's numbers for each token of a row, as if its vector were a document's."""
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        states = self.backbone(base)(**inputs)[0]
        features = FAMILIES[base.config.model_type].features(base, states.flatten(0, 1))
        numbers: Tensor = self.head_of(base)(features)  # type: ignore[misc]
        return numbers.unflatten(0, states.shape[:2])

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        return [name for name in missing if name.startswith(HEAD)]


def first_position(values: dict[str, Any]) -> int:
    """The position of a document's first token in a model of this config (`Facts.text`)."""
    family = FAMILIES.get(values.get("model_type", ""))
    counts = family is not None and family.counts_from_padding and not values.get("is_decoder")
    return int(values["pad_token_id"]) + 1 if counts else 0


def document_means(states: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The mean of the vectors of each document's tokens, float32 [documents, d].

    `states` [tokens, d]; `first`, `last`: int64 [documents], the index of each document's first and last token,
    ascending. Tokens outside of all documents are padding.
    """
    at, documents = torch.arange(len(states), device=states.device), len(last)
    document = torch.searchsorted(last, at).clamp(max=documents - 1)
    inside = (at >= first[document]) & (at <= last[document])
    sums = states.new_zeros(documents + 1, states.shape[1], dtype=torch.float32)
    sums = sums.index_add(0, torch.where(inside, document, documents), states.float())[:-1]
    return sums / (last - first + 1).clamp(min=1).unsqueeze(1)
