"""The model's interface for objectives over a head that scores documents (models/kinds/scorer.py, encoder.py).

The numbers of a document are a decoder's head's numbers for the hidden state of its last token, or an encoder's for
the state of its first token. The bounds of documents give these tokens, so rows may be packed. Only their hidden
states reach the head. (transformers takes the rightmost token of a row that is not `pad_token_id`. This is a wrong
token if padding and end of text are the same token.) The head's product is in float32 even under autocast, because
rewards are compared with each other."""

from __future__ import annotations

from typing import Any

import torch

from fxtune.data.batches.batch import Batch
from fxtune.errors import ConfigError
from fxtune.models.kinds.known import kind_of
from fxtune.models.probe import relative_distance
from fxtune.models.structure import backbone, document_numbers, running_on_text, without_dropout
from fxtune.objectives.language_model import SMALL_ROW, TF32_TOLERANCE, TOLERANCE, LanguageModel
from fxtune.techniques.base import Evidence


class DocumentModel(LanguageModel):
    """A LanguageModel that gives numbers of documents in place of losses of tokens. The constructor raises ConfigError
    if a small row has other numbers in the model's own forward pass."""

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def log_probs(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def _equal(self, found: torch.Tensor, own: torch.Tensor, why_not: str, what: str, asked: str) -> Evidence:
        """Evidence that `found` is the model's `own` result. `why_not`: what the model does if it is not."""
        limit = TF32_TOLERANCE if own.is_cuda and own.dtype is torch.float32 else TOLERANCE[own.dtype]
        difference = relative_distance(found, own) if own.shape == found.shape else float("inf")
        if not difference <= limit:
            raise ConfigError(
                f"model.path: {type(self.model).__name__} {why_not} (relative difference {difference:.1e}). Use "
                "another model."
            )
        return Evidence("loss", asked, f"{what} of a small row within {difference:.1e} of the model's own", True)


class ScoreModel(DocumentModel):
    unit = "score"

    def numbers(self, batch: Batch) -> torch.Tensor:
        bounds = batch.first_tokens(), batch.last_tokens()
        return self.prepared.with_head(lambda: self._numbers(self._inputs(batch), *bounds))

    def total(self, batch: Batch) -> torch.Tensor:
        return self.numbers(batch)[batch.document_of_target().unique()].sum()

    def _numbers(self, inputs: dict[str, Any], first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Numbers [documents, numbers]. `first`, `last`: the flattened positions of each document's first and last
        token."""
        states = backbone(self.model)(**inputs)[0].flatten(0, 1)
        return document_numbers(self.model, states, first, last)

    def _compare(self) -> Evidence:
        """Compare the score of a small row with the score of the model's own forward pass."""
        self.fused = False
        padding = self.model.config.get_text_config().pad_token_id
        inputs = self._small_inputs(lambda ids: torch.where(ids == padding, (ids + 1) % 3, ids))
        ids = inputs["input_ids"]
        ends = ids.new_tensor([0]), ids.new_tensor([SMALL_ROW - 1])
        with without_dropout(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with running_on_text(self.model):
                # An encoder's own head would read the mask of packed documents as padding.
                alone = {"input_ids": ids} if kind_of(self.model.config).bidirectional else inputs
                own = self.model(**alone).logits
            scores = self.prepared.with_head(lambda: self._numbers(inputs, *ends))
        why_not = "does not score a row by a linear over its last hidden state"
        return self._equal(scores, own, why_not, "the score", "scores of documents in float32")
