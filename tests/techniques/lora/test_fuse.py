"""Fused adapters: the losses, gradients, names and files of plain peft; what cannot be fused is peft's, and told."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import CPU, FAMILIES, SIZES, built, facts_of, logits, lora, on_disk, random_model, trained

from fxtune.errors import ConfigError
from fxtune.models.load import DType, ModelConfig, load_config, load_tokenizer
from fxtune.models.save import save_model
from fxtune.models.structure import decoder_layers, parameter_counts
from fxtune.techniques.base import Switch
from fxtune.techniques.checkpointing.technique import Policy
from fxtune.techniques.lora import fuse, modules
from fxtune.techniques.lora.technique import Matmul
from fxtune.techniques.pipeline import make_probe
from fxtune.techniques.precision import Autocast
from fxtune.techniques.quantize import ComputeDtype, Library, Quantize, Type
from fxtune.tracking.throughput import training_cost

ALL = {"attention": 2, "mlp": 2, "linear": 2}
GROUPS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "mistral_sliding", "gemma", "gemma2", "gemma3"), ALL),
    "phi": {"attention": 2, "linear": 6},
    "phi3": {"linear": 8},
}


@pytest.fixture(autouse=True)
def _qwen2(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen2", {"model_type": "qwen2", **SIZES})  # its q, k and v have biases


def pair(model: ModelConfig, dtype: str = "float32", prepare=lambda pipeline: None, **options):
    """The same model and adapters, whose B is not zero, by peft and fused."""
    found = []
    for fused in (Switch.off, Switch.on):
        pipeline = lora(fused=fused, **options)
        prepare(pipeline)
        made = built(pipeline, model, dtype=dtype)
        for name, parameter in made.named_parameters():
            if "bias" in name:  # of the base: zero in a model drawn at random
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
            if "lora_B" in name:
                parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        found.append(made)
    return found


def gradients(model, **autocast) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", **(autocast or {"enabled": False})):
        loss = model(**make_probe(model)).logits.float().logsumexp(-1).mean()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def close(one, other, tolerance: float) -> None:
    (loss, mine), (wanted, theirs) = one, other
    assert abs(loss - wanted) <= tolerance * abs(wanted)
    assert list(mine) == list(theirs)
    for name, gradient in mine.items():
        assert gradient.dtype is theirs[name].dtype
        assert (gradient - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


@pytest.mark.parametrize("family", GROUPS)
def test_losses_gradients_and_names_are_those_of_peft(family):
    plain, fused = pair(random_model(family))
    assert dict(fused.fusion.groups) == GROUPS[family]
    assert not fused.fusion.left
    close(gradients(fused), gradients(plain), 1e-5)
    theirs, mine = plain.state_dict(), fused.state_dict()
    assert list(theirs) == list(mine)
    assert all(torch.equal(value, mine[name]) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"attention": 2}),
        ({"target_modules": ["q_proj"]}, {"linear": 2}),
        ({"target_modules": ["gate_proj", "down_proj", "k_proj", "v_proj"]}, {"attention": 2, "linear": 4}),
        ({"rslora": True}, ALL),
        ({"r": 17, "alpha": 3.0}, ALL),
        ({"modules_to_save": ["norm"]}, ALL),
        ({"target_modules": ["o_proj", "lm_head"]}, {"linear": 3}),
    ],
)
def test_a_part_of_the_linears_and_other_scalings(options, groups):
    plain, fused = (
        one.double() for one in pair(random_model("llama"), **options)
    )  # rslora's scale costs float32 two digits
    assert dict(fused.fusion.groups) == groups
    close(gradients(fused), gradients(plain), 1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_operators_are_counted_in_passes_with_flex_attention():
    """It is an operator that takes a function, which a mode of torch's has to let through."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16)
    assert fuse.calls(lambda: flex_attention(q, q, q)) == {}


def test_what_is_not_fused_is_told():
    fused = built(lora(fused=Switch.on, target_modules=["q_proj", "embed_tokens"]), random_model("llama"))
    assert fused.fusion.told() == "2 single linears; 1 left to peft: Embedding is no linear"


