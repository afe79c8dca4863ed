import pytest
import torch

from fxtune.kernels.shared_keys import select_keys

INDEX = torch.tensor([0, 1, 2, 0, 1, 3])
"""Two answers (tokens 2 and 3) of a prompt (tokens 0 and 1)."""
COPIES = torch.tensor([[0, 1, 2, 5], [3, 4, -1, -1]])


def gradients(select, tokens, index, copies):
    tokens = tokens.clone().requires_grad_()
    out = select(tokens, index, copies)
    out.backward(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))
    return out.detach(), tokens.grad


def plain(tokens, index, _):
    return tokens[index]


def test_keys_and_gradients_are_those_of_indexing():
    tokens = torch.randn(4, 2, 3)
    for found, expected in zip(
        gradients(select_keys, tokens, INDEX, COPIES), gradients(plain, tokens, INDEX, COPIES), strict=True
    ):
        assert torch.equal(found, expected)
    torch.library.opcheck(torch.ops.fxtune.select_keys, (tokens.requires_grad_(), INDEX, COPIES))


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_each_number_of_keys(dynamic):
    compiled = torch.compile(lambda *given: select_keys(*given) * 2, dynamic=dynamic, backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for answers in range(2, 7):
        index = torch.cat([torch.tensor([0, 1, 2 + answer]) for answer in range(answers)])
        copies = torch.full((answers, 2 + answers), -1)
        copies[:, 0], copies[:, 1] = 3 * torch.arange(answers), 3 * torch.arange(answers) + 1
        copies[0, 2:] = 3 * torch.arange(answers) + 2
        tokens = torch.randn(2 + answers, 2, 3)
        found = gradients(compiled, tokens, index, copies)
        expected = gradients(lambda *given: plain(*given) * 2, tokens, index, copies)
        assert all(map(torch.allclose, found, expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2
    torch._dynamo.reset()
