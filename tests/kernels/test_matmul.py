"""The choice between cuBLAS and quack: when it is used, how it is called, and its errors. See
tests/gpu/test_matmul.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from support.architectures import FAMILIES, enable, facts_of, lora, prepared_model, random_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.kernels import linear_cross_entropy as heads
from fxtune.kernels import matmul
from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE, augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.kernels.matmul import CUBLAS, CUTE, is_served, mm, utilization
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.machine.facts import PACKAGES
from fxtune.techniques.lora import fused_modules, gemm_backend
from fxtune.techniques.pipeline import make_probe

H200 = Facts(
    device="cuda",
    device_name="NVIDIA H200",
    capability=(9, 0),
    dtype="bfloat16",
    sequence_length=4096,
    rows=(4096,),
    micro_batch_size=4,
    packages={"quack-kernels": matmul.VERSION},
)


class Calls(TorchDispatchMode):
    """Shapes [rows, inner, columns] of the products that are the CuTe kernel's."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fxtune.cute_mm.default:
            self.found.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def small(monkeypatch):
    """A CPU that counts as a supported GPU, with products of 8 rows or more as large ones; the operator runs its
    reference."""
    monkeypatch.setattr(matmul, "processors_of", lambda device: 132)
    monkeypatch.setattr(matmul, "MIN_UTILIZATION", 0.0)
    monkeypatch.setattr(matmul, "MIN_ROWS", 8)
    monkeypatch.setattr(matmul, "MIN_SIZE", 16)


@pytest.fixture
def by_op(monkeypatch):
    """[rows, inner, columns] of each product of the CuTe kernel, also inside operators."""
    seen, real = [], matmul.is_served

    def watched(left, right, out, plus=None):
        if taken := real(left, right, out, plus):
            seen.append((*left.shape, right.shape[1]))
        return taken

    monkeypatch.setattr(matmul, "is_served", watched)
    return seen


@pytest.fixture
def quack(monkeypatch):
    """A fake quack package that multiplies by torch and records its arguments."""
    calls = []

    def gemm(A, B, D, C, semaphore, tile_M, tile_N, cluster_M, cluster_N, *, b_kn, **options):
        assert (semaphore, b_kn, A.requires_grad, B.requires_grad) == (None, True, False, False)
        assert C is None or (C.shape, C.requires_grad) == (D.shape, False)
        options = [options[name] for name in ("pingpong", "persistent", "is_dynamic_persistent")]
        calls.append((tile_M, tile_N, cluster_M, cluster_N, *options, A.stride(), B.stride(), C is not None))
        D.copy_(A.float() @ B.float() + (0 if C is None else C.float()))

    top, inner, cache = ModuleType("quack"), ModuleType("quack.gemm"), ModuleType("quack.cache")
    inner.gemm, cache.CACHE_DIR, top.cache, top.gemm = gemm, None, cache, inner
    for name, module in (("quack", top), ("quack.gemm", inner), ("quack.cache", cache)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(matmul, "_PREPARED", set())
    top.calls = calls
    return top


def drawn(rows, columns, stride=None, dtype=torch.bfloat16, at=0):
    return torch.randn(rows, (stride or columns) + at, dtype=dtype)[:, at : at + columns]


def test_cpu_products_are_torchs():
    assert not is_served(drawn(4096, 1024), drawn(1024, 1024), drawn(4096, 1024))
    x, w = drawn(20, 32), drawn(32, 24)
    torch.testing.assert_close(mm(x, w, gemm=CUTE), x @ w, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (132 * 256, 192, 0.5),
        (256, 132 * 192, 1.0),
        (66 * 256 + 1, 384, 16897 / (2 * 66 * 256)),
        (256, 192, 1 / 132),
        (16384, 4096, 16384 * 4096 / (11 * 132 * 256 * 192)),
        (4096, 4096, 4096 * 4096 / (3 * 132 * 256 * 192)),
    ],
)
def test_utilization_of_the_processors(rows, columns, expected):
    assert utilization(rows, columns, 132) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"across": True}, True),
        ({"dtype": torch.float16}, True),
        ({"stride": 1032}, True),
        ({"dtype": torch.float32}, False),
        ({"rows": 6272, "columns": 28672}, False),
        ({"rows": 8192, "columns": 28672}, True),
        ({"rows": 6336, "columns": 2**16}, True),  # a head's logits
        ({"rows": 1024, "columns": 2**16}, False),
        ({"inner": 1000}, False),
        ({"columns": 1000}, False),
        ({"stride": 1028}, False),
        ({"at": 4}, False),
        ({"columns": 1088}, False),
    ],
)
def test_is_served_depends_on_dtype_size_and_alignment(monkeypatch, change, taken):
    monkeypatch.setattr(matmul, "processors_of", lambda device: 132)
    known = dict(rows=32768, inner=1024, columns=1536, dtype=torch.bfloat16, across=False, stride=None, at=0) | change
    rows, inner, columns, dtype = (known[name] for name in ("rows", "inner", "columns", "dtype"))
    stride = known["stride"] and known["stride"] - 1024 + inner
    left, out = drawn(rows, inner, stride, dtype, known["at"]), torch.empty(rows, columns, dtype=dtype)
    right = drawn(columns, inner, dtype=dtype).t() if known["across"] else drawn(inner, columns, dtype=dtype)
    assert is_served(left, right, out) == taken
    assert not is_served(left, right, torch.empty(rows, columns, dtype=torch.float64))
    assert is_served(left, right, out, torch.empty_like(out)) == (
        taken and known["across"]
    )  # the order that is compiled for it
    for plus in (
        torch.empty(rows, columns, dtype=torch.float64),
        torch.empty(rows, columns + 4, dtype=dtype)[:, 4:],
        torch.empty(columns, rows, dtype=dtype).t(),
    ):
        assert not is_served(left, right, out, plus)


