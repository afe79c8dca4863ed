"""What decoder layers keep from their forward to their backward pass.

A layer keeps one of five levels, listed from little to much; what it does not keep, it computes a second time:

    input        only its input: everything is computed twice
    attention    also attention's output: norms and matrix products are computed twice
    narrow       also the products as wide as the hidden state (q, k, v, o): gate, up, norms and activations are
                 computed twice
    wide         also gate and up: the rest is computed twice and costs next to nothing
    everything   all that the backward pass reads

The layers of one model may have different levels. Layers of a lower level come first: a layer's memory peaks while it
is recomputed, and by the time the first layers are recomputed the memory of the last ones is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("input", "attention", "narrow", "wide", "everything")


@dataclass(frozen=True)
class RecomputePlan:
    """What each layer keeps for its backward pass, and whether on the device or on the host."""

    level: str = "everything"
    """One of LEVELS, or `budget`: the compiler's choice."""
    every: int = 1
    """One layer in so many has this level; the others keep everything."""
    budget: float = 1.0
    mix: tuple[tuple[str, int], ...] = ()
    """How many layers have each level, in place of `level` and `every`. Layers that are not counted keep their
    input."""
    sent: str = ""
    """What is sent to host memory. Empty: nothing; `inputs`: layers' inputs; `kept`: also what else they keep
    except gate and up."""
    senders: int | None = None
    """How many layers send, from the first; None: all except the last one, whose tensors are needed at once."""
    tiles: int = 1

    def levels(self, layers: int) -> list[str]:
        """The level of each of so many layers, first to last."""
        if not self.mix:
            return [self.level if index % self.every == 0 else "everything" for index in range(layers)]
        counts = dict(self.mix)
        found = [level for level in LEVELS for _ in range(counts.get(level, 0))]
        return ["input"] * (layers - len(found)) + found

    def sending(self, layers: int) -> list[bool]:
        """Which of so many layers send. One that keeps everything does not, nor does the last one that could."""
        able = [index for index, level in enumerate(self.levels(layers)) if self.sent and level != "everything"]
        chosen = set(able[:-1] if self.senders is None else able[: min(self.senders, max(len(able) - 1, 0))])
        return [index in chosen for index in range(layers)]
