"""Divides the weights of a model over ranks, with torch's `fully_shard` (FSDP2, arXiv 2304.11277).

Each matrix is divided by rows: a rank holds some rows of the matrix, its gradient and its optimizer state. Before a
decoder layer runs, the ranks gather its matrices. While it runs, they gather the matrices of the next layer. They free
the matrices after the layer and gather them once more for the backward pass. After the layer's backward pass its
gradients are summed in float32, and each rank gets its rows of the sum. So a rank sends three times the weights in
each step. (With `replicate` it sends twice the gradients.)

Experts of a mixture are divided by expert and never gathered: a rank computes its experts for the tokens of all ranks
(kernels/token_exchange.py). So it has the whole gradient of its experts after the backward pass.

Norms, biases, other vectors and adapters stay whole on every rank. They are small (rank-16 adapters of 70B: 0.8 GB in
float32), gradients.py sums their gradients, and checkpoints and exports of adapters are the same as in one process.
The embedding and the head are separate groups, because only the first and the last kernel of a pass read them. The
embedding is freed after its use. The head stays until its backward pass has run.

Under autocast the matrices of layers are gathered in autocast's dtype. They are multiplied in this dtype, so the
results are the same for half the bytes. Gradients are summed, not averaged, because losses are already divided by the
tokens of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxtune.distributed.chunks import LinearWeights, divided_like, is_divided, local
from fxtune.distributed.copy_engines import copy_engine_gather, gathered_bytes
from fxtune.distributed.world import World

OWN = "own_experts"
"""The attribute of a module whose parameters are divided by expert. It maps each parameter's name to a plain parameter
with this rank's experts, because torch's compiler takes no divided ones. The plain parameter shares the memory, and
gets the gradient."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Sharding:
    """Controls the sharded weights of `model` for passes and training steps; shard() returns it. `experts`: parameters
    that are divided by expert -> this rank's experts. `gathered_by`: what gathers the weights of layers, in words."""

    def __init__(
        self, model: Any, world: World, experts: Mapping[nn.Parameter, nn.Parameter], gathered_by: str
    ) -> None:
        self.model, self.world, self.experts, self.gathered_by = model, world, experts, gathered_by
        self.accumulates = True
        """Whether gradients of earlier micro-batches are kept whole on each rank, in float32, and summed over ranks
        once a step. That sends less, and needs memory for a whole gradient."""

    def arming(self, micro_batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the `micro_batches` of a step. If gradients accumulate, they are summed over the ranks after the last
        micro-batch only. Reads one micro-batch ahead to find the last one."""
        for own in self.experts.values():
            own.grad = None  # it may belong to a step that was given up
        ahead: list[Item] = []
        self.model.set_requires_gradient_sync(not self.accumulates)
        for item in micro_batches:
            if ahead:
                yield ahead.pop()
            ahead.append(item)
        self.model.set_requires_gradient_sync(True)
        yield from ahead

    @torch.no_grad()
    def collect_gradients_of_experts(self) -> None:
        """Give the experts' parameters the gradients of this rank's experts, summed over the replicas. No sum over the
        ranks that divide the weights is needed: each of them has computed its experts for all tokens."""
        mesh = self.world.weights_mesh
        for weight, own in self.experts.items():
            if own.grad is not None and mesh.ndim > 1:
                own.grad.copy_(self.world.sum(own.grad.float(), "adding up gradients of experts", mesh.get_group(0)))
            weight.grad = None if own.grad is None else divided_like(own.grad, weight)
            own.grad = None

    def free_gathered(self) -> None:
        """Free the weights that a forward pass without a backward pass has left gathered."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def with_head(self, work: Callable[[], Result]) -> Result:
        """Return work(), which calls parts of the model and not the model itself. The parameters outside of the
        layers, such as the head's, are gathered for work() and for its backward pass."""
        result: Result = self.model.run_with_head(work)
        if not torch.is_grad_enabled():
            self.model.reshard()
        return result


def shard(
    model: Any,
    layers: Sequence[nn.Module],
    embedding: nn.Module | None,
    whole: Collection[nn.Parameter],
    world: World,
    cast: torch.dtype | None = None,
    experts: Sequence[nn.Module] = (),
) -> Sharding:
    """Divide the weights of `model` over the ranks of `world.weights_mesh`, in place. Weights on the meta device
    become uninitialized memory on world.device.

    `layers`: the decoder layers; `embedding`: the embedding of tokens, None if its weight is also the head's;
    `whole`: parameters that are not divided; `cast`: the dtype in which linears are multiplied, None: the weights';
    `experts`: modules whose tensors [experts, ...] are divided by expert, and never gathered.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh, ignored = world.weights_mesh, set(whole)
    for module in experts:
        divide_by_expert(module, world)
        ignored.update(module.parameters(recurse=False))

    def divide(part: nn.Module) -> Any:
        # Only linears are cast: autocast leaves other operations in the dtype of their weights. Codes of fp8 weights
        # must not be cast, as older torch would do.
        codes = any(not weight.is_floating_point() for weight in part.parameters())
        dtype = cast if _only_linears(part, ignored) and not codes else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        with _CodesWithoutGradients():
            divided = fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        own = [weight for weight in part.parameters() if weight not in ignored]
        sizes.append(gathered_bytes(own, mesh.size(-1), dtype))
        ignored.update(own)
        return divided

    sizes = list[int]()
    groups = [divide(layer) for layer in layers]
    gather, gathered_by = copy_engine_gather(world, sizes)
    for layer in groups if gather else ():
        layer.set_custom_all_gather(gather)
    for layer, following in itertools.pairwise(groups):
        layer.set_modules_to_forward_prefetch([following])
    if embedding is not None and any(True for _ in embedding.parameters()):
        divide(embedding).set_unshard_in_backward(False)  # the backward pass does not read it
    divide(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sum gradients: losses are divided by the tokens of all ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialize(model, world.device)
    # torch gathers the weights for a registered method of the module, and finds the method by its name.
    model.run_with_head = MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "run_with_head")
    # After a forward pass torch keeps the root's weights gathered for the backward pass, also without gradients.
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else model.reshard())
    own: dict[nn.Parameter, nn.Parameter] = {}
    for module in experts:
        held = {name: weight for name, weight in module.named_parameters(recurse=False) if is_divided(weight)}
        own.update({weight: nn.Parameter(local(weight), weight.requires_grad) for weight in held.values()})
        setattr(module, OWN, {name: own[weight] for name, weight in held.items()})
    return Sharding(model, world, own, gathered_by)


def divide_by_expert(experts: nn.Module, world: World) -> None:
    """Replace each parameter [experts, ...] of a module on the meta device by a divided parameter: each rank holds the
    same number of experts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = world.weights_mesh
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for name, weight in experts._parameters.items():
        if weight is not None and weight.dim() > 1:
            held = weight.detach().new_empty(len(weight) // mesh.size(-1), *weight.shape[1:])
            divided = DTensor.from_local(
                held, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
            )
            experts._parameters[name] = nn.Parameter(divided, requires_grad=weight.requires_grad)


class _CodesWithoutGradients(TorchFunctionMode):
    """Lets integer parameters be divided, such as the codes of fp8. torch 2.11 sets requires_grad on such
    parameters, which raises RuntimeError, and resets it in the next line. torch 2.12 does not (pytorch#177948)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.requires_grad_ and not args[0].dtype.is_floating_point:
            return args[0]
        return function(*args, **(kwargs or {}))


def _only_linears(part: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    """Whether all parameters of `part` that are to be divided are weights of linears."""
    return all(
        isinstance(module, nn.Linear | LinearWeights)
        for module in part.modules()
        if any(parameter not in ignored for parameter in module.parameters(recurse=False))
    )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device uninitialized memory on `device`."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    memory = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
