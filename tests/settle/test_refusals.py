"""fxtune.settle.refusals: `fxtune plan` and training refuse the same configs, before a weight is read."""

from __future__ import annotations

import pytest
from support.architectures import on_disk, tiny_model
from support.mxfp4 import in_mxfp4

from fxtune.config.compose import load as compose
from fxtune.errors import ConfigError
from fxtune.estimate.machines import machine
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.run_forecast import forecast_run

WORDS = (
    "model.tokenizer=builtin:tiny",
    "model.path=null",
    "model.init=random",
    "model.architecture={model_type:llama,hidden_size:64,intermediate_size:96,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2}",
    "data.sequence_length=64",
    "run.device=cpu",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.moments=bfloat16"], "optimizer.moments: bfloat16 is read by adamw with stochastic_rounding=true"),
        (["optimizer.lr_vision=1e-5"], "optimizer.lr_vision: llama reads no images. Set it to null."),
        (["optimizer.name=lion", "optimizer.lr=auto"], "optimizer.lr: auto has a rule for AdamW and none for lion"),
    ],
)
def test_a_plan_and_training_refuse_the_same(words, message, chats):
    config = compose([*WORDS, f"data.sources=[{{path: {chats}}}]", *words])
    for refuse in (lambda: forecast_run(config, machine("H200", 128), 1, None), lambda: RunBuilder(config)):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.shard=2"], r"parallel\.shard=2: weights with rows for model\.add_tokens cannot grow"),
        (
            ["techniques=[qlora]", "techniques.quantize.type=fp8", "techniques.quantize.head=true"],
            "stored in fp8, and model.add_tokens",
        ),
    ],
)
def test_tokens_are_not_added_where_the_tables_cannot_grow_or_learn(words, message, chats):
    config = compose([*WORDS, f"data.sources=[{{path: {chats}}}]", "model.add_tokens=['<|new|>']", *words])
    with pytest.raises(ConfigError, match=message):
        forecast_run(config, machine("H200", 128), 2, None)


def test_ranks_that_divide_weights_start_over_experts_in_mxfp4_only_if_these_stay_so(tmp_path):
    folder = on_disk(tmp_path / "base", model=tiny_model("gpt_oss"))
    in_mxfp4(folder)
    words = [f"model.path={folder}", "data.sequence_length=64", "run.device=cpu", "parallel.shard=2"]
    with pytest.raises(ConfigError, match=r"parallel\.shard=2: .* in MXFP4"):
        forecast_run(compose(words), machine("H200", 128), 2, None)
    kept = ["techniques.lora.enabled=true", "techniques.quantize.enabled=true", "techniques.quantize.type=mxfp4"]
    forecast_run(compose([*words, *kept]), machine("H200", 128), 2, None)
