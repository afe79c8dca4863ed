"""Liger's kernels: which modules get them, with which arguments, and when they are chosen or refused.

Triton's kernels need a GPU (tests/gpu/test_liger.py). Here plain functions with the same signatures replace them, so a model
with them must equal the plain model; each is recorded by the profiler under its kernel's name. RoPE is fxtune's own and runs
here (tests/kernels/test_rotary.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from support.architectures import (
    CPU,
    FAMILIES,
    SIZES,
    built,
    enable,
    facts_of,
    logits,
    lora,
    on_disk,
    random_model,
    trained,
)
from torch.nn import functional as F

from fxtune.errors import ConfigError
from fxtune.kernels import liger_operators
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer
from fxtune.models.save import save_model
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.base import Switch
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.facts import Facts
from fxtune.techniques.liger import technique, timing
from fxtune.techniques.liger.technique import OPERATIONS, Liger
from fxtune.techniques.pipeline import Pipeline, make_probe

OTHERS = {
    "granite": {"model_type": "granite", **SIZES},
    "smollm3": {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 0]},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "olmo3": {
        "model_type": "olmo3",
        **SIZES,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "ministral": {"model_type": "ministral", **SIZES, "head_dim": 16},
    "starcoder2": {"model_type": "starcoder2", **SIZES},
    "phi_qk": {**FAMILIES["phi"], "qk_layernorm": True},
    "phi3_partial": {
        **FAMILIES["phi3"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mistral_gelu": {**FAMILIES["mistral"], "hidden_act": "gelu_pytorch_tanh"},
    "phi3_gelu": {**FAMILIES["phi3"], "hidden_act": "gelu_pytorch_tanh"},
}
EVERY = {**FAMILIES, **OTHERS}
COUNTS = {  # for two layers: norms, RoPE, gated products
    "llama": (5, 2, 2),
    "qwen3": (9, 2, 2),
    "mistral": (5, 2, 2),
    "mistral_sliding": (5, 2, 2),
    "gemma": (5, 2, 2),
    "gemma2": (9, 2, 2),
    "gemma3": (13, 2, 2),
    "phi": (3, 2, 0),
    "phi3": (5, 2, 2),
    "granite": (5, 2, 2),
    "smollm3": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "olmo2": (9, 2, 2),
    "olmo3": (9, 2, 2),
    "ministral": (5, 2, 2),
    "starcoder2": (5, 2, 0),
    "phi_qk": (7, 2, 0),
    "phi3_partial": (5, 2, 2),
    "mistral_gelu": (5, 2, 2),
    "phi3_gelu": (5, 2, 2),
}
GPU = dict(device="cuda", device_name="H200", capability=(9, 0), packages={"liger-kernel": "0.8.5", "torch": "2.11"})


def kernel_named(kernel):
    """Replaces an autograd.Function by a plain function under the kernel's name."""

    def wrap(function):
        def apply(*arguments):
            with torch.profiler.record_function(kernel):
                return function(*arguments)

        return type(function.__name__, (), {"apply": staticmethod(apply)})

    return wrap


@kernel_named("_rms_norm_forward_kernel")
def rms_norm(x, weight, eps, offset, casting, in_place, row_mode):
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (
        (offset + weight) * exact.to(x.dtype)
        if casting == "llama"
        else (exact * (offset + weight.float())).to(x.dtype)
    )


@kernel_named("_layer_norm_forward_kernel")
def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@kernel_named("_swiglu_forward_kernel")
def swiglu(gate, up, gate_multiplier, down_multiplier):
    assert gate_multiplier == down_multiplier == 1.0
    return F.silu(gate) * up


@kernel_named("_swiglu_fused_gate_up_forward_kernel")
def gate_up(both):
    assert both.dim() == 2  # the kernel's backward pass returns a matrix for any shape
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@kernel_named("_geglu_tanh_forward_kernel")
def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


@pytest.fixture
def stand_ins(monkeypatch):
    from liger_kernel import ops

    for name, function in {
        "LigerRMSNormFunction": rms_norm,
        "LigerLayerNormFunction": layer_norm,
        "LigerSiLUMulFunction": swiglu,
        "LigerFusedGateUpSiLUMulFunction": gate_up,
        "LigerGELUMulFunction": geglu,
    }.items():
        monkeypatch.setattr(ops, name, function)


