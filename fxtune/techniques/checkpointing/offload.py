"""Offloads the tensors that layers save for the backward pass to pinned host memory.

A checkpointed layer saves its input: 512 MiB a layer for a row of 65,536 tokens of a Llama-3-8B. A copy of the input
takes 10 to 20 ms over PCIe 5, and the layer some 100 ms. So the copy is hidden: a side stream sends a layer's input
while the layer computes, and fetches it during the backward pass of the layer above (the design of Unsloth, of
torchtune and of ALST, arXiv 2506.13996). With `all_saved` the other tensors that a compiled layer saves are sent, too,
while the next layer computes. Tensors with the width of the MLP stay: copying them takes longer than recomputing them.

Autograd's saved-tensor hooks send and fetch the tensors. They surround each layer's call, so torch.compile does not
see them. A storage is sent as a whole, and only once. Autograd holds a `_SentTensor` in place of each tensor. When it
has dropped every `_SentTensor` of a storage, the storage's host memory returns to the pool.

Events between the two streams keep the order; the host never waits. The computing stream waits for a copy before the
device memory is released. So the allocator needs no `record_stream`, and at any time the tensors of two layers are on
the device. The last layer's tensors stay, because the backward pass needs them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.errors import MemoryShortError
from fxtune.facts.recomputation import pinned_piece
from fxtune.system.terminal.units import GIB

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device."""


