"""The recipe that `fxtune tune` writes gives exactly the config that was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.cases import slow_but
from support.tuning import QUICKSTART

from fxtune.config import compose
from fxtune.errors import ConfigError, StorageError
from fxtune.tuning import recipe_writer
from fxtune.tuning.search_space import apply_deltas

DELTAS = {
    "train.micro_batch_size": 2,
    "techniques.compile.enabled": True,
    "techniques.liger.enabled": True,
    "techniques.liger.kernels": ["fused_linear_cross_entropy"],
    "techniques.checkpointing.save": ["attention"],
}

SOURCES = [QUICKSTART, "data.sources=[{path: 'a b.jsonl'}, {path: c}]"]
TWO_RECIPES = ["+recipe=[llama_lora,quickstart]", "tracking=wandb_offline"]
OTHER_OBJECTIVE = ["objective=ranking", "objective.losses=pairwise", "data.sources=[{path: x.jsonl}]"]
OWN_RECIPE = ["+recipe=elsewhere/mine.yaml", "techniques=lora"]


@pytest.mark.parametrize(
    "overrides",
    slow_but(
        [
            [QUICKSTART],
            [QUICKSTART, "+optimizer=muon", "optimizer.lr=1e-3"],
            [QUICKSTART, "techniques=[lora,low_memory]"],
            [QUICKSTART, "data.sources.0.path=other.jsonl", "data.sources.0.weight=2"],
            SOURCES,
            [QUICKSTART, "model.architecture.hidden_size=64", "model.architecture={num_hidden_layers: 3}"],
            [QUICKSTART, "techniques.lora={r: 16, alpha: 32}", "run.name=other"],
            [QUICKSTART, "techniques.lora.fused='off'"],
            TWO_RECIPES,
            OWN_RECIPE,
            ["model.path=builtin:tiny", "data.sources=[{path: x.jsonl}]"],
            OTHER_OBJECTIVE,
            [QUICKSTART, "objective=dpo", "objective.beta=0.2"],
        ],
        SOURCES,
        TWO_RECIPES,
        OWN_RECIPE,
        OTHER_OBJECTIVE,
    ),
)
def test_the_recipe_gives_the_config_that_was_measured(cwd, overrides):
    Path("elsewhere").mkdir()
    Path("elsewhere/mine.yaml").write_text(
        "# mine\n# @package _global_\ndefaults: [quickstart]\ntechniques:\n  lora: {r: 4}\n"
        "  checkpointing: {enabled: true}\n"
    )
    measured = apply_deltas(compose.load(overrides), DELTAS)
    recipe_writer.write(Path("recipes/fast.yaml"), ["fast", "", "header"], overrides, measured)
    found = compose.load(["+recipe=fast"])
    found.run.name = measured.run.name
    assert found == measured
    text = Path("recipes/fast.yaml").read_text()
    assert text.startswith("# fast\n#\n# header\n# @package _global_\n")
    recipe = yaml.safe_load(text)
    assert "run" not in recipe
    assert "schedule" not in recipe, "only what differs is written"
    names = overrides[0].partition("=")[2].strip("[]").split(",") if overrides[0].startswith("+") else []
    shipped = [name for name in names if "/" not in name]
    assert recipe.get("defaults", ["_self_"]) == [*shipped, "_self_"]
    assert recipe_writer.output_path(overrides, "run", None) == Path("recipes") / (
        f"{Path(names[-1]).stem if names else 'run'}_tuned.yaml"
    )


def test_an_earlier_recipe_is_kept_and_a_file_of_the_user_is_refused(cwd):
    measured, path = compose.load([QUICKSTART]), Path("recipes/fast.yaml")
    for number in (1, 2):
        recipe_writer.write(
            path, [f"number {number}", f"{recipe_writer.MARK[2:]}+recipe=quickstart"], [QUICKSTART], measured
        )
        assert recipe_writer.output_path([QUICKSTART], "run", str(path)) == path
    assert "number 2" in path.read_text()
    assert "number 1" in Path("recipes/fast.yaml.old").read_text()
    path.write_text("# mine\n")
    with pytest.raises(StorageError, match="fxtune did not write it"):
        recipe_writer.output_path([QUICKSTART], "run", str(path))
    with pytest.raises(ConfigError, match=r"a recipe is a file NAME\.yaml"):
        recipe_writer.output_path([QUICKSTART], "run", "fast.txt")
