"""Which optimizer is refused on which machine, and why."""

from __future__ import annotations

import pytest
from support.architectures import enable

from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.optim import config as optimizer_config
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.training.builder import RunBuilder

GPU = Facts(device="cuda", dtype="bfloat16", packages={"bitsandbytes": "1", "torchao": "1"})


def reasons(facts=GPU, **options):
    return list(optimizer_config.refusals(OptimizerConfig(**options), facts))


def facts(**changes):
    return Facts(**{**vars(GPU), **changes})


EIGHT, APEX = OptimizerName.adamw_8bit, OptimizerName.apex_adamw


REFUSED = [
    (
        facts(packages={}),
        dict(name=EIGHT),
        ["adamw_8bit needs torchao, which is not installed", "pip install 'fxtune[quant]'"],
    ),
    (GPU, dict(name=APEX), ["FusedAdam of Apex. NVIDIA's Apex is not installed"]),
    (facts(packages={"apex": "0.9"}), dict(name=APEX), ["no CUDA extensions (amp_C): it is PyPI's"]),
    (Facts(), dict(name=APEX), ["runs on a GPU, and the device is cpu"]),
    (GPU, dict(name=OptimizerName.muon, stochastic_rounding=True), ["muon does not have it"]),
    (facts(dtype="float32"), dict(stochastic_rounding=True), ["for bfloat16 weights, and these are float32"]),
    (facts(techniques=enable(lora={})), dict(stochastic_rounding=True), ["adapters are trained in float32"]),
    (
        facts(degrees=Degrees(shard=2)),
        dict(name=EIGHT),
        ["another number of ranks could not read a checkpoint of divided weights"],
    ),
]


@pytest.mark.parametrize(("known", "options", "parts"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_say_what_to_change(known, options, parts, monkeypatch):
    monkeypatch.setattr(optimizer_config, "c_compiler", lambda: "/usr/bin/gcc")
    (reason,) = reasons(known, **options)
    assert reason.startswith("optimizer.")
    assert all(part in reason for part in parts), reason


def test_supported_optimizers_are_not_refused(monkeypatch):
    monkeypatch.setenv("CC", "true")
    for name in OptimizerName:
        packages = {**GPU.packages, "nvidia-apex": "0.1", "schedulefree": "1.4"}
        assert not reasons(facts(packages=packages), name=name)
    assert not reasons(stochastic_rounding=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in reasons(stochastic_rounding=True)[0]
    assert not reasons(name=EIGHT), "bitsandbytes compiles nothing"


def test_options_an_optimizer_reads_may_be_changed():
    for name, options in (
        ("adamw", dict(betas=[0.9, 0.95], eps=1e-6)),
        ("sgd", dict(momentum=0.0)),
        ("lion", dict(betas=[0.9, 0.99])),
        ("adamw_8bit", dict(betas=[0.9, 0.95], eps=1e-6)),
        ("muon", dict(momentum=0.95, betas=[0.9, 0.95], eps=1e-6)),
    ):
        assert not reasons(Facts(packages={"torchao": "1"}), name=OptimizerName(name), **options), name


def test_library_of_adamw_8bit():
    assert optimizer_config.library(OptimizerConfig(name=EIGHT), GPU) == "bitsandbytes"
    assert optimizer_config.library(OptimizerConfig(name=EIGHT, stochastic_rounding=True), GPU) == "torchao"
    assert optimizer_config.library(OptimizerConfig(name=EIGHT), facts(packages={"torchao": "1"})) == "torchao"


def test_run_is_refused_with_optimizer_and_technique_reasons_together():
    config = Config()
    config.optimizer.name, config.optimizer.stochastic_rounding = OptimizerName.lion, True
    config.techniques.checkpointing.enabled, config.techniques.checkpointing.every = True, 99
    with pytest.raises(ConfigError) as refused:
        RunBuilder(config)
    text = str(refused.value)
    assert "techniques.checkpointing.every: 99 must be at most" in text
    assert "optimizer.stochastic_rounding: lion does not have it" in text
    assert "optimizer.stochastic_rounding: it is for bfloat16 weights, and these are float32" in text
