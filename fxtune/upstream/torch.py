"""Private parts of torch."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

# What: the mode that sees each operator below autograd.
# Why: the public modes (torch.overrides) see calls of functions, not the operators of a backward pass.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Operators and tensors


def foreach(name: str, tensors: Sequence[torch.Tensor], *operands: Any) -> None:
    """Call the in-place method `name` (`copy_`, `mul_`) on each tensor. An operand is a list with an argument for each
    tensor, or one argument for all.

    What: torch._foreach_NAME, a few kernels for all tensors.
    Why: torch has no public function for several tensors at once.
    """
    getattr(torch, f"_foreach_{name}")(tensors, *operands)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors with the same storage share, also on the meta device.

    What: UntypedStorage._cdata.
    Why: storages on the meta device, and storages whose memory was freed, have no address.
    """
    return int(tensor.untyped_storage()._cdata)


def changes_arguments(operator: Any) -> bool:
    """Whether an operator of torch writes to an argument.

    What: OpOverload._schema.
    Why: an operator has no public schema.
    """
    return bool(operator._schema.is_mutable)


def operator_names() -> set[str]:
    """The names of all operators of this process, such as `aten::mm.out`.

    What: torch._C._dispatch_get_all_op_names.
    Why: torch has no public list of its operators.
    """
    return set(torch._C._dispatch_get_all_op_names())


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain torch.Tensor without gradient.

    What: torch._C.DisableTorchFunctionSubclass.
    Why: a subclass may override detach().
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def scaled_mm(*operands: Any, **options: Any) -> torch.Tensor:
    """A product of fp8 matrices on a GPU.

    What: torch._scaled_mm.
    Why: torch.nn.functional.scaled_mm takes no `out`.
    """
    return torch._scaled_mm(*operands, **options)


def scaled_grouped_mm(*operands: Any, **options: Any) -> torch.Tensor:
    """Products of fp8 matrices of several experts on a GPU.

    What: torch._scaled_grouped_mm.
    Why: torch.nn.functional.scaled_grouped_mm wants a recipe for the scales. This function takes scales alone.
    """
    return torch._scaled_grouped_mm(*operands, **options)


# Modules


def has_hooks(module: nn.Module) -> bool:
    """Whether `module` has hooks.

    What: nn.Module's dictionaries of hooks.
    Why: torch has no public list of hooks.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in names)


def remove_forward_hooks(module: nn.Module) -> None:
    """Remove the forward hooks of `module`.

    What: _forward_hooks of nn.Module.
    Why: the public way to remove a hook is its handle, which only the hook's author has.
    """
    module._forward_hooks.clear()


def remove_recorders(module: nn.Module) -> None:
    """Remove transformers' hooks on `module` and inside it that record results, such as attention's weights.

    What: _forward_hooks of nn.Module.
    Why: if a model asks for one result (LLaVA asks for hidden states of the vision encoder), transformers installs all
    hooks, and torch.compile cannot trace them.
    """
    for part in module.modules():
        hooks = part._forward_hooks
        for number in [key for key, hook in hooks.items() if hook.__module__ == "transformers.utils.output_capturing"]:
            del hooks[number]


def of_any_size(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked so that compiled code takes any size of its dimensions, except the last one of several.

    What: torch._dynamo.maybe_mark_dynamic, _is_view of tensors.
    Why: torch.compile(dynamic=True) takes sizes that are equal in the first call for one size, and compiles again when
    they differ. It also compiles for the size of a view's base, so a view is copied.
    """
    tensor = tensor.clone() if tensor._is_view() else tensor
    for dimension in range(max(tensor.dim() - 1, 1)):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    return tensor


def end_workers(batches: Any) -> Callable[[], None] | None:
    """The function that ends the worker processes of a pass over a DataLoader; None for a pass without workers.

    What: _shutdown_workers of torch's iterator.
    Why: torch ends workers when nothing refers to the iterator. A traceback may refer to it until the process ends.
    """
    return getattr(batches, "_shutdown_workers", None)


def workers(batches: Any) -> Sequence[Any]:
    """The worker processes of a pass over a DataLoader; see end_workers()."""
    return getattr(batches, "_workers", ())


def muon_parts() -> tuple[Callable[..., torch.Tensor], Callable[..., float]]:
    """Muon's orthogonalization of a matrix, and its factor for the learning rate.

    What: _zeropower_via_newtonschulz and _adjust_lr of torch.optim._muon.
    Why: torch.optim.Muon updates whole matrices, but a rank may hold only rows of a matrix. These functions give the
    same bits as torch.optim.Muon.
    """
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz, _adjust_lr


# Ranks


