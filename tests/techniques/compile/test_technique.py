"""torch.compile by layer and by model: equal results, a report of what was compiled, limits, and uncompiled
generation.

Tests that are not about the generated code use `quick`, which skips the slow last stage of the compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from contextlib import closing

import pytest
import torch
from packaging.version import Version
from support import image_models
from support.architectures import CPU, built, enable, facts_of, lora, prepared_model, random_model
from support.cases import slow_but
from support.compiled import compiled, learn, row
from support.decoder_sizes import decoder_sizes
from support.runs import history

from fxtune.data.batches.loader import Loader
from fxtune.errors import ConfigError
from fxtune.facts.options import CompileMode, Dynamic, Policy, RopeType, Scope, Switch
from fxtune.facts.run import Facts
from fxtune.models.kinds.image_decoder.host_arguments import takes_bounds
from fxtune.models.kinds.image_decoder.parts import encoder_layers, vision_encoders
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.attention import recurrent, vision_encoder
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.report import TOWER
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import make_probe
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder

PACKED = Facts(packing=True)
ONE = {"num_hidden_layers": 1}
FAMILIES = ["llama", "qwen3", "gemma"]  # mistral is llama, here


NARROW = {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("scope", "layers", "options"),
    slow_but([(Scope.layers, 2, NARROW), (Scope.model, 1, {})], (Scope.layers, 2, NARROW), mark=pytest.mark.vital),
)
def test_compiled_code_gives_the_same_gradients_and_is_compiled_once(scope, layers, options):
    """All stages of the compiler, with few layers and rows as long as the probe, because each graph takes a C++
    compiler seconds. (Of two layers the first one's input needs no gradient.)"""
    model, plain, pipeline = random_model("llama", num_hidden_layers=layers), lora(), lora()
    pipeline.compile, pipeline.checkpointing = (
        Compile(enabled=True, scope=scope),
        Checkpointing(enabled=True, **options),
    )
    reference, ours = built(plain, model).train(), built(pipeline, model)
    assert list(ours.state_dict()) == list(reference.state_dict())
    seen = [
        *pipeline.compile.verify(PreparedModel(ours), make_probe(ours)),
        *pipeline.checkpointing.verify(PreparedModel(ours), make_probe(ours)),
    ]
    assert all(observation.acted for observation in seen), seen
    graphs = []
    for document in (9, 5, 11):
        theirs, mine = (learn(model.train(), row(model, 24, document)) for model in (reference, ours))
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5)
        graphs.append(pipeline.compile.report().graphs)
    assert len(set(graphs)) == 1, "no step compiles again"
    assert ours.eval().generate(input_ids=torch.arange(4)[None], max_new_tokens=4).shape == (1, 8)
    assert pipeline.compile.report().graphs == graphs[-1], "generation runs uncompiled"


@pytest.mark.parametrize("scope", slow_but(Scope, Scope.layers, mark=pytest.mark.vital))
def test_number_of_graphs_does_not_depend_on_the_number_of_layers(scope, quick):
    graphs = []
    for layers in (2, 6):
        pipeline = lora()
        pipeline.compile, pipeline.checkpointing = Compile(enabled=True, scope=scope), Checkpointing(enabled=True)
        model = built(pipeline, random_model("llama", num_hidden_layers=layers))
        learn(model.train(), row(model))
        graphs.append(pipeline.compile.report().graphs)
    assert graphs[0] == graphs[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scope"), [*((family, Scope.layers) for family in FAMILIES), ("gemma", Scope.model)]
)
def test_rows_with_other_contents_reuse_the_first_graphs(family, scope, quick):
    technique, model = compiled(family, scope=scope)
    plain = built(lora(), random_model(family)).train()
    known = None
    for document in (20, 7, 33):
        mine, theirs = (learn(compared, row(compared, document=document)) for compared in (model, plain))
        assert all(torch.allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)
        report = technique.report()
        known = known or report.graphs
        assert report.graphs == known == (2 if scope is Scope.layers else 1)
    assert report.breaks == []
    assert report.lengths == {"1x64": known}
    assert len(report.recompiles) == known - 1
    with torch.no_grad():
        model.eval()(**row(model))
    assert "grad_mode" in technique.report().recompiles[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "graphs"), [(Dynamic.always, 1), (Dynamic.auto, 2), (Dynamic.never, 3)])
