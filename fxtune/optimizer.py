"""The optimizers, from libraries, the parameter groups they get, and their state as plain tensors.

`Optimizer` is one thing to the loop even where the method is two (Muon for matrices, AdamW for the rest). Its update is
guarded: when the step's loss or gradient is not finite, nothing changes, neither weights nor moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

Scalar = int | float | bool


class OptimizerName(str, Enum):
    adamw = "adamw"
    sgd = "sgd"
    adafactor = "adafactor"
    lion = "lion"
    muon = "muon"


@dataclass
class OptimizerConfig:
    name: OptimizerName = OptimizerName.adamw
    """`muon` updates matrices with Muon, scaled so that lr means what it means to AdamW, and all the rest with AdamW."""
    lr: float = 2e-4
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms, biases and other 1-d parameters get none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's and Lion's two decay rates (Lion's authors advise 0.9, 0.99)."""
    eps: float = 1e-8
    """AdamW's."""
    momentum: float = 0.9
    """SGD's and Muon's momentum."""
    fused: bool = True
    """AdamW and SGD: one kernel for all parameters. It also skips a non-finite step on the device, without a host sync."""


class Optimizer:
    """The trainable parameters of a model and the library optimizers that update them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        self.names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parts = _library_optimizers(model, config, list(self.names))

    def clip(self, max_norm: float, scale: float = 1.0) -> torch.Tensor:
        """The norm of the whole gradient, a scalar on the device; the gradient is scaled down to `max_norm` (0: it is not).

        `scale`: what the loss was multiplied with for the backward pass; the gradient is divided by it first.
        """
        gradients = [parameter.grad for parameter in self.names if parameter.grad is not None]
        if scale != 1.0:
            torch._foreach_div_(gradients, scale)
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self.names), max_norm, norm, foreach=True)
        return norm

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Update the weights with learning rate `lr` if `finite` (a bool scalar on the device), then drop the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            if part.defaults.get("fused"):
                part.found_inf = (~finite).float()  # type: ignore[attr-defined]  # what GradScaler hands to fused kernels
                part.step()
            elif finite.item():  # these have no way to skip on the device: one host sync a step
                part.step()
        for parameter in self.names:
            parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
        """The moments as `parameter name/key` -> tensor, and what is not a tensor likewise."""
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Scalar] = {}
        for part in self.parts:
            for parameter, moments in part.state.items():
                for key, value in moments.items():
                    target: dict[str, Any] = tensors if isinstance(value, torch.Tensor) else scalars
                    if value is not None:
                        target[f"{self.names[parameter]}/{key}"] = value
        return tensors, scalars

    def load(self, tensors: dict[str, torch.Tensor], scalars: dict[str, Scalar]) -> None:
        """Take back what `state` gave. The dtypes stay as saved (`load_state_dict` of torch would cast them to the weight's)."""
        saved: dict[str, dict[str, Any]] = {}
        for full, value in [*tensors.items(), *scalars.items()]:
            name, key = full.rsplit("/", 1)
            saved.setdefault(name, {})[key] = value
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    moments = saved.get(self.names[parameter], {})
                    on_host = not (group.get("fused") or group.get("capturable"))  # where torch keeps its step counter
                    part.state[parameter] = {
                        key: value.to(parameter.device) if isinstance(value, torch.Tensor) and not (key == "step" and on_host)
                        else value for key, value in moments.items()}


def _library_optimizers(model: Any, config: OptimizerConfig, parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    betas = (config.betas[0], config.betas[1])
    shared: dict[str, Any] = dict(lr=config.lr, weight_decay=config.weight_decay)

    def adamw(chosen: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(_groups(chosen, config.weight_decay), betas=betas, eps=config.eps, fused=config.fused, **shared)

    if config.name is OptimizerName.adamw:
        return [adamw(parameters)]
    if config.name is OptimizerName.sgd:
        sgd = torch.optim.SGD(_groups(parameters, config.weight_decay), momentum=config.momentum, fused=config.fused, **shared)
        for parameter in parameters if config.momentum else []:
            # From zero the first step is the same. Left to torch, a first step that is skipped leaves memory nobody wrote to.
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [sgd]
    if config.name is OptimizerName.adafactor:
        return [torch.optim.Adafactor(_groups(parameters, config.weight_decay), **shared)]
    if config.name is OptimizerName.lion:
        from lion_pytorch import Lion

        return [Lion(_groups(parameters, config.weight_decay), betas=betas, **shared)]
    # Muon orthogonalises a matrix that maps activations to activations; embeddings and heads are look-up tables.
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables |= {id(p) for p in head.parameters()} if head is not None else set()
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in tables]
    taken = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in taken]
    muon = torch.optim.Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw", **shared)
    return [muon, adamw(rest)] if rest else [muon]


def _groups(parameters: list[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Norms and biases are 1-d and scale things; pulling them to zero only hurts. So they get no weight decay."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    return [group for group in groups if group["params"]]
