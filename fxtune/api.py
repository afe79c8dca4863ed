"""fxtune from Python and from a notebook: the same recipes, checks and runs as on the command line.

    import fxtune

    config = fxtune.load_recipe("quickstart", ["train.epochs=2"])   # typed: config.optimizer.lr = 2e-3
    fxtune.preview(config)                                          # what the model will see
    run = fxtune.train(config)                                      # as `fxtune +recipe=quickstart train.epochs=2`
    run.metrics[-1]["train/loss"], run.result, run.output
    run.generate("Two large pizzas for Ann, please.")
    fxtune.Run("runs/quickstart").evidence                          # any run, even while it trains

A recipe is a name, a YAML file or a config from load_recipe(). A mistake raises a subclass of fxtune.errors.UserError,
with the message of the command line.
"""

from __future__ import annotations

import dataclasses
import html
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fxtune.checkpoint.run_folder import EVIDENCE, REPORT
from fxtune.config import compose
from fxtune.config.overrides import COMMAND_LINE
from fxtune.config.root import Config
from fxtune.distributed.files import require_writable, write_json
from fxtune.errors import ConfigError, RankError, readable
from fxtune.outputs.run_output import find_output, run_folder
from fxtune.reports.run_files import RunFiles
from fxtune.system.files.atomic_files import read_json
from fxtune.techniques.base import Evidence


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a recipe, with `overrides` as they are typed on the command line. Raises ConfigError."""
    overrides = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(overrides, dict) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError('overrides are a list of texts, each as on the command line: ["optimizer.lr=1e-3"].')
    try:
        return compose.load([compose.path_override("+recipe", recipe), *overrides])
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{COMMAND_LINE}: ", "")) from error


def train(recipe: str | Path | Config, overrides: Sequence[str] = ()) -> Run:
    """Train, or continue an unfinished run of the same recipe, and return the run. Each of several GPUs (`run.gpus`)
    gets its own process. Raises the UserErrors that the command line reports, and Stopped after Ctrl-C."""
    from fxtune.settle.ranks import ranks_of
    from fxtune.training import trainer

    config = _config(recipe, overrides)
    if not config.data.sources:
        raise ConfigError("data.sources is empty: choose a recipe that has some, or set config.data.sources.")
    if (ranks := ranks_of(config)) == 1:
        return Run(trainer.train(config)[0])
    from fxtune.distributed.launch import launch

    with tempfile.TemporaryDirectory(prefix="fxtune-json-") as scratch:
        answer = Path(scratch) / "answer.json"
        words = _as_command(config, Path(scratch) / "config.yaml")
        if code := launch(ranks, ["train", *words, "--json", str(answer)]):
            raise RankError(f"The ranks ended with exit code {code}, for the reason that they printed.")
        return Run(read_json(answer)["folder"])


def preview(
    recipe: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    html: str | Path | None = None,
    json: str | Path | None = None,
) -> None:
    """Print the first samples as the model will see them, and what a step needs. `html`: a file for the page. `json`:
    a file for the samples. Raises the errors of train(), and StorageError if a file cannot be written."""
    from fxtune.diagnostics import preview as page

    if json is not None:
        require_writable(Path(json))
    found = page.preview(_config(recipe, overrides), html=None if html is None else Path(html))
    if json is not None:
        write_json(Path(json), found)


def verify(recipe: str | Path | Config, overrides: Sequence[str] = (), *, loss: bool = False) -> None:
    """Build the model, take a step, and print what each option of the recipe did. `loss`: also compare loss and
    gradients with plain transformers. Raises CheckError if something did not act, and the errors of train()."""
    from fxtune.diagnostics import verification

    verification.verify(_config(recipe, overrides), loss=loss).require_acted()


def plan(
    recipe: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    gpu: str = "H200",
    gpus: int = 1,
    tokens: int | None = None,
) -> Any:
    """The forecast of a run on `gpus` cards of the model `gpu`: a RunForecast (training/forecast/run_forecast.py).
    `tokens`: tokens of an epoch; None: count them in the data, if it is on this machine. Raises ConfigError if the
    recipe cannot run on these cards."""
    from fxtune.estimate.machines import machine
    from fxtune.training.forecast.run_forecast import forecast_run, with_lengths

    config = _config(recipe, overrides)
    if type(gpus) is not int or gpus < 1:
        raise ConfigError(f"gpus={gpus!r}: give a whole number, 1 or more.")
    card = machine(gpu, 128, config.run.memory_gib)
    config, lengths = with_lengths(config, card, tokens)
    return forecast_run(config, card, gpus, None if isinstance(lengths, str) else lengths)


class Run:
    """A run by its folder or name, finished or not. Each property reads the run's files when it is used."""

    def __init__(self, run: str | Path) -> None:
        """Raises ConfigError if the run does not exist."""
        self.folder = run_folder(str(run)).absolute()  # a notebook may change its folder
        _ = self._files
        self._conversations: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {'finished' if self.finished else 'not finished'})"

    def _repr_html_(self) -> str:
        """The last figures as HTML, for notebooks."""
        rows = self.result or (self.metrics[-1] if self.metrics else {})
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{value:,.6g}</td></tr>"
            for name, value in rows.items()
            if isinstance(value, (int, float))
        )
        return f"<b>{html.escape(repr(self))}</b><table>{cells}</table>"

    @property
    def _files(self) -> RunFiles:
        """The run's files, opened again for each use, because a run that still trains adds to them."""
        return RunFiles(self.folder)

    @property
    def finished(self) -> bool:
        return self._files.finished

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as plain data, with every default."""
        return self._files.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each log line, in order. `pandas.DataFrame(run.metrics)` makes a table of them."""
        return self._files.rows

    @property
    def result(self) -> dict[str, Any]:
        """The last figures of a finished run; empty before."""
        return self._files.result

    @property
    def evidence(self) -> list[Evidence]:
        """What was asked of each option, and what was observed before the first step."""
        with readable(f"{self.folder / EVIDENCE} cannot be read", "Bring it back."):
            return [Evidence(**observation) for observation in self._files.evidence]

    @property
    def output(self) -> Path:
        """The folder of the adapter or of the whole model. Plain peft and transformers can load it. Raises ConfigError
        before the run is finished."""
        return find_output(str(self.folder)).folder

    def report(self, file: str | Path | None = None) -> Path:
        """Write the page about the run (docs/report.md) to `file`, or else to report.html in the run's folder."""
        from fxtune.reports.page import write_report

        path = Path(file) if file else self.folder / REPORT
        write_report([self.folder], path)
        return path

    def generate(
        self,
        prompt: str,
        *,
        images: str | Path | Sequence[str | Path] = (),
        system: str | None = None,
        show: str = "tuned",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
    ) -> str:
        """The model's answer to `prompt`. The run's chat template writes the prompt as in training. `images`: files
        that the model sees before the prompt, if it reads images. `system`: the text of the system turn; None: the
        recipe's `data.system`. `show`: `tuned`, or `base` for the model before training. The model stays in memory for
        the next call. Raises the errors of `fxtune chat`, and DataError if the model cannot read the prompt."""
        from fxtune.outputs.conversation import Conversation

        if not isinstance(prompt, str):
            raise ConfigError("prompt is not a text: call generate() once for each prompt.")
        images = [images] if isinstance(images, str | Path) else images
        if show not in ("tuned", "base"):
            raise ConfigError(f"show={show}: give `tuned` or `base`.")
        output = find_output(str(self.folder))
        if show not in self._conversations:
            self._conversations[show] = Conversation(output, show)
        talk = self._conversations[show]
        talk.max_new_tokens, talk.temperature, talk.system = max_new_tokens, temperature, system
        talk.start_anew()
        return talk.answer(talk.speakers[0], prompt, lambda piece: None, [str(file) for file in images])


def _config(recipe: str | Path | Config, overrides: Sequence[str]) -> Config:
    if not isinstance(recipe, Config):
        return load_recipe(recipe, overrides)
    if overrides:
        raise ConfigError("A config takes no overrides: set its fields, or give them to load_recipe().")
    values = json.loads(json.dumps(_values(recipe)))
    return compose.typed(OmegaConf.create(values))  # with all checks of a command line


def _values(node: Any) -> Any:
    """The values of a config as a recipe has them, and the values of fields that a user has misspelled."""
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        if added := [name for name in vars(node) if name not in names]:
            names += [name for name in added if name not in vars(type(node)())]  # type: ignore[misc]
        return {name: _values(getattr(node, name)) for name in names}
    if isinstance(node, dict):
        return {key: _values(value) for key, value in node.items()}
    return [_values(value) for value in node] if isinstance(node, list | tuple) else node


def _as_command(config: Config, file: Path) -> list[str]:
    """Write `config` to `file` as a recipe. Returns the words of a command line that loads it."""
    values, words = compose.as_recipe(config)
    file.write_text(f"# @package _global_\n{yaml.safe_dump(values, allow_unicode=True)}", encoding="utf-8")
    return [compose.path_override("+recipe", file), *words]
