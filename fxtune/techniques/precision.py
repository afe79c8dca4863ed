"""Autocast and TF32: the precision that matmuls run in, whatever dtype the weights have.

autocast=bfloat16 runs matmuls in bfloat16 and leaves norms, softmax and the loss in float32. Over float32 weights it is
mixed-precision training; over a frozen bfloat16 base it moves the float32 adapters' matmuls onto the fast units. No loss
scaling is needed: bfloat16 has float32's range. TF32 keeps float32 storage and rounds matmul inputs to 10 bits of mantissa
on the card: several times faster, and off in torch unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from fxtune.technique import Evidence, Technique
from fxtune.world import Facts, World

AMPERE = (8, 0)


class Autocast(str, Enum):
    none = "none"
    bfloat16 = "bfloat16"


@dataclass
class Precision(Technique):
    enabled: bool = True
    autocast: Autocast = Autocast.none
    """Run matmuls in this dtype while the weights keep theirs."""
    tf32: bool = True
    """Let float32 matmuls use TF32 on cards that have it (Ampere and newer). No effect, and none claimed, elsewhere."""

    def check(self, facts: Facts) -> Iterator[str]:
        if facts.device == "cuda" and (facts.capability or AMPERE) < AMPERE:
            card = f"{facts.device_name} (compute capability {'.'.join(map(str, facts.capability or ()))})"
            if self.autocast is Autocast.bfloat16:
                yield f"autocast: {card} has no bfloat16 units. Use none, with model.dtype=float32."
            if facts.dtype == "bfloat16":
                yield f"autocast: {card} has no bfloat16 units for the weights either. Set model.dtype=float32."
        if self.autocast is Autocast.bfloat16 and facts.dtype == "float16":
            yield ("autocast: bfloat16 over float16 weights loses the range of one and the precision of the other. Use none, "
                   "or another model.dtype.")

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context that a forward pass (not its backward) runs in."""
        if not self.enabled or self.autocast is Autocast.none:
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        # Not on a CPU, where the same switch lets oneDNN round inputs in ways that nobody asked for.
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        device = next(model.parameters()).device
        with self.context(device):
            ones = torch.ones(16, 16, device=device)
            seen = (ones @ ones).dtype
        wanted = torch.float32 if self.autocast is Autocast.none else torch.bfloat16
        yield Evidence("precision", f"autocast {self.autocast.value}",
                       f"a matmul of float32 inputs gives {str(seen).removeprefix('torch.')}", seen is wanted)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE:
            setting = torch.get_float32_matmul_precision()
            yield Evidence("precision", f"TF32 {'on' if self.tf32 else 'off'}", f"float32 matmul precision is {setting!r}",
                           setting == ("high" if self.tf32 else "highest"))