def leaves(value: Any) -> Iterator[Any]:
    """Every value inside of `value` that is neither a tuple, a list nor a mapping."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        yield value
        return
    for inner in value:
        yield from leaves(inner)


class Offload:
    """Sends tensors that `layers` save to the host, and fetches them. The last layer's tensors stay on the device.

    On a CPU the copies stay in memory.

    `all_saved`: send all that autograd saves in the layers' calls, and not only their inputs. Storages of less than
    `min_bytes` stay, and tensors with one of `wide_sizes` numbers a token. `pieces`: how many ranks share a row
    (World.context_ranks). Tensors of attention hold the tokens of all these ranks.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        device: torch.device,
        all_saved: bool = False,
        wide_sizes: frozenset[int] = frozenset(),
        min_bytes: int = MIN_BYTES,
        pieces: int = 1,
    ) -> None:
        self.pieces = pieces
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.all_saved, self.wide_sizes, self.min_bytes = all_saved, wide_sizes, min_bytes
        self.pool: list[torch.Tensor] = []
        """Free pieces of host memory, flat uint8, reused from step to step."""
        self.pinned = 0
        """Bytes of all pieces, free or in use."""
        self.inputs_sent = self.inputs_fetched = 0
        """The numbers of layers' inputs that were sent and fetched so far."""
        self.sent = 0
        """Bytes sent to the host so far."""
        self.last = len(layers) - 1
        self._call: _LayerCall | None = None
        """The layer call whose forward pass runs now."""
        self._on_device: list[_LayerCall] = []
        """Calls of this forward pass whose sent tensors still occupy device memory, the lowest layer first."""
        self._hooks: list[Any] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, index), always_call=True)

    def _enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if index == 0:
            self._on_device = []
        below = self._on_device[-1] if self._on_device else None
        # The layer below sent its input while it computed. Its other tensors are sent while this layer computes.
        for call in self._on_device:
            call.release(only_input=call is below)
        self._on_device = self._on_device[-1:]
        hidden = args[0] if args else kwargs["hidden_states"]
        self._call = _LayerCall(self, hidden, (args[1:], kwargs), layer, below, index == self.last)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._call.pack, _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def _leave(self, index: int, *_: Any) -> None:
        if self._hooks:
            self._hooks.pop().__exit__()
        if self._call is not None:
            self._on_device += [self._call] if self._call.storages else []
            self._call.hidden = None  # autograd may keep the call alive
        self._call = None
        if index == self.last:
            for call in self._on_device:
                call.release()
            self._on_device = []  # only autograd refers to these calls now

    def buffers(self, size: int) -> list[torch.Tensor]:
        """Free pieces that hold `size` bytes together. Raises MemoryShortError if the host cannot pin more memory."""
        piece = pinned_piece(size)
        taken: list[torch.Tensor] = []
        try:
            for _ in range(-(-size // piece)):
                taken.append(self._buffer(piece))
        except MemoryShortError:
            self.pool += taken  # an attempt with a smaller batch may use these pieces
            raise
        return taken

    def _buffer(self, size: int) -> torch.Tensor:
        fitting = [index for index, free in enumerate(self.pool) if free.numel() >= size]
        if fitting:
            return self.pool.pop(min(fitting, key=lambda index: self.pool[index].numel()))
        if self.pool:  # all free pieces are too small: drop one piece to make space
            self.pinned -= self.pool.pop().numel()
        try:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.side is not None)
        except RuntimeError as error:
            raise MemoryShortError(
                f"techniques.checkpointing.offload: the host cannot pin more memory: {self.pinned / GIB:.1f} GiB are "
                f"pinned, and {size / GIB:.2g} more were refused ({str(error).splitlines()[0]}). Set it to inputs or "
                "none, or shorten data.sequence_length. The cause may be a limit: `ulimit -l`, or the container's."
            ) from error
        self.pinned += size
        return buffer


def _unpack(packed: Any) -> torch.Tensor:
    return packed.unpack() if isinstance(packed, (_SentTensor, _LastInput)) else packed


class _LayerCall:
    """One call of a layer: decides which of its saved tensors are sent, and holds their storages.

    `below`: the call of the layer below. The backward pass needs its tensors next.
    """

    def __init__(
        self, owner: Offload, hidden: torch.Tensor, others: Any, layer: nn.Module, below: _LayerCall | None, last: bool
    ) -> None:
        self.owner, self.below, self.last = owner, below, last
        self.hidden: torch.Tensor | None = hidden
        self.storages: dict[int, _SentStorage] = {}
        """Address -> sent storage."""
        self.tokens, self.device = hidden.numel() // hidden.shape[-1], hidden.device
        others = [leaf for leaf in leaves(others) if isinstance(leaf, torch.Tensor)]
        stays = [*layer.parameters(), *layer.buffers(), *others] if owner.all_saved and not last else []
        plain = (tensor for tensor in stays if type(tensor) in (torch.Tensor, nn.Parameter))
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in plain}
        """Addresses of storages that are not sent."""
        # The event comes before the layer's computation, so that the copy of the input overlaps with it.
        self.ready = torch.cuda.current_stream().record_event() if owner.side is not None else None

    def pack(self, tensor: torch.Tensor) -> Any:
        """The object that autograd stores in place of `tensor`."""
        tensor = tensor.detach()  # else a result that its own operator saves would keep itself alive
        if self.hidden is None:
            return tensor
        address = tensor.untyped_storage().data_ptr()
        is_input = address == self.hidden.untyped_storage().data_ptr()
        if self.last:
            return _LastInput(tensor, self.below) if is_input else tensor
        if not is_input and not self._is_sent(tensor):
            return tensor
        if address not in self.storages:
            self.storages[address] = _SentStorage(self.owner, tensor, self.ready if is_input else None, is_input)
            self.owner.inputs_sent += is_input
        return _SentTensor(self, self.storages[address], tensor)

    def _is_sent(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        # Widths of the storage and of the tensor. They differ for gate and up: space for x A^T lengthens each row.
        sizes = {storage.nbytes() // tensor.element_size() // self.tokens, tensor.numel() // self.tokens}
        return (
            self.owner.all_saved
            and tensor.device == self.device
            and storage.nbytes() >= self.owner.min_bytes
            and not sizes & self.owner.wide_sizes
            and storage.data_ptr() not in self.stays
            and bool({self.tokens, self.tokens * self.owner.pieces} & {*tensor.shape, math.prod(tensor.shape[:2])})
        )

    def release(self, only_input: bool = False) -> None:
        """Release the device memory, after the computing stream was made to wait for the copies."""
        for storage in self.storages.values():
            if storage.is_input or not only_input:
                storage.release()

    def fetch(self) -> None:
        """Start to copy back the storages with tensors that autograd has not taken yet."""
        for storage in self.storages.values():
            if storage.tensors > 0:
                storage.fetch()


class _SentStorage:
    """One storage that was sent. It is on its way to the host, on the host, or on its way back.

    `ready`: the event after which the copy starts. Without one, the copy starts after the computing stream's work so
    far.
    """

    def __init__(self, owner: Offload, tensor: torch.Tensor, ready: Any, is_input: bool) -> None:
        storage = tensor.untyped_storage()
        self.owner, self.device, self.is_input, self.bytes = owner, tensor.device, is_input, storage.nbytes()
        self.tensors = 0
        """The number of this storage's tensors that autograd has not taken yet."""
        self.buffers: list[torch.Tensor] = []
        self.on_device: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        """The bytes of the storage on the device. None between release() and fetch(), and after the last take()."""
        self.event: Any = None
        """The end of the latest copy. The computing stream waits for it before it reads or releases `on_device`."""
        self.buffers = owner.buffers(self.bytes)
        owner.sent += self.bytes
        if owner.side is not None:
            owner.side.wait_event(ready or torch.cuda.current_stream().record_event())
        self._copy(to_host=True)

    def _copy(self, to_host: bool) -> None:
        assert self.on_device is not None
        with torch.cuda.stream(self.owner.side):  # on a CPU side is None
            for buffer, part in zip(self.buffers, self.on_device.split(pinned_piece(self.bytes)), strict=True):
                host = buffer[: part.numel()]
                (host if to_host else part).copy_(part if to_host else host, non_blocking=self.owner.side is not None)
            self.event = self.owner.side.record_event() if self.owner.side is not None else None

    def _wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def release(self) -> None:
        if self.on_device is not None:
            self._wait()
        self.on_device = self.event = None

    def fetch(self) -> None:
        """Start to copy back, into memory of the computing stream. The copy waits for this stream's work so far."""
        if self.on_device is not None:
            return
        self.on_device = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        self.owner.inputs_fetched += self.is_input
        if self.owner.side is not None:
            self.owner.side.wait_stream(torch.cuda.current_stream())
        self._copy(to_host=False)

    def take(self) -> torch.Tensor:
        """Return the bytes on the device, ready for the computing stream. After the last tensor has taken the bytes,
        only this tensor keeps them alive."""
        self.fetch()
        self._wait()
        flat = self.on_device
        assert flat is not None
        self.tensors -= 1
        if self.tensors <= 0:
            self.on_device = None
        return flat

    def __del__(self) -> None:
        if self.on_device is not None:
            self._wait()  # the bytes were fetched in advance and never taken
        self.owner.pool += self.buffers


class _LastInput:
    """The last layer's input, which stays on the device. If autograd reads it, the backward pass has begun."""

    def __init__(self, hidden: torch.Tensor, below: _LayerCall | None) -> None:
        self.hidden, self.below = hidden, below

    def unpack(self) -> torch.Tensor:
        if self.below is not None:
            self.below.fetch()
        return self.hidden


class _SentTensor:
    """One saved tensor of a layer: a view of a storage that was sent."""

    def __init__(self, call: _LayerCall, storage: _SentStorage, tensor: torch.Tensor) -> None:
        self.call, self.storage = call, storage
        self.dtype, self.view = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        storage.tensors += 1

    def unpack(self) -> torch.Tensor:
        """Return the tensor, and start to fetch what the layer below sent. May be called again."""
        self.call.fetch()
        tensor = self.storage.take().view(self.dtype).as_strided(*self.view)
        if self.call.below is not None:
            self.call.below.fetch()
        return tensor
