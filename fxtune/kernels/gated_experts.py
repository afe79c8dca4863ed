"""The gated MLPs of a mixture's experts and their adapters, as one operator with its own backward pass.

A token t that uses the experts e with the weights w gets the sum of w down_e(act(gate_e(x)) * up_e(x)) over its
experts. A token has a row for each of its experts. All rows are sorted by expert (grouped_matmul.Routing). For each
row the operator computes

    g = x GU_e^T + r1 B1_e^T   with r1 = x A1_e^T       h = act(gate of g) * (up of g)
    y = h D_e^T + r2 B2_e^T    with r2 = h A2_e^T       out[t] = sum of w y over the token's rows

If experts have biases, g and y contain them. Activation defines act, and the order of gate and up in g.

The products with GU and D take most of the time. The steps between them move as few bytes as possible:

- The activation's kernel adds r1 B1^T and a bias as it reads g, and also computes r2. Its backward kernel computes dr1
  and adds dr2 A2. The kernel that sums a token's rows adds the bias of y.
- r2 B2^T and dr1 A1 are as wide as y and dx. With weights that have space for adapters (with_space()) they are never
  made: [h, r2] is one tensor, and its product with [D, B2] is y. Without the space quack's GEMM adds r2 B2^T before it
  rounds, and torch's GEMM needs another pass to add it.
- On Hopper, the adapters' products with x and dy, and the gradients of A1 and B2, read the tokens' states in place
  (expert_adapters_triton.py). Only the products with GU and D need gathered rows.
- Neither y nor the gathered x are kept for the backward pass. The gradient of w is <dout[t], y>. It is computed as
  <dh, h>, with dh before its multiplication by w, plus <dout[t], bias>.
- No sum takes atomic additions, so each run has the same bits.
- Trained weights need two more products in the backward pass, for their gradients. The rows are gathered again.
- Frozen weights in 4 or 8 bits (`stored`) are dequantized for one product at a time, forward and again backward. So
  GU and D are never in 16 bits together, and the backward pass keeps only the codes.

On a GPU these steps are Triton kernels (gated_experts_triton.py) and grouped GEMMs; the functions of torch below are
their reference, and run elsewhere. Sums are float32; what is stored is rounded to the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxtune.kernels.expert_layer import Layer, register
from fxtune.kernels.grouped_matmul import outer, pick, product, segments
from fxtune.kernels.matmul import CAPABILITY, CUBLAS, CUTE
from fxtune.kernels.quantized import MXFP4, unpack
from fxtune.kernels.swiglu import SILU, Activation, act_and_slope, wide

MOST_RANKS = 128
"""The largest rank of Triton's products with adapters: larger tiles do not fit in Hopper's shared memory."""


class Adapter(NamedTuple):
    """The adapters of all experts on one tensor: A [experts, r, in] and B [experts, out, r]. B has the scaling."""

    a: Tensor
    b: Tensor


def gated_experts(
    hidden: Tensor,
    weights: Tensor,
    order: Tensor,
    back: Tensor,
    ends: Tensor,
    matrices: tuple[Tensor, Tensor] | tuple[Sequence[Tensor], Sequence[Tensor]],
    adapters: tuple[Adapter, Adapter],
    act: Activation = SILU,
    gemm: str = CUBLAS,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    stored: str = "",
    keep: bool = True,
    trained: bool = False,
) -> Tensor:
    """[tokens, d]: the weighted sum of the outputs of each token's experts.

    Args:
        hidden: [tokens, d]. weights: [tokens, k], float32 or hidden's dtype.
        order, back, ends: the attributes of a Routing of [tokens, k] experts, or of an OwnRouting.
        matrices: gate and up as one tensor [experts, 2 width, d], and down [experts, d, width]; of any strides. With
            `gemm=CUTE` each may be the result of with_space() for its adapter's rank: the first with space for rows,
            the second with space for columns. With `stored` each is a list of packed tensors.
        adapters: one for each of the two matrices, in hidden's dtype. A matrix without an adapter has one of rank 0.
        gemm: see grouped_matmul.product().
        biases: the two products' biases, [experts, 2 width] and [experts, d], frozen, in hidden's dtype; or no bias.
        stored: how the matrices are packed, see quantized.unpack(); empty: they are not packed.
        keep: keep g for the backward pass. Otherwise the backward pass computes it again.
        trained: whether the matrices get gradients. Packed ones cannot.
    """
    first, last = ([matrix] if isinstance(matrix, Tensor) else list(matrix) for matrix in matrices)
    tensors, options = (*adapters[0], *adapters[1], *biases), (*act, gemm, stored, keep, trained)
    return _operator(hidden, weights, order, back, ends, first, last, *tensors, *options)[0]


def _forward(layer: Layer) -> tuple[Tensor, ...]:
    ends, gemm, stored = layer.ends, layer.gemm, layer.stored
    a1, b1, a2, b2 = layer.a1, layer.b1, layer.a2, layer.b2
    g, r1 = _inner(layer, _matrices(layer.first, stored, a1, b1))
    last = _matrices(layer.last, stored, a2, b2, 2, gemm)
    h, r2 = activate(layer, g, r1, last.shape[2] > a2.shape[2])
    y, r2 = _adapted(h, r2, last, b2, ends, gemm)
    return combine(y, layer.back, layer.weights, bias=layer.bias2, ends=ends), g, r1, r2


def _backward(layer: Layer, dout: Tensor, g: Tensor, r1: Tensor, r2: Tensor) -> tuple[Any, ...]:
    weights, order, back, ends = layer.weights, layer.order, layer.back, layer.ends
    gemm, stored = layer.gemm, layer.stored
    a1, b1, a2, b2 = layer.a1, layer.b1, layer.a2, layer.b2
    w, token = layer.row_weights, layer.token
    first = None
    if not layer.keep:
        first = _matrices(layer.first, stored, a1, b1, 1, gemm)
        g, r1 = _inner(layer, first[:, : b1.shape[1]])
    # dout is not multiplied by w here. Later products apply w to narrower rows.
    dr2 = project(dout, token, b2, ends, gemm)
    dy = gather(dout, order, back)
    dh = product(dy, _matrices(layer.last, stored, a2, b2), ends, gemm=gemm)
    del dy
    first = _matrices(layer.first, stored, a1, b1, 1, gemm) if first is None else first
    beside = first.shape[1] > b1.shape[1]
    dg, dr1, dw, wh = activate_backward(layer, g, r1, dh, dr2, w, beside)
    del dh
    r2w = (r2 * w).to(r2.dtype) if layer.keep else product(wh, a2.mT, ends, gemm=gemm)
    db2 = outer_of(dout, token, r2w, ends, gemm)
    da2 = outer(dr2, wh, ends, gemm=gemm)
    db1 = outer(dg, r1, ends, gemm=gemm)
    dx, dr1 = _adapted(dg, dr1, first.mT, a1.mT, ends, gemm)
    trained = []
    if layer.trained:
        trained.append(outer(dg, gather(layer.hidden, order, back), ends, gemm=gemm))
        trained.append(outer(gather(dout, order, back), wh, ends, gemm=gemm))
    del dg, wh, first
    da1 = outer_of(layer.hidden, token, dr1, ends, gemm).mT.contiguous()
    dweights = pick(dw, back).view(weights.shape)
    if layer.bias2 is not None:
        dweights += (dout @ layer.bias2.t()).gather(1, _expert_of(back, ends).view(weights.shape))
    dweights = dweights.to(weights.dtype)
    return combine(dx, back, None, weights.shape[1]), dweights, da1, db1, da2, db2, trained


def _inner(layer: Layer, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """g without its adapter's product, and r1. `matrices`: GU [experts, 2 width, d]."""
    r1 = project(layer.hidden, layer.token, layer.a1.mT, layer.ends, layer.gemm)
    x = gather(layer.hidden, layer.order, layer.back)
    return product(x, matrices.mT, layer.ends, gemm=layer.gemm), r1


