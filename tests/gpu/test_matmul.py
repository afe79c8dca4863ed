"""quack's matmul on a Hopper GPU: accurate at the sizes of an 8B model, reproducible, and faster than cuBLAS."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from support import reference
from support.decoder_sizes import decoder_sizes

from fxtune.cli import doctor
from fxtune.distributed.world import World
from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.kernels import matmul
from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE, augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.kernels.linear_cross_entropy import linear_cross_entropy
from fxtune.kernels.matmul import CUTE, is_served, mm
from fxtune.models.load import DType, Init, ModelConfig, load_config
from fxtune.system.machine.host import cache_home
from fxtune.system.process.profiler import observe_operators
from fxtune.techniques.assemble import assemble
from fxtune.techniques.lora import gemm_backend
from fxtune.techniques.pipeline import Pipeline, make_probe

GPU = torch.device("cuda", 0)
R = 32
SHAPES = {"qkv": (6144, 4096, 48), "o": (4096, 4096, 16), "gate_up": (28672, 4096, R), "down": (4096, 14336, 16)}
"""Numbers out and in, and the padded ranks, of the groups of Llama 3's 8B."""


@pytest.fixture(autouse=True)
def _capable():
    if torch.cuda.get_device_capability() != matmul.CAPABILITY:
        pytest.skip("quack's kernel is taken on compute capability 9.0")
    try:
        found = metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != matmul.VERSION:
        pytest.skip(f"needs quack-kernels {matmul.VERSION}, and {found} is here")
    for dtype in (torch.bfloat16, torch.float16):
        matmul.prepare(GPU, dtype, cache_home() / "quack")


def drawn(rows: int, columns: int, stride: int | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, stride or columns, device=GPU, dtype=dtype)[:, :columns]


