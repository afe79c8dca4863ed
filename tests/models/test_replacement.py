"""A module in place of another one has its parts: names, tensors, hooks, and the flag of training stay in step."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fxtune.models.replacement import InPlaceOf, places, put


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.width = 4

    def forward(self, x):
        return nn.functional.dropout(self.first(x) * self.scale, 0.5, self.training)


class Doubled(InPlaceOf):
    def forward(self, x):
        return 2 * self.replaced.forward(x)


def replaced() -> tuple[nn.Sequential, Doubled]:
    shared = Halves()
    model = nn.Sequential(shared, nn.ReLU(), shared).eval()
    put(places(model), shared, Doubled(shared))
    return model, model[0]


def test_names_and_numbers_stay_in_all_places():
    torch.manual_seed(0)
    model, doubled = replaced()
    assert model[2] is doubled
    assert doubled.width == 4
    assert list(model.state_dict()) == [
        f"{place}.{name}" for place in (0, 2) for name in ("scale", "first.weight", "first.bias")
    ]
    x = torch.randn(2, 4)
    assert torch.equal(doubled(x), 2 * doubled.first(x))


def test_a_new_tensor_reaches_the_code_of_the_replaced_module():
    _, doubled = replaced()
    doubled.scale = nn.Parameter(torch.full((4,), 3.0))
    doubled.first = nn.Identity()
    assert doubled(torch.ones(4)).tolist() == [6.0] * 4


def test_training_and_hooks_reach_it_once():
    model, doubled = replaced()
    model.train()
    torch.manual_seed(0)
    assert (doubled(torch.ones(64, 4)) == 0).any(), "dropout"
    calls = []
    doubled.register_forward_hook(lambda *_: calls.append(1))
    doubled.eval()(torch.ones(4))
    assert calls == [1]


def test_a_copy_is_whole():
    model, _ = replaced()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].first.weight.zero_()
        other[0].first.bias.zero_()
    assert not other(torch.ones(4)).any()
    assert model(torch.ones(4)).isfinite().all()
    assert model[0].first.weight.any()