def test_dynamic_decides_how_many_lengths_share_a_graph(dynamic, graphs, quick):
    technique, model = compiled(scope=Scope.model, dynamic=dynamic, architecture=ONE)
    plain = built(lora(), random_model("llama", **ONE)).train()
    for length in (48, 56, 64):
        mine, theirs = (learn(compared, row(compared, length)) for compared in (model, plain))
        assert all(torch.allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)
    assert technique.report().graphs == graphs


@pytest.mark.slow
def test_run_prints_and_writes_the_compile_report(small, cwd, capsys, quick):
    small.data.packing, small.data.eval_fraction = True, 0.2
    small.data.sequence_length, small.train.micro_batch_size = 64, 2
    small.train.max_steps, small.train.eval_every, small.train.log_every = 4, 2, 1
    small.techniques.compile.enabled = True
    small.tracking.display = DisplayKind.plain
    trainer.run(small)
    (folder,) = (cwd / "runs").iterdir()
    kept = json.loads((folder / "compile.json").read_text())
    assert kept["breaks"] == []
    assert set(kept["lengths"]) == {"2x64"}, "the proof has the run's rows, too"
    assert any("grad_mode" in reason for reason in kept["recompiles"]), "evaluation is in it"
    told = [line for line in capsys.readouterr().out.splitlines() if "compiled by layer" in line]
    assert len(told) == 2, "after the first steps and after the first evaluation"
    logged = [line for line in history(folder) if "compile/graphs" in line]
    assert [line["compile/graph_breaks"] for line in logged] == [0, 0]


def prepared_run(config):
    """A run up to its first step: its builder, plan and model. Dropout of adapters is on."""
    config.data.packing, config.data.sequence_length, config.train.micro_batch_size = True, 64, 2
    config.techniques.compile.enabled, config.techniques.lora.dropout = True, 0.1
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    model, evidence = builder.proven_model(plan)
    assert "compile" in {one.technique for one in evidence}
    return builder, plan, model


def take_steps(builder, plan, model):
    train_step = builder.train_step(model, builder.config.objective)
    model.model.train()
    with closing(Loader(builder.own(plan), builder.config.loader, builder.world.device)) as loader:
        for step in itertools.islice(loader.steps(), 2):
            train_step(plan, step, 1e-3)


@pytest.mark.parametrize("policy", [Policy.none, Policy.selective, Policy.full])
def test_steps_run_the_graphs_that_the_proof_compiled(policy, narrow, quick):
    if policy is Policy.full and Version(torch.__version__) < Version("2.12"):
        pytest.skip("the quick fixture's graphs keep what checkpoints recompute in this torch; C++ code does not")
    narrow.techniques.checkpointing = Checkpointing(enabled=True, policy=policy)
    narrow.techniques.liger = Liger(enabled=True, kernels=["rope"])  # its proof runs compiled code, too
    builder, plan, model = prepared_run(narrow)
    compiled = builder.techniques.compile.report()
    assert set(compiled.lengths) == {"2x64"}
    take_steps(builder, plan, model)
    assert builder.techniques.compile.report().graphs == compiled.graphs > 0


def test_proof_of_rows_that_do_not_fit_tries_a_small_row(narrow, quick, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LanguageModel, "states", no_memory)
    builder, *_ = prepared_run(narrow)
    assert set(builder.techniques.compile.report().lengths) == {"1x24"}


@pytest.mark.slow
def test_second_start_uses_the_disk_cache_unless_our_operators_changed(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "any")  # so that what is set below is taken back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reports = []
    for code in ("a" * 12, "a" * 12, "b" * 12):
        monkeypatch.setattr("fxtune.system.files.code_digest.digest", lambda *parts, code=code: code)
        torch._dynamo.reset()
        technique, model = compiled(architecture=ONE)
        with torch.no_grad():
            model(**row(model))
        reports.append(technique.report())
    cold, warm, changed = reports
    assert cold.cache == str(tmp_path / "fxtune" / "inductor" / f"fxtune-{'a' * 12}")
    assert (cold.from_disk, warm.anew) == (0, 0)
    assert cold.anew == warm.from_disk > 0
    assert (changed.from_disk, changed.anew) == (0, cold.anew)
    assert "disk cache cold" in next(cold.lines())
    assert "disk cache warm" in next(warm.lines())


