"""The options of all techniques: the `techniques` section of a recipe, key by key.

A technique inherits its options: `class Lora(LoraOptions, Technique)`. The options are in a room below the techniques,
so that each technique can read the options of every other technique, in `Facts.techniques`, without importing it. The
files of the techniques (fxtune/techniques) say what the options do, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Optional

from omegaconf import BooleanNode

from fxtune.facts.execution import Execution
from fxtune.facts.recomputation import RecomputePlan

AUTO = "auto"
ALL_LINEAR = "all-linear"


class Switch(str, Enum):
    auto = "auto"
    on = "on"
    off = "off"


@dataclass
class Options:
    enabled: bool = False
    """Whether to use this technique. Its other options have no effect without it."""

    def is_auto(self, part: str) -> bool:
        """Whether the recipe leaves `part`, an option or a kernel of this technique, to fxtune."""
        return getattr(self, part, None) is Switch.auto

    def switch_off(self, part: str) -> None:
        """Turn off `part`, which is_auto() has named."""
        setattr(self, part, Switch.off)

    def describe(self, facts: Any, execution: Execution) -> Execution:
        """`execution`, as the techniques before this one make it, with what this one changes under `facts` (Facts).
        Valid once `auto` is decided."""
        return execution


@dataclass
class AutoOptions(Options):
    """The options of a technique that a recipe may leave to fxtune: `enabled=auto`."""

    enabled: Any = field(default=False, metadata={"kind": bool, "words": (AUTO,)})
    """Whether to use this technique. `auto`: if it can act here; if not, a line says why. With `true` that is an
    error. Its other options have no effect without it."""

    def __post_init__(self) -> None:
        if self.enabled != AUTO:  # as OmegaConf reads a bool: true, "true", 1, yes, on
            self.enabled = BooleanNode().validate_and_convert(self.enabled)

    @property
    def may_stay_off(self) -> bool:
        """Whether `enabled` is `auto` and no other option is set, so that it is no error if this cannot act."""
        default = type(self)()
        names = [entry.name for entry in fields(self)]
        return self.enabled == AUTO and all(getattr(self, name) in (getattr(default, name), AUTO) for name in names)


class RopeType(str, Enum):
    yarn = "yarn"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"


@dataclass
class RopeOptions(Options):
    type: RopeType = RopeType.yarn
    """How the frequencies are scaled, as transformers names it."""
    factor: float = field(default=1.0, metadata={"min": 1})
    """The new context over the original one."""
    original_max_position_embeddings: Optional[int] = field(default=None, metadata={"min": 1})
    """The context that the model was trained on; null: max_position_embeddings of the model's config, or the original
    length of the same scaling if the model already has it."""
    parameters: dict[str, float] = field(default_factory=dict, metadata={"above": 0})
    """Parameters of the type, as transformers names them, in place of the usual ones. yarn: beta_fast (32; pairs with
    more rotations over the original context keep their frequency), beta_slow (1; pairs with fewer are slowed down by
    `factor`), attention_factor (0.1 ln(factor) + 1; the scale of queries and of keys, so its square scales the
    logits). llama3: high_freq_factor (4), low_freq_factor (1), in the same order."""


@dataclass
class AttentionOptions(Options):
    enabled: bool = True
    backend: str = "auto"
    """auto | flash4 | flash3 | flash2 | cudnn | sdpa | flex | eager | hub:ORG/KERNEL@COMMIT. `auto`: the fastest that
    is correct here; its choice and the reasons are printed."""
    trust_remote_code: bool = False
    """hub:... only: run compiled code of that kernel's author. Needs a full commit hash."""


class Autocast(str, Enum):
    none = "none"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class PrecisionOptions(Options):
    enabled: bool = True
    autocast: Autocast = Autocast.none
    """Run matmuls in this dtype while the weights keep theirs. float16 comes with loss scaling."""
    tf32: Optional[bool] = None
    """Let float32 matmuls round their inputs to TF32. Null: on if the card has it (Ampere and newer)."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new shape of a convolution. Other layers are not affected."""

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return self.enabled and self.autocast is not Autocast.none


