"""What the proof of an export must know of packed experts: plain transformers and plain peft have none."""

from __future__ import annotations

from typing import Any


class PackedExperts:
    """The experts of a layer in fewer bits than the model's dtype."""

    stored_as: str
    """fp8, mxfp4, nf4/LIBRARY or int8/LIBRARY."""

    def run_grouped(self, outermost: Any) -> None:
        """Let peft's `outermost` wrapper around these experts run them and their adapters: peft itself cannot add an
        adapter to codes."""
        raise NotImplementedError
