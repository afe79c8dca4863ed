"""A query with candidates, each with its relevance: the higher, the better the candidate answers the query.

{"query": "...", "passages": ["...", "..."], "labels": [1, 0]}
{"query": "...", "passages": {"passage_text": [...], "is_selected": [...]}}     MS MARCO
{"query": "...", "positive": "...", "negative": ["...", "..."]}                relevance 1 and 0
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fxtune.data.formats.embedding import EmbeddingFormat
from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, TextGroup
from fxtune.data.formats.values import RowError, require_text, require_words, short, type_name

QUERIES = ("query", "question", "anchor")
CANDIDATES = ("passages", "documents", "candidates", "docs")
RELEVANCES = ("labels", "relevances", "scores", "is_selected")


class CandidatesFormat(EmbeddingFormat):
    """Rows of embedding models, too: their positives have the relevance 1, their negatives 0."""

    name = "candidates"
    columns = ("query", "passages", "labels")
    known_columns = EmbeddingFormat.known_columns.union(QUERIES, CANDIDATES, RELEVANCES, ("query_type", "answers"))
    is_compared = False
    writes_pairs = True
    nothing_learned = "no row has a candidate"

    def fits(self, row: Mapping[str, Any]) -> bool:
        has_candidates = any(name in row for name in CANDIDATES) and isinstance(_first(row, QUERIES), str)
        return has_candidates or super().fits(row)

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        if _first(row, CANDIDATES) is None:
            found = super().read(row, learn, unused)
            assert isinstance(found, TextGroup)
            (_, query), *others = found.texts.items()
            texts, relevances = {place: replace(query, second=text.text) for place, text in others}, found.labels[1:]
        else:
            texts, relevances = _listed(row)
        if len(texts) < 2:
            raise RowError("the row has fewer than two candidates, so there is nothing to rank")
        if len(set(relevances)) < 2:
            raise RowError(f"all candidates have the relevance {relevances[0]:g}, so there is nothing to rank")
        return TextGroup(texts, relevances)


def _first(row: Mapping[str, Any], names: Collection[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _listed(row: Mapping[str, Any]) -> tuple[dict[str, PlainText], list[float]]:
    """The candidates of a row with lists of candidates and relevances, by place, and their relevances."""
    query = require_text(_first(row, QUERIES), "query")
    found: Any = _first(row, CANDIDATES)
    given: Any = _first(row, RELEVANCES)
    if isinstance(found, Mapping):
        found, given = found.get("passage_text"), found.get("is_selected")
    if not isinstance(found, (list, tuple)) or not isinstance(given, (list, tuple)) or len(found) != len(given):
        raise RowError("a row needs a list of `passages` and a list of as many `labels`, a relevance for each passage")
    texts = {}
    for index, (candidate, relevance) in enumerate(zip(found, given, strict=True)):
        if isinstance(relevance, str) or not isinstance(relevance, (int, float)) or not math.isfinite(relevance):
            named = short(relevance) if isinstance(relevance, float) else type_name(relevance)
            raise RowError(f"labels[{index}] is {named}, not a finite number")
        place = f"candidate {index}"
        texts[place] = PlainText(query, second=require_words(candidate, place), as_tokenized=True)
    return texts, [float(relevance) for relevance in given]
