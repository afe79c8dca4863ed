"""From a hub id, a folder or an architecture to a model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional


class Init(str, Enum):
    pretrained = "pretrained"
    random = "random"


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class ModelConfig:
    path: Optional[str] = "builtin:tiny"
    """A folder, a hub id, or `builtin:tiny`, the small base model that ships with fxtune."""
    revision: Optional[str] = None
    """Commit, tag or branch of a hub model. A full commit hash is the only one that cannot change under you."""
    dtype: DType = DType.auto
    """dtype of the weights. `auto`: bfloat16 on a GPU that has it, float32 on a CPU."""
    init: Init = Init.pretrained
    """`random`: only the config is read from `path` (or `architecture`), the weights are drawn from run.seed."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """With init=random: a Hugging Face config written in the recipe (`model_type` and its sizes), laid over that of `path`."""
    adapter: Optional[str] = None
    """Start from this PEFT adapter's weights (a folder or a hub id). Not a resume: see run.resume."""
    tokenizer: Optional[str] = None
    """Where the tokenizer comes from, when not from `path`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Needs a revision that is a full commit hash."""
