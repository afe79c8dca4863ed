"""What layers keep for their backward pass waits in pinned host memory until then.

A checkpointed layer keeps its input: rows x length x hidden_size numbers, 512 MiB a layer for a row of 65,536 tokens of a
Llama-3-8B in bfloat16, 16 GiB for its 32 layers. One such copy takes 10-20 ms over PCIe 5, and the layer some 100 ms, so it
hides: each input goes out on a side stream while its own layer computes, and comes back while the layer above it is in its
backward pass (Unsloth's and torchtune's designs, and ALST's, arXiv 2506.13996).

With `kept` so does what a compiled layer keeps besides (q, k, v, attention's output and sums: 29 KB a token of that model, 40 ms
a layer of such a row): it goes out while the next layer computes, and in the backward pass no attention and only the MLP's
first product is computed again. What is as wide as the MLP stays on the device: it travels longer than it takes to compute.

Autograd's saved-tensor hooks do the exchange, around each layer's call and so outside of what torch.compile has made of its
`forward`. Whole storages travel, once each, and a tensor comes back with its strides as a view of its storage. What autograd
stores in place of a tensor is a `_Ticket`; the host memory goes back to the pool when autograd has dropped a layer's tickets, so
a forward pass without a backward one loses nothing.

Order is kept by events between two streams; the host never waits. Device memory is dropped only after the computing stream
has been told to wait for its copy, so the allocator needs no `record_stream` and reuses it at once: the share of two layers is on
the device at any time, whatever the host's lead. The last layer's stays, as it is wanted first.

Pinned memory comes in powers of two, so it is taken in pieces of PIECE bytes: 31 inputs of 400,000 tokens are 95 GiB, not 124.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.errors import MemoryShortError
from fxtune.system.units import GIB

PIECE = 1 << 26
"""Bytes of a piece of host memory; less where a tensor is smaller."""
LEAST = 1 << 20
"""Bytes below which a tensor stays where it is."""


def pinned(size: int) -> int:
    """Bytes of host memory that `size` bytes take."""
    return -(-size // _piece(size)) * _piece(size) if size else 0


def _piece(size: int) -> int:
    return min(PIECE, 1 << (max(size, 1) - 1).bit_length())


class Offload:
    """Sends what `layers` keep, but for the last one's, and brings it back. On a CPU it copies in place of sending.

    `kept`: besides the layers' inputs also what else autograd keeps of their calls, unless it is smaller than `least` bytes in
    all, or has one of the widths in `staying`, in numbers a token.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        device: torch.device,
        kept: bool = False,
        staying: frozenset[int] = frozenset(),
        least: int = LEAST,
    ) -> None:
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.kept, self.staying, self.least = kept, staying, least
        self.pool: list[torch.Tensor] = []
        """Free pieces of host memory, flat and of bytes, reused from step to step."""
        self.pinned = 0
        """Bytes of all pieces, free or not."""
        self.stored = 0
        """Layers' inputs sent to the host since this was made."""
        self.fetched = 0
        """Inputs brought back."""
        self.sent = 0
        """Bytes sent to the host since this was made."""
        self.last = len(layers) - 1
        self._at: _Layer | None = None
        """The layer whose forward pass runs."""
        self._under_way: list[_Load] = []
        """Loads of this forward pass that are on the device still, the lowest first."""
        self._open: list[Any] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, index), always_call=True)

    def _enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if index == 0:
            self._under_way = []
        below = self._under_way[-1] if self._under_way else None
        # A layer's input has gone out while that layer computed, and from here on this stream is behind its copy. What it keeps
        # besides was there only when it had computed, and has the next layer's time.
        for load in self._under_way:
            load.let_go(whole=load is not below)
        self._under_way = self._under_way[-1:]
        hidden = args[0] if args else kwargs["hidden_states"]
        self._at = _Layer(self, hidden, (args[1:], kwargs), layer, below, index == self.last)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._at.pack, _unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _leave(self, index: int, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__()
        if self._at is not None:
            self._under_way += [self._at.load] if self._at.load is not None else []
            self._at.hidden = None  # autograd may keep the function that packed
        self._at = None
        if index == self.last:
            for load in self._under_way:
                load.let_go()
            self._under_way = []  # from here on they are autograd's alone

    def buffers(self, size: int) -> list[torch.Tensor]:
        """Free pieces that hold `size` bytes together. Raises MemoryShortError where the host has no more memory to pin."""
        each = _piece(size)
        taken: list[torch.Tensor] = []
        try:
            for _ in range(-(-size // each)):
                taken.append(self._buffer(each))
        except MemoryShortError:
            self.pool += taken  # for who tries again with less
            raise
        return taken

    def _buffer(self, size: int) -> torch.Tensor:
        fitting = [index for index, free in enumerate(self.pool) if free.numel() >= size]
        if fitting:
            return self.pool.pop(min(fitting, key=lambda index: self.pool[index].numel()))
        if self.pool:  # all are too small, and one makes room
            self.pinned -= self.pool.pop().numel()
        try:
            made = torch.empty(size, dtype=torch.uint8, pin_memory=self.side is not None)
        except RuntimeError as error:
            raise MemoryShortError(
                f"techniques.checkpointing.offload: the host has no more memory to pin: {self.pinned / GIB:.1f} GiB are taken, "
                f"and {size / GIB:.2g} more were refused ({str(error).splitlines()[0]}). Lower offload_layers there, or set "
                "offload_what=inputs or offload=false; or shorten data.sequence_length. A limit may be in the way: `ulimit -l`, "
                "or the container's."
            ) from error
        self.pinned += size
        return made


def _unpack(packed: Any) -> torch.Tensor:
    return packed.take() if isinstance(packed, (_Ticket, _Stay)) else packed


class _Layer:
    """One call of a layer: which of its saved tensors travel."""

    def __init__(
        self, owner: Offload, hidden: torch.Tensor, others: Any, layer: nn.Module, below: _Load | None, last: bool
    ) -> None:
        self.owner, self.below, self.last = owner, below, last
        self.hidden: torch.Tensor | None = hidden
        self.load: _Load | None = None
        self.tokens, self.device = hidden.numel() // hidden.shape[-1], hidden.device
        self.fixed = (
            _addresses([*layer.parameters(), *layer.buffers(), *_tensors(others)])
            if owner.kept and not last
            else set()
        )
        # Before the layer's own work, so that the copy of its input overlaps it.
        self.ready = torch.cuda.current_stream().record_event() if owner.side is not None else None

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd stores in place of `tensor`."""
        tensor = (
            tensor.detach()
        )  # an operator whose own result is kept as it is would be kept by it in turn, in a ring
        if self.hidden is None:
            return tensor
        entry = tensor.untyped_storage().data_ptr() == self.hidden.untyped_storage().data_ptr()
        if self.last:
            return _Stay(tensor, self.below) if entry else tensor
        if not entry and not self._goes(tensor):
            return tensor
        if self.load is None:
            self.load = _Load(self.owner, self.below)
        return self.load.ticket(tensor, self.ready if entry else None, entry)

    def _goes(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        # A tensor's own width, too: gate and up lie in rows with room for an adapter's share behind them.
        widths = {storage.nbytes() // tensor.element_size() // self.tokens, tensor.numel() // self.tokens}
        return (
            self.owner.kept
            and tensor.device == self.device
            and storage.nbytes() >= self.owner.least
            and not widths & self.owner.staying
            and storage.data_ptr() not in self.fixed
            and (self.tokens in tensor.shape or math.prod(tensor.shape[:2]) == self.tokens)
        )


class _Load:
    """What one layer sends: storages on their way to the host, there, or on their way back."""

    def __init__(self, owner: Offload, below: _Load | None) -> None:
        self.owner, self.below = owner, below
        """`below`: the load of the layer underneath, which is wanted next in the backward pass."""
        self.parcels: dict[int, _Parcel] = {}

    def ticket(self, tensor: torch.Tensor, ready: Any, entry: bool) -> _Ticket:
        """A claim on `tensor`, whose storage starts on its way if no other tensor sent it before.

        `ready`: the event after which it may; None: what this stream has been given up to now. `entry`: it is the input.
        """
        at = tensor.untyped_storage().data_ptr()
        if at not in self.parcels:
            self.parcels[at] = _Parcel(self.owner, tensor.untyped_storage(), tensor.device, ready, entry)
            self.owner.stored += entry
        return _Ticket(self, self.parcels[at], tensor)

    def let_go(self, whole: bool = True) -> None:
        """Drop what is on the device (only the input unless `whole`), once this stream is behind its copy."""
        for parcel in self.parcels.values():
            if whole or parcel.entry:
                parcel.let_go()

    def fetch(self) -> None:
        """Start bringing back what was not taken yet."""
        for parcel in self.parcels.values():
            if parcel.tickets > 0:
                parcel.fetch()


class _Parcel:
    """One storage."""

    def __init__(
        self, owner: Offload, storage: torch.UntypedStorage, device: torch.device, ready: Any, entry: bool
    ) -> None:
        self.owner, self.device, self.entry, self.bytes = owner, device, entry, storage.nbytes()
        self.tickets = 0
        """How many tensors are still to be taken from it."""
        self.buffers: list[torch.Tensor] = []
        self.here: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        """Its bytes on the device, until its copy is done; later, those that are being brought back."""
        self.event: Any = None
        """What to wait for on the computing stream before `here` is read or dropped."""
        self.buffers = owner.buffers(self.bytes)
        owner.sent += self.bytes
        if owner.side is not None:
            owner.side.wait_event(ready or torch.cuda.current_stream().record_event())
        self._copy(out=True)

    def _copy(self, out: bool) -> None:
        assert self.here is not None
        with torch.cuda.stream(self.owner.side):  # of None: no other stream
            for buffer, part in zip(self.buffers, self.here.split(_piece(self.bytes)), strict=True):
                there = buffer[: part.numel()]
                (there if out else part).copy_(part if out else there, non_blocking=self.owner.side is not None)
            self.event = self.owner.side.record_event() if self.owner.side is not None else None

    def let_go(self) -> None:
        if self.here is not None and self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.here = self.event = None

    def fetch(self) -> None:
        """Its memory is of the computing stream, whose work so far the copies wait for."""
        if self.here is not None:
            return
        self.here = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        self.owner.fetched += self.entry
        if self.owner.side is not None:
            self.owner.side.wait_stream(torch.cuda.current_stream())
        self._copy(out=False)

    def taken(self) -> None:
        """A ticket was redeemed; the last one's tensor keeps the memory alive from now on."""
        self.tickets -= 1
        if self.tickets <= 0:
            self.here = None

    def __del__(self) -> None:
        if self.here is not None and self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)  # fetched in advance and never asked for
        self.owner.pool += self.buffers


class _Stay:
    """The last layer's input. Asking for it is the sign that the backward pass has begun."""

    def __init__(self, hidden: torch.Tensor, below: _Load | None) -> None:
        self.hidden, self.below = hidden, below

    def take(self) -> torch.Tensor:
        if self.below is not None:
            self.below.fetch()
        return self.hidden


class _Ticket:
    """One saved tensor of a layer: a view of a storage that travels."""

    def __init__(self, load: _Load, parcel: _Parcel, tensor: torch.Tensor) -> None:
        self.load, self.parcel = load, parcel
        self.dtype, self.view = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        parcel.tickets += 1

    def take(self) -> torch.Tensor:
        """The tensor, for the computing stream; and the load below starts on its way. May be asked for again."""
        self.load.fetch()
        self.parcel.fetch()
        if self.parcel.event is not None:
            torch.cuda.current_stream().wait_event(self.parcel.event)
        flat = self.parcel.here
        assert flat is not None
        tensor = flat.view(self.dtype).as_strided(*self.view)
        self.parcel.taken()
        if self.load.below is not None:
            self.load.below.fetch()
        return tensor


def _addresses(tensors: list[Any]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)}


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in arguments of a call."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in _tensors(item)]
