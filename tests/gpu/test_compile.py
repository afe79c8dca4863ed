"""Compiled code on a GPU equals eager code, has no graph breaks or recompilations, and its CUDA graphs are correct."""

from __future__ import annotations

import copy
import dataclasses
import time

import pytest
import torch
from support import reference

from fxtune.facts.options import CompileMode, Dynamic, Scope
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.cuda_graphs import Recorder
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.pipeline import Pipeline

LENGTHS = [(700, 600, 500), (1200, 300, 300), (60, 900, 840), (1, 2, 1797)]
"""Rows of 1,800 tokens with three documents each."""

EACH = pytest.mark.parametrize(
    ("shape", "scope"), [*((shape, Scope.layers) for shape in reference.SHAPES), ("gemma", Scope.model)]
)
"""The complete decoder as one graph. It takes longest to compile, so only for one family."""


def pipeline(compiled: Compile | None = None, backend: str = "eager", **techniques) -> Pipeline:
    made = Pipeline(**techniques)
    made.attention.backend = backend
    made.precision.tf32 = False
    made.compile = compiled or Compile()
    return made


def asked(scope: Scope, mode: CompileMode = CompileMode.default, **options) -> Compile:
    return Compile(True, scope=scope, mode=mode, **options)


@EACH
def test_compiled_float32_equals_eager(shape, scope):
    given = reference.batch(shape)
    seen = reference.ours(pipeline(asked(scope)), shape, given, dtype="float32")
    eager = reference.ours(pipeline(), shape, given, dtype="float32")
    to_eager, to_plain = (reference.relative_errors(seen, other) for other in (eager, reference.plain(shape, given)))
    assert to_eager["loss"] < reference.LIMITS["float32"], to_eager
    assert to_eager["logits"] < reference.LIMITS["float32"], to_eager
    assert to_eager["grads"] < 2 * reference.LIMITS["float32"], to_eager
    assert to_plain["grads"] < 10 * reference.LIMITS["float32"], to_plain  # sums over 1,800 tokens in another order
    print(f"\n{shape} {scope.value} float32: from eager {to_eager}, from plain transformers {to_plain}")


@EACH
def test_compiled_bfloat16_is_as_accurate_as_eager(shape, scope):
    given = reference.batch(shape)
    exact = reference.plain(shape, given, lora=True)
    seen = reference.relative_errors(reference.ours(pipeline(asked(scope), "sdpa"), shape, given, lora=True), exact)
    eager = reference.relative_errors(reference.ours(pipeline(None, "sdpa"), shape, given, lora=True), exact)
    assert seen["loss"] < eager["loss"] + 1e-3, (seen, eager)
    assert seen["logits"] < 1.1 * eager["logits"], (seen, eager)
    assert seen["grads"] < 1.1 * eager["grads"], (seen, eager)
    print(f"\n{shape} {scope.value} bfloat16: compiled {seen}, eager {eager}")


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_rows_of_other_contents_do_not_recompile(scope, checkpointed):
    techniques = pipeline(asked(scope), "sdpa", checkpointing=Checkpointing(enabled=checkpointed))
    model, techniques, evidence, _ = reference.build(techniques, "llama", reference.batch("llama"), lora=True)
    assert all(seen.acted for seen in evidence)
    reports = []
    for seed, lengths in enumerate(LENGTHS):
        reference.loss_of(techniques, model, reference.batch("llama", lengths, seed)).backward()
        reports.append(techniques.compile.report())
    assert {report.graphs for report in reports} == {reports[0].graphs}, list(reports[-1].lines())
    assert reports[-1].breaks == []
    assert reports[-1].lengths["1x1800"] <= 2, list(reports[-1].lines())  # by layer: the first, and the rest
    with torch.no_grad():
        reference.loss_of(techniques, model.eval(), reference.batch("llama"))
    report = techniques.compile.report()
    assert any("grad_mode" in reason for reason in report.recompiles), report
    assert report.seconds > 0
    assert report.from_disk + report.anew > 0
    print("", *report.lines(), sep="\n")


def test_dynamic_lengths_share_a_graph():
    lengths = [(700, 600, 500), (300, 200, 100), (400, 1000, 20)]
    techniques = pipeline(asked(Scope.layers, dynamic=Dynamic.always))
    model, techniques, _, _ = reference.build(techniques, "llama", reference.batch("llama"), dtype="float32")
    plain, eager, _, _ = reference.build(pipeline(), "llama", reference.batch("llama"), dtype="float32")
    known = None
    for seed, row in enumerate(lengths):
        given = reference.batch("llama", row, seed)
        ours = reference.loss_of(techniques, model, given)
        ours.backward()
        assert abs(ours.item() / reference.loss_of(eager, plain, given).item() - 1) < 1e-5
        known = known or techniques.compile.report().graphs
    assert techniques.compile.report().graphs == known


def trained(
    compiled: Compile, shape, checkpointed: bool, steps: int = 4
) -> tuple[list[torch.Tensor], list[float], float]:
    """Weights and held-out losses of some steps of two micro-batches with an evaluation after each, and the
    milliseconds per step.
    """
    techniques = pipeline(compiled, checkpointing=Checkpointing(enabled=checkpointed))
    model, techniques, _, _ = reference.build(techniques, shape, reference.batch(shape), dtype="float32")
    sgd = OptimizerConfig(
        name=OptimizerName.sgd
    )  # Adam would follow the sign of gradients that are only rounding errors
    optimizer = Optimizer(model, sgd, techniques.compile.keep_gradients)
    losses = []
    for step in range(steps):
        for part in (0, 1):
            given = reference.batch(shape, LENGTHS[(step + part) % 4], 10 * step + part)
            (reference.loss_of(techniques, model, given) / 1800).backward()
        norm = optimizer.clip(1.0)
        optimizer.step(0.1, torch.isfinite(norm))
        with torch.no_grad():
            model.eval()
            losses.append(reference.loss_of(techniques, model, reference.batch(shape, seed=99)).item())
            model.train()
    return (
        [parameter.detach().clone() for parameter in model.parameters()],
        losses,
        _milliseconds(techniques, model, optimizer),
    )


