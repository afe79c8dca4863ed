"""Optimizers: each against its definition, with non-finite steps, and through a checkpoint, bit for bit."""

from dataclasses import replace

import pytest
import torch
from support import image_models
from support.architectures import CPU
from support.optimizers import CASES, YES, Small, backward, make, stored
from torch import nn

from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.load import load_config
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim import config as optimizer_config
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer, _can_undo, undo_limit
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline


@pytest.mark.parametrize("name", CASES)
def test_each_optimizer_updates_trainable_parameters_only(name):
    model, optimizer = make(name, weight_decay=0.1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    backward(model, 1)
    optimizer.step(1e-2, YES)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == n.startswith("frozen"), n
        assert p.grad is None


@pytest.mark.parametrize("name", CASES)
def test_non_finite_step_changes_nothing(name):
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


@pytest.mark.parametrize("name", CASES)
def test_non_finite_first_step_leaves_no_state(name):
    (model, optimizer), (clean, untouched) = make(name), make(name)
    stale = [torch.full_like(p, 1e30) for p in model.parameters() for _ in range(50)]
    del stale  # memory that is allocated and not written has these numbers
    for parameter in optimizer.names:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(1e-2, ~YES)
    for trained, its in ((model, optimizer), (clean, untouched)):
        backward(trained, 1)
        its.step(1e-2, YES)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_state_from_a_checkpoint_continues_bit_for_bit(name, tmp_path):
    model, optimizer = make(name)
    for seed in (1, 2, 3):
        backward(model, seed)
        optimizer.step(1e-2, YES)
    copy, again = make(name)
    copy.load_state_dict(model.state_dict())
    again.load(*stored(optimizer, tmp_path))
    for seed in (4, 5):
        for m, o in ((model, optimizer), (copy, again)):
            backward(m, seed)
            o.step(1e-2, YES)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    (ours, ours_too), (theirs, theirs_too) = optimizer.state(), again.state()
    assert ours.keys() == theirs.keys()
    assert ours_too == theirs_too
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_norms_and_biases_get_no_weight_decay():
    _, optimizer = make("adamw", weight_decay=0.5)
    decays = {
        optimizer.names[p]: group["weight_decay"] for group in optimizer.parts[0].param_groups for p in group["params"]
    }
    assert decays == {
        "embed.weight": 0.5,
        "up.weight": 0.5,
        "wide.weight": 0.5,
        "head.weight": 0.5,
        "up.bias": 0,
        "norm.weight": 0,
        "norm.bias": 0,
    }


@pytest.mark.parametrize("name", [name for name in OptimizerName if name is not OptimizerName.adamw_schedulefree])
def test_weight_decay_is_decoupled_except_for_sgd(name):
    linear = nn.Linear(64, 64, bias=False)
    begun = linear.weight.detach().clone()
    optimizer = Optimizer(linear, OptimizerConfig(name=name, weight_decay=0.1))
    for _ in range(3):
        linear.weight.grad = torch.zeros_like(linear.weight)
        optimizer.step(0.1, YES)
    weight, momentum = 1.0, 0.0
    for _ in range(3):
        momentum = 0.9 * momentum + 0.1 * weight
        weight -= 0.1 * momentum
    expected = weight if name is OptimizerName.sgd else (1 - 0.1 * 0.1) ** 3
    torch.testing.assert_close(linear.weight, nn.Parameter(begun * expected), rtol=1e-5, atol=1e-7)


def test_muon_gets_hidden_matrices_and_adamw_the_rest():
    _, optimizer = make("muon")
    muon, adamw = optimizer.parts
    assert [optimizer.names[p] for g in muon.param_groups for p in g["params"]] == ["up.weight", "wide.weight"]
    assert {optimizer.names[p] for g in adamw.param_groups for p in g["params"]} == {
        "embed.weight",
        "up.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
    }


def written_out(seeds, lr=3e-3, fused=False, dtype=torch.float32):
    """torch.optim.AdamW with its groups written by hand: the reference."""
    torch.manual_seed(0)
    plain = Small().to(dtype)
    decayed = [p for p in plain.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in plain.parameters() if p.requires_grad and p.ndim == 1]
    reference = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
        lr=lr,
        betas=(0.8, 0.95),
        eps=1e-6,
        fused=fused,
    )
    for seed in seeds:
        backward(plain, seed)
        reference.step()
        reference.zero_grad()
    return plain