_operator = register("gated_experts", _forward, _backward)


def _matrices(
    tensors: Sequence[Tensor], stored: str, a: Tensor, b: Tensor, beside: int = 0, gemm: str = CUBLAS
) -> Tensor:
    """The matrices [experts, out, in] of one product. Its adapter is a [experts, r, in] and b [experts, out, r].
    `beside`: include space for r more rows (1) or columns (2), if the tensors have space or are unpacked to it."""
    rank = a.shape[1] if beside and gemm == CUTE else 0
    if not stored:
        return _with_its_space(tensors[0], rank, beside) if rank else tensors[0]
    sizes = [len(a), b.shape[1], a.shape[2]]
    if not rank or stored != MXFP4:
        matrices = a.new_empty(sizes)
        unpack(stored, tensors, matrices.flatten(0, 1))
        return matrices
    sizes[beside] += rank
    matrices = a.new_empty(sizes)
    unpack(stored, tensors, matrices[:, : b.shape[1], : a.shape[2]])
    return matrices


def with_space(matrices: Tensor, rank: int, dim: int) -> Tensor:
    """A copy of `matrices` [experts, out, in] in memory that has space for `rank` more rows (dim 1) or columns (dim 2)
    of each matrix. The strides keep their order. `rank` times the size of an element is a multiple of 16 bytes."""
    sizes = list(matrices.shape)
    sizes[dim] += rank
    across = matrices.stride(1) == 1
    made = matrices.new_empty(sizes[0], sizes[2], sizes[1]).mT if across else matrices.new_empty(sizes)
    return made.narrow(dim, 0, matrices.shape[dim]).copy_(matrices)


