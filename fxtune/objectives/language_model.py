"""The model's interface for objectives: losses and log-probabilities of supervised tokens only.

The head is the largest matmul of a model. With a vocabulary of 128k it does 1/15 of an 8B model's work, and its logits
take 256 KB a token in bfloat16. So the head runs on supervised tokens only: the decoder computes all tokens, and its
hidden states at `Batch.supervised_at` are gathered for the head. This gives the same numbers with less work, and the
host does not wait for the device. A batch without images skips the vision encoder.

Some families change their logits after the head (a soft cap in Gemma 2, a scale in Granite and Cohere), and
LOGIT_FACTORS may lack a family. So the constructor compares the logits of a small row with the model's own forward
pass. If they differ, the model's own forward pass computes the logits, and the evidence says so.

With Liger's `fused_linear_cross_entropy` the logits are never stored as a whole (kernels/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxtune.data.batches.batch import Batch
from fxtune.kernels.divergence import ChunkSums, head_sums, rows_of_chunk
from fxtune.kernels.linear_cross_entropy import (
    default_chunk_rows,
    linear_cross_entropy,
    linear_log_probs,
    scale_and_cap,
)
from fxtune.kernels.matmul import CUBLAS
from fxtune.models.kinds.known import kind_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import relative_distance
from fxtune.models.reference import ReferenceModel
from fxtune.models.structure import backbone, body, running_on_text, without_dropout
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.techniques.attention.inputs import KeyBounds, model_inputs
from fxtune.techniques.base import Evidence
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.quantized_modules import Fp8Head

LOGIT_FACTORS = {
    "logits_scaling": lambda value: 1.0 / value,  # Granite
    "logit_scale": lambda value: value,  # Cohere
    "lm_head_multiplier": lambda value: value,  # Falcon-H1
}
"""Options of Hugging Face configs that scale the logits, each with the function from its value to the factor."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference from the model's own logits, relative to their norm, for each dtype of the head's output."""
TF32_TOLERANCE = 2e-3
SMALL_ROW = 24
"""The number of tokens in the row on which the constructor compares logits."""


class Pool(str, Enum):
    """How the hidden states of a document become its vector."""

    last = "last"
    mean = "mean"
    cls = "cls"


