"""Plugins: the examples of docs/plugins.md train a model, and everything that is wrong with one is one message."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxtune
from fxtune import plugins
from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.errors import ConfigError, DataError
from fxtune.objectives.causal_lm import CausalLM

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = {code.splitlines()[0][2:]: code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
ROWS = [
    {"question": f"{number} lamps?", "replies": [{"by": "agent", "text": f"{number} lamps, yes."}]}
    for number in range(2, 12)
]
USED = [
    *("+recipe=quickstart", "data.sources=[{path: tickets.jsonl, format: tickets}]"),
    *("data.questions.path=questions.jsonl", "data.questions.metrics=[numbers_right]", "data.workers=1"),
    *("objective=focal", "techniques.plugins.use={neftune: {alpha: 2}}", "train.epochs=null", "train.max_steps=3"),
    *("train.log_every=1", "run.dir=run"),
]


@pytest.fixture
def examples(cwd):
    """The plugins of the page and their data, in the working directory. Returns the options that load them."""
    for name, code in EXAMPLES.items():
        Path(name).write_text(code)
    Path("tickets.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    turns = [{"role": "user", "content": "40 lamps?"}, {"role": "assistant", "content": "40 lamps, yes."}]
    Path("questions.jsonl").write_text(json.dumps({"messages": turns}))
    return [word for name in EXAMPLES for word in ("--plugin", name)]


def registered() -> set[str]:
    return {name for registry in plugins.REGISTRIES for name in registry.added()}


def written(code: str, name: str = "mine.py") -> list[str]:
    Path(name).write_text(code)
    return ["--plugin", name]


def refused(capsys, *words: str, code: int = 2) -> str:
    capsys.readouterr()
    assert main(list(words)) == code
    return re.sub(r"\s+", " ", capsys.readouterr().err)


def test_page_has_an_example_of_each_kind():
    assert sorted(EXAMPLES) == ["focal.py", "listwise.py", "neftune.py", "numbers.py", "ranked.py", "tickets.py"]


@pytest.mark.slow
def test_examples_of_the_page_train_a_model_that_resumes_only_with_them(examples, capsys):
    assert main([*examples, *USED, "train.pause_after=2"]) == 0
    assert not registered(), "nothing is left in this process"
    out = capsys.readouterr().out
    assert "plugin tickets: sha256 " in out
    evidence = {one["technique"]: one for one in json.loads(Path("run/evidence.json").read_text())}
    assert evidence["neftune"]["acted"]
    assert "cross_entropy" in evidence["objective"]["observed"]
    setting = json.loads(Path("run/setting.json").read_text())
    assert sorted(setting["plugins"]) == ["focal", "neftune", "numbers", "tickets"]
    assert all(re.fullmatch("sha256 [0-9a-f]{16}", identity) for identity in setting["plugins"].values())

    kept = [name for name in EXAMPLES if name != "neftune.py"]
    without = [word for name in kept for word in ("--plugin", name)]
    said = refused(capsys, *without, *USED)
    assert "`techniques.plugins.use.neftune`: there is no technique of a plugin `neftune`" in said
    assert "--plugin FILE.py" in said
    Path("focal.py").write_text(EXAMPLES["focal.py"].replace("** self.gamma", "** 3"))
    said = refused(capsys, *examples, *USED)
    assert "its plugins changed since it was started" in said
    assert "plugins.focal" in said
    Path("focal.py").write_text(EXAMPLES["focal.py"])

    assert main([*examples, *USED]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = {line["train/step"]: line for line in lines if "train/loss" in line}
    assert sorted(steps) == [1, 2, 3]
    assert 0 < steps[3]["train/loss"] < steps[3]["train/cross_entropy"], "a focal loss is smaller"
    assert json.loads(Path("run/result.json").read_text())["questions/numbers_right"] in (0.0, 1.0)


@pytest.mark.slow
def test_ranks_and_workers_load_the_plugins(examples):
    command = [sys.executable, "-m", "fxtune", *examples, *USED, "run.device=cpu", "run.gpus=2"]
    several = ["data.workers=2", "loader.num_workers=1", "train.micro_batch_size=1", "train.global_batch_size=4"]
    Path("tickets.jsonl").write_text("\n".join(map(json.dumps, ROWS * 300)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *several], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "questions/numbers_right" in json.loads(Path("run/result.json").read_text())


def test_row_format_converts_rows_and_its_errors_are_bad_rows(cwd):
    Path("rows.jsonl").write_text("\n".join(json.dumps({"a": text}) for text in ("x", "y")) + '\n{"b": 1}\n')
    written('import fxtune\n\n@fxtune.row_format("mine")\ndef read(row):\n    return {"text": row["a"]}\n')
    source = SourceConfig(path="rows.jsonl", format="mine")
    with plugins.files_used(["mine.py"]):
        opened = open_source(source)
        rows = list(opened.rows())
        assert [row.value for row in rows] == [{"text": "x"}, {"text": "y"}, None]
        assert opened.format().name == "text"
        assert re.search(r"mine\.py, line 5: KeyError: 'b?a'", rows[2].error or "")
    with pytest.raises(ConfigError, match="there is no row format `mine`"):
        list(open_source(source).rows())


def test_row_format_may_return_a_group_of_documents(cwd, capsys):
    rows = [
        {"query": f"{number} lamps?", "candidates": ["yes", f"{number} lamps", "none"], "relevance": [None, 1, 0]}
        for number in range(8)
    ]
    rows.append({"query": "how many?", "candidates": ["a", "b"], "relevance": [1, 0, 0]})
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["+recipe=quickstart", f"data.cache_dir={cwd / 'cache'}", "data.questions.path=null"]
    words += ["data.sources=[{path: rows.jsonl, format: ranked}]", "data.eval_fraction=0", "data.workers=1"]
    said = refused(capsys, "preview", *written(EXAMPLES["ranked.py"], "ranked.py"), *words, code=3)
    assert "rows.jsonl:9: labels is 3 entries; it must be a list of 2 numbers" in said
    assert main(["preview", "--plugin", "ranked.py", *words, "data.on_bad_row=quarantine"]) == 0
    out = capsys.readouterr().out
    assert "group, 24 documents in 8 groups" in out
    with plugins.files_used(["ranked.py"]):
        opened = open_source(SourceConfig(path="rows.jsonl", format="ranked"))
        assert opened.format().name == "group"
        assert next(opened.rows()).value["labels"] == [None, 1, 0]


def test_tokens_of_a_plugin_that_is_edited_meanwhile_are_not_kept(cwd, capsys):
    Path("rows.jsonl").write_text("\n".join(json.dumps({"a": text}) for text in ("x", "y")))
    edits = 'import pathlib\nimport fxtune\n\n@fxtune.row_format("mine")\ndef read(row):\n'
    edits += '    with pathlib.Path(__file__).open("a") as own:\n        own.write("# edited")\n    return {"text": row["a"]}\n'
    sources = ["data.sources=[{path: rows.jsonl, format: mine}]", f"data.cache_dir={cwd / 'cache'}"]
    said = refused(capsys, "preview", *written(edits), "+recipe=quickstart", *sources, "data.questions.path=null")
    assert "mine.py was edited while it was used. Give the same command again." in said
    assert not list((cwd / "cache").rglob("table.json"))


def test_rows_of_no_known_format_are_refused_with_their_columns(cwd):
    Path("rows.jsonl").write_text('{"a": "x"}\n')
    written('import fxtune\n\n@fxtune.row_format("mine")\ndef read(row):\n    return {"other": row["a"]}\n')
    with plugins.files_used(["mine.py"]), pytest.raises(DataError, match="Their columns: other"):
        open_source(SourceConfig(path="rows.jsonl", format="mine")).format()


WRONG = {
    "no such file": (None, "--plugin mine.py: No such file"),
    "syntax": ("import fxtune\ndef f(:\n", "mine.py, line 2: SyntaxError"),
    "error": ("import fxtune\n\nraise KeyError('x')\n", "mine.py, line 3: KeyError: 'x'."),
    "nothing": ("x = 1\n", "registers nothing"),
    "taken": (
        "import fxtune\n@fxtune.row_format('messages')\ndef f(row): ...\n",
        "its own row format `messages`",
    ),
    "no name": ("import fxtune\n@fxtune.metric('a b')\ndef f(a, b): ...\n", "`a b` is no name of a metric"),
    "twice": (
        "import fxtune\n@fxtune.metric('m')\ndef f(a, b): ...\n@fxtune.metric('m')\ndef g(a, b): ...\n",
        "has a metric `m`, too",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_broken_plugin_is_one_message(cwd, capsys, kind):
    code, words = WRONG[kind]
    if code is not None:
        written(code)
    assert words in refused(capsys, "recipes", "--plugin", "mine.py")
    assert not registered()


def test_two_plugins_of_one_name_or_with_one_name_in_both_are_refused(cwd, capsys):
    code = "import fxtune\n@fxtune.metric('{}')\ndef f(a, b): return 1.0\n"
    Path("other").mkdir()
    written(code.format("m"))
    written(code.format("n"), "other/mine.py")
    written(code.format("m"), "third.py")
    two = ["--plugin", "mine.py", "--plugin"]
    assert "Two plugins have the name `mine`" in refused(capsys, "recipes", *two, "other/mine.py")
    assert "mine.py has a metric `m`, too" in refused(capsys, "recipes", *two, "third.py")


def test_listings_show_what_came_from_which_plugin(examples, capsys):
    for words in (["recipes"], ["--help"]):
        assert main([*words[:1], *examples] if words == ["recipes"] else [*examples, *words]) == 0
        said = capsys.readouterr().out
        assert re.search(r"from plugins\n.*row format tickets: tickets \(sha256 [0-9a-f]{16}\)", said)
        assert "technique neftune: neftune" in said
    assert main(["recipes"]) == 0
    assert "from plugins" not in capsys.readouterr().out


def test_names_options_and_objectives_are_checked_before_anything_is_read(examples, capsys):
    key = "techniques.plugins.use={neftune: {alpa: 2}}"
    assert "`techniques.plugins.use.neftune`: unknown key `alpa`; did you mean `alpha`?" in refused(
        capsys, *examples, "+recipe=quickstart", key
    )
    assert (
        "the config group `objective` has no `focl`; did you mean `focal`? A plugin adds others: --plugin"
        in refused(capsys, *examples, "+recipe=quickstart", "objective=focl")
    )
    for word, message in {
        "objective.gama=1": "unknown key `objective.gama`; did you mean `objective.gamma`?",
        "objective.gamma=-1": "`objective.gamma=-1.0` must be at least 0",
        "objective.gamma=1": "`objective.gamma` is an option of objective=simpo and focal, and this is objective=causal_lm",
        "objective.name=focl": "focal, listwise; did you mean `focal`?",
    }.items():
        assert message in refused(capsys, *examples, "+recipe=quickstart", word)
    said = refused(capsys, "+recipe=quickstart", USED[1])
    assert "`data.sources.0.format=tickets` is not one of auto, " in said
    assert "A plugin adds others: --plugin FILE.py" in said
    Path("bad.yaml").write_text("plugins: [focal.py]\n")
    assert "unknown key `plugins`" in refused(capsys, "+recipe=./bad.yaml"), "a recipe cannot load code"


def test_objective_of_a_recipe_and_its_options_give_way_to_another_objective(examples, capsys):
    Path("mine.yaml").write_text("objective: {name: focal, gamma: 3}\ntrain: {max_steps: 1}\n")
    Path("plain.yaml").write_text("defaults: [mine]\nobjective: {name: causal_lm}\n")
    Path("recipes").mkdir()
    for name in ("mine", "plain"):
        Path(f"{name}.yaml").rename(f"recipes/{name}.yaml")
    with plugins.files_used(["focal.py"]):

        def objective(*words: str) -> object:
            return load([*words]).objective

        assert objective("+recipe=mine").gamma == 3
        assert objective("+recipe=mine", "objective.gamma=1").gamma == 1
        assert objective("+recipe=mine", "objective=focal").gamma == 2, "the group's values, as with optimizer=NAME"
        for words in (("+recipe=plain",), ("+recipe=mine", "objective=causal_lm")):
            assert objective(*words) == CausalLM()
        assert main(["help", "objective.gamma"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "How much less; 0: cross-entropy." in said
    assert "at least 0" in said
    assert "focal.py" in said


def test_objective_that_breaks_the_protocol_and_technique_without_evidence_are_refused(cwd, capsys):
    short = ["+recipe=quickstart", "train.max_steps=1", "data.questions.path=null"]
    plugin = written(
        "import fxtune\n\n@fxtune.objective('mine')\nclass Mine(fxtune.Objective):\n    def loss(self, model, batch):\n"
        "        return model.summed_loss(batch).double(), {}\n    def normalizer(self, plan, step):\n        return 1.0\n"
    )
    said = refused(capsys, *plugin, *short, "objective=mine")
    assert "the objective `mine` must return a float32 sum" in said
    assert "the loss is [], torch.float64, not a scalar of float32" in said
    plugin = written(
        "from dataclasses import dataclass\nimport fxtune\n\n@fxtune.technique('still')\n@dataclass\n"
        "class Still(fxtune.Technique):\n    fails: bool = False\n    def apply(self, model, world):\n"
        "        return model.nothing if self.fails else model\n"
    )
    said = refused(capsys, *plugin, *short, "techniques.plugins.use={still: {}}")
    assert "still: asked for evidence that it acts; seen: verify() yields none" in said
    said = refused(capsys, *plugin, *short, "techniques.plugins.use={still: {fails: true}}")
    assert re.search(r"mine\.py, line 9: AttributeError: .*nothing", said)


def test_registering_outside_of_a_plugin_is_refused():
    with pytest.raises(ConfigError, match=r"registered outside of a plugin.*fxtune\.load_plugin"):
        fxtune.metric("lost")(len)


def test_load_plugin_stays_for_the_process_and_takes_an_edited_file_again(cwd, monkeypatch):
    written("import fxtune\n@fxtune.metric('m')\ndef f(a, b): return 1.0\n")
    monkeypatch.setenv(plugins.FILES, "")
    try:
        fxtune.load_plugin("mine.py")
        assert plugins.METRICS["m"]("a", "b") == 1.0
        assert str(Path("mine.py").resolve()) in plugins.os.environ[plugins.FILES], "workers find it"
        written("import fxtune\n@fxtune.metric('m')\ndef f(a, b): return 2.0\n")
        fxtune.load_plugin("mine.py")
        assert plugins.METRICS["m"]("a", "b") == 2.0
    finally:
        plugins._drop(plugins._loaded["mine"])


def test_entry_point_of_a_package_is_loaded(tmp_path, monkeypatch):
    package = tmp_path / "lamps"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text("import fxtune\n@fxtune.metric('lit')\ndef f(a, b): return 1.0\n")
    info = tmp_path / "lamps-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamps\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[fxtune.plugins]\nlight = lamps.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_installed", [])
    try:
        assert "lit" in plugins.METRICS
        assert str(plugins.METRICS.added()["lit"]) == "light (lamps 1.2)"
    finally:
        plugins._drop(plugins._loaded["light"])
