"""Overrides, recipes and groups: what they choose, and how a mistake in them is named."""

from __future__ import annotations

import shlex

import pytest
from support.recipes import QUICK, refusal, write_recipe

from fxtune.config.compose import load, prepare


@pytest.mark.parametrize("spelling", ["recipe=quickstart", "+recipe=quickstart", "++recipe=quickstart"])
def test_plus_signs_make_no_difference(cwd, spelling):
    config = load(["+optimizer=sgd", "+train.max_steps=7", spelling, "model.architecture.hidden_size=64"])
    assert (config.optimizer.name.value, config.train.max_steps) == ("sgd", 7)
    assert config.model.architecture == {"hidden_size": 64}


def test_field_that_takes_any_keys_can_be_set_as_a_whole(cwd):
    config = load([QUICK, "model.architecture={model_type:llama,hidden_size:64}"])
    assert config.model.architecture == {"model_type": "llama", "hidden_size": 64}


def test_the_number_behind_the_last_entry_of_a_list_adds_an_entry(cwd):
    write_recipe("defaults: [quickstart]\ndata: {sources: [{path: a.jsonl, limit: 3}]}\n")
    words = ["data.sources.1.path=b.jsonl", "data.sources.1.limit=5", "data.sources.2.path=c.jsonl"]
    found = load(
        ["+recipe=mine", "data.sources.0.limit=4", *words, "data.eval_sources=[{path: d.jsonl}]"]
    ).data.sources
    assert [(source.path, source.limit) for source in found] == [("a.jsonl", 4), ("b.jsonl", 5), ("c.jsonl", None)]
    assert [source.path for source in load(["+recipe=mine"]).data.sources] == ["a.jsonl"]


def test_recipe_builds_on_recipes_and_groups(cwd):
    write_recipe("# mine\ntrain: {max_steps: 5}\ndata: {sources: [{path: x.jsonl}]}\n", "quickstart")
    write_recipe(
        "defaults:\n  - quickstart\n  - override /optimizer: lion\ntrain: {epochs: 2}\noptimizer: {lr: 1e-5}\n"
    )
    config = load(["+recipe=mine"])
    assert config.run.name == "mine"
    assert (config.train.max_steps, config.train.epochs) == (5, 2.0), "the local quickstart hides the shipped one"
    assert (config.optimizer.name.value, config.optimizer.lr, config.optimizer.betas) == ("lion", 1e-5, [0.9, 0.99])


def test_recipe_can_be_given_as_a_path(cwd):
    path = write_recipe("run: {seed: 9}\ndata: {sources: [{path: x.jsonl}]}\n").rename(cwd / "other.yaml")
    runs = [load(["+recipe=./other.yaml"]).run, load([f"+recipe={path}", "run.name=named"]).run]
    assert [(run.seed, run.name) for run in runs] == [(9, "other"), (9, "named")]


def test_broken_recipe_that_is_not_chosen_is_ignored(cwd):
    write_recipe("a: [1\n", "broken")
    assert load([QUICK]).run.name == "quickstart"


def test_grid_of_a_recipe_is_for_multirun_only(cwd):
    write_recipe(
        "defaults: [quickstart]\nhydra: {sweeper: {params: {optimizer.lr: '1e-3,1e-2', optimizer: 'sgd,lion'}}}\n"
    )
    texts = [choice.text for choice in prepare(["+recipe=mine", "optimizer=sgd"], multirun=True)]
    assert texts == ["+recipe=mine", "+optimizer=sgd", "optimizer.lr=1e-3,1e-2"]
    assert load(["+recipe=mine"]).optimizer.lr == 4e-3


def test_empty_hydra_section_is_no_mistake(cwd):
    write_recipe("defaults: [quickstart]\nhydra:\n")
    assert load(["+recipe=mine"]).run.name == "mine"


