"""Evidence that checkpointing acted: layers that ran twice, operators that ran once, bytes that were saved and sent.

`Counts` is a dispatch mode. It counts operators below autograd, in layers that run operator by operator. Gradients are
computed outside of all parts of a layer (its norms, its attention, its linears). So an operator that runs inside the
call of a part during the backward pass is a recomputation. `saved_bytes` counts what autograd stores, in compiled
layers, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.distributed.chunks import is_divided
from fxtune.facts.recomputation import RecomputePlan
from fxtune.models.kinds.known import images_of
from fxtune.models.prepared import FirstPass, PreparedModel
from fxtune.models.structure import backbone, beside_text, decoder_layers, hooked, outputs, without_dropout
from fxtune.techniques.base import NO_IMAGE, Evidence
from fxtune.techniques.checkpointing import policy
from fxtune.techniques.checkpointing.offload import leaves
from fxtune.techniques.checkpointing.policy import Rule, group_of, name_of, weight_shape
from fxtune.techniques.lora import families, fuse, fused_modules
from fxtune.techniques.lora.fused_modules import FusedMlp
from fxtune.upstream import torch as upstream

_evidence = partial(Evidence, "checkpointing")


@dataclass
class OperatorCount:
    """The runs of one operator in one layer, for second operands of one shape."""

    group: str | None
    shape: tuple[int, int] | None
    """(in, out) of a product's second operand."""
    saved: bool
    """Whether the rule saves the operator's results."""
    forward: int = 0
    recomputed: int = 0
    bytes: int = 0
    """Bytes of the operator's results in the forward pass."""


