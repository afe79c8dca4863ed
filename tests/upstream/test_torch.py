"""Private parts of torch: that this version has them, and what happens where one is gone."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import pkgutil
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.version import Version
from support.forecasts import card
from support.harness import command
from support.sharded import run_ranks
from torch import nn

from fxtune.errors import ConfigError
from fxtune.models.prepared import PreparedModel
from fxtune.system.tested_versions import newer_torch
from fxtune.techniques.base import Evidence
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.precision import Precision
from fxtune.upstream import torch as upstream

VERSION = f"torch {torch.__version__} "


def test_the_versions_in_messages_are_the_tested_range():
    oldest, newest = map(Version, upstream.TESTED.split(" to "))
    assert newer_torch(f"{newest}.9") == ""
    assert newer_torch(f"{newest.major}.{newest.minor + 1}.0").endswith(f"torch>={oldest},<2.{newest.minor + 1}'")


@pytest.mark.parametrize("table", upstream.DTENSOR_TABLES)
def test_each_table_that_holds_meshes_can_be_emptied(table):
    """Slow tests count the threads that live while a table holds a mesh (tests/distributed/test_world.py)."""
    assert callable(pkgutil.resolve_name(f"torch.distributed.tensor.{table}"))


def test_every_operation_on_several_tensors_has_the_same_bits_without_the_private_one(monkeypatch):
    torch.manual_seed(0)
    ours, theirs = ([torch.randn(3), torch.randn(2, 2)] for _ in range(2))
    results = []
    for gone in (False, True):
        tensors = [tensor.clone() for tensor in ours]
        for name, operands in (("add_", (theirs,)), ("mul_", (0.3,)), ("mul_", (torch.tensor(7.0),)), ("zero_", ())):
            if gone:
                monkeypatch.delattr(torch, f"_foreach_{name}", raising=False)
            upstream.foreach(name, tensors, *operands)
            results.append([tensor.clone() for tensor in tensors])
        upstream.foreach("copy_", tensors, theirs)
        results.append(tensors)
    half = len(results) // 2
    for result, expected in zip(results[:half], results[half:], strict=True):
        assert all(map(torch.equal, result, expected))
    assert results[0][0].ne(ours[0]).any()


def test_tensors_with_one_storage_have_one_id_also_without_memory():
    for device in ("cpu", "meta"):
        tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
        assert upstream.storage_id(tensor) == upstream.storage_id(tensor[1:]) != upstream.storage_id(other)


def test_operators_that_write_are_known_with_and_without_a_schema():
    for operator, writes in ((torch.ops.aten.add_.Tensor, True), (torch.ops.aten.add.Tensor, False)):
        assert upstream.changes_arguments(operator) is writes
        bare = SimpleNamespace(overloadpacket=SimpleNamespace(__name__=operator.overloadpacket.__name__))
        assert upstream.changes_arguments(bare) is writes


def test_without_a_list_of_operators_none_is_suggested(monkeypatch):
    assert "aten::mm" in upstream.operator_names()
    monkeypatch.delattr(torch._C, "_dispatch_get_all_op_names")
    assert not upstream.operator_names()


def test_a_tensor_loses_its_class(monkeypatch):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            raise AssertionError("called")

    tensor = torch.ones(2).as_subclass(Loud)
    assert type(upstream.without_class(tensor)) is torch.Tensor
    monkeypatch.delattr(torch._C, "DisableTorchFunctionSubclass")
    assert type(upstream.without_class(nn.Parameter(torch.ones(2)))) is torch.Tensor


def reasons(techniques, name, **facts):
    given = card(80, 4096, techniques=techniques, **facts)
    return list(getattr(given.techniques, name).check(given))


@pytest.mark.parametrize(
    ("name", "techniques", "part"),
    [
        ("quantize", {"lora": {}, "quantize": {"type": "fp8"}}, "_scaled_mm"),
        ("quantize", {"lora": {}, "quantize": {"type": "fp8"}}, "_scaled_grouped_mm"),
        ("float8", {"float8": {}}, "_scaled_mm"),
    ],
)
def test_products_in_fp8_are_refused_where_torch_has_none(monkeypatch, name, techniques, part):
    assert not [reason for reason in reasons(techniques, name) if part in reason]
    monkeypatch.delattr(torch, part)
    assert [reason for reason in reasons(techniques, name) if f"{VERSION}has no torch.{part}, " in reason]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_of_a_module_are_seen(kind):
    module = nn.Linear(2, 2)
    assert not upstream.has_hooks(module)
    hook = getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert upstream.has_hooks(module)
    hook.remove()
    assert not upstream.has_hooks(module)


def test_muon_over_divided_matrices_is_refused_where_torch_has_no_parts_of_it(monkeypatch):
    orthogonal, factor = upstream.muon_parts()
    made = orthogonal(torch.randn(4, 4), (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    assert torch.linalg.svdvals(made).sub(1).abs().max() < 0.6
    assert factor(0.5, None, torch.Size((4, 4))) > 0
    monkeypatch.setitem(sys.modules, "torch.optim._muon", None)
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon with parallel\.shard needs.*install torch 2\.11"):
        upstream.muon_parts()


def gradients(world):
    """Gradients of a model that this rank has a part of, and the sum over ranks of those of whole models."""
    from fxtune.distributed.chunks import whole
    from fxtune.distributed.parallel import Degrees
    from fxtune.distributed.sharding import shard

    world = world.divided(Degrees(shard=world.size))
    found = []
    for divided in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        if divided:
            shard(model, [*model], None, [weight for weight in model.parameters() if weight.dim() < 2], world)
        torch.manual_seed(1 + world.rank)
        model(torch.randn(3, 4)).square().sum().backward()
        for layer in model:
            weight = layer.weight.grad
            total = whole(weight) if divided else world.sum(weight.clone(), "adding up gradients")
            found.append(total.numpy())
    return found


def test_gradients_of_divided_weights_are_summed_over_ranks():
    for first, second, *divided in run_ranks(2, gradients):
        for sum_of_both, own in zip((first, second), divided, strict=True):
            np.testing.assert_allclose(own, sum_of_both, rtol=1e-5)


def test_dividing_is_refused_where_gradients_would_be_averaged():
    with pytest.raises(ConfigError, match=r"means of gradients\. Set parallel\.shard=1, or install torch 2\.11 to"):
        upstream.sum_gradients(SimpleNamespace(set_gradient_divide_factor=lambda factor: None))


def test_without_a_timeout_of_its_own_a_group_keeps_the_one_it_has():
    upstream.set_host_timeout(SimpleNamespace(), timedelta(1))
    seen = []
    backend = SimpleNamespace(_set_default_timeout=seen.append)
    upstream.set_host_timeout(SimpleNamespace(_get_backend=lambda device: backend), timedelta(1))
    assert seen == [timedelta(1)]


def test_rows_cannot_be_cut_where_no_group_is_found_by_name(monkeypatch):
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_resolve_process_group")
    with pytest.raises(ConfigError, match=r"parallel\.context needs\. Set parallel\.context=1"):
        upstream.process_group("context")


def without_one_figure():
    from torch._dynamo.utils import CompilationMetrics

    fields = [(field.name, object) for field in dataclasses.fields(CompilationMetrics) if field.name != "duration_us"]
    return dataclasses.make_dataclass("CompilationMetrics", fields)


@pytest.mark.parametrize(
    ("module", "part", "instead"),
    [
        ("utils", "guard_failures", None),
        ("exc", "FailOnRecompileLimitHit", None),
        ("utils", "CompilationMetrics", without_one_figure),
    ],
)
def test_compile_steps_aside_where_torch_does_not_say_what_it_compiled(monkeypatch, module, part, instead):
    assert upstream.without_compile_report() == ""
    where = importlib.import_module(f"torch._dynamo.{module}")
    if instead is None:
        monkeypatch.delattr(where, part)
    else:
        monkeypatch.setattr(where, part, instead())
    text = "CompilationMetrics.duration_us (how long it took)" if instead else part
    assert text in upstream.without_compile_report()
    asked = reasons({"lora": {}, "compile": {}}, "compile")
    assert any(f"enabled: {VERSION}does not say what its compiler did" in reason for reason in asked)
    facts = card(80, 4096, techniques={"lora": {}, "compile": {"enabled": "auto"}})
    chosen, notes = facts.techniques.possible(facts)
    assert not chosen.compile.enabled
    assert any(note.startswith(f"compile: off, because {VERSION}does not say") for note in notes), notes


def test_the_warning_about_unknown_writes_is_known_by_its_place_or_its_text():
    """test_report.py has torch's own warning."""

    def record(path, text, error):
        return logging.LogRecord("torch._dynamo", logging.WARNING, path, 1, text, (), error)

    error = (ValueError, ValueError("?"), None)
    place = "/torch/_higher_order_ops/triton_kernel_wrap.py"
    assert upstream.is_unknown_writes(record(place, "another text", error))
    assert upstream.is_unknown_writes(record("/torch/elsewhere.py", "..., assuming every input is mutated", error))
    assert not upstream.is_unknown_writes(record(place, "another text", None))
    assert not upstream.is_unknown_writes(record("/torch/elsewhere.py", "another text", error))


