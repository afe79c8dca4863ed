"""Checkpointing on a GPU: equal gradients, the memory that each policy promises, and the time of offload.

`pytest tests/gpu/test_checkpointing.py -s` prints the forecasts and the measurements.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from support import reference
from support.decoder_sizes import decoder_sizes

from fxtune.estimate.memory import forecast
from fxtune.facts.options import Offloaded, Policy, Switch
from fxtune.facts.run import Facts
from fxtune.system.terminal.units import GIB
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.report import MAX_RECOMPILES
from fxtune.techniques.pipeline import Pipeline

BIG = dict(
    reference.SHAPES["llama"],
    **decoder_sizes(2048, 8192, layers=8, heads=16, key_heads=4, vocabulary=32000),
    max_position_embeddings=65536,
)
LEFT = 1 << 27
"""What may remain allocated after a model of 1.2 GiB is freed: libraries' workspaces, gradients that a test keeps."""
NARROW = {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"policy": Policy.none},
    "selective": {"policy": Policy.selective},
    "narrow": NARROW,
    "attention": {"policy": Policy.selective, "save": ["attention"]},
    "full": {},
    "offload": {"offload": Offloaded.inputs},
    "offload_tiles": {"offload": Offloaded.inputs, "mlp_tiles": 8},
}
MIXES: dict[str, dict[str, Any]] = {
    "narrow_wide": {"policy": Policy.mix, "mix": {"narrow": 4, "wide": 4}},
    "input_everything": {"policy": Policy.mix, "mix": {"input": 5, "everything": 3}},
    "narrow_sent": {**NARROW, "offload": Offloaded.kept},
    "mix_sent": {
        "policy": Policy.mix,
        "mix": {"attention": 2, "narrow": 3, "wide": 3},
        "offload": Offloaded.kept,
    },
    "narrow_sent_tiles": {**NARROW, "offload": Offloaded.kept, "mlp_tiles": 4},
}


def pipeline(compiled: bool = True, backend: str = "auto", fused: Switch = Switch.auto, **options: Any) -> Pipeline:
    made = Pipeline(checkpointing=Checkpointing(enabled=True, **options))
    made.lora.fused = fused
    made.precision.autocast = type(made.precision.autocast)("bfloat16")
    made.attention.backend = backend
    made.liger.enabled = True
    made.compile.enabled = compiled
    return made


