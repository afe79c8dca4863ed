"""`fxtune train`: trains the recipe's model. `train` may be left out.

fxtune +recipe=quickstart                        # runs/quickstart: adapter, checkpoints, metrics, result.json
fxtune +recipe=quickstart                        # the same command continues an unfinished run
fxtune +recipe=quickstart run.resume=never       # start another run instead
fxtune +recipe=quickstart train.max_steps=100    # any key; fxtune help KEY explains it
"""

from __future__ import annotations

from typing import Any

from fxtune.checkpoint.run_folder import RESULT
from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.outputs.run_output import find_output
from fxtune.training import trainer
from fxtune.training.run.log import next_commands


def run(config: Config) -> dict[str, Any]:
    """Train, and return the run's last figures. Raises the errors of trainer.run()."""
    folder, figures = trainer.train(config)
    finished = (folder / RESULT).exists()
    ANSWER.put(
        {
            "folder": str(folder),
            "finished": finished,
            "output": str(find_output(str(folder)).folder) if finished else None,
            "held_out": {
                key: value for key, value in figures.items() if key.startswith(("eval/", "questions/", "benchmarks/"))
            },
            "figures": figures,
            "next": next_commands(config, folder) if finished else [],
        }
    )
    return figures
