"""Runs adapted experts of a mixture as grouped matmuls.

In every pass peft adds B_e A_e to the tensor of a layer's experts, for every expert e. This makes a copy of all
experts and a gradient of the copy. run.py computes the experts and their adapters without such copies. peft's modules
stay, for names, saving and merging. The outermost one gets a subclass of its class (upstream/peft.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.kernels.gated_experts import with_space
from fxtune.kernels.matmul import CUBLAS
from fxtune.kernels.swiglu import Activation
from fxtune.models.experts import FIRST, LAST, follows_interface
from fxtune.models.peft_adapter import ADAPTER
from fxtune.models.structure import hooked, observing, outputs
from fxtune.techniques.experts.run import OPERATOR, OwnExperts, exchange_of, halves_of, one_operator, run_experts
from fxtune.upstream.peft import specialize


def wrappers(outermost: Any) -> Iterator[Any]:
    """Yield peft's nested wrappers around the experts' tensors, the outermost wrapper first."""
    from peft.tuners.lora.layer import ParamWrapper

    while isinstance(outermost, ParamWrapper):
        yield outermost
        outermost = outermost.base_layer


def group_experts(model: nn.Module) -> int:
    """Change `model` in place, so that adapted experts run grouped where possible. Returns the number of such
    layers."""
    fitting = [module for module in _outermost(model) if _fits(module)]
    for module in fitting:
        run_grouped(module)
    return len(fitting)


def _outermost(model: nn.Module) -> list[Any]:
    """peft's outermost wrapper around the experts of each layer."""
    from peft.tuners.lora.layer import ParamWrapper

    found: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(module.base_layer) for module in found}
    return [module for module in found if id(module) not in inner]


def run_grouped(outermost: Any) -> None:
    """Let the experts inside peft's outermost wrapper, and their adapters, run as grouped matmuls."""
    experts = outermost.get_base_layer()
    specialize(outermost, GroupedExperts)
    outermost.expert_act = experts.expert_act if isinstance(experts, OwnExperts) else one_operator(experts)


def grouped(model: nn.Module) -> list[Any]:
    """The outermost wrappers of the experts that run grouped."""
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def operator_of(outermost: Any) -> str:
    """The operator that computes grouped experts, as checkpointing's rules name it."""
    in_fp8 = getattr(outermost.get_base_layer(), "stored_as", "") == "fp8"
    return "fxtune.fp8_experts" if in_fp8 else OPERATOR


@dataclass
class ExpertsSeen:
    """What one forward and backward pass showed of adapted experts."""

    layers: int = 0
    grouped: int = 0
    """Layers whose experts run as grouped matmuls."""
    experts: int = 0
    """Experts with an adapter, in all layers."""
    reached: int = 0
    """Experts that a token reached."""
    learning: int = 0
    """Reached experts whose adapters all have a gradient."""


def observe_experts(model: nn.Module, probe: dict[str, Any]) -> ExpertsSeen:
    """Run `probe` forward and backward. Count the adapted experts that tokens reach, and those with a gradient."""
    outermost = _outermost(model)
    seen, tokens = ExpertsSeen(len(outermost), len(grouped(model))), defaultdict(set)

    def note(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 1:
            tokens[module].update(args[1].flatten().tolist())

    halves = {
        module: [(wrapper.lora_B[ADAPTER].weight, wrapper.num_experts) for wrapper in wrappers(module)]
        for module in outermost
    }
    weights = [weight for pairs in halves.values() for weight, _ in pairs]
    with hooked(module.register_forward_pre_hook(note) for module in outermost), observing(model, gradients=True):
        loss = outputs(model, **probe).float().logsumexp(-1).mean()
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    gradient_of = dict(zip(map(id, weights), gradients, strict=True))
    for module, pairs in halves.items():
        count = min(experts for _, experts in pairs)  # LongCat's identity experts have higher numbers
        seen.experts += count
        reached = {expert for expert in tokens[module] if expert < count}
        seen.reached += len(reached)
        learning = set(range(count))
        for weight, experts in pairs:
            gradient = gradient_of[id(weight)]
            moved = weight.new_zeros(experts, dtype=torch.bool)
            if gradient is not None:
                moved = gradient.view(len(weight), -1, experts).any(0).any(0)
            if (exchange := exchange_of(module.get_base_layer())) is not None:
                moved = exchange.anywhere(moved)
            learning &= set(moved.nonzero()[:, 0].tolist())
        seen.learning += len(learning & reached)
    return seen


def _fits(outermost: Any) -> bool:
    experts = outermost.get_base_layer()
    if not follows_interface(experts) or getattr(experts, "_is_expert_parallel", False):
        return False
    first = FIRST[0] if experts.has_gate else FIRST[1]
    for wrapper in wrappers(outermost):
        weight = getattr(experts, wrapper.parameter_name)
        inward, outward = weight.shape[1:] if experts.is_transposed else weight.shape[:0:-1]
        in_16_bits = weight.is_floating_point() and weight.element_size() > 1
        is_product = wrapper.parameter_name in (first, LAST) and (in_16_bits or isinstance(experts, OwnExperts))
        if (
            not is_product
            or ADAPTER not in wrapper.lora_A
            or (wrapper.in_features, wrapper.out_features) != (inward, outward)
        ):
            return False
    return True


class GroupedExperts:
    """The class that run_grouped() gives peft's outermost wrapper, beside peft's class. Its experts run grouped."""

    expert_act: Activation | None
    gemm = CUBLAS
    """The GEMM backend of experts in 16 bits."""
    keep = True
    """Whether the product with gate and up is kept for the backward pass. Checkpointing sets this."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nested = list(wrappers(self))
        if kwargs or len(args) != 2 or _needs_own_forward(nested):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # peft's
        adapters = {wrapper.parameter_name: wrapper for wrapper in nested}
        # An eager checkpoint runs the operator again, so in eager mode the operator keeps its product. A compiled
        # checkpoint skips the operator, and the backward pass computes the product again.
        keep = self.keep or not torch.compiler.is_compiling()
        return run_experts(self.get_base_layer(), adapters, hidden_states, *args, self.expert_act, self.gemm, keep)


def _needs_own_forward(nested: list[Any]) -> bool:
    """Whether an adapter is off or merged, or another adapter is active."""
    return any(
        wrapper.disable_adapters or wrapper.merged_adapters or wrapper.active_adapters != [ADAPTER]
        for wrapper in nested
    )


@torch.no_grad()
def make_space(outermost: Any) -> None:
    """Move the frozen weights of experts to memory with space for their adapters (gated_experts.with_space()). This is
    done for experts in 16 or 32 bits that one operator computes. Names, shapes and values do not change. Weights on
    the meta device stay there."""
    experts = outermost.get_base_layer()
    adapters = {wrapper.parameter_name: wrapper for wrapper in wrappers(outermost)}
    if outermost.expert_act is None or isinstance(experts, OwnExperts) or len(adapters) != 2:
        return
    for name, dim in ((FIRST[0], 1), (LAST, 2)):
        weight = getattr(experts, name)
        if weight.is_meta or not weight.is_contiguous():
            continue
        rank = halves_of(adapters[name], weight.dtype).a.shape[1]
        matrices = with_space(weight.mT if experts.is_transposed else weight, rank, dim)
        weight.data = matrices.mT if experts.is_transposed else matrices