@pytest.fixture
def all_sizes(monkeypatch):
    """Also use the kernel for few rows and for sizes that leave processors idle."""
    monkeypatch.setattr(matmul, "MIN_UTILIZATION", 0.0)
    monkeypatch.setattr(matmul, "MIN_ROWS", 2048)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [16384, 5003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_accurate_and_reproducible(name, rows, dtype, all_sizes):
    out, inner, rank = SHAPES[name]
    made = drawn(out + rank, inner + rank, dtype=dtype)
    for left, right in (
        (drawn(rows, inner + rank, dtype=dtype), made[:out].t()),
        (drawn(rows, out + rank, dtype=dtype), made[:, :inner]),
    ):
        into = torch.full((rows, right.shape[1]), float("nan"), device=GPU, dtype=dtype)
        assert is_served(left, right, into)
        found = mm(left, right, into, CUTE)
        assert found is into
        assert torch.equal(found, mm(left, right, gemm=CUTE))
        at = torch.cat([torch.arange(64), torch.arange(rows - 300, rows)]).to(GPU)  # the last tile's rows, too
        exact = left[at].float() @ right.float()
        assert reference.relative(found[at], exact) < reference.LIMITS["bfloat16"]
        # and no further from float32 than cuBLAS, whose rounding of the result is the same
        assert reference.relative(found[at], exact) <= 1.01 * reference.relative((left[at] @ right), exact)
        assert torch.isfinite(found).all()
        plus = drawn(rows, right.shape[1], right.shape[1] + 8, dtype)
        for gemm in (CUTE, matmul.CUBLAS):
            total = mm(left, right, into.fill_(float("nan")), gemm, plus)
            assert torch.equal(total, mm(left, right, torch.empty_like(into), gemm, plus))
            wanted = exact + plus[at].float()
            assert reference.relative(total[at], wanted) < reference.LIMITS["bfloat16"]
            assert torch.isfinite(total).all()
            # The kernel rounds once, and only sums in another order differ. cuBLAS rounds twice, and then a quarter
            # of the results differs.
            taken = gemm == CUTE and is_served(left, right, into, plus)
            assert taken == (gemm == CUTE and right.stride(0) == 1)
            assert not taken or (total[at] == wanted.to(dtype)).float().mean() > 0.9


def test_tensors_with_more_elements_than_int32_holds(monkeypatch):
    """A row of 400k tokens: q, k and v, and their gradients, have 2.5e9 numbers."""
    monkeypatch.setattr(matmul, "MAX_SPAN", 2**40)
    (out, inner, rank), rows = SHAPES["qkv"], 409_600
    assert rows * out > 2**31
    made = drawn(out + rank, inner + rank)
    at = torch.cat(
        [torch.arange(64), torch.arange(2**31 // out - 64, 2**31 // out + 64), torch.arange(rows - 300, rows)]
    ).to(GPU)
    for left, right in ((drawn(rows, inner + rank), made[:out].t()), (drawn(rows, out + rank), made[:, :inner])):
        into = torch.full((rows, right.shape[1]), float("nan"), device=GPU, dtype=torch.bfloat16)
        assert is_served(left, right, into)
        mm(left, right, into, CUTE)
        assert reference.relative(into[at], left[at].float() @ right.float()) < reference.LIMITS["bfloat16"]
        assert torch.isfinite(into.sum(1)).all()
        del left, into


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "stride"),
    [(2048, 1024, 1024, 1032), (2049, 1032, 1032, 1048), (4095, 4096, 50256, 50304), (3000, 1111, 5000, 5000)],
)
@pytest.mark.parametrize("across", [False, True])
def test_sizes_that_are_not_multiples_of_a_tile(rows, inner, columns, stride, across, all_sizes):
    up = lambda size: -(-size // 8) * 8  # noqa: E731
    left = drawn(rows, inner, up(inner) + 16)
    right = drawn(columns, inner, up(inner)).t() if across else drawn(inner, columns, up(columns) + 8)
    whole = torch.full((rows, stride), 7.0, device=GPU, dtype=torch.bfloat16)
    out = whole[:, :columns]
    assert is_served(left, right, out)
    mm(left, right, out, CUTE)
    assert reference.relative(out, left.float() @ right.float()) < reference.LIMITS["bfloat16"]
    assert (whole[:, columns:] == 7.0).all(), "the kernel must not write between the rows"


def test_rows_not_aligned_to_16_bytes_use_cublas(all_sizes):
    whole = torch.full((2049, 1048), 7.0, device=GPU, dtype=torch.bfloat16)
    left, right, out = drawn(2049, 1032), drawn(1032, 1031, 1040), whole[:, :1031]
    assert not is_served(left, right, out)
    mm(left, right, out, CUTE)
    assert reference.relative(out, left.float() @ right.float()) < reference.LIMITS["bfloat16"]
    assert (whole[:, 1031:] == 7.0).all()


def test_kernel_works_in_cuda_graphs(all_sizes):
    left, right = drawn(4096, 2048), drawn(3072, 2048).t()
    out = torch.zeros(4096, 3072, device=GPU, dtype=torch.bfloat16)  # a shape that was not used before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mm(left, right, out, CUTE)
    left.normal_()
    graph.replay()
    assert reference.relative(out, left.float() @ right.float()) < reference.LIMITS["bfloat16"]


def test_quack_kernels_occur_in_the_profile():
    left, right, out = drawn(16384, 4096), drawn(4096, 4096), drawn(16384, 4096)
    seen = observe_operators(lambda: mm(left, right, out, CUTE), {"cute": gemm_backend.OPERATOR})["cute"]
    print(sorted(seen.kernels))
    assert seen.calls == 1
    assert not seen.kernels or any("cutlass" in name and "quack" in name for name in seen.kernels), seen.kernels


def group(outs, inner, ranks):
    a = [(torch.randn(rank, inner, device=GPU) / inner**0.5).requires_grad_() for rank in ranks]
    b = [(torch.randn(out, rank, device=GPU) * 0.1).requires_grad_() for out, rank in zip(outs, ranks, strict=True)]
    return a, b, augment([drawn(out, inner) / inner**0.5 for out in outs], ranks)


@pytest.mark.parametrize("tiles", [1, 2])
def test_operators_and_head_agree_with_cublas(tiles):
    rows = 16384 * tiles
    a, b, up = group((14336, 14336), 4096, (16, 16))
    a_down, b_down, down = group((4096,), 14336, (16,))
    head, labels = drawn(65536, 4096) / 64, torch.randint(0, 65536, (4096,), device=GPU)
    x = drawn(rows, 4096)
    found = []
    for kind, gemm in ((DENSE, matmul.CUBLAS), (DENSE_CUTE, CUTE)):
        leaf = x.clone().requires_grad_()
        y = lora_mlp(leaf, a + a_down, b + b_down, [up], [down], [2.0] * 3, kind, kind, tiles=tiles)
        z = lora_linear(y, a[:1], b[:1], [augment([up[:14336, :4096]], [16])], [2.0], kind)
        loss = linear_cross_entropy(y[:4096], head, labels, gemm=gemm)
        grads = torch.autograd.grad(loss / 4096 + z.float().square().mean(), [leaf, *a, *b, *a_down, *b_down])
        found.append([y.detach(), loss.detach(), *grads])
    for one, other in zip(*found, strict=True):
        assert reference.relative(other, one) < 1e-2


def test_model_uses_the_kernel_and_reports_it():
    shape = dict(
        reference.SHAPES["llama"],
        **decoder_sizes(4096, 14336, heads=32, key_heads=8),
    )
    model, world = ModelConfig(path=None, architecture=shape, init=Init.random, dtype=DType.bfloat16), World.create()
    told = {}
    for fused in (Switch.on, Switch.off):
        pipeline = Pipeline()
        pipeline.lora.enabled, pipeline.lora.r, pipeline.lora.fused = True, 16, fused
        config = load_config(model)
        facts = Facts.of(
            world.facts(),
            model=config.to_dict(),
            dtype="bfloat16",
            packing=True,
            sequence_length=8192,
            rows=(8192,),
            micro_batch_size=2,
        )
        chosen, notes = pipeline.resolved(facts)
        prepared = assemble(chosen, model, config, world, 0)
        built = prepared.module
        told[fused] = (
            [one.observed for one in chosen.prove(prepared, make_probe(built)) if "large products" in one.asked],
            notes,
        )
    print(told)
    assert any("large products by quack's kernel" in note for note in told[Switch.on][1])
    assert told[Switch.off][0] == []
    assert "2 products by" in told[Switch.on][0][0]


def test_doctor_tests_the_kernel():
    answer = doctor.run_check("quack-kernels", True, doctor.TIMEOUT_GPU)
    print(answer)
    assert answer["state"] == "works", answer


@pytest.mark.timed
def test_kernel_is_faster_than_cublas():
    """Printed; asserted only that it is no slower, since the card's clock depends on what it did before."""
    times = {}
    for name in ("gate_up", "down"):
        out, inner, rank = SHAPES[name]
        made = drawn(out + rank, inner + rank)
        for way, left, right in (
            ("forward", drawn(16384, inner + rank), made[:out].t()),
            ("dx", drawn(16384, out + rank), made[:, :inner]),
        ):
            into = torch.empty(16384, right.shape[1], device=GPU, dtype=torch.bfloat16)
            times[f"{name} {way}"] = [
                milliseconds(lambda gemm=gemm, left=left, right=right, into=into: mm(left, right, into, gemm))
                for gemm in (matmul.CUBLAS, CUTE)
            ]
    for name, (cublas, cute) in times.items():
        print(f"{name}: cuBLAS {cublas:.3f} ms, quack {cute:.3f} ms")
    assert sum(cute for _, cute in times.values()) < 1.01 * sum(cublas for cublas, _ in times.values()), times


def milliseconds(run, seconds: float = 0.3) -> float:
    """Time under the load of a step: back to back, at the GPU's power limit."""

    def took(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    return took(max(round(seconds * 1e3 / took(3)), 3))
