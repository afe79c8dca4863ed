"""techniques.quantize.type=fp8 without its speed: what it refuses, stores, computes and saves, on a CPU.

check() refuses a CPU, so these tests call assemble(), and products run by the plain reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.architectures import CPU, built, facts_of, logits, lora, on_disk, random_model, trained
from support.cases import slow_but

from fxtune.estimate.memory import forecast
from fxtune.estimate.weights import linear_bytes
from fxtune.export.save import save_model
from fxtune.facts.options import AdapterInit, Autocast, DType, WeightFormat
from fxtune.facts.recomputation import RecomputePlan
from fxtune.kernels.fp8 import dequantize_weight
from fxtune.kernels.linear_cross_entropy import linear_cross_entropy
from fxtune.models.load import ModelConfig, load_config, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.language_model import LanguageModel
from fxtune.outputs.merge import merge
from fxtune.techniques.assemble import assemble
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize.technique import Quantize
from fxtune.techniques.quantized_modules import (
    bytes_per_weight,
    dequantized,
    head_of,
    is_quantized,
    quantized,
    stored_bytes,
)

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
H200 = dict(device="cuda", device_name="NVIDIA H200", capability=(9, 0), dtype="bfloat16")
both = pytest.mark.parametrize("fused", ["on", "off"])


def fp8(fused: str = "off", compute: DType = DType.float32, skip: tuple[str, ...] = (), **options: Any) -> Pipeline:
    pipeline = lora(**options)
    pipeline.lora.fused = type(pipeline.lora.fused)(fused)
    pipeline.quantize = Quantize(True, WeightFormat.fp8, compute_dtype=compute, skip=list(skip))
    return pipeline


def prepared_model(pipeline: Pipeline, model: ModelConfig) -> PreparedModel:
    """support's prepared_model() without check()."""
    return assemble(pipeline, model, load_config(model), CPU, 0)


def made(pipeline: Pipeline, model: ModelConfig) -> Any:
    return prepared_model(pipeline, model).module


def test_an_fp8_linear_computes_with_its_dequantized_weight_up_to_input_rounding():
    torch.manual_seed(0)
    source = torch.nn.Linear(512, 384, bias=True)
    mine = quantized(source, "fp8", torch.float32, CPU.device)
    weight = dequantized(mine)
    assert 0.02 < (weight - source.weight).norm() / source.weight.norm() < 0.03
    # Numbers of three bits of mantissa are not rounded.
    ours = torch.randint(-7, 8, (2, 5, 512)).float()
    ours[..., 0] = 7 * 64
    ours.requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    output, expected = mine(ours), torch.nn.functional.linear(plain, weight, source.bias)
    assert (output - expected).norm() < 3e-3 * expected.norm(), "only bfloat16's rounding"
    output.sum().backward()
    expected.sum().backward()
    assert (ours.grad - plain.grad).norm() < 3e-3 * plain.grad.norm()
    assert not any(parameter.requires_grad for parameter in mine.parameters())


@both
def test_an_fp8_model_is_close_to_its_base_and_trains_only_adapters(fused):
    model = random_model("llama", **WIDE)
    pipeline = fp8(fused)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    evidence = [one for one in pipeline.verify(prepared, make_probe(mine)) if one.technique == "quantize"]
    assert [one.acted for one in evidence] == [True, True, True, False], "on a CPU no product is in fp8"
    assert evidence[0].observed.startswith("14 in fp8, ")
    assert evidence[3].observed.startswith("0 of torch's scaled products")
    assert not is_quantized(mine.get_output_embeddings())
    exact = logits(built(lora(), model))
    assert 0 < (logits(mine) - exact).norm() / exact.norm() < 0.1
    mine.train()
    mine(**make_probe(mine)).logits.logsumexp(-1).sum().backward()
    assert {name for name, parameter in mine.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in mine.named_parameters() if "lora_" in name
    }
    assert {parameter.dtype for name, parameter in mine.named_parameters() if "lora_" in name} == {torch.float32}


def test_fused_and_peft_adapters_train_the_same_model():
    model = random_model("llama", **WIDE)
    mine, theirs = (made(fp8(fused), model) for fused in ("on", "off"))
    adapters = dict(trained(theirs).named_parameters())
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapters[name])
    torch.testing.assert_close(logits(mine), logits(theirs), rtol=0, atol=0.02)
    gradients = []
    for one in (mine, theirs):
        one.train()
        one.zero_grad()
        one(**make_probe(one)).logits.logsumexp(-1).sum().backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in one.parameters() if parameter.requires_grad])
        )
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()