class Measured:
    """A built model, and the memory and time of its steps on one packed row."""

    before = 0
    """Allocated bytes when the last instance was made."""

    def __init__(self, made: Pipeline, shape: dict[str, Any], tokens: int, lora: bool = True) -> None:
        Measured.before = torch.cuda.memory_allocated()
        self.given = reference.batch(shape, lengths=(tokens // 2, tokens // 4, tokens // 4), supervised=1.0)
        torch.manual_seed(0)
        prepared, self.pipeline, self.evidence, self.notes = reference.prepare(made, shape, self.given, lora=lora)
        self.model, self.offload = prepared.module, prepared.offload
        from fxtune.objectives.language_model import LanguageModel

        self.loss = LanguageModel(prepared, self.pipeline.liger)
        # Proofs run forward passes without a backward pass, so their inputs are never fetched.
        self.proving = (self.offload.inputs_sent - self.offload.inputs_fetched) if self.offload else 0
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self) -> torch.Tensor:
        for parameter in self.trained:
            parameter.grad = None
        with self.pipeline.precision.context(self.given.input_ids.device):
            loss = self.loss.summed_loss(self.given)
        loss.backward()
        return loss.detach()

    def peak(self) -> int:
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def seconds(self, steps: int = 6) -> float:
        self.step()
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by their names in plain transformers and peft."""
        return {
            reference._plain_name(name): parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def freed() -> None:
    """Check that the memory of the last `Measured` has been freed."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() - Measured.before
    assert left < LEFT, f"{left / GIB:.2f} GiB of a deleted model are still allocated"


def expected(measured: Measured, shape: dict[str, Any], tokens: int) -> int:
    """The forecast bytes of one step without an optimizer and without a safety margin."""
    from fxtune.distributed.world import World

    facts = Facts.of(
        World(torch.device("cuda", 0)).facts(),
        model=shape,
        dtype="bfloat16",
        packing=True,
        sequence_length=tokens,
        rows=(tokens,),
        micro_batch_size=1,
        techniques=measured.pipeline,
    )
    need = forecast(facts, measured.pipeline.checkpointing.plan)
    return need.allocated - (need.trained - need.gradients)


@pytest.fixture
def _deterministic(monkeypatch):
    """Use deterministic algorithms. Otherwise attention's backward pass adds in a random order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(("shape", "lora"), [*((shape, True) for shape in reference.SHAPES), ("llama", False)])
def test_eager_recomputation_changes_no_bit(shape, lora):
    """One rounding of one adapter may differ. A fused MLP that saves only its input recomputes the product with
    down_proj's A by another kernel than the forward pass, and the gradient of down_proj's B depends on it.
    """
    given = reference.batch(shape)
    plain = reference.ours(pipeline(False, "sdpa", policy=Policy.none), shape, given, lora=lora)
    for name, options in {
        "full": {},
        "selective": {"policy": Policy.selective},
        "narrow": NARROW,
        "offload": {"offload": Offloaded.inputs},
        "narrow_offload": {**NARROW, "offload": Offloaded.inputs},
    }.items():
        seen = reference.ours(pipeline(False, "sdpa", **options), shape, given, lora=lora)
        wrong = [key for key in plain.grads if not torch.equal(seen.grads[key], plain.grads[key])]
        assert seen.loss == plain.loss, name
        anew = [key for key in wrong if name.startswith("narrow") and "mlp.down_proj.lora_B" in key]
        assert all(reference.relative(seen.grads[key], plain.grads[key]) < 1e-3 for key in anew)
        wrong = [key for key in wrong if key not in anew]
        assert not wrong, (name, wrong[:3], reference.relative_errors(seen, plain))


@pytest.mark.parametrize(
    ("shape", "compiled"), [*((shape, False) for shape in reference.SHAPES), ("qwen3", True), ("gemma", True)]
)
def test_every_policy_is_as_accurate_as_none(shape, compiled):
    """Compiled models of the two families that differ most from the shape of the tests below."""
    given = reference.batch(shape)
    exact = reference.plain(shape, given, lora=True)
    none = reference.relative_errors(
        reference.ours(pipeline(compiled, policy=Policy.none), shape, given, lora=True), exact
    )
    for name, options in {
        "full": {},
        "narrow": NARROW,
        "offload": {"offload": Offloaded.inputs},
        "tiles": {"mlp_tiles": 4},
    }.items():
        seen = reference.relative_errors(reference.ours(pipeline(compiled, **options), shape, given, lora=True), exact)
        assert seen["grads"] < 1.1 * none["grads"] + 1e-3, (name, seen, none)
        assert seen["logits"] < 1.1 * none["logits"] + 1e-3, (name, seen, none)
        print(f"\n{shape} {name}: {seen}, without checkpointing {none}")


@pytest.mark.parametrize("fused", [Switch.on, Switch.off], ids=["fused", "peft"])
def test_each_policy_needs_less_memory_as_forecast(fused):
    peaks, forecasts = {}, {}
    for name, options in POLICIES.items():
        if fused is Switch.off and name in (
            "attention",
            "offload",
        ):  # their part of the forecast does not depend on adapters
            continue
        measured = Measured(pipeline(fused=fused, **options), BIG, 8192)
        peaks[name], forecasts[name] = measured.peak(), expected(measured, BIG, 8192)
        print(
            f"\n{name:14} measured {peaks[name] / GIB:6.2f} GiB, forecast {forecasts[name] / GIB:6.2f} "
            f"({forecasts[name] / peaks[name] - 1:+.1%})"
        )
        for seen in measured.evidence:
            if seen.technique == "checkpointing":
                print(f"    {seen.asked} | {seen.observed}")
        del measured
        freed()
    order = list(peaks.values())
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)
    off = {name: forecasts[name] / peaks[name] - 1 for name in peaks}
    assert all(abs(error) < 0.15 for error in off.values()), off


@pytest.fixture(scope="module")
def exact_and_usual() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of BIG in plain transformers in float32 on the CPU, and the error of each without checkpointing."""
    plain = Measured(pipeline(policy=Policy.none), BIG, 8192)
    exact = reference.plain(BIG, plain.given, lora=True).grads
    plain.step()
    usual = {name: reference.relative(gradient.cpu(), exact[name]) for name, gradient in plain.gradients().items()}
    del plain
    freed()
    assert max(usual.values()) < 1, "the reference gradients are not valid"
    return exact, usual


@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES)
def test_mixes_and_offload_need_the_forecast_memory_and_keep_gradients(options, exact_and_usual):
    """Gradients are as accurate as without checkpointing. The compiler may round them differently."""
    measured = Measured(pipeline(**options), BIG, 8192)
    for _ in range(3):
        measured.step()
    exact, usual = exact_and_usual
    off = {name: reference.relative(gradient.cpu(), exact[name]) for name, gradient in measured.gradients().items()}
    assert off.keys() == usual.keys()
    far = {name: (error, usual[name]) for name, error in off.items() if error > 1.3 * usual[name] + 5e-3}
    peak, said = measured.peak(), expected(measured, BIG, 8192)
    report, allowed = measured.pipeline.compile.report(), MAX_RECOMPILES
    host = getattr(measured.model, "offload", None)
    print(
        f"\nmeasured {peak / GIB:.2f} GiB, forecast {said / GIB:.2f} ({said / peak - 1:+.1%}); {report.graphs} graphs; "
        f"host {host.pinned / GIB if host else 0:.2f} GiB"
    )
    for seen in measured.evidence:
        if seen.technique == "checkpointing":
            print(f"    {seen.asked} | {seen.observed}")
    del measured, host  # otherwise a failure below would keep the memory during other tests
    freed()
    assert not far
    assert -0.15 < said / peak - 1 < 0.2  # too high a forecast costs speed, too low a forecast runs out of memory
    assert report.recompilations <= allowed