def test_flop_counter_and_profiler_see_a_product(small):
    x, w = drawn(20, 32, 40), drawn(24, 32, 48).t()
    out = torch.empty(20, 40, dtype=torch.bfloat16)[:, :24]
    with Calls() as mode:
        found = mm(x, w, out, CUTE)
        mm(x, w, out, CUBLAS)
        mm(x, w)
    assert (mode.found, found is out) == ([(20, 32, 24)], True)
    torch.testing.assert_close(out, x @ w, rtol=0, atol=0)
    plus = drawn(20, 24)
    with Calls() as mode:
        both = [mm(x, w, into, gemm, plus) for gemm in (CUTE, CUBLAS) for into in (None, torch.empty_like(out))]
    assert mode.found == [(20, 32, 24)] * 2
    exact = x.double() @ w.double() + plus.double()
    for result in both:
        # Rounded once. Sums in another order may round differently next to a tie.
        assert (result == exact.bfloat16()).float().mean() > 0.99
    with FlopCounterMode(display=False) as counted:
        mm(x, w, gemm=CUTE)
    assert counted.get_total_flops() == 2 * 20 * 32 * 24
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert mm(torch.empty(20, 32), torch.empty(32, 24), gemm=CUTE).shape == (20, 24)


def groups(rows=24, inner=32, outs=(16, 24), rank=4):
    x = torch.randn(rows, inner, requires_grad=True)
    a = [torch.randn(rank, inner, requires_grad=True) for _ in outs]
    b = [torch.randn(out, rank, requires_grad=True) for out in outs]
    return x, a, b, augment([torch.randn(out, inner) for out in outs], [rank] * len(outs))


def test_storage_kind_of_a_group_selects_the_kernel(small, by_op):
    results = []
    for kind in (DENSE, DENSE_CUTE, DENSE):  # two models in one process, one after the other and again
        torch.manual_seed(0)
        x, a, b, made = groups()
        with torch.autocast("cpu", torch.bfloat16):
            y = lora_linear(x, a, b, [made], [2.0, 2.0], kind)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, *(tensor.grad for tensor in a + b)))
        assert by_op == ([] if kind == DENSE else [(24, 48, 40), (24, 40, 48)])  # dy B beside dy W
        by_op.clear()
    for first, second, third in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, third, rtol=0, atol=0)