@pytest.mark.parametrize("base", [DType.bfloat16, DType.float32])
def test_under_autocast_they_are_as_near_to_float32_as_peft(base):
    def prepare(pipeline):
        pipeline.precision.autocast = Autocast.bfloat16

    model = random_model("llama")
    exact = gradients(pair(model)[0])
    model.dtype = base
    plain, fused = (gradients(one, dtype=torch.bfloat16) for one in pair(model, base.value, prepare))

    def off(found):
        return sum((found[1][name].float() - wanted).norm() ** 2 for name, wanted in exact[1].items()) ** 0.5

    assert {gradient.dtype for gradient in fused[1].values()} == {torch.float32}
    assert off(fused) <= 1.5 * off(plain)


def test_a_first_update_over_a_bfloat16_base_acts_as_it_does_in_float32(tmp_path):
    """Adam's first step of 1e-4 changes every product by less than half of its last bit: peft adds that to what is rounded
    already, and loses a part of it in each linear. Here it is in one sum with the base.
    """
    path = str(
        on_disk(
            tmp_path,
            dtype=torch.bfloat16,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=512,
        )
    )
    rows, fell = torch.randint(3, 512, (2, 128), generator=torch.Generator().manual_seed(1)), {}
    runs = {"float32": ("float32", Switch.off), "peft": ("bfloat16", Switch.off), "fused": ("bfloat16", Switch.on)}
    for name, (dtype, fused) in runs.items():
        pipeline = lora(16, fused=fused)
        pipeline.precision.autocast = Autocast.bfloat16 if dtype == "bfloat16" else Autocast.none
        model = built(pipeline, ModelConfig(path=path, dtype=DType(dtype)), dtype=dtype).train()

        def loss(model=model, dtype=dtype):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                return model(input_ids=rows, labels=rows, use_cache=False).loss

        (before := loss()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 1e-4 * parameter.grad.sign()
        fell[name] = (before - loss()).item()
    print(fell)
    assert fell["fused"] == pytest.approx(fell["float32"], rel=0.03)
    assert fell["peft"] < 0.95 * fell["float32"]


@pytest.mark.parametrize(
    ("kind", "library"),
    [(Type.nf4, Library.bitsandbytes), (Type.int8, Library.bitsandbytes), (Type.int8, Library.torchao)],
)
def test_over_a_quantised_base(kind, library):
    plain, fused = pair(random_model("llama"), prepare=quantized_in(kind, library))
    assert dict(fused.fusion.groups) == ALL
    close(gradients(fused), gradients(plain), 1e-5)


def test_the_frozen_weights_are_stored_once_and_the_adapters_beside_them_are_never_stale():
    model = built(lora(fused=Switch.on), random_model("llama"))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    sizes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(storages.values()) < 1.35 * sizes, "padding of the tiny sizes, not a second copy"
    before = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert (logits(model) - before).abs().max() > 0.01


def test_linears_of_unlike_dtypes_have_no_buffer_in_common():
    pipeline = lora(fused=Switch.off)
    model = built(pipeline, random_model("llama"))
    for layer in decoder_layers(model):
        layer.self_attn.k_proj.get_base_layer().double()
        layer.mlp.up_proj.get_base_layer().double()
    assert dict(fuse.fuse(model).groups) == {"linear": 14}


def test_adapters_switched_off_and_merged_are_the_base_and_the_sum():
    plain, fused = pair(random_model("llama"))
    with fused.disable_adapter():
        without = logits(fused)
    with plain.disable_adapter():
        torch.testing.assert_close(without, logits(plain))
    whole = logits(fused)
    assert (whole - without).abs().max() > 0.01
    for safe in (False, True):
        fused.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(logits(fused), whole, rtol=1e-4, atol=1e-5)
        fused.unmerge_adapter()
        torch.testing.assert_close(logits(fused), whole, rtol=1e-4, atol=1e-5)


def test_adapters_by_the_row_are_those_of_peft():
    from peft import LoraConfig

    names, found = ["default", "other", "__base__"], []
    for model in pair(random_model("llama")):
        model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
        ids = torch.arange(1, 9).repeat(3, 1)
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids, adapter_names=names).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert (found[1][0] - found[1][2]).abs().max() > 0.01, "a row with the adapter and one without"


