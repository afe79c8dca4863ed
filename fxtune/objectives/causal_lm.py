"""The loss of a causal language model: cross-entropy summed over supervised tokens, and computed for these alone.

Summed, not averaged: the trainer divides once, by the supervised tokens of the whole optimizer step. A mean of means would
weight a token by how few neighbours its micro-batch had (transformers#34191), and the split into micro-batches would show.

Only supervised positions need logits, and the head is the largest matmul of the model (128k words: 1/15 of an 8B model's work,
and 16 bits a word a token of memory). So the decoder runs on all tokens, its hidden states at `Batch.supervised_at` are
gathered, and the head sees these: the same numbers, less work. How many there are is known on the host, so nothing waits.

What a family does to its logits after the head (a soft cap in Gemma 2, a scale in Granite and Cohere) is named in LOGITS and
done here. That this is all is not assumed: on construction the logits of a small row are compared with those that the model
itself gives. Where they differ, the model's own forward is used, with all its logits, and the evidence says so.

`liger.fused_linear_cross_entropy` holds no logits at all (kernels/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.loader import Loader
from fxtune.kernels.fp8_ends import Fp8Head
from fxtune.kernels.linear_cross_entropy import bent, linear_cross_entropy, row_losses, rows_at_once
from fxtune.kernels.matmul import CUBLAS
from fxtune.models.structure import backbone, observed
from fxtune.system.oom import out_of_memory_reason
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.base import Evidence, Switch
from fxtune.techniques.compile.cuda_graphs import Recorder
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.precision import LossScale, Precision

LOGITS = {
    "logits_scaling": lambda value: 1.0 / value,  # Granite
    "logit_scale": lambda value: value,  # Cohere
    "lm_head_multiplier": lambda value: value,
}  # Falcon-H1
"""Options of Hugging Face configs that scale the logits, and the factor that each value means."""
SAME = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""How far logits may be from the model's own, relative to their norm, by the dtype of the head's output."""
TF32 = 2e-3


