"""Starts a run on its ranks: checks that all have the same recipe, and lets rank 0 find the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import RunFolder, claim, differences
from fxtune.config.root import Config, completed
from fxtune.distributed.world import World
from fxtune.errors import ConfigError


def require_same_recipe(world: World, recipe: dict[str, Any]) -> None:
    """Raise ConfigError if the ranks were started with different recipes."""
    if world.size > 1:
        for rank, other in enumerate(world.gather(recipe, "comparing recipes")):
            if lines := differences(other, recipe):
                raise ConfigError(
                    f"The recipe of rank {world.rank} differs from the recipe of rank {rank}:\n"
                    + "\n".join(lines)
                    + "\nStart all ranks with the same command and files."
                )


def claim_folder(world: World, config: Config, recipe: dict[str, Any]) -> RunFolder:
    """Find the run's folder. Rank 0 finds and locks it; the other ranks get its path."""
    run = config.run

    def work() -> RunFolder | None:
        return claim(run.name, run.dir, run.resume.value, recipe, completed) if world.main else None

    claimed = world.main_first(work, "waiting for rank 0 to find the run folder")
    path, resumed, before, extends = world.broadcast(
        (claimed.path, claimed.resumed, claimed.config, claimed.extends) if claimed else (Path(), False, {}, False)
    )
    return claimed or RunFolder(path, resumed, None, before, extends)