@pytest.mark.timed
def test_offload_of_kept_tensors_costs_no_time_at_long_rows():
    """Policy narrow at 32k tokens: q, k, v, attention's output and each layer's input are offloaded and fetched."""
    found = {}
    for name, options in {"here": NARROW, "sent": MIXES["narrow_sent"], "full": {}}.items():
        measured = Measured(pipeline(**options), BIG, 32768)
        found[name] = measured.seconds(), measured.peak()
        if name == "sent":
            offload = measured.offload
            print(f"\n{offload.sent / GIB:.1f} GiB sent so far, {offload.pinned / GIB:.2f} GiB pinned")
            assert offload.inputs_sent - offload.inputs_fetched == measured.proving
        del measured
        freed()
    print({name: f"{seconds * 1e3:.0f} ms, {peak / GIB:.2f} GiB" for name, (seconds, peak) in found.items()})
    assert found["sent"][0] < 1.15 * found["here"][0]
    assert found["sent"][0] < found["full"][0]
    assert found["here"][1] - found["sent"][1] > 0.7 * 6 * 2 * (2 * 2048 + 2 * 2048 + 2 * 512) * 32768


def test_pinned_memory_is_at_most_the_forecast():
    from fxtune.distributed.world import World

    measured = Measured(pipeline(**MIXES["narrow_sent"]), BIG, 8192)
    measured.step()
    facts = Facts.of(
        World(torch.device("cuda", 0)).facts(),
        model=BIG,
        dtype="bfloat16",
        packing=True,
        sequence_length=8192,
        rows=(8192,),
        micro_batch_size=1,
        techniques=measured.pipeline,
    )
    said = forecast(facts, measured.pipeline.checkpointing.plan).host
    print(f"\npinned {measured.offload.pinned / GIB:.3f} GiB, forecast {said / GIB:.3f}")
    assert 0.7 * said < measured.offload.pinned <= 1.1 * said


@pytest.mark.parametrize("options", [{"policy": Policy.none}, NARROW, {}], ids=["none", "narrow", "full"])
def test_forecast_holds_for_eager_layers(options):
    measured = Measured(pipeline(False, **options), BIG, 8192)
    peak, said = measured.peak(), expected(measured, BIG, 8192)
    print(f"\neager: measured {peak / GIB:.2f} GiB, forecast {said / GIB:.2f} ({said / peak - 1:+.1%})")
    assert abs(said / peak - 1) < 0.15