def process_group(name: str) -> Any:
    """The process group with this `group_name`.

    What: _resolve_process_group of torch.distributed.
    Why: an operator of torch cannot take a group as an argument, only its name.
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


DTENSOR_TABLES = (
    "debug:_clear_sharding_prop_cache",
    "_sharding_prop:ShardingPropagator._propagate_tensor_meta_cached.cache_clear",
    "_redistribute:clear_redistribute_planner_cache",
    "_redistribute:_gen_transform_infos.cache_clear",
    "_collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)


def forget_meshes() -> None:
    """Free the symmetric memory of all groups, and empty DTensor's tables of operators.

    What: functions of torch.distributed.tensor that clear its caches.
    Why: the tables refer to the meshes of all tensors. The meshes keep the process groups and gloo's threads alive.
    """
    _SYMMETRIC.clear()
    if "torch.distributed.tensor" in sys.modules:
        for table in DTENSOR_TABLES:
            with suppress(ImportError, AttributeError):
                pkgutil.resolve_name(f"torch.distributed.tensor.{table}")()


def end_rank(code: int) -> NoReturn:
    """Wait for threads that are no daemons, run Python's exit hooks, flush all open files, and end this process with
    `code`.

    What: threading._shutdown and atexit._run_exitfuncs.
    Why: a process with a thread of gloo may abort at its end (pytorch#190489), and os._exit() does none of this.
    """
    for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(module, name, lambda: None)()
    for each in gc.get_objects():
        if isinstance(each, io.IOBase):
            with suppress(OSError, ValueError):  # it is closed, or its reader is gone
                each.flush()
    os._exit(code)


def set_host_timeout(group: Any, patience: timedelta) -> None:
    """Set how long exchanges between hosts may take, in a group that also exchanges between GPUs.

    What: _set_default_timeout of the group's backend for CPU tensors.
    Why: init_process_group takes one timeout for hosts and GPUs.
    """
    group._get_backend(torch.device("cpu"))._set_default_timeout(patience)


class SymmetricMemory:
    """Memory of a GPU that all ranks of a group register with NCCL, at the same offsets. It is kept until the ranks
    part, because torch does not take the registration back when memory is freed.

    What: torch.distributed._symmetric_memory.
    Why: torch documents it, but under a private name. FSDPModule.set_symm_mem_for_comm (from torch 2.13) also takes
    its memory from there, and picks blocks that may differ between ranks.
    Gone: NCCL's kernels gather weights, and the proofs say so.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NCCL")
        self.device, self.group = device, group
        self.kept: list[torch.Tensor] = []
        torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL starts with the first exchange
        allocator = symmetric.get_mempool_allocator(device)
        self.pool = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)

    def buffers(self, count: int, size: int, anew: bool) -> list[torch.Tensor]:
        """`count` flat uint8 tensors with at least `size` uninitialized bytes each. Unless `anew`, tensors of earlier
        calls are taken again. All ranks of the group call this together."""
        from torch.distributed._symmetric_memory import rendezvous

        torch.cuda.empty_cache()  # this pool does not free the memory that torch keeps
        found = [] if anew else [tensor for tensor in self.kept if tensor.nbytes >= size]
        while len(found) < count:
            with torch.cuda.use_mem_pool(self.pool):
                tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
            rendezvous(tensor, group=self.group.group_name)
            self.kept.append(tensor)
            found.append(tensor)
        return found[:count]


_SYMMETRIC: dict[str, SymmetricMemory] = {}
"""The symmetric memory of each process group, by the group's name."""


def symmetric_memory(device: torch.device, group: Any) -> SymmetricMemory:
    """The symmetric memory of a process group. forget_meshes() frees it."""
    if group.group_name not in _SYMMETRIC:
        _SYMMETRIC[group.group_name] = SymmetricMemory(device, group)
    return _SYMMETRIC[group.group_name]


# The compiler

# What: counters, graph breaks, failed guards, metrics and errors of torch._dynamo.
# Why: a graph break changes no result, and torch has no public report of it (torch._dynamo.explain compiles anew).
# Only functions below use torch._dynamo, because importing it takes a second.


def compiler_errors() -> tuple[type[Exception], ...]:
    """The errors that torch raises if it cannot compile code as asked."""
    found = torch._dynamo.exc
    return found.Unsupported, found.UserError, found.FailOnRecompileLimitHit


def recompile_limit_error() -> type[Exception]:
    """The error that torch raises after too many compilations of one function."""
    return torch._dynamo.exc.FailOnRecompileLimitHit


def compiler_error() -> type[Exception]:
    """The class of all of Dynamo's errors."""
    return torch._dynamo.exc.TorchDynamoException


@functools.cache
def unwrapped_error(kind: type[Exception]) -> type[Exception]:
    """A subclass of `kind` that torch's compilers raise unchanged. They wrap all errors except their own."""
    base = torch._dynamo.exc.ShortenTraceback

    def begin(self: Any, text: str) -> None:
        base.__init__(self, text, first_useful_frame=None)

    return type("Refusal", (kind, base), {"__init__": begin})


