"""A query with candidates, each with its relevance: the higher, the better the candidate answers the query.

{"query": "...", "passages": ["...", "..."], "labels": [1, 0]}
{"query": "...", "passages": {"passage_text": [...], "is_selected": [...]}}     MS MARCO
{"query": "...", "positive": "...", "negative": ["...", "..."]}                relevance 1 and 0
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, RowFormat, TextGroup
from fxtune.data.formats.values import RowError, require_text, require_words, short, type_name

QUERIES = ("query", "question", "anchor")
CANDIDATES = ("passages", "documents", "candidates", "docs")
RELEVANCES = ("labels", "relevances", "scores", "is_selected")
POSITIVES, NEGATIVES = ("positive", "positives", "pos"), ("negative", "negatives", "neg")


class CandidatesFormat(RowFormat):
    name = "candidates"
    columns = ("query", "passages", "labels")
    known_columns = frozenset((*QUERIES, *CANDIDATES, *RELEVANCES, *POSITIVES, *NEGATIVES, "query_type", "answers"))
    is_group = True
    as_tokenized = True
    writes_pairs = True
    is_question = False
    nothing_learned = "no row has a candidate"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return isinstance(_first(row, QUERIES), str) and any(name in row for name in (*CANDIDATES, *POSITIVES))

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        query = require_text(_first(row, QUERIES), "query")
        candidates, relevances = _candidates(row)
        if len(candidates) < 2:
            raise RowError("the row has fewer than two candidates, so there is nothing to rank")
        if len(set(relevances)) < 2:
            raise RowError(f"all candidates have the relevance {relevances[0]:g}, so there is nothing to rank")
        texts = {}
        for index, candidate in enumerate(candidates):
            place = f"candidate {index}"
            texts[place] = PlainText(query, second=require_words(candidate, place), as_tokenized=True)
        return TextGroup(texts, relevances)


def _first(row: Mapping[str, Any], names: Collection[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _candidates(row: Mapping[str, Any]) -> tuple[list[Any], list[float]]:
    """The candidates of a row and their relevances."""
    found: Any = _first(row, CANDIDATES)
    given: Any = _first(row, RELEVANCES)
    if found is None:
        sides = [_listed(_first(row, names)) for names in (POSITIVES, NEGATIVES)]
        if not sides[0]:
            raise RowError("the query has no positive candidate")
        return [*sides[0], *sides[1]], [1.0] * len(sides[0]) + [0.0] * len(sides[1])
    if isinstance(found, Mapping):
        found, given = found.get("passage_text"), found.get("is_selected")
    if not isinstance(found, (list, tuple)) or not isinstance(given, (list, tuple)) or len(found) != len(given):
        raise RowError("a row needs a list of `passages` and a list of as many `labels`, a relevance for each passage")
    for index, relevance in enumerate(given):
        if isinstance(relevance, str) or not isinstance(relevance, (int, float)) or not math.isfinite(relevance):
            named = short(relevance) if isinstance(relevance, float) else type_name(relevance)
            raise RowError(f"labels[{index}] is {named}, not a finite number")
    return list(found), [float(relevance) for relevance in given]


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