@pytest.mark.parametrize("tiles", [1, 2])
def test_all_products_of_an_mlp_use_the_kernel(small, by_op, tiles):
    x, a, b, up = groups(rows=32, outs=(48, 48))
    _, a_down, b_down, down = groups(inner=48, outs=(32,))
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_mlp(x, a + a_down, b + b_down, [up], [down], [1.0] * 3, DENSE_CUTE, DENSE_CUTE, tiles=tiles)
    rows = 32 // tiles
    forward = [
        (rows, 32, 112),
        (rows, 64, 32),
    ]  # the adapters' first halves are more columns, or their second ones more rows
    assert by_op == forward * tiles
    stream = torch.randn(32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        added = torch.ops.fxtune.lora_mlp(
            x.bfloat16(),
            a + a_down,
            b + b_down,
            [up],
            [down],
            [1.0] * 3,
            DENSE_CUTE,
            DENSE_CUTE,
            "silu",
            False,
            tiles,
            stream,
        )[0]
    assert by_op == forward * 2 * tiles, "with the residual stream, too"
    torch.testing.assert_close(added, y + stream, rtol=2e-2, atol=2e-2)
    by_op.clear()
    y.float().sum().backward()
    assert by_op == ([*forward[: 1 if tiles > 1 else 0], (rows, 32, 64), (rows, 96, 48)]) * tiles


def test_head_uses_the_kernel_forward_and_backward(small, by_op):
    weight, labels = torch.randn(50, 32, dtype=torch.bfloat16), torch.arange(20)
    found = []
    for gemm in (CUBLAS, CUTE):
        hidden = torch.ones(20, 32, dtype=torch.bfloat16).cumsum(0).div_(20).requires_grad_()
        loss = heads.linear_cross_entropy(hidden, weight, labels, gemm=gemm, chunk_rows=10)
        loss.backward()
        found.append((loss.detach(), hidden.grad, -heads.linear_log_probs(hidden, weight, labels, gemm=gemm)))
    # On a CPU the logits' rows begin every 50 numbers, which is not on 16 bytes. On a GPU they do: every 64.
    assert by_op == []
    weight, labels = torch.randn(64, 32, dtype=torch.bfloat16), torch.arange(20)
    heads.linear_cross_entropy(hidden.detach().requires_grad_(), weight, labels, gemm=CUTE, chunk_rows=10)
    assert by_op == [(10, 32, 64), (10, 64, 32)] * 2
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_quack_is_called_as_measured_and_caches_in_our_folder(quack, tmp_path):
    state = torch.random.get_rng_state()
    matmul.prepare(torch.device("cpu"), torch.bfloat16, tmp_path)
    assert str(tmp_path) == quack.cache.CACHE_DIR
    assert [call[:7] for call in quack.calls] == [(256, 192, 1, 2, False, True, False)] * 3
    assert [call[7:] for call in quack.calls] == [  # both orders in memory, and with a third tensor
        ((1064, 1), (784, 1), False),
        ((1064, 1), (1, 1064), False),
        ((1064, 1), (1, 1064), True),
    ]
    matmul.prepare(torch.device("cpu"), torch.bfloat16, tmp_path)
    assert len(quack.calls) == 3
    assert torch.equal(state, torch.random.get_rng_state())
    quack.cache.CACHE_DIR = "/the/users/own"
    with torch.autocast("cpu", torch.bfloat16):
        matmul.prepare(torch.device("cpu"), torch.float16, tmp_path)
    assert (quack.cache.CACHE_DIR, len(quack.calls)) == ("/the/users/own", 6)


def test_kernel_with_wrong_products_is_rejected(quack, tmp_path):
    right = quack.gemm.gemm
    quack.gemm.gemm = lambda A, B, D, *rest, **named: (right(A, B, D, *rest, **named), D[-1].zero_())
    with pytest.raises(RuntimeError, match="from float32's"):
        matmul.prepare(torch.device("cpu"), torch.bfloat16, tmp_path)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            replace(H200, capability=(8, 0), device_name="NVIDIA A100"),
            "9.0 (H100, H200), and this is NVIDIA A100, 8.0",
        ),
        (replace(H200, capability=(10, 0), device_name="NVIDIA B200"), "this is NVIDIA B200, 10.0"),
        (replace(H200, device="cpu", capability=None), "and this is cpu"),
        (replace(H200, packages={}), "none is installed: pip install 'quack-kernels[cu13]==0.6.5'"),
        (replace(H200, packages={"quack-kernels": "0.7.0"}), "0.7.0 is installed: pip install"),
        (replace(H200, dtype="float32"), "techniques.precision.autocast=bfloat16"),
        (replace(H200, techniques=enable(quantize={})), "techniques.quantize.enabled=true"),
        (replace(H200, micro_batch_size=1, rows=(1024,)), "this one has 1,024"),
        (replace(H200, model={"hidden_size": 576}), "a size of 576"),
    ],
)
def test_unavailable_kernel_is_refused_by_name_and_auto_uses_cublas(facts, reason):
    assert gemm_backend.refusal(H200) is None
    assert gemm_backend.refusal(replace(H200, micro_batch_size=1)) is None, "a head of 4,096 rows, and experts"
    assert reason in gemm_backend.refusal(facts)
    facts = replace(
        facts,
        model=random_shape() | facts.model,
        techniques=replace(facts.techniques, lora=lora().lora),
    )
    auto = lora(fused=Switch.on).lora
    note = auto.resolve(facts)
    assert note is None if facts.device == "cpu" else reason in note


