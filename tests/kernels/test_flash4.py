"""fxtune::flash4 on a CPU: its plain reference and the operators. tests/gpu/test_attention.py tests the kernels."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import slow_but
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fxtune.kernels.flash4 import flash4

OP = torch.ops.fxtune.flash4.default


def inputs(lengths, heads=4, kv_heads=2, width=8, dtype=torch.float32, value_width=None):
    """q, k, v with gradients, and cu_seqlens, of documents of these lengths."""
    draw = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    qkv = [
        torch.randn(tokens, count, size, generator=draw, dtype=dtype, requires_grad=True)
        for count, size in ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
    ]
    return *qkv, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def by_torch(q, k, v, lengths, scale=0.3, window=0):
    """Attention by torch's scaled_dot_product_attention, one document at a time, with an explicit mask."""
    out = []
    for start, end in pairwise([0, *accumulate(lengths)]):
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        mask = (back >= 0) & (back < (window or end))
        alone = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out.append(
            F.scaled_dot_product_attention(*alone, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(out)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("value_width", [8, 4])
def test_packed_documents_do_not_see_each_other(window, value_width):
    lengths = (1, 7, 0, 12, 0, 0)
    q, k, v, cu_seqlens = inputs(lengths, value_width=value_width)
    out, lse = flash4(q, k, v, cu_seqlens, 20, 0.3, window, 0.0)
    expected = by_torch(q, k, v, lengths, window=window)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    assert lse.shape == (4, 20)
    assert not lse.requires_grad
    weight = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert ours.is_contiguous()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 4]),
    spare=st.integers(0, 3),
)
def test_a_document_with_more_keys_attends_from_its_end(lengths, window, spare):
    """Its queries are the last tokens of a longer document, and keys after all documents change nothing."""
    before = [(0, more)[count > 0] for count, more in lengths]
    own = [count for count, _ in lengths]
    whole = [count + more for count, more in zip(own, before, strict=True)]
    q, k, v, cu_seqlens_k = inputs([*whole, spare])
    of = torch.cat([torch.arange(end - count, end) for count, end in zip(own, accumulate(whole), strict=True)])
    cu_seqlens = torch.tensor([0, *accumulate(own)], dtype=torch.int32)
    out, lse = flash4(q[of], k, v, cu_seqlens, 64, 0.3, window, 0.0, None, cu_seqlens_k[:-1])
    expected = by_torch(q, k, v, whole, window=window)[of]
    torch.testing.assert_close(out, expected)
    assert lse.shape == (4, len(of))
    used = sum(whole)
    for ours, theirs in zip(
        torch.autograd.grad(out.sin().sum(), (q, k, v)),
        torch.autograd.grad(expected.sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours[:used], theirs[:used])


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_sinks_are_one_more_score_in_each_softmax(window, dense):
    *qkv, cu_seqlens = inputs((6, 6))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    given, bounds = ([x.unflatten(0, (2, 6)) for x in qkv], None) if dense else (qkv, cu_seqlens)
    out, _ = flash4(*given, bounds, 6, 0.3, window, 0.0, sinks)
    expected = []
    for start in (0, 6):
        q, k, v = (x[start : start + 6].transpose(0, 1) for x in qkv)
        back = torch.arange(6)[:, None] - torch.arange(6)[None]
        scores = (q @ k.repeat_interleave(2, 0).mT * 0.3).masked_fill((back < 0) | (back >= (window or 6)), -torch.inf)
        with_sink = torch.cat([scores, sinks[:, None, None].expand(4, 6, 1)], -1)
        expected.append((with_sink.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 0)).transpose(0, 1))
    expected = torch.cat(expected)
    torch.testing.assert_close(out.reshape(expected.shape), expected)
    weight = torch.randn(expected.shape)
    for ours, theirs in zip(
        torch.autograd.grad(out, (*qkv, sinks), weight.view(out.shape)),
        torch.autograd.grad(expected, (*qkv, sinks), weight),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    frozen, _ = flash4(*given, bounds, 6, 0.3, window, 0.0, sinks.detach())
    assert torch.equal(frozen, out)
    frozen.sum().backward()


def test_rows_of_one_document_each():
    q, k, v, cu_seqlens = inputs((6, 6))
    packed, lse = flash4(q, k, v, cu_seqlens, 6, 0.3, 0, 0.0)
    rows, lse_of_rows = flash4(*(x.unflatten(0, (2, 6)) for x in (q, k, v)), None, 6, 0.3, 0, 0.0)
    assert torch.equal(rows.flatten(0, 1), packed)
    assert torch.equal(lse_of_rows.transpose(0, 1).flatten(1), lse)


def test_soft_cap_limits_scores():
    q, k, v, cu_seqlens = inputs((5,))
    scores = 1.5 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3 / 1.5)
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    out, lse = flash4(q, k, v, cu_seqlens, 5, 0.3, 0, 1.5)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize(("window", "softcap"), slow_but([(0, 0.0), (2, 0.0), (3, 1.5)], (3, 1.5)))
def test_gradients_against_finite_differences(window, softcap):
    *qkv, cu_seqlens = inputs((3, 5, 1, 0), width=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: flash4(q, k, v, cu_seqlens, 9, 0.35, window, softcap)[0], qkv)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum))
