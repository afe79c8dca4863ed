"""Runs the experts of a mixture and their adapters as grouped matmuls.

transformers keeps the experts of a layer as one tensor for each product, and peft adapts such a tensor by adding
B_e A_e to it for every expert e in every pass: a copy of all experts and its gradient. Here tokens are sorted by
expert once a layer, the frozen experts are one grouped GEMM for gate and up and one for down
(kernels/grouped_matmul.py), and an adapter adds (x A_e^T) B_e^T for the rows of expert e, as for a linear. So neither
adapted weights nor gradients of frozen weights exist, and the compiler sees one graph.

Full fine-tuning computes whole experts by the same operators: over ranks that divide experts, and on a GPU that holds
all experts (compute_experts()).

All classes that transformers decorates with `use_experts_implementation` say how they store their weights and how they
apply the gate; that interface is followed here, so there is no list of architectures. peft's modules stay, for names,
saving and merging: the outermost one gets a subclass of its class (upstream/peft.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.distributed.sharding import OWN
from fxtune.kernels.gated_experts import Adapter, act_of, gated_experts, with_space
from fxtune.kernels.grouped_matmul import ALIGNMENT, Routing, grouped_mm
from fxtune.kernels.matmul import CUBLAS
from fxtune.kernels.swiglu import ACTS, Activation
from fxtune.kernels.token_exchange import Exchange
from fxtune.models.dims import experts_used
from fxtune.models.replacement import InPlaceOf
from fxtune.models.structure import outputs, without_dropout
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.base import Evidence
from fxtune.techniques.lora.frozen_weights import ADAPTER
from fxtune.upstream.peft import specialize

FIRST, LAST = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of the tensors: before the activation, after it."""
EXCHANGE = "exchange"
"""The attribute of experts that are divided by expert, an Exchange."""
OPERATOR = "fxtune.gated_experts"
"""The operator, as checkpointing's rules name it, of experts in 16 or 32 bits."""


def follows_interface(experts: nn.Module) -> bool:
    """Whether transformers describes how these experts are stored and computed."""
    return all(hasattr(experts, name) for name in ("is_transposed", "has_gate", "has_bias", "num_experts", LAST))


def divisible_experts(model: nn.Module, ranks: int) -> list[Any]:
    """The modules with the experts of a layer that `ranks` ranks divide by expert."""
    described: list[Any] = [module for module in model.modules() if follows_interface(module)]
    return [module for module in described if module.num_experts % ranks == 0]


def used_experts(model: nn.Module, config: Any) -> int | None:
    """How many experts a token uses; 0 without experts, None if the number or the storage of experts is not known."""
    if not any(isinstance(getattr(module, "num_experts", None), int) for module in model.modules()):
        return 0
    used = experts_used(model.modules(), config)
    return used if used and any(map(follows_interface, model.modules())) else None


def is_described(modules: dict[str, nn.Module], path: str) -> bool:
    """Whether `path` is a tensor with the matrices of experts that transformers describes."""
    parent, _, name = path.rpartition(".")
    return follows_interface(modules[parent]) and name in (*FIRST, LAST)


def wrappers(outermost: Any) -> Iterator[Any]:
    """peft's wrappers around the experts' tensors, which are nested, from the outside."""
    from peft.tuners.lora.layer import ParamWrapper

    while isinstance(outermost, ParamWrapper):
        yield outermost
        outermost = outermost.base_layer


def group_experts(model: nn.Module) -> int:
    """Run adapted experts grouped, in place, where that is possible. Returns the number of such layers."""
    from peft.tuners.lora.layer import ParamWrapper

    inner = {id(module.base_layer) for module in model.modules() if isinstance(module, ParamWrapper)}
    count = 0
    for module in list(model.modules()):
        if isinstance(module, ParamWrapper) and id(module) not in inner and _fits(module):
            run_grouped(module)
            count += 1
    return count


def run_grouped(outermost: Any) -> None:
    """Run the experts inside peft's outermost wrapper, and their adapters, as grouped matmuls."""
    experts = outermost.get_base_layer()
    specialize(outermost, GroupedExperts)
    outermost.expert_act = experts.expert_act if isinstance(experts, OwnExperts) else one_operator(experts)


