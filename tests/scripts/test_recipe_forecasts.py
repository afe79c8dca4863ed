"""The forecasts in the headers of the recipes are the planner's of today."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "make"))

import recipe_forecasts

WITH_FORECASTS = [
    file
    for file in sorted((recipe_forecasts.ROOT / "recipes").glob("*.yaml"))
    if recipe_forecasts.LINE.search(file.read_text())
]


@pytest.mark.parametrize("file", WITH_FORECASTS, ids=lambda file: file.stem)
def test_a_header_has_the_forecasts_of_the_planner(file):
    text = file.read_text()
    assert recipe_forecasts.updated(text) == text, "run python scripts/make/recipe_forecasts.py"


def test_a_header_gives_no_other_forecast():
    """Each header with the word has lines that are checked, and no figure in its sentence."""
    for file in sorted((recipe_forecasts.ROOT / "recipes").glob("*.yaml")):
        header = file.read_text().partition("# @package")[0]
        assert ("orecast" in header) == (file in WITH_FORECASTS), file.name
        assert not re.search(r"orecasts? (?:is|are) \d", header), file.name


def test_a_wrong_forecast_is_replaced():
    line = "#   fxtune plan +recipe=llama_full model=llama_8b_shape --gpu H200: "
    new = recipe_forecasts.updated(f"# A recipe\n{line}1.0 GiB\nkey: 1\n")
    found = re.fullmatch(rf"# A recipe\n{re.escape(line)}(\d+\.\d) GiB\nkey: 1\n", new)
    assert 80 < float(found[1]) < 139
