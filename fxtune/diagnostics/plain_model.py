"""The model that `fxtune verify --loss` compares with: plain transformers and peft behind LanguageModel's interface.

Each document passes through the model alone, without padding, and the model's own logits give the log-probabilities.
An objective computes its loss through this interface as in training, so the comparison works for every objective, also
for objectives of plugins.

The routers' loss (techniques/router.py) multiplies f_e by P_e. Both are means over all tokens of a micro-batch, and
f_e has no gradient. So the documents pass through the model twice. The first pass counts f_e. With these counts the
loss is a sum over documents, and the second pass needs the graph of one document at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.kernels.divergence import ChunkSums
from fxtune.models.experts import experts_per_token
from fxtune.models.kinds.known import images_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import base_dtype
from fxtune.objectives.language_model import LanguageModel, Pool
from fxtune.techniques.lora.trained_tokens import as_peft
from fxtune.upstream.torch import remove_forward_hooks


class RouterCounts:
    """How the routers of all layers distribute the tokens of one or several batches, and the weight of the routers'
    loss in the loss of the objective."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.chosen = torch.zeros(experts, device=device)
        self.decisions = 0
        """Number of tokens times number of layers."""
        self.weight = 0.0

    def add(self, other: RouterCounts) -> None:
        self.chosen += other.chosen
        self.decisions += other.decisions
        self.weight += other.weight


