"""Plans of what decoder layers keep from their forward to their backward pass.

A layer has one of five levels, and computes a second time what its level does not keep. The table shows the KB that a
layer keeps per token (Llama-3-8B, LoRA, compiled), and the policy that selects the level:

    input          8   policy=full: keeps only the layer's input; a step takes a third more time
    attention     16   selective with `save: [attention]`: also attention, two thirds of a layer's time at 64k tokens
    narrow        37   selective with `recompute: [gate_proj, up_proj]`: also the products of q, k, v and o
    wide          94   selective: also gate and up; recomputing the rest takes a few percent of the time
    everything   139   none: keeps all that the backward pass reads (110 with fused adapters)

The layers of one model may have different levels. Layers with lower levels come first: a layer's memory peaks while it
is recomputed, and when the first layers are recomputed, the memory of the last layers is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("input", "attention", "narrow", "wide", "everything")
PIECE = 1 << 26
"""Bytes of a piece of pinned memory. A smaller tensor gets a smaller piece. Without pieces torch would round each
allocation up to a power of two: the 31 inputs of 400,000 tokens would take 124 GiB and not 95."""


@dataclass(frozen=True)
class RecomputePlan:
    """Says what each layer keeps for its backward pass, and whether it keeps it on the device or on the host."""

    level: str = "everything"
    """One of LEVELS, or `budget`, with which the compiler chooses."""
    every: int = 1
    """Layers whose number is a multiple of this have `level`. Other layers keep everything."""
    budget: float = 1.0
    mix: tuple[tuple[str, int], ...] = ()
    """How many layers have each level. Layers that are not counted keep their input. If this is set, `level` and
    `every` have no effect."""
    sent: str = ""
    """The tensors that are sent to host memory. Empty: none; `inputs`: layers' inputs; `kept`: all kept tensors except
    gate and up."""
    senders: int | None = None
    """How many layers send, counted from the first. None: all except the last, whose tensors are needed at once."""
    tiles: int = 1

    def levels(self, layers: int) -> list[str]:
        """The level of each layer of a model with `layers` layers, in their order."""
        if not self.mix:
            return [self.level if index % self.every == 0 else "everything" for index in range(layers)]
        counts = dict(self.mix)
        counted = [level for level in LEVELS for _ in range(counts.get(level, 0))]
        return (["input"] * (layers - len(counted)) + counted)[:layers]  # check() refuses a mix of more layers

    def sending(self, layers: int) -> list[bool]:
        """Whether each of `layers` layers sends. A layer that keeps everything does not send. Of the other layers the
        last one does not send."""
        able = [index for index, level in enumerate(self.levels(layers)) if self.sent and level != "everything"]
        chosen = able[:-1] if self.senders is None else able[:-1][: self.senders]
        return [index in chosen for index in range(layers)]


def pinned_bytes(size: int) -> int:
    """Bytes of pinned host memory that a tensor of `size` bytes takes."""
    return -(-size // pinned_piece(size)) * pinned_piece(size) if size else 0


def pinned_piece(size: int) -> int:
    """Bytes of one piece of pinned memory for a tensor of `size` bytes."""
    return min(PIECE, 1 << (max(size, 1) - 1).bit_length())
