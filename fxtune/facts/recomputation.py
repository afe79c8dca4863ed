"""What decoder layers keep from their forward to their backward pass.

A layer keeps one of five levels, here with KB a token (Llama-3-8B, LoRA, compiled) and the policy that selects it.
Everything else it computes a second time:

    input          8   policy=full: only its input, a third more time
    attention     16   selective with `save: [attention]`, which is two thirds of a layer's time at 64k tokens
    narrow        37   selective with `recompute: [gate_proj, up_proj]`: the products as wide as the hidden state, too
    wide          94   selective: gate and up, too; the rest costs a few percent of the time
    everything   139   none: all that the backward pass reads (110 with fused adapters)

The layers of one model may have different levels. Layers of a lower level come first: a layer's memory peaks while it
is recomputed, and by the time the first layers are recomputed the memory of the last ones is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("input", "attention", "narrow", "wide", "everything")
PIECE = 1 << 26
"""Bytes of a piece of pinned memory; a smaller tensor takes a smaller piece. torch rounds pinned allocations up to
powers of two, which would take 124 GiB and not 95 for the 31 inputs of 400,000 tokens."""


@dataclass(frozen=True)
class RecomputePlan:
    """What each layer keeps for its backward pass, and whether on the device or on the host."""

    level: str = "everything"
    """One of LEVELS, or `budget`: the compiler's choice."""
    every: int = 1
    """One of this many layers has `level`; the others keep everything."""
    budget: float = 1.0
    mix: tuple[tuple[str, int], ...] = ()
    """How many layers have each level, in place of `level` and `every`. The others keep their input."""
    sent: str = ""
    """The tensors sent to host memory: none; layers' `inputs`; or `kept`: all kept tensors except gate and up."""
    senders: int | None = None
    """How many layers send, from the first; None: all except the last one, whose tensors are needed at once."""
    tiles: int = 1

    def levels(self, layers: int) -> list[str]:
        """The level of each of `layers` layers, first to last."""
        if not self.mix:
            return [self.level if index % self.every == 0 else "everything" for index in range(layers)]
        counts = dict(self.mix)
        counted = [level for level in LEVELS for _ in range(counts.get(level, 0))]
        return (["input"] * (layers - len(counted)) + counted)[:layers]  # check() refuses a mix of more layers

    def sending(self, layers: int) -> list[bool]:
        """Which of `layers` layers send. A layer that keeps everything does not send, nor does the last layer that
        could."""
        able = [index for index, level in enumerate(self.levels(layers)) if self.sent and level != "everything"]
        chosen = able[:-1] if self.senders is None else able[:-1][: self.senders]
        return [index in chosen for index in range(layers)]


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that `size` bytes take."""
    return -(-size // pinned_piece(size)) * pinned_piece(size) if size else 0


def pinned_piece(size: int) -> int:
    """Bytes of the pieces of pinned memory for a tensor of `size` bytes."""
    return min(PIECE, 1 << (max(size, 1) - 1).bit_length())
