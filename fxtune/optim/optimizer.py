"""One interface to the optimizers of all libraries: parameter groups, updates that skip non-finite steps, saved state.

When the loss or the gradient of a step is not finite, neither weights nor moments change. The check needs no host sync
(skip_nonfinite.py), with these exceptions: Adafactor, schedule-free AdamW, Muon over divided weights, and large models
whose optimizer is not fused.

Bytes of state per trained weight: AdamW takes 8 for float32 weights, and 4 for bfloat16 weights, whose moments are
bfloat16, too. adamw_8bit takes 2, because blocks of 256 values share a scale (arXiv 2110.02861); tensors of fewer than
4,096 values take 8. Lion, Muon and SGD with momentum take half of AdamW's bytes, and Adafactor almost none.
Schedule-free AdamW takes AdamW's bytes, and one or two more copies of the weights during an evaluation and a save.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.distributed.chunks import is_divided, local
from fxtune.distributed.sharding import Sharding
from fxtune.distributed.world import World
from fxtune.facts.execution import OptimizerState
from fxtune.optim.config import BITSANDBYTES, TORCHAO, TRAITS, OptimizerConfig, OptimizerName, library
from fxtune.optim.divided_muon import DividedMuon, Matrix
from fxtune.optim.host_moments import SLOTS, HostMoments
from fxtune.optim.skip_nonfinite import MAX_BYTES, NonfiniteGuard, adamw_8bit_without_sync
from fxtune.optim.stochastic_adamw import StochasticAdamW
from fxtune.system.files.compiler_cache import use_cache_folder
from fxtune.upstream import torch as upstream

Scalar = int | float | bool
STATE_OF_GROUP = {"apex": ("step",), "schedulefree": ("k", "weight_sum", "lr_max")}
"""The state that a package keeps once for all weights of a group. A checkpoint stores this state with each weight."""
EIGHT_BIT_BYTES = 150.0
"""How long an update with torchao's 8-bit AdamW and stochastic rounding takes, for the forecasts: per weight, as
long as reading this many bytes from the card's memory. Full fine-tuning of 8B: 0.3 s."""
TRAINED = "trained"
"""The state's key for the trained weight, if the optimizer saves and evaluates an average instead (averages())."""