def test_verify_fails_if_layers_are_not_compiled():
    pipeline = lora()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    pipeline.compile = Compile(enabled=True)
    with pytest.raises(ConfigError, match="seen: 0 entries into compiled code"):
        pipeline.prove(prepared, make_probe(model))


def test_rows_of_any_length_are_refused_unless_dynamic():
    asked = Compile(enabled=True)
    assert "rows of any length" in next(asked.check(Facts()))
    assert "9 lengths of a row" in next(asked.check(Facts(rows=tuple(range(1, 10)))))
    assert not list(asked.check(PACKED))
    assert not list(asked.check(facts_of(random_model("llama"), packing=False, rows=(32, 64))))
    for dynamic in (Dynamic.auto, Dynamic.always):
        assert not list(Compile(enabled=True, dynamic=dynamic).check(Facts()))


CUDA = dataclasses.replace(PACKED, device="cuda")


@pytest.mark.parametrize(
    ("options", "facts", "told"),
    [
        (dict(scope=Scope.model), PACKED, "mode: reduce_overhead records CUDA graphs, and the device is cpu"),
        (dict(), CUDA, "mode: reduce_overhead by layer"),
        (
            dict(scope=Scope.model, dynamic=Dynamic.always),
            CUDA,
            "one graph for each length. Set dynamic=never (it is always)",
        ),
        (dict(scope=Scope.model, fullgraph=False), CUDA, "Set fullgraph=true"),
    ],
    ids=["cpu", "layers", "dynamic", "breaks"],
)
def test_reduce_overhead_is_refused_where_it_would_be_wrong(options, facts, told):
    (reason,) = Compile(enabled=True, mode=CompileMode.reduce_overhead, **options).check(facts)
    assert told in reason


def test_reduce_overhead_keeps_gradients_in_place():
    assert not list(Compile(enabled=True, mode=CompileMode.reduce_overhead, scope=Scope.model).check(CUDA))
    assert Compile(enabled=True, mode=CompileMode.reduce_overhead).keep_gradients
    assert not Compile(mode=CompileMode.reduce_overhead).keep_gradients
    assert not Compile(enabled=True).keep_gradients


def test_missing_compiler_or_headers_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    assert "needs a C++ compiler, and g++ is not on the PATH" in next(Compile(enabled=True).check(PACKED))
    assert "needs a C compiler to launch its kernels" in next(Compile(enabled=True).check(CUDA))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h" in list(Compile(enabled=True).check(PACKED))[1]
    assert "Python.h" in list(Compile(enabled=True).check(CUDA))[1]


CARD = Facts(
    device="cuda",
    capability=(9, 0),
    packing=True,
    rows=(4096,),
    sequence_length=4096,
    dtype="bfloat16",
    packages={"flash-attn-4": "4.0.0b36"},
    techniques=enable(attention={"backend": "flash4"}, lora={}),
    model=dict(
        model_type="qwen3",
        **decoder_sizes(1024, 3072, heads=16, key_heads=8, head_dim=128),
    ),
)


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
HEAD = {
    "attention": {"backend": "flash4"},
    "lora": {"dropout": 0.1, "target_modules": ["q_proj", "lm_head"]},
    "liger": {"kernels": ["fused_linear_cross_entropy"]},
}
"""An adapter with dropout on the head, which the fused loss runs twice."""


def asked_for(facts=CARD, **options):
    """Whether passes are recorded under these facts, and the note about it."""
    technique = Compile(enabled=True, **options)
    told = technique.resolve(facts) or ""
    return technique.records, told


def test_auto_records_small_models_only():
    on, told = asked_for()
    assert on, told
    assert "cuda_graphs on" in told
    large = dict(CARD.model, hidden_size=4096, intermediate_size=14336, num_attention_heads=32)
    on, told = asked_for(dataclasses.replace(CARD, model=large, micro_batch_size=4))
    assert not on
    assert "longer than its launches take" in told
    assert not asked_for(cuda_graphs=Switch.off)[0]
    assert asked_for(Facts()) == (False, ""), "nothing to tell on a CPU"


