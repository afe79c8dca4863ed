"""Optimizers: each against its definition, with non-finite steps, and through a checkpoint, bit for bit."""

import pytest
import torch
from support import apex_standin
from support.architectures import enable
from torch import nn

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints, TrainState
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.optim import config as update_rule
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.skip_nonfinite import Guard
from fxtune.optim.stochastic_adamw import COMPILING, stochastic_round, update
from fxtune.techniques.facts import Facts
from fxtune.techniques.quantize import Library
from fxtune.training.builder import RunBuilder


@pytest.fixture(autouse=True)
def _apex(monkeypatch):
    """Use a stand-in for NVIDIA's Apex, which is rarely installed; apex_standin.py says what this tests."""
    apex_standin.install(monkeypatch)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 512, bias=False)  # large enough for 8 bits
        self.frozen = nn.Linear(512, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.frozen.requires_grad_(False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.frozen(self.wide(self.norm(self.up(self.embed(ids))))))


CASES = {
    **{name.value: {} for name in OptimizerName},
    "adamw_8bit/bitsandbytes": {"name": "adamw_8bit", "library": Library.bitsandbytes},
    "adamw/stochastic": {"name": "adamw", "stochastic_rounding": True},
    "adamw_8bit/stochastic": {"name": "adamw_8bit", "stochastic_rounding": True},
}


def make(case, **options):
    torch.manual_seed(0)
    known = dict(CASES[case])
    model = Small().bfloat16() if "stochastic" in case else Small()
    return model, Optimizer(model, OptimizerConfig(name=OptimizerName(known.pop("name", case)), **known, **options))


def backward(model, seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 11, (4, 7))
    model(ids).logsumexp(-1).mean().backward()


def stored(optimizer, folder):
    """The state, written to a checkpoint and read back."""
    tensors, scalars = optimizer.state()
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(TrainState(step=3, optimizer=scalars), {"none": torch.zeros(1)}, tensors)
    saved = checkpoints.load_newest()
    return saved.moments, saved.state.optimizer


YES = torch.tensor(True)


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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_undone_step_equals_skipped_step(name, fused, tmp_path):
    """As on a GPU, where the step is taken before `finite` is known."""
    (model, asking), (other, guarded) = (
        make(name, weight_decay=0.1, fused=fused),
        make(name, weight_decay=0.1, fused=fused),
    )
    guarded.guards = {part: Guard(part) for part in guarded.parts if not part.defaults.get("fused")}
    taken = 0
    for seed in range(9):
        for each, its in ((model, asking), (other, guarded)):
            backward(each, seed)
            if seed in (0, 3, 4, 6):
                each.up.weight.grad[0, 0] = float("nan" if seed == 3 else "inf")
            norm = its.clip(1.0)
            its.step(1e-2, torch.isfinite(norm))
        taken += sum(guard.verdict is not None for guard in guarded.guards.values())
        if seed == 6:
            again, resumed = make(name, weight_decay=0.1, fused=fused)
            again.load_state_dict(other.state_dict())
            resumed.load(*stored(guarded, tmp_path))
    assert taken > 0 or not guarded.guards or name == "sgd"
    for seed in (7, 8):
        backward(again, seed)
        resumed.clip(1.0)
        resumed.step(1e-2, YES)
    for one in (other, again):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), one.parameters(), strict=True))
    (tensors, scalars), (others, theirs) = asking.state(), guarded.state()
    assert scalars == theirs
    assert all(torch.equal(value, others[key]) for key, value in tensors.items())


@pytest.mark.parametrize("name", CASES)
def test_non_finite_step_leaves_step_counts_of_weights_without_gradient(name):
    """Such as an expert that gets no token."""
    (model, asking), (other, guarded) = (
        make(
            name,
            fused="fused" not in update_rule.READS[OptimizerName(CASES[name].get("name", name))]
            or "stochastic" in name,
        )
        for _ in range(2)
    )
    guarded.guards = {part: Guard(part) for part in guarded.parts if not part.defaults.get("fused")}
    for seed in range(5):
        for each, its in ((model, asking), (other, guarded)):
            backward(each, seed)
            if seed in (2, 3):
                each.wide.weight.grad = None
                each.up.weight.grad[0, 0] = float("nan")
            its.step(1e-2, torch.isfinite(its.clip(1.0)))
        if seed == 3:
            assert counts(asking) == counts(guarded)
    assert counts(asking) == counts(guarded)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def counts(optimizer):
    """The step counts that the libraries keep for each weight."""
    tensors, scalars = optimizer.state()
    return {key: float(value) for key, value in {**tensors, **scalars}.items() if key.endswith("/step")}


