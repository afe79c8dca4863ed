"""The order of the techniques, one reason beside each. This dataclass is the recipe's `techniques` group."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxtune.techniques.attention import Attention
from fxtune.techniques.checkpointing import Checkpointing
from fxtune.techniques.compile import Compile
from fxtune.techniques.lora import Lora
from fxtune.techniques.precision import Precision
from fxtune.techniques.rope import Rope


@dataclass
class Pipeline:
    rope: Rope = field(default_factory=Rope)  # before the model exists: inv_freq is computed by its constructor
    attention: Attention = field(default_factory=Attention)  # likewise: layers choose their kernel when they are built
    precision: Precision = field(default_factory=Precision)  # on the built base, before adapters copy its dtype
    lora: Lora = field(default_factory=Lora)  # wraps the base's linears, so all that edits the base is done
    checkpointing: Checkpointing = field(default_factory=Checkpointing)  # wraps whole layers, adapters included
    compile: Compile = field(default_factory=Compile)  # last: traces whatever the layers have become
