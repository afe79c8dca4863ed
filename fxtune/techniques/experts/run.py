"""Runs the experts of a mixture, with adapters or without, as grouped matmuls.

Each layer sorts its tokens by expert once. One grouped GEMM computes gate and up of all experts, and another grouped
GEMM computes down (kernels/grouped_matmul.py). An adapter adds (x A_e^T) B_e^T for the rows of expert e, as for a
linear. So neither adapted weights nor gradients of frozen weights exist, and the compiler sees one graph. If the
experts are down(act(gate) * up), one operator computes the layer (kernels/gated_experts.py).

adapted.py runs experts inside peft's wrappers this way, full.py runs experts without adapters, and quantized.py stores
experts in fewer bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fxtune.distributed.sharding import OWN
from fxtune.kernels.gated_experts import Adapter, act_of, gated_experts
from fxtune.kernels.grouped_matmul import ALIGNMENT, Routing, grouped_mm
from fxtune.kernels.matmul import CUBLAS
from fxtune.kernels.swiglu import ACTS, Activation
from fxtune.kernels.token_exchange import Exchange
from fxtune.models.experts import FIRST, LAST
from fxtune.models.peft_adapter import ADAPTER
from fxtune.models.replacement import InPlaceOf

EXCHANGE = "exchange"
"""The attribute of experts that are divided over ranks. Its value is an Exchange."""
OPERATOR = "fxtune.gated_experts"
"""The operator of experts in 16 or 32 bits, as checkpointing's rules name it."""


class OwnExperts(InPlaceOf):
    """Experts that replace transformers' experts and compute their adapters themselves."""

    expert_act: Activation
    compute_dtype: torch.dtype
    """The dtype of the hidden states, adapters and biases in products."""

    def run(
        self,
        adapters: dict[str, Any],
        hidden: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        gemm: str,
        keep: bool,
    ) -> torch.Tensor:
        """Compute run_experts() for this rank's experts and the tokens that `routing` has sorted."""
        raise NotImplementedError


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
        act: the activation, if one operator can compute these experts (see one_operator()).
        gemm: the GEMM backend of that operator over 16-bit weights.
        keep: whether that operator keeps the product with gate and up for the backward pass.
    """
    if (exchange := exchange_of(experts)) is None:
        return _run(experts, adapters, hidden, Routing(index, experts.num_experts), weights, act, gemm, keep)
    routing = exchange.route(index)
    dtype = experts.compute_dtype if isinstance(experts, OwnExperts) else _own(experts, LAST).dtype
    states = exchange.gather(hidden.to(dtype), routing)
    # The router's weights for other ranks' experts are set to zero, so they get no gradient on this rank.
    weights = exchange.gather(weights, routing).masked_fill(routing.elsewhere, 0)
    sums = _run(experts, adapters, states, routing, weights, act, gemm, keep)
    return exchange.sum(sums, len(hidden)).to(hidden.dtype)


def exchange_of(experts: Any) -> Exchange | None:
    """The Exchange of a layer whose experts are divided over ranks; None if this rank has all experts."""
    return getattr(experts, EXCHANGE, None)


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
    """Compute run_experts() for the experts that this rank holds and the tokens that `routing` has sorted."""
    first = FIRST[0] if experts.has_gate else FIRST[1]
    if isinstance(experts, OwnExperts):
        return experts.run(adapters, hidden, routing, weights, gemm, keep)
    rows = routing.order, routing.back, routing.ends
    dtype, trained = _own(experts, first).dtype, _own(experts, first).requires_grad
    # The operator computes no gradients of biases.
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


def adapter_of(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [experts, r, in] and B [experts, out, r]. peft stores them as [experts * r, in], [out, r *
    experts]."""
    a, b = wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight
    rank = len(a) // wrapper.num_experts
    return a.view(-1, rank, a.shape[1]), b.view(len(b), rank, -1).permute(2, 0, 1)


def one_operator(experts: Any) -> Activation | None:
    """The activation of experts that kernels/gated_experts.py can compute as one operator, or None if these experts
    compute something else. transformers has the activation as code, so its values are compared with known ones."""
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
    """The part of the tensor `name` with the experts that this rank holds."""
    held = getattr(experts, OWN, {})
    return held[name] if name in held else getattr(experts, name)


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
    """An Adapter of rank 0 in the dtype of `matrices` [experts, out, in]. `shape`: [experts, out, in], if `matrices`
    have another shape."""
    experts, outward, inward = shape or matrices.shape
    return Adapter(matrices.new_empty(experts, 0, inward), matrices.new_empty(experts, outward, 0))


def _padded(adapter: torch.Tensor, dim: int) -> torch.Tensor:
    """A half of an adapter, contiguous. On a GPU zeros fill its rank (the axis `dim`), so that its rows are
    aligned."""
    missing = -adapter.shape[dim] % (ALIGNMENT // adapter.element_size())
    if not (missing and adapter.is_cuda):
        return adapter.contiguous()
    return F.pad(adapter, (0, missing) if dim == 2 else (0, 0, 0, missing))
