"""A model that a run trains, evaluates or saves: its module, and the facts about the whole model.

One part finds a fact while the model is read, changed or divided, and another part needs it later: the loss needs the
routers, an export needs the commit of the base, a proof needs what was to be quantized. Such a fact is a field here,
with a type and an explanation. It is never an attribute of another library's module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fxtune.distributed.sharding import Sharding
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.probe import Answer
from fxtune.models.routers import Routers

Result = TypeVar("Result")


@dataclass
class AdapterTargets:
    """The modules and tensors that get an adapter, by their names in the model without adapters."""

    modules: list[str] = field(default_factory=list)
    """Modules that get an adapter."""
    experts: list[str] = field(default_factory=list)
    """Tensors of experts that get an adapter."""
    left: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Linears and tensors of experts that get no adapter, by reason."""
    taken: frozenset[str] = frozenset()
    """Names among the target modules that peft converts to tensors of experts."""

    def describe(self) -> str:
        """How many modules of each name have an adapter, and for each reason how many are left out."""
        left = "".join(f"; left out ({why}): {kinds(paths)}" for why, paths in self.left.items())
        return f"{kinds([*self.modules, *self.experts])}{left}"

    @property
    def tensors(self) -> list[str]:
        """All tensors of experts, with an adapter or without."""
        return [*self.experts, *(path for paths in self.left.values() for path in paths if ".experts." in path)]


def kinds(paths: Iterable[str]) -> str:
    """How many modules of each name there are among `paths`, for messages."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(path.split(".")[-1] for path in paths).items())


_TITLES = {"attention": "attentions' projections", "mlp": "whole MLPs", "linear": "single linears"}


@dataclass
class Fusion:
    """Which modules with adapters run fused, and why others do not."""

    operators: Counter[str] = field(default_factory=Counter)
    """Operators of a forward pass by kind: `mlp`, `attention`, `linear`."""
    left: Counter[str] = field(default_factory=Counter)
    """How many adapted modules run as in peft, by reason."""
    experts: bool = False
    """Whether some operators belong to experts of a mixture. An expert runs only if a token is routed to it."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user about modules that are named like a fused group but compute something else."""

    def describe(self) -> str:
        parts = ", ".join(f"{self.operators[name]} {title}" for name, title in _TITLES.items() if self.operators[name])
        left = "".join(f"; {count} left to peft: {why}" for why, count in self.left.items())
        return f"{parts or 'none'}{left}"

    def note(self, text: str) -> None:
        if (line := f"{text}, so these linears run one by one") not in self.notes:
            self.notes.append(line)


@dataclass
class Quantization:
    """What was quantized. A proof later compares the model with this."""

    linears: int
    """How many linears were quantized."""
    before: int
    """Bytes of the linears and experts before quantization."""
    after: int
    """Bytes of the same weights after quantization."""
    error: float
    """|dequantized - weight| / |weight| of the first linear."""
    share: float
    """The share of the model's weights that were quantized."""
    ends: list[str]
    """A line about the embeddings and about the head, if they were quantized."""
    experts: int
    """Layers whose experts were quantized."""
    experts_as: str
    """How those experts are stored."""
    experts_error: float
    """The largest error of an expert that was measured."""
    shipped: str
    """How the checkpoint's experts in MXFP4 were taken over; empty: fxtune quantized the experts itself."""


class HostCopies(Protocol):
    """The counters that the proof of offloading reads (techniques/checkpointing/offload.py)."""

    inputs_sent: int
    inputs_fetched: int
    sent: int
    min_bytes: int


class FirstPass(NamedTuple):
    """A forward pass with gradients and dropout over the first micro-batch of a run."""

    run: Callable[[], Any]
    rows: int
    length: int


@dataclass
class PreparedModel:
    module: Any
    """The Hugging Face model, or the PeftModel around it. Techniques replace it."""
    base_revision: str | None = None
    """The commit of a base from the hub."""
    trust_remote_code: bool = False
    """Whether code of the base's author may run."""
    config_edited: bool = True
    """Whether the config differs from the base's config.json. True if no base was read."""
    grown_from: int | None = None
    """How many tokens the base embedded before model.add_tokens; None if its embedding tables have not grown."""
    ships_mxfp4: bool = False
    """Whether the checkpoint stores its experts in MXFP4."""
    mtp: dict[str, Path] = field(default_factory=dict)
    """The tensors for multi-token prediction that an export of the whole model copies; see mtp.py."""
    added_ends: list[int] = field(default_factory=list)
    """End tokens of the data that training adds to the end tokens in the base's generation config."""
    routers: Routers | None = None
    """The observed routers of a mixture; None if fxtune knows no router of the model."""
    quantization: Quantization | None = None
    """What techniques.quantize changed."""
    targets: AdapterTargets | None = None
    """What techniques.lora adapts."""
    base_answer: Answer | None = None
    """How the base answered before it got adapters; None if the base had no weights when adapters were added."""
    adapter_start: str = ""
    """The adapter whose weights training starts from (model.adapter); empty: new adapters."""
    fusion: Fusion | None = None
    """Which adapters run fused; None: all run as in peft."""
    gemm: str = ""
    """The GEMM backend of the fused loss's head and of fused adapters, if it is not cuBLAS."""
    offload: HostCopies | None = None
    """The object that sends layers' tensors to host memory and fetches them."""
    reads_sizes_on_host: bool = False
    """Whether the vision encoder reads the sizes of images on the host (techniques/attention/vision_encoder.py)."""
    stored_features: StoredFeatures | None = None
    """What gives the model stored features of images; None: the vision encoder runs in each step."""
    first_pass: FirstPass | None = None
    """The pass with which proofs try compiled code, so that the first step need not compile it. None: they try it with
    a small row, because no step follows, or the pass does not fit in memory."""
    sharding: Sharding | None = None
    """The object that controls weights divided over ranks; None: each rank holds whole weights."""

    def encoder_on_device(self) -> AbstractContextManager[None]:
        """A context with the vision encoder on the device of the decoder, also if its features are stored."""
        return self.stored_features.encoder_on_device() if self.stored_features else nullcontext()

    def with_head(self, work: Callable[[], Result]) -> Result:
        """The result of work(), which calls the decoder or the head directly instead of the module; see
        Sharding.with_head()."""
        return work() if self.sharding is None else self.sharding.with_head(work)
