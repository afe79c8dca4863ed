"""Full fine-tuning of a mixture's experts by the operators of run.py, over ranks that divide experts, or on GPUs
with all experts.

transformers' own code keeps the gathered rows for the backward pass. It adds up the gradients of rows by index_put,
which becomes atomic additions in compiled code.
"""

from __future__ import annotations

from typing import Any

import torch

from fxtune.models.experts import LAST, experts_of
from fxtune.models.structure import observing, outputs
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.base import Evidence
from fxtune.techniques.experts.run import OPERATOR, one_operator, run_experts

IMPLEMENTATION = "fxtune"
"""The name of plain_experts() in transformers' registry."""


def compute_experts(model: Any, everywhere: bool = False) -> None:
    """Let fxtune compute the experts of `model`, which has no adapters, if one operator can train all of them: in
    bfloat16 on a GPU, without biases. `everywhere`: do this on all devices, in all dtypes, and with biases, too."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    acts = {module: one_operator(module) for module in experts_of(model)}
    if acts and (everywhere or all(act is not None and _trains_fast(module) for module, act in acts.items())):
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, plain_experts)
        model.set_experts_implementation(IMPLEMENTATION)
        for module, act in acts.items():
            module.expert_act = act


def _trains_fast(experts: Any) -> bool:
    """Whether gated_experts() computes the gradients of these experts, with a grouped kernel of torch."""
    weight = getattr(experts, LAST)
    is_whole = len(weight) == experts.num_experts and not getattr(experts, "_is_expert_parallel", False)
    return is_whole and not experts.has_bias and weight.is_cuda and weight.dtype is torch.bfloat16


def observe_computed(model: Any, probe: dict[str, Any]) -> Evidence | None:
    """Observe whether gated_experts() computes the experts in a forward pass over `probe`, a small row. None if
    compute_experts() has left the experts to transformers. `model`: not divided over ranks."""
    layers = len([*experts_of(model)])
    if not layers or IMPLEMENTATION not in model.get_experts_implementation().values():
        return None
    counter = OperatorCounter(lambda name, _: name if name == OPERATOR else None)
    with observing(model), counter:
        outputs(model, **probe)
    calls = counter.counts[OPERATOR]
    return Evidence(
        "experts",
        "the experts of a layer as one operator",
        f"{calls} calls of {OPERATOR} in a forward pass through {layers} layers with experts",
        calls > 0,
    )


def plain_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """run_experts() without adapters, with the arguments that transformers passes to implementations of experts."""
    return run_experts(experts, {}, hidden, index, weights, getattr(experts, "expert_act", None))