class Optimizer:
    """The trainable parameters of a model and the library optimizers that update them: two with Muon, otherwise one.
    If the caller updates weights one by one, or if torchao draws random bits, each weight has a separate optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        keep_gradients: bool = False,
        one_by_one: bool = False,
        sharding: Sharding | None = None,
        for_images: Collection[nn.Parameter] = (),
    ):
        """`keep_gradients`: zero gradients in place and never drop them, because a replay of a CUDA graph writes to
        the same tensors. A weight that no backward pass has reached since the last step is still not updated: a
        gradient of zeros would apply weight decay and the momentum of earlier steps.

        `one_by_one`: update() is called for each weight in place of step(). `sharding`: how weights are divided over
        ranks; None if they are not divided. `for_images`: the parameters that get OptimizerConfig.lr_vision, if it is
        set.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.divided: dict[torch.Tensor, nn.Parameter] = {}
        """The parameter of each divided weight. The key is the tensor with this rank's rows, which is updated."""
        self.names: dict[torch.Tensor, str] = {}
        """The tensors that are updated, each with its parameter's name."""
        rows: dict[torch.Tensor, nn.Parameter] = {}
        """This rank's rows of each divided weight. A rank may have no rows."""
        for name, weight in trained.items():
            own = weight
            if is_divided(weight):
                own = rows[weight] = nn.Parameter(local(weight))
            if not own.numel():  # the weight has fewer rows than there are ranks
                continue
            if own is not weight:
                self.divided[own] = weight
            self.names[own] = name
        self.sharding = sharding
        self.draws = config.stochastic_rounding and config.name is OptimizerName.adamw_8bit
        """Whether updates draw from torch's generator."""
        self.one_by_one = one_by_one
        self.host_moments = HostMoments(next(iter(self.names)).device) if config.offload else None
        names = list(self.names)
        of_images = {*for_images} if config.lr_vision is not None else set()
        by_rate = [
            [own for own in names if (self.divided.get(own, own) in of_images) is chosen] for chosen in (False, True)
        ]
        groups = (
            [[own] for own in names] if self.draws or one_by_one or config.offload else [own for own in by_rate if own]
        )
        self.parts = []
        for group in groups:
            # The parts for images are whole on each rank.
            divided = {} if of_images.intersection(group) else rows
            named = {own: self.names[own] for own in group}
            self.parts += _library_optimizers(model, config, named, divided, sharding)
        if any(isinstance(part, StochasticAdamW) or _is_from(part, TORCHAO) for part in self.parts):
            use_cache_folder()  # their updates are compiled
        self.rates = dict.fromkeys(self.parts, 1.0)
        """The learning rate of each part, as a multiple of step()'s learning rate."""
        for part in self.parts if of_images else ():
            first = part.param_groups[0]["params"][0]
            if self.divided.get(first, first) in of_images:
                self.rates[part] = config.lr_vision / config.lr
        self.guards = {
            part: NonfiniteGuard(part) for part in self.parts if _needs_guard(part, self._in_one_step(part))
        }
        self.averaging = config.betas[0] if config.name is OptimizerName.adamw_schedulefree else None
        """The momentum of schedule-free AdamW; None with other optimizers. See averages()."""
        self.keep_gradients = keep_gradients
        self.reached: set[str] = set()
        """With keep_gradients: names of the weights that have received a gradient since the last step. Autograd hooks
        add them, or the recorder when it replays a CUDA graph."""
        self.kept: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, name in self.names.items() if keep_gradients else ():
            self.kept[parameter] = parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(partial(_mark_reached, self.reached, name))

    @property
    def whole(self) -> dict[torch.Tensor, str]:
        """The weights that each rank holds whole, with their names; all weights if none are divided. Their gradients
        differ between ranks until set_gradients(). The backward pass sums gradients of divided weights over ranks."""
        return {weight: name for weight, name in self.names.items() if weight not in self.divided}

    def _in_one_step(self, part: torch.optim.Optimizer) -> list[torch.Tensor]:
        """All weights that are updated in one step with the weights of `part`. The weights of `part` are included."""
        return (
            [weight for group in part.param_groups for weight in group["params"]]
            if self.one_by_one
            else list(self.names)
        )

    def collect(self) -> None:
        """For each divided weight, take the gradient of this rank's rows from the parameter."""
        if self.sharding is not None:
            self.sharding.collect_gradients_of_experts()
        for own, parameter in self.divided.items():
            own.grad = None if parameter.grad is None else local(parameter.grad)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of `whole`; None for a weight that no backward pass has reached."""
        return [self._gradient(weight) for weight in self.whole]

    def _gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        return weight.grad if self.names[weight] in self.reached or not self.keep_gradients else None

    @torch.no_grad()
    def set_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Set the gradients of `whole`, in the order of gradients(), each in its weight's dtype."""
        for parameter, gradient in zip(self.whole, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)
            if self.keep_gradients:
                self.reached.add(self.names[parameter])

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to norm `max_norm`; 0: do not. Returns the earlier norm, a scalar on the device.
        StochasticAdamW scales in its update, which saves a pass over the gradients."""
        reached = {weight: gradient for weight in self.names if (gradient := self._gradient(weight)) is not None}
        norm = self._norm(gradient for weight, gradient in reached.items() if weight not in self.divided)
        if self.sharding is not None:
            own = self._norm(gradient for weight, gradient in reached.items() if weight in self.divided).double()
            world = self.sharding.world
            squares = world.sum(own.square(), "adding up a norm", world.weights_group)
            norm = (norm.double().square() + squares).sqrt().float()
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if all(isinstance(part, StochasticAdamW) for part in self.parts):
                for part in self.parts:
                    part.gradient_scale = factor  # type: ignore[attr-defined]
                return norm
            for dtype in {gradient.dtype for gradient in reached.values()}:
                # torch multiplies by a scalar of another dtype one tensor at a time: 3 times as slow on an H200.
                same = [gradient for gradient in reached.values() if gradient.dtype is dtype]
                upstream.foreach("mul_", same, factor.to(dtype))
        return norm

    def _norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        device = next(iter(self.names)).device
        return torch.nn.utils.get_total_norm(list(gradients), foreach=True).to(device)

    def step(self, lr: float, finite: torch.Tensor, seed: int = 0) -> None:
        """Update the weights with learning rate `lr` if `finite`, a bool scalar on the device, is true. Then drop the
        gradients. `seed`: the seed of this step's stochastic rounding."""
        for parameter in self.kept:
            if self.names[parameter] not in self.reached:
                parameter.grad = None  # drop() sets the gradient again
        on_host = functools.cache(finite.item)  # at most one host sync
        for part in self.parts:
            self.update(part, lr, finite, seed, on_host)
        self.drop()

    def update(
        self,
        part: torch.optim.Optimizer,
        lr: float,
        finite: torch.Tensor,
        seed: int,
        on_host: Callable[[], Any] | None = None,
    ) -> None:
        """Update the weights of `part`, one of `parts`, and keep their gradients. `on_host`: reads `finite` on the
        host."""
        lr = lr * self.rates[part]
        for group in part.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao would recompile for a new constant
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if isinstance(part, StochasticAdamW):
            part.seed = seed
        elif self.draws:  # so a weight's bits do not depend on the time of its update
            torch.manual_seed(_seed(seed, self.names[part.param_groups[0]["params"][0]]))
        if part.defaults.get("fused"):
            part.found_inf = (~finite).float()  # type: ignore[attr-defined]  # like GradScaler, for fused kernels
            with self.host_moments.on_device(part) if self.host_moments else nullcontext():
                part.step()
            return
        # Compiling the C++ of torchao's update on a CPU takes longer than it saves.
        eager = _is_from(part, TORCHAO) and part.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            taken = part in self.guards and self.guards[part].step(finite)
            if not taken and (on_host or finite.item)():  # the device cannot skip the step, so the host decides
                part.step()

    def drop(self) -> None:
        """Drop the gradients, or zero kept ones."""
        if self.keep_gradients:
            upstream.foreach("zero_", list(self.kept.values()))
            for parameter, gradient in self.kept.items():
                parameter.grad = gradient
            self.reached.clear()
            return
        for parameter in (*self.names, *self.divided.values()):
            parameter.grad = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
        """The state as two dicts, plain tensors and numbers. Their keys are `parameter name/key`."""
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Scalar] = {}
        if self.host_moments:
            self.host_moments.settle()
        for part in self.parts:
            if part in self.guards:
                self.guards[part].settle()
            for group in part.param_groups:
                for parameter in group["params"]:
                    moments = dict(part.state.get(parameter, {}))
                    if moments:
                        moments |= {key: group[key] for key in _state_of_group(part)}
                    if moments and self.averaging is not None:
                        moments[TRAINED] = parameter.detach()
                    for key, value in _plain_state(moments):
                        target: dict[str, Any] = tensors if isinstance(value, torch.Tensor) else scalars
                        target[f"{self.names[parameter]}/{key}"] = value
        return tensors, scalars

    def load(self, tensors: dict[str, torch.Tensor], scalars: dict[str, Scalar]) -> None:
        """Restore what state() returned. Keeps the saved dtypes. torch's `load_state_dict` would cast to the
        weight's."""
        for guard in self.guards.values():
            guard.settle()  # a waiting correction belongs to the state that is replaced
        if self.host_moments:
            self.host_moments.forget()
        saved: dict[str, dict[str, Any]] = {}
        for full, value in [*tensors.items(), *scalars.items()]:
            name, key = full.rsplit("/", 1)
            saved.setdefault(name, {})[key] = value
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    moments = saved.get(self.names[parameter], {})
                    step_on_host = not (group.get("fused") or group.get("capturable"))
                    for key, value in moments.items():
                        on_host = step_on_host if key == "step" else self.host_moments is not None
                        if isinstance(value, torch.Tensor) and not on_host:
                            moments[key] = value.to(parameter.device)
                    part.state[parameter] = state = _library_state(parameter, moments)
                    group.update({key: state.pop(key) for key in _state_of_group(part) if key in state})
                    if TRAINED in state:
                        with torch.no_grad():
                            parameter.copy_(state.pop(TRAINED))

    @torch.no_grad()
    def averages(self) -> dict[torch.Tensor, torch.Tensor]:
        """The tensors to evaluate, save and export in place of the weights; empty for optimizers without averages.

        Schedule-free AdamW takes gradients at y, which lies between the averaged weights x and the moving weights z: y
        = b x + (1 - b) z. Here b is its momentum.
        """
        if self.averaging is None:
            return {}
        states = {parameter: part.state[parameter] for part in self.parts for parameter in part.state}
        return {
            parameter: torch.lerp(parameter, state["z"].to(parameter.device), 1 - 1 / self.averaging)
            for parameter, state in states.items()
            if "z" in state
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In the body the weights are their averages(). Afterwards the weights have their earlier bits."""
        averages = self.averages()
        trained = {parameter: parameter.detach().clone() for parameter in averages}
        try:
            self.use_averages(averages)
            yield
        finally:
            self.use_averages(trained)

    @torch.no_grad()
    def use_averages(self, values: dict[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Replace the weights by `values`. None: replace them by averages()."""
        for parameter, value in (self.averages() if values is None else values).items():
            parameter.copy_(value)


def _state_of_group(part: torch.optim.Optimizer) -> tuple[str, ...]:
    return STATE_OF_GROUP.get(type(part).__module__.partition(".")[0], ())


def _seed(step: int, name: str) -> int:
    """The seed of a weight's random bits in a step with seed `step`."""
    return int.from_bytes(hashlib.blake2b(f"{step}/{name}".encode(), digest_size=8).digest()) >> 1


def _mark_reached(reached: set[str], name: str, _: torch.Tensor) -> None:
    reached.add(name)


def _plain_state(moments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a state's plain tensors and numbers. torchao's 8-bit tensors become `key.codes`, `.scale` and `.qmap`."""
    for key, value in moments.items():
        if hasattr(value, "__tensor_flatten__"):
            yield from ((f"{key}.{inner}", getattr(value, inner)) for inner in value.__tensor_flatten__()[0])
        elif key.startswith("qmap"):
            # All of bitsandbytes' states share one table, and safetensors rejects shared memory.
            yield key, value.clone()
        elif value is not None:
            yield key, value


def _library_state(parameter: torch.Tensor, plain: dict[str, Any]) -> dict[str, Any]:
    """The inverse of _plain_state(), for `parameter`."""
    moments = {key: value for key, value in plain.items() if "." not in key}
    for key in sorted({key.partition(".")[0] for key in plain.keys() - moments.keys()}):
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, scale, qmap = (plain[f"{key}.{inner}"] for inner in ("codes", "scale", "qmap"))
        moments[key] = OptimState8bit(codes, scale, qmap, signed=key == "exp_avg", dtype=parameter.dtype)
    return moments


def state_of(config: OptimizerConfig) -> OptimizerState:
    """The state that this optimizer keeps, for the forecasts."""
    eight_bit = config.name is OptimizerName.adamw_8bit
    size = getattr(torch, config.moments.value).itemsize if config.stochastic_rounding else 0
    return OptimizerState(
        TRAITS[config.name].moments,
        TRAITS[OptimizerName.adamw].moments if config.name is OptimizerName.muon else None,
        4 if eight_bit else size,
        undo_limit(config),
        SLOTS * config.offload,
        EIGHT_BIT_BYTES if eight_bit and config.stochastic_rounding else 0.0,
    )


def undo_limit(config: OptimizerConfig) -> int:
    """A NonfiniteGuard undoes bad steps of this optimizer if the trained weights on a GPU take at most this many
    bytes. 0: no guard does."""
    fused = (OptimizerName.adamw, OptimizerName.sgd)
    syncs = (OptimizerName.adafactor, OptimizerName.adamw_schedulefree)
    return 0 if config.name in (*fused, *syncs) else MAX_BYTES


def _needs_guard(part: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Whether a NonfiniteGuard undoes bad steps of `part`. `parameters`: the weights of a whole update."""
    small = sum(parameter.nbytes for parameter in parameters) <= MAX_BYTES
    return small and parameters[0].is_cuda and _can_undo(part)


def _can_undo(part: torch.optim.Optimizer) -> bool:
    """Whether a NonfiniteGuard may undo steps. Adafactor syncs for each weight; schedulefree counts on the host."""
    counts = isinstance(part, torch.optim.Adafactor) or _is_from(part, "schedulefree")
    # Ranks that exchange updates must all take the step, or none.
    return not part.defaults.get("fused") and not counts and not isinstance(part, DividedMuon)


def _is_from(part: torch.optim.Optimizer, package: str) -> bool:
    return type(part).__module__.partition(".")[0] == package


def _library_optimizers(
    model: Any,
    config: OptimizerConfig,
    names: dict[torch.Tensor, str],
    rows: dict[torch.Tensor, nn.Parameter],
    sharding: Sharding | None,
) -> list[torch.optim.Optimizer]:
    """The optimizers of the tensors to update, the keys of `names`. `rows`: this rank's rows of divided weights."""
    parameters = list(names)
    shared: dict[str, Any] = dict(lr=config.lr, weight_decay=config.weight_decay)
    adam: dict[str, Any] = dict(betas=(config.betas[0], config.betas[1]), eps=config.eps, **shared)
    groups = _groups(parameters, config.weight_decay)

    def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if config.stochastic_rounding:
            return StochasticAdamW(groups, names, moments=getattr(torch, config.moments.value), **adam)
        return torch.optim.AdamW(groups, fused=True, **adam)

    if config.name is OptimizerName.adamw:
        return [adamw(groups)]
    if config.name is OptimizerName.adamw_8bit:
        if library(config, World(parameters[0].device).facts()) == BITSANDBYTES:
            return [adamw_8bit_without_sync()(groups, **adam)]
        return [_torchao_adamw(groups, config.stochastic_rounding, adam)]
    if config.name is OptimizerName.apex_adamw:
        from apex.optimizers import FusedAdam

        return [FusedAdam(groups, adam_w_mode=True, **adam)]
    if config.name is OptimizerName.adamw_schedulefree:
        from schedulefree import AdamWScheduleFree

        schedule_free = AdamWScheduleFree(groups, **adam)
        schedule_free.train()
        return [schedule_free]
    if config.name is OptimizerName.sgd:
        sgd = torch.optim.SGD(groups, momentum=config.momentum, fused=True, **shared)
        for parameter in parameters if config.momentum else []:
            # If torch allocated the buffer in a skipped first step, it would stay uninitialised.
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [sgd]
    if config.name is OptimizerName.adafactor:
        return [torch.optim.Adafactor(groups, **shared)]
    if config.name is OptimizerName.lion:
        from lion_pytorch import Lion

        return [Lion(groups, betas=adam["betas"], **shared)]
    # Muon is for matrices that map activations to activations. Embeddings and heads are tables, which AdamW updates.
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables |= set(head.parameters()) if head is not None else set()
    tables |= {p for name, p in model.named_parameters() if "trainable_tokens" in name}  # rows of such tables
    tables |= {p for name, p in model.named_parameters() if "score." in name and len(p) == 1}  # a head of one row
    tables |= {rows[table] for table in tables if table in rows}
    matrices = [p for p in parameters if p.ndim == 2 and p not in tables]
    rest = [p for p in parameters if p.ndim != 2 or p in tables]
    options: dict[str, Any] = dict(momentum=config.momentum, adjust_lr_fn="match_rms_adamw", **shared)
    divided = [Matrix(own, weight.shape) for weight, own in rows.items() if own.ndim == 2 and own not in tables]
    if divided and sharding is not None:
        parts: list[torch.optim.Optimizer] = [DividedMuon(divided, sharding, **options)]
    else:
        parts = [torch.optim.Muon(matrices, **options)] if matrices else []
    return [*parts, adamw(_groups(rest, config.weight_decay))] if rest else parts


def _torchao_adamw(
    groups: list[dict[str, Any]], stochastic_rounding: bool, options: dict[str, Any]
) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    part = AdamW8bit(groups, bf16_stochastic_round=stochastic_rounding, **options)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        # torchao keeps a small tensor's moments in its weight's dtype. A second moment in bfloat16 would never change.
        if parameter.numel() < 4096 or parameter.numel() % part.block_size:
            part.state[parameter].update(
                step=torch.tensor(0.0),
                exp_avg=torch.zeros_like(parameter, dtype=torch.float32),
                exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32),
            )
    return part


def _groups(parameters: list[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups. Norms, biases and other 1-d parameters have no weight decay, because it would only hurt
    them."""
    groups = [
        dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=weight_decay),
        dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


def moment_bytes(state: OptimizerState, parts: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of the moments that the library optimizers `parts` will keep. `state`: the result of state_of()."""
    total = 0
    for part in parts:
        others = state.others if isinstance(part, torch.optim.AdamW) else None
        numbers = state.moments if others is None else others
        for weight in (weight for group in part.param_groups for weight in group["params"]):
            size = state.size or weight.element_size()
            if isinstance(part, StochasticAdamW):
                size = part.moments_of(weight).itemsize
            total += int(numbers * weight.numel() * size)
    return total