def _with_its_space(matrices: Tensor, rank: int, dim: int) -> Tensor:
    """`matrices` together with their space, if with_space() made them for this rank. Otherwise `matrices` alone."""
    sizes, strides = list(matrices.shape), matrices.stride()
    room = (strides[3 - dim] if strides[dim] == 1 else strides[0] // strides[dim]) - sizes[dim]
    if room != rank:
        return matrices
    sizes[dim] += rank
    return matrices.as_strided(sizes, strides)


def _adapted(
    x: Tensor, narrow: Tensor, matrices: Tensor, factor: Tensor, ends: Tensor, gemm: str
) -> tuple[Tensor, Tensor]:
    """[rows, out]: each row of `x` [rows, in] times the transpose of its expert's matrix [out, in], plus its row of
    `narrow` [rows, r] times the transpose of the expert's `factor` [out, r]. Also returns `narrow`, contiguous.

    If `matrices` has space for `factor` beside its columns, x and `narrow` are parts of one tensor.
    """
    width = x.shape[1]
    if matrices.shape[2] > width:
        # .data hides the write from autograd. Only the call that has just written the space reads it.
        matrices.data[:, :, width:] = factor
        both = x.as_strided((len(x), matrices.shape[2]), x.stride())
        return product(both, matrices.mT, ends, gemm=gemm), narrow.contiguous()
    plus = product(narrow, factor.mT, ends, gemm=gemm) if narrow.shape[1] else None
    return product(x, matrices.mT, ends, plus, gemm), narrow


def _pair(like: Tensor, wide: int, narrow: int, beside: bool) -> tuple[Tensor, Tensor]:
    """Two uninitialized tensors [rows, wide] and [rows, narrow]. `beside`: they are parts of one tensor."""
    if not beside:
        return like.new_empty(len(like), wide), like.new_empty(len(like), narrow)
    both = like.new_empty(len(like), wide + narrow)
    return both[:, :wide], both[:, wide:]


def gather(states: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """[rows, d]: the state of each row's token, from `states` [tokens, d]. `order`, `back`: see Routing."""
    if states.is_cuda:
        from fxtune.kernels.gated_experts_triton import scatter

        return scatter(states, back, states.new_empty(len(order), states.shape[1]))
    return states.index_select(0, order // (len(back) // len(states)))


def project(states: Tensor, token: Tensor, factor: Tensor, ends: Tensor, gemm: str = CUBLAS) -> Tensor:
    """[rows, r]: each row's state from `states` [tokens, d] times the expert's `factor` [experts, d, r]."""
    if not factor.shape[2]:
        return states.new_empty(len(token), 0)
    if _reads_in_place(states, factor.shape[2]):
        from fxtune.kernels import expert_adapters_triton

        return expert_adapters_triton.project(states, token, factor, ends)
    return product(states.index_select(0, token), factor, ends, gemm=gemm)


def outer_of(states: Tensor, token: Tensor | None, narrow: Tensor, ends: Tensor, gemm: str = CUBLAS) -> Tensor:
    """[experts, d, r]: the sum of x y^T over each expert's rows. y [r] is a row of `narrow` [rows, r]. x [d] is the
    state of the row's token, or, without `token`, a row of `states`."""
    if not narrow.shape[1]:
        return states.new_empty(len(ends), states.shape[1], 0)
    if _reads_in_place(states, narrow.shape[1]):
        from fxtune.kernels import expert_adapters_triton

        return expert_adapters_triton.outer(states, token, narrow, ends)
    return outer(states if token is None else states.index_select(0, token), narrow, ends, gemm)


def _reads_in_place(states: Tensor, ranks: int) -> bool:
    """Whether a Triton kernel multiplies states of tokens by matrices of this rank."""
    return (
        states.is_cuda
        and states.dtype.itemsize == 2
        and ranks <= MOST_RANKS
        and torch.cuda.get_device_capability(states.device) == CAPABILITY
    )


def _expert_of(back: Tensor, ends: Tensor) -> Tensor:
    """For each entry of `back` the expert of that row."""
    return torch.searchsorted(ends, back.to(ends.dtype), right=True)


def combine(
    rows: Tensor,
    back: Tensor,
    weights: Tensor | None,
    k: int = 1,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """[tokens, d]: the sum of each token's rows, weighted by `weights` [tokens, k] if given. Before that, the `bias`
    [experts, d] of a row's expert, and `plus` [rows, d], are added to the rows, without rounding. An entry -1 of
    `back` has no row. With a bias, the weight of such an entry must be 0."""
    k = k if weights is None else weights.shape[1]
    expert = None if bias is None or ends is None else _expert_of(back, ends)
    if rows.is_cuda:
        from fxtune.kernels.gated_experts_triton import add_up

        return add_up(rows, back, weights, k, bias, expert, plus)
    pairs = pick(wide(rows) if plus is None else wide(rows) + wide(plus), back)
    pairs = (pairs if bias is None else pairs + bias[expert]).unflatten(0, (-1, k))
    return (pairs if weights is None else pairs * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def activate(layer: Layer, g: Tensor, r1: Tensor, beside: bool = False) -> tuple[Tensor, Tensor]:
    """h [rows, width] and r2 = h A2^T [rows, r]. `g` [rows, 2 width] does not contain r1 B1^T and the bias yet.
    `beside`: h and r2 are parts of one tensor."""
    a2 = layer.a2
    h, r2 = _pair(g, a2.shape[2], a2.shape[1], beside)
    if g.is_cuda and g.dtype is not torch.float64:
        from fxtune.kernels.gated_experts_triton import forward

        forward(layer, g, r1, h, r2)
        return h, r2
    for expert, rows in segments(layer.ends):
        h[rows] = _gated(_whole(layer, g[rows], r1[rows], expert), layer.activation)[0].to(h.dtype)
        r2[rows] = h[rows] @ a2[expert].t()
    return h, r2


def activate_backward(
    layer: Layer, g: Tensor, r1: Tensor, dh: Tensor, dr2: Tensor, w: Tensor, beside: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dg [rows, 2 width], dr1 = dg B1 [rows, r], dw [rows], and w h. dw is the gradient of the rows' weights `w`
    [rows, 1] without the part of a bias. `beside`: dg and dr1 are parts of one tensor.

    `dh` [rows, width] does not contain dr2 A2 yet. `dh` and `dr2` are not multiplied by w.
    """
    dg, dr1 = _pair(g, g.shape[1], r1.shape[1], beside)
    if g.is_cuda and g.dtype is not torch.float64:
        from fxtune.kernels.gated_experts_triton import backward

        return dg, dr1, *backward(layer, g, r1, dh, dr2, w, dg, dr1)[:2]
    wh = torch.empty_like(dh)
    dw = w.new_empty(len(g), dtype=wide(w).dtype)
    for expert, rows in segments(layer.ends):
        full_dh = wide(dh[rows]).addmm(wide(dr2[rows]), wide(layer.a2[expert]))
        h, gate_slope, up_slope = _gated(_whole(layer, g[rows], r1[rows], expert), layer.activation)
        dw[rows] = (full_dh * h).sum(1)
        full_dh *= w[rows]
        gate, up = _halves(dg[rows], layer.activation)
        gate.copy_(full_dh * gate_slope)
        up.copy_(full_dh * up_slope)
        dr1[rows] = dg[rows] @ layer.b1[expert]
        wh[rows] = (h * w[rows]).to(wh.dtype)
    return dg, dr1, dw, wh


def _whole(layer: Layer, g: Tensor, r1: Tensor, expert: int) -> Tensor:
    """g of one expert's rows, plus r1 B1^T and the bias."""
    inner = wide(g).addmm(wide(r1), wide(layer.b1[expert]).t())
    return inner if layer.bias1 is None else inner + layer.bias1[expert]


def _halves(inner: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """gate and up as views of `inner`, which is g or its gradient."""
    if act.interleaved:
        return inner[..., ::2], inner[..., 1::2]
    gate, up = inner.chunk(2, -1)
    return gate, up


def act_of(inner: Tensor, act: Activation) -> Tensor:
    """h [rows, width] of g [rows, 2 width], in plain torch."""
    return _gated(inner, act)[0]


def _gated(inner: Tensor, act: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """h and its derivatives with respect to gate and up."""
    gate, up = _halves(inner, act)
    within = torch.ones_like(gate), torch.ones_like(up)
    if act.limit:
        within = (gate <= act.limit).to(gate.dtype), (up.abs() <= act.limit).to(up.dtype)
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    value, slope = act_and_slope(act.name, act.alpha * gate)
    value, up = value / act.alpha, up + act.shift
    return value * up, slope * up * within[0], value * within[1]