def random_shape() -> dict:
    return {**FAMILIES["llama"], "hidden_size": 4096, "intermediate_size": 14336}


def test_auto_uses_the_kernel_on_a_supported_gpu():
    facts = replace(H200, model=random_shape(), techniques=lora())
    technique = lora(fused=Switch.on).lora
    assert technique.resolve(facts) == "large products by quack's kernel, the faster one here"
    assert lora(fused=Switch.off).lora.resolve(facts) is None
    dropout = replace(facts, techniques=lora(dropout=0.1))
    assert "products by cuBLAS (techniques.lora.dropout=0.1" in lora(fused=Switch.on).lora.resolve(dropout)


def model_with(monkeypatch, by_quack: bool):
    """A model of two small layers in bfloat16, built as on a GPU that the kernel supports."""
    monkeypatch.setattr(gemm_backend, "refusal", lambda facts: None)
    pipeline = lora(fused=Switch.on)
    pipeline.lora._by_quack = by_quack
    return pipeline, prepared_model(pipeline, random_model("llama"), dtype="bfloat16")


def test_two_models_of_one_process_use_different_kernels(monkeypatch, small, by_op, quack):
    _, plain = model_with(monkeypatch, False)
    _, cute = model_with(monkeypatch, True)
    assert (LanguageModel(plain).gemm, LanguageModel(cute).gemm) == (CUBLAS, CUTE)
    outs = []
    for model, calls in ((plain, False), (cute, True), (plain, False)):
        by_op.clear()
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(model.module(**make_probe(model.module)).logits)
        assert bool(by_op) == calls
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_verify_reports_which_kernel_ran(monkeypatch, small, quack):
    _, model = model_with(monkeypatch, True)
    with torch.autocast("cpu", torch.bfloat16):
        told, was = gemm_backend.observe(model.module)
        assert was, told
        assert "2 products" in told
        monkeypatch.setattr(matmul, "MIN_SIZE", 4096)
        told, was = gemm_backend.observe(model.module)
        assert was is None
        assert "large enough" in told


def test_verify_multiplies_by_a_whole_matrix_where_ranks_divide_the_weights(monkeypatch, small, quack, tmp_path):
    _, model = model_with(monkeypatch, True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for group in fused_modules.groups(model.module, DENSE_CUTE):
            group.weight = nn.Parameter(distribute_tensor(group.weight.data, mesh, [Shard(0)]), requires_grad=False)
        with torch.autocast("cpu", torch.bfloat16):
            told, was = gemm_backend.observe(model.module)
    finally:
        dist.destroy_process_group()
    assert was, told
    assert "2 products" in told


def test_kernel_that_does_not_compile_is_one_note(monkeypatch, small, quack):
    def broken(*_, **__):
        raise TypeError("no such architecture\nsecond line")

    quack.gemm.gemm = broken
    pipeline, model = model_with(monkeypatch, True)
    assert LanguageModel(model).gemm == CUBLAS
    with torch.autocast("cpu", torch.bfloat16):
        found = [
            observation
            for observation in pipeline.lora.verify(model, make_probe(model.module))
            if "large products" in observation.asked
        ]
    assert [observation.acted for observation in found] == [True]
    assert found[0].observed == "cuBLAS, since quack's kernel did not compile here (TypeError: no such architecture)"


def test_facts_include_the_package():
    """Its version, on a machine that has it."""
    assert "quack-kernels" in PACKAGES
    installed = {found.name: found.version for found in metadata.distributions()}
    assert facts_of(random_model("llama")).packages.get("quack-kernels") == installed.get("quack-kernels")


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "taken"),
    [
        (65536, 4096, 28672, True),
        (76800, 4096, 28672, False),
        (6144, 8192, 262144, False),
        (6144, 262144, 8192, False),
    ],
    ids=["all near", "a result", "a head", "its transpose"],
)
def test_tensors_beyond_32_bit_offsets_use_cublas(monkeypatch, rows, inner, columns, taken):
    monkeypatch.setattr(matmul, "processors_of", lambda device: 132)
    monkeypatch.setattr(matmul, "MIN_UTILIZATION", 0.0)
    left, right, back, out = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((rows, inner), (inner, columns), (columns, inner), (rows, columns))
    )
    assert is_served(left, right, out) == is_served(left, back.t(), out) == taken
