"""Embedding models: the vector of a query lies near the vector of its positive, and far from the vectors of other
texts.

    loss = -log(e^s(positive) / sum over candidates of e^s(candidate)),  s = cos(query, candidate) / temperature

This is InfoNCE (van den Oord et al., arXiv:1807.03748). The candidates are the positives and negatives of all queries
of the step, on all ranks, so the loss does not depend on train.micro_batch_size.

A step computes vectors twice (GradCache, Gao et al., arXiv:2101.06983). The first pass, without gradient, computes
all vectors of the step. From these follow the loss of each query and the gradient with respect to each vector. The
second pass computes the vectors of one micro-batch at a time with a graph, and takes the known gradient through it. So
the memory of a step does not grow with its number of candidates, except for their vectors.

False negatives are left out: a candidate with the text of the query or of its positive, positives of a query with the
same text, and with `false_negative_margin` a candidate whose score exceeds the positive's score by more than that.

A query with several positives has the mean of their losses, each without the other positives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Optional

import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.structure import skeleton
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel, Pool
from fxtune.objectives.needs import Needs
from fxtune.objectives.preferences import is_first_of_pair
from fxtune.objectives.vector_model import VectorModel

QUERY, POSITIVE, NEGATIVE = 1.0, 2.0, 3.0
"""The role of a document in step_values(). 0: no document."""
WORD_BITS, WORDS = 21, 3
"""The hash of a text is three numbers of 21 bits, which float32 holds exactly."""
CELLS = 1 << 24
"""The largest number of scores that are computed at once."""
K = 10
"""The last rank that counts in mrr_at_10 and ndcg_at_10."""


@dataclass
class Embedding(GroupObjective):
    needs: ClassVar[Needs] = Needs(
        head="pool", documents=(2, None), labels=True, whole_step=True, row_format="embedding"
    )
    interface: ClassVar[type[LanguageModel]] = VectorModel
    metrics: ClassVar[Mapping[str, str]] = {
        "recall_at_1": "share of queries whose positive scores above all other candidates; equal scores count 0",
        "mrr_at_10": "mean of 1 / rank of the positive, 0 beyond rank 10",
        "ndcg_at_10": "mean of 1 / log2(1 + rank of the positive), 0 beyond rank 10",
        "similarity_positive": "cosine of a query and its positive",
        "similarity_others": "cosine of a query and the other candidates",
    }
    compared: ClassVar[tuple[str, ...]] = ("recall_at_1", "mrr_at_10", "ndcg_at_10")
    pool: Pool = Pool.last
    """The vector of a text: the hidden state of its last token (`last`), the mean of its hidden states (`mean`), or
    the hidden state of its first token (`cls`, for encoders)."""
    temperature: float = field(default=0.05, metadata={"above": 0})
    """Cosines are divided by this number. A smaller value stresses the candidates that are most similar."""
    symmetric: bool = False
    """Also find the query of each positive among all queries. The loss is the mean of both directions."""
    false_negative_margin: Optional[float] = field(default=None, metadata={"min": 0})
    """Leave out candidates whose cosine with the query exceeds the cosine of the positive by more than this number.
    They may be positives that nobody has marked. Null: no score makes a candidate a false negative."""
    matryoshka: list[int] = field(default_factory=list, metadata={"min": 1})
    """Smaller sizes to which vectors may be cut at use (arXiv:2205.13147). The loss is summed over these sizes and the
    whole size; vectors are normalised after the cut."""
    instruction: str = ""
    """The text before each query, such as `Instruct: Find the answer.\\nQuery: `. A source may have its own
    `instruction`. The export has it as the prompt `query`."""

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        size = Shape.of(facts.model).hidden
        if wrong := [each for each in self.matryoshka if not 1 <= each < size]:
            yield (
                f"objective.matryoshka: {wrong[0]} is not between 1 and {size - 1}. The model's vectors have {size} "
                "numbers, and their whole size always counts."
            )
        if facts.techniques.compile.enabled and facts.techniques.lora.enabled and facts.techniques.lora.dropout:
            yield (
                "techniques.lora.dropout: objective=embedding computes each vector twice, and compiled layers may "
                "draw other dropout the second time. Set it to 0, or techniques.compile.enabled=false."
            )
        model = skeleton(facts.model) if self.pool is Pool.cls else None
        if model is not None and any(getattr(module, "is_causal", False) for module in model.modules()):
            yield (
                f"objective.pool=cls: in a {facts.text['model_type']} model the first token sees no other token, so "
                "all texts would have one vector. Set objective.pool=last or mean."
            )

    def data_config(self, data: DataConfig) -> DataConfig:
        if not self.instruction:
            return data

        def asked(source: SourceConfig) -> SourceConfig:
            return source if source.instruction is not None else replace(source, instruction=self.instruction)

        return replace(data, sources=[*map(asked, data.sources)], eval_sources=[*map(asked, data.eval_sources)])

    def step_values(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """For each document its role, the hash of its text, and its vector."""
        assert batch.document_labels is not None
        assert batch.group_of is not None
        role = torch.where(batch.document_labels > 0, POSITIVE, NEGATIVE)
        role = torch.where(batch.document_labels.isnan(), QUERY, role)
        values = torch.cat([role[:, None], _hashes(batch), model.vectors(batch, self.pool).float()], dim=1)
        return torch.where(batch.group_of[:, None] >= 0, values, 0.0)

    def step_parts(self, values: torch.Tensor) -> torch.Tensor:
        """For each query the loss and the metrics, and for each document the gradient of the step's summed loss with
        respect to its vector: float32 [rows, 1 + metrics + d]."""
        with torch.autocast(values.device.type, enabled=False), torch.enable_grad():
            vectors = values[:, 1 + WORDS :].clone().requires_grad_()
            step = _Step.of(values[:, 0], values[:, 1 : 1 + WORDS])
            figures = vectors.new_zeros(len(vectors), 1 + len(self.metrics))
            for size in [*self.matryoshka, vectors.shape[1]]:
                unit = F.normalize(vectors[:, :size], dim=1)
                cut = unit.detach().requires_grad_()
                figures[:, 1:] = 0  # metrics are of the whole size, which comes last
                for rows in step.at.split(max(CELLS // len(step.at), 1)):
                    losses, metrics = self._losses(step, cut, rows)
                    found = torch.stack([losses.detach(), *metrics], dim=1)
                    figures = figures.index_add(0, step.query[rows], found * step.weight[rows, None])
                    (losses * step.weight[rows]).sum().backward()
                unit.backward(cut.grad)
        assert vectors.grad is not None
        return torch.cat([figures, vectors.grad], dim=1)

    def _losses(self, step: _Step, unit: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss and the metrics of each positive among `rows`. Other rows have finite numbers without meaning.
        `unit`: normalised vectors [all rows, numbers]."""
        scores = unit[step.query[rows]] @ unit.T
        others, own = step.others(rows), rows[:, None]
        losses, metrics = self._cross_entropy(scores, others, own), _ranking(scores.detach(), others, own)
        if self.symmetric:
            # Column c is the query of row c. Each query counts once, at its first positive.
            scores = unit[rows] @ unit[step.query].T
            own = (step.query[rows][:, None] + 1).clamp(max=len(unit) - 1)
            losses = (losses + self._cross_entropy(scores, step.other_queries(rows), own)) / 2
        return losses, metrics

    def _cross_entropy(self, scores: torch.Tensor, others: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """-log of the softmax at `own` [rows, 1] over own and `others`, bool [rows, columns]: [rows]."""
        right = scores.gather(1, own)
        if self.false_negative_margin is not None:
            others = others & (scores.detach() <= right.detach() + self.false_negative_margin)
        logits = (scores / self.temperature).masked_fill(~others.scatter(1, own, True), float("-inf"))
        return logits.logsumexp(1) - right.squeeze(1) / self.temperature

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        assert batch.group_of is not None
        figures, gradient = self.step_part(model, batch).tensor_split([1 + len(self.metrics)], dim=1)
        vectors = model.vectors(batch, self.pool).float()
        # Zeros whose gradient is the loss's gradient. The slot of a group's query gets their sum over the group.
        zeros = (gradient * (vectors - vectors.detach())).sum(1)
        is_query = is_first_of_pair(batch)
        slot = torch.arange(len(zeros), device=zeros.device)
        of_group = torch.zeros_like(zeros).index_add(0, torch.where(is_query, slot, 0).cummax(0).values, zeros)
        metrics = dict(zip(self.metrics, figures[:, 1:].unbind(1), strict=True))
        return GroupLosses(is_query, figures[:, 0] + of_group, metrics)


@dataclass(frozen=True)
class _Step:
    """The documents of a step, one a row."""

    at: torch.Tensor
    """int64 [rows]: 0, 1, 2, ..."""
    role: torch.Tensor
    """float32 [rows]."""
    text: torch.Tensor
    """int64 [rows]: the hash of the text."""
    query: torch.Tensor
    """int64 [rows]: the row of the query in the document's group."""
    weight: torch.Tensor
    """float32 [rows]: 1 / the number of its query's positives, for a positive; 0 for other documents."""

    @staticmethod
    def of(role: torch.Tensor, words: torch.Tensor) -> _Step:
        at = torch.arange(len(role), device=role.device)
        query = torch.where(role == QUERY, at, 0).cummax(0).values
        text = torch.zeros_like(at)
        for word in words.unbind(1):
            text = (text << WORD_BITS) + word.long()
        is_positive = (role == POSITIVE).float()
        positives = torch.zeros_like(role).index_add(0, query, is_positive)
        return _Step(at, role, text, query, is_positive / positives[query].clamp(min=1))

    def others(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [len(rows), all rows]: the candidates that are wrong for the query of each positive of `rows`."""
        asked = self.text[self.query]
        is_right = (self.text == self.text[rows][:, None]) | (self.text == asked[rows][:, None])
        is_right |= (self.role == POSITIVE) & (asked == asked[rows][:, None])
        return (self.role >= POSITIVE) & ~is_right

    def other_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [len(rows), all rows]: the rows whose query is wrong for each positive of `rows`. Each query is counted
        at its first positive."""
        asked = self.text[self.query]
        is_right = (self.text == self.text[rows][:, None]) | (asked == asked[rows][:, None])
        return (self.role == POSITIVE) & (self.at == self.query + 1) & ~is_right


def _ranking(scores: torch.Tensor, others: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
    """The metrics of Embedding for each row of `scores`. `own` [rows, 1]: the column of the positive. `others`: bool
    [rows, columns]."""
    positive = scores.gather(1, own)
    rank = 1.0 + (others & (scores >= positive)).sum(1)
    in_k = rank <= K
    return [
        (rank == 1).float(),
        torch.where(in_k, 1 / rank, 0.0),
        torch.where(in_k, 1 / torch.log2(1 + rank), 0.0),
        positive.squeeze(1),
        torch.where(others, scores, 0.0).sum(1) / others.sum(1).clamp(min=1),
    ]


def _hashes(batch: Batch) -> torch.Tensor:
    """The hash of each document's tokens, float32 [slots, WORDS]: whole numbers below 2^21."""
    ids, position = batch.input_ids.flatten(), batch.position_ids.flatten()
    mixed = (ids + 1) * 0x9E3779B97F4A7C1 + (position + 1) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 32)) * (batch.is_token() > 0)
    ends = batch.cu_seqlens[1:].long()
    document = torch.searchsorted(ends, torch.arange(len(ids), device=ids.device), right=True)
    sums = torch.zeros_like(ends).index_add(0, document, mixed)
    words = [(sums >> (WORD_BITS * number)) & ((1 << WORD_BITS) - 1) for number in range(WORDS)]
    return torch.stack(words, dim=1).float()