@pytest.mark.parametrize(
    ("where", "compiled"),
    [
        ("self_attn.q_proj", False),
        ("mlp.up_proj", False),
        ("mlp.down_proj.base_layer", False),
        ("self_attn.o_proj", False),
        ("self_attn.o_proj.lora_A.default", False),
        ("self_attn.v_proj", True),
        ("mlp.up_proj.base_layer", True),
    ],
)
def test_whoever_listens_to_a_linear_is_told(where, compiled):
    torch._dynamo.reset()
    found = []
    for model in pair(random_model("llama")):
        layer, heard = decoder_layers(model)[0], []
        layer.get_submodule(where).register_forward_hook(
            lambda _, given, out, heard=heard: heard.append(tuple(out.shape))
        )
        layer.get_submodule(where).register_forward_hook(lambda _, given, out: out * 2)
        if compiled:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="eager")
        found.append((gradients(model), heard))
    assert found[0][1] == found[1][1] != []
    close(found[1][0], found[0][0], 1e-5)


def test_a_gradient_that_is_listened_to_is_told():
    found = []
    for model in pair(random_model("llama")):
        heard = []
        for layer in decoder_layers(model):
            layer.mlp.gate_proj.register_full_backward_hook(
                lambda _, given, out, heard=heard: heard.append(out[0].clone())
            )
        gradients(model)
        found.append(heard)
    assert len(found[1]) == 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def require_one_owner(model) -> None:
    """Every parameter is contiguous, belongs to one module, and shares its memory with no other."""
    owners = [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)]
    assert len({identity for _, identity in owners}) == len(owners)
    addresses = [one.untyped_storage().data_ptr() for one in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    for name, one in model.named_parameters():
        assert one.is_contiguous(), name
        assert one.untyped_storage().nbytes() == one.nbytes, name
    for linear in (module for module in model.modules() if hasattr(module, "base_layer")):
        assert linear.base_layer.weight.untyped_storage().data_ptr() in addresses


def quantized_in(kind: Type, library: Library):
    def prepare(pipeline):
        pipeline.quantize.enabled, pipeline.quantize.type, pipeline.quantize.library = True, kind, library
        pipeline.quantize.resolve(facts_of(random_model("llama")))

    return prepare


def in_float32(family: str):
    return pair(random_model(family))[1]


def in_int8(family: str):
    return pair(random_model(family), prepare=quantized_in(Type.int8, Library.bitsandbytes))[1]


def in_fp8(family: str):
    """Built without check(), which refuses fp8 on a CPU."""
    pipeline, model = lora(fused=Switch.on), random_model(family)
    pipeline.quantize = Quantize(True, Type.fp8, compute_dtype=ComputeDtype.float32)
    return pipeline.build(model, load_config(model), CPU, 0)


@pytest.mark.parametrize("base", [in_float32, in_fp8, in_int8])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_every_frozen_matrix_is_a_contiguous_parameter_of_one_module(family, base):
    require_one_owner(base(family))


@pytest.fixture
def one_process_mesh(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("base", [in_float32, in_fp8])
def test_fully_shard_takes_a_fused_layer(base, one_process_mesh):
    from torch.distributed.fsdp import fully_shard

    alone, sharded = base("llama"), base("llama")
    wanted = gradients(alone)
    for layer in decoder_layers(sharded):
        fully_shard(layer, mesh=one_process_mesh)
    for _ in range(2):
        loss, found = gradients(sharded)
    close((loss, {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items()}), wanted, 0)


def test_a_base_loads_by_its_plain_names():
    model = random_model("llama")
    first, second = (built(lora(fused=Switch.on), model, seed=seed) for seed in (0, 1))
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in (first, second)]
    assert not torch.equal(logits(first), logits(second))
    for assign in (False, True):
        second.load_state_dict(states[1])
        result = second.load_state_dict(states[0], assign=assign)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.equal(logits(first), logits(second))
        require_one_owner(second)
    name = next(name for name in states[0] if "up_proj.base_layer" in name)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        second.load_state_dict({key: value for key, value in states[0].items() if key != name})
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
        second.load_state_dict({**states[0], name: torch.zeros(3, 3)})


def test_a_copy_of_a_fused_model_is_independent():
    _, first = pair(random_model("llama"))
    second = copy.deepcopy(first)
    before = logits(first)
    with torch.no_grad():
        decoder_layers(second)[0].self_attn.k_proj.base_layer.weight.mul_(-1)
    assert torch.equal(logits(first), before)
    assert not torch.equal(logits(second), before)
    require_one_owner(second)


def test_a_model_that_is_cast_as_a_whole_stores_its_weights_once():
    plain, fused = pair(random_model("llama"))
    for model in (plain, fused):
        model.to(torch.bfloat16).to(torch.float32)
    require_one_owner(fused)
    close(gradients(fused), gradients(plain), 1e-5)
    fused.double()
    require_one_owner(fused)
    assert logits(fused).isfinite().all()


@pytest.mark.parametrize("where", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_weight_that_is_changed_in_place_acts_and_one_that_is_assigned_is_refused(where):
    plain, fused = pair(random_model("llama"))
    for model in (plain, fused):
        with torch.no_grad():
            decoder_layers(model)[0].get_submodule(where).base_layer.weight.mul_(-1)
    close(gradients(fused), gradients(plain), 1e-5)
    base = decoder_layers(fused)[0].get_submodule(where).base_layer
    with pytest.raises(KeyError, match="weight"):
        base.weight = torch.nn.Parameter(base.weight.clone())


def test_a_quantised_base_that_is_cast_is_refused():
    _, fused = pair(random_model("llama"), prepare=quantized_in(Type.int8, Library.torchao))
    with pytest.raises(ConfigError, match=r"a base in int8/torchao cannot be cast"):
        fused.to(torch.bfloat16)
    fused.to("cpu")
    assert logits(fused).isfinite().all()


def test_a_run_goes_on_with_the_matmul_that_auto_found_when_it_started(small, cwd, monkeypatch):
    from fxtune.techniques.lora import gemm_choice
    from fxtune.training import trainer

    def broken(*_):
        raise TypeError("no such architecture")

    small.techniques.lora.fused, small.train.max_steps, small.checkpoint.every = Switch.on, 2, 1
    small.run.dir = "run"
    monkeypatch.setattr(gemm_choice, "hindrance", lambda facts: None)
    with monkeypatch.context() as patch:
        patch.setattr(gemm_choice, "prepare", broken)
        patch.setattr(trainer.Trainer, "_finish", broken)
        with pytest.raises(TypeError):
            trainer.run(small)
    setting = json.loads((cwd / "run" / "setting.json").read_text())
    assert setting["techniques"]["lora"]["matmul"] == "cublas"
    monkeypatch.setattr(gemm_choice, "prepare", lambda *_: None)
    made = []
    monkeypatch.setattr(trainer.Trainer, "_loop", lambda self: made.append(self))
    trainer.run(small)
    assert made[0].techniques.lora.matmul is Matmul.cublas, "today auto would take cute"
    assert made[0].language_model.by == "cublas"
    assert made[0].state.step == 2


def test_generation_with_a_cache_is_that_of_peft():
    plain, fused = (one.eval() for one in pair(random_model("llama")))
    ids = torch.arange(1, 9).view(2, 4)
    made = [
        one.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        for one in (plain, fused)
    ]
    assert torch.equal(*made)
    assert made[0].shape == (2, 10)


def test_what_is_saved_is_a_plain_adapter_and_training_goes_on_from_it(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(on_disk(tmp_path / "base")))
    plain, fused = built(lora(fused=Switch.off), model), trained(built(lora(fused=Switch.on), model))
    tokenizer = load_tokenizer(model)
    one, other = (save_model(each, tokenizer, tmp_path / name) for each, name in ((plain, "plain"), (fused, "fused")))
    theirs, mine = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert {name: value.shape for name, value in theirs.items()} == {name: value.shape for name, value in mine.items()}
    assert (one / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), other)
    torch.testing.assert_close(logits(loaded), logits(fused), rtol=1e-4, atol=1e-5)
    again = built(lora(fused=Switch.on), ModelConfig(path=str(tmp_path / "base"), adapter=str(other)))
    assert torch.equal(logits(again), logits(fused))


def test_the_work_is_counted_as_before():
    plain, fused = pair(random_model("llama"))
    assert training_cost(plain) == training_cost(fused)
    assert sum(parameter_counts(plain).values()) == sum(parameter_counts(fused).values())


def test_an_attention_of_other_code_keeps_its_linears_apart(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    def reads_something_else(self, hidden_states, **kwargs):
        return self.o_proj(
            self.q_proj(hidden_states * 2)
            + 0 * self.v_proj(hidden_states).repeat(1, 1, 2)
            + 0 * self.k_proj(hidden_states).repeat(1, 1, 2)
        ), None

    def clamped(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=7))

    monkeypatch.setattr(LlamaAttention, "forward", reads_something_else)
    monkeypatch.setattr(LlamaMLP, "forward", clamped)
    made_once = (fuse._source, fuse._reads_hidden_states, modules._attention_kind)
    for cached in made_once:
        cached.cache_clear()
    try:
        plain, fused = pair(random_model("llama"))
        assert dict(fused.fusion.groups) == {"attention": 2, "linear": 10}, "k and v read the same states, q does not"
        close(gradients(fused), gradients(plain), 1e-5)
    finally:
        for cached in made_once:
            cached.cache_clear()


@pytest.mark.parametrize("what", ["other states", "a look at the weight"])
def test_an_attention_that_does_more_with_its_projections_keeps_them_apart(monkeypatch, what):
    from transformers.models.llama.modeling_llama import LlamaAttention

    def projects_other_states(self, hidden_states, **kwargs):
        hidden_states = hidden_states * 2
        return self.o_proj(
            self.q_proj(hidden_states) * self.k_proj(hidden_states).repeat(1, 1, 2)
            + self.v_proj(hidden_states).repeat(1, 1, 2)
        ), None

    def looks_at_a_weight(self, hidden_states, **kwargs):
        mixed = self.q_proj(hidden_states) * self.k_proj(hidden_states).repeat(1, 1, 2).to(self.q_proj.weight.dtype)
        return self.o_proj(mixed + self.v_proj(hidden_states).repeat(1, 1, 2)), None

    monkeypatch.setattr(
        LlamaAttention, "forward", projects_other_states if what == "other states" else looks_at_a_weight
    )
    made_once = (fuse._source, fuse._reads_hidden_states, modules._attention_kind)
    for cached in made_once:
        cached.cache_clear()
    try:
        plain, fused = pair(random_model("llama"))
        assert dict(fused.fusion.groups) == (
            {"mlp": 2, "linear": 8} if what == "other states" else {"attention": 2, "mlp": 2, "linear": 4}
        )
        close(gradients(fused), gradients(plain), 1e-5)
    finally:
        for cached in made_once:
            cached.cache_clear()


def test_another_adapter_beside_the_one_that_is_fused_acts_as_in_peft():
    from peft import LoraConfig

    models = pair(random_model("llama"))
    for model in models:
        model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    found = []
    for chosen in ("default", "other", ["default", "other"]):
        for model in models:
            model.base_model.set_adapter(chosen)
        plain, fused = map(logits, models)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        found.append(fused)
    assert all((one - found[0]).abs().max() > 0.01 for one in found[1:])


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"dropout": 0.1}, "techniques.lora.dropout=0.1"), ({"dora": True}, "techniques.lora.dora=true")],
)
def test_on_is_refused_and_auto_is_off_where_no_adapter_can_be_fused(options, reason):
    card = facts_of(random_model("llama"), device="cuda", capability=(9, 0))
    with pytest.raises(ConfigError, match=rf"techniques\.lora\.fused: {reason}"):
        lora(fused=Switch.on, **options).resolved(card)
    chosen, notes = lora(**options).resolved(card)
    assert chosen.lora.fused is Switch.off
    assert any(reason in note for note in notes)
    fusion = fuse.fuse(built(lora(**options), random_model("llama")))
    assert not fusion.groups
    assert fusion.told() == f"none; 14 left to peft: {'DoRA' if 'dora' in options else 'dropout'}"


