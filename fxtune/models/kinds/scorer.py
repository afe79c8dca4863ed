"""Decoders whose head gives numbers for a document: transformers' AutoModelForSequenceClassification.

Reward models have one number, classifiers one for each class. Their head `score` is a linear without bias over the
hidden state of the document's last token. A base has no such head, so training draws it.

transformers reads the score at the rightmost token of a row that is not `pad_token_id`. If padding and end of text
were one token, the score would be read before the end. So the tokenizer of a scorer pads with a token that ends no
document.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.errors import ConfigError
from fxtune.models.kinds.decoder import Decoder, OtherHead

SCORE = "score.weight"
SCORE_LABEL, RELEVANCE_LABEL, NUMBER_LABEL = "score", "relevance", "number"
"""Labels of a head with one number: of a reward model, of a reranker, and of a classifier that learned a number."""
SCORE_WORDS = "score_words"
"""The entry of a config that names the two words of objective.words. build() reads it and takes it out."""
LM_HEADS = ("lm_head.", "embed_out.")
"""Beginnings of the names of heads over a vocabulary."""

USE = """It scores an answer, the higher the better by the preferences that it has learned. Only the difference of two
scores for one prompt has a meaning.

```python
text = tokenizer.apply_chat_template(messages, tokenize=False)  # or plain text, and tokenizer.eos_token
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
score = model(input_ids=ids).logits[0, 0]  # several rows: pad with tokenizer.pad_token
```"""

RERANKER_USE = """It scores how well a candidate answers a query: the best candidate of a query has the highest score.

```python
if tokenizer.chat_template:  # data.system of the run, if it had one, is a message of the role `system` before them
    messages = [{"role": "query", "content": query}, {"role": "document", "content": candidate}]
    inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
else:
    inputs = tokenizer(query, candidate, return_tensors="pt")
score = model(input_ids=inputs["input_ids"]).logits[0, 0]  # several rows: with padding and attention_mask
```

A whole model is a CrossEncoder of sentence-transformers, too, whose `predict` gives the sigmoid of the score."""

CLASSIFIER_USE = """It gives a text a number for each class; `model.config.id2label` names them.

```python
inputs = tokenizer(text, return_tensors="pt")  # of two texts: tokenizer(text, second, ...), as in training; of a chat:
# tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
logits = model(input_ids=inputs["input_ids"]).logits[0]  # several rows: pad with tokenizer.pad_token
shares = logits.softmax(-1)  # problem_type multi_label_classification: logits.sigmoid(); regression: the number itself
```

With multi_label_classification a text has each class whose share is at least `model.config.thresholds[class]`, and 0.5
for a class without a threshold."""


class Scorer(OtherHead):
    head = "score"
    gives = "a score for a document"
    adapter_task = "SEQ_CLS"  # for this task peft trains the whole `score` and saves it with the adapter
    writes = False
    trains_head = True
    pads_by_token = True
    auto_class = "AutoModelForSequenceClassification"
    mapping = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    pipeline_tag = "text-classification"
    score_use = USE

    def why_not(self, family: str) -> str:
        return f"for which transformers has no head that scores documents ({self.auto_class})"

    def made_from(self, config: Any, kind: Decoder, name: str) -> Any:
        config = super().made_from(config, kind, name)
        config.id2label, config.label2id = {0: SCORE_LABEL}, {SCORE_LABEL: 0}
        config.problem_type = "regression"  # otherwise transformers' pipelines would return sigmoid(score)
        with torch.device("meta"):
            scores_by_linear = isinstance(self.head_of(self.auto.from_config(config)), nn.Linear)
        if not scores_by_linear:
            raise ConfigError(
                f"{name} is a {config.model_type} model, which has another head for scores. Use another model."
            )
        return config

    def read_tokenizer(self, folder: Path, trust_remote_code: bool, **options: Any) -> Any:
        tokenizer = super().read_tokenizer(folder, trust_remote_code, **options)
        if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            tokenizer.pad_token = _padding(tokenizer)
        separate_texts(tokenizer)
        return tokenizer

    def use(self, labels: list[str]) -> str:
        return {SCORE_LABEL: self.score_use, RELEVANCE_LABEL: RERANKER_USE}.get(" ".join(labels), CLASSIFIER_USE)

    def head_of(self, model: Any) -> nn.Module | None:
        return getattr(model, "score", None)

    def numbers(self, model: Any, states: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        states, linear = states.index_select(0, last), active(self.head_of(model))
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), linear.weight.float())

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """A score for each token of a row: of the text up to that token. transformers returns only the score of a
        row's last token."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return base.score(self.backbone(base)(**inputs)[0])

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        return [name for name in missing if name == SCORE]

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        return [name for name in unexpected if name.startswith(LM_HEADS)]


def with_label(config: Any, label: str) -> Any:
    """A copy of `config`, of a model with one number, that gives the number this label."""
    config = copy.deepcopy(config)
    config.id2label, config.label2id = {0: label}, {label: 0}
    return config


def active(module: Any) -> Any:
    """`module`, or the copy of it that peft trains and now runs (`modules_to_save`)."""
    if not hasattr(module, "modules_to_save"):
        return module
    return module.original_module if module.disable_adapters else module.modules_to_save[module.active_adapters[0]]


def separate_texts(tokenizer: Any) -> None:
    """Let tokenizer(text, second) put a newline between two texts, if it puts nothing there. The tokenizer of an
    export does the same."""
    from tokenizers.processors import TemplateProcessing

    plain, single, pair = (
        tokenizer(*texts, add_special_tokens=special)["input_ids"]
        for texts, special in ((("a",), False), (("a",), True), (("a", "a"), True))
    )
    before = next((at for at in range(len(single)) if single[at : at + len(plain)] == plain), None)
    if before is None or pair[before : before + 2 * len(plain)] != 2 * plain:
        return
    frame = single[:before], tokenizer("\n", add_special_tokens=False)["input_ids"], single[before + len(plain) :]
    names = [[f"<{id_}>" for id_ in ids] for ids in frame]
    known = {name: id_ for part, ids in zip(names, frame, strict=True) for name, id_ in zip(part, ids, strict=True)}
    first, between, last = (" ".join(part) for part in names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        pair=f"{first} $A {between} $B {last}".strip(),
        special_tokens=list(known.items()),
    )


def _padding(tokenizer: Any) -> str:
    """A token for padding that ends no document: a special token with "pad" in its name, else the unknown token, else
    the last special token, else the last token of the vocabulary."""
    ends = {tokenizer.eos_token, tokenizer.bos_token}
    special = sorted((number, str(token)) for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    others = [token for _, token in special if token not in ends]
    named = [token for token in others if "pad" in token.lower()]
    if named:
        return named[0]
    if tokenizer.unk_token is not None and tokenizer.unk_token not in ends:
        return str(tokenizer.unk_token)
    if others:
        return others[-1]
    vocabulary = tokenizer.get_vocab()
    return str(max((token for token in vocabulary if token not in ends), key=vocabulary.__getitem__))
