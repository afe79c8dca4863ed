"""The exchange of parts between ranks, and its gradient."""

import pytest
import torch
from support.rank_threads import on_ranks

from fxtune.kernels.all_to_all import all_to_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_gets_its_part_of_every_rank_and_gradients_go_back(ranks, dtype):
    sent = torch.randn(ranks, ranks, 5).to(dtype)
    weights = torch.randn(ranks, ranks, 5).to(dtype)

    def work(rank, group):
        parts = sent[rank].clone().requires_grad_()
        received = all_to_all(parts, group)
        (received * weights[rank]).sum().backward()
        return received.detach(), parts.grad

    results = on_ranks(ranks, work)
    assert torch.equal(torch.stack([received for received, _ in results]), sent.transpose(0, 1))
    assert torch.equal(torch.stack([gradient for _, gradient in results]), weights.transpose(0, 1))


def test_compiled_code_has_it_as_one_operator():
    def work(rank, group):
        parts = torch.randn(2, 4, requires_grad=True)
        torch.library.opcheck(all_to_all, (parts, group), test_utils=("test_schema", "test_faketensor"))

    on_ranks(2, work)
