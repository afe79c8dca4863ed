import pytest
import torch
from torch import nn

from fxtune.optimizer import Optimizer, OptimizerConfig, OptimizerName


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.frozen.requires_grad_(False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.frozen(self.norm(self.up(self.embed(ids)))))


def make(name, **options):
    torch.manual_seed(0)
    model = Small()
    return model, Optimizer(model, OptimizerConfig(name=OptimizerName(name), **options))


def backward(model, seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 11, (4, 7))
    model(ids).logsumexp(-1).mean().backward()


YES = torch.tensor(True)


@pytest.mark.parametrize("name", list(OptimizerName))
def test_each_optimizer_moves_what_is_trainable_and_nothing_else(name):
    model, optimizer = make(name, weight_decay=0.1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    backward(model, 1)
    optimizer.step(1e-2, YES)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == n.startswith("frozen"), n
        assert p.grad is None


@pytest.mark.parametrize("name", list(OptimizerName))
def test_a_step_that_is_not_finite_changes_nothing_at_all(name):
    model, optimizer = make(name, weight_decay=0.1)
    for seed in (1, 2):
        backward(model, seed)
        optimizer.step(1e-2, YES)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    tensors = {k: v.clone() for k, v in optimizer.state()[0].items()}
    backward(model, 3)
    model.up.weight.grad[0, 0] = float("nan")
    norm = optimizer.clip(1.0)
    assert not torch.isfinite(norm)
    optimizer.step(1e-2, torch.isfinite(norm))
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert all(torch.equal(v, tensors[k]) for k, v in optimizer.state()[0].items())
    backward(model, 4)
    optimizer.step(1e-2, YES)  # and goes on afterwards
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", list(OptimizerName))
def test_a_first_step_that_is_not_finite_leaves_no_trace(name):
    (model, optimizer), (clean, untouched) = make(name), make(name)
    stale = [torch.full_like(p, 1e30) for p in model.parameters() for _ in range(50)]
    del stale  # whoever allocates and does not write finds this
    for parameter in optimizer.names:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(1e-2, ~YES)
    for each, its in ((model, optimizer), (clean, untouched)):
        backward(each, 1)
        its.step(1e-2, YES)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", list(OptimizerName))
def test_state_given_back_continues_bit_for_bit(name, fused):
    model, optimizer = make(name, fused=fused)
    for seed in (1, 2, 3):
        backward(model, seed)
        optimizer.step(1e-2, YES)
    tensors, scalars = optimizer.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    copy, again = make(name, fused=fused)
    copy.load_state_dict(model.state_dict())
    again.load(tensors, scalars)
    for seed in (4, 5):
        for m, o in ((model, optimizer), (copy, again)):
            backward(m, seed)
            o.step(1e-2, YES)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))


def test_norms_and_biases_get_no_weight_decay():
    _, optimizer = make("adamw", weight_decay=0.5)
    decays = {optimizer.names[p]: group["weight_decay"] for group in optimizer.parts[0].param_groups for p in group["params"]}
    assert decays == {"embed.weight": 0.5, "up.weight": 0.5, "head.weight": 0.5, "up.bias": 0, "norm.weight": 0, "norm.bias": 0}


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    _, optimizer = make("muon")
    muon, adamw = optimizer.parts
    assert [optimizer.names[p] for g in muon.param_groups for p in g["params"]] == ["up.weight"]
    assert {optimizer.names[p] for g in adamw.param_groups for p in g["params"]} == {
        "embed.weight", "up.bias", "norm.weight", "norm.bias", "head.weight"}


def test_fused_adamw_equals_torch_adamw_written_out():
    model, optimizer = make("adamw", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    torch.manual_seed(0)
    plain = Small()
    decayed = [p for p in plain.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in plain.parameters() if p.requires_grad and p.ndim == 1]
    reference = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
                                  lr=3e-3, betas=(0.8, 0.95), eps=1e-6, fused=False)
    for seed in range(5):
        backward(model, seed)
        optimizer.step(3e-3, YES)
        backward(plain, seed)
        reference.step()
        reference.zero_grad()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_clipping_scales_the_whole_gradient_to_the_norm():
    model, optimizer = make("adamw")
    backward(model, 1)
    grads = [p.grad.clone() for p in optimizer.names]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    assert torch.isclose(optimizer.clip(0), norm)
    assert torch.isclose(optimizer.clip(float(norm) / 2), norm)
    for parameter, grad in zip(optimizer.names, grads, strict=True):
        assert torch.allclose(parameter.grad, grad / 2, rtol=1e-4)
