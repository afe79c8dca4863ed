"""Keys that nothing would read are refused, or named in a line of the run."""

from __future__ import annotations

import pytest
from support.recipes import QUICK, refusal

from fxtune.config.compose import load
from fxtune.config.needs import NEEDS, unread, unread_warnings
from fxtune.config.root import Config

REFUSED = [
    (["schedule.name=linear", "schedule.decay_steps=5"], "schedule.decay_steps=5.0", "schedule.name=wsd"),
    (["schedule.name=constant", "schedule.min_lr_ratio=0.1"], "schedule.min_lr_ratio=0.1", "cosine|linear|wsd"),
    (["data.mix.threshold=100"], "data.mix.threshold=100", "data.mix.long_share"),
    (["data.dedup=exact", "data.dedup_similarity=0.5"], "data.dedup_similarity=0.5", "data.dedup=near"),
    (["data.share_prompts=true"], "data.share_prompts=true", "an objective over answers to a prompt"),
    (["train.eval_share=0.1"], "train.eval_share=0.1", "train.eval_every or train.stop.patience"),
    (["train.stop.min_delta=0.1"], "train.stop.min_delta=0.1", "train.stop.patience"),
    (["train.stop.metric=exact_match"], "train.stop.metric=exact_match", "train.stop.patience"),
    (["optimizer.momentum=0.5"], "optimizer.momentum=0.5", "optimizer.name=sgd|muon"),
    (["optimizer.name=sgd", "optimizer.betas=[0.9,0.95]"], "optimizer.betas=[0.9,0.95]", "optimizer.name=adamw|"),
    (["optimizer.name=lion", "optimizer.eps=1e-6"], "optimizer.eps=1e-06", "optimizer.name=adamw|"),
    (["objective=policy", "sampler.url=http://host", "sampler.venv=folder"], "sampler.venv=folder", "no sampler.url"),
    (["objective=policy", "sampler.turns=3"], "sampler.turns=3", "environment of a source"),
    *(
        ([f"sampler.{key}={value}"], f"sampler.{key}={value}", "objective=policy")
        for key, value in (
            ("name", "vllm"),
            ("url", "http://host"),
            ("venv", "folder"),
            ("arguments", "[a]"),
            ("answers", "3"),
            ("max_tokens", "3"),
            ("temperature", "0.5"),
            ("batch", "3"),
            ("request_seconds", "3.0"),
            ("request_seeds", "false"),
            ("ahead", "true"),
            ("sleep", "true"),
            ("reward_seconds", "3.0"),
            ("reward_workers", "3"),
        )
    ),
    (["loader.num_workers=0", "loader.prefetch_factor=2"], "loader.prefetch_factor=2", "loader.num_workers"),
]
WARNED = [
    (["data.questions.path=null", "data.on_overlap=drop"], "data.on_overlap=drop", "data.eval_sources"),
    (["data.eval_limit=5"], "data.eval_limit=5", "data.eval_fraction"),
    (["eval.limit=5"], "eval.limit=5", "eval.tasks"),
    (["model.revision=main"], "model.revision=main", "a hub id in model.path"),
    (["data.questions.path=null", "data.questions.show=1"], "data.questions.show=1", "data.questions.path"),
    (["data.questions.path=null", "data.general=[{path: my.txt}]"], "data.general=[{path: my.txt}]", "held-out data"),
    (["data.general=[]", "refresh.forgotten=0.01"], "refresh.forgotten=0.01", "data.general"),
    (["tracking.wandb.project=mine"], "tracking.wandb.project=mine", "tracking.wandb.mode=auto|online|offline"),
    (
        ["data.eval_sources=[{path: 'builtin:quickstart_test'}]", "data.eval_fraction=0.1", "data.eval_limit=5"],
        "data.eval_fraction=0.1",
        "data.eval_sources=[]",
    ),
]


@pytest.mark.parametrize(("words", "key", "setting"), REFUSED, ids=lambda value: str(value) if value else None)
def test_a_key_that_nothing_reads_is_refused_with_what_it_needs(words, key, setting):
    message = refusal(QUICK, *words)
    (line,) = [line for line in message.splitlines() if "is not read without" in line]
    assert f"`{key}` is not read without" in line
    assert setting in line


@pytest.mark.parametrize(("words", "key", "setting"), WARNED, ids=lambda value: str(value) if value else None)
def test_options_of_a_section_that_is_off_give_a_line(words, key, setting):
    (line,) = [line for line in unread_warnings(load([QUICK, *words])) if line.startswith(key)]
    assert setting in line


def test_every_need_is_tested():
    tested = {key.partition("=")[0] for _, key, _ in (*REFUSED, *WARNED)}
    sections = {need.key.rpartition(".")[0] for need in NEEDS if need.warns}
    refused = {need.key for need in NEEDS if not need.warns}
    assert refused <= tested
    assert sections <= {key.rpartition(".")[0] for key in tested}


def test_defaults_need_nothing():
    assert not [*unread(Config()), *unread_warnings(Config())]