def architecture(family: str) -> ModelConfig:
    model = random_model("llama")
    model.architecture = dict(EVERY[family])
    return model


def operations(model: ModelConfig) -> list[str]:
    """All of Liger's operations that this model has, in order."""
    return [
        name for name in OPERATIONS if name in technique._operations(load_config(model).get_text_config().to_dict())
    ]


def all_on(model: ModelConfig, **changes) -> Liger:
    return Liger(
        enabled=True,
        **{**{name: Switch.on if name in operations(model) else Switch.off for name in OPERATIONS}, **changes},
    )


def with_liger(model: ModelConfig, pipeline: Pipeline | None = None, **changes):
    """The built model and its pipeline, without check(), which would require a GPU."""
    pipeline = pipeline or Pipeline()
    pipeline.liger = all_on(model, **changes)
    return pipeline.build(model, load_config(model), CPU, 0), pipeline


def run(model):
    """Loss and gradients of a packed row."""
    probe = make_probe(model)
    model.zero_grad()
    loss = model(**probe).logits.float().logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("family", EVERY)
def test_a_model_with_all_kernels_equals_the_plain_model(family, stand_ins):
    model = architecture(family)
    plain = built(Pipeline(), model)
    mine, pipeline = with_liger(model)
    with torch.no_grad():  # weights other than 1, so that a wrong offset shows
        for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
            other.copy_(one.add_(0.1 * torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))))
    assert list(mine.state_dict()) == list(plain.state_dict())
    (expected, theirs), (loss, ours) = run(plain), run(mine)
    torch.testing.assert_close(loss, expected)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    evidence = list(pipeline.liger.verify(mine, make_probe(mine)))
    assert all(one.acted for one in evidence), evidence
    assert [one.asked.split(":")[0] for one in evidence] == operations(model)
    norms, turns, gated = COUNTS[family]
    wanted = {"rms_norm": norms, "layer_norm": norms, "rope": turns, "swiglu": gated, "geglu": gated}
    for one in evidence:
        name = one.asked.split(":")[0]
        ran = turns - 1 if (family, name) == ("smollm3", "rope") else wanted[name]
        assert one.observed == f"{wanted[name]} replaced, {ran} runs"


@pytest.mark.parametrize("name", ["rms_norm", "rope", "swiglu"])
def test_each_kernel_has_its_own_switch(name, stand_ins):
    only = {other: Switch.off for other in OPERATIONS if other != name}
    model, pipeline = with_liger(random_model("llama"), **only)
    (evidence,) = pipeline.liger.verify(model, make_probe(model))
    assert evidence.acted
    assert {getattr(module, "liger", None) for module in model.modules()} == {None, name}


