"""Observes the routers of a mixture of experts: counts the tokens of each expert and computes the auxiliary loss.

transformers collects the logits of all routers and computes the loss at the end. Neither compiled layers nor the fused
loss allow this. Here each router leaves its sums over tokens in buffers, without waiting for the device. f_e has no
gradient, so the gradient of P_e is one number an expert, the same for every token. The loss's backward pass runs first
and writes these numbers to a buffer; the layers' backward passes read the buffer. Loss and gradient equal
transformers' own. techniques/router.py says what f_e and P_e are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.models.structure import backbone, hooked
from fxtune.upstream.transformers import recorded_outputs

COMPARISONS = 2**24
"""How many comparisons are made at a time. Each comparison is a number in float32."""


class Routers:
    """A model's routers, and their sums over the tokens of the last forward pass, kept on the device.

    The sums are in buffers of each router. A compiled layer knows the buffers of its modules. With a dictionary by
    router, it would look up and guard an entry for each layer.
    """

    def __init__(self, modules: list[Any], experts: int, collected: bool, device: torch.device) -> None:
        """`collected`: whether the model's config asks for the logits of all routers."""
        self.modules, self.experts, self.collected, self.coefficient = modules, experts, collected, 0.0
        self.mask = torch.ones(1, device=device)
        """float32 [tokens]: 0 for padding. Set it before a forward pass; without it each token counts."""
        self.slope = torch.zeros(experts, device=device)
        """The gradient of the loss with respect to a token's probability of each expert."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        observe = functools.partial(_observe, self)
        for module in modules:
            for name in ("tokens", "chosen", "probability"):
                module.register_buffer(f"{name}_by_expert", torch.zeros(experts, device=device), persistent=False)
            module.register_forward_hook(observe)

    def loss(self) -> Tensor:
        """The auxiliary loss of the newest forward pass, with a gradient."""
        rows = (self.mask.sum() * len(self.modules)).clamp(min=1)
        chosen, probability = (
            torch.stack([getattr(module, f"{name}_by_expert") for module in self.modules]).sum(0) / rows
            for name in ("chosen", "probability")
        )
        return _Balance.apply(self.anchor, chosen, probability, rows, self.slope)

    def statistics(self) -> dict[str, Tensor]:
        """How evenly a layer's tokens are spread over its experts, as means over the layers: the largest share times
        the number of experts, and the entropy of the shares divided by its maximum. Both are 1 for an even spread."""
        tokens = torch.stack([module.tokens_by_expert for module in self.modules])
        shares = tokens / tokens.sum(-1, keepdim=True).clamp(min=1)
        return {
            "router_max_load": self.experts * shares.amax(-1).mean(),
            "router_entropy": torch.special.entr(shares).sum(-1).mean() / math.log(self.experts),
        }


def observe_routers(model: Any, device: torch.device) -> Routers | None:
    """Make the routers of `model` leave their sums. Returns None, and changes nothing, if transformers does not say
    what the routers return."""
    text, decoder = model.config.get_text_config(), backbone(model)
    counts = [getattr(module, "num_experts", 0) for module in decoder.modules()]
    experts = max(count for count in counts if isinstance(count, int))
    if experts < 2:
        return None
    recorder = recorded_outputs(decoder).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type) or getattr(recorder, "index", 0) != 0:
        return None
    found = [module for module in decoder.modules() if isinstance(module, kind)]
    if not found:
        return None
    routers = Routers(found, experts, bool(getattr(text, "output_router_logits", False)), device)
    decoder.register_forward_pre_hook(functools.partial(_before_pass, routers), with_kwargs=True)
    return routers


def broken_router(model: nn.Module, routers: Routers, run: Callable[[], object]) -> str | None:
    """Call run(), which passes rows through `model`, and return the name of the first of the `routers` that gives NaN
    or infinite logits for finite input."""
    names = {module: name for name, module in model.named_modules() if module in routers.modules}
    found: list[str] = []

    def note(router: Any, args: tuple[Any, ...], output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if not found and bool(args[0].isfinite().all()) and not bool(logits.isfinite().all()):
            found.append(names[router])

    with hooked(module.register_forward_hook(note) for module in names):
        run()
    return found[0] if found else None


def _before_pass(routers: Routers, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a forward pass: make a mask if the caller set none (a small row, generation), and keep transformers from
    collecting logits."""
    inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    tokens = next(tensor.shape[:2].numel() for tensor in inputs if tensor is not None)
    if routers.mask.numel() != tokens:
        routers.mask = torch.ones(tokens, device=routers.slope.device)
    return args, {**kwargs, "output_router_logits": False} if routers.collected else kwargs


