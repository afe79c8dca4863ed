"""Divergences over a vocabulary, chunk by chunk, compared with torch's own functions and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxtune.kernels.divergence import Divergence, Measure, TopTargets, head_sums
from fxtune.kernels.linear_cross_entropy import IGNORED

ROWS, WIDTH, VOCABULARY = 40, 16, 50


def by_torch(divergence: Divergence, student, teacher, labels):
    """Loss, KL(teacher | student) and cross-entropy, summed over the rows with a label."""
    common = min(student.shape[1], teacher.shape[1])
    counted = labels != IGNORED
    q = (student[counted, :common] / divergence.temperature).log_softmax(-1)
    p = (teacher[counted, :common] / divergence.temperature).log_softmax(-1)

    def kl(one, other):
        return F.kl_div(other, one, reduction="sum", log_target=True)

    middle = (divergence.beta * p.exp() + (1 - divergence.beta) * q.exp()).log()
    loss = {
        Measure.forward_kl: lambda: kl(p, q),
        Measure.reverse_kl: lambda: kl(q, p),
        Measure.jensen_shannon: lambda: divergence.beta * kl(p, middle) + (1 - divergence.beta) * kl(q, middle),
    }[divergence.measure]()
    text = F.cross_entropy(student, labels, reduction="sum", ignore_index=IGNORED)
    return (1 - divergence.text_weight) * loss + divergence.text_weight * text, kl(p, q), text


@pytest.fixture
def given():
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    labels = torch.randint(VOCABULARY - 5, (ROWS,))
    labels[::7] = IGNORED
    return head, hidden, labels


@pytest.mark.parametrize("measure", Measure)
@pytest.mark.parametrize(("temperature", "text_weight", "teacher_rows"), [(1, 0, 50), (2, 0.3, 45), (0.5, 0, 60)])
def test_sums_and_gradients_are_those_of_torch(given, measure, temperature, text_weight, teacher_rows):
    head, hidden, labels = given
    teacher = 2 * torch.randn(ROWS, teacher_rows)
    divergence = Divergence(measure, 0.3, temperature, text_weight)

    def chunk_sums(logits, rows, gradient):
        return divergence.sums(logits, teacher[rows], labels[rows], gradient)

    trained = [hidden, *head.parameters()]
    found = head_sums(head, hidden, list(head.parameters()), chunk_sums, 16)
    gradients = torch.autograd.grad(found[0] / 7, trained)
    wanted = by_torch(divergence, head(hidden), teacher, labels)
    assert torch.allclose(found, torch.stack(wanted), rtol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(wanted[0] / 7, trained), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    with torch.no_grad():
        assert torch.allclose(head_sums(head, hidden, [], chunk_sums, 7), found, rtol=1e-6)


def test_frozen_head_gets_no_gradient(given):
    head, hidden, labels = given
    head.requires_grad_(False)
    divergence, teacher = Divergence(), torch.randn(ROWS, VOCABULARY)
    found = head_sums(
        head, hidden, [*head.parameters()], lambda z, at, need: divergence.sums(z, teacher[at], labels[at], need), 16
    )
    found[0].backward()
    assert head.weight.grad is None
    (wanted,) = torch.autograd.grad(by_torch(divergence, head(hidden), teacher, labels)[0], [hidden])
    assert (hidden.grad - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("measure", Measure)
def test_no_divergence_is_negative(measure):
    """In bfloat16 the divergence of two nearly equal distributions may come out negative (ms-swift#10156)."""
    torch.manual_seed(0)
    logits = (20 * torch.randn(8, 4096)).bfloat16()
    near = (logits.float() * (1 + 1e-3 * torch.randn(8, 4096))).bfloat16()
    for student in (logits, near):
        for row in range(8):
            rows = student[row : row + 1].float(), logits[row : row + 1], torch.zeros(1, dtype=torch.long)
            loss, kl, _ = Divergence(measure, 0.9).sums(*rows, gradient=False)[0]
            assert loss >= 0
            assert kl >= 0
            assert student is near or loss <= 1e-5


def test_jensen_shannon_goes_to_zero_at_both_ends():
    """Its ends are not the two KLs, as in TRL. Divided by beta or 1 - beta it goes to them."""
    torch.manual_seed(0)
    rows = torch.randn(4, 30), torch.randn(4, 30), torch.zeros(4, dtype=torch.long)
    for beta, share, measure in ((1e-3, 1e-3, Measure.forward_kl), (1 - 1e-3, 1e-3, Measure.reverse_kl)):
        loss = Divergence(Measure.jensen_shannon, beta).sums(*rows, gradient=False)[0][0]
        kl = Divergence(measure).sums(*rows, gradient=False)[0][0]
        assert loss.item() == pytest.approx(share * kl.item(), rel=1e-2)


def top(teacher, k: int) -> TopTargets:
    log_probs = teacher.log_softmax(-1)
    found = log_probs.topk(k)
    rest = log_probs.scatter(1, found.indices, -math.inf).logsumexp(-1)
    return TopTargets(found.indices.int(), found.values, rest)


@pytest.mark.parametrize("k", [1, 5, VOCABULARY - 1])
@pytest.mark.parametrize("text_weight", [0, 0.4])
def test_likeliest_tokens_and_a_tail(given, k, text_weight):
    """All other tokens are one more outcome, for the teacher and the student. Nothing is renormalised."""
    head, hidden, labels = given
    targets = top(3 * torch.randn(ROWS, VOCABULARY), k)
    divergence, counted = Divergence(text_weight=text_weight), labels != IGNORED
    logits = head(hidden).detach().requires_grad_()
    found, slope = divergence.sums(logits.detach(), targets, labels, True)
    q, ids = logits.log_softmax(-1), targets.ids.long()
    q_tail = q.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    student = torch.cat([q.gather(1, ids), q_tail], 1)[counted]
    teacher = torch.cat([targets.log_probs, targets.tail[:, None]], 1)[counted]
    kl = F.kl_div(student, teacher, reduction="sum", log_target=True)
    wanted = (1 - text_weight) * kl + text_weight * F.cross_entropy(logits, labels, reduction="sum")
    assert found[:2].tolist() == pytest.approx([wanted.item(), kl.item()], rel=1e-5)
    (gradient,) = torch.autograd.grad(wanted, [logits])
    assert (slope - gradient).norm() <= 1e-5 * gradient.norm()


def test_all_tokens_stored_are_the_live_teacher(given):
    head, hidden, labels = given
    teacher, logits = torch.randn(ROWS, VOCABULARY), head(hidden).detach()
    live, live_slope = Divergence().sums(logits, teacher, labels, True)
    stored, slope = Divergence().sums(logits, top(teacher, VOCABULARY), labels, True)
    assert torch.allclose(live, stored, rtol=1e-6)
    assert (live_slope - slope).norm() <= 1e-6 * live_slope.norm()
