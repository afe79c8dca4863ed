"""The frozen weights of a fused group: one contiguous parameter of one module, under the names of peft in state dicts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from support.architectures import CPU, built, logits, lora, random_model
from support.lora_models import lora_pair, loss_and_gradients, quantized_in, require_close

from fxtune.distributed.sharding import shard
from fxtune.errors import ConfigError
from fxtune.facts.options import DType, Switch, WeightFormat
from fxtune.models.load import load_config
from fxtune.models.structure import decoder_layers
from fxtune.techniques.assemble import assemble
from fxtune.techniques.quantize.technique import Quantize


def require_one_owner(model) -> None:
    """Every parameter is contiguous, belongs to one module, and shares its memory with no other."""
    owners = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    assert len({identity for _, identity in owners}) == len(owners)
    addresses = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
    for linear in (module for module in model.modules() if hasattr(module, "base_layer")):
        assert linear.base_layer.weight.untyped_storage().data_ptr() in addresses


def in_float32(family: str):
    return lora_pair(random_model(family))[1]


def in_int8(family: str):
    return lora_pair(random_model(family), prepare=quantized_in(WeightFormat.int8))[1]


def in_fp8(family: str):
    """Built without check(), which refuses fp8 on a CPU."""
    pipeline, model = lora(fused=Switch.on), random_model(family)
    pipeline.quantize = Quantize(True, WeightFormat.fp8, compute_dtype=DType.float32)
    return assemble(pipeline, model, load_config(model), CPU, 0).module


@pytest.mark.parametrize(("base", "family"), [(in_float32, "phi3"), (in_fp8, "llama"), (in_int8, "qwen2")])
def test_every_frozen_matrix_is_a_contiguous_parameter_of_one_module(family, base):
    require_one_owner(base(family))


@pytest.fixture
def one_process_mesh(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("base", [in_float32, in_fp8])
def test_a_fused_layer_is_divided(base, one_process_mesh):
    """torch 2.11 alone refuses to divide the integers of an fp8 base."""
    alone, sharded = base("llama"), base("llama")
    wanted = loss_and_gradients(alone)
    world = SimpleNamespace(weights_mesh=one_process_mesh, device=CPU.device)
    shard(sharded, list(decoder_layers(sharded)), None, [], world)
    for _ in range(2):
        loss, found = loss_and_gradients(sharded)
    require_close(
        (loss, {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in found.items()}),
        wanted,
        0,
    )


def test_state_dict_loads_by_the_names_of_peft():
    model = random_model("llama")
    first, second = (built(lora(fused=Switch.on), model, seed=seed) for seed in (0, 1))
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in (first, second)]
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
    _, first = lora_pair(random_model("llama"))
    second = copy.deepcopy(first)
    before = logits(first)
    with torch.no_grad():
        decoder_layers(second)[0].self_attn.k_proj.base_layer.weight.mul_(-1)
    assert torch.equal(logits(first), before)
    assert not torch.equal(logits(second), before)
    require_one_owner(second)


def test_a_cast_model_stores_its_weights_once():
    plain, fused = lora_pair(random_model("llama"))
    for model in (plain, fused):
        model.to(torch.bfloat16).to(torch.float32)
    require_one_owner(fused)
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)
    fused.double()
    require_one_owner(fused)
    assert logits(fused).isfinite().all()


@pytest.mark.parametrize("where", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_weight_can_be_changed_in_place_but_not_assigned(where):
    plain, fused = lora_pair(random_model("llama"))
    for model in (plain, fused):
        with torch.no_grad():
            decoder_layers(model)[0].get_submodule(where).base_layer.weight.mul_(-1)
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)
    base = decoder_layers(fused)[0].get_submodule(where).base_layer
    with pytest.raises(KeyError, match="weight"):
        base.weight = torch.nn.Parameter(base.weight.clone())


@pytest.mark.parametrize("where", ["self_attn.k_proj", "mlp.down_proj"])
def test_data_assigned_to_a_weight_is_copied_into_it(where):
    plain, fused = lora_pair(random_model("llama"))
    for model in (plain, fused):
        base = decoder_layers(model)[0].get_submodule(where).base_layer
        base.weight.data = -base.weight
        base.weight.data += 0.01
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)
    require_one_owner(fused)
    for other in (base.weight[:3], base.weight.double(), base.weight.to("meta")):
        with pytest.raises(ValueError, match=r"takes a tensor of shape .* the new one has shape"):
            base.weight.data = other
    assert type(base.weight + 0) is torch.Tensor


def test_casting_a_quantized_base_is_refused():
    _, fused = lora_pair(random_model("llama"), prepare=quantized_in(WeightFormat.int8))
    with pytest.raises(ConfigError, match=r"a base in int8 cannot be cast"):
        fused.to(torch.bfloat16)
    fused.to("cpu")
    assert logits(fused).isfinite().all()


def test_frozen_weights_are_stored_once_and_changed_adapters_act():
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
