"""The optimizers, from libraries, the parameter groups they get, and their state as plain tensors.

`Optimizer` is one thing to the loop even where the method is two (Muon for matrices, AdamW for the rest). Its update is
guarded: when the step's loss or gradient is not finite, nothing changes, neither weights nor moments. The host does not wait to
know (kernels/guarded_step.py), but for Adafactor and for large models with an optimizer that is not fused.

Memory of the state in bytes a trained weight: AdamW 8 over float32 weights (4 over bfloat16 ones, whose moments are bfloat16
too), adamw_8bit 2 (blocks of 256 values share a scale, arXiv 2110.02861; tensors of fewer than 4,096 values keep 8), Lion,
Muon and SGD with momentum half of AdamW's, Adafactor next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.optim.config import OptimizerConfig, OptimizerName, library
from fxtune.optim.skip_nonfinite import LIMIT, Guard, unwaiting
from fxtune.optim.stochastic_adamw import StochasticAdamW
from fxtune.system.compiler_cache import use_cache_folder
from fxtune.techniques.estimate.memory import MOMENTS as PER_WEIGHT
from fxtune.techniques.quantize import Library

Scalar = int | float | bool


class Optimizer:
    """The trainable parameters of a model and the library optimizers that update them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, keep_gradients: bool = False):
        """keep_gradients: gradients are zeroed in place and never dropped, for code that is recorded as CUDA graphs: what it
        hands out as a gradient is overwritten by its next run, so it must be added to memory of our own.

        A weight that no backward pass has reached since the last step is none the less left alone, as where its gradient is None:
        zeros would pull it to zero by weight decay, and move it by the momentum of earlier steps.
        """
        self.names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.parts = _library_optimizers(model, config, list(self.names))
        self.guards = {part: Guard(part) for part in self.parts if _guarded(part, list(self.names))}
        self.keep_gradients = keep_gradients
        self.reached: set[str] = set()
        """With keep_gradients: names of the weights to whose gradient something was added since the last step. Autograd's hooks
        say so; code that plays a recording, where none runs, adds what was reached when it was recorded."""
        self.kept: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, name in self.names.items() if keep_gradients else ():
            self.kept[parameter] = parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(partial(_reach, self.reached, name))

    def clip(self, max_norm: float) -> torch.Tensor:
        """The norm of the whole gradient, a scalar on the device; the gradient is scaled down to `max_norm` (0: it is not)."""
        reached = {
            parameter: parameter.grad
            for parameter, name in self.names.items()
            if parameter.grad is not None and (name in self.reached or not self.keep_gradients)
        }
        norm = torch.nn.utils.get_total_norm(list(reached.values()), foreach=True)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(reached), max_norm, norm, foreach=True)
        return norm

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Update the weights with learning rate `lr` if `finite` (a bool scalar on the device), then drop the gradients."""
        for parameter in self.kept:
            if self.names[parameter] not in self.reached:
                parameter.grad = None  # until drop()
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(
                    group["lr"], torch.Tensor
                ):  # of torchao: compiled code sees a new value, not a new constant
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            if part.defaults.get("fused"):
                part.found_inf = (~finite).float()  # type: ignore[attr-defined]  # what GradScaler hands to fused kernels
                part.step()
                continue
            with _uncompiled(part):
                taken = part in self.guards and self.guards[part].step(finite)
                if not taken and finite.item():  # it has no way to skip on the device: one host sync a step
                    part.step()
        self.drop()

    def drop(self) -> None:
        """Drop the gradients, or zero those that are kept."""
        if self.keep_gradients:
            torch._foreach_zero_(list(self.kept.values()))
            for parameter, gradient in self.kept.items():
                parameter.grad = gradient
            self.reached.clear()
            return
        for parameter in self.names:
            parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
        """The moments as `parameter name/key` -> plain tensor, and what is not a tensor likewise."""
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Scalar] = {}
        for part in self.parts:
            if part in self.guards:
                self.guards[part].settle()
            for group in part.param_groups:
                for parameter in group["params"]:
                    moments = dict(part.state.get(parameter, {}))
                    if moments and "step" in group:  # where Apex counts
                        moments["step"] = group["step"]
                    for key, value in _flat(moments):
                        target: dict[str, Any] = tensors if isinstance(value, torch.Tensor) else scalars
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
                    part.state[parameter] = _whole(
                        parameter,
                        {
                            key: value.to(parameter.device)
                            if isinstance(value, torch.Tensor) and not (key == "step" and on_host)
                            else value
                            for key, value in moments.items()
                        },
                    )
                    if _of(part, "apex") and "step" in moments:
                        group["step"] = part.state[parameter].pop("step")


def _reach(reached: set[str], name: str, _: torch.Tensor) -> None:
    reached.add(name)


def _flat(moments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A parameter's state as plain tensors and numbers: torchao's 8-bit ones come apart as `key.codes`, `.scale`, `.qmap`."""
    for key, value in moments.items():
        if hasattr(value, "__tensor_flatten__"):
            yield from ((f"{key}.{inner}", getattr(value, inner)) for inner in value.__tensor_flatten__()[0])
        elif key.startswith(
            "qmap"
        ):  # one table for all of bitsandbytes' states: a file of tensors takes no shared memory
            yield key, value.clone()
        elif value is not None:
            yield key, value