def _milliseconds(techniques, model, optimizer) -> float:
    """Milliseconds of a forward and backward pass after warm-up."""
    loss, given = reference.with_head(techniques, model), reference.batch("llama", seed=5)
    for _timed in (False, True):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            loss.summed_loss(given).backward()
            optimizer.step(0.0, torch.tensor(False, device="cuda"))
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / 20 * 1000


@pytest.mark.parametrize("checkpointed", [False, True])
def test_cuda_graphs_train_and_evaluate_like_plain_code(checkpointed):
    eager, eager_losses, slow = trained(Compile(), "llama", checkpointed)
    graphed, losses, fast = trained(asked(Scope.model, CompileMode.reduce_overhead), "llama", checkpointed)
    assert losses == pytest.approx(eager_losses, rel=1e-4)
    apart = reference.relative(torch.cat([p.flatten() for p in graphed]), torch.cat([p.flatten() for p in eager]))
    assert apart < 1e-5, apart
    print(f"\neager {slow:.2f} ms, CUDA graphs {fast:.2f} ms a micro-batch; weights {apart:.1e} apart")


def test_cuda_graphs_add_the_gradients_of_successive_micro_batches():
    """torch would return the graph's own memory as the first gradient, and later micro-batches would overwrite it."""
    given = [reference.batch("llama", lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    gradients = []
    for compiled in (Compile(), asked(Scope.model, CompileMode.reduce_overhead)):
        model, techniques, _, _ = reference.build(pipeline(compiled), "llama", given[0], dtype="float32", lora=True)
        optimizer = Optimizer(model, OptimizerConfig(), techniques.compile.keep_gradients)
        for _ in range(4):  # warm-up, recording, replay
            optimizer.step(0.0, torch.tensor(False, device="cuda"))
            for each in given:
                reference.loss_of(techniques, model, each).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in optimizer.names]))
    assert reference.relative(gradients[1], gradients[0]) < 1e-4


def test_recorded_pass_does_not_change_weights_without_a_gradient():
    """With zero gradients in place of missing ones, weight decay would change them."""

    @dataclasses.dataclass
    class Given:
        x: torch.Tensor

    def trained(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(64, 64, device="cuda") for _ in range(3)])
        optimizer = Optimizer(model, OptimizerConfig(weight_decay=0.1), keep_gradients=recorded)

        def one_pass(given: Given, number: torch.Tensor) -> torch.Tensor:
            used = model[1] if len(given.x) == 8 else model[2]  # the shape decides, as the recording's
            loss = used(model[0](given.x)).square().mean() / number
            loss.backward()
            return loss.detach()

        device = torch.device("cuda")
        call = Recorder(one_pass, device, optimizer.reached) if recorded else one_pass
        for step in range(12):
            rows = 8 if step % 3 else 16
            given = Given(torch.randn(rows, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step)))
            call(given, 2.0)
            optimizer.step(1e-2, torch.isfinite(optimizer.clip(1.0)))
        if recorded:
            assert call.replayed > 6
        return [parameter.detach().clone() for parameter in model.parameters()]

    for plain, recorded in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(recorded, plain, rtol=0, atol=1e-4)


def test_cuda_graphs_are_launched():
    techniques = pipeline(asked(Scope.model, CompileMode.reduce_overhead), "sdpa")
    model, techniques, evidence, _ = reference.build(techniques, "llama", reference.batch("llama"), lora=True)
    optimizer = Optimizer(model, OptimizerConfig(), techniques.compile.keep_gradients)
    assert [seen.observed for seen in evidence if seen.asked == "recorded as CUDA graphs"] == ["0 graphs not recorded"]
    for _ in range(4):
        reference.loss_of(techniques, model, reference.batch("llama")).backward()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        reference.loss_of(techniques, model, reference.batch("llama")).backward()
        torch.cuda.synchronize()
    launches = sum(event.count for event in profile.key_averages() if "cudaGraphLaunch" in event.key)
    assert launches >= 2, "forward and backward"
    assert techniques.compile.report().skipped_cuda_graphs == 0
    assert len(optimizer.names) > 0


@pytest.mark.timed
def test_cuda_graphs_are_fastest_for_small_models():
    small = dict(reference.SHAPES["llama"], hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    took = {}
    for name, compiled in {
        "eager": Compile(),
        "layers": asked(Scope.layers),
        "graphs": asked(Scope.model, CompileMode.reduce_overhead),
    }.items():
        given = reference.batch(small, (100, 90, 66))
        model, techniques, _, _ = reference.build(pipeline(copy.deepcopy(compiled), "sdpa"), small, given, lora=True)
        optimizer = Optimizer(model, OptimizerConfig(), techniques.compile.keep_gradients)
        loss = reference.with_head(techniques, model)
        for _ in range(2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(20):
                loss.summed_loss(given).backward()
                optimizer.step(1e-5, torch.tensor(True, device="cuda"))
            torch.cuda.synchronize()
            took[name] = (time.perf_counter() - begun) / 20 * 1000
    print("\nms a step of 256 tokens, 8 layers of 512:", {name: round(value, 2) for name, value in took.items()})
    assert took["graphs"] < took["layers"]
    assert took["graphs"] < took["eager"]