@pytest.mark.parametrize(
    ("facts", "options", "why"),
    [
        (dict(device="cpu"), {}, "need a GPU"),
        (dict(rows=()), {}, r"data\.buckets"),
        (dict(dtype="float16"), {}, "loss scale"),
        (dict(techniques=enable(attention={"backend": "eager"})), {}, "attention by eager"),
        (dict(techniques=enable(attention={"backend": "cudnn"})), {}, "attention by cudnn"),
        (dict(techniques=enable(checkpointing={"policy": "full"})), {}, "recomputation"),
        (dict(techniques=enable(rope={"type": RopeType.dynamic})), {}, "RoPE of type dynamic"),
        (dict(model={**CARD.model, "rope_parameters": LONG_ROPE}), {}, "RoPE of type longrope"),
        (
            dict(model={**CARD.model, "model_type": "gemma3_text", "rope_parameters": {"full_attention": DYNAMIC}}),
            {},
            "RoPE of type dynamic",
        ),
        (dict(techniques=enable(**HEAD)), {}, r"the head's adapter again .* Set techniques\.lora\.dropout=0"),
        (
            dict(techniques=enable(**HEAD), model={"model_type": "of the author's own"}),
            {},
            r"the head's adapter again",
        ),
        ({}, dict(mode=CompileMode.reduce_overhead), "reduce_overhead"),
        ({}, dict(fullgraph=False), "fullgraph"),
    ],
)
def test_unrecordable_passes_are_refused_and_auto_does_not_record_them(facts, options, why):
    facts = dataclasses.replace(CARD, **facts)
    reasons = [
        reason
        for reason in Compile(enabled=True, cuda_graphs=Switch.on, **options).check(facts)
        if reason.startswith("cuda_graphs")
    ]
    assert len(reasons) == 1
    assert re.search(why, reasons[0]), reasons
    on, told = asked_for(facts, **options)
    assert not on
    assert facts.device == "cpu" or re.search(why, told), told


def test_head_without_recomputed_dropout_is_recorded():
    for adapters, loss in (
        ({"dropout": 0.0}, {}),
        ({"target_modules": ["all-linear"]}, {}),
        ({"target_modules": ["q_proj"]}, {}),
        ({}, {"kernels": ["rope"]}),
    ):
        asked = {**HEAD, "lora": {**HEAD["lora"], **adapters}, "liger": {**HEAD["liger"], **loss}}
        assert asked_for(dataclasses.replace(CARD, techniques=enable(**asked)))[0], (adapters, loss)


def test_recorded_passes_keep_gradients_in_place():
    assert Compile(enabled=True, cuda_graphs=Switch.on).keep_gradients
    assert not Compile(cuda_graphs=Switch.on).records


@pytest.mark.parametrize(
    "family", slow_but(["qwen2_5_vl", "qwen3_vl", "qwen3_5", "pixtral", "llava_onevision"], "qwen2_5_vl")
)
def test_one_graph_of_a_tower_serves_images_of_all_sizes(family, quick):
    model, plain = image_models.model(family), image_models.model(family)
    replace_patch_embeddings(model)
    recurrent.separate(model)
    vision_encoder.prepare(model)
    for part in vision_encoders(model):
        part.requires_grad_(False)
        if takes_bounds(part):
            vision_encoder.call(part, "fxtune_tower_flash4")
    technique, prepared = Compile(enabled=True), PreparedModel(model, reads_sizes_on_host=True)
    technique.apply(prepared, CPU)
    evidence = technique.verify(prepared, make_probe(model))
    assert [seen.acted for seen in evidence if "vision encoder" in seen.asked] == [True]
    language_model = LanguageModel(prepared)
    shown = image_models.documents(family, model)
    graphs = []
    for documents in (shown, shown[2:], shown[:1] * 3, shown[:4] * 2):
        batch = image_models.batch(model, [documents])
        loss = language_model.summed_loss(batch)
        loss.backward()
        with torch.no_grad():
            language_model.summed_loss(batch)
        expected = image_models.plain_loss(plain, documents).item()
        assert abs(loss.item() - expected) < 1e-5 * expected
        graphs.append(technique.report().lengths[TOWER])
    # One is of the proof, which gives fewer arguments, and one of the first bound of lengths.
    assert graphs[0] <= 3
    assert len(set(graphs)) == 1, technique.report().recompiles


def test_a_tower_that_splits_by_images_is_left_as_it_is(quick):
    model = image_models.model("qwen2_5_vl")
    technique = Compile(enabled=True)
    technique.apply(PreparedModel(model), CPU)
    assert not any("forward" in vars(layer) for layer in encoder_layers(model))
    assert not any(
        "vision encoder" in seen.asked for seen in technique.verify(PreparedModel(model), make_probe(model))
    )