def _whole(parameter: torch.Tensor, flat: dict[str, Any]) -> dict[str, Any]:
    """_flat() undone, for the state of `parameter`."""
    moments = {key: value for key, value in flat.items() if "." not in key}
    for key in sorted({key.partition(".")[0] for key in flat.keys() - moments.keys()}):
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, scale, qmap = (flat[f"{key}.{inner}"] for inner in ("codes", "scale", "qmap"))
        moments[key] = OptimState8bit(codes, scale, qmap, signed=key == "exp_avg", dtype=parameter.dtype)
    return moments


def _uncompiled(part: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """On a CPU torchao's update runs as it is written: compiling C++ for it would cost more than it gives."""
    on_host = part.param_groups[0]["params"][0].device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if on_host and _of(part, Library.torchao.value) else nullcontext()


def _guarded(part: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Whether a step is better taken back on the device than asked about. Adafactor asks the device itself, for each weight."""
    able = not part.defaults.get("fused") and not isinstance(part, torch.optim.Adafactor)
    return able and parameters[0].is_cuda and sum(parameter.nbytes for parameter in parameters) <= LIMIT


def _of(part: torch.optim.Optimizer, package: str) -> bool:
    return type(part).__module__.partition(".")[0] == package


def _library_optimizers(
    model: Any, config: OptimizerConfig, parameters: list[torch.Tensor]
) -> list[torch.optim.Optimizer]:
    betas = (config.betas[0], config.betas[1])
    shared: dict[str, Any] = dict(lr=config.lr, weight_decay=config.weight_decay)

    def adamw(chosen: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = _groups(chosen, config.weight_decay)
        if config.stochastic_rounding:
            use_cache_folder()  # its step is compiled
            return StochasticAdamW(groups, betas=betas, eps=config.eps, **shared)
        return torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=config.fused, **shared)

    if config.name is OptimizerName.adamw:
        return [adamw(parameters)]
    if config.name is OptimizerName.adamw_8bit:
        return [_adamw_8bit(config, parameters)]
    if config.name is OptimizerName.apex_adamw:
        from apex.optimizers import FusedAdam

        return [
            FusedAdam(
                _groups(parameters, config.weight_decay), betas=betas, eps=config.eps, adam_w_mode=True, **shared
            )
        ]
    if config.name is OptimizerName.sgd:
        sgd = torch.optim.SGD(
            _groups(parameters, config.weight_decay), momentum=config.momentum, fused=config.fused, **shared
        )
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


def _adamw_8bit(config: OptimizerConfig, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    facts = World(parameters[0].device).facts()
    given: dict[str, Any] = dict(
        lr=config.lr, weight_decay=config.weight_decay, betas=(config.betas[0], config.betas[1]), eps=config.eps
    )
    groups = _groups(parameters, config.weight_decay)
    if library(config, facts) is Library.bitsandbytes:
        return unwaiting()(groups, **given)
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    use_cache_folder()
    part = TorchaoAdamW8bit(groups, bf16_stochastic_round=config.stochastic_rounding, **given)
    for parameter in parameters:
        # torchao gives a small tensor moments in the weight's dtype. In bfloat16 the second one would stand still.
        if parameter.numel() < 4096 or parameter.numel() % part.block_size:
            part.state[parameter].update(
                step=torch.tensor(0.0),
                exp_avg=torch.zeros_like(parameter, dtype=torch.float32),
                exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32),
            )
    return part


def _groups(parameters: list[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Norms and biases are 1-d and scale things; pulling them to zero only hurts. So they get no weight decay."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    return [group for group in groups if group["params"]]


def moment_bytes(optimizer: str, parts: Iterable[torch.optim.Optimizer]) -> int:
    """The bytes of the moments that an optimizer (its name in the recipe) will keep; `parts`: the libraries' it is made of."""
    total = 0
    for part in parts:
        each = PER_WEIGHT.get("adamw" if isinstance(part, torch.optim.AdamW) else optimizer.replace("_", ""), 2.0)
        in_float32 = "8bit" in optimizer or isinstance(part, StochasticAdamW)
        for weight in (weight for group in part.param_groups for weight in group["params"]):
            total += int(each * weight.numel() * (4 if in_float32 else weight.element_size()))
    return total