def test_auto_is_on_with_a_card_and_off_without_and_liger_makes_way():
    for device, chosen in (("cuda", Switch.on), ("cpu", Switch.off)):
        pipeline = lora()
        pipeline.liger.enabled = True
        ready, notes = pipeline.resolved(
            facts_of(
                random_model("llama"),
                device=device,
                capability=(9, 0),
                dtype="bfloat16",
                packages={"liger-kernel": "0.8.5"},
            )
        )
        assert ready.lora.fused is chosen
        assert any(note.startswith(f"lora: fused {chosen.value}") for note in notes)
        assert ready.liger.swiglu is Switch.off
    pipeline.lora.fused, pipeline.liger.swiglu = Switch.on, Switch.on
    with pytest.raises(ConfigError, match=r"techniques\.liger\.swiglu: techniques\.lora\.fused=on"):
        pipeline.resolved(
            facts_of(random_model("llama"), device="cuda", capability=(9, 0), packages={"liger-kernel": "0.8.5"})
        )
    pipeline.lora.fused = Switch.auto
    ready, _ = pipeline.resolved(
        facts_of(random_model("llama"), device="cuda", capability=(9, 0), packages={"liger-kernel": "0.8.5"})
    )
    assert (ready.lora.fused, ready.liger.swiglu) == (Switch.off, Switch.on)


