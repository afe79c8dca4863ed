"""A saved model with scaled RoPE gives the same logits wherever it is loaded, or an error."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import CPU, SIZES, facts_of, lora, on_disk, prepared_model, trained
from support.runs import history

from fxtune.cli import evaluate
from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.facts.options import RopeType
from fxtune.models.load import ModelConfig, load_config, load_tokenizer
from fxtune.outputs.merge import merge
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.rope import Rope
from fxtune.training import trainer

LONG = 4 * SIZES["max_position_embeddings"] - 6
KINDS = ("adapter", "merged", "model")


def yarned(**options) -> Rope:
    return Rope(enabled=True, **{"factor": 4.0, **options})


def at_length(model, length: int = LONG) -> torch.Tensor:
    ids = ((torch.arange(length) * 7919 + 3) % SIZES["vocab_size"]).unsqueeze(0)
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def tuned(base: Path, folder: Path, kind: str, rope: Rope | None = None):
    """A trained model with scaled RoPE, and its folder."""
    model, pipeline = ModelConfig(path=str(base)), Pipeline() if kind == "model" else lora()
    pipeline.rope = rope or yarned()
    prepared = prepared_model(pipeline, model, sequence_length=LONG)
    mine = trained(prepared.module)
    saved = save_model(prepared, load_tokenizer(model), folder / ("adapter" if kind == "merged" else kind))
    return mine, merge(saved, folder / "merged") if kind == "merged" else saved


def loading_lines(folder: Path) -> str:
    """The Python code in the model card."""
    return (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]


@pytest.mark.slow
def test_loading_code_gives_same_long_logits_without_fxtune(base, tmp_path):
    """For an adapter, a merged model and a fully tuned model, each loaded by the code in its card, without fxtune."""
    wanted = {kind: tuned(base, tmp_path / kind, kind) for kind in KINDS}
    script = "import os, sys, torch\n"
    for kind, (_, folder) in wanted.items():
        script += (
            f"os.chdir({str(folder)!r})\n{loading_lines(folder)}"
            f"ids = ((torch.arange({LONG}) * 7919 + 3) % {SIZES['vocab_size']}).unsqueeze(0)\n"
            f"torch.save(model.eval()(input_ids=ids).logits.detach(), {str(tmp_path / (kind + '.pt'))!r})\n"
        )
    script += "assert 'fxtune' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    for kind, (mine, _) in wanted.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{kind}.pt"), at_length(mine), rtol=0, atol=1e-5, msg=kind)
        config = json.loads((tmp_path / kind / kind / "config.json").read_text())
        assert config["max_position_embeddings"] == 4 * SIZES["max_position_embeddings"]
        assert config["rope_parameters"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": SIZES["max_position_embeddings"],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "rope_theta": 10000.0,
        }


@pytest.mark.vital
def test_other_ways_to_load_adapter_are_right_or_fail_or_are_in_the_card(base, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoConfig, AutoModelForCausalLM

    mine, folder = tuned(base, tmp_path, "adapter")
    wanted = at_length(mine)
    own = AutoModelForCausalLM.from_pretrained(base, config=AutoConfig.from_pretrained(folder))
    own.load_adapter(str(folder))  # how transformers itself loads adapters
    torch.testing.assert_close(at_length(own), wanted, rtol=0, atol=1e-5)
    with pytest.raises(OSError, match=r"model\.safetensors"):  # transformers takes a config.json to mean a full model
        AutoModelForCausalLM.from_pretrained(folder)
    card = (folder / "README.md").read_text()
    if not torch.allclose(at_length(AutoPeftModelForCausalLM.from_pretrained(folder)), wanted, rtol=0, atol=1e-5):
        assert (
            "AutoPeftModelForCausalLM.from_pretrained(folder)` does, the model runs unscaled, without a warning"
            in card
        )


def test_vllm_command_has_scaling_length_and_rank(base, tmp_path):
    def command(folder: Path) -> list[str]:
        return shlex.split(
            (folder / "README.md").read_text().split("```bash\n")[1].split("```")[0].replace("\\\n", "")
        )

    mine, adapter = tuned(base, tmp_path / "yarn", "adapter")
    words = command(adapter)
    assert words[:3] == ["vllm", "serve", str(base.resolve())]
    assert words[words.index("--lora-modules") + 1] == "tuned=."
    assert words[words.index("--max-lora-rank") + 1] == "8"  # the smallest that vLLM takes for r=4
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"rope_parameters": mine.config.rope_parameters}
    assert words[-2:] == ["--max-model-len", "256"]
    merged = ["vllm", "serve", ".", "--max-model-len", "256", "--dtype", "float32"]  # vLLM would take 16 bits
    assert command(merge(adapter, tmp_path / "yarn" / "merged")) == merged
    _, llama3 = tuned(base, tmp_path / "llama3", "adapter", Rope(enabled=True, type=RopeType.llama3, factor=4.0))
    words = command(llama3)
    assert json.loads(words[words.index("--hf-overrides") + 1])["max_position_embeddings"] == 256
    _, dynamic = tuned(base, tmp_path / "dynamic", "adapter", Rope(enabled=True, type=RopeType.dynamic, factor=4.0))
    assert "its results differ" in (dynamic / "README.md").read_text()
    assert "vllm serve" not in (dynamic / "README.md").read_text()
    pipeline = lora(dora=True)
    pipeline.rope = yarned()
    dora = save_model(
        prepared_model(pipeline, ModelConfig(path=str(base))),
        load_tokenizer(ModelConfig(path=str(base))),
        tmp_path / "dora",
    )
    assert "fxtune merge . ../merged" in (dora / "README.md").read_text()
    plain = save_model(
        prepared_model(lora(), ModelConfig(path=str(base))),
        load_tokenizer(ModelConfig(path=str(base))),
        tmp_path / "plain",
    )
    assert "vllm" not in (plain / "README.md").read_text()


def test_model_built_on_adapter_gets_its_rope_scaling(base, tmp_path):
    """Without a RoPE setting the adapter's scaling is used. The same setting changes nothing, another is refused."""
    mine, folder = tuned(base, tmp_path, "adapter")
    model = ModelConfig(path=str(base), adapter=str(folder))
    silent, again, other = lora(), lora(), lora()
    again.rope, other.rope = yarned(), yarned(factor=8.0)
    for pipeline in (silent, again):
        ready, notes = pipeline.resolved(facts_of(model, sequence_length=LONG))
        prepared = assemble(ready, model, load_config(model), CPU, 0)
        one = prepared.module
        ready.prove(prepared, make_probe(one))
        torch.testing.assert_close(at_length(one), at_length(mine), rtol=0, atol=1e-5)
        assert one.config.max_position_embeddings == 256
        assert bool([note for note in notes if "own scaling, yarn (factor=4.0" in note]) == (pipeline is silent)
    with pytest.raises(
        ConfigError, match=r"already scales its RoPE \(yarn, factor=4.0, original_max_position_embeddings=64\)"
    ):
        other.resolved(facts_of(model, sequence_length=LONG))
    with pytest.raises(ConfigError, match="beyond the 256 positions"):
        silent.resolved(facts_of(model, sequence_length=257))
    other.rope.original_max_position_embeddings = 64  # named, it is replaced knowingly: an extension by steps
    further, _ = other.resolved(facts_of(model, sequence_length=512))
    assert assemble(further, model, load_config(model), CPU, 0).module.config.max_position_embeddings == 512