@pytest.fixture
def post_grad():
    from torch._inductor import config

    with config.patch(post_grad_custom_post_pass=None):
        yield config


def test_a_graph_pass_runs_after_those_that_are_installed(post_grad):
    calls = []
    post_grad.post_grad_custom_post_pass = lambda graph: calls.append("first")
    assert upstream.install_graph_pass("ours", lambda graph: calls.append("ours"))
    made = post_grad.post_grad_custom_post_pass
    assert upstream.install_graph_pass("ours", lambda graph: calls.append("again"))
    assert post_grad.post_grad_custom_post_pass is made
    made(torch.fx.Graph())
    assert calls == ["first", "ours"]
    assert made.uuid() is None, "an unnamed pass cannot be cached"
    post_grad.post_grad_custom_post_pass = None
    assert upstream.install_graph_pass("ours", calls.append)
    assert post_grad.post_grad_custom_post_pass.uuid() == ("ours",)


def test_without_a_place_for_graph_passes_none_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    assert not upstream.install_graph_pass("ours", lambda graph: None)


def test_a_budget_is_refused_where_the_compiler_takes_none(monkeypatch):
    techniques = {"lora": {}, "compile": {}, "checkpointing": {"policy": "budget"}}
    with upstream.with_activation_budget(0.25):
        assert upstream.activation_budget() == 0.25
    assert not [reason for reason in reasons(techniques, "checkpointing") if "takes no budget" in reason]
    monkeypatch.setattr(torch._functorch, "config", SimpleNamespace())
    assert [reason for reason in reasons(techniques, "checkpointing") if f"{VERSION}takes no budget" in reason]


