"""An optimizer of a library takes its step only where the gradient was finite, and the host does not wait to know.

torch's fused kernels skip a step on the device. Others do not, and asking the device first (`finite.item()`) stops the host once
a step: the optimizer's launches, hundreds for adapters, then find an idle device, and so do the next forward pass's first ones.
So the step is always taken, and taken back on the device where it should not have been: weights and moments are copied before,
and after it each becomes `new * finite + old * (1 - finite)`, by torch's multi-tensor kernels, a few launches for all of them.
That is done with their bits, read as whole numbers: with factors of 0 and 1 it is exact to the last bit, also for a moment that
is infinite, which in floating point would come to inf * 0, a NaN. The gradients of a bad step are made zero first, so that no
library's kernel has to deal with a NaN.

What libraries count on the host (a Python number, or a tensor there, for bias correction) cannot be taken back by the device. The
host looks at the verdict of a step when it comes to the next one: by then it has long been known, and what was counted too much
is taken off before it is used. So the numbers are those of asking at once. A weight that had no gradient in the step, as that of
an expert without a token, was not counted.

It costs a copy of the weights that are trained, of their gradients and moments, for the time of the step, so it is for adapters
and small models (LIMIT). Beyond that a step takes so long that asking costs a thousandth of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

LIMIT = 2 * 2**30
"""Bytes of weights that are trained up to which they are copied. Their gradients and moments come on top."""
ALIGNED = 64
"""Numbers that a copy begins at a multiple of: kernels load 16 bytes at once."""
SHARED = ("qmap",)
"""Tables that libraries keep in the state of each parameter: constants, and one for all."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What the numbers of so many bytes are read as, to be taken or left as they are."""


class Guard:
    """Takes the steps of `part`."""

    def __init__(self, part: torch.optim.Optimizer) -> None:
        self.part = part
        self.verdict: torch.Tensor | None = None
        """Whether the last step was finite, on its way to the host."""
        self.known: Any = None
        """The event that says it has arrived; None on a CPU."""
        self.counted: list[dict[str, Any]] = []
        """Where the library may have counted the last step: at the weights that had a gradient, and at the groups."""

    @torch.no_grad()
    def step(self, finite: torch.Tensor) -> bool:
        """Step if `finite` (a bool scalar on the device), without waiting. Weights keep the `.grad` that they had.

        False: not done, since a first step makes the moments, and there is nothing yet to go back to. Ask, and step as usual.
        """
        self.settle()
        live = self._tensors()
        if live is None:
            return False
        given = [
            (parameter, parameter.grad)
            for group in self.part.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        clean = _cleaned([gradient for _, gradient in given], finite)
        saved = {dtype: _copies(tensors)[1] for dtype, tensors in live.items()}
        try:
            for (parameter, _), gradient in zip(given, clean, strict=True):
                parameter.grad = gradient
            self.part.step()
        finally:
            for parameter, gradient in given:
                parameter.grad = gradient
        for dtype, tensors in live.items():
            torch._foreach_mul_(tensors, finite.to(dtype))
            torch._foreach_mul_(saved[dtype], (~finite).to(dtype))
            torch._foreach_add_(tensors, saved[dtype])
        self.counted = [*(self.part.state[parameter] for parameter, _ in given), *self.part.param_groups]
        if finite.is_cuda:
            self.verdict = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            self.known = torch.cuda.Event()
            self.known.record()
        else:
            self.verdict = finite.clone()
        return True

    def settle(self) -> None:
        """Make what the library counts right: to be called before it is looked at, or saved."""
        if self.verdict is None:
            return
        if self.known is not None:
            self.known.synchronize()
        if not self.verdict.item():
            for holder in self.counted:
                count = holder.get("step")
                if _on_host(count):
                    holder["step"] = count - 1
        self.verdict = self.known = None
        self.counted = []

    def _tensors(self) -> dict[torch.dtype, list[torch.Tensor]] | None:
        """The bits of the weights that have a gradient and of their moments, on the device, by BITS; None where one has no
        moments yet."""
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in self.part.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # no library touches it
                    continue
                state = self.part.state.get(parameter)
                if not state:
                    return None
                for tensor in (parameter, *_plain(state)):
                    bits = tensor.view(BITS[tensor.element_size()])
                    found.setdefault(bits.dtype, []).append(bits)
        return found


def _cleaned(gradients: list[torch.Tensor], finite: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the gradients, all of them zero unless `finite`."""
    found: dict[int, torch.Tensor] = {}
    for dtype in {gradient.dtype for gradient in gradients}:
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype is dtype]
        buffer, pieces = _copies([gradients[place] for place in places])
        buffer.masked_fill_(~finite, 0)
        found.update(zip(places, pieces, strict=True))
    return [found[place] for place in range(len(gradients))]


def _copies(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies of tensors of one dtype and device in one buffer, and that buffer: a few launches, whatever their number."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.numel() // ALIGNED) * ALIGNED)
    buffer = torch.empty(starts[-1], dtype=tensors[0].dtype, device=tensors[0].device)
    pieces = [
        buffer[start : start + tensor.numel()].view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
    torch._foreach_copy_(pieces, tensors)
    return buffer, pieces


def _plain(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a parameter's state; of torchao's 8-bit ones what they are made of."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key.startswith(SHARED) or (key == "step" and _on_host(value)):
            continue
        if hasattr(value, "__tensor_flatten__"):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0] if not name.startswith(SHARED))
        else:
            yield value


def _on_host(count: Any) -> TypeGuard[int | torch.Tensor]:
    return isinstance(count, int) or (isinstance(count, torch.Tensor) and count.device.type == "cpu")


def unwaiting() -> type[torch.optim.Optimizer]:
    """bitsandbytes' AdamW8bit, whose own step() lets the host wait for the device after each weight (0.50), without that."""
    from bitsandbytes.optim import AdamW8bit as Waiting

    class AdamW8bit(Waiting):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for at, group in enumerate(self.param_groups):
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, at, number)
                    self.update_step(group, parameter, at, number)

    return AdamW8bit