class LanguageModel:
    """A model with its head and loss. Call its methods under the autocast context of training.

    `evidence` holds the comparison with the model's own forward pass. If the recipe requests the fused loss and it is
    impossible, `acted` is False there, and the constructor raises no error. `context_group`: the process group of the
    ranks that have the other pieces of rows (Batch.pieces). `reference`: the model for reference_log_probs() of
    batches without stored log-probabilities.
    """

    unit = "loss in nats"
    """The unit of total()."""

    def __init__(
        self,
        prepared: PreparedModel,
        liger: Liger | None = None,
        context_group: str = "",
        reference: ReferenceModel | None = None,
    ) -> None:
        self.prepared, self.context_group, self.reference = prepared, context_group, reference
        self.model: Any = prepared.module
        self.routers = prepared.routers
        self.fused = liger is not None and liger.runs("fused_linear_cross_entropy")
        config: Any = self.model.config.get_text_config()
        factors = (float(of(value)) for name, of in LOGIT_FACTORS.items() if (value := getattr(config, name, None)))
        self.scale = next(factors, 1.0)
        self.cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.temperature = 1.0
        """Divides the logits in log_probs() and the other losses, as the sampler of rollouts does."""
        self.gemm = prepared.gemm or CUBLAS
        self.teacher: Any = None
        """The Teacher of an objective that has one (objectives/teacher.py)."""
        self.asked_routers = False
        """Whether an objective has called router_terms()."""
        self.own_forward = False
        """Whether the model's own forward pass computes the logits, at all positions."""
        self.evidence = [self._compare()]

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy in nats, summed over the supervised tokens of `batch`: a float32 scalar, 0 without supervised
        tokens."""
        return self._cross_entropy(batch, "sum")

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each supervised token, float32 [supervised], in the order of `batch.labels`; 0 for
        IGNORE_INDEX."""
        return -self._cross_entropy(batch, "none")

    def sums_over_logits(self, batch: Batch, chunk_sums: ChunkSums) -> torch.Tensor:
        """The sums of `chunk_sums` over the logits of the supervised tokens of `batch`, in chunks of rows: float32
        [n]. Only the first sum has a gradient. The rows are in the order of `batch.labels`."""

        def compute() -> torch.Tensor:
            hidden, head = self.head_input(batch)
            weights = () if self.own_forward else tuple(self.head.parameters())
            return head_sums(head, hidden, weights, chunk_sums, self.chunk_rows)

        return self.prepared.with_head(compute)

    @property
    def chunk_rows(self) -> int:
        """The most rows whose logits are computed at once for a divergence."""
        return rows_of_chunk(self.model.config.get_text_config().vocab_size)

    def head_input(self, batch: Batch) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The hidden states [supervised, d] of the supervised tokens, and the function from rows of them to float32
        logits. If the model's own forward pass computes the logits, they take the place of the hidden states."""
        if self.own_forward:
            logits = self.states(batch).flatten(0, 1) / self.temperature
            return logits.index_select(0, batch.supervised_at), torch.Tensor.float
        return self._hidden(batch), self._logits

    def states(self, batch: Batch) -> torch.Tensor:
        """The decoder's last hidden states [rows, length, d]. If the model's own forward pass computes the logits, the
        logits [rows, length, vocabulary]. Call it inside of `prepared.with_head()`."""
        if self.own_forward:
            return self.model(**self._inputs(batch)).logits
        part = backbone(self.model) if batch.images is None else body(self.model)
        return part(**self._inputs(batch))[0]

    def total(self, batch: Batch) -> torch.Tensor:
        """The sum of the head's results for the documents with targets, in `unit`. Proofs compare this number."""
        return self.summed_loss(batch)

    def segment_log_probs(self, batch: Batch) -> torch.Tensor:
        """Summed log-probability of each document's supervised tokens, float32 [len(batch.cu_seqlens) - 1].

        The result has one slot for each document, in the order of `cu_seqlens`, as in Batch.document_sums(); unused
        slots are 0. An objective that calls this method sets `Needs.whole_documents`.
        """
        return batch.document_sums(self.log_probs(batch))

    def numbers(self, batch: Batch) -> torch.Tensor:
        """The head's numbers for each document of `batch.cu_seqlens`, float32 [slots, numbers]. Slots without a
        document have undefined numbers. An objective that calls this method sets `Needs.head` to `score` and gets a
        ScoreModel."""
        raise NotImplementedError

    def scores(self, batch: Batch) -> torch.Tensor:
        """The only number of each document: [slots]."""
        return self.numbers(batch).squeeze(-1)

    def vectors(self, batch: Batch, pool: Pool) -> torch.Tensor:
        """The vector of each document of `batch.cu_seqlens`, float32 [slots, d], not normalised. Slots without a
        document have undefined, finite vectors. An objective that calls this method sets `Needs.head` to `pool` and
        gets a VectorModel."""
        raise NotImplementedError

    def reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each supervised token under the reference, float32 [supervised], without gradient.

        An objective calls this method before log_probs(), so that router_terms() reads the trained model's pass.
        """
        if batch.reference is not None:
            return batch.reference
        assert self.reference is not None, "an objective that calls this method sets Needs.reference"
        with self.reference.active():
            return self.log_probs(batch)

    def router_terms(
        self, batch: Batch, count: torch.Tensor | float
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The auxiliary loss and the figures of the routers in the newest forward pass, whose input was `batch`.

        Loss and figures are multiplied by `count`. It is this micro-batch's part of the objective's normalizer: the
        number of supervised tokens, documents or groups. The loss is None in evaluation and for models without an
        auxiliary loss.
        """
        self.asked_routers = True
        if self.routers is None:
            return None, {}
        figures = self.routers.statistics()
        loss = None
        if self.routers.coefficient:
            figures["router_aux_loss"] = auxiliary = self.routers.loss()
            loss = self.routers.coefficient * count * auxiliary if torch.is_grad_enabled() else None
        return loss, {name: count * figure.detach() for name, figure in figures.items()}

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def _cross_entropy(self, batch: Batch, reduction: str) -> torch.Tensor:
        if self.own_forward:
            return F.cross_entropy(self.head_input(batch)[0].float(), batch.labels, reduction=reduction)
        return self.prepared.with_head(lambda: self._head_losses(self._hidden(batch), batch.labels, reduction))

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """The last hidden states [supervised, d] at the positions that have a target."""
        return _SelectRows.apply(self.states(batch).flatten(0, 1), batch.supervised_at)

    def _head_losses(self, hidden: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """Cross-entropy of `labels` [rows], from the hidden states `hidden` [rows, d]. The result is a scalar for the
        reduction "sum" and [rows] for "none"."""
        if not self.fused:
            return self._plain_losses(hidden, labels, reduction)
        if (linear := _linear(self.head)) is not None:
            options = dict(
                scale=self.scale / self.temperature, cap=self.cap, fp8_scales=_fp8_scales(linear), gemm=self.gemm
            )
            if reduction == "sum":
                return linear_cross_entropy(hidden, linear.weight, labels, linear.bias, **options)
            return -linear_log_probs(hidden, linear.weight, labels, linear.bias, **options)
        # A head with an adapter or with packed weights runs its own forward(), which the backward pass recomputes. The
        # random state is saved only if there is dropout, because it cannot be read while a CUDA graph is recorded.
        random = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.head.modules())
        chunks = zip(hidden.split(self._chunk_size()), labels.split(self._chunk_size()), strict=True)
        losses = [
            checkpoint(self._plain_losses, *chunk, reduction, use_reentrant=False, preserve_rng_state=random)
            for chunk in chunks
        ]
        if reduction == "none":
            return torch.cat(losses)
        return sum(losses, torch.zeros((), device=hidden.device))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return scale_and_cap(self.head(hidden), self.scale / self.temperature, self.cap).float()

    def _plain_losses(self, hidden: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.cross_entropy(self._logits(hidden), labels, reduction=reduction)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        if self.routers is not None:
            self.routers.mask = batch.is_token()
        bidirectional = kind_of(self.model.config).bidirectional  # padding would be seen by the tokens before it
        bounds = batch.bounds_without_padding() if bidirectional else batch.cu_seqlens
        tensors = batch.input_ids, batch.position_ids, bounds
        keys = None
        if batch.cu_seqlens_k is not None and batch.key_index is not None and batch.key_copies is not None:
            keys = KeyBounds(batch.cu_seqlens_k, batch.key_index, batch.key_copies)
        images = batch.images
        if images is not None and not self.prepared.reads_sizes_on_host:
            images = {name: tensor.to(batch.input_ids.device) for name, tensor in images.items()}
        return model_inputs(self.model, *tensors, batch.pieces, self.context_group, keys, images, batch.rope_positions)

    def _chunk_size(self) -> int:
        vocabulary = self.model.config.get_text_config().vocab_size
        return default_chunk_rows(vocabulary, torch.float32)

    def _head_logits_and_losses(self, inputs: dict[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [rows, vocabulary] and the losses [rows] of `labels`, from the decoder and the head."""
        hidden = backbone(self.model)(**inputs)[0].flatten(0, 1)
        return self._logits(hidden), self._head_losses(hidden, labels, "none")

    def _small_inputs(self, changed: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids) -> dict[str, Any]:
        """The inputs of a row of SMALL_ROW tokens, one document, for _compare(). `changed`: changes the ids."""
        device = next(self.model.parameters()).device
        row = kind_of(self.model.config).small_row(self.model, SMALL_ROW)
        ids = changed(row["input_ids"])
        starts = torch.tensor([0, SMALL_ROW], dtype=torch.int32, device=device)
        positions = torch.arange(SMALL_ROW, device=device).unsqueeze(0)
        return {**row, **model_inputs(self.model, ids, positions, starts)}

    def _compare(self) -> Evidence:
        """Compare the logits and losses of a small row with the model's own forward pass, and set `own_forward`."""
        inputs = self._small_inputs()
        labels = inputs["input_ids"][0].roll(-1)
        with without_dropout(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with running_on_text(self.model):
                own = self.model(**inputs).logits.flatten(0, 1)
            expected = F.cross_entropy(own.float(), labels, reduction="none")
            limit = TF32_TOLERANCE if own.is_cuda and own.dtype is torch.float32 else TOLERANCE[own.dtype]
            try:
                logits, losses = self.prepared.with_head(lambda: self._head_logits_and_losses(inputs, labels))
                differences = [relative_distance(logits, own.float()), relative_distance(losses, expected)]
            except (AttributeError, RuntimeError, TypeError) as problem:  # no head right after the decoder
                if out_of_memory_reason(problem):
                    raise
                differences, why = [float("inf")], f"its decoder and head do not run one after the other ({problem})"
            else:
                why = f"its logits differ from its head's logits (relative difference {differences[0]:.1e})"
        self.own_forward = not max(differences) <= limit
        requested = "cross-entropy of supervised rows only, " + ("fused with the head" if self.fused else "plain")
        if self.own_forward:
            found = f"{type(self.model).__name__}: {why}, so all its logits are computed"
            return Evidence("loss", requested, found, not self.fused, "liger.fused_linear_cross_entropy")
        found = f"a small row's logits and losses within {max(differences):.1e} of the model's own"
        if self.fused:
            with torch.no_grad():  # inside with_head() ranks have the head's whole weight
                found = f"{found}; {self.prepared.with_head(self._description)}"
        return Evidence("loss", requested, found, True)

    def _description(self) -> str:
        linear = _linear(self.head)
        if linear is None:
            head = type(self.head).__name__
            return f"chunks of {self._chunk_size():,} rows, the head ({head}) runs again in the backward pass"
        dtype = linear.weight.dtype if _fp8_scales(linear) is None else torch.bfloat16
        rows = default_chunk_rows(linear.weight.shape[0], dtype)
        trained = "the head is trained" if linear.weight.requires_grad else "the head is frozen, so it has no gradient"
        return f"chunks of {rows:,} rows, {trained}"


class _SelectRows(torch.autograd.Function):
    """Computes states[at]. Rows `at` are distinct, so the backward pass copies gradients and adds up nothing. It calls
    index_copy_ on indices only, because torch's index_copy_ sorts in deterministic mode."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(at)
        ctx.rows = len(states)
        return states.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (at,) = ctx.saved_tensors
        row = at.new_full((ctx.rows,), len(at)).index_copy_(0, at, torch.arange(len(at), device=at.device))
        return F.pad(gradient, (0, 0, 0, 1)).index_select(0, row), None


def _linear(head: Any) -> nn.Linear | None:
    """The head's linear layer: a plain one, an fp8 one, or the copy that an adapter trains. None for other heads."""
    if hasattr(head, "modules_to_save"):  # peft's ModulesToSaveWrapper
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if isinstance(head, Fp8Head):
        return head
    plain = type(head) is nn.Linear and type(head.weight) in (torch.Tensor, nn.Parameter)
    return head if plain and head.weight.is_floating_point() else None


def _fp8_scales(linear: nn.Linear) -> torch.Tensor | None:
    return linear.scales if isinstance(linear, Fp8Head) else None