def _observe(routers: Routers, router: Any, args: Any, output: Any) -> Any:
    """A router's forward hook. `output`: logits [tokens, experts], then weights and numbers of the chosen experts.
    Zaya's logits have one more column, which means "no expert". A token that chooses this column has the weight 0."""
    extra = output[0].shape[-1] - routers.experts if isinstance(output, tuple) else -1
    if extra not in (0, 1):
        return output
    mask, (logits, *rest) = routers.mask, output
    numbers = next((tensor for tensor in rest if not tensor.is_floating_point()), None)
    if numbers is None or len(logits) != len(mask) or logits.is_meta:
        return output
    with torch.no_grad():
        if extra:
            weights = next(tensor for tensor in rest if tensor.is_floating_point())
            numbers = numbers.masked_fill(weights == 0, routers.experts)
        router.tokens_by_expert.copy_(_count(numbers, mask, routers.experts))
        if extra or not routers.coefficient:
            return output
        probability = logits.float().softmax(-1)
        router.chosen_by_expert.copy_(_count(probability.topk(numbers.shape[-1])[1], mask, routers.experts))
        router.probability_by_expert.copy_((probability * mask[:, None]).sum(0))
    carried = (
        _Carry.apply(tensor, logits, mask, routers.slope) if tensor.is_floating_point() else tensor for tensor in rest
    )
    return (logits, *carried)


def _count(numbers: Tensor, mask: Tensor, experts: int) -> Tensor:
    """float32 [experts]: how many tokens each expert gets. `numbers` [tokens, k], `mask` [tokens].

    The counts are sums of comparisons, because a histogram on a GPU adds up atomically. Compiled code never stores the
    comparisons. Without the compiler, comparisons are made for a few experts at a time.
    """
    flat, counted = numbers.flatten()[:, None], mask.repeat_interleave(numbers.shape[-1])[:, None]
    at_once = experts if torch.compiler.is_compiling() else max(1, COMPARISONS // max(len(flat), 1))
    columns = torch.arange(experts, device=numbers.device).split(at_once)
    return torch.cat([((flat == column) * counted).sum(0) for column in columns])


class _Balance(torch.autograd.Function):
    """The loss as a function of the sums. Its backward pass runs before the layers' backward passes, because autograd
    starts with the operation that was computed last."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, chosen: Tensor, probability: Tensor, rows: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(chosen, rows)
        ctx.slope = slope
        return len(chosen) * (chosen * probability).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        chosen, rows = ctx.saved_tensors
        # The layers saved this tensor to read the values written here. Without .data, autograd would report that as an
        # error.
        ctx.slope.data.copy_(gradient * len(chosen) * chosen / rows)
        return (None,) * 5


class _Carry(torch.autograd.Function):
    """Returns the router's weights unchanged. The backward pass adds the auxiliary loss's gradient to the logits'
    gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, mask: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(logits, mask, slope)
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, mask, slope = ctx.saved_tensors
        probability = logits.float().softmax(-1)
        by_token = slope * mask[:, None]
        change = probability * (by_token - (probability * by_token).sum(-1, keepdim=True))
        return gradient, change.to(logits.dtype), None, None