def test_adamw_equals_torch_adamw_bit_for_bit():
    model, optimizer = make("adamw", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    for seed in range(5):
        backward(model, seed)
        optimizer.step(3e-3, YES)
    plain = written_out(range(5), fused=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", ["apex_adamw", "adamw_float32"])
def test_other_adamw_implementations_agree(name, monkeypatch):
    monkeypatch.setitem(
        CASES, "adamw_float32", {"name": "adamw", "stochastic_rounding": True}
    )  # float32 needs no rounding
    model, optimizer = make(name, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    for seed in range(5):
        backward(model, seed)
        optimizer.step(3e-3, YES)
    plain = written_out(range(5))
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def learn(case, steps=100, **options):
    """Train on a language where each token follows from the one before. Returns the last loss and the state's bytes per weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    known = dict(CASES[case])
    optimizer = Optimizer(model, OptimizerConfig(name=OptimizerName(known.pop("name", case)), **known, **options))
    rule = torch.randperm(64)
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(0, 64, (256,))
        loss = nn.functional.cross_entropy(model(ids), rule[ids])
        loss.backward()
        optimizer.step(1e-3, YES)
    size = sum(tensor.numel() * tensor.element_size() for tensor in optimizer.state()[0].values())
    return loss.item(), size / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw_8bit", "adamw_8bit/stochastic"])
def test_8bit_adamw_learns_as_well_in_a_quarter_of_the_memory(case):
    (loss, size), (reference, whole) = learn(case), learn("adamw")
    assert reference < 0.5 < 4.0  # ln 64 at the start: it did learn
    assert abs(loss - reference) / reference < 0.05
    assert whole == pytest.approx(8, abs=0.1)
    assert size / whole < 0.4  # a quarter, the tables of 2 KiB a tensor and the small tensors' float32 on top


def test_kept_gradients_are_zeroed_in_place():
    model, optimizer = make("adamw")
    plain, reference = model, optimizer
    model, _ = make("adamw")
    optimizer = Optimizer(model, OptimizerConfig(), keep_gradients=True)
    places = [parameter.grad.data_ptr() for parameter in optimizer.names]
    for seed in (1, 2):
        for m, o in ((model, optimizer), (plain, reference)):
            backward(m, seed)
            backward(m, seed + 10)
            o.step(1e-2, YES)
    assert [parameter.grad.data_ptr() for parameter in optimizer.names] == places
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kept_zero_gradient_does_not_update_an_unreached_weight(name):
    """Such as an expert that gets no token: neither weight decay nor momentum may move it."""
    options = {"weight_decay": 0.1}
    plain, reference = make(name, **options)
    model, _ = make(name, **options)
    known = dict(CASES[name])
    optimizer = Optimizer(
        model, OptimizerConfig(name=OptimizerName(known.pop("name", name)), **known, **options), keep_gradients=True
    )
    for seed, reaches in ((1, False), (2, True), (3, False), (4, True)):
        norms = []
        for m, o in ((model, optimizer), (plain, reference)):
            states = m.norm(m.up(m.embed(torch.arange(7))))
            ids = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(seed))
            logits = m.head(m.frozen(m.wide(states)) if reaches else states)
            torch.nn.functional.cross_entropy(logits, ids).backward()
            before, norm = m.wide.weight.clone(), o.clip(0.5)
            torch.manual_seed(seed)  # stochastic rounding
            o.step(1e-2, YES)
            assert torch.equal(m.wide.weight, before) is not reaches, (m is model, seed)
            norms.append(norm)
        assert torch.equal(*norms)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    mine, theirs = optimizer.state(), reference.state()
    assert mine[1] == theirs[1]
    assert mine[0].keys() == theirs[0].keys()


def test_clipping_scales_the_gradient_to_max_norm():
    model, optimizer = make("adamw")
    backward(model, 1)
    grads = [p.grad.clone() for p in optimizer.names]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    assert torch.isclose(optimizer.clip(0), norm)
    assert torch.isclose(optimizer.clip(float(norm) / 2), norm)
    for parameter, grad in zip(optimizer.names, grads, strict=True):
        assert torch.allclose(parameter.grad, grad / 2, rtol=1e-4)


def test_traits_list_the_options_that_each_optimizer_uses():
    """Changing an option changes the library optimizer exactly where TRAITS lists it."""

    def built(name, options):
        _, made = make(name, **options)
        plain = [
            {key: value for key, value in group.items() if key != "params"}
            for part in made.parts
            for group in (part.defaults, *part.param_groups)
        ]
        return str(plain)

    changes = {"betas": [0.5, 0.6], "eps": 1e-3, "momentum": 0.25}
    for name, traits in optimizer_config.TRAITS.items():
        acts = {
            option for option, value in changes.items() if built(name.value, {option: value}) != built(name.value, {})
        }
        assert acts == set(traits.reads), name


def test_schedule_free_averages_are_those_of_its_library():
    from schedulefree import AdamWScheduleFree

    model, optimizer = make("adamw_schedulefree", betas=[0.9, 0.99])
    torch.manual_seed(0)
    plain = Small()
    reference = AdamWScheduleFree([p for p in plain.parameters() if p.requires_grad], betas=(0.9, 0.99))
    reference.train()
    for step in range(5):
        for learner in (model, plain):
            backward(learner, step)
        optimizer.step(1e-2 * (step + 1) / 5, YES)
        reference.param_groups[0]["lr"] = 1e-2 * (step + 1) / 5
        reference.step()
        reference.zero_grad()
    trained = {name: weight.clone() for name, weight in model.named_parameters()}
    assert all(torch.equal(trained[name], weight) for name, weight in plain.named_parameters())
    reference.eval()
    with optimizer.averaged():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert not torch.equal(model.up.weight, trained["up.weight"])
    assert all(torch.equal(trained[name], weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize("name", OptimizerName)
def test_the_limit_of_copies_says_which_optimizers_undo_their_steps(name):
    config = OptimizerConfig(name=name)
    try:
        parts = Optimizer(torch.nn.Linear(64, 64), config).parts
    except ImportError:
        pytest.skip("its package is not installed")
    assert (undo_limit(config) > 0) == any(_can_undo(part) for part in parts)


def test_parts_for_images_have_a_learning_rate_of_their_own():
    recipe = image_models.recipe("qwen2_5_vl")
    prepared = assemble(Pipeline(), recipe, load_config(recipe), CPU, 0, trains_images=True)
    model = prepared.module
    image_models.draw(model)
    shown = image_models.document("qwen2_5_vl", model, [3, (1, 2), 5], 0)
    config = OptimizerConfig(name=OptimizerName.sgd, lr=0.1, lr_vision=0.02, momentum=0.0)
    optimizer = Optimizer(model, config, for_images=for_images(model))
    LanguageModel(prepared).summed_loss(image_models.batch(model, [[shown]])).backward()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    optimizer.step(0.05, torch.tensor(True))
    for name, weight in model.named_parameters():
        rate = 0.01 if ".visual." in name else 0.05
        torch.testing.assert_close(weight, before[name] - rate * gradients[name])


@pytest.mark.parametrize("name", [OptimizerName.muon, OptimizerName.adamw_schedulefree])
def test_each_weight_of_a_model_with_a_learning_rate_for_images_is_updated_once(name):
    """As by one optimizer for the decoder and another one for the parts for images."""
    if name is OptimizerName.adamw_schedulefree:
        pytest.importorskip("schedulefree")

    def trained(*, two: bool):
        recipe = image_models.recipe("llava")
        prepared = assemble(Pipeline(), recipe, load_config(recipe), CPU, 0, trains_images=True)
        model = prepared.module
        image_models.draw(model)
        config = OptimizerConfig(name=name, lr=0.01, lr_vision=0.002)
        parts = {*for_images(model)}
        shown = image_models.document("llava", model, [3, (2, 2), 5], 0)
        LanguageModel(prepared).summed_loss(image_models.batch(model, [[shown]])).backward()
        if not two:
            optimizers = [Optimizer(model, config, for_images=parts)]
            optimizers[0].step(0.01, torch.tensor(True))
        else:
            optimizers = []
            for of_images in (False, True):
                for weight in model.parameters():
                    weight.requires_grad_((weight in parts) is of_images)
                plain = replace(config, lr_vision=None)
                optimizers.append(Optimizer(model, plain))
                optimizers[-1].step(0.002 if of_images else 0.01, torch.tensor(True))
        for optimizer in optimizers:
            optimizer.use_averages()
        return dict(model.named_parameters())

    separate = trained(two=True)
    for weight_name, weight in trained(two=False).items():
        assert torch.equal(weight, separate[weight_name]), weight_name


def test_parts_for_images_stay_as_they_are_without_a_learning_rate():
    recipe = image_models.recipe("qwen2_5_vl")
    model = assemble(Pipeline(), recipe, load_config(recipe), CPU, 0).module
    assert all(weight.requires_grad is (".visual." not in name) for name, weight in model.named_parameters())
