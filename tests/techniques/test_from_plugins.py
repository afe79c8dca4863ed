"""Techniques of plugins: their place in the order, the methods that are called, and their evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.architectures import CPU, facts_of, random_model

from fxtune import plugins
from fxtune.errors import ConfigError
from fxtune.models.load import load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe

CODE = """
from dataclasses import dataclass, field

import fxtune


@fxtune.technique("scaled")
@dataclass
class Scaled(fxtune.Technique):
    by: float = field(default=2.0, metadata={"above": 0})
    size: str = "auto"

    def check(self, facts):
        if self.by > 8:
            yield f"by: {self.by:g} is too much. Use 8 or less."

    def resolve(self, facts):
        self.size = "large"
        return "size large"

    def configure(self, hf_config):
        hf_config.bos_token_id = 7

    def apply(self, model, world):
        model.scaled_by, model.seen = self.by, hasattr(model, "peft_config")
        return model

    def verify(self, model, probe):
        yield fxtune.Evidence("scaled", f"by {self.by:g}", f"by {model.scaled_by:g}", model.scaled_by == self.by)


@fxtune.technique("plain")
class Plain:
    pass
"""


@pytest.fixture
def plugin(cwd):
    Path("mine.py").write_text(CODE)
    with plugins.files_used(["mine.py"]):
        yield


def using(**options) -> Pipeline:
    pipeline = Pipeline()
    pipeline.lora.enabled = True
    pipeline.plugins = type(pipeline.plugins)(use=options)
    return pipeline


def test_technique_is_asked_all_questions_after_the_adapters(plugin):
    model = random_model("llama")
    facts = facts_of(model)
    chosen, notes = using(scaled={"by": 3.0}).resolved(facts)
    assert "plugins: scaled: size large" in notes
    assert chosen.options()["plugins"]["use"] == {"scaled": {"enabled": True, "by": 3.0, "size": "large"}}
    prepared = assemble(chosen, model, load_config(model), CPU, 0)
    built = prepared.module
    assert built.config.bos_token_id == 7
    assert built.seen, "the model has its adapters"
    evidence = [
        observation for observation in chosen.prove(prepared, make_probe(built)) if observation.technique == "scaled"
    ]
    assert [observation.observed for observation in evidence] == ["by 3"]
    names = [name for name, _ in chosen.enabled()]
    assert names.index("lora") + 1 == names.index("plugins")


def test_reasons_of_a_technique_name_its_key(plugin):
    with pytest.raises(ConfigError, match=r"techniques\.plugins\.use\.scaled\.by: 9 is too much"):
        using(scaled={"by": 9.0}).resolved(facts_of(random_model("llama")))


def test_class_that_is_no_technique_is_refused(plugin):
    with pytest.raises(ConfigError, match=r"mine\.py: the technique `plain` is no dataclass that derives from"):
        using(plain={}).resolved(facts_of(random_model("llama")))


def test_no_technique_of_a_plugin_is_the_default():
    pipeline, _ = Pipeline().resolved(facts_of(random_model("llama")))
    assert "plugins" not in dict(pipeline.enabled())
    assert "plugins" not in pipeline.options()
