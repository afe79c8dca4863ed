"""The gather by copy engines, over plain memory: the buffers that it hands out, and what two ranks learn with it.

tests/gpu/test_two_cards.py runs it on two GPUs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.sharded import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune.distributed.chunks import local
from fxtune.distributed.copy_engines import BUFFERS, CopyEngineGather, copy_engine_gather, gathered_bytes
from fxtune.distributed.world import World

SIZES = (8, 8, 24, 8, 24, 24, 8)


def buffers(size: int) -> list[torch.Tensor]:
    """Plain memory in place of upstream's SymmetricMemory."""
    return [torch.empty(size, dtype=torch.uint8) for _ in range(BUFFERS)]


def test_buffers_are_taken_in_turn_and_never_while_they_are_in_use():
    gather, device = CopyEngineGather(buffers(64)), torch.device("cpu")
    places = []
    for width in (4, 5, 4, 2, 5, 4):
        tensor = gather.allocate((3, width), dtype=torch.float32, device=device)
        assert (tensor.shape, tensor.dtype) == ((3, width), torch.float32)
        places.append(tensor.data_ptr())
    assert places[:BUFFERS] * (6 // BUFFERS) == places
    assert len(set(places)) == BUFFERS
    held = [tensor, gather.allocate((12,), dtype=torch.float32, device=device)]
    with pytest.raises(RuntimeError, match="a pass ended"):
        gather.allocate((12,), dtype=torch.float32, device=device)
    del held


def test_rows_are_padded_and_sent_in_one_dtype():
    weights = [torch.empty(5, 6), torch.empty(3, dtype=torch.bfloat16), torch.empty(4, 2, 2, dtype=torch.uint8)]
    assert gathered_bytes(weights, 2, None) == 6 * 6 * 4 + 4 * 2 + 16
    assert gathered_bytes(weights[:2], 4, torch.bfloat16) == 8 * 6 * 2 + 4 * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, size), nn.Tanh(), nn.Linear(size, 16)) for size in SIZES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x)
        return x


def learned(world: World) -> int:
    """The losses and gradients of layers of two sizes with torch's gather, compared with gathers into two buffers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size,))
    found = list[dict[str, torch.Tensor]]()
    for own in (False, True):
        model = Layers()
        divided: list[Any] = [fully_shard(layer, mesh=mesh) for layer in model.layers]
        fully_shard(model, mesh=mesh)
        for layer, following in pairwise(divided):
            layer.set_modules_to_forward_prefetch([following])
        if own:
            sizes = [gathered_bytes(layer.parameters(), world.size, None) for layer in divided]
            gather = CopyEngineGather(buffers(max(sizes)))
            for layer in divided:
                layer.set_custom_all_gather(gather)
        results = {}
        for step in range(3):
            torch.manual_seed(step)
            rows = torch.randn(4, 16)
            model(rows).square().mean().backward()
            with torch.no_grad():  # an evaluation between two steps
                results[f"evaluation {step}"] = model(rows)
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            results[name] = local(weight.grad)
        found.append(results)
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    assert all(value.isfinite().all() for value in found[1].values())
    return len(found[1])


def test_two_ranks_learn_what_they_learn_with_torchs_gather():
    assert run_ranks(2, learned) == [3 + 4 * len(SIZES)] * 2


def test_cpus_gather_by_gloo():
    assert run_ranks(2, by_what) == [(True, "gloo")] * 2


def by_what(world: World) -> tuple[bool, str]:
    gather, name = copy_engine_gather(world, [1])
    return gather is None, name