def grouped(model: nn.Module) -> list[Any]:
    """The outermost wrappers of the experts that run grouped."""
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def operator_of(outermost: Any) -> str:
    """The operator, as checkpointing's rules name it, that computes experts that run grouped."""
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
    """Whether each adapted expert that a token of `probe` reaches gets a gradient."""
    from peft.tuners.lora.layer import ParamWrapper

    inner = {id(module.base_layer) for module in model.modules() if isinstance(module, ParamWrapper)}
    outermost: list[Any] = [
        module for module in model.modules() if isinstance(module, ParamWrapper) and id(module) not in inner
    ]
    seen, tokens = ExpertsSeen(len(outermost), len(grouped(model))), defaultdict(set)

    def note(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 1:
            tokens[module].update(args[1].flatten().tolist())

    hooks = [module.register_forward_pre_hook(note) for module in outermost]
    halves = {
        module: [(wrapper.lora_B[ADAPTER].weight, wrapper.num_experts) for wrapper in wrappers(module)]
        for module in outermost
    }
    weights = [weight for pairs in halves.values() for weight, _ in pairs]
    try:
        with without_dropout(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            loss = outputs(model, **probe).float().logsumexp(-1).mean()
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    gradient_of = dict(zip(map(id, weights), gradients, strict=True))
    for module, pairs in halves.items():
        count = min(experts for _, experts in pairs)  # LongCat's identities have higher numbers
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


def adapter_of(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts, r, in] and B [experts, out, r]; peft has them as [experts r, in] and [out, r experts]."""
    a, b = wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight
    rank = len(a) // wrapper.num_experts
    return a.view(-1, rank, a.shape[1]), b.view(len(b), rank, -1).permute(2, 0, 1)


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


IMPLEMENTATION = "fxtune"
"""The name in transformers of plain_experts()."""


def compute_experts(model: Any, everywhere: bool = False) -> None:
    """Let fxtune compute the experts of `model`, which has no adapters, if the operator below trains all of them: in
    bfloat16 on a GPU, without biases. transformers' code keeps the gathered rows, and adds up the gradients of rows
    by index_put, in compiled code by atomic additions. `everywhere`: on every device, in every dtype, and with biases,
    too."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    acts = {module: one_operator(module) for module in model.modules() if follows_interface(module)}
    if acts and (everywhere or all(act is not None and _trains_fast(module) for module, act in acts.items())):
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, plain_experts)
        model.set_experts_implementation(IMPLEMENTATION)
        for module, act in acts.items():
            module.expert_act = act


def _trains_fast(experts: Any) -> bool:
    """Whether gated_experts() has the gradients of these experts, and torch a kernel for its products."""
    weight = getattr(experts, LAST)
    is_whole = len(weight) == experts.num_experts and not getattr(experts, "_is_expert_parallel", False)
    return is_whole and not experts.has_bias and weight.is_cuda and weight.dtype is torch.bfloat16


def observe_computed(model: Any, probe: dict[str, Any]) -> Evidence | None:
    """Whether gated_experts() computes whole experts in a forward pass over `probe`, a small row. None if
    compute_experts() has left them to transformers. `model`: not divided over ranks."""
    layers = sum(map(follows_interface, model.modules()))
    if not layers or IMPLEMENTATION not in model.get_experts_implementation().values():
        return None
    counter = OperatorCounter(lambda name, _: name if name == OPERATOR else None)
    with without_dropout(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), counter:
        outputs(model, **probe)
    calls = counter.counts[OPERATOR]
    return Evidence(
        "experts",
        "the experts of a layer as one operator",
        f"{calls} calls of {OPERATOR} in a forward pass through {layers} layers with experts",
        calls > 0,
    )


def plain_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """run_experts() without adapters, as transformers calls an implementation of experts."""
    return run_experts(experts, {}, hidden, index, weights, getattr(experts, "expert_act", None))


class GroupedExperts:
    """The class of peft's outermost wrapper if its experts run grouped; the other parent is peft's class."""

    expert_act: Activation | None
    gemm = CUBLAS
    """The GEMM backend of experts in 16 bits."""
    keep = True
    """Whether the product with gate and up is kept for the backward pass. Checkpointing sets it."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nested = list(wrappers(self))
        if kwargs or len(args) != 2 or _needs_own_forward(nested):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # peft's
        adapters = {wrapper.parameter_name: wrapper for wrapper in nested}
        # An eager checkpoint runs the operator again, so there the operator keeps its product. A compiled checkpoint
        # skips the operator, and the backward pass computes the product again.
        keep = self.keep or not torch.compiler.is_compiling()
        return run_experts(self.get_base_layer(), adapters, hidden_states, *args, self.expert_act, self.gemm, keep)


class OwnExperts(InPlaceOf):
    """Experts in place of transformers' that compute their adapters themselves."""

    expert_act: Activation
    compute_dtype: torch.dtype
    """The dtype of what is not packed."""

    def run(
        self,
        adapters: dict[str, Any],
        hidden: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        gemm: str,
        keep: bool,
    ) -> torch.Tensor:
        """See run_experts()."""
        raise NotImplementedError


def _needs_own_forward(nested: list[Any]) -> bool:
    """Whether an adapter is off or merged, or another one is active."""
    return any(
        wrapper.disable_adapters or wrapper.merged_adapters or wrapper.active_adapters != [ADAPTER]
        for wrapper in nested
    )


def run_experts(
    experts: Any,
    adapters: dict[str, Any],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    act: Activation | None = None,
    gemm: str = CUBLAS,
    keep: bool = True,
) -> torch.Tensor:
    """The experts' output [tokens, d] for `hidden` [tokens, d]. `index`, `weights` [tokens, k]: the experts of each
    token and their weights.

    Args:
        adapters: peft's wrappers by the names of the tensors that they adapt.
        act: the activation if one operator can compute these experts (one_operator()).
        gemm: the GEMM backend of that operator over 16-bit weights.
        keep: whether that operator keeps the product with gate and up for the backward pass.
    """
    if (exchange := exchange_of(experts)) is None:
        return _run(experts, adapters, hidden, Routing(index, experts.num_experts), weights, act, gemm, keep)
    routing = exchange.route(index)
    states = exchange.gather(hidden.to(_dtype_of(experts)), routing)
    # Weights of experts that another rank holds have no gradient here.
    weights = exchange.gather(weights, routing).masked_fill(routing.elsewhere, 0)
    sums = _run(experts, adapters, states, routing, weights, act, gemm, keep)
    return exchange.sum(sums, len(hidden)).to(hidden.dtype)


def _dtype_of(experts: Any) -> torch.dtype:
    """The dtype in which experts take hidden states."""
    dtype: torch.dtype = experts.compute_dtype if isinstance(experts, OwnExperts) else _own(experts, LAST).dtype
    return dtype


def exchange_of(experts: Any) -> Exchange | None:
    """The Exchange of a layer whose experts are divided over ranks; None if this rank has all experts."""
    found: Exchange | None = getattr(experts, EXCHANGE, None)
    return found


def _run(
    experts: Any,
    adapters: dict[str, Any],
    hidden: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    act: Activation | None,
    gemm: str,
    keep: bool,
) -> torch.Tensor:
    """run_experts() by the experts that this rank holds, for tokens that `routing` has sorted."""
    first = FIRST[0] if experts.has_gate else FIRST[1]
    if isinstance(experts, OwnExperts):
        return experts.run(adapters, hidden, routing, weights, gemm, keep)
    rows = routing.order, routing.back, routing.ends
    dtype, trained = _own(experts, first).dtype, _own(experts, first).requires_grad
    # The operator has no gradients of biases.
    if act is not None and len(adapters) != 1 and not (trained and experts.has_bias):
        matrices, biases = _matrices(experts), biases_of(experts, dtype)
        if adapters:
            pair = halves_of(adapters[first], dtype), halves_of(adapters[LAST], dtype)
        else:
            pair = no_adapter(matrices[0]), no_adapter(matrices[1])
        given = hidden.to(dtype), weights, *rows, matrices, pair
        result = gated_experts(*given, act, gemm, biases, keep=keep, trained=trained)
        return result.to(hidden.dtype)
    states = routing.gather(hidden.to(dtype))
    states = _product(experts, first, adapters, states, routing)
    states = experts._apply_gate(states) if experts.has_gate else experts.act_fn(states)
    states = _product(experts, LAST, adapters, states, routing)
    if getattr(experts, "has_post_expert_norm", False):
        states = experts.post_expert_norm(states)
    return routing.combine(states, weights).to(hidden.dtype)


@torch.no_grad()
def make_space(outermost: Any) -> None:
    """Move the frozen weights of experts to memory with space for their adapters (gated_experts.with_space()), if one
    operator computes the experts, in 16 or 32 bits. Names, shapes and values stay. Weights on the meta device stay
    there."""
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


def one_operator(experts: Any) -> Activation | None:
    """The activation of experts that kernels/gated_experts.py computes as one operator; None if they compute something
    else. transformers gives the activation as code, so it is recognized by its values."""
    if getattr(experts, "has_post_expert_norm", False) or not experts.has_gate:
        return None
    alpha, limit = _number(experts, "alpha", "swiglu_alpha") or 1.0, _number(experts, "limit", "swiglu_limit")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (limit or 4)
    gated = experts._apply_gate(x)
    shapes = itertools.product(ACTS, {1.0, alpha}, {0.0, limit}, (0.0, 1.0), (not experts.is_concatenated,))
    candidates = (Activation(*shape) for shape in shapes)
    return next((act for act in candidates if torch.allclose(gated, act_of(x, act), atol=1e-12)), None)


def _number(experts: Any, *names: str) -> float:
    """The first of these attributes that is a number, or 0."""
    return next(
        (float(value) for name in names if isinstance(value := getattr(experts, name, None), (int, float))), 0.0
    )


def _own(experts: Any, name: str) -> torch.Tensor:
    """A tensor of the experts that this rank holds."""
    held = getattr(experts, OWN, {})
    tensor: torch.Tensor = held[name] if name in held else getattr(experts, name)
    return tensor


def _matrices(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors gate_up and down as [experts, out, in]."""
    first, last = _own(experts, "gate_up_proj"), _own(experts, "down_proj")
    return (first.mT, last.mT) if experts.is_transposed else (first, last)


def biases_of(experts: Any, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not experts.has_bias:
        return None, None
    return _own(experts, "gate_up_proj_bias").to(dtype), _own(experts, "down_proj_bias").to(dtype)


def _product(experts: Any, name: str, adapters: dict[str, Any], rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    weight = _own(experts, name)
    rows = rows.to(weight.dtype)
    result = grouped_mm(rows, weight, routing.ends, experts.is_transposed)
    if name in adapters:
        a, b = halves_of(adapters[name], rows.dtype)
        result = result + grouped_mm(grouped_mm(rows, a, routing.ends, False), b, routing.ends, False)
    if experts.has_bias:
        result = result + _own(experts, f"{name}_bias")[routing.expert]
    return result


def halves_of(wrapper: Any, dtype: torch.dtype) -> Adapter:
    """A and the scaled B of a wrapper in `dtype`, for the experts that this rank holds."""
    a, b = adapter_of(wrapper)
    if (exchange := exchange_of(wrapper.get_base_layer())) is not None:
        a, b = (half.narrow(0, exchange.first, exchange.experts) for half in (a, b))
    b = b * wrapper.scaling[ADAPTER]
    return Adapter(_padded(a.to(dtype), 1), _padded(b.to(dtype), 2))


def no_adapter(matrices: torch.Tensor, shape: Sequence[int] | None = None) -> Adapter:
    """Halves of rank 0 in the dtype of `matrices` [experts, out, in]. `shape`: the shape of `matrices`, if they have
    another one."""
    experts, outward, inward = shape or matrices.shape
    return Adapter(matrices.new_empty(experts, 0, inward), matrices.new_empty(experts, outward, 0))


def _padded(adapter: torch.Tensor, dim: int) -> torch.Tensor:
    """A half of an adapter, contiguous, with zeros up to the next rank whose rows are aligned."""
    missing = -adapter.shape[dim] % (ALIGNMENT // adapter.element_size())
    if not (missing and adapter.is_cuda):
        return adapter.contiguous()
    return F.pad(adapter, (0, missing) if dim == 2 else (0, 0, 0, missing))