def test_without_a_default_of_torch_code_is_cached_in_our_folder(monkeypatch):
    assert upstream.default_compiler_cache() is not None
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.cache_dir_utils", None)
    assert upstream.default_compiler_cache() is None


def test_an_attention_operator_that_is_gone_is_not_chosen(monkeypatch):
    from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS

    facts = card(80, 4096, techniques={"lora": {}})
    assert not [cause for cause, _ in BY_DOCUMENTS.refusals(facts) if "lacks" in cause]
    gone = dataclasses.replace(BY_DOCUMENTS, aten="_no_such_operator")
    assert [cause for cause, _ in gone.refusals(facts) if f"{VERSION}lacks" in f"{cause}" or "lacks" in cause]
    assert upstream.attention_operator("_flash_attention_forward")


def fresh():
    """This module, imported anew."""
    spec = importlib.util.spec_from_file_location("fresh_upstream", upstream.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_dispatch_modes_fxtune_imports_and_observes_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    made = fresh()
    with pytest.raises(made.Unobservable, match="has no TorchDispatchMode"):
        made.TorchDispatchMode()


def test_what_cannot_be_observed_does_not_end_a_run(monkeypatch):
    pipeline = Pipeline(precision=Precision(enabled=True))
    pipeline.attention.enabled = False

    def verify(model, probe):
        yield Evidence("precision", "asked", "seen", True)
        raise upstream.Unobservable("no mode")

    monkeypatch.setattr(pipeline.precision, "verify", verify)
    found = pipeline.verify(PreparedModel(nn.Linear(2, 2)), {})
    assert [(observation.technique, observation.observed, observation.acted) for observation in found] == [
        ("precision", "seen", True),
        ("precision", "none: no mode", True),
    ]


GONE = """
import sys, torch, torch._dynamo.utils, torch._inductor.config, torch.distributed.fsdp, torch.utils.flop_counter
modes = sys.modules["torch.utils._python_dispatch"]
sys.modules["torch.utils._python_dispatch"] = None
import fxtune.upstream.torch
sys.modules["torch.utils._python_dispatch"] = modes
for name in ("optim._muon", "_inductor.custom_graph_pass", "_inductor.runtime.cache_dir_utils"):
    sys.modules[f"torch.{name}"] = None
for name in ("copy_", "zero_"):
    delattr(torch, f"_foreach_{name}")
del torch._scaled_mm, torch._scaled_grouped_mm, torch._C._dispatch_get_all_op_names
del torch._dynamo.utils.guard_failures, torch.distributed.distributed_c10d._resolve_process_group
from fxtune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A torch without its private parts, except for what torch itself needs in two steps."""


@pytest.mark.slow
def test_two_steps_train_with_all_wishes_where_everything_private_is_gone(tmp_path):
    words = command(tmp_path, "techniques=[lora,fast]", "train.max_steps=2", "data.packing=true")
    words = [word for word in words if not word.startswith("techniques.lora")]
    done = subprocess.run(
        [sys.executable, "-c", GONE, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "compile: off, because torch" in text
    assert "step=2/2" in text
