"""The facts from which techniques decide. `Facts` is plain frozen data, so tests of `check` and `resolve` need no
hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fxtune.distributed.parallel import Degrees
from fxtune.facts.execution import Execution, OptimizerState
from fxtune.facts.options import Techniques
from fxtune.system.machine.facts import MachineFacts


@dataclass(frozen=True)
class Facts(MachineFacts):
    """The facts of one run on one machine. Only `Pipeline.resolved()` changes an option of `techniques`."""

    model: dict[str, Any] = field(default_factory=dict)
    """The model's Hugging Face config as a plain dict (`PretrainedConfig.to_dict()`)."""
    head: str = "lm"
    """The head that the objective needs (Needs.head). Only the head `lm` has logits of a vocabulary."""
    reads_groups: bool = False
    """Whether the objective compares documents or reads their labels (Needs.reads_groups)."""
    dtype: str = "float32"
    """The dtype of the model's weights: float32, bfloat16 or float16."""
    ships_mxfp4: bool = False
    """Whether the checkpoint stores the model's experts in MXFP4."""
    adds_tokens: bool = False
    """Whether the run adds tokens to the model's vocabulary (model.add_tokens)."""
    packing: bool = False
    shares_prompts: bool = False
    """Whether a row has the prompt of a pair of answers only once (data/batches/shared_prompts.py)."""
    sequence_length: int = 0
    rows: tuple[int, ...] = ()
    """The possible lengths of a batch's rows in tokens: one with packing, else the buckets. Empty: any length."""
    micro_batch_size: int = 1
    image_features: int = 0
    """The most tokens that are image features in any row. It is 0 until the data is read."""
    images_see_both_ways: bool = False
    """Whether each token of an image sees all tokens of this image in this model."""
    reads_images: bool = False
    """Whether the model reads images beside tokens."""
    stores_images: bool = False
    """Whether steps read stored features of images and run no vision encoder (data.image_features)."""
    trains_images: bool = False
    """Whether full fine-tuning trains the parts for images, too."""
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    keeps_start: bool = False
    """Whether the run keeps a copy of the adapters from which it starts, as its reference."""
    is_frozen: bool = False
    """Whether this is a frozen model beside the trained model (Objective.frozen_model())."""
    frozen: Facts | None = None
    """The facts of the frozen model that computes each micro-batch beside the trained model. None: there is none."""
    logit_tensors: int = 0
    """The float32 tensors of a chunk of logits that the loss holds at once (Objective.logit_tensors)."""
    step_rows: int = 0
    """The rows of a step, over all ranks. 0: one micro-batch on each rank."""
    in_backward: bool = False
    """Whether each weight is updated in the backward pass. Then gradients do not all exist at the same time."""
    deterministic: bool = False
    """Whether kernels must give the same bits each time."""
    degrees: Degrees = field(default_factory=Degrees)
    """How the ranks of the run share its work."""
    sum_bytes: int = 4
    """Bytes that a replica holds for each trained number, to sum gradients over the ranks."""
    techniques: Techniques = field(default_factory=Techniques)

    @classmethod
    def of(cls, machine: MachineFacts, **known: Any) -> Facts:
        """The facts of `machine`, with the fields in `known` set."""
        return cls(**{**vars(machine), **known})

    @property
    def execution(self) -> Execution:
        """How a step is computed with all enabled techniques."""
        execution = Execution(repeats_keys=self.device != "cuda")
        for _, technique in self.techniques.enabled():
            execution = technique.describe(self, execution)
        return execution

    @property
    def text(self) -> dict[str, Any]:
        """The config of the language model inside `model`."""
        return self.model.get("text_config") or self.model

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head and the token embedding are one tensor."""
        return bool(self.text.get("tie_word_embeddings") or self.model.get("tie_word_embeddings"))

    @property
    def row_length(self) -> int:
        """The number of tokens in the longest row."""
        return max(self.rows, default=self.sequence_length)

    @property
    def tokens(self) -> int:
        """The number of tokens that one rank computes in a micro-batch of the longest rows."""
        return -(-self.micro_batch_size * self.row_length // self.degrees.context)

    @property
    def accumulates(self) -> bool:
        """Whether a rank adds up the gradients of several micro-batches in a step."""
        return self.step_rows > self.micro_batch_size * self.degrees.data_ranks

    @property
    def compute_dtype(self) -> str:
        """The dtype of matmuls and attention: autocast's dtype, or without autocast the weights' dtype."""
        precision = self.techniques.precision
        return precision.autocast.value if precision.casts else self.dtype