class Loss:
    """The loss of one model. Call it where autocast is as it shall be.

    Raises nothing: `evidence` says what was seen when it was made, and acted=False where the fused loss was asked for and
    cannot be had.
    """

    def __init__(self, model: nn.Module, liger: Liger | None = None) -> None:
        self.model = model
        asked = liger is not None and liger.enabled
        self.fused = asked and liger.fused_linear_cross_entropy is Switch.on  # type: ignore[union-attr]
        self.chunk_rows = liger.chunk_rows if asked else None  # type: ignore[union-attr]
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        factors = [float(meaning(value)) for name, meaning in LOGITS.items() if (value := getattr(config, name, None))]
        self.scale = factors[0] if factors else 1.0
        self.cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.by: str = getattr(model, "products_by", CUBLAS)  # techniques.lora.matmul
        self.whole = False
        """Whether the model's own forward gives the logits, all of them."""
        self.evidence = [self._compare()]

    def sum(self, batch: Batch) -> torch.Tensor:
        """Loss of one micro-batch in nats, summed over its supervised tokens; a float32 scalar, 0 where there are none."""
        if self.whole:
            return F.cross_entropy(self._whole_logits(batch), batch.labels, reduction="sum")
        hidden = self._hidden(batch)
        if not self.fused:
            return F.cross_entropy(self._logits(hidden), batch.labels, reduction="sum")
        if (linear := _linear(self.head)) is not None:
            return linear_cross_entropy(
                hidden,
                linear.weight,
                batch.labels,
                linear.bias,
                scale=self.scale,
                cap=self.cap,
                chunk_rows=self.chunk_rows,
                fp8_scales=_scales(linear),
                by=self.by,
            )
        # A head with an adapter or with packed weights: its own forward, again in the backward pass, so no logits are kept.
        total = torch.zeros((), device=hidden.device)
        # The state of random numbers is read for dropout alone, for it cannot be while a pass is recorded (kernels/recorded.py).
        random = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.head.modules())
        for rows, labels in zip(hidden.split(self._chunk()), batch.labels.split(self._chunk()), strict=True):
            total = total + checkpoint(self._piece, rows, labels, use_reentrant=False, preserve_rng_state=random)
        return total

    @torch.no_grad()
    def tokens(self, batch: Batch) -> torch.Tensor:
        """Loss of each token in nats, [rows, length] in float32; 0 where the position is not supervised. No gradient."""
        if self.whole:
            losses = F.cross_entropy(self._whole_logits(batch), batch.labels, reduction="none")
        else:
            losses = self._row_losses(self._hidden(batch), batch.labels)
        found = losses.new_zeros(batch.targets.numel())
        return found.index_copy_(0, batch.supervised_at, losses).view_as(batch.targets)

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()  # type: ignore[operator]

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """[supervised, d]: the last hidden states at the positions that have a target."""
        states = backbone(self.model)(
            **model_inputs(self.model, batch.input_ids, batch.position_ids, batch.cu_seqlens)
        )[0]
        selected: torch.Tensor = _Rows.apply(states.flatten(0, 1), batch.supervised_at)
        return selected

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return bent(self.head(hidden), self.scale, self.cap).float()

    def _piece(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._logits(hidden), labels, reduction="sum")

    def _whole_logits(self, batch: Batch) -> torch.Tensor:
        logits = self.model(**model_inputs(self.model, batch.input_ids, batch.position_ids, batch.cu_seqlens)).logits
        return logits.flatten(0, 1).index_select(0, batch.supervised_at).float()

    def _row_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        linear = _linear(self.head)
        if self.fused and linear is not None:
            return row_losses(
                hidden,
                linear.weight,
                labels,
                linear.bias,
                scale=self.scale,
                cap=self.cap,
                chunk_rows=self.chunk_rows,
                fp8_scales=_scales(linear),
                by=self.by,
            )
        pieces = zip(hidden.split(self._chunk()), labels.split(self._chunk()), strict=True)
        return torch.cat([F.cross_entropy(self._logits(rows), wanted, reduction="none") for rows, wanted in pieces])

    def _chunk(self) -> int:
        return self.chunk_rows or rows_at_once(self.model.config.get_text_config().vocab_size, torch.float32)  # type: ignore

    def _compare(self) -> Evidence:
        """Our logits and losses of a small row against those of the model's own forward; decides `whole`."""
        device = next(self.model.parameters()).device
        ids = (torch.arange(24, device=device) * 7919 + 3) % self.model.config.get_text_config().vocab_size  # type: ignore
        starts = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
        given = model_inputs(self.model, ids[None], torch.arange(len(ids), device=device)[None], starts)
        labels = ids.roll(-1)
        with observed(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            own = self.model(**given).logits.flatten(0, 1)
            wanted = F.cross_entropy(own.float(), labels, reduction="none")
            limit = TF32 if own.is_cuda and own.dtype is torch.float32 else SAME[own.dtype]
            try:
                hidden = backbone(self.model)(**given)[0].flatten(0, 1)
                apart = [_apart(self._logits(hidden), own.float()), _apart(self._row_losses(hidden, labels), wanted)]
            except (
                AttributeError,
                RuntimeError,
                TypeError,
            ) as problem:  # a model of another make: its parts do not fit
                if out_of_memory_reason(problem):
                    raise
                apart, why = [float("inf")], f"its decoder and head do not run one after the other ({problem})"
            else:
                why = f"its logits are not those of its head ({apart[0]:.1e} apart)"
        self.whole = not max(apart) <= limit
        asked = "cross-entropy of supervised rows only, " + ("fused with the head" if self.fused else "plain")
        if self.whole:
            return Evidence(
                "loss", asked, f"{type(self.model).__name__}: {why}, so all its logits are computed", not self.fused
            )
        how = f"; {self._how()}" if self.fused else ""
        return Evidence(
            "loss", asked, f"a small row's logits and losses within {max(apart):.1e} of the model's own{how}", True
        )

    def _how(self) -> str:
        linear = _linear(self.head)
        if linear is None:
            return (
                f"{self._chunk():,} rows at once, the head ({type(self.head).__name__}) run again in the backward pass"
            )
        dtype = linear.weight.dtype if _scales(linear) is None else torch.bfloat16
        rows = self.chunk_rows or rows_at_once(linear.weight.shape[0], dtype)
        trained = "the head is trained" if linear.weight.requires_grad else "the head is frozen, so it has no gradient"
        return f"{rows:,} rows at once, {trained}"


class _Rows(torch.autograd.Function):
    """states[at] for rows that are all different: their gradient is copied to where they were, not added up there."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(at)
        ctx.rows = len(states)
        return states.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (at,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.rows, *gradient.shape[1:]).index_copy_(0, at, gradient), None


def backward(
    loss: Loss,
    batches: Iterable[Batch],
    supervised: int,
    precision: Precision,
    scale: LossScale,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """Forward and backward of an optimizer step: the gradients, times `scale`, are left in the parameters.

    `supervised`: targets of all the step's micro-batches together. Returns the mean loss over them, a scalar on the device.
    `recorder`: of one_pass(), to run it from recordings.
    Training and `fxtune verify` share this, so what the one proves is what the other does.
    """
    total: torch.Tensor | None = None
    for batch in batches:
        part = one_pass(loss, precision, scale, batch, supervised) if recorder is None else recorder(batch, supervised)
        total = part if total is None else total + part
    assert total is not None, "a step has a micro-batch"
    return total


def one_pass(
    loss: Loss, precision: Precision, scale: LossScale, batch: Batch, supervised: torch.Tensor | int
) -> torch.Tensor:
    """Forward and backward of a micro-batch: its part of the mean over `supervised` targets, and of the gradients."""
    with precision.context(batch.input_ids.device):
        part = loss.sum(batch) / supervised
    scale.scaled(part).backward()
    return part.detach()


@torch.no_grad()
def mean_loss(loss: Loss, loader: Loader, precision: Precision) -> float:
    """Loss in nats a supervised token over the loader's whole plan, without dropout. The model's mode is left as it was."""
    model, device = loss.model, loader.device
    training = model.training
    total = torch.zeros((), dtype=torch.float64, device=device)
    try:
        model.eval()
        for step in loader.steps():
            for batch in step.micro_batches:
                with precision.context(device):
                    total += loss.sum(batch)
    finally:
        model.train(training)
    return total.item() / sum(loader.plan.supervised(index) for index in range(loader.plan.steps))


@torch.no_grad()
def is_finite(loss: Loss, batch: Batch, precision: Precision) -> bool:
    """Whether the model gives a finite loss on `batch`, without dropout. Waits for the device."""
    with observed(loss.model), torch.compiler.set_stance("force_eager"), precision.context(batch.input_ids.device):
        return bool(loss.sum(batch).isfinite().item())


def _linear(head: Any) -> nn.Linear | None:
    """The linear that the head is, plain or in fp8, or that an adapter trains in its place; None where it is anything else."""
    if hasattr(head, "modules_to_save"):  # peft's ModulesToSaveWrapper
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if isinstance(head, Fp8Head):
        return head
    plain = type(head) is nn.Linear and type(head.weight) in (torch.Tensor, nn.Parameter)
    return head if plain and head.weight.is_floating_point() else None


def _scales(linear: nn.Linear) -> torch.Tensor | None:
    return linear.scales if isinstance(linear, Fp8Head) else None


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()