def test_operators_that_did_not_run_are_noticed():
    pipeline = lora(fused=Switch.on)
    model = built(pipeline, random_model("llama"))
    assert all(evidence.acted for evidence in pipeline.verify(model, make_probe(model)))
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.__class__ = type(mlp).__mro__[1]
    with pytest.raises(ConfigError, match=r"adapters fused: 6 operators .* fxtune\.lora_mlp 1 times ran"):
        pipeline.prove(model, make_probe(model))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": Policy.full},
        {"policy": Policy.full, "mlp_tiles": 4},
        {"policy": Policy.none, "mlp_tiles": 3},
        {"policy": Policy.selective},
        {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]},
        {"policy": Policy.selective, "save": ["attention"]},
        {"policy": Policy.selective, "recompute": ["q_proj", "k_proj", "v_proj"]},
        {"policy": Policy.selective, "save": ["aten.mm"]},
        {"policy": Policy.selective, "recompute": ["o_proj", "fxtune.lora_mlp"]},
        {"policy": Policy.full, "every": 2},
    ],
)
def test_checkpointing_keeps_what_it_says_and_changes_no_gradient(options):
    def prepare(pipeline):
        pipeline.checkpointing.enabled = True
        for name, value in options.items():
            setattr(pipeline.checkpointing, name, value)

    plain, _ = pair(random_model("llama"))
    wanted = gradients(plain)
    pipeline = lora(fused=Switch.on)
    prepare(pipeline)
    proven = built(pipeline, random_model("llama"))
    seen = pipeline.verify(proven, make_probe(proven))
    assert all(evidence.acted for evidence in seen)
    if tiles := options.get("mlp_tiles"):
        assert [evidence.observed for evidence in seen if "tiles" in evidence.asked] == [
            f"{tiles} forward and {tiles} again"
        ], "the checkpoint does not run them a third time"
    _, fused = pair(random_model("llama"), prepare=prepare)
    close(gradients(fused), wanted, 1e-5)


@pytest.mark.parametrize(("family", "mlps"), [("llama", 1), ("olmo2", 2)])
def test_compiled_layers_share_a_graph_and_a_checkpoint_computes_down_twice_only_where_a_norm_reads_it(
    family, mlps, monkeypatch
):
    """With the compiler's own cut between forward and backward, and no code generated."""
    from torch.profiler import ProfilerActivity, profile

    layers, pipeline = 4, lora(fused=Switch.on)
    pipeline.checkpointing.enabled, pipeline.checkpointing.policy = True, Policy.full
    monkeypatch.setitem(FAMILIES, "olmo2", {"model_type": "olmo2", **SIZES})
    model = built(pipeline, random_model(family, num_hidden_layers=layers)).train()
    for layer in decoder_layers(model):
        layer.forward = torch.compile(
            layer.forward, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
        )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            model(**make_probe(model)).logits.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2, (
        "the first layer's input needs no gradient"
    )
    names = [event.name for event in trace.events()]
    ran = {name: names.count(f"fxtune::lora_{name}") for name in ("linear", "mlp", "linear_backward", "mlp_backward")}
    assert ran == {"linear": 4 * layers, "mlp": mlps * layers, "linear_backward": 2 * layers, "mlp_backward": layers}
