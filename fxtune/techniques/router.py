"""The auxiliary loss of a mixture's routers, which balances how many tokens each expert gets.

If a router sends most tokens to few experts, the other experts stay unused. Architectures of transformers have a loss
against this (Switch Transformers, arXiv 2101.03961, equations 4 to 6). It is the number of experts times the sum over
experts e of f_e P_e. f_e is the share of tokens that expert e gets, and P_e is its mean probability, both over the
tokens of all layers. If the config has `output_router_logits`, transformers adds this loss times
`router_aux_loss_coef`. fxtune does the same, unless `aux_loss_coef` gives another factor.

Loss and gradient equal transformers' loss and gradient. models/routers.py says how a compiled layer returns them.

The loss is computed for each micro-batch of a rank without padding, as in transformers. The loss of a step is the mean
over micro-batches, weighted by supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxtune.distributed.world import World
from fxtune.facts.options import RouterOptions
from fxtune.facts.run import Facts
from fxtune.models.experts import experts_per_token
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import backbone, hooked, observing, skeleton
from fxtune.techniques.base import Evidence, Technique
from fxtune.upstream.transformers import recorded_outputs, router_loss

CLOSE = 1e-3
"""Largest relative difference between the auxiliary loss of a small row and transformers' loss of this row. A router
in bfloat16 may choose another expert for a token."""


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

    def apply(self, model: PreparedModel, world: World) -> None:
        if model.routers is not None:
            model.routers.coefficient = self.aux_loss_coef or 0.0

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        if not self.aux_loss_coef:
            return
        module, routers = model.module, model.routers
        asked = f"the auxiliary loss of {module.config.model_type}, times {self.aux_loss_coef:g}"
        if routers is None:
            yield Evidence("router", asked, "none of its modules is a router that fxtune observes", False)
            return
        logits: list[Tensor] = []

        def note(_: Any, __: Any, output: Any) -> None:
            logits.append(output[0])

        with hooked(router.register_forward_hook(note) for router in routers.modules), observing(module):
            module(**probe)
        own_loss, reference = (loss.item() for loss in (routers.loss(), _own_loss(module, tuple(logits))))
        yield Evidence(
            "router",
            asked,
            f"{own_loss:.6g} for a small row, {reference:.6g} by transformers",
            abs(own_loss - reference) <= CLOSE * abs(reference),
        )


def _without_loss(facts: Facts) -> str | None:
    """Why fxtune has no auxiliary loss for this model; None if there is one."""
    kind = facts.text.get("model_type")
    model: Any = skeleton(facts.model)
    if model is None:
        return f"fxtune knows no routers of {kind}"
    if router_loss(model) is None:
        return f"{kind} has no auxiliary loss in transformers"
    if isinstance(recorded_outputs(backbone(model)).get("router_logits"), (list, type(None))):
        return f"{kind} has routers of several kinds, which fxtune does not observe"
    return None


def _own_loss(model: Any, logits: tuple[Tensor, ...]) -> Any:
    """The auxiliary loss that transformers computes from the logits of all routers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    used, loss = experts_per_token(base.modules(), model.config.get_text_config()), router_loss(base)
    assert loss is not None, "_without_loss() has looked"
    return loss(logits, logits[0].shape[-1], used)