class LigerKernel(str, Enum):
    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    rope = "rope"
    swiglu = "swiglu"
    geglu = "geglu"
    fused_linear_cross_entropy = "fused_linear_cross_entropy"


@dataclass
class LigerOptions(AutoOptions):
    kernels: Any = field(default=AUTO, metadata={"kind": list[LigerKernel], "words": (AUTO,)})
    """The kernels to run; each must act. `geglu` is for the tanh form of GELU; `rope` is fxtune's own and runs on any
    device; `fused_linear_cross_entropy` computes head and loss without holding all logits. `auto`: with a GPU the
    kernels of operations that neither torch.compile nor techniques.lora fuses, and the fused loss if a micro-batch's
    logits exceed 64 MiB."""

    def runs(self, kernel: str) -> bool:
        """Whether this kernel runs; false while `auto` is undecided."""
        return bool(self.enabled) and self.kernels != AUTO and kernel in self.kernels

    def is_auto(self, part: str) -> bool:
        return self.kernels == AUTO

    def switch_off(self, part: str) -> None:
        self.kernels = [kernel for kernel in self.kernels if kernel != part]


@dataclass
class ApexOptions(Options):
    """Apex's norms have no options."""


class WeightFormat(str, Enum):
    nf4 = "nf4"
    int8 = "int8"
    fp8 = "fp8"
    mxfp4 = "mxfp4"


class ComputeDtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class QuantizeOptions(Options):
    type: WeightFormat = WeightFormat.nf4
    """`nf4`: 4 bits a weight, in blocks of 64. `int8`: 8 bits, one scale for each output row, a tenth of nf4's error.
    `fp8`: products in 8-bit floating point, the fastest. `mxfp4`: the experts of a mixture in 4 bits, in blocks of 32,
    as gpt-oss ships them; linears stay in model.dtype. bitsandbytes stores nf4 and int8."""
    compute_dtype: ComputeDtype = ComputeDtype.auto
    """The dtype of dequantized weights and their matmuls. `auto`: the dtype of the model's other matmuls."""
    skip: list[str] = field(default_factory=list)
    """Linears to leave unquantized, such as `down_proj` or `layers.0.mlp.up_proj`. The head has its own option."""
    head: bool = False
    """fp8: also compute the output head's product in fp8. Its rounding shows in the reported loss."""
    embeddings: bool = False
    """fp8: store token embeddings in fp8 and dequantize the rows that are read: half of their memory."""
    experts: Switch = Switch.auto
    """Also the experts of a mixture. `auto`: on where their architecture and sizes allow it; otherwise they stay in
    model.dtype, and a line says why. Experts that a checkpoint ships in MXFP4 stay so, except in fp8."""
    keeps_transposes = True
    """fp8: whether each weight is stored with its transpose. Technique.resolve() decides it by the free memory."""


class WeightGradient(str, Enum):
    float8 = "float8"
    bfloat16 = "bfloat16"


@dataclass
class Float8Options(Options):
    weight_gradient: WeightGradient = WeightGradient.float8
    """The dtype of the products that sum the gradients of weights over tokens. `bfloat16`: as without float8,
    and slower: the gain of float8 is then two thirds, and each layer keeps its inputs in 16 bits."""
    skip: list[str] = field(default_factory=list)
    """Linears whose products stay in 16 bits, such as `down_proj` or `layers.0.mlp.up_proj`."""


class AdapterInit(str, Enum):
    default = "default"
    gaussian = "gaussian"
    pissa = "pissa"
    olora = "olora"


