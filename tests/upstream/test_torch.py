"""Private parts of torch: that this version has them and that they do what fxtune takes them for."""

from __future__ import annotations

import dataclasses
import logging
import pkgutil
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.sharded import run_ranks
from torch import nn

from fxtune.upstream import torch as upstream

VERSION = f"torch {torch.__version__} "


@pytest.mark.parametrize("table", upstream.DTENSOR_TABLES)
def test_each_table_that_holds_meshes_can_be_emptied(table):
    """Slow tests count the threads that live while a table holds a mesh (tests/distributed/test_world.py)."""
    assert callable(pkgutil.resolve_name(f"torch.distributed.tensor.{table}"))


def test_operations_on_several_tensors_are_those_of_each():
    torch.manual_seed(0)
    ours, theirs = ([torch.randn(3), torch.randn(2, 2)] for _ in range(2))
    for name, operands in (("add_", (theirs,)), ("mul_", (0.3,)), ("mul_", (torch.tensor(7.0),)), ("zero_", ())):
        tensors = [tensor.clone() for tensor in ours]
        upstream.foreach(name, tensors, *operands)
        for index, tensor in enumerate(ours):
            own = (operand[index] if isinstance(operand, list) else operand for operand in operands)
            assert torch.equal(tensors[index], getattr(tensor.clone(), name)(*own))


def test_tensors_with_one_storage_have_one_id_also_without_memory():
    for device in ("cpu", "meta"):
        tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
        assert upstream.storage_id(tensor) == upstream.storage_id(tensor[1:]) != upstream.storage_id(other)


def test_operators_that_write_are_known():
    assert upstream.changes_arguments(torch.ops.aten.add_.Tensor)
    assert not upstream.changes_arguments(torch.ops.aten.add.Tensor)


def test_the_operators_of_this_process_are_listed():
    assert "aten::mm" in upstream.operator_names()


def test_a_tensor_loses_its_class():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            raise AssertionError("called")

    tensor = torch.ones(2).as_subclass(Loud)
    assert type(upstream.without_class(tensor)) is torch.Tensor
    assert type(upstream.without_class(nn.Parameter(torch.ones(2)))) is torch.Tensor


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_of_a_module_are_seen(kind):
    module = nn.Linear(2, 2)
    assert not upstream.has_hooks(module)
    hook = getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert upstream.has_hooks(module)
    hook.remove()
    assert not upstream.has_hooks(module)


def test_parts_of_muon():
    orthogonal, factor = upstream.muon_parts()
    made = orthogonal(torch.randn(4, 4), (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    assert torch.linalg.svdvals(made).sub(1).abs().max() < 0.6
    assert factor(0.5, None, torch.Size((4, 4))) > 0


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


def test_the_timeout_between_hosts_is_set_on_the_backend_of_cpus():
    seen = []
    backend = SimpleNamespace(_set_default_timeout=seen.append)
    upstream.set_host_timeout(SimpleNamespace(_get_backend=lambda device: backend), timedelta(1))
    assert seen == [timedelta(1)]


def test_the_compiler_says_what_it_did():
    """Other fields and classes are read by tests/techniques/compile/test_report.py."""
    fields = {field.name for field in dataclasses.fields(torch._dynamo.utils.CompilationMetrics)}
    assert {"compile_id", "start_time", "duration_us", "cudagraph_skip_reason"} <= fields
    assert {"inductor_fx_local_cache_hit_count", "inductor_fx_local_cache_miss_count"} <= fields
    assert upstream.recompile_limit_error() in upstream.compiler_errors()
    assert any(issubclass(kind, upstream.compiler_error()) for kind in upstream.compiler_errors())


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
    upstream.install_graph_pass("ours", lambda graph: calls.append("ours"))
    made = post_grad.post_grad_custom_post_pass
    upstream.install_graph_pass("ours", lambda graph: calls.append("again"))
    assert post_grad.post_grad_custom_post_pass is made
    made(torch.fx.Graph())
    assert calls == ["first", "ours"]
    assert made.uuid() is None, "an unnamed pass cannot be cached"
    post_grad.post_grad_custom_post_pass = None
    upstream.install_graph_pass("ours", calls.append)
    assert post_grad.post_grad_custom_post_pass.uuid() == ("ours",)


def test_the_budget_of_the_compiler_is_set_in_a_body():
    before = upstream.activation_budget()
    with upstream.with_activation_budget(0.25):
        assert upstream.activation_budget() == 0.25
    assert upstream.activation_budget() == before


def test_the_cache_of_torch_has_a_folder():
    assert upstream.default_compiler_cache().is_absolute()


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_scaled_dot_product_cudnn_attention"])
def test_attention_operators(name):
    assert callable(upstream.attention_operator(name))
