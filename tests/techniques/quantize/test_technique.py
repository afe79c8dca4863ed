"""A base in 4 or 8 bits as a whole: how close it is, what trains, and what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.architectures import built, facts_of, logits, lora, prepared_model, random_model, trained
from support.quantized import WIDE, kinds, qlora
from support.runs import losses, same_export

from fxtune.export.save import save_model
from fxtune.facts.options import Autocast, DType
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.outputs.merge import merge
from fxtune.techniques.pipeline import make_probe
from fxtune.techniques.quantized_modules import dequantized, is_quantized
from fxtune.training import trainer


@kinds
def test_a_quantized_model_is_close_to_its_base_and_trains_only_adapters(kind):
    model = random_model("llama", **WIDE)
    pipeline, notes = qlora(kind).resolved(facts_of(model))
    assert not [note for note in notes if note.startswith("quantize")], "no option was auto"
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    evidence = pipeline.prove(prepared, make_probe(mine))
    assert [one.acted for one in evidence if one.technique == "quantize"] == [True] * 3
    assert "14 in " in next(one.observed for one in evidence if one.technique == "quantize")
    assert any("of 378,496 parameters trained" in one.observed for one in evidence), (
        "packed weights count by their logical size"
    )
    assert not is_quantized(mine.get_output_embeddings())
    exact = logits(built(lora(), model))
    lost = ((logits(mine) - exact).norm() / exact.norm()).item()
    assert 0 < lost < (0.3 if "nf4" in kind else 0.03)
    mine.train()
    mine(**make_probe(mine)).logits.logsumexp(-1).sum().backward()
    assert {name for name, parameter in mine.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in mine.named_parameters() if "lora_" in name
    }


@kinds
def test_gradients_equal_the_dequantized_model_also_after_evaluation_and_generation(kind):
    model = random_model("llama", **WIDE)
    mine, plain = trained(built(qlora(kind), model)), built(lora(), model)
    with torch.no_grad():
        ours = dict(mine.named_modules())
        for name, module in plain.named_modules():
            if is_quantized(ours[name]):
                module.weight.copy_(dequantized(ours[name]))
        adapters = dict(mine.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapters[name])
    torch.testing.assert_close(logits(mine), logits(plain), rtol=0, atol=1e-5)
    given = dict(inputs=torch.arange(3, 8).unsqueeze(0), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(mine.generate(**given), plain.generate(**given))
    gradients = []
    for one in (mine, plain):
        one.train()
        one.zero_grad()
        one(**make_probe(one)).logits.logsumexp(-1).sum().backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in one.parameters() if parameter.requires_grad])
        )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), [("nf4", {"dora": True}), ("int8", {"modules_to_save": ["lm_head"]})])
def test_the_adapter_loads_and_merges_onto_the_plain_base(kind, options, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(base))
    prepared = prepared_model(qlora(kind, **options), model)
    mine = trained(prepared.module)
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    weights = {name: parameter for name, parameter in theirs.named_parameters() if "lora_" in name}
    ours = dict(mine.named_parameters())
    assert weights
    assert all(torch.equal(parameter, ours[name]) for name, parameter in weights.items())
    assert (logits(theirs) - logits(mine)).norm() < 0.4 * logits(mine).norm()
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, tmp_path / "merged"), dtype="auto")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_resumed_quantized_run_ends_with_the_same_bits(kind, narrow, cwd, monkeypatch):
    narrow.techniques.quantize = qlora(kind).quantize
    narrow.techniques.quantize.compute_dtype = DType.auto
    narrow.techniques.precision.autocast = Autocast.bfloat16
    narrow.data.packing, narrow.checkpoint.every, narrow.run.dir = True, 2, "whole"
    narrow.train.max_steps, narrow.train.global_batch_size, narrow.train.micro_batch_size = 5, 2, 1
    trainer.run(narrow)
    real, seen = trainer.Steps.take, []

    def dying(self, step, lr):
        seen.append(step.index)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(self, step, lr)

    monkeypatch.setattr(trainer.Steps, "take", dying)
    narrow.run.dir = "broken"
    with pytest.raises(KeyboardInterrupt):
        trainer.run(narrow)
    trainer.run(narrow)
    assert seen == [0, 1, 2, 3, 2, 3, 4]
    assert losses(Path("broken")) == losses(Path("whole"))
    assert same_export("whole", "broken")


def test_auto_computes_in_the_dtype_of_the_other_matmuls():
    model = random_model("llama", **WIDE)
    given = qlora(compute=DType.auto)
    given.precision.autocast = Autocast.bfloat16
    chosen, notes = given.resolved(facts_of(model))
    assert chosen.quantize.compute_dtype is DType.bfloat16
    assert "quantize: matmuls run in bfloat16 like the rest of the model" in notes