def test_a_plain_model_in_the_same_process_is_not_changed(stand_ins):
    """Liger's own patches would change every model that is built later."""
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    forwards = {
        name: kind.forward for name, kind in before.items() if isinstance(kind, type) and hasattr(kind, "forward")
    }
    mine, _ = with_liger(random_model("llama"))
    plain = built(Pipeline(), random_model("llama"))
    assert vars(modeling_llama) == before
    assert all(getattr(modeling_llama, name).forward is forward for name, forward in forwards.items())
    assert {type(module).__name__ for module in plain.modules() if "Liger" in type(module).__name__} == set()
    assert {type(module).__name__ for module in mine.modules() if "Liger" in type(module).__name__} == {
        "LigerLlamaRMSNorm",
        "LigerLlamaMLP",
        "LigerLlamaAttention",
    }
    assert isinstance(mine.model.layers[0].mlp, modeling_llama.LlamaMLP)
    probe = make_probe(plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        plain(**probe)
    assert not {event.name for event in seen.events()} & {
        "_rms_norm_forward_kernel",
        "fxtune::rotary",
        "_swiglu_forward_kernel",
    }


def test_rope_does_not_overwrite_its_inputs(stand_ins):
    """Else a result that checkpointing keeps would be rotated twice."""
    model, _ = with_liger(random_model("llama"))
    results = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, __, out: results.append((out, out.clone())))
    model(**make_probe(model))
    assert torch.equal(*results[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_adapters_and_checkpointing_wrap_liger_and_the_adapter_fits_the_plain_base(family, stand_ins, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", family)
    model = ModelConfig(path=str(base))
    pipeline = lora(modules_to_save=["norm"])
    pipeline.checkpointing.enabled = True
    mine, pipeline = with_liger(model, pipeline)
    evidence = pipeline.prove(mine, make_probe(mine))
    assert {one.technique for one in evidence} >= {"liger", "lora", "checkpointing"}
    assert "LigerLlamaMLP" not in "".join(name for name, _ in mine.named_parameters())
    expected = logits(trained(mine))
    adapter = save_model(mine, load_tokenizer(model), tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, adapter)), expected, rtol=1e-5, atol=1e-5)


def test_a_model_can_be_deep_copied(stand_ins):
    model, _ = with_liger(random_model("llama"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0)
    assert not model(**make_probe(model)).logits.eq(0).all()


def test_compiled_layers_share_one_graph(stand_ins, monkeypatch):
    """The graph is traced, and no code is generated. Each kernel in it is an operator that runs its stand-in."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(liger_operators, "rms_norm", lambda *args: (rms_norm.apply(*args, True, None),))
    monkeypatch.setattr(liger_operators, "gated", lambda gate, up, kind: swiglu.apply(gate, up, 1.0, 1.0))
    pipeline = Pipeline()
    pipeline.compile = Compile(enabled=True)
    plain = built(Pipeline(), random_model("llama", num_hidden_layers=4))
    mine, _ = with_liger(random_model("llama", num_hidden_layers=4), pipeline)
    given = model_inputs(
        plain, torch.arange(48)[None] % 128, torch.arange(48)[None] % 20, torch.tensor([0, 20, 40, 48])
    )
    before, graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"], []  # counted since the process began
    for _ in range(2):
        torch.testing.assert_close(mine(**given).logits, plain(**given).logits, rtol=1e-4, atol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert 0 < graphs[0] == graphs[1] <= 3


def test_verify_finds_a_kernel_that_did_not_run(stand_ins):
    model, pipeline = with_liger(random_model("llama"))
    layer = model.model.layers[0]
    layer.mlp.__class__ = type(layer.mlp).__mro__[1]
    layer.self_attn.forward = type(layer.self_attn).__mro__[1].forward.__get__(layer.self_attn)
    with pytest.raises(ConfigError) as caught:
        pipeline.prove(model, make_probe(model))
    for part in (
        "swiglu: 2 replaced, 2 runs in a forward pass; seen: 1 replaced, 1 runs",
        "rope: 2 replaced, 2 runs of fxtune::rotary in a forward pass; seen: 2 replaced, 1 runs",
    ):
        assert part in str(caught.value)
    assert "rms_norm" not in str(caught.value)


def test_arguments_equal_liger_s_own_patches():
    """Liger's per-model functions, applied to its own copies of the norms: with the same offset, rounding and in_place."""
    import inspect

    from liger_kernel.transformers import monkey_patch
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    ours = {
        name: family
        for name, family in technique.FAMILIES.items()
        if not family.layer_norm and not name.startswith("olmo")
    }
    assert ours.keys() <= MODEL_TYPE_TO_APPLY_LIGER_FN.keys()
    default = inspect.signature(monkey_patch._patch_rms_norm_module).parameters
    for name, family in ours.items():
        source = inspect.getsource(MODEL_TYPE_TO_APPLY_LIGER_FN[name])
        gemma = "offset=1.0" in source
        assert family.offset == (1.0 if gemma else default["offset"].default), name
        assert family.casting == ("gemma" if gemma else default["casting_mode"].default), name
        assert family.in_place == ("in_place=False" not in source), name


@pytest.mark.parametrize(
    ("model", "options", "known", "reason"),
    [
        ({"model_type": "mamba"}, {}, GPU, "enabled: Liger's kernels are known for gemma, .*and this is mamba"),
        ({**FAMILIES["llama"]}, {"geglu": Switch.on}, GPU, "geglu: llama with this config has no GeGLU"),
        ({**FAMILIES["llama"]}, {"layer_norm": Switch.on}, GPU, "layer_norm: llama with this config has no LayerNorm"),
        ({**FAMILIES["phi"]}, {"swiglu": Switch.on}, GPU, "swiglu: phi with this config has no SwiGLU"),
        (
            {**FAMILIES["mistral"], "hidden_act": "gelu"},
            {"geglu": Switch.on},
            GPU,
            "geglu: mistral with this config has no GeGLU",
        ),
        (
            {**FAMILIES["llama"]},
            {"rms_norm": Switch.on},
            {},
            "rms_norm: Liger's kernels are written in Triton and need a GPU",
        ),
        (
            {**FAMILIES["llama"]},
            {},
            {**GPU, "packages": {}},
            "enabled: the package liger-kernel is not installed: pip install",
        ),
        (
            {**FAMILIES["llama"]},
            {"chunk_rows": 64, "fused_linear_cross_entropy": Switch.off},
            GPU,
            "chunk_rows: .* leave chunk_rows",
        ),
    ],
)
def test_check_refuses_with_what_to_change(model, options, known, reason):
    liger = Liger(enabled=True, **options)
    reasons = list(
        liger.check(
            facts_of(ModelConfig(path=None, init=Init.random, architecture=model), **known)
            if model["model_type"] != "mamba"
            else Facts(model=model, **known)
        )
    )
    assert len(reasons) == 1
    assert re.search(reason, reasons[0]), reasons[0]


def test_rope_needs_no_gpu_and_no_package():
    liger = Liger(enabled=True, **{**dict.fromkeys(OPERATIONS, Switch.off), "rope": Switch.on})
    assert not list(liger.check(facts_of(random_model("llama"), packages={})))
    assert not list(
        liger.check(facts_of(random_model("llama"), **{**GPU, "packages": {}, "techniques": enable(compile={})}))
    )


def test_the_loss_alone_needs_no_gpu_no_package_and_no_known_model():
    liger = Liger(enabled=True, fused_linear_cross_entropy=Switch.on, **dict.fromkeys(OPERATIONS, Switch.off))
    assert not list(liger.check(Facts(model={"model_type": "mamba"})))
    assert not list(Liger(enabled=True).check(facts_of(random_model("llama"), packages={})))


def resolved(known, family="llama", **options) -> tuple[Liger, str]:
    liger = Liger(enabled=True, **options)
    note = liger.resolve(facts_of(architecture(family), **known))
    return liger, note or ""


def test_auto_is_on_for_the_model_s_operations_on_a_gpu_and_off_on_a_cpu():
    on = {
        family: {name for name in OPERATIONS if getattr(resolved(GPU, family)[0], name) is Switch.on}
        for family in ("llama", "gemma3", "phi", "phi3")
    }
    assert on == {
        "llama": {"rms_norm", "rope", "swiglu"},
        "gemma3": {"rms_norm", "rope", "geglu"},
        "phi": {"layer_norm", "rope"},
        "phi3": {"rms_norm", "rope", "swiglu"},
    }
    chosen, note = resolved({})
    assert {getattr(chosen, name) for name in OPERATIONS} == {Switch.off}
    assert "rms_norm off (Triton needs a GPU)" in note
    assert note.startswith("no kernel runs here: ")
    assert not resolved({"sequence_length": 2**18})[1].startswith("no kernel"), "the loss is fused without a GPU, too"
    assert not resolved(GPU)[1].startswith("no kernel")
    every = dict.fromkeys((*OPERATIONS, "fused_linear_cross_entropy"), Switch.off)
    assert resolved(GPU, **every)[1] == "no kernel runs here: each kernel is off"
    assert "geglu" not in note, "operations that the model does not have are not reported"


def test_auto_fuses_the_loss_if_logits_are_large():
    chosen, note = resolved({"sequence_length": 65536, "micro_batch_size": 2}, chunk_rows=64)
    assert chosen.fused_linear_cross_entropy is Switch.off
    assert not list(chosen.check(facts_of(random_model("llama")))), (
        "auto removes chunk_rows with the fused loss, so it is no error"
    )
    assert "logits are up to 0.062 GiB" in note
    chosen, _ = resolved({"rows": (512, 131072), "micro_batch_size": 2})
    assert chosen.fused_linear_cross_entropy is Switch.on


def test_under_compile_auto_measures_once_and_caches_the_times(monkeypatch, tmp_path):
    cases = []

    def times(case):
        cases.append(case)
        return {"rms_norm": (0.4, 0.5), "swiglu": (0.3, 0.25), "geglu": (1.0, None)}[case.operation]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "times", times)
    known = {
        **GPU,
        "dtype": "bfloat16",
        "rows": (4096,),
        "micro_batch_size": 2,
        "techniques": enable(compile={}, lora={"fused": "off"}),
    }
    for _ in range(2):
        chosen, note = resolved(known)
        assert [getattr(chosen, name).value for name in OPERATIONS] == ["off", "off", "on", "on", "off"]
        assert "rms_norm off (measured: compiled 0.400 ms, Liger 0.500 ms)" in note
        assert "swiglu on (measured: compiled 0.300 ms, Liger 0.250 ms)" in note
        assert "rope on (fxtune's own kernel moves fewer bytes" in note
    assert [(case.operation, case.rows, case.width, case.dtype, case.trained) for case in cases] == [
        ("rms_norm", 8192, 64, "bfloat16", False),
        ("swiglu", 8192, 96, "bfloat16", False),
    ]
    assert len(json.loads((tmp_path / "fxtune" / "liger_times.json").read_text())) == 2
    resolved({**known, "device_name": "B200"})
    resolved({**known, "packages": {**GPU["packages"], "torch": "2.13"}})
    assert len(cases) == 6, "another card and another torch are measured again"
    assert "geglu off (Liger's does not compile here)" in resolved(known, "gemma")[1]
    assert cases[-1].operation == "geglu"
    assert (cases[-2].offset, cases[-2].casting) == (1.0, "gemma")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "olmo2", "gemma3", "phi", "phi_qk"])
