"""A built model: each fact about it is a field, and no module of another library carries one."""

from __future__ import annotations

from support.architectures import built, on_disk, prepared_model
from support.mixtures import mixture

from fxtune.facts.options import Switch, WeightFormat
from fxtune.models.load import ModelConfig
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.technique import Quantize

OF_LIBRARIES = {"name_or_path", "is_loaded_in_4bit", "is_loaded_in_8bit", "peft_config", "active_adapter"}
"""Attributes of a model that transformers and peft read."""


def test_the_facts_of_a_built_model_are_fields(tmp_path):
    model = ModelConfig(path=str(on_disk(tmp_path / "base")))
    pipeline = Pipeline(lora=Lora(True, r=4, fused=Switch.on), quantize=Quantize(True, WeightFormat.nf4))
    pipeline.quantize.compute_dtype = type(pipeline.quantize.compute_dtype).float32
    made = prepared_model(pipeline, model)
    assert made.targets is not None
    assert len(made.targets.modules) == 14
    assert made.fusion is not None
    assert made.fusion.operators == {"attention": 2, "mlp": 2, "linear": 2}
    assert made.quantization is not None
    assert (made.quantization.linears, made.quantization.experts) == (14, 0)
    assert made.base_answer is not None
    assert not made.config_edited
    plain = built(Pipeline(), model)
    base = made.module.get_base_model()
    assert vars(base).keys() - vars(plain).keys() <= OF_LIBRARIES


def test_a_mixture_has_routers_and_its_base_carries_none():
    made = prepared_model(Pipeline(), mixture("qwen3_moe"), packing=False)
    assert made.routers is not None
    assert len(made.routers.modules) == 2
    assert not any("routers" in vars(module) for module in made.module.modules())


def test_work_beside_the_module_runs_as_it_is_where_weights_are_whole():
    made = prepared_model(Pipeline(), mixture("qwen3_moe"), packing=False)
    assert made.sharding is None
    assert made.with_head(lambda: "done") == "done"
