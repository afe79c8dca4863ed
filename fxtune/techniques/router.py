"""The routers of a mixture of experts: how many tokens each expert gets, and the auxiliary loss that balances them.

A router that sends most tokens to few experts leaves the others unused. Architectures of transformers have a loss
against that (Switch Transformers, arXiv 2101.03961, equations 4 to 6): experts x sum over e of f_e P_e, with f_e the
share of tokens that expert e gets and P_e its mean probability, both over the tokens of all layers. transformers adds
it, times `router_aux_loss_coef`, if the config has `output_router_logits`. So does fxtune, unless `aux_loss_coef`
gives another factor.

transformers collects the logits of all routers and computes the loss at the end, which neither a compiled layer nor
the fused loss allows. Here each router leaves its sums over tokens in buffers, without waiting for the device. f_e has
no gradient, so the gradient of P_e is one number an expert, the same for every token. The loss's backward pass runs
first and writes these numbers to a buffer; the layers' backward passes read them. Loss and gradient are those that
transformers computes.

The loss is that of a micro-batch of a rank, padding left out, as in transformers. A step has their mean, weighted by
supervised tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.distributed.world import World
from fxtune.errors import UnavailableError
from fxtune.facts.options import RouterOptions
from fxtune.facts.run import Facts
from fxtune.models.dims import EXPERTS, EXPERTS_USED
from fxtune.models.structure import backbone, observed, skeleton
from fxtune.system.console import say
from fxtune.techniques.base import Evidence, Technique
from fxtune.upstream.transformers import recorded_outputs, router_loss

CLOSE = 1e-3
"""The most that the auxiliary loss of a small row may differ from transformers', relative to it. A router in bfloat16
may choose another expert for a token."""

COMPARISONS = 2**24
"""Comparisons that are made at a time, each a number in float32."""


@dataclass
class Router(RouterOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        if self.aux_loss_coef and (why := _without_loss(facts)):
            yield f"aux_loss_coef: {self.aux_loss_coef:g}, but {why}. Set it to 0."

    def resolve(self, facts: Facts) -> str | None:
        by_config = self.aux_loss_coef is None
        if by_config:
            on = facts.text.get("output_router_logits")
            self.aux_loss_coef = float((on and facts.text.get("router_aux_loss_coef")) or 0.0)
        why = _without_loss(facts) if self.aux_loss_coef else None
        if why or not self.aux_loss_coef:
            self.enabled = False
            return f"no auxiliary loss, because {why}" if why else None
        return f"auxiliary loss times {self.aux_loss_coef:g}" + ", as the model's config says" * by_config

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        routers: Any = getattr(model, "routers", None)
        if routers is not None:
            routers.coefficient = self.aux_loss_coef or 0.0
        return model

    def verify(self, model: Any, probe: dict[str, Any]) -> Iterator[Evidence]:
        if not self.aux_loss_coef:
            return
        asked = f"the auxiliary loss of {model.config.model_type}, times {self.aux_loss_coef:g}"
        if getattr(model, "routers", None) is None:
            yield Evidence("router", asked, "none of its modules is a router that fxtune observes", False)
            return
        logits: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _, __, output: logits.append(output[0]))
            for module in model.routers.modules
        ]
        try:
            with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                model(**probe)
        finally:
            for hook in hooks:
                hook.remove()
        mine, theirs = (one.item() for one in (model.routers.loss(), _own_loss(model, tuple(logits))))
        yield Evidence(
            "router",
            asked,
            f"{mine:.6g} for a small row, {theirs:.6g} by transformers",
            abs(mine - theirs) <= CLOSE * abs(theirs),
        )


class Routers:
    """A model's routers, and their sums over the tokens of the last forward pass, kept on the device."""

    def __init__(self, modules: list[Any], experts: int, collected: bool, device: torch.device) -> None:
        """`collected`: the model's config asks for the logits of all routers."""
        self.modules, self.experts, self.collected, self.coefficient = modules, experts, collected, 0.0
        self.mask = torch.ones(1, device=device)
        """float32 [tokens]: 0 for padding. Set it before a forward pass; without it each token counts."""
        self.slope = torch.zeros(experts, device=device)
        """The gradient of the loss by a token's probability of each expert."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        for module in modules:
            module.routers = self
            for name in ("tokens", "chosen", "probability"):
                module.register_buffer(f"{name}_by_expert", torch.zeros(experts, device=device), persistent=False)
            module.register_forward_hook(_observe)

    def loss(self) -> Tensor:
        """The auxiliary loss of the newest forward pass, differentiable in it."""
        rows = (self.mask.sum() * len(self.modules)).clamp(min=1)
        chosen, probability = (
            torch.stack([getattr(module, f"{name}_by_expert") for module in self.modules]).sum(0) / rows
            for name in ("chosen", "probability")
        )
        loss: Tensor = _Balance.apply(self.anchor, chosen, probability, rows, self.slope)
        return loss

    def statistics(self) -> dict[str, Tensor]:
        """How even the tokens of a layer are over its experts, as means over the layers: the largest share times the
        number of experts (1: even), and the entropy of the shares divided by its maximum (1: even)."""
        tokens = torch.stack([module.tokens_by_expert for module in self.modules])
        shares = tokens / tokens.sum(-1, keepdim=True).clamp(min=1)
        return {
            "router_max_load": self.experts * shares.amax(-1).mean(),
            "router_entropy": torch.special.entr(shares).sum(-1).mean() / math.log(self.experts),
        }


def observe_routers(model: Any, device: torch.device) -> None:
    """Let the routers of `model` leave their sums, and set `model.routers`, if transformers says what they return."""
    text = model.config.get_text_config()
    experts = next((count for name in EXPERTS if isinstance(count := getattr(text, name, None), int)), 0)
    if experts < 2:
        return
    decoder = backbone(model)
    try:
        recorder = recorded_outputs(decoder).get("router_logits")
    except UnavailableError as error:
        say(f"router metrics: off, because {error}")
        return
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type) or getattr(recorder, "index", 0) != 0:
        return
    found = [module for module in decoder.modules() if isinstance(module, kind)]
    if found:
        model.routers = routers = Routers(found, experts, bool(getattr(text, "output_router_logits", False)), device)
        decoder.register_forward_pre_hook(functools.partial(_before_pass, routers), with_kwargs=True)


def broken_router(model: Any, run: Callable[[], object]) -> str | None:
    """The first router that gives NaN or infinite logits for finite input while run() passes rows through `model`."""
    routers: Any = getattr(model, "routers", None)
    if routers is None:
        return None
    names = {module: name for name, module in model.named_modules() if module in routers.modules}
    found: list[str] = []

    def note(router: Any, args: tuple[Any, ...], output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if not found and bool(args[0].isfinite().all()) and not bool(logits.isfinite().all()):
            found.append(names[router])

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _before_pass(routers: Routers, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A mask for a pass that set none (a small row, generation), and no collection of logits by transformers."""
    given = next(one for one in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if one is not None)
    if routers.mask.numel() != given.shape[:2].numel():
        routers.mask = torch.ones(given.shape[:2].numel(), device=routers.slope.device)
    return args, {**kwargs, "output_router_logits": False} if routers.collected else kwargs