def test_all_mistakes_are_reported_at_once(cwd):
    text = refusal(QUICK, "optimizer.lrr=1", "train.max_steps=x", "optimizer=moun")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["optimizer.lrr=1"], "unknown key `optimizer.lrr`; did you mean `optimizer.lr`?"),
        (["+optimizer.lrr=1"], "did you mean `optimizer.lr`?"),
        (["++optimizer.lrr=1"], "did you mean `optimizer.lr`?"),
        (["+techniques.lora.enbled=true"], "did you mean `techniques.lora.enabled`?"),
        (["data.sources.0.pth=x"], "did you mean `data.sources.0.path`?"),
        (["learning_rate=1e-4"], "did you mean `optimizer.lr`?"),
        (["lr=1e-4"], "did you mean `optimizer.lr`?"),
        (["optimizer.weight=0.1"], "did you mean `optimizer.weight_decay`?"),
        (["parallel.compress=bfloat16"], "did you mean `parallel.compression`?"),
        (["techniques.liger.rms_norm=on"], "no key any more: name the kernels in techniques.liger.kernels"),
        (["parallel.powersgd_rank=4"], "no key any more: use parallel.compression=powersgd"),
        (["train.sequence_length=9"], "did you mean `data.sequence_length`?"),
        (["zzz=1"], "A config has: run, model, data,"),
        (["optimizer.lr.x=1"], "has no keys"),
        (["data.sources.first.path=x"], "counted from 0"),
        (["data.sources=x.jsonl"], "data.sources.0.path=x.jsonl"),
        (["data.sources=[x.jsonl]"], "data.sources.0.path=x.jsonl"),
        (
            ["data.sources.4.path=x"],
            "data.sources has 1 here, counted from 0. Give the whole list: 'data.sources=[{path: ",
        ),
        (["data.sources=[]", "data.sources.1.path=x"], "data.sources has 0 here"),
        (["data.questions=null"], "data.questions.path=null"),
        (["optimizer=moun"], "the config group `optimizer` has no `moun`; did you mean `muon`?"),
        (["optimizr=muon"], "did you mean `optimizer=muon`?"),
        (["optimizer={name: sgd}"], "is a config group"),
        (["optimizer.name=adam"], "; did you mean `adamw`?"),
        (["run.resume=off"], "is not one of auto, never, must"),
        (["train.max_steps=many"], "is a whole number"),
        (["train.max_steps=1.5"], "is a whole number"),
        (["train.max_steps=true"], "is a whole number"),
        (["data.packing=2"], "is true or false"),
        (["model.revision=12e4"], "put it in quotes"),
        (["run.name=null"], "cannot be null"),
        (["optimizer.betas=0.9"], "is a list"),
        (["techniques.lora.train_tokens=end"], "is a list or auto: ['end'], not 'end'"),
        (["train=3"], "is a group of keys"),
        (["optimizer.lr=1,2"], "Add -m for one run each"),
        (["~optimizer.lr"], "no key can be taken out"),
        (["optimizer@model=sgd"], "cannot move it"),
        (["data.sources.0.path=a(b.jsonl"], "Quote the value twice"),
        (["data.sources.0.path=a b, c'd"], shlex.quote("""data.sources.0.path="a b, c'd\"""")),
        (["data.system=the dogs'"], shlex.quote("""data.system="the dogs'\"""")),
        (["data.system='a'b'"], shlex.quote("""data.system="a'b\"""")),
        (["techniques.lora.train_tokens=[it's, b]"], shlex.quote("""techniques.lora.train_tokens=["it's","b"]""")),
        (["lora.r=8"], "did you mean `techniques.lora.r`?"),
        (["techniques.lora.rank=8"], "did you mean `techniques.lora.r`?"),
        (["techniques.cuda_graphs.enabled=true"], "did you mean `techniques.compile.cuda_graphs`?"),
        (["train=null"], "put keys below it"),
        (["techniques.lora.train_tokens=[<|a|>, b]"], """'techniques.lora.train_tokens=["<|a|>","b"]'"""),
        (["objective.pool=mean"], "objective=causal_lm: leave it out, or choose another objective"),
        (["data.sources=[{'path': a.jsonl}]"], "Write 'data.sources=[{path: a.jsonl}]'"),
        (["techniques.lora.rank_pattern={7: 8}"], "write techniques.lora.rank_pattern.7=8"),
        (["run.name=${run.nam}"], "did you mean `run.name`?"),
        (["run.name=${run.dir}", "run.dir=${run.name}"], "ecursi"),
        (["data.sources.0.path=???"], "`data.sources.0.path` is not set"),
        (["optimizer.lr=-1", "train.epochs=nan", "train.global_batch_size=6"], "must be above 0"),
        (["techniques.lora.enabled=2"], "`techniques.lora.enabled` is"),
        (["-m", "optimizer.lr=1e-3,-1"], "on the command line: `optimizer.lr=-1.0` must be above 0"),
        (["+recipe=quickstart,qwen_lora"], "Add -m"),
        (["+recipe=qwen_lora", "optimizer=sgd", "optimizer=muon"], "`optimizer` is chosen 2 times"),
        (["quickstart"], "write +recipe=quickstart"),
        (["docs.jsonl"], "data.sources.0.path=docs.jsonl"),
        (["docs"], "neither a command of fxtune nor key=value"),
    ],
)
def test_mistake_on_the_command_line_is_named_with_its_correction(cwd, argv, message):
    multirun = argv[:1] == ["-m"]
    assert message in refusal(*argv[:multirun], QUICK, *argv[multirun:])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("optimizer:\n  lrr: 1\n", 2, "did you mean `optimizer.lr`?"),
        ("# x\nlearning_rate: 1\n", 2, "did you mean `optimizer.lr`?"),
        ("data:\n  sources:\n    - path: a\n      pth: b\n", 4, "did you mean `data.sources.0.path`?"),
        ("optimizer.lr: 3\n", 1, "dots become nesting"),
        ("data:\n  sources:\n    - columns: {no: text}\n", 3, "put it in quotes"),
        ("\noptimizer: {name: adam}\n", 2, "did you mean `adamw`?"),
        ("train:\n  max_steps: soon\n", 2, "is a whole number"),
        ("model:\n  revision: 0123456\n", 2, "put it in quotes"),
        ("run:\n  name: on\n", 2, "put it in quotes"),
        ("run: {resume: no}\n", 1, "YAML reads an unquoted"),
        ("optimizer: 3\n", 1, "is a group of keys"),
        ("run:\n  name: ${optimizer.rate}\n", 2, "points at nothing"),
        ("# @package optimizer\nlr: 1\n", 2, "unknown key `lr`"),
        ("defaults:\n  - quickstrat\n", 2, "did you mean `quickstart`?"),
        ("defaults:\n  - override /optimizer: moun\n", 2, "did you mean `muon`?"),
        ("defaults:\n  - override /optimizr: muon\n", 2, "did you mean `optimizer`?"),
        ("defaults:\n  - mine\n", 1, "build on each other"),
        ("hydra:\n  sweeper:\n    params:\n      optimizer.lrr: 1,2\n", 4, "did you mean `optimizer.lr`?"),
    ],
)
def test_mistake_in_a_recipe_is_named_with_file_and_line(cwd, text, line, message):
    write_recipe(text)
    block = refusal("+recipe=mine")
    assert message in block
    assert f"recipes/mine.yaml:{line}: " in block or "build on each other" in block