@dataclass
class LoraOptions(Options):
    r: int = field(default=16, metadata={"min": 1})
    """Rank: the inner width of an adapter."""
    alpha: float = field(default=32.0, metadata={"above": 0})
    """An adapter's output is multiplied by alpha / r."""
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """Dropout of an adapter's input."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the linears to adapt (the end of the full name is enough), regular expressions for their full names, or
    `all-linear`: all linears of the decoder but routers."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules that get no adapters, nor do modules inside them: names or regular expressions."""
    vision: bool = False
    """Adapt the linears of the vision encoder, too."""
    projector: bool = False
    """Adapt the linears between the vision encoder and the decoder, too."""
    layers_to_transform: list[int] = field(default_factory=list, metadata={"min": 0})
    """Numbers of the decoder layers to adapt, from 0; empty: all."""
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"min": 1})
    """Another r for some modules, by name or by a regular expression for the end of the full name."""
    alpha_pattern: dict[str, float] = field(default_factory=dict, metadata={"above": 0})
    """Another alpha for some modules, named as in rank_pattern."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter."""
    train_tokens: Any = field(default=None, metadata={"kind": list[str], "words": (AUTO,), "nullable": True})
    """Tokens whose rows of the embedding and the head are trained and saved with the adapter. `auto`: the special
    tokens of the data whose rows the base has never trained (they are zero, or the same as others); with
    model.adapter, the tokens of that adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) in place of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Decompose weights into magnitude and direction (arXiv 2402.09353)."""
    init: AdapterInit = AdapterInit.default
    """`default`: A uniform, B zero; `gaussian`: A normal, B zero; `pissa`, `olora`: from the weights themselves."""
    fused: Switch = Switch.auto
    """Run adapters of q, k and v, and whole MLPs, as one operator each. `auto`: on a GPU, where possible (on a CPU a
    step takes up to a quarter longer with it). Linears that cannot be fused run as in peft.
    """

    @property
    def factored(self) -> bool:
        """Whether the adapters start from a factorization of the weights, which are changed by it."""
        return self.init in (AdapterInit.pissa, AdapterInit.olora)


@dataclass
class RouterOptions(Options):
    enabled: bool = True
    """Add the auxiliary loss of a mixture of experts. Nothing happens where the model has no such loss."""
    aux_loss_coef: Optional[float] = field(default=None, metadata={"min": 0})
    """The factor of the auxiliary loss; 0: none. null: router_aux_loss_coef of the model's config if its
    output_router_logits is true, else 0."""


@dataclass
class PluginOptions(Options):
    enabled: bool = True
    """Use the techniques that `use` names."""
    use: dict[str, Any] = field(default_factory=dict)
    """The techniques of plugins by name, each with its options: {NAME: {option: value}}, or {NAME: {}}."""