def counters() -> Any:
    """Dynamo's counts by group and name, such as `["stats"]["unique_graphs"]`."""
    return torch._dynamo.utils.counters


def graph_breaks() -> list[Any]:
    """All graph breaks of this process: `.reason` and `.user_stack`."""
    return torch._dynamo.utils.graph_break_reasons


def guard_failures() -> dict[Any, list[Any]]:
    """For each code object, the reasons why its compiled code was not used again."""
    return torch._dynamo.utils.guard_failures


def compilations() -> list[Any]:
    """torch's metrics of the compilations of this process."""
    return torch._dynamo.utils.get_compilation_metrics()


def keep_compilations(count: int) -> None:
    """Let torch keep the metrics of this many compilations; its default is 64."""
    torch._dynamo.utils.set_compilation_metrics_limit(count)


COMPILER_LOG = "torch._dynamo"


def is_unknown_writes(record: logging.LogRecord) -> bool:
    """Whether torch says in its log that it cannot determine which arguments a Triton kernel writes.

    What: a warning with an exception from the file that analyses Triton kernels, or a record with the text below.
    Why: torch then assumes that the kernel writes all arguments, and may compile wrong code, as torch 2.11 does for
        Liger's RMSNorm. Only the log says so.
    """
    analysed = Path(record.pathname).stem == "triton_kernel_wrap" and record.levelno >= logging.WARNING
    return (analysed and bool(record.exc_info)) or "assuming every input is mutated" in record.getMessage()


def raise_recompile_limit(limit: int) -> None:
    """Let torch compile a function at least this many times.

    What: recompile_limit and accumulated_recompile_limit of torch._dynamo.config.
    Why: torch.compile has no option for them.
    """
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, name, max(getattr(torch._dynamo.config, name), limit))


def compiling_with(**options: Any) -> AbstractContextManager[Any]:
    """A context manager that sets these options of Dynamo in its body.

    What: torch._dynamo.config.patch.
    Why: torch.compile's `options` are options of Inductor.
    """
    return torch._dynamo.config.patch(options)


def import_compiler() -> None:
    """Import what torch.compile would import at its first call, which starts its processes, too. An error appears at
    that call.

    What: torch._inductor.compile_fx.
    Why: the import takes 1.5 s, and torch has no public function that does it.
    """
    with suppress(Exception):
        importlib.import_module("torch._inductor.compile_fx")


def default_compiler_cache() -> Path:
    """The folder in which Inductor keeps compiled code unless a variable names another one.

    What: torch._inductor's default_cache_dir.
    Why: torch writes its default into the variable that users set. Only this function tells the two apart.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir())


def install_graph_pass(name: str, change: Callable[[Any], Any]) -> None:
    """Let Inductor call `change` with each graph just before it generates code, after the passes already installed.
    `name`: part of the key of the cache of compiled code.

    What: post_grad_custom_post_pass of Inductor, and the class of such a pass.
    Why: torch.compile takes no `options` beside a `mode`.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    installed: Any = config.post_grad_custom_post_pass
    if getattr(installed, "fxtune_name", None) == name:
        return
    before = installed if isinstance(installed, (list, tuple)) else [installed] if installed is not None else []

    class Pass(CustomGraphPass):
        fxtune_name = name

        def __call__(self, graph: Any) -> None:
            for graph_pass in before:
                graph_pass(graph)
            change(graph)

        def uuid(self) -> Any:
            # The code of `change` is part of the cache folder's name (system/files/compiler_cache.py).
            names = [graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None for graph_pass in before]
            return (name, *names) if all(names) else None

    config.post_grad_custom_post_pass = Pass()


def keep_operator_order() -> None:
    """Let Inductor generate code in the order of a graph's operators from now on. Each rank compiles for its own
    sizes, and ranks that exchange tensors in different orders hang.

    What: reorder_for_peak_memory of Inductor, which sorts operators by the sizes of the first call.
    Why: torch.compile takes no `options` beside a `mode`.
    """
    from torch._inductor import config

    config.reorder_for_peak_memory = False


def activation_budget() -> float:
    """The compiler's budget: the share of activations that it keeps for the backward pass. It recomputes the others.

    What: torch._functorch.config.activation_memory_budget.
    Why: torch documents this setting, but under a private name.
    """
    return float(torch._functorch.config.activation_memory_budget)


def with_activation_budget(share: float) -> AbstractContextManager[Any]:
    """A context manager that sets the compiler's budget in its body; see activation_budget()."""
    return torch._functorch.config.patch(activation_memory_budget=share)


# Attention


UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""The operator for a reshape() of a product's result in Inductor's graphs."""


def attention_operator(name: str) -> Callable[..., Any]:
    """An attention operator of aten by its name.

    What: torch.ops.aten._flash_attention_forward and _scaled_dot_product_cudnn_attention.
    Why: scaled_dot_product_attention takes no packed documents, and chooses its kernel itself.
    """
    return getattr(torch.ops.aten, name)