def _observe(router: Any, args: Any, output: Any) -> Any:
    """A router's forward hook. `output`: logits [tokens, experts], and with them weights and numbers of experts.
    Logits may have one column more, for no expert: a token that chooses it has the weight 0 (Zaya)."""
    routers: Routers = router.routers
    more = output[0].shape[-1] - routers.experts if isinstance(output, tuple) else -1
    if more not in (0, 1):
        return output
    mask, (logits, *rest) = routers.mask, output
    numbers = next((one for one in rest if not one.is_floating_point()), None)
    if numbers is None or len(logits) != len(mask) or logits.is_meta:
        return output
    with torch.no_grad():
        if more:
            weights = next(one for one in rest if one.is_floating_point())
            numbers = numbers.masked_fill(weights == 0, routers.experts)
        router.tokens_by_expert.copy_(_count(numbers, mask, routers.experts))
        if more or not routers.coefficient:
            return output
        probability = logits.float().softmax(-1)
        router.chosen_by_expert.copy_(_count(probability.topk(numbers.shape[-1])[1], mask, routers.experts))
        router.probability_by_expert.copy_((probability * mask[:, None]).sum(0))
    weights = (_Carry.apply(one, logits, mask, routers.slope) if one.is_floating_point() else one for one in rest)
    return (logits, *weights)


def _count(numbers: Tensor, mask: Tensor, experts: int) -> Tensor:
    """float32 [experts]: the tokens of each expert. `numbers` [tokens, k], `mask` [tokens].

    Sums of comparisons, because a histogram on a GPU adds up atomically. Compiled code never stores the comparisons;
    without the compiler they are made for a few experts at a time.
    """
    flat, counted = numbers.flatten()[:, None], mask.repeat_interleave(numbers.shape[-1])[:, None]
    each = experts if torch.compiler.is_compiling() else max(1, COMPARISONS // max(len(flat), 1))
    every = torch.arange(experts, device=numbers.device)
    return torch.cat([((flat == some) * counted).sum(0) for some in every.split(each)])


class _Balance(torch.autograd.Function):
    """The loss as a function of the sums. Its backward pass runs before those of the layers: autograd takes what was
    computed last first."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, chosen: Tensor, probability: Tensor, rows: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(chosen, rows)
        ctx.slope = slope
        return len(chosen) * (chosen * probability).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        chosen, rows = ctx.saved_tensors
        # .data: the layers saved this tensor to read it now, which autograd would take for a mistake.
        ctx.slope.data.copy_(gradient * len(chosen) * chosen / rows)
        return (None,) * 5


class _Carry(torch.autograd.Function):
    """The router's weights as they are. The backward pass adds the gradient of the auxiliary loss to the logits'."""

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


def _without_loss(facts: Facts) -> str | None:
    """Why a model has no auxiliary loss here."""
    kind = facts.text.get("model_type")
    model: Any = skeleton(facts.model)
    if model is None:
        return f"fxtune knows no routers of {kind}"
    if router_loss(model) is None:
        return f"{kind} has no auxiliary loss in transformers"
    try:
        recorders = recorded_outputs(backbone(model))
    except UnavailableError as error:
        return str(error)
    if isinstance(recorders.get("router_logits"), (list, type(None))):
        return f"{kind} has routers of several kinds, which fxtune does not observe"
    return None


def _own_loss(model: Any, logits: tuple[Tensor, ...]) -> Any:
    """transformers' auxiliary loss of the logits of all routers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    text = model.config.get_text_config()
    used = next(count for name in EXPERTS_USED if (count := getattr(text, name, None)))
    loss = router_loss(base)
    assert loss is not None, "_without_loss() has looked"
    return loss(logits, logits[0].shape[-1], used)
