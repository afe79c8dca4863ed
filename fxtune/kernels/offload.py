"""The inputs of checkpointed layers wait in pinned host memory from their layer's forward pass to its backward pass.

A checkpointed layer keeps its input: rows x length x hidden_size numbers, 512 MiB a layer for a row of 65,536 tokens of a
Llama-3-8B in bfloat16, 16 GiB for its 32 layers. One such copy takes 10-20 ms over PCIe 5, and the layer some 100 ms, so it
hides: each input goes out on a side stream while its own layer computes, and comes back while the layer above it is in its
backward pass (Unsloth's and torchtune's designs, and ALST's, arXiv 2506.13996).

Autograd's saved-tensor hooks do the exchange, around each layer's call and so outside of what torch.compile has made of
its `forward`. What autograd stores in place of the input is a `_Ticket`; the buffer that it holds goes back to the pool when
autograd drops the ticket, so a forward pass without a backward one loses nothing.

Order is kept by events between two streams; the host never waits. An input's device memory is dropped only after the
computing stream has been told to wait for its copy, so the allocator needs no `record_stream` and reuses it at once: two
inputs are on the device at any time, whatever the host's lead. The last layer's input stays, as it is wanted first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


class Offload:
    """Sends the inputs of `layers` to host memory and brings them back. On a CPU it copies in place of sending."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool: list[torch.Tensor] = []
        """Free buffers, flat and of bytes: as many as layers, and reused from step to step."""
        self.stored = 0
        """Inputs sent to the host since this was made."""
        self.fetched = 0
        """Inputs brought back."""
        self._input: torch.Tensor | None = None
        self._ready: Any = None
        self._ticket: _Ticket | None = None
        self._latest: _Ticket | None = None
        self._open: list[Any] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, index), always_call=True)
        self.last = len(layers) - 1

    def _enter(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if index == 0:
            self._latest = None
        if self._latest is not None:
            self._latest.let_go()  # its layer has computed, and from here on this stream is behind its copy
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, index == self.last), _unpack)
        hooks.__enter__()
        self._open.append(hooks)
        self._input, self._ticket = (args[0] if args else kwargs["hidden_states"]), None
        if self.side is not None:
            self._ready = torch.cuda.current_stream().record_event()  # before the layer's own work, so the copy overlaps it

    def _leave(self, index: int, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__()
        self._input = self._ticket = None
        if index == self.last:
            self._latest = None  # from here on the tickets are autograd's alone

    def _pack(self, last: bool, tensor: torch.Tensor) -> Any:
        hidden = self._input
        if (hidden is None or tensor.data_ptr() != hidden.data_ptr() or tensor.shape != hidden.shape
                or not tensor.is_contiguous()):
            return tensor
        if last:
            return _Stay(tensor, self._latest)
        if self._ticket is None:  # a layer may save its input more than once
            self._ticket = self._latest = _Ticket(self, hidden.detach(), self._ready, self._latest)
            self.stored += 1
        return self._ticket

    def buffer(self, size: int) -> torch.Tensor:
        """A free buffer of at least `size` bytes. One that is too small makes room for it."""
        for index, free in enumerate(self.pool):
            if free.numel() >= size:
                return self.pool.pop(index)
        if self.pool:
            self.pool.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.side is not None)


def _unpack(packed: Any) -> torch.Tensor:
    return packed.take() if isinstance(packed, (_Ticket, _Stay)) else packed


class _Stay:
    """The last layer's input. Asking for it is the sign that the backward pass has begun."""

    def __init__(self, hidden: torch.Tensor, below: _Ticket | None) -> None:
        self.hidden, self.below = hidden, below

    def take(self) -> torch.Tensor:
        if self.below is not None:
            self.below.fetch()
        return self.hidden


class _Ticket:
    """One layer's input, on its way to the host, there, or on its way back."""

    def __init__(self, owner: Offload, hidden: torch.Tensor, ready: Any, below: _Ticket | None) -> None:
        self.owner, self.below = owner, below
        """`below`: the ticket of the layer underneath, which is wanted next in the backward pass."""
        self.shape, self.dtype, self.device = hidden.shape, hidden.dtype, hidden.device
        self.bytes = hidden.numel() * hidden.element_size()
        self.buffer: torch.Tensor = owner.buffer(self.bytes)
        self.here: torch.Tensor | None = hidden
        """The input on the device, until its copy is done; later, that which is being brought back."""
        self.event: Any = None
        """What to wait for on the computing stream before `here` is read or dropped."""
        if owner.side is None:
            self._host().copy_(hidden)
        else:
            owner.side.wait_event(ready)
            with torch.cuda.stream(owner.side):
                self._host().copy_(hidden, non_blocking=True)
                self.event = owner.side.record_event()

    def _host(self) -> torch.Tensor:
        return self.buffer[:self.bytes].view(self.dtype).view(self.shape)

    def let_go(self) -> None:
        """Drop what is on the device, after the computing stream has been put behind the copy."""
        if self.here is not None and self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.here = self.event = None

    def fetch(self) -> None:
        """Start bringing it back. Its memory is of the computing stream, whose work so far the copy waits for."""
        if self.here is not None:
            return
        self.here = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.owner.fetched += 1
        if self.owner.side is None:
            self.here.copy_(self._host())
            return
        self.owner.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.owner.side):
            self.here.copy_(self._host(), non_blocking=True)
            self.event = self.owner.side.record_event()

    def take(self) -> torch.Tensor:
        """The input, for the computing stream; and the one below starts on its way. May be asked for again."""
        self.fetch()
        hidden = self.here
        assert hidden is not None
        self.let_go()
        if self.below is not None:
            self.below.fetch()
        return hidden

    def __del__(self) -> None:
        if self.here is not None and self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)  # fetched in advance and never asked for
        self.owner.pool.append(self.buffer)