class PlainModel(LanguageModel):
    """`prepared`: a model with the techniques that change the mathematics by design, and no others. `checkpointed`:
    use transformers' own checkpointing. `balanced`: the objective's loss includes the routers' loss. `shares_prompts`:
    in a run, the routers see the shared prompt of a pair only once."""

    def __init__(
        self, prepared: PreparedModel, checkpointed: bool = False, balanced: bool = False, shares_prompts: bool = False
    ) -> None:
        self.prepared, self.model = prepared, prepared.module
        self.shares_prompts = shares_prompts
        self.routers = prepared.routers if balanced else None
        as_peft(self.model)
        if checkpointed:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.enable_input_require_grads()
        self.outputs: list[Tensor] = []
        """The tensors that the objective got since the last take_change(). A backward pass gives each its gradient."""
        self.counts: RouterCounts | None = None
        """The counts of the newest pass with a gradient."""
        self._logits_of_routers: list[Tensor] | None = None
        for router in self.routers.modules if self.routers else ():
            router.register_forward_hook(self._note_router)

    def to_float32(self) -> None:
        """Compute in float32 with the same weights; quantized weights are dequantized."""
        from peft.utils import ModulesToSaveWrapper

        self.model.float()
        modules: Iterator[Any] = self.model.modules()
        for module in modules:
            if hasattr(module, "compute_dtype"):  # bitsandbytes' linears
                module.compute_dtype = torch.float32
                if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
                    state.dtype = torch.float32
            if isinstance(module, ModulesToSaveWrapper):
                # The lora technique casts the output of a float32 module to the dtype of the base.
                for trained in module.modules_to_save.values():
                    remove_forward_hooks(trained)

    def summed_loss(self, batch: Batch) -> Tensor:
        return -self.log_probs(batch).sum()

    def log_probs(self, batch: Batch) -> Tensor:
        return self._noted(self._log_probs(batch))

    def numbers(self, batch: Batch) -> Tensor:
        return self._of_documents(batch, lambda numbers: numbers[None])

    def vectors(self, batch: Batch, pool: Pool) -> Tensor:
        def vector(states: Tensor) -> Tensor:
            if pool is Pool.mean:
                return states.mean(0, keepdim=True)
            return states[-1:] if pool is Pool.last else states[:1]

        return self._of_documents(batch, vector)

    def _of_documents(self, batch: Batch, read: Callable[[Tensor], Tensor]) -> Tensor:
        """`read` of the model's output for each document, float32, [1, ...] for each, concatenated."""
        counts, found = self._counts(batch), []
        for ids, _, first, images in self._documents(batch):
            output, of_routers = self._pass(ids, first, images)
            found.append(read(output.float()))
            if counts is not None:
                self._count(of_routers, counts)
        return self._noted(torch.cat(found))

    def _noted(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.retain_grad()
            self.outputs.append(output)
        return output

    def reference_log_probs(self, batch: Batch) -> Tensor:
        if batch.reference is not None:
            return batch.reference
        with torch.no_grad(), self.model.disable_adapter():
            return self._log_probs(batch)

    def router_terms(self, batch: Batch, count: Tensor | float) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return no loss, and note its weight `count`. router_loss() computes the loss."""
        if self.counts is not None:
            self.counts.weight = float(count)
        return None, {}

    def router_loss(self, batch: Batch, counts: RouterCounts) -> Tensor:
        """The documents' part of the routers' loss of their micro-batch. `counts`: the counts of the micro-batch."""
        probability = torch.zeros_like(counts.chosen)
        for ids, _, first, images in self._documents(batch):
            of_routers = self._pass(ids, first, images)[1]
            probability = probability + sum(logits.float().softmax(-1).sum(0) for logits in of_routers)
        return len(probability) * (counts.chosen * probability).sum() / counts.decisions**2

    def take_change(self, order: int) -> Tensor:
        """The sum of |gradient x value|^order over all log-probabilities since the last call."""
        found = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        for value in self.outputs:
            if value.grad is not None:
                found += (value.grad * value.detach()).abs().double().pow(order).sum()
        self.outputs = []
        return found

    def head_input(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        parts = [logits.float() for logits, _ in self._supervised(batch)]
        return torch.cat(parts), torch.Tensor.float

    def sums_over_logits(self, batch: Batch, chunk_sums: ChunkSums) -> Tensor:
        """All logits at once, and autograd computes their gradient."""
        logits, _ = self.head_input(batch)
        return chunk_sums(logits, slice(0, len(logits)), False)[0]

    def _log_probs(self, batch: Batch) -> Tensor:
        parts = [torch.zeros(0, device=batch.input_ids.device)]
        for logits, targets in self._supervised(batch):
            parts.append(-F.cross_entropy(logits.float(), targets, reduction="none"))
        return torch.cat(parts)

    def _supervised(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits and the targets of each document's supervised tokens. A pass with a gradient also counts
        the routers' choices."""
        counts = self._counts(batch)
        for ids, targets, first, images in self._documents(batch):
            wanted = (targets != IGNORE_INDEX).nonzero().flatten()
            # Tokens after the last target change nothing but the routers' loss, and are left out. No image is cut.
            end = int(wanted[-1]) + 1 if len(wanted) else 0
            end = len(ids) if counts is not None or (images and end) else end
            if not end:
                continue
            logits, of_routers = self._pass(ids[:end], first, images)
            yield logits[wanted], targets[wanted]
            if counts is not None:
                self._count(of_routers, counts)

    def _counts(self, batch: Batch) -> RouterCounts | None:
        """New counts, for a pass with a gradient through a model with routers. None for other passes."""
        if self.routers is None or not torch.is_grad_enabled():
            return None
        self.counts = RouterCounts(self.routers.experts, batch.input_ids.device)
        return self.counts

    def _pass(self, ids: Tensor, first: int, images: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(the logits or hidden states of one document's tokens, or the document's numbers; the logits of each layer's
        router, from token `first` on)."""
        found: list[Tensor] = []
        self._logits_of_routers = found
        try:
            if images:
                images = images | images_of(self.model.config).token_types(self.model.config, ids[None])
            output = self.model(input_ids=ids[None], use_cache=False, **images)
            # Before the logits stands the auxiliary loss, if the model's config has output_router_logits.
            numbers = output["logits"] if "logits" in output else output[0]
            return numbers[0], [of_router[first:] for of_router in found]
        finally:
            self._logits_of_routers = None  # checkpointing runs the routers again, and these outputs do not count

    def _note_router(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._logits_of_routers is not None:
            self._logits_of_routers.append(output[0])

    def _documents(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, int, dict[str, Tensor]]]:
        """Yield (ids, targets, first token that a run's routers see, tensors of images) for each document of a batch
        without padding, in the order of `Batch.labels`. With `shares_prompts` the documents are a pair."""
        ids, targets, first = batch.input_ids.flatten(), batch.targets.flatten(), None
        bounds = [*pairwise(batch.cu_seqlens.unique().tolist())]  # unused slots repeat the end
        images: list[dict[str, Tensor]] = [{} for _ in bounds]
        if batch.images is not None:
            dtype = base_dtype(self.model)
            given = {
                name: x.to(ids.device, dtype if x.is_floating_point() else x.dtype) for name, x in batch.images.items()
            }
            documents = [ids[begin:end] for begin, end in bounds]
            images = images_of(self.model.config).divided(self.model, given, documents)
        for (begin, end), own in zip(bounds, images, strict=True):
            document = ids[begin:end], targets[begin:end]
            shared = _shared_tokens(first, document) if self.shares_prompts and first is not None else 0
            first = first or document
            yield *document, shared, own

    def _count(self, of_routers: list[Tensor], counts: RouterCounts) -> None:
        text = self.model.config.get_text_config()
        used = experts_per_token(self.model.modules(), text)
        assert used is not None, "there are routers"
        for logits in of_routers:
            chosen = logits.detach().float().softmax(-1).topk(used).indices
            counts.chosen += torch.bincount(chosen.flatten(), minlength=len(counts.chosen))
            counts.decisions += len(logits)


def _shared_tokens(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> int:
    """One less than the number of equal tokens at the start of two documents that neither document learns. A document
    is (token ids, targets)."""
    length = min(len(one[0]), len(other[0]))
    differs = one[0][:length] != other[0][:length]
    for _, targets in (one, other):
        differs[1:] |= targets[: length - 1] != IGNORE_INDEX
    return max(int(torch.cat([differs, differs.new_ones(1)]).int().argmax()) - 1, 0)