def test_letters_beyond_ascii_need_no_quotes(cwd):
    config = load(
        [QUICK, "run.name=größe", "model.architecture={a: [é, 'ü'], b: x}", "data.sources.0.path=a b/ö.jsonl"]
    )
    assert (config.run.name, config.model.architecture) == ("größe", {"a": ["é", "ü"], "b": "x"})
    assert config.data.sources[0].path == "a b/ö.jsonl"
    assert load([QUICK, 'run.name="größe, schön"']).run.name == "größe, schön"


def test_recipe_file_may_have_letters_beyond_ascii(cwd):
    path = write_recipe("# mine\ndefaults: [quickstart]\n", "früh")
    assert load(["+recipe=früh"]).run.name == "früh"
    assert load([f"+recipe={path.rename('später.yaml')}"]).run.name == "später"


@pytest.mark.parametrize("spelling", ["data.sources[0].path=x y.jsonl", "data.sources.[0].path=x y.jsonl"])
def test_index_in_brackets_is_refused_with_the_right_key(cwd, spelling):
    assert refusal(QUICK, spelling).endswith("counted from 0: data.sources.0.path=x y.jsonl")


def test_data_that_only_the_recipe_s_folder_has_is_read_from_there(cwd, capsys):
    write_recipe(
        "# mine\ndata:\n  sources: [{path: both.jsonl}, {path: beside.jsonl}, {path: org/name}]\n"
        "  eval_sources: [{path: 'held*.jsonl'}]\n  questions: {path: q.jsonl}\n"
    )
    for name in ("both.jsonl", "recipes/both.jsonl", "recipes/beside.jsonl", "recipes/held1.jsonl"):
        (cwd / name).write_text("{}")
    data = load(["+recipe=mine"]).data
    assert [source.path for source in data.sources] == ["both.jsonl", "recipes/beside.jsonl", "org/name"]
    assert (data.eval_sources[0].path, data.questions.path) == ("recipes/held*.jsonl", "q.jsonl")
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2, "a line for each path that was found beside the recipe"
    assert f"recipes/mine.yaml: beside.jsonl is not in {cwd}, so recipes/beside.jsonl is read." in notes[0]
    assert load(["+recipe=mine", "data.sources.0.path=beside.jsonl"]).data.sources[0].path == "beside.jsonl"
