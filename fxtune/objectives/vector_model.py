"""The model's interface for objectives over vectors of documents (models/kinds/embedder.py).

The vector of a document is made from the hidden states of its tokens. The bounds of documents say which tokens these
are, so rows may be packed."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch
from fxtune.models.kinds.encoder import document_means
from fxtune.models.structure import backbone, running_on_text, without_dropout
from fxtune.objectives.language_model import Pool
from fxtune.objectives.score_model import DocumentModel
from fxtune.techniques.base import Evidence


class VectorModel(DocumentModel):
    unit = "vectors"

    def vectors(self, batch: Batch, pool: Pool) -> torch.Tensor:
        return pooled(self.states(batch).flatten(0, 1), batch, pool)

    def total(self, batch: Batch) -> torch.Tensor:
        vectors = F.normalize(self.vectors(batch, Pool.mean), dim=1)
        return vectors[batch.document_of_target().unique()].abs().sum()

    def _compare(self) -> Evidence:
        """Compare the hidden states of a small row with the model's own forward pass."""
        self.fused = False
        inputs = self._small_inputs()
        with without_dropout(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with running_on_text(self.model):
                own = self.model(**inputs).last_hidden_state
            states = backbone(self.model)(**inputs)[0]
        why_not = "changes the hidden states of its decoder, from which fxtune makes vectors"
        asked = "vectors in float32, from the tokens of each document"
        return self._equal(states, own, why_not, "the hidden states", asked)


def pooled(states: torch.Tensor, batch: Batch, pool: Pool) -> torch.Tensor:
    """The vector of each document from the hidden states [rows x length, d], float32 [slots, d]."""
    if pool is Pool.last:
        return states.index_select(0, batch.last_tokens()).float()
    if pool is Pool.cls:
        return states.index_select(0, batch.first_tokens()).float()
    return document_means(states, batch.first_tokens(), batch.last_tokens())
