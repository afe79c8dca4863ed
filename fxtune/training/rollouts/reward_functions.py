"""Rewards of fxtune. Each gets the arguments of TRL's rewards, f(prompts, completions, completion_ids, columns), and
options as keywords. A column of the rows is a list with an entry for each completion."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeAlias

from fxtune.data.formats.values import unique_keys
from fxtune.errors import did_you_mean, first_line

Columns: TypeAlias = Mapping[str, Sequence[Any]]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)
LATEX = re.compile(r"\$|\\boxed|\\\(|\\\[")  # begins an expression inside a text
END_OF_THOUGHT = "</think>"


def text_of(completion: Any) -> str:
    """The text of a completion: a text, or the last of its messages."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def final_text_of(completion: Any) -> str:
    """The text of a completion after its thoughts, if it has thoughts that end with </think>."""
    return text_of(completion).rpartition(END_OF_THOUGHT)[2].strip()


def column_of(columns: Columns, name: str) -> Sequence[Any]:
    """The values of a column. Raises ValueError if the rows have no such column."""
    if name not in columns:
        raise ValueError(f"the rows have no column `{name}`{did_you_mean(name, columns)} Set the option `column`")
    return columns[name]


def needed_package(name: str) -> ModuleType:
    """A package of the extra `rl`. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is not installed. Install it: pip install 'fxtune[rl]'") from error


def of_environment(completions: list[Any], environments: Sequence[Any] = (), **_: Any) -> list[Any]:
    """What get_reward() of each answer's environment returns. None for a row without an environment."""
    return [None if each is None else each.get_reward() for each in environments]


