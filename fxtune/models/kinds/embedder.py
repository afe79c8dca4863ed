"""Decoders that give a vector for a document: transformers' AutoModel, which has no head.

Embedding models are of this kind. The vector of a document is made from its last hidden states
(objectives/vector_model.py), so there is no head to train.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fxtune.models.kinds.decoder import OtherHead
from fxtune.models.kinds.scorer import LM_HEADS, SCORE

USE = """It gives a text a vector. Texts with similar vectors belong together.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(folder)
similarities = model.similarity(model.encode_query(["a question"]), model.encode_document(["a text", "another"]))
```"""


class Embedder(OtherHead):
    head = "pool"
    gives = "a vector for a document"
    adapter_task = "FEATURE_EXTRACTION"
    task_tells_head = True
    writes = False
    auto_class = "AutoModel"
    mapping = "MODEL_MAPPING"
    pipeline_tag = "sentence-similarity"

    def why_not(self, family: str) -> str:
        return "for which fxtune makes no vectors of documents"

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The last hidden state of each token."""
        return model(**inputs)[0]

    def use(self, labels: list[str]) -> str:
        return USE

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        return [name for name in unexpected if name.startswith(LM_HEADS) or name == SCORE]
