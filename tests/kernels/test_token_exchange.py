"""Divided experts of three ranks beside the whole experts of one process. Ranks have different numbers of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sharded import run_ranks

from fxtune.distributed.world import World
from fxtune.kernels.gated_experts import Adapter, gated_experts
from fxtune.kernels.grouped_matmul import Routing, grouped_mm
from fxtune.kernels.token_exchange import Exchange, set_tokens
from fxtune.techniques.checkpointing.policy import Rule
from fxtune.upstream.torch import keep_operator_order

D, WIDTH, R, K, EXPERTS = 8, 6, 2, 3, 6
TOKENS = (4, 1, 7)
"""Of each rank. No token chooses expert 5, and the tokens of rank 1 choose experts of rank 0 only."""


def drawn() -> dict[str, torch.Tensor]:
    """The tokens of all ranks, their experts and weights, and the matrices and adapters of all experts."""
    torch.manual_seed(0)
    tokens = sum(TOKENS)
    index = torch.rand(tokens, EXPERTS - 1).topk(K, -1).indices
    index[TOKENS[0] : TOKENS[0] + TOKENS[1]] = torch.tensor([0, 2, 1])
    shapes = {
        "first": (EXPERTS, 2 * WIDTH, D),
        "last": (EXPERTS, D, WIDTH),
        "a1": (EXPERTS, R, D),
        "b1": (EXPERTS, 2 * WIDTH, R),
        "a2": (EXPERTS, R, WIDTH),
        "b2": (EXPERTS, D, R),
        "bias1": (EXPERTS, 2 * WIDTH),
        "bias2": (EXPERTS, D),
        "hidden": (tokens, D),
        "weights": (tokens, K),
    }
    return {"index": index, **{name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}}


def output(kind: str, hidden: torch.Tensor, weights: torch.Tensor, routing: Routing, of: dict) -> torch.Tensor:
    """Adapted experts in one operator, or trained experts as products."""
    if kind == "adapted":
        halves = Adapter(of["a1"], of["b1"]), Adapter(of["a2"], of["b2"])
        rows = routing.order, routing.back, routing.ends
        biases = of["bias1"], of["bias2"]
        return gated_experts(hidden, weights, *rows, (of["first"], of["last"]), halves, biases=biases)
    rows = grouped_mm(routing.gather(hidden), of["first"], routing.ends, False) + of["bias1"][routing.expert]
    return routing.combine(grouped_mm(rows[:, :WIDTH].tanh(), of["last"], routing.ends, False), weights)


KINDS = ("adapted", "trained")


def learn(world: World) -> dict[str, dict[str, np.ndarray]]:
    return {kind: learn_by(kind, world) for kind in KINDS}


def learn_by(kind: str, world: World) -> dict[str, np.ndarray]:
    """The output, and the gradients of one sum over it, of this rank's tokens and experts."""
    given, group = drawn(), torch.distributed.group.WORLD
    tokens = sum(TOKENS[: world.rank]), TOKENS[world.rank]
    experts = EXPERTS // world.size * world.rank, EXPERTS // world.size
    if world.size == 1:
        tokens, experts = (0, sum(TOKENS)), (0, EXPERTS)
    else:
        set_tokens(group.group_name, TOKENS)
    by_token = "index", "hidden", "weights"
    own = {
        name: tensor.narrow(0, *(tokens if name in by_token else experts)).clone() for name, tensor in given.items()
    }
    trained = ("a1", "b1", "a2", "b2") if kind == "adapted" else ("first", "last", "bias1")
    trained = "hidden", "weights", *trained
    for name in trained:
        own[name].requires_grad_()
    if world.size == 1:
        result = output(kind, own["hidden"], own["weights"], Routing(own["index"], EXPERTS), own)
    else:
        exchange = Exchange(group.group_name, *experts)
        routing = exchange.route(own["index"])
        weights = exchange.gather(own["weights"], routing).masked_fill(routing.elsewhere, 0)
        sums = output(kind, exchange.gather(own["hidden"], routing), weights, routing, own)
        result = exchange.sum(sums, tokens[1])
    factors = torch.arange(sum(TOKENS) * D, dtype=torch.float64).sin().view(-1, D).narrow(0, *tokens)
    (result * factors).sum().backward()
    found = {"output": result.detach(), **{name: own[name].grad for name in trained}}
    return {name: tensor.numpy() for name, tensor in found.items()}


