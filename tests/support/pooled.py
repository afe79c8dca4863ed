"""A kind of model that fxtune does not have: a document becomes a vector, the mean of its hidden states. The kind, what
an objective gets of it, and an objective are one file."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

import fxtune
from fxtune.data.batches.batch import Batch
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.structure import backbone
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.objectives.preferences import is_first_of_pair
from fxtune.techniques.base import Evidence


class Pooler(Decoder):
    head = "pooled"
    gives = "a vector for a document"
    adapter_task = "FEATURE_EXTRACTION"
    writes = False
    auto_class = "AutoModel"
    mapping = "MODEL_MAPPING"
    pipeline_tag = "feature-extraction"

    @property
    def families(self) -> Collection[str]:
        return self.classes.keys() & Decoder().families

    def takes(self, config: Any, own_code: bool = True) -> bool:
        return config.model_type in self.families and config.architectures == [self.classes[config.model_type]]

    def made_from(self, config: Any, kind: Decoder, name: str) -> Any:
        config = copy.deepcopy(config)
        config.architectures = [self.classes[config.model_type]]
        return config

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        states: torch.Tensor = model(**inputs)[0]
        return states

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        return [name for name in unexpected if name.startswith("lm_head.")]


class Vectors(LanguageModel):
    unit = "length of vectors"

    def vectors(self, batch: Batch) -> torch.Tensor:
        """float32 [slots, d]: the mean over each document's tokens."""
        states = backbone(self.model)(**self._inputs(batch))[0].flatten(0, 1).float()
        starts = batch.cu_seqlens.long()
        sums = F.pad(states.cumsum(0), (0, 0, 1, 0)).index_select(0, starts).diff(dim=0)
        return sums / starts.diff().clamp(min=1)[:, None]

    def total(self, batch: Batch) -> torch.Tensor:
        return self.vectors(batch)[batch.document_of_target().unique()].norm(dim=-1).sum()

    def _compare(self) -> Evidence:
        self.fused = False
        return Evidence("loss", "a vector for each document", "the mean of its hidden states", True)


@fxtune.objective("together")
@dataclass
class Together(GroupObjective):
    """Brings the two documents of a group to one direction."""

    needs: ClassVar[Needs] = Needs(head="pooled", documents=(2, 2), labels=None)
    interface: ClassVar[type[LanguageModel]] = Vectors

    def group_losses(self, model: Any, batch: Batch) -> GroupLosses:
        vectors = model.vectors(batch)
        similar = F.cosine_similarity(vectors, F.pad(vectors[1:], (0, 0, 0, 1)), dim=-1)
        return GroupLosses(is_first_of_pair(batch), 1 - similar, {"similar": similar})