@pytest.mark.timed
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_offload_costs_no_time_and_keeps_results(compiled):
    """Three steps each, then timed: 32k tokens, 128 MiB a layer to the host and back. Attention's
    backward pass adds in any order, so gradients are compared with the distance of two runs without offload.
    """
    found = {}
    for name, options in {"full": {}, "again": {}, "offload": {"offload": Offloaded.inputs}}.items():
        measured = Measured(pipeline(compiled, **options), BIG, 32768)
        losses = [measured.step().item() for _ in range(3)]
        found[name] = losses, measured.gradients(), measured.seconds(), measured.peak()
        if name == "offload":
            offload = measured.offload
            assert offload.pinned == 7 * 2 * 2048 * 32768
            assert offload.inputs_sent - offload.inputs_fetched == measured.proving
        del measured
        freed()
    (losses, gradients, seconds, peak), (sent, others, longer, less) = found["full"], found["offload"]
    for key, value in gradients.items():
        assert reference.relative(others[key], value) < 3 * reference.relative(found["again"][1][key], value) + 1e-3, (
            key
        )
    assert all(abs(one - other) < 1e-3 * other for one, other in zip(sent, losses, strict=True))
    print(
        f"\nfull {seconds * 1e3:.0f} ms, {peak / GIB:.2f} GiB; offloaded {longer * 1e3:.0f} ms, {less / GIB:.2f} GiB"
    )
    assert longer < 1.15 * seconds
    assert peak - less > 0.8 * 6 * 2 * 2048 * 32768  # two of eight layers' inputs stay on the device


@pytest.mark.timed
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tiled_mlp_holds_only_a_part_of_gate_and_up(compiled):
    peaks = {}
    for tiles in (1, 8):
        measured = Measured(pipeline(compiled, mlp_tiles=tiles), BIG, 32768)
        peaks[tiles] = measured.peak(), measured.seconds(3)
        del measured
        freed()
    (whole, seconds), (tiled, longer) = peaks[1], peaks[8]
    wide = 2 * 8192 * 32768  # one tensor of the MLP's width
    print(
        f"\nwhole {whole / GIB:.2f} GiB, {seconds * 1e3:.0f} ms; in 8 tiles {tiled / GIB:.2f} GiB, {longer * 1e3:.0f} ms; "
        f"{(whole - tiled) / wide:.1f} tensors of the MLP's width less"
    )
    assert whole - tiled > 1.5 * wide


@pytest.mark.parametrize("fused", [Switch.on, Switch.off], ids=["fused", "peft"])
def test_compiler_keeps_to_its_budget(fused):
    peaks = {}
    for share in (1.0, 0.6, 0.2):
        measured = Measured(pipeline(fused=fused, policy=Policy.budget, budget=share), BIG, 8192)
        peaks[share], allowed = measured.peak(), expected(measured, BIG, 8192)
        print(f"\nbudget {share}: {peaks[share] / GIB:.2f} GiB, forecast {allowed / GIB:.2f}")
        assert peaks[share] < 1.05 * allowed
        del measured
        freed()
    # Fused operators are few and wide: what 60 % of a layer's bytes can hold of them may be no more than what 20 %
    # can.
    assert peaks[1.0] > peaks[0.6] >= peaks[0.2]
    assert fused is Switch.on or peaks[0.6] > peaks[0.2]


def test_saved_flash4_operator_is_not_run_again():
    pytest.importorskip("flash_attn.cute")
    measured = Measured(
        pipeline(backend="flash4", policy=Policy.selective, save=["fxtune.flash4", "matmuls"]), BIG, 8192
    )
    told = [seen.observed for seen in measured.evidence if seen.technique == "checkpointing"]
    assert any("fxtune.flash4 8+0" in one for one in told), told


@pytest.mark.timed
def test_auto_chooses_by_free_memory():
    measured = Measured(pipeline(policy=Policy.auto), BIG, 8192)
    (note,) = (note for note in measured.notes if note.startswith("checkpointing: "))
    print(f"\n{note}")
    assert note.startswith("checkpointing: every layer keeps everything: "), note
    before = torch.cuda.get_per_process_memory_fraction()
    try:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, 5 * GIB / torch.cuda.get_device_properties(0).total_memory)
        )
        del measured
        freed()
        measured = Measured(pipeline(policy=Policy.auto), BIG, 8192)
        (note,) = (note for note in measured.notes if note.startswith("checkpointing: "))
        print(f"\n{note}")
        assert "everything would need" in note
        measured.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