def test_ranks_with_some_experts_compute_what_one_process_computes():
    (alone,), ranks = run_ranks(1, learn), run_ranks(3, learn)
    for kind, tensors in alone.items():
        for name, whole in tensors.items():
            joined = np.concatenate([rank[kind][name] for rank in ranks])
            np.testing.assert_allclose(joined, whole, atol=1e-12, err_msg=f"{kind} {name}")
            assert whole.any(), name


def run_out_of_memory(world: World) -> str:
    def fail(*_, **__) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.distributed.all_to_all_single = fail  # of a process for this test
    group = torch.distributed.group.WORLD.group_name
    set_tokens(group, [2])
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Exchange(group, 0, 1).route(torch.zeros(2, 1, dtype=torch.int64))
    return str(raised.value)


def test_memory_that_runs_out_in_an_exchange_is_no_lost_rank():
    assert run_ranks(1, run_out_of_memory) == ["CUDA out of memory"]


def compile_layer(world: World) -> dict[str, tuple[float, bool]]:
    """With each way to recompute: how far a compiled layer is from the layer uncompiled, in its output and gradients,
    and whether it exchanges the same tensors in the same order."""
    from torch.utils.checkpoint import checkpoint

    exchanged: list[tuple[torch.dtype, int]] = []
    send = torch.distributed.all_to_all_single

    def note_and_send(received: torch.Tensor, *options, **more) -> None:
        exchanged.append((received.dtype, received.numel()))
        send(received, *options, **more)

    torch.distributed.all_to_all_single = note_and_send  # of a process for this test
    keep_operator_order()
    given, group = drawn(), torch.distributed.group.WORLD
    set_tokens(group.group_name, [sum(TOKENS)])
    exchange = Exchange(group.group_name, 0, EXPERTS)
    of = {name: tensor.float() for name, tensor in given.items()}
    router, hidden, a1 = torch.randn(D, EXPERTS, requires_grad=True), of["hidden"], of["a1"].requires_grad_()
    hidden.requires_grad_()

    def layer(states: torch.Tensor) -> torch.Tensor:
        weights, index = (states @ router).softmax(-1).topk(K)
        routing = exchange.route(index)
        weights = exchange.gather(weights, routing).masked_fill(routing.elsewhere, 0)
        sums = output("adapted", exchange.gather(states, routing), weights, routing, of)
        return states + exchange.sum(sums, len(states)).relu()

    wanted, orders, found = [], [], {}
    for name, rule in (("none", None), ("full", None), ("selective", Rule()), ("attention", Rule(("attention",)))):
        options = {"context_fn": rule.contexts()} if rule else {}
        whole = layer if name == "none" else lambda states: checkpoint(layer, states, use_reentrant=False, **options)  # noqa: B023
        for compute in (whole, torch.compile(whole, fullgraph=True)):
            exchanged.clear()
            out = compute(hidden)
            wanted.append([out.detach(), *torch.autograd.grad(out.sum(), (hidden, a1, router))])
            orders.append([*exchanged])
        error = max(float((mine - other).abs().max()) for mine, other in zip(*wanted[-2:], strict=True))
        found[name] = error, orders[-1] == orders[-2]
    return found


@pytest.mark.slow
def test_a_layer_compiles_with_each_way_to_recompute():
    (found,) = run_ranks(1, compile_layer)
    assert found.keys() == {"none", "full", "selective", "attention"}
    assert max(error for error, _ in found.values()) < 1e-3, found
    assert found["none"][1]
    assert found["full"][1], "ranks that compile for different sizes would wait for each other"