def exact(completions: list[Any], columns: Columns, *, column: str = "answer", **_: Any) -> list[float]:
    """1 if the answer is the text in `column`, else 0. Spaces around both do not count."""
    right = column_of(columns, column)
    return [
        float(text_of(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, right, strict=True)
    ]


def number(
    completions: list[Any], columns: Columns, *, column: str = "answer", tolerance: float = 1e-6, **_: Any
) -> list[float | None]:
    """1 if the last number of the answer is the last number in `column`, else 0. None if `column` has no number."""

    def last(text: str) -> float | None:
        found = NUMBER.findall(text)
        return float(found[-1].replace(",", "")) if found else None

    scores = list[float | None]()
    for completion, answer in zip(completions, column_of(columns, column), strict=True):
        given, right = last(text_of(completion)), last(str(answer))
        if right is None:
            scores.append(None)
        else:
            near = given is not None and math.isclose(given, right, rel_tol=tolerance, abs_tol=tolerance)
            scores.append(float(near))
    return scores


def equal_expression(
    completions: list[Any], columns: Columns, *, column: str = "answer", seconds: int = 2, **_: Any
) -> list[float | None]:
    """1 if the answer's expression equals the expression in `column`, as math-verify reads and compares them, else 0.
    None if `column` has no expression. `seconds`: an answer that takes longer to read, or to compare, gets 0."""
    needed_package("math_verify")
    if not isinstance(seconds, int) or seconds < 1:
        raise ValueError(f"`seconds` is {seconds!r}, and not a whole number from 1 on. Correct it")
    return [
        None if right is None else _equality(str(right), final_text_of(completion), seconds)
        for completion, right in zip(completions, column_of(columns, column), strict=True)
    ]


@lru_cache(maxsize=1024)
def _equality(right: str, text: str, seconds: int) -> float | None:
    import math_verify

    # math-verify compares a percentage in a \boxed{} as a text, and outside of LaTeX it reads `(1, 2]` as 2.
    right, text = right.replace(r"\%", "%"), text.replace(r"\%", "%")
    gold = (math_verify.parse(right) if LATEX.search(right) else []) or math_verify.parse(f"${right}$")
    if all(isinstance(one, str) for one in gold):
        return None
    # As in TRL: the content of \boxed{} comes first, and if it is no expression, no other part of the answer counts.
    parts = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    given = math_verify.parse(text, parts, extraction_mode="first_match", parsing_timeout=seconds)
    return float(math_verify.verify(gold, given, timeout_seconds=seconds))


def json_document(
    completions: list[Any], columns: Columns, *, schema: Any = None, column: str | None = None, **_: Any
) -> list[float | None]:
    """1 if the answer is JSON, alone or in one fence (```json), and follows the JSON schema, if there is one; else 0.
    JSON has no NaN and no key twice in an object. `schema`: of all rows. `column`: has the schema of each row, an
    object or its text; None for a row without a schema."""
    if schema is not None and column is not None:
        raise ValueError("it has the options `schema` and `column`. Remove one")
    if column is None:
        validator = None if schema is None else _validator(json.dumps(schema))
        return [float(_is_json(final_text_of(completion), validator)) for completion in completions]
    needed_package("jsonschema")
    schemas = [own if isinstance(own, str) else json.dumps(own) for own in column_of(columns, column)]
    return [
        None if own == "null" else float(_is_json(final_text_of(completion), _validator(own)))
        for completion, own in zip(completions, schemas, strict=True)
    ]


def _is_json(text: str, validator: Any) -> bool:
    """Whether a text is JSON that `validator` accepts. `validator`: None accepts all JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    fenced = FENCE.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text, object_pairs_hook=unique_keys, parse_constant=refuse)
        return validator is None or bool(validator.is_valid(value))
    except (ValueError, RecursionError, OverflowError):  # too deep, or a number too large, for Python
        return False


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    """`text`: a JSON schema. Raises ValueError for a text that is none."""
    jsonschema = needed_package("jsonschema")
    referencing, known = needed_package("referencing"), needed_package("jsonschema_specifications").REGISTRY
    try:
        schema = json.loads(text)
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"the schema is {text}, and not an object. Correct it")
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        if isinstance(schema, dict):
            dialect = referencing.jsonschema.DRAFT202012
            resource = referencing.Resource.from_contents(schema, default_specification=dialect)
            _look_up_references(known.resolver_with_root(resource), resource)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is wrong at {error.json_path}: {error.message}. Correct it") from error
    except (json.JSONDecodeError, referencing.exceptions.Unresolvable) as error:
        raise ValueError(f"the schema is wrong: {first_line(error)}. Correct it") from error
    return kind(schema, registry=known)  # a registry that downloads nothing


def _look_up_references(resolver: Any, resource: Any) -> None:
    """Raise Unresolvable if a part of a schema refers to a schema that does not exist."""
    if isinstance(resource.contents, dict) and "$ref" in resource.contents:
        resolver.lookup(resource.contents["$ref"])
    for part in resource.subresources():
        _look_up_references(resolver.in_subresource(part), part)


def regex(completions: list[Any], *, pattern: str, **_: Any) -> list[float]:
    """1 if the pattern is found in the answer, else 0. `.` also matches a newline."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(completion)) is not None) for completion in completions]


def tags(completions: list[Any], *, names: Sequence[str] = ("think", "answer"), **_: Any) -> list[float]:
    """1 if the answer consists of <think>...</think> and <answer>...</answer>, each once and in the order of `names`,
    with nothing but spaces around them; else 0."""
    scores = []
    for completion in completions:
        text, whole = text_of(completion), r"\s*".join(f"<{name}>.*?</{name}>" for name in map(re.escape, names))
        once = all(text.count(f"<{name}>") == text.count(f"</{name}>") == 1 for name in names)
        scores.append(float(once and re.fullmatch(rf"\s*{whole}\s*", text, re.DOTALL) is not None))
    return scores


def length(completions: list[Any], completion_ids: list[list[int]], *, most: int = 100, **_: Any) -> list[float]:
    """The tokens of the answer, divided by `most`, at most 1. A negative weight makes answers shorter."""
    return [min(len(ids) / most, 1.0) for ids in completion_ids]