@both
def test_fp8_weights_take_the_planned_bytes_and_groups_share_a_storage(fused):
    mine = made(fp8(fused), random_model("llama", **WIDE))
    linears = {
        name.rpartition(".")[2]: module
        for name, module in mine.get_base_model().model.layers[1].named_modules()
        if name.endswith("_proj")
    }
    bases = {name: linear.get_base_layer() for name, linear in linears.items()}
    for base in bases.values():
        planned = bytes_per_weight("fp8")
        assert stored_bytes(base) == pytest.approx(planned * base.in_features * base.out_features, rel=0.05)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in mine.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.dtype is torch.uint8
    }
    assert sum(held.values()) == 2 * 2 * sum(base.in_features * base.out_features for base in bases.values()), (
        "stored once"
    )
    together = {
        base.weight.untyped_storage().data_ptr() for name, base in bases.items() if name in ("gate_proj", "up_proj")
    }
    assert len(together) == (1 if fused == "on" else 2)


@both
def test_disabled_adapters_leave_the_quantized_base(fused):
    model = random_model("llama", **WIDE)
    mine = made(fp8(fused), model)
    fresh = logits(mine)
    changed = logits(trained(mine))
    assert (changed - fresh).norm() > 0.01 * fresh.norm()
    with mine.disable_adapter():
        torch.testing.assert_close(logits(mine), fresh, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("fused", "options"),
    slow_but([("on", {}), ("off", {"modules_to_save": ["lm_head"]}), ("off", {"dropout": 0.1})], ("on", {})),
)
def test_the_adapter_loads_and_merges_onto_the_plain_base(fused, options, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", **WIDE)
    model = ModelConfig(path=str(base))
    prepared = trained(prepared_model(fp8(fused, **options), model))
    mine = prepared.module
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    assert "fp8" not in (adapter / "adapter_config.json").read_text()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    ours = dict(mine.named_parameters())
    weights = {name: parameter for name, parameter in theirs.named_parameters() if "lora_" in name}
    assert weights
    assert all(torch.equal(parameter, ours[name]) for name, parameter in weights.items())
    assert (logits(theirs) - logits(mine)).norm() < 0.15 * logits(mine).norm()
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, tmp_path / "merged"), dtype="auto")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_training_over_fp8_ends_at_the_loss_of_the_plain_base():
    """Forty steps on one batch: fp8 changes the loss by noise only."""
    model = random_model("llama", **WIDE)
    ids = torch.randint(3, 60, (4, 48), generator=torch.Generator().manual_seed(5))
    ends = {}
    for name, mine in (("plain", built(lora(r=8), model)), ("fp8", made(fp8("on", r=8), model))):
        mine.train()
        optimizer = torch.optim.AdamW(
            [parameter for parameter in mine.parameters() if parameter.requires_grad], lr=5e-3
        )
        losses = []
        for _ in range(40):
            loss = mine(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends[name] = losses
    assert ends["plain"][-1] < 0.8 * ends["plain"][0]
    assert ends["fp8"][-1] == pytest.approx(ends["plain"][-1], rel=0.02)


def ended(head: bool = True, embeddings: bool = True, **options: Any) -> Pipeline:
    pipeline = fp8("on", **options)
    pipeline.quantize.head, pipeline.quantize.embeddings = head, embeddings
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_fp8_head_and_embeddings_are_close_to_16_bits_and_share_codes_if_tied(tied):
    model = random_model("llama", **WIDE, tie_word_embeddings=tied)
    prepared, plain = prepared_model(ended(), model), made(fp8("on"), model)
    mine = prepared.module
    evidence = {one.asked: one for one in ended().verify(prepared, make_probe(mine)) if one.technique == "quantize"}
    ends = evidence["head and embeddings in fp8"]
    assert ends.acted
    assert ("head with the embeddings' codes" in ends.observed) is tied
    head, embedding = mine.get_output_embeddings(), mine.get_base_model().get_input_embeddings()
    assert (head.weight.data_ptr() == embedding.weight.data_ptr()) is tied
    assert {head.weight.dtype, embedding.weight.dtype} == {torch.uint8}
    lost = (logits(mine) - logits(plain)).norm() / logits(plain).norm()
    assert 0.01 < lost < 0.1
    assert next(one for one in ended().verify(prepared, make_probe(mine)) if one.technique == "precision").acted
    given = dict(inputs=torch.arange(3, 8).unsqueeze(0), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert mine.generate(**given).shape == (1, 9)


def test_an_fp8_head_in_the_fused_loss_has_the_gradient_of_the_plain_product():
    """The logits are those of the head's own forward pass; the hidden states' gradient is exact for the dequantized weight."""
    source = torch.nn.Linear(64, 96, bias=True)
    head = head_of(source, torch.float32, CPU.device)
    weight = dequantize_weight(head.weight, head.scales, torch.float32)
    hidden = (3 * torch.randn(40, 64)).requires_grad_()
    labels = torch.randint(0, 96, (40,))
    loss = linear_cross_entropy(hidden, head.weight, labels, head.bias, chunk_rows=16, fp8_scales=head.scales)
    loss.backward()
    own = torch.nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")
    assert loss.item() == pytest.approx(own.item(), rel=1e-2)
    (expected,) = torch.autograd.grad(own, hidden)
    assert (hidden.grad - expected).norm() < 0.02 * expected.norm()
    plain = hidden.detach().requires_grad_()
    exact = torch.nn.functional.cross_entropy(plain @ weight.t() + source.bias, labels, reduction="sum")
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.03)
    assert (hidden.grad - plain.grad).norm() < 0.1 * plain.grad.norm()
    torch.library.opcheck(torch.ops.fxtune.fp8_head.default, (plain, head.weight.t(), head.scales))


def test_a_model_with_an_fp8_head_trains_with_the_fused_loss():
    prepared = prepared_model(ended(), random_model("llama", **WIDE))
    for fused in (True, False):
        loss = LanguageModel(prepared, Liger(fused, ["fused_linear_cross_entropy"]))
        assert all(one.acted for one in loss.evidence), loss.evidence
        assert ("the head is frozen" in loss.evidence[0].observed) is fused
        assert not loss.own_forward


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("head", "embeddings"), [(False, False), (True, False), (True, True)])
def test_the_forecast_of_fp8_weights_is_right(tied, head, embeddings):
    model = random_model("llama", **WIDE, tie_word_embeddings=tied, vocab_size=4096)
    pipeline = ended(head, embeddings)
    pipeline.lora.fused = type(pipeline.lora.fused)("off")
    mine = made(pipeline, model)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in mine.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    facts = dataclasses.replace(facts_of(model), techniques=pipeline)
    assert forecast(facts, RecomputePlan()).weights == pytest.approx(
        sum(held.values()), rel=0.04
    )  # scales, at 128 a row


