"""Skips the step of a library's optimizer if the gradient is not finite, without a host sync.

torch's fused kernels can skip a step on the device. Other optimizers cannot, and reading `finite.item()` before each
step would stop the host. So the step is always taken, and a bad step is undone on the device. Weights and moments are
copied before the step. After the step each tensor becomes `new * finite + old * (1 - finite)`, in a few multi-tensor
launches. This arithmetic reads the tensors' bits as integers, because an infinite moment as a float would give inf * 0
= NaN. The optimizer gets zeros for the gradients of a bad step, so that no library's kernel sees a NaN.

Libraries count steps on the host for bias correction, and the device cannot correct a count on the host. When the next
step begins, the device has computed `finite` long ago. Then the host reads `finite` and corrects the count before it
is used. For a weight without a gradient, such as a weight of an expert that got no token, libraries count no step.

Cost: a copy of the trained weights, their gradients and moments during the step, so this is for adapters and small
models (MAX_BYTES). In larger models a host sync costs a thousandth of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from fxtune.upstream import torch as upstream

MAX_BYTES = 2 * 2**30
"""Largest size of the trained weights, without gradients and moments, for which steps are undone by copies."""
ALIGNMENT = 64
"""In its buffer a copy begins at a multiple of this many numbers, because kernels load 16 bytes at a time."""
CONSTANT_TABLES = ("qmap",)
"""State keys of constant tables. Every parameter's state refers to the same table."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype for each size of a number in bytes."""


class NonfiniteGuard:
    """Takes the steps of a library's optimizer, and undoes non-finite steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_finite: torch.Tensor | None = None
        """Whether the last step was finite. It is on the host, valid after the event `copied`, None after settle()."""
        self.copied: Any = None
        """The event after the copy of `last_finite` to the host; None on a CPU."""
        self.counters: list[dict[str, Any]] = []
        """The dicts that may count the last step: states of weights with a gradient, and groups."""

    @torch.no_grad()
    def step(self, finite: torch.Tensor) -> bool:
        """Take a step if `finite`, a bool scalar on the device, is true. The host does not wait. Weights keep their
        `.grad`.

        Takes no step and returns False if a weight has no moments yet, because no old moments could be restored. The
        caller must then read `finite` and step without the guard.
        """
        self.settle()
        current = self._tensors()
        if current is None:
            return False
        gradients = [
            (parameter, parameter.grad)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        zeroed = _zeroed_unless([gradient for _, gradient in gradients], finite)
        saved = {dtype: _copies(tensors)[1] for dtype, tensors in current.items()}
        try:
            for (parameter, _), gradient in zip(gradients, zeroed, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        for dtype, tensors in current.items():
            upstream.foreach("mul_", tensors, finite.to(dtype))
            upstream.foreach("mul_", saved[dtype], (~finite).to(dtype))
            upstream.foreach("add_", tensors, saved[dtype])
        self.counters = [
            *(self.optimizer.state[parameter] for parameter, _ in gradients),
            *self.optimizer.param_groups,
        ]
        if finite.is_cuda:
            self.last_finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()
        else:
            self.last_finite = finite.clone()
        return True

    def settle(self) -> None:
        """Correct the library's step counts. Must be called before the counts are used or saved."""
        if self.last_finite is None:
            return
        if self.copied is not None:
            self.copied.synchronize()
        if not self.last_finite.item():
            for counter in self.counters:
                count = counter.get("step")
                if _on_host(count):
                    counter["step"] = count - 1
        self.last_finite = self.copied = None
        self.counters = []

    def _tensors(self) -> dict[torch.dtype, list[torch.Tensor]] | None:
        """All weights with a gradient and their moments, viewed as integers, by dtype. None if moments are missing."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # no library changes a weight without a gradient
                    continue
                state = self.optimizer.state.get(parameter)
                if not state:
                    return None
                for tensor in (parameter, *_state_tensors(state)):
                    bits = tensor.view(BITS[tensor.element_size()])
                    by_dtype.setdefault(bits.dtype, []).append(bits)
        return by_dtype


def _zeroed_unless(gradients: list[torch.Tensor], finite: torch.Tensor) -> list[torch.Tensor]:
    zeroed: dict[int, torch.Tensor] = {}
    for dtype in {gradient.dtype for gradient in gradients}:
        indices = [index for index, gradient in enumerate(gradients) if gradient.dtype is dtype]
        buffer, pieces = _copies([gradients[index] for index in indices])
        buffer.masked_fill_(~finite, 0)
        zeroed.update(zip(indices, pieces, strict=True))
    return [zeroed[index] for index in range(len(gradients))]


def _copies(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy tensors of one dtype and device into one buffer, in a few launches. Returns the buffer and the copies."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.numel() // ALIGNMENT) * ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=tensors[0].dtype, device=tensors[0].device)
    pieces = [
        buffer[start : start + tensor.numel()].view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
    upstream.foreach("copy_", pieces, tensors)
    return buffer, pieces


def _state_tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a parameter's state that are on the device. Of torchao's 8-bit tensors, yield the parts."""
    for key, value in state.items():
        if (
            not isinstance(value, torch.Tensor)
            or key.startswith(CONSTANT_TABLES)
            or (key == "step" and _on_host(value))
        ):
            continue
        if hasattr(value, "__tensor_flatten__"):
            yield from (
                getattr(value, name) for name in value.__tensor_flatten__()[0] if not name.startswith(CONSTANT_TABLES)
            )
        else:
            yield value


def _on_host(count: Any) -> TypeGuard[int | torch.Tensor]:
    return isinstance(count, int) or (isinstance(count, torch.Tensor) and count.device.type == "cpu")


def adamw_8bit_without_sync() -> type[torch.optim.Optimizer]:
    """bitsandbytes' AdamW8bit without a host sync: step() of bitsandbytes 0.50 syncs after each weight."""
    from bitsandbytes.optim import AdamW8bit as AdamW8bitWithSync

    class AdamW8bit(AdamW8bitWithSync):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for group_index, group in enumerate(self.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
                    self.update_step(group, parameter, group_index, index)

    return AdamW8bit