class Policy(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"
    mix = "mix"
    budget = "budget"
    auto = "auto"


class Offloaded(str, Enum):
    none = "none"
    inputs = "inputs"
    kept = "kept"


@dataclass
class CheckpointingOptions(AutoOptions):
    policy: Policy = Policy.full
    """What layers keep for the backward pass. `none`: everything; `selective`: what `save` and `recompute` say;
    `full`: their input; `mix`: what `mix` says of each; `budget`: what the compiler chooses; `auto`: the fastest of
    these that fits, with `offload` and `mlp_tiles` where it needs them."""
    every: int = field(default=1, metadata={"min": 1})
    """Apply the policy to one decoder layer in this many: 1 is all of them, 2 every other one. For the policies
    selective and full."""
    save: list[str] = field(default_factory=list)
    """policy=selective: whose results are kept: operators (`aten.mm`), groups (`attention`, `matmuls`), linears of a
    layer (`q_proj`). Empty: both groups. A linear's name takes precedence over its operator's, and that over its
    group's."""
    recompute: list[str] = field(default_factory=list)
    """policy=selective: exceptions from `save`, with the same names: [gate_proj, up_proj] keeps the other
    `matmuls`."""
    mix: dict[str, int] = field(default_factory=dict, metadata={"min": 0, "max": 10_000})
    """policy=mix: how many layers keep `everything`, the `wide` products (gate, up) and all below, the `narrow`
    products (q, k, v, o) and all below, `attention`, or their `input`: {narrow: 12, wide: 20}. Layers that are not
    counted keep their input. Layers that keep little come first."""
    budget: float = field(default=0.5, metadata={"min": 0, "max": 1})
    """policy=budget: the share that the compiler may keep of what it would keep. 0: layers' inputs only; 1: all of
    it."""
    offload: Offloaded = Offloaded.none
    """What layers hold in pinned host memory from forward to backward, copied while layers compute (needs a GPU).
    `inputs`: layers' inputs; `kept`: also what else they keep, except for products wider than the hidden state
    (compiled). The last layer's tensors stay on the device, and so do tensors for which the host has no room."""
    mlp_tiles: int = field(default=1, metadata={"min": 1, "max": 1024})
    """Run each MLP in this many tiles of the sequence and recompute them one by one; 1: no tiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.senders: int | None = None
        """How many layers send to host memory, from the first; None: all except the last one. Technique.resolve()
        decides it by the host's memory."""

    @property
    def plan(self) -> RecomputePlan:
        """What layers keep with these options, whether or not they are enabled."""
        levels = {Policy.none: "everything", Policy.budget: "budget", Policy.selective: "wide"}
        level = levels.get(self.policy, "input")
        if self.policy is Policy.selective and self.save == ["attention"]:
            level = "attention"
        elif self.policy is Policy.selective and self.recompute:
            level = "narrow"
        return RecomputePlan(
            level,
            self.every,
            self.budget,
            tuple(self.mix.items()),
            "" if self.offload is Offloaded.none else self.offload.value,
            self.senders,
            self.mlp_tiles,
        )


class Scope(str, Enum):
    layers = "layers"
    model = "model"


class CompileMode(str, Enum):
    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"


class Dynamic(str, Enum):
    never = "never"
    auto = "auto"
    always = "always"


@dataclass
class CompileOptions(AutoOptions):
    scope: Scope = Scope.layers
    """`layers`: each decoder layer by itself, one graph for all of a kind. `model`: the whole decoder in one graph."""
    mode: CompileMode = CompileMode.default
    """`reduce_overhead` records CUDA graphs, for small models (scope=model); `max_autotune` times several kernels for
    each matmul, which takes minutes more at the start."""
    fullgraph: bool = True
    """Fail on a graph break. false: continue, and run slowly."""
    dynamic: Dynamic = Dynamic.never
    """`never`: a graph for each length of a row. `always`: one for all lengths, somewhat slower. `auto`: one for the
    first length and one for all others."""
    cuda_graphs: Switch = Switch.auto
    """Record forward and backward of a micro-batch as one launch. `auto`: for models so small that the device waits
    for launches."""

    @property
    def keep_gradients(self) -> bool:
        """Whether gradients stay in the same memory from step to step (techniques/compile/technique.py)."""
        return self.enabled and (self.mode is CompileMode.reduce_overhead or self.records)

    @property
    def records(self) -> bool:
        """Whether training passes are recorded. Valid once `auto` is decided."""
        return self.enabled and self.cuda_graphs is Switch.on


@dataclass
class Techniques:
    """In the order of application. `Pipeline` (techniques/pipeline.py) adds the behaviour, and has the reasons for the
    order.
    """

    rope: RopeOptions = field(default_factory=RopeOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    liger: LigerOptions = field(default_factory=LigerOptions)
    apex: ApexOptions = field(default_factory=ApexOptions)
    quantize: QuantizeOptions = field(default_factory=QuantizeOptions)
    float8: Float8Options = field(default_factory=Float8Options)
    lora: LoraOptions = field(default_factory=LoraOptions)
    router: RouterOptions = field(default_factory=RouterOptions)
    plugins: PluginOptions = field(default_factory=PluginOptions)
    checkpointing: CheckpointingOptions = field(default_factory=CheckpointingOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)

    def enabled(self) -> Iterator[tuple[str, Any]]:
        """The enabled techniques by name, in order of application."""
        for entry in fields(self):
            technique = getattr(self, entry.name)
            if technique.enabled:
                yield entry.name, technique
