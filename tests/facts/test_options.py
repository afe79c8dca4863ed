"""Options: every technique has exactly those that its facts show, in the same order."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

from fxtune.facts.options import Techniques
from fxtune.techniques.pipeline import Pipeline


def names(schema: type) -> list[str]:
    return [item.name for item in dataclasses.fields(schema)]


def test_the_order_of_the_options_is_the_order_that_the_pipeline_explains():
    assert names(Techniques) == names(Pipeline) == [*Pipeline.__annotations__]


def test_a_technique_adds_no_option_to_those_that_other_techniques_can_read():
    options, techniques = get_type_hints(Techniques), get_type_hints(Pipeline)
    for name in names(Pipeline):
        assert issubclass(techniques[name], options[name])
        assert names(techniques[name]) == names(options[name])
        assert names(options[name])[0] == "enabled"