@settings(max_examples=25)
def test_empty_documents_change_nothing(lengths):
    q, k, v, cu_seqlens = inputs(lengths)
    *_, without = inputs([length for length in lengths if length])
    for result, expected in zip(
        flash4(q, k, v, cu_seqlens, 36, 0.3, 0, 0.0), flash4(q, k, v, without, 36, 0.3, 0, 0.0), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dense", slow_but([False, True], True))
def test_operators_pass_opcheck(dense):
    *qkv, cu_seqlens = inputs((4, 5, 0))
    qkv = [x.detach().unflatten(0, (3, 3)).requires_grad_() for x in qkv] if dense else qkv
    torch.library.opcheck(OP, (*qkv, None if dense else cu_seqlens, 9, 0.3, 0, 0.0))
    torch.library.opcheck(OP, (*qkv, None if dense else cu_seqlens, 9, 0.3, 0, 0.0, torch.ones(4, requires_grad=True)))
    out, lse = flash4(*qkv, None if dense else cu_seqlens, 9, 0.3, 0, 0.0)
    torch.library.opcheck(
        torch.ops.fxtune.flash4_backward.default,
        (
            torch.ones_like(out),
            *(x.detach() for x in qkv),
            out.detach(),
            lse,
            None if dense else cu_seqlens,
            9,
            0.3,
            0,
            0.0,
        ),
    )


def test_one_graph_for_all_batches():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, cu: flash4(q * 2, k, v, cu, 12, 0.3, 0, 0.0)[0] + 1, fullgraph=True, backend=backend
    )
    for lengths in ((12, 0, 0), (3, 4, 5), (1, 11, 0)):
        q, k, v, cu_seqlens = inputs(lengths)
        torch.testing.assert_close(compiled(q, k, v, cu_seqlens), by_torch(q * 2, k, v, lengths) + 1)
    assert len(graphs) == 1
    torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Counts executions of the forward operator."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is OP
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("saved", "calls"), [([OP], 1), ([], 2)])
def test_selective_checkpointing_saves_the_operator_by_name(saved, calls):
    q, k, v, cu_seqlens = inputs((4, 5))
    expected = torch.autograd.grad(flash4(q, k, v, cu_seqlens, 9, 0.3, 0, 0.0)[0].sin().sum(), (q, k, v))
    with Calls() as seen:
        out = checkpoint(
            lambda: flash4(q, k, v, cu_seqlens, 9, 0.3, 0, 0.0)[0].sin().sum(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(saved),
        )
        gradients = torch.autograd.grad(out, (q, k, v))
    assert seen.count == calls
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_flop_counter_counts_the_operator():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, cu_seqlens = inputs((16,), heads=4, width=8)
    with FlopCounterMode(display=False) as counter:
        flash4(q, k, v, cu_seqlens, 16, 0.3, 0, 0.0)[0].sum().backward()
    forward = 2 * (16 * 16 * 4 * (8 + 8)) // 2  # two products of 2 flops a pair, over half of the square
    assert counter.get_total_flops() == forward + forward * 5 // 2


KEPT = "cache/fxtune/flash4/{machine}-cpu|1"


CACHES = {
    "in fxtune's cache": ({}, KEPT),
    "also where it is asked for": ({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}, KEPT),
    "where the user says": ({"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "mine"}, "mine|1"),
    "not where the user says so": ({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}, "None|0"),
    "nowhere to write": ({"XDG_CACHE_HOME": "../a file"}, "None|None"),
    "no home": ({"XDG_CACHE_HOME": "", "HOME": "~"}, "None|None"),
}
"""Changes of the environment, and the folder and the switch that the package then reads from it."""
EACH_IN_A_FORK = """
import json, os, sys
from fxtune.kernels import flash4
for folder, given in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.mkdir(folder)
        os.chdir(folder)
        os.environ.update(given)
        flash4.package(), flash4.package()
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, folder
"""


@pytest.mark.slow
def test_compiled_kernels_are_cached_in_a_private_folder(tmp_path):
    """A stand-in for the package reads the environment at its import, as the real one does. So each case has its own
    process, forked from one that has imported torch.
    """
    stand_in = tmp_path / "flash_attn" / "cute"
    stand_in.mkdir(parents=True)
    (tmp_path / "a file").touch()
    (stand_in / "__init__.py").write_text("from . import interface\n")
    (stand_in / "interface.py").write_text(
        "import os\nprint(*(os.environ.get(f'FLASH_ATTENTION_CUTE_DSL_CACHE_{end}') for end in ('DIR', 'ENABLED')), sep='|')\n"
    )
    root = Path(__file__).resolve().parents[2]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ATTENTION")}
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, json.dumps({name: given for name, (given, _) in CACHES.items()})],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "XDG_CACHE_HOME": "cache"},
    )
    assert done.returncode == 0, done.stderr
    expected = {name: told.format(machine=platform.machine()) for name, (_, told) in CACHES.items()}
    assert dict(zip(CACHES, done.stdout.splitlines(), strict=True)) == expected
    for name, told in expected.items():
        assert (tmp_path / name / told.partition("|")[0]).is_dir() == (not told.startswith("None")), name
    assert not list(tmp_path.rglob("tmp*")), "nothing of the trial is left"