def test_scaling_a_scaled_model_alike_changes_nothing(base, tmp_path):
    for kind in (RopeType.yarn, RopeType.linear, RopeType.llama3, RopeType.dynamic):
        rope = Rope(enabled=True, type=kind, factor=4.0)
        _, folder = tuned(base, tmp_path / kind.value, "model", rope)
        model, pipeline = ModelConfig(path=str(folder)), Pipeline()
        pipeline.rope = rope
        config = load_config(model)
        before = config.to_dict()
        pipeline.check(facts_of(model, sequence_length=200))
        pipeline.rope.configure(config)
        assert config.to_dict() == before, kind
        prepared = prepared_model(pipeline, model)
        one = prepared.module
        assert all(evidence.acted for evidence in pipeline.rope.verify(prepared, make_probe(one)))


def test_adapter_of_other_model_or_with_broken_config_is_refused(base, tmp_path):
    _, folder = tuned(base, tmp_path, "adapter")
    other = on_disk(tmp_path / "other", "qwen3")
    with pytest.raises(ConfigError, match="was trained on a llama model, and its base here is a qwen3"):
        load_config(ModelConfig(path=str(other), adapter=str(folder)))
    (folder / "config.json").write_text("{")
    with pytest.raises(StorageError, match=r"config\.json cannot be used.*complete copy of the adapter"):
        load_config(ModelConfig(path=str(base), adapter=str(folder)))


@pytest.mark.slow
def test_evaluation_uses_rope_scaling_of_adapter(small, cwd, capsys):
    """Rows are longer than the base's context. Without a RoPE setting the loss is that of the run."""
    small.data.eval_fraction, small.data.packing, small.data.sequence_length = 0.1, True, 640
    small.techniques.rope = Rope(enabled=True, factor=2.0)
    small.run.dir, small.train.max_steps, small.train.micro_batch_size, small.train.global_batch_size = (
        str(cwd / "run"),
        1,
        1,
        1,
    )
    trainer.run(small)
    loss = next(line["eval/loss"] for line in history(cwd / "run") if "eval/loss" in line)
    capsys.readouterr()
    tuned = replace(small, model=replace(small.model, adapter=str(cwd / "run" / "adapter")))
    for rope in (Rope(), Rope(enabled=True, factor=2.0)):
        figures = evaluate.run(replace(tuned, techniques=replace(tuned.techniques, rope=rope)))
        assert figures["eval/loss"] == pytest.approx(loss, rel=1e-6)
        assert ("rope: the model's own scaling, yarn (factor=2.0" in capsys.readouterr().out) == (not rope.enabled)
    with pytest.raises(ConfigError, match="already scales its RoPE"):
        evaluate.run(replace(tuned, techniques=replace(tuned.techniques, rope=Rope(enabled=True, factor=4.0))))
    with pytest.raises(ConfigError, match="beyond the 512 positions"):
        evaluate.run(replace(small, techniques=replace(small.techniques, rope=Rope())))