def test_under_compile_rope_is_off_if_norms_precede_it(family, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    normed = any(
        name.endswith(("q_norm", "q_layernorm")) for name, _ in built(Pipeline(), architecture(family)).named_modules()
    )
    chosen, note = resolved({**GPU, "techniques": enable(compile={})}, family)
    assert (chosen.rope is Switch.off) == normed, note
    assert resolved(GPU, family)[0].rope is Switch.on


def test_times_are_measured_again_if_the_cache_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "times", lambda case: (2.0, 1.0))
    assert resolved({**GPU, "techniques": enable(compile={})})[0].swiglu is Switch.on


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "triton", "cublas"],
)
def test_without_free_memory_nothing_is_measured_or_cached(error, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps(monkeypatch, {"liger": error})
    chosen, note = resolved({**GPU, "techniques": enable(compile={})})
    assert chosen.rms_norm is chosen.swiglu is Switch.off
    assert "rms_norm off (torch.compile fuses it; neither could be measured here)" in note
    assert not [*tmp_path.rglob("liger_times.json")]


def steps(monkeypatch, errors):
    """Patch timing so that a step needs no GPU, or raises the error in `errors` for `compiled` or `liger`."""
    pytest.importorskip("triton")
    given = itertools.cycle(("compiled", "liger"))

    def made(case, operation):
        error = errors.get(next(given))

        def step():
            if error:
                raise error

        return step, []

    monkeypatch.setattr(timing, "_step", made)
    monkeypatch.setattr("triton.testing.do_bench", lambda *_, **__: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_a_kernel_that_does_not_compile_has_no_time(monkeypatch):
    """Inside an operator Triton raises its own errors, which are not RuntimeErrors."""
    errors = pytest.importorskip("triton.runtime.errors")
    steps(monkeypatch, {"liger": errors.OutOfResources(300000, 232448, "shared memory")})
    assert timing.times(timing.Case("swiglu", 8, 8, "float32", False)) == (1.0, None)


@pytest.mark.parametrize(
    "error",
    [torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), RuntimeError("of another kind")],
)
def test_other_errors_of_a_measurement_are_raised_and_not_cached(error, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps(monkeypatch, {"liger": error})
    with pytest.raises(type(error), match=str(error)):
        resolved({**GPU, "techniques": enable(compile={})})
    assert not [*tmp_path.rglob("liger_times.json")]


def test_under_compile_without_a_gpu_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen, note = resolved({**GPU, "techniques": enable(compile={})})
    assert chosen.rms_norm is Switch.off
    assert "neither could be measured here" in note


def test_the_pipeline_reports_liger_s_choice():
    pipeline = Pipeline()
    pipeline.liger = Liger(enabled=True)
    chosen, notes = pipeline.resolved(facts_of(random_model("llama")))
    assert any(note.startswith("liger: no kernel runs here: rms_norm off (Triton needs a GPU), ") for note in notes)
    assert pipeline.liger.rms_norm is Switch.auto, "resolving changes a copy"
    assert replace(chosen.liger, enabled=False).fused_linear_cross_entropy is Switch.off
