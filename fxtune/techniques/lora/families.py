"""Decides which modules of a model can run as one operator: by names, and by a numeric check.

A module is a candidate if it has adapted linears with Llama's names. fxtune runs the candidate's code to see what the
code computes:

- An MLP is fused if it computes down(act(gate(x)) * up(x)). A copy of the module with three tiny float64 linears runs
  forward and backward, and is compared with this formula for each known activation. Some inputs are large, so that a
  clamp shows. The copy is in training mode, so that dropout shows.
- Projections of an attention are fused on two conditions. In a forward pass of the model the attention calls each of
  them once, with the hidden states that it was given. And the attention's output stays the same if the projections
  return results computed before the call.

Numbers cannot show a norm between the projections and RoPE, since a norm whose weights are all one commutes with a
rotation. So the operator rotates q and k only for the model types in `ROPE_FOLLOWS`.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.models.probe import probe_logits
from fxtune.techniques.lora.fused_modules import StandIn, forward_of, given, rotated_parts, without_rope

ATTENTION = ("q_proj", "k_proj", "v_proj")
"""Projections of an attention's input: queries, keys, values."""
PROJECTIONS = (ATTENTION, ("in_proj_qkv", "in_proj_z"))
"""Groups of linears that read the input of an attention or of a gated delta rule (Qwen3.5)."""
MLP = ("gate_proj", "up_proj", "down_proj")
ROPE_FOLLOWS = {"gemma", "gemma2", "granite", "llama", "ministral", "mistral", "qwen2", "starcoder2"}
"""Model types in which RoPE comes directly after the projections of queries and keys."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Name of an activation that kernels/swiglu.py computes -> the function."""
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a module's code may raise when it runs with replaced parts. Such a module cannot be fused."""


def mlp_activation(mlp: nn.Module) -> str | None:
    """The activation of an MLP that computes down(act(gate(x)) * up(x)); None if it computes something else.

    The module runs with small random weights, so it may be on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, dtype=torch.float64, device="cpu", generator=generator)
    gate, up, down = weights = [draw(12, 8), draw(12, 8), draw(8, 12)]
    small = copy.copy(mlp)
    small._modules = dict(mlp._modules)
    for name, weight in zip(MLP, weights, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        small._modules[name] = linear
    x = torch.cat([draw(1, 3, 8), 100 * draw(1, 3, 8)]).requires_grad_()
    was_training, gradient = mlp.training, draw(2, 3, 8)

    def with_gradient(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y.detach(), torch.autograd.grad(y, x, gradient)[0]

    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            results = with_gradient(small.train().forward(x))
    except ERRORS:
        return None
    finally:
        mlp.train(was_training)
    for name, activation in ACTIVATIONS.items():
        targets = with_gradient((activation(x @ gate.t()) * (x @ up.t())) @ down.t())
        if all(_close(result, target, 1e-10) for result, target in zip(results, targets, strict=True)):
            return name
    return None


@dataclass
class AttentionCall:
    """The first call of an attention in a forward pass of its model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: torch.Tensor | None = None
    inputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Name of a projection -> the inputs of all its calls."""

    @property
    def hidden_states(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def projects(self, name: str) -> bool:
        """Whether this projection was called once, with the attention's own input."""
        return len(self.inputs[name]) == 1 and self.inputs[name][0] is self.hidden_states


def observe_attentions(model: Any, candidates: Mapping[Any, Iterable[str]]) -> dict[Any, AttentionCall]:
    """Run `model` on a few tokens. Returns each candidate's first call. `candidates`: attention -> its projections."""
    calls: dict[Any, AttentionCall] = {}

    def enter(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(attention, AttentionCall(args, kwargs))

    def leave(attention: Any, _: Any, output: Any) -> None:
        if calls[attention].output is None:
            calls[attention].output = _tensor(output)

    def project(attention: Any, name: str, _: Any, args: tuple[Any, ...]) -> None:
        if (call := calls.get(attention)) and call.output is None:
            call.inputs[name].append(args[0] if args else None)

    with ExitStack() as hooks:
        for attention, names in candidates.items():
            hooks.callback(attention.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(attention.register_forward_hook(leave).remove)
            for name in names:
                hook = functools.partial(project, attention, name)
                hooks.callback(getattr(attention, name).register_forward_pre_hook(hook).remove)
        probe_logits(model)
    return calls


def runs_on_given(attention: Any, names: Sequence[str], call: AttentionCall, rotated: bool) -> bool:
    """Whether the attention gives the observed output if its projections `names` return results computed before.

    `rotated`: q and k are returned rotated, and the attention's own rotation is skipped.
    """
    hidden = call.hidden_states
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            linears = [getattr(attention, name) for name in names]
            results = [linear(hidden) for linear in linears]
            forward = forward_of(attention)
            if rotated:
                forward, sizes = without_rope(type(attention)), [result.shape[-1] for result in results]
                angles = call.kwargs["position_embeddings"]
                results = rotated_parts(torch.cat(results, -1), attention, angles, sizes)
            stand_in = StandIn(attention, given(names, linears, hidden, results))
            output = _tensor(forward(stand_in, *call.args, **call.kwargs))
    except ERRORS:
        return False
    if output is None or call.output is None:
        return False
    # On the meta device only shapes are known. Lora.verify() compares the logits of the loaded model.
    return output.is_meta or _close(output, call.output, 2e-2)


def _tensor(output: Any) -> torch.Tensor | None:
    """The first tensor that a module returned, or None."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first.detach() if isinstance(first, torch.Tensor) else None


def _close(result: torch.Tensor, target: torch.Tensor, tolerance: float) -> bool:
    return result.shape == target.shape and bool((result - target).norm() <= tolerance * target.norm())