@pytest.mark.parametrize("name", ["adamw", "apex_adamw"])
def test_guarded_step_is_exact_for_infinite_moments(name):
    """The square of a gradient of 1e25 overflows float32, so the moment becomes infinite and stays so."""
    kept = []
    for guards in (False, True):
        linear = nn.Linear(2, 1, bias=False)
        linear.weight.data = torch.tensor([[1.0, -0.0]])
        optimizer = Optimizer(linear, OptimizerConfig(name=OptimizerName(name), fused=name != "adamw"))
        optimizer.guards = {part: Guard(part) for part in optimizer.parts if guards}
        for gradient, good in ((1e25, True), (1.0, True), (float("nan"), False), (2.0, True), (float("inf"), False)):
            linear.weight.grad = torch.tensor([[gradient, 0.0]])
            optimizer.step(1e-2, torch.tensor(good))
        moments, _ = optimizer.state()
        assert moments["weight/exp_avg_sq"].isinf().tolist() == [[True, False]]
        kept.append(
            [
                tensor.detach().view(torch.int32).tolist()
                for tensor in (linear.weight, moments["weight/exp_avg"], moments["weight/exp_avg_sq"])
            ]
        )
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["lion", "apex_adamw", "muon"])
def test_guarded_step_ignores_weights_without_gradient_and_restores_gradients_on_error(name, monkeypatch):
    model, optimizer = make(name, weight_decay=0.1, fused=name != "muon")
    guards = [Guard(part) for part in optimizer.parts]
    unused = model.wide.weight.clone()
    for first in (True, False):
        backward(model, 1)
        model.wide.weight.grad = None
        assert [guard.step(YES) for guard in guards] == [not first] * len(guards)
        if first:
            for part in optimizer.parts:
                part.step()
    assert torch.equal(model.wide.weight, unused)
    before = {parameter: parameter.grad for parameter in optimizer.names}

    def fail(*_):
        raise RuntimeError("no more memory")

    for guard in guards:
        monkeypatch.setattr(guard.part, "step", fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            guard.step(torch.tensor(False))
    assert all(parameter.grad is gradient for parameter, gradient in before.items())


@pytest.mark.parametrize("name", CASES)
def test_non_finite_first_step_leaves_no_state(name):
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
@pytest.mark.parametrize("name", CASES)
def test_state_from_a_checkpoint_continues_bit_for_bit(name, fused, tmp_path):
    model, optimizer = make(name, fused=fused)
    for seed in (1, 2, 3):
        backward(model, seed)
        optimizer.step(1e-2, YES)
    copy, again = make(name, fused=fused)
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


@pytest.mark.parametrize("name", OptimizerName)
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


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_equals_torch_adamw_bit_for_bit(fused):
    model, optimizer = make("adamw", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6, fused=fused)
    for seed in range(5):
        backward(model, seed)
        optimizer.step(3e-3, YES)
    plain = written_out(range(5), fused=fused)
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


@pytest.mark.parametrize("case", ["adamw_8bit", "adamw_8bit/bitsandbytes"])
def test_8bit_adamw_learns_as_well_in_a_quarter_of_the_memory(case):
    (loss, size), (reference, whole) = learn(case), learn("adamw")
    assert reference < 0.5 < 4.0  # ln 64 at the start: it did learn
    assert abs(loss - reference) / reference < 0.05
    assert whole == pytest.approx(8, abs=0.1)
    assert size / whole < 0.4  # a quarter, the tables of 2 KiB a tensor and the small tensors' float32 on top


@pytest.mark.parametrize("case", ["adamw/stochastic", "adamw_8bit/stochastic"])
def test_stochastic_rounding_adds_up_updates_below_bfloat16_resolution(case):
    def moved(steps, **options):
        linear = nn.Linear(64, 64, bias=False).bfloat16()
        nn.init.ones_(linear.weight)
        optimizer = Optimizer(linear, OptimizerConfig(name=OptimizerName(CASES[case].get("name")), **options))
        for step in range(steps):
            torch.manual_seed(step)
            linear.weight.grad = torch.ones_like(linear.weight)
            optimizer.step(1e-4, YES)  # a constant gradient: AdamW moves each weight by lr
        return 1 - linear.weight.double().mean().item()

    assert moved(100) == 0
    assert moved(1000, stochastic_rounding=True) == pytest.approx(0.1, rel=0.03)


def test_stochastic_rounding_is_unbiased_and_keeps_exact_values():
    torch.manual_seed(0)
    values = torch.randn(200) * torch.logspace(-20, 20, 200)
    draws = torch.stack([stochastic_round(values) for _ in range(2000)]).double()
    assert torch.allclose(draws.mean(0), values.double(), rtol=3e-4)
    assert all(len(draws[:, i].unique()) <= 2 for i in range(200)), "always one of the two neighbours"
    fits = values.bfloat16()
    assert torch.equal(stochastic_round(fits.float()), fits)


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
            torch.manual_seed(seed)  # rounding by chance
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


GPU = Facts(device="cuda", dtype="bfloat16", packages={"bitsandbytes": "1", "torchao": "1"})


def reasons(facts=GPU, **options):
    return list(update_rule.check(OptimizerConfig(**options), facts))


def facts(**changes):
    return Facts(**{**vars(GPU), **changes})


EIGHT, APEX = OptimizerName.adamw_8bit, OptimizerName.apex_adamw


REFUSED = [
    (
        facts(packages={}),
        dict(name=EIGHT),
        ["adamw_8bit needs bitsandbytes or torchao, and neither is installed", "pip install 'fxtune[quant]'"],
    ),
    (
        facts(packages={"torchao": "1"}),
        dict(name=EIGHT, library=Library.bitsandbytes),
        ["bitsandbytes is not installed"],
    ),
    (
        GPU,
        dict(name=EIGHT, library=Library.bitsandbytes, stochastic_rounding=True),
        ["bitsandbytes has no stochastic rounding"],
    ),
    (GPU, dict(library=Library.torchao), ["torchao has adamw_8bit, not adamw"]),
    (GPU, dict(name=APEX), ["FusedAdam of Apex. NVIDIA's Apex is not installed"]),
    (facts(packages={"apex": "0.9"}), dict(name=APEX), ["no CUDA extensions (amp_C): it is PyPI's"]),
    (Facts(), dict(name=APEX), ["runs on a GPU, and the device is cpu"]),
    (GPU, dict(name=OptimizerName.muon, stochastic_rounding=True), ["muon does not have it"]),
    (facts(dtype="float32"), dict(stochastic_rounding=True), ["for bfloat16 weights, and these are float32"]),
    (facts(techniques=enable(lora={})), dict(stochastic_rounding=True), ["adapters are trained in float32"]),
    (
        GPU,
        dict(momentum=0.5),
        ["optimizer.momentum: 0.5 is not read by adamw. Leave it out or set it to 0.9, its default (sgd"],
    ),
    (
        GPU,
        dict(name=OptimizerName.sgd, betas=[0.9, 0.95]),
        ["betas: [0.9, 0.95] is not read by sgd", "set it to [0.9, 0.999]"],
    ),
    (GPU, dict(name=OptimizerName.lion, eps=1e-6), ["optimizer.eps: 1e-06 is not read by lion"]),
    (
        GPU,
        dict(name=OptimizerName.adafactor, fused=False),
        ["optimizer.fused: false is not read by adafactor", "set it to true"],
    ),
    (GPU, dict(name=EIGHT, fused=False), ["optimizer.fused: false is not read by adamw_8bit"]),
    (
        GPU,
        dict(stochastic_rounding=True, fused=False),
        ["optimizer.fused: false is not read by adamw with stochastic_rounding."],
    ),
]


@pytest.mark.parametrize(("known", "options", "told"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_say_what_to_change(known, options, told, monkeypatch):
    monkeypatch.setattr(update_rule, "c_compiler", lambda: "/usr/bin/gcc")
    (reason,) = reasons(known, **options)
    assert reason.startswith("optimizer.")
    assert all(part in reason for part in told), reason


def test_supported_optimizers_are_not_refused(monkeypatch):
    monkeypatch.setenv("CC", "true")
    for name in OptimizerName:
        packages = {**GPU.packages, "nvidia-apex": "0.1"}
        assert not reasons(facts(packages=packages), name=name)
    assert not reasons(stochastic_rounding=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in reasons(stochastic_rounding=True)[0]
    assert not reasons(name=EIGHT), "bitsandbytes compiles nothing"


def test_options_an_optimizer_reads_may_be_changed():
    for name, options in (
        ("adamw", dict(betas=[0.9, 0.95], eps=1e-6, fused=False)),
        ("sgd", dict(momentum=0.0, fused=False)),
        ("lion", dict(betas=[0.9, 0.99])),
        ("adamw_8bit", dict(betas=[0.9, 0.95], eps=1e-6)),
        ("muon", dict(momentum=0.95, betas=[0.9, 0.95], eps=1e-6, fused=False)),
    ):
        assert not reasons(Facts(packages={"torchao": "1"}), name=OptimizerName(name), **options), name


def test_reads_table_matches_what_each_optimizer_uses():
    """Changing an option changes the library optimizer exactly where READS lists it."""

    def built(name, options):
        _, made = make(name, **options)
        plain = [
            {key: value for key, value in group.items() if key != "params"}
            for part in made.parts
            for group in (part.defaults, *part.param_groups)
        ]
        return str(plain)

    changes = {"betas": [0.5, 0.6], "eps": 1e-3, "momentum": 0.25, "fused": False}
    for name, reads in update_rule.READS.items():
        acts = {
            option for option, value in changes.items() if built(name.value, {option: value}) != built(name.value, {})
        }
        assert acts == set(reads), name


def test_auto_library_of_adamw_8bit():
    assert update_rule.library(OptimizerConfig(name=EIGHT), GPU) is Library.bitsandbytes
    assert update_rule.library(OptimizerConfig(name=EIGHT, stochastic_rounding=True), GPU) is Library.torchao
    assert update_rule.library(OptimizerConfig(name=EIGHT), facts(device="cpu")) is Library.torchao
    assert update_rule.library(OptimizerConfig(name=EIGHT), facts(packages={"torchao": "1"})) is Library.torchao


def test_run_is_refused_with_optimizer_and_technique_reasons_together():
    config = Config()
    config.optimizer.name, config.optimizer.stochastic_rounding = OptimizerName.lion, True
    config.techniques.compile.enabled, config.techniques.compile.max_graph_breaks = True, 2
    with pytest.raises(ConfigError) as told:
        RunBuilder(config)
    text = str(told.value)
    assert "techniques.compile.max_graph_breaks: with fullgraph" in text
    assert "optimizer.stochastic_rounding: lion does not have it" in text
    assert "optimizer.stochastic_rounding: it is for bfloat16 weights, and these are float32" in text


def test_compiled_update_copies_nothing_from_the_host_and_shares_one_graph():
    """A number on the host would be copied to the device in each call, with a sync."""
    graphs = []

    def kept(graph, inputs):
        graphs.append([node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    torch._dynamo.reset()
    act = torch.compile(update, dynamic=True, fullgraph=True, backend=kept)
    # The meta device stands for a card: whatever is of the host is not of it.
    for size in ((17, 5), (8, 9), (64, 3)):
        weight, gradient = (torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(2))
        numbers = [torch.empty(size, device="meta") for size in (size, size, (), (), ())]
        with torch.no_grad(), torch._dynamo.config.patch(COMPILING):
            act(weight, gradient, *numbers, torch.empty((), dtype=torch.bool, device="meta"), 0.9, 0.999, 1e-8)
    (given,) = graphs
    assert {one.device.type for one in given if isinstance(one, torch.Tensor)} == {"meta"}