def refused(
    family: str = "llama",
    facts: dict | None = None,
    sizes: dict | None = None,
    full: bool = False,
    here: dict | None = None,
    **options: Any,
) -> str:
    pipeline = fp8(compute=DType.auto, **options)
    for name, value in (here or {}).items():
        setattr(pipeline.quantize, name, value)
    pipeline.lora.enabled = not full
    known = facts_of(random_model(family, **(sizes or {})), **{**H200, **(facts or {})})
    return "\n".join(pipeline.quantize.check(dataclasses.replace(known, techniques=pipeline)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"facts": {"device": "cpu"}},
            "type: fp8's products run on a GPU's tensor cores, and the device is cpu. Use nf4 or int8.",
        ),
        (
            {"facts": {"capability": (8, 0), "device_name": "NVIDIA A100"}},
            "type: fp8 needs compute capability 8.9, and NVIDIA A100 has 8.0. Use nf4 or int8.",
        ),
        (
            {"facts": {"dtype": "float32"}},
            "compute_dtype: fp8's products are bfloat16, and this asks for float32. Set "
            "techniques.precision.autocast=bfloat16 or model.dtype=bfloat16.",
        ),
        (
            {"here": {"compute_dtype": DType.float16}},
            "compute_dtype: fp8's products are bfloat16, and this asks for float16. Set it to auto or bfloat16.",
        ),
        ({"full": True}, "enabled: weights in fp8 cannot be trained, only adapters over them."),
        (
            {"init": AdapterInit.pissa},
            "enabled: techniques.lora.init=pissa moves a part of the weights into the adapter",
        ),
        (
            {"dora": True},
            "type: techniques.lora.dora=true measures the norms of the weights, and peft cannot read fp8's.",
        ),
        (
            {"sizes": {"intermediate_size": 88}},
            "type: fp8's products take sizes of a multiple of 16, and 6 linears have others, such "
            "as model.layers.0.mlp.gate_proj. Use nf4 or int8, or name them in skip.",
        ),
        ({"modules_to_save": ["down_proj"]}, "skip: techniques.lora.modules_to_save trains down_proj"),
        ({"skip": ("down_prj",)}, "skip: this model has no linear down_prj."),
        (
            {"here": {"type": WeightFormat.nf4, "head": True}},
            "head: nf4 quantizes only the other linears. Set it to false, or type to",
        ),
        (
            {"here": {"head": True}, "sizes": {"vocab_size": 100}},
            "head: a product in fp8 takes a plain linear with sizes of a",
        ),
        (
            {"here": {"embeddings": True}, "sizes": {"tie_word_embeddings": True}},
            "embeddings: this model's head and embeddings",
        ),
        (
            {"here": {"head": True}, "modules_to_save": ["lm_head"]},
            "head: techniques.lora trains lm_head, and fp8 weights are frozen",
        ),
        (
            {"here": {"head": True}, "train_tokens": ["a"]},
            "head: techniques.lora.train_tokens trains rows of lm_head",
        ),
        ({"facts": {"free_memory": 1000, "host_memory": 10**6}}, "or type=nf4."),
    ],
)
def test_check_refuses_with_what_to_change(options, reason):
    assert reason in refused(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"facts": {"capability": (8, 9)}},
        {"facts": {"capability": (10, 0)}},
        {"facts": {"packages": {}}},
        {"family": "gemma"},
        {"dropout": 0.1},
        {"modules_to_save": ["lm_head"]},
        {"skip": ("down_proj",)},
        {"here": {"head": True, "embeddings": True}},
        {"here": {"head": True, "embeddings": True}, "sizes": {"tie_word_embeddings": True}},
        {"sizes": {"intermediate_size": 88}, "skip": ("gate_proj", "up_proj", "down_proj")},
    ],
)
def test_check_accepts_what_can_run(options):
    assert refused(**options) == ""


