"""Divergences between a teacher's and a student's distributions over the vocabulary, computed chunk by chunk.

Two sets of logits of 8k tokens over a vocabulary of 128k are 8.6 GB in float32, and autograd would keep several copies
of them. But the gradient of each divergence with respect to the student's logits follows from both distributions:

    P, Q: the teacher's and the student's distributions, softmax(logits / temperature);  M = beta P + (1 - beta) Q
    forward KL      KL(P | Q)                                gradient (Q - P) / temperature
    reverse KL      KL(Q | P)                                gradient Q (log Q/P - KL(Q | P)) / temperature
    Jensen-Shannon  beta KL(P | M) + (1 - beta) KL(Q | M)    gradient (1 - beta) Q (log Q/M - KL(Q | M)) / temperature

So `head_sums` goes from a chunk of hidden states to gradients in the forward pass, as linear_cross_entropy.py does,
and the next chunk takes the memory. Statistics and gradients are in float32, because in bfloat16 rounding makes
divergences negative (ms-swift#10156).

The Jensen-Shannon divergence is GKD's (arXiv:2306.13649): with beta near 0 it is beta times the forward KL,
with beta near 1 it is 1 - beta times the reverse KL, and at both ends it is 0. TRL gives its ends another meaning: 0
is the forward KL and 1 the reverse KL. Here the ends are refused, and both KLs have names. Hinton et al.
(arXiv:1503.02531) multiply the divergence by temperature^2; this is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxtune.kernels.linear_cross_entropy import IGNORED, chunk_sizes, default_chunk_rows, scaled_gradient

SHARE_OF_BUFFER = 4
"""A chunk of float32 logits takes this fraction of linear_cross_entropy.BUFFER: some eight tensors of this size exist
at once."""

ChunkSums = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]
"""A function (logits [rows, vocabulary] in float32, their rows among all rows, whether a gradient is needed) -> (sums
over these rows, float32 [n]; the gradient of the first sum with respect to the logits, or None)."""


class Measure(str, Enum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jensen_shannon = "jensen_shannon"


@dataclass(frozen=True)
class TopTargets:
    """The teacher's distribution with all but its likeliest tokens in one outcome, the tail."""

    ids: Tensor
    """int [rows, k]: the likeliest tokens."""
    log_probs: Tensor
    """[rows, k]: their log-probabilities."""
    tail: Tensor
    """float32 [rows]: the logarithm of the probability of all other tokens; -inf if there are none."""

    def __getitem__(self, rows: slice) -> TopTargets:
        return TopTargets(self.ids[rows], self.log_probs[rows], self.tail[rows])


@dataclass(frozen=True)
class Divergence:
    measure: Measure = Measure.forward_kl
    beta: float = 0.5
    temperature: float = 1.0
    text_weight: float = 0.0
    """The weight of the labels' cross-entropy, at temperature 1. The divergence has the weight 1 - text_weight."""

    def sums(
        self, student: Tensor, teacher: Tensor | TopTargets, labels: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sums over rows of the loss, of KL(teacher | student) and of the cross-entropy: float32 [3]; and the
        gradient of the first sum with respect to the student's logits, if `gradient` asks for it. Otherwise autograd
        can differentiate the sums.

        `student`: float32 [rows, vocabulary]; `teacher`: logits [rows, its vocabulary], or the likeliest tokens;
        `labels`: int64 [rows]. A row with the label IGNORED counts nothing. If the vocabularies differ in size, the
        divergence is of the distributions over the ids that both have.
        """
        counted = labels != IGNORED
        common = student.shape[1] if isinstance(teacher, TopTargets) else min(student.shape[1], teacher.shape[1])
        log_q = (student[:, :common] / self.temperature).log_softmax(-1)
        if isinstance(teacher, TopTargets):
            losses, slope = _to_top(teacher, log_q, gradient)
            kl = losses
        else:
            log_p = (teacher[:, :common].float() / self.temperature).log_softmax(-1)
            losses, kl, slope = self._between(log_p, log_q, gradient)
        whole = log_q
        if self.temperature != 1 or common < student.shape[1]:
            whole = student.log_softmax(-1)
        targets = labels.where(counted, 0)[:, None]
        text = -whole.gather(1, targets).squeeze(1)
        # The divergences are at least 0, and rounding may leave a little less.
        losses, kl = losses.clamp(min=0), kl.clamp(min=0)
        weight = self.text_weight
        mixed = (1 - weight) * losses + weight * text
        found = torch.stack([mixed, kl, text]).where(counted, 0.0).sum(1)
        if slope is None:
            return found, None
        slope *= (1 - weight) / self.temperature
        if weight:
            text_slope = whole.exp_() if whole is not log_q else whole.exp()
            text_slope.scatter_add_(1, targets, text_slope.new_full(targets.shape, -1.0))
            text_slope *= weight
            text_slope[:, :common] += slope
            slope = text_slope
        elif common < student.shape[1]:
            slope = torch.nn.functional.pad(slope, (0, student.shape[1] - common))
        return found, slope.masked_fill_(~counted[:, None], 0.0)

    def _between(self, log_p: Tensor, log_q: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the divergence [rows]; KL(P | Q) [rows]; the divergence's gradient with respect to logits / temperature)"""
        p = log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1)
        if self.measure is Measure.forward_kl:
            return kl, kl, log_q.exp().sub_(p) if gradient else None
        q, share, middle = log_q.exp(), 1.0, log_p
        if self.measure is Measure.jensen_shannon:
            share = 1 - self.beta
            middle = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log(share))
        ratio = log_q - middle
        to_middle = (q * ratio).sum(-1)
        losses = to_middle
        if self.measure is Measure.jensen_shannon:
            losses = self.beta * (p * (log_p - middle)).sum(-1) + share * to_middle
        return losses, kl, ratio.sub_(to_middle[:, None]).mul_(q).mul_(share) if gradient else None