class Proof:
    """Runs a model on `probe`, forward and backward, and compares what it observes with what the options ask for.

    `plan`: what layers keep. `rules`: level -> rule. `named`: operators, groups and linears that must run.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        probe: dict[str, Any],
        plan: RecomputePlan,
        rules: dict[str, Rule],
        named: list[str],
    ) -> None:
        model = self.model = prepared.module
        self.first_pass = prepared.first_pass
        self.offload, self.probe, self.plan, self.named = prepared.offload, probe, plan, named
        self.layers, self.tokens = decoder_layers(model), probe["input_ids"].numel()
        self.levels, self.sending = plan.levels(len(self.layers)), plan.sending(len(self.layers))
        beside = {id(parameter) for parameter in beside_text(model)}
        self.trained = next(
            parameter
            for parameter in (*backbone(model).parameters(), *model.parameters())  # a head may be the first module
            if parameter.requires_grad and not is_divided(parameter) and id(parameter) not in beside
        )
        self.counts = Counts([rules[level] for level in self.levels])

    def forward(self) -> Any:
        return outputs(self.model, **self.probe)

    def backward(self, logits: torch.Tensor) -> Any:
        return torch.autograd.grad(logits.float().mean(), self.trained, allow_unused=True)

    def evidence(self, description: str) -> Iterator[Evidence]:
        """`description`: what the options ask for, in words."""
        recomputed = [level not in ("everything", "budget") for level in self.levels]
        with without_dropout(self.model):
            self.counts.run(self.layers, self.forward, self.backward)
            if any(recomputed):
                yield self._layers_ran_twice(recomputed)
            yield self._operators_ran(description)
            if any(self.sending):
                yield from self._offloaded()
            elif self.plan.level == "budget":
                yield self._budget_in_force()
            elif any(recomputed):
                seen = self._bytes_saved(self.first_pass) if self.first_pass else None
                # Dropout, and attention that keeps a number for each pair of tokens, save more in longer rows.
                if seen is None or not seen.acted:
                    seen = self._bytes_saved()
                yield from [seen] if seen else []
        if self.plan.tiles > 1:
            yield self._tiled()

    def _layers_ran_twice(self, recomputed: list[bool]) -> Evidence:
        # Layers below the first trained parameter have no backward pass, so they are not recomputed.
        trained = (
            index
            for index, layer in enumerate(self.layers)
            if any(parameter is self.trained for parameter in layer.parameters())
        )
        first = next(trained, 0)
        calls = [1 + (is_recomputed and index >= first) for index, is_recomputed in enumerate(recomputed)]
        twice = f"{sum(count > 1 for count in self.counts.first)} of {len(calls)}"
        return _evidence(
            f"{sum(recomputed)} of {len(calls)} layers recomputed",
            f"{twice} layers ran twice in one forward and backward",
            self.counts.first == calls,
        )

    def _operators_ran(self, description: str) -> Evidence:
        """Check that no saved operator ran again, and that all operators that the recipe names ran."""
        layer, counted = self.layers[0], self.counts.all()
        sizes, ranks = policy.linears(layer) | dict(fuse.group_sizes(layer)), policy.ranks(layer)
        shapes = {shape: ", ".join(name for name in sizes if sizes[name] == shape) for shape in sizes.values()}
        totals: dict[str, list[int]] = {}
        for name, count in counted:
            label = f"{name} ({shapes.get(count.shape, 'adapters')})" if count.shape else name
            total = totals.setdefault(label, [0, 0])
            total[0] += count.forward
            total[1] += count.recomputed
        runs = ", ".join(f"{name} {forward}+{again}" for name, (forward, again) in totals.items())
        any_again = any(count.recomputed for _, count in counted)
        # Tiles repeat the MLP's adapters, too. Attention's adapters may have the same shapes.
        tiles = self.plan.tiles > 1
        tiled = {count.shape for _, count in counted if tiles and count.shape and count.shape[1] in ranks}
        wrong = [name for name, count in counted if count.saved and count.recomputed and count.shape not in tiled]
        in_mlp = families.MLP if any(isinstance(module, FusedMlp) for module in layer.modules()) else ()

        def ran(name: str) -> bool:
            return any(
                name in (operator, policy.STANDS_FOR.get(operator), count.group)
                or count.shape == sizes.get(name, ())
                or (name in in_mlp and operator == "fxtune.lora_mlp")
                for operator, count in counted
            )

        missing = [name for name in self.named if not ran(name)]
        note = f"; never ran: {', '.join(missing)}" if missing else ""
        return _evidence(
            description,
            f"runs forward + again: {runs or 'none'}{note}",
            not wrong and not missing and (any_again or "input" not in self.levels),
        )

    def _bytes_saved(self, first_pass: FirstPass | None = None) -> Evidence | None:
        """Compare the bytes that autograd saves in the layers, compiled or not, with the bytes that the rules allow.
        Returns None if the bytes cannot be seen."""
        everything, arguments, saved, one_graph = self._measure_bytes(first_pass)
        # One graph of all layers contains the last norm, too.
        inputs = arguments * (len(self.layers) + 4 * one_graph)
        if set(self.levels) - {"input"} and saved == everything:
            return None  # in layers that are not compiled, torch's policy stores tensors outside of these hooks
        by_rules = sum(count.bytes for _, count in self.counts.all() if count.saved) / self.tokens
        allowed = inputs + by_rules + everything * ("everything" in self.levels)
        return _evidence(
            f"at most {allowed / len(self.layers):,.0f} bytes a token and layer kept for the backward pass",
            f"{saved / len(self.layers):,.0f} bytes",
            saved <= allowed,
        )

    def _budget_in_force(self) -> Evidence:
        """Check the compiler's budget while layers run. In a short row weights dominate, so the bytes prove little."""
        everything, _, saved, one_graph = self._measure_bytes(self.first_pass)
        budgets: list[float] = []
        observed = backbone(self.model) if one_graph else self.layers[0]
        note = observed.register_forward_pre_hook(lambda *_: budgets.append(upstream.activation_budget()))
        with hooked([note]):
            (self.first_pass.run if self.first_pass else self.forward)()
        return _evidence(
            f"a budget of {self.plan.budget:g} for the compiler",
            f"{budgets[-1]:g} while layers run; {saved / len(self.layers):,.0f} of "
            f"{everything / len(self.layers):,.0f} bytes a token and layer kept",
            budgets[-1] == self.plan.budget,
        )

    def _measure_bytes(self, first_pass: FirstPass | None) -> tuple[float, float, float, bool]:
        """Returns the bytes a token that are saved without compiled code, that one layer's arguments have, and that
        are saved with the model's compiled code, and whether all layers are one graph. Compiled code runs
        `first_pass`; without it, the probe."""
        with torch.compiler.set_stance("force_eager"):
            everything, arguments = saved_bytes(self.model, self.layers, (1, self.tokens), self.forward)
        decoder = backbone(self.model)
        one_graph = "forward" in vars(decoder)  # techniques.compile.scope=model: no hook can stand between its layers
        run, rows, length = first_pass or FirstPass(self.forward, 1, self.tokens)
        saved, _ = saved_bytes(self.model, [decoder] if one_graph else self.layers, (rows, length), run)
        return everything, arguments, saved, one_graph

    def _offloaded(self) -> Iterator[Evidence]:
        senders, sent, fetched, size = sum(self.sending), 0, 0, 0
        if (offload := self.offload) is not None:
            before = offload.inputs_sent, offload.inputs_fetched, offload.sent
            min_bytes, offload.min_bytes = offload.min_bytes, 0  # the probe's tensors are small
            with torch.enable_grad():
                self.backward(self.forward())
            offload.min_bytes = min_bytes
            after = offload.inputs_sent, offload.inputs_fetched, offload.sent
            sent, fetched, size = (now - then for now, then in zip(after, before, strict=True))
        yield _evidence(
            f"the inputs of {senders} layers wait in host memory",
            f"{sent} sent there and {fetched} brought back in one forward and backward",
            sent == fetched == senders,
        )
        if self.plan.sent == "kept":
            sent_bytes = size / senders / self.tokens
            inputs = self.model.config.get_text_config().hidden_size * next(self.model.parameters()).element_size()
            yield _evidence(
                f"the other tensors of these layers wait there, too: more than {inputs:,} bytes a token and layer",
                f"{sent_bytes:,.0f} bytes",
                sent_bytes > inputs,
            )

    def _tiled(self) -> Evidence:
        pieces = -(-self.tokens // -(-self.tokens // self.plan.tiles))
        tile_calls = sorted({tuple(calls) for calls in self.counts.tiles})
        # Tiles run again twice if a norm follows the MLP (Gemma 2): the recomputation of the norm runs the MLP, too.
        fits = all(forward == pieces and again in (0, pieces, 2 * pieces) for forward, again in tile_calls)
        return _evidence(
            f"each MLP in {pieces} tiles (of the probe's {self.tokens} tokens)",
            " or ".join(f"{forward} forward and {again} again" for forward, again in tile_calls),
            fits and any(again for _, again in tile_calls),
        )


def vision_encoder_evidence(model: Any, layers: list[nn.Module], rule: Rule) -> Evidence:
    """Observe whether the layers of a trained vision encoder run again in the backward pass of a small image. One
    layer may not run again, because a projector may leave the last layer unread."""
    images, asked = images_of(model.config), f"{len(layers)} layers of the vision encoder recomputed"
    if not images.probe(model):
        return _evidence(asked, NO_IMAGE, True)
    trained = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
    counts = Counts([rule] * len(layers))

    def forward() -> torch.Tensor:
        return torch.stack([feature.float().mean() for feature in images.features(model)]).sum()

    with without_dropout(model):
        counts.run(layers, forward, lambda total: torch.autograd.grad(total, trained, allow_unused=True))
    twice = sum(calls > 1 for calls in counts.first)
    again = sorted({name for name, count in counts.all() if count.saved and count.recomputed})
    note = f", and {', '.join(again)} ran again" if again else ""
    return _evidence(asked, f"{twice} ran twice{note}", twice >= max(1, len(layers) - 1) and not again)


class Counts(upstream.TorchDispatchMode):
    """A context manager that counts the operators that run in its body. `rules`: the rule of each layer."""

    supports_higher_order_operators = True

    def __init__(self, rules: list[Rule]) -> None:
        super().__init__()
        self.rules, self.backward = rules, False
        self.operators: list[dict[tuple[str, Any], OperatorCount]] = [{} for _ in rules]
        """For each layer: (name of an operator, shape) -> its count."""
        self.first = [0] * len(rules)
        """Calls of the module that ran first in each layer: a norm or a linear."""
        self.tiles = [[0, 0] for _ in rules]
        """[forward, backward] calls of each MLP's first linear, or tiles of an MLP that is one operator."""
        self.running: list[int] = []
        """Indices of the layers whose parts are being called."""
        self.leaves: dict[int, nn.Module] = {}
        self.owners: dict[int, int] = {}
        """Storage of a fused MLP's weights -> layer. The MLP's backward pass runs in no module, so its weights tell
        the layer. Divided weights keep their storage while its memory is freed and gathered again."""

    def all(self) -> list[tuple[str, OperatorCount]]:
        return [(name, count) for layer in self.operators for (name, _), count in layer.items()]

    def run(
        self, layers: list[nn.Module], forward: Callable[[], Any], backward: Callable[[torch.Tensor], Any]
    ) -> None:
        """Run `backward(forward())` without compiled code, and count attention and products of `layers`."""
        hooks = []
        for index, layer in enumerate(layers):
            # Hooks on bypassed modules would unfuse them.
            bypassed = {id(part) for module in layer.modules() for part in fused_modules.bypassed(module)}
            inner = [module for module in layer.modules() if module is not layer and id(module) not in bypassed]
            for module in inner:
                hooks.append(module.register_forward_pre_hook(partial(self.enter, index)))
                hooks.append(module.register_forward_hook(self.leave, always_call=True))
            leaves = [module for module in inner if not list(module.children())]
            hooks += [module.register_forward_pre_hook(partial(self.count_first, index)) for module in leaves]
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, nn.Module) and not isinstance(mlp, FusedMlp):  # fused() counts tiles of a FusedMlp
                hooks.append(next(mlp.children(), mlp).register_forward_pre_hook(partial(self.count_tile, index)))
        with hooked(hooks), torch.enable_grad(), torch.compiler.set_stance("force_eager"), self:
            result = forward()
            self.backward = True
            backward(result)

    def enter(self, index: int, *_: Any) -> None:
        self.running.append(index)

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def count_first(self, index: int, leaf: nn.Module, *_: Any) -> None:
        self.first[index] += self.leaves.setdefault(index, leaf) is leaf

    def count_tile(self, index: int, *_: Any) -> None:
        self.tiles[index][self.backward] += 1

    def fused(self, weights: list[torch.Tensor], rows: torch.Tensor, tiles: int) -> None:
        """Count the tiles of a fused MLP that ran, forward or backward, on `rows`."""
        storage = upstream.storage_id(weights[0])
        index = self.owners.setdefault(storage, self.running[-1] if self.running else -1)
        self.tiles[index][self.backward] += -(-len(rows) // -(-len(rows) // tiles))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name.startswith("fxtune.lora_mlp"):
            self.fused(args[7] if name.endswith("backward") else args[3], args[0], args[-2])
        index = self.running[-1] if self.running else None
        if index is not None and self.rules[index].counts(name):
            group = group_of(name)
            shape = weight_shape(name, args) if group == "matmuls" else None
            new = OperatorCount(group, shape, self.rules[index].saves(name, args))
            counted = self.operators[index].setdefault((name, shape), new)
            if self.backward:
                counted.recomputed += 1
            else:
                counted.forward += 1
                results = result if isinstance(result, (tuple, list)) else [result]
                counted.bytes += _bytes_of(results)
        return result


def saved_bytes(
    model: nn.Module, layers: list[nn.Module], shape: Sequence[int], forward: Callable[[], Any]
) -> tuple[float, float]:
    """Returns the bytes a token that autograd saves in the forward pass of `layers`, compiled or not, and the bytes a
    token of one layer's arguments. `shape`: (rows, length) of the pass. Only tensors with an axis of tokens count, and
    no parameters. A tensor that several layers save counts once."""
    tokens = math.prod(shape)
    axes = {tokens, shape[1]}
    weights = set(_addresses(model))
    sizes: dict[int, int] = {}
    inside: list[nn.Module] = []
    arguments = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if inside and not axes.isdisjoint(tensor.shape) and address not in weights:
            sizes[address] = max(sizes.get(address, 0), _bytes_of([tensor]))
        # An operator that saves its own result would otherwise be part of a reference cycle. Python cannot collect
        # this cycle, so the graph, its checkpoints and the model would stay in memory.
        return tensor.detach()

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal arguments
        weights.update(_addresses(layer))  # divided weights are whole in this call
        inside.append(layer)
        arguments = _bytes_of(leaves((args, kwargs)))

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: inside.clear(), always_call=True) for layer in layers]
    with hooked(hooks), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # the result lives until here, so that no address is used twice
        del result
    return sum(sizes.values()) / tokens, arguments / tokens


def _addresses(module: nn.Module) -> Iterator[int]:
    """The addresses of a module's parameters. A divided parameter has no address, but its gathered weight has one."""
    for parameter in module.parameters():
        if not is_divided(parameter):
            yield parameter.untyped_storage().data_ptr()


def _bytes_of(values: Any) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