def test_auto_is_resolved_by_the_compute_dtype():
    given = fp8(compute=DType.auto)
    given.precision.autocast = Autocast.bfloat16
    facts = facts_of(random_model("llama"), **{**H200, "dtype": "float32"})
    chosen, notes = given.resolved(facts)
    assert chosen.quantize.compute_dtype is DType.bfloat16
    assert (
        "quantize: torch multiplies the fp8 weights; their transposes are kept; matmuls run in bfloat16 like the rest "
        "of the model"
    ) in notes


@pytest.mark.parametrize(
    ("fused", "transpose"),
    [("on", True), ("off", False)],
)
@pytest.mark.slow
def test_a_large_model_is_quantized_row_by_row_as_it_is_read(fused, transpose, tmp_path, monkeypatch):
    """The same codes, adapters and logits as from a whole model in 16 bits."""
    base = on_disk(tmp_path / "base", model=random_model("llama", **WIDE))
    models, weights = [], {"drawn": random_model("llama", **WIDE), "read": ModelConfig(path=str(base))}
    for config in weights.values():
        for size in (1, 10**15):
            monkeypatch.setattr("fxtune.models.weights.bytes_of", lambda *_, size=size: size)
            pipeline = fp8(fused)
            pipeline.quantize.keeps_transposes, pipeline.quantize.head = transpose, True
            models.append(prepared_model(pipeline, config))
            evidence = [one for one in pipeline.verify(models[-1], make_probe(models[-1].module)) if not one.acted]
            assert [one.asked for one in evidence] == ["products in fp8"], "on a CPU no product is in fp8"
        whole, rows = (
            dict([*one.named_parameters(), *one.named_buffers()])
            for one in (prepared.module for prepared in models[-2:])
        )
        assert whole.keys() == rows.keys()
        assert all(torch.equal(tensor, rows[name]) for name, tensor in whole.items())
        assert torch.equal(logits(models[-2].module), logits(models[-1].module))


def test_auto_keeps_transposes_where_memory_is_ample():
    model = random_model("llama", **WIDE)
    weights = sum(base.weight.numel() for base in fp8_linears(made(fp8(), model)))
    for free, kept in ((9 * weights, True), (7 * weights, False)):
        chosen, notes = fp8(compute=DType.bfloat16).decided(facts_of(model, **H200, free_memory=free))
        assert chosen.quantize.keeps_transposes is kept
        note = next(note for note in notes if note.startswith("quantize"))
        assert ("the backward pass transposes them" in note) != kept
        assert linear_bytes(facts_of(model, techniques=chosen)) == bytes_per_weight("fp8", transpose=kept)


def fp8_linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_quantized(module)]


@pytest.mark.parametrize("fused", slow_but(["on", "off"], "on"))
def test_a_weight_without_its_transpose_takes_half_and_trains_the_same_model(fused):
    model = random_model("llama", **WIDE)
    gradients, outputs, stored = [], [], []
    for kept in (True, False):
        pipeline = fp8(fused)
        pipeline.quantize.keeps_transposes = kept
        prepared = prepared_model(pipeline, model)
        mine = prepared.module
        evidence = [one.acted for one in pipeline.verify(prepared, make_probe(mine)) if one.technique == "quantize"]
        assert evidence == [True, True, True, False], "on a CPU no product is in fp8"
        stored.append(sum(stored_bytes(module) for module in fp8_linears(mine)))
        outputs.append(logits(mine))
        mine.train()
        mine.zero_grad()
        mine(**make_probe(mine)).logits.logsumexp(-1).sum().backward()
        gradients.append(torch.cat([one.grad.flatten() for one in mine.parameters() if one.requires_grad]))
    assert stored[1] < 0.52 * stored[0]
    assert torch.equal(*outputs)
    assert 0 < (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()