def _to_top(teacher: TopTargets, log_q: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """(KL(P | Q) [rows] over the teacher's likeliest tokens and the tail; its gradient with respect to
    logits / temperature). The student's tail is one minus the probabilities that it gives to these tokens."""
    ids, log_p, log_tail = teacher.ids.long(), teacher.log_probs.float(), teacher.tail
    p, tail = log_p.exp(), log_tail.exp()
    chosen = log_q.gather(1, ids)
    rest = log_q.exp().scatter(1, ids, 0.0)
    rest_sum = rest.sum(-1).clamp(min=torch.finfo(rest.dtype).tiny)
    has_tail = tail > 0
    in_tail = torch.where(has_tail, tail * (log_tail - rest_sum.log()), 0.0)
    losses = (p * (log_p - chosen)).sum(-1) + in_tail
    if not gradient:
        return losses, None
    # The gradient of -log(rest_sum) is Q - rest / rest_sum, and of -log Q(v) it is Q - onehot(v).
    total = p.sum(-1) + tail
    slope = rest.mul_((total - tail / rest_sum)[:, None])
    return losses, slope.scatter_(1, ids, chosen.exp() * total[:, None] - p)


def rows_of_chunk(vocabulary: int) -> int:
    return max(default_chunk_rows(vocabulary, torch.float32) // SHARE_OF_BUFFER, 128)


def head_sums(
    head: Callable[[Tensor], Tensor], hidden: Tensor, weights: Sequence[Tensor], chunk_sums: ChunkSums, chunk_rows: int
) -> Tensor:
    """The sums of `chunk_sums` over all rows: float32 [n]. Only the first sum has a gradient.

    `head`: makes logits [rows, vocabulary] from hidden states [rows, d]; `hidden`: [all rows, d]; `weights`: the
    tensors that the head multiplies with and that may be trained; `chunk_rows`: the most rows of a chunk. The call
    never waits for the device.
    """
    inputs = head, chunk_sums, chunk_rows, hidden
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *weights)):
        loss, metrics = _HeadSums.apply(*inputs, *weights)
        return torch.cat([loss[None], metrics])
    return _sums_and_gradients(*inputs, (), (False,))[0]


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        head, chunk_sums, chunk_rows, hidden, *weights = inputs
        found, gradients = _sums_and_gradients(head, chunk_sums, chunk_rows, hidden, weights, ctx.needs_input_grad[3:])
        ctx.save_for_backward(*gradients)
        metrics = found[1:].clone()
        ctx.mark_non_differentiable(metrics)
        return found[0].clone(), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = (None if gradient is None else scaled_gradient(gradient, factor) for gradient in ctx.saved_tensors)
        return None, None, None, *saved


def _sums_and_gradients(
    head: Callable[[Tensor], Tensor],
    chunk_sums: ChunkSums,
    chunk_rows: int,
    hidden: Tensor,
    weights: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """(the sums [n]; the gradients of the first sum with respect to `hidden` and each of `weights`, None where `needs`
    is false). The head's own backward pass turns the gradient of a chunk's logits into these gradients."""
    tensors, total = [hidden, *weights], hidden.new_zeros((), dtype=torch.float32)
    gradients = [
        torch.zeros_like(tensor, dtype=hidden.dtype if at == 0 else torch.float32) if needed else None
        for at, (tensor, needed) in enumerate(zip(tensors, needs, strict=False))
    ]
    end = 0
    for size in chunk_sizes(len(hidden), chunk_rows) or [0]:
        chunk, end = slice(end, end + size), end + size
        with torch.set_grad_enabled(any(needs)):
            part = hidden[chunk].detach().requires_grad_(needs[0])
            logits = head(part)
        found, slope = chunk_sums(logits.detach().float(), chunk, any(needs))
        total = total + found
        if slope is None:
            continue
        wanted = [at for at, gradient in enumerate(gradients) if gradient is not None]
        slopes = torch.autograd.grad(
            logits, [part if at == 0 else tensors[at] for at in wanted], slope.to(logits.dtype)
        )
        for at, found_slope in zip(wanted, slopes, strict=True):
            gradient: Any = gradients[at]
            if at == 0:
                gradient[chunk] = found_slope
            else:
                gradient += found_slope
    return total, [None if each is None else each.to(tensors[at].dtype) for at, each in enumerate(gradients)]
