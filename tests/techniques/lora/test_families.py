"""Modules are fused by a table of names and a check by numbers, never by their source."""

from __future__ import annotations

import pytest
import torch
from support.architectures import CPU, FAMILIES, facts_of, lora, random_model
from support.cases import slow_but
from support.lora_models import EVERY, OPERATORS, loss_and_gradients, prepared_pair, require_close
from torch import nn
from torch.nn import functional as F

from fxtune.facts.options import Switch
from fxtune.models import load as models
from fxtune.models.load import load_config
from fxtune.models.structure import decoder_layers, skeleton
from fxtune.techniques.assemble import assemble
from fxtune.techniques.lora import families
from fxtune.techniques.lora.families import MLP, mlp_activation

ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh", "gemma3": "gelu_pytorch_tanh"}


@pytest.mark.parametrize("family", OPERATORS)
def test_activation_is_found_without_weights(family):
    mlp = decoder_layers(skeleton(load_config(random_model(family)).to_dict()))[0].mlp
    if "mlp" in OPERATORS[family]:
        assert mlp_activation(mlp) == ACTIVATIONS.get(family, "silu")
    else:
        assert not set(MLP) <= {name for name, _ in mlp.named_children()}


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), written in another way than transformers' MLPs, and what `change` makes of it."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.dropout = nn.Dropout(0.1 if change == "dropout" else 0.0)
        self.norm = nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.change == "swapped":
            gate, up = up, gate
        elif self.change == "clamped":
            up = up.clamp(max=7)
        elif self.change == "detached":
            up = up.detach()
        elif self.change == "exact gelu":
            return self.down_proj(F.gelu(gate) * up)
        elif self.change == "norm":
            up = self.norm(up)
        elif self.change == "sizes":
            up = up.view(*x.shape[:-1], 96)
        y = self.down_proj(self.dropout(up * (gate * torch.sigmoid(gate))))
        return y + x if self.change == "residual" else y


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_mlp_of_other_code_and_the_same_numbers_is_recognized(device):
    assert mlp_activation(Mlp().to(device).eval()) == "silu"


@pytest.mark.parametrize(
    "change", ["swapped", "clamped", "detached", "exact gelu", "norm", "sizes", "dropout", "residual"]
)
def test_an_mlp_of_other_numbers_is_not_recognized(change):
    mlp, state = Mlp(change).eval(), torch.get_rng_state()
    assert mlp_activation(mlp) is None
    assert not mlp.training
    assert not mlp.dropout.training
    assert torch.equal(torch.get_rng_state(), state)


def silu_written_out(self, x):
    gate = self.gate_proj(x)
    return self.down_proj(gate.sigmoid().mul(gate).mul(self.up_proj(x)))


def test_an_mlp_with_the_same_numbers_runs_fused(monkeypatch, capsys):
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", silu_written_out)
    pair = prepared_pair(random_model("llama"))
    plain, fused = (prepared.module for prepared in pair)
    assert dict(pair[1].fusion.operators) == EVERY
    assert "techniques.lora.fused" not in capsys.readouterr().out
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)


def test_an_mlp_with_other_numbers_keeps_its_own_forward_with_one_line(monkeypatch, capsys):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def clamped(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=7))

    monkeypatch.setattr(LlamaMLP, "forward", clamped)
    pair = prepared_pair(random_model("llama"))
    plain, fused = (prepared.module for prepared in pair)
    assert dict(pair[1].fusion.operators) == {"attention": 2, "linear": 8}
    lines = [line for line in capsys.readouterr().out.splitlines() if "techniques.lora.fused" in line]
    assert lines == [
        "techniques.lora.fused: LlamaMLP does not compute down(act(gate(x)) * up(x)), so these linears run one by one."
    ]
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)


def mixed(self, hidden_states, q, k, v):
    return self.o_proj(q * k.repeat(1, 1, 2) + v.repeat(1, 1, 2)), None


def doubles_for_q(self, hidden_states, **kwargs):
    q = self.q_proj(hidden_states * 2)
    return mixed(self, hidden_states, q, self.k_proj(hidden_states), self.v_proj(hidden_states))


def doubles_for_all(self, hidden_states, **kwargs):
    hidden_states = hidden_states * 2
    return mixed(
        self, hidden_states, *(projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
    )


def projects_twice(self, hidden_states, **kwargs):
    q = self.q_proj(hidden_states) + self.q_proj(hidden_states)
    return mixed(self, hidden_states, q, self.k_proj(hidden_states), self.v_proj(hidden_states))


def reads_a_weight(self, hidden_states, **kwargs):
    q = self.q_proj(hidden_states).to(self.q_proj.weight.dtype)
    return mixed(self, hidden_states, q, self.k_proj(hidden_states), self.v_proj(hidden_states))


def depends_on_the_class(self, hidden_states, **kwargs):
    q = self.q_proj(hidden_states) * (2 if isinstance(self.q_proj, nn.Module) else 1)
    return mixed(self, hidden_states, q, self.k_proj(hidden_states), self.v_proj(hidden_states))


@pytest.mark.parametrize(
    ("forward", "operators", "alone"),
    [
        (doubles_for_q, {"attention": 2, "mlp": 2, "linear": 4}, "q_proj"),
        (doubles_for_all, {"mlp": 2, "linear": 8}, "q_proj, k_proj, v_proj"),
        (projects_twice, {"attention": 2, "mlp": 2, "linear": 4}, "q_proj"),
        (reads_a_weight, EVERY, ""),
        (depends_on_the_class, {"mlp": 2, "linear": 8}, "q_proj, k_proj, v_proj"),
    ],
)
def test_an_attention_is_fused_as_far_as_it_projects_its_own_input(forward, operators, alone, monkeypatch, capsys):
    from transformers.models.llama.modeling_llama import LlamaAttention

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    pair = prepared_pair(random_model("llama"))
    plain, fused = (prepared.module for prepared in pair)
    assert dict(pair[1].fusion.operators) == operators
    line = f"LlamaAttention does more with {alone} than project its own input, so these linears run one by one."
    assert [f"techniques.lora.fused: {line}"] * bool(alone) == [
        splitline for splitline in capsys.readouterr().out.splitlines() if "techniques.lora.fused" in splitline
    ]
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)


@pytest.mark.parametrize(
    "family",
    slow_but(["llama", "qwen2", "mistral", "gemma", "gemma2", "qwen3", "gemma3", "phi"], "llama", "qwen3", "gemma2"),
)
def test_a_wrong_entry_in_the_table_is_caught_by_numbers(family, monkeypatch):
    """Each family as if RoPE followed the projections; norms in between get weights that do not commute with it."""
    kind = FAMILIES[family]["model_type"]
    monkeypatch.setattr(families, "ROPE_FOLLOWS", {kind})
    pipeline, model = lora(fused=Switch.on), random_model(family)
    pipeline.liger.enabled, pipeline.liger.kernels = True, ["rope"]
    own_build = models.build

    def with_uneven_norms(*args, **kwargs):
        made = own_build(*args, **kwargs)
        for name, parameter in made.module.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.data.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))
        return made

    monkeypatch.setattr(models, "build", with_uneven_norms)
    pipeline.check(facts_of(model))
    attentions = [
        layer.self_attn for layer in decoder_layers(assemble(pipeline, model, load_config(model), CPU, 0).module)
    ]
    rotates = {attention.rotates for attention in attentions}
    assert rotates == {family not in ("qwen3", "gemma3")}
