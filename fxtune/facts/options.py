"""The options of all techniques: the `techniques` section of a recipe, key by key.

A technique inherits its options: `class Lora(LoraOptions, Technique)`. Options are in a package below the techniques,
so each technique can read any other technique's options in `Facts.techniques` without importing that technique. The
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
        """A copy of `execution` with what this technique changes under `facts` (a Facts). `execution` comes from the
        techniques before this one. Each `auto` must be decided."""
        return execution


@dataclass
class AutoOptions(Options):
    """The options of a technique that a recipe may leave to fxtune: `enabled=auto`."""

    enabled: Any = field(default=False, metadata={"kind": bool, "words": (AUTO,)})
    """Whether to use this technique. `auto`: use it if it can act here; otherwise a line says why it cannot. `true`:
    use it; if it cannot act, that is an error. Its other options have no effect while it is off."""

    def __post_init__(self) -> None:
        if self.enabled != AUTO:  # OmegaConf accepts true, "true", 1, yes and on
            self.enabled = BooleanNode().validate_and_convert(self.enabled)

    @property
    def may_stay_off(self) -> bool:
        """Whether `enabled` is `auto` and no other option is set. Then it is no error if this technique cannot act."""
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
    """The rule that scales the frequencies, by transformers' name."""
    factor: float = field(default=1.0, metadata={"min": 1})
    """The new context divided by the original context."""
    original_max_position_embeddings: Optional[int] = field(default=None, metadata={"min": 1})
    """The context on which the model was trained. null: max_position_embeddings of the model's config; if the model
    already has this scaling, the original length in its config."""
    parameters: dict[str, float] = field(default_factory=dict, metadata={"above": 0})
    """Parameters of the type, by transformers' names, with values other than the usual ones (in brackets). yarn:
    beta_fast (32): pairs that rotate more often than this over the original context keep their frequency; beta_slow
    (1): pairs that rotate less often are slowed down by `factor`; attention_factor (0.1 ln(factor) + 1): the scale of
    queries and of keys, so its square scales the logits. llama3: high_freq_factor (4) and low_freq_factor (1) mean the
    same as beta_fast and beta_slow."""


@dataclass
class AttentionOptions(Options):
    enabled: bool = True
    backend: str = "auto"
    """auto | flash4 | flash3 | flash2 | cudnn | sdpa | flex | eager | hub:ORG/KERNEL@COMMIT. `auto`: the fastest one
    that is correct here; the run prints this choice and the reasons."""
    trust_remote_code: bool = False
    """For hub:... only: allow compiled code of the kernel's author to run. Needs a full commit hash."""


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
    """Let float32 matmuls round their inputs to TF32. null: on if the card has TF32 (Ampere and newer)."""
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
    """The kernels to run. Each of them must act. `geglu` is for the tanh form of GELU. `rope` is fxtune's own kernel
    and runs on any device. `fused_linear_cross_entropy` computes head and loss without holding all logits. `auto`: the
    fused loss if a micro-batch's logits exceed 64 MiB, and on a GPU the kernels of operations that neither
    torch.compile nor techniques.lora fuses."""

    def runs(self, kernel: str) -> bool:
        """Whether `kernel` runs. The answer is false while `auto` is undecided."""
        return bool(self.enabled) and self.kernels != AUTO and kernel in self.kernels

    def is_auto(self, part: str) -> bool:
        return self.kernels == AUTO

    def switch_off(self, part: str) -> None:
        self.kernels = [kernel for kernel in self.kernels if kernel != part]


@dataclass
class ApexOptions(Options):
    """Apex's norms have no options besides `enabled`."""


class WeightFormat(str, Enum):
    nf4 = "nf4"
    int8 = "int8"
    fp8 = "fp8"
    mxfp4 = "mxfp4"


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class QuantizeOptions(Options):
    type: WeightFormat = WeightFormat.nf4
    """`nf4`: 4 bits a weight, in blocks of 64. `int8`: 8 bits a weight, with one scale for each output row and a tenth
    of nf4's error. `fp8`: 8-bit floating point, also in products; the fastest. `mxfp4`: the experts of a mixture in 4
    bits, in blocks of 32, as gpt-oss ships them; linears stay in model.dtype. nf4 and int8 need bitsandbytes."""
    compute_dtype: DType = DType.auto
    """The dtype of dequantized weights and of their matmuls. `auto`: the dtype of the model's other matmuls."""
    skip: list[str] = field(default_factory=list)
    """Linears to leave unquantized, such as `down_proj` or `layers.0.mlp.up_proj`. The head has its own option."""
    head: bool = False
    """fp8: also compute the output head's product in fp8. Its rounding shows in the reported loss."""
    embeddings: bool = False
    """fp8: store token embeddings in fp8, in half the memory, and dequantize the rows that are read."""
    experts: Switch = Switch.auto
    """Whether to quantize the experts of a mixture, too. `auto`: on if their architecture and sizes allow it;
    otherwise they stay in model.dtype, and a line says why. Experts that a checkpoint has in MXFP4 stay in MXFP4,
    unless the type is fp8."""
    keeps_transposes = True
    """fp8: whether each weight is stored with its transpose. Technique.resolve() decides this by the free memory."""


class WeightGradient(str, Enum):
    float8 = "float8"
    bfloat16 = "bfloat16"


@dataclass
class Float8Options(Options):
    weight_gradient: WeightGradient = WeightGradient.float8
    """The dtype of the products that compute gradients of weights. They sum over tokens. `bfloat16`: the same rounding
    as without float8, but float8 then gains only two thirds as much, and each layer keeps its inputs in 16 bits."""
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
    """The linears to adapt: names (the end of the full name is enough), regular expressions for full names, or
    `all-linear`, which means all linears of the decoder except routers and in_proj_a, in_proj_b and in_proj_ba of
    Qwen's linear attention."""
    exclude_modules: list[str] = field(default_factory=list)
    """Names of modules, or regular expressions. These modules and all modules inside them get no adapters."""
    vision: bool = False
    """Whether to adapt the linears of the vision encoder, too."""
    projector: bool = False
    """Whether to adapt the linears between the vision encoder and the decoder, too."""
    layers_to_transform: list[int] = field(default_factory=list, metadata={"min": 0})
    """The decoder layers to adapt, by their numbers, which begin at 0. Empty: all layers."""
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"min": 1})
    """The r of some modules, in place of `r`. Keys are names, or regular expressions for the end of the full name."""
    alpha_pattern: dict[str, float] = field(default_factory=dict, metadata={"above": 0})
    """The alpha of some modules, in place of `alpha`. Keys are as in rank_pattern."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules whose weights are trained in full and saved with the adapter."""
    train_tokens: Any = field(default=None, metadata={"kind": list[str], "words": (AUTO,), "nullable": True})
    """Tokens whose rows in the embedding and the head are trained and saved with the adapter. `auto`: the special
    tokens of the data whose rows were never trained in the base (such rows are zero, or equal to others); with
    model.adapter, the tokens of this adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) in place of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Decompose weights into magnitude and direction (arXiv 2402.09353)."""
    init: AdapterInit = AdapterInit.default
    """How A and B start. `default`: A uniform, B zero; `gaussian`: A normal, B zero; `pissa`, `olora`: both from a
    factorization of the base's weights."""
    fused: Switch = Switch.auto
    """Use one operator for q, k and v with their adapters, and one for a whole MLP with its adapters. `auto`: on a
    GPU, if possible (on a CPU a step would take up to a quarter longer). Linears that cannot be fused run as in peft.
    """

    @property
    def factored(self) -> bool:
        """Whether the adapters start from a factorization of the weights, which changes the weights."""
        return self.init in (AdapterInit.pissa, AdapterInit.olora)


@dataclass
class RouterOptions(Options):
    enabled: bool = True
    """Add the auxiliary loss of a mixture of experts. Without effect if the model has no such loss."""
    aux_loss_coef: Optional[float] = field(default=None, metadata={"min": 0})
    """The factor of the auxiliary loss; 0: no auxiliary loss. null: router_aux_loss_coef of the model's config if
    output_router_logits is true there, else 0."""


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
    `full`: their input; `mix`: as `mix` says; `budget`: what the compiler chooses; `auto`: the fastest policy that
    fits, with `offload` and `mlp_tiles` if they are needed."""
    every: int = field(default=1, metadata={"min": 1})
    """Apply the policy to every layer (1), to every second decoder layer (2), and so on. Only for the policies
    selective and full."""
    save: list[str] = field(default_factory=list)
    """policy=selective: keep the results of these operators (`aten.mm`), groups (`attention`, `matmuls`) and linears
    of a layer (`q_proj`). Empty: both groups. If names conflict, a linear's name decides before its operator's name,
    and an operator's name before its group's."""
    recompute: list[str] = field(default_factory=list)
    """policy=selective: exceptions from `save`, with the same kinds of names. [gate_proj, up_proj] keeps the other
    `matmuls`."""
    mix: dict[str, int] = field(default_factory=dict, metadata={"min": 0, "max": 10_000})
    """policy=mix: how many layers keep `everything`, the `wide` products (gate, up), the `narrow` products (q, k, v,
    o), `attention`, or their `input`, such as {narrow: 12, wide: 20}. Each level also keeps what later ones in this
    list keep. Layers that are not counted keep their input. Layers that keep little come first."""
    budget: float = field(default=0.5, metadata={"min": 0, "max": 1})
    """policy=budget: the share of its usual tensors that the compiler may keep. 0: layers' inputs only; 1: all."""
    offload: Offloaded = Offloaded.none
    """What layers hold in pinned host memory between forward and backward pass. It is copied while layers compute, and
    needs a GPU. `inputs`: layers' inputs; `kept`: all that layers keep, but compiled layers do not send products that
    are wider than the hidden state. The last layer's tensors stay on the device, and so do tensors that do not fit in
    host memory."""
    mlp_tiles: int = field(default=1, metadata={"min": 1, "max": 1024})
    """Divide the sequence into this number of tiles, and run and recompute each MLP tile by tile; 1: no tiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.senders: int | None = None
        """How many layers send to host memory, counted from the first; None: all except the last one.
        Technique.resolve() decides this by the host's memory."""

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
    """`layers`: compile each decoder layer by itself; all layers of a kind share one graph. `model`: compile the whole
    decoder as one graph."""
    mode: CompileMode = CompileMode.default
    """`reduce_overhead` records CUDA graphs, for small models, and needs scope=model. `max_autotune` times several
    kernels for each matmul, which makes the start minutes longer."""
    fullgraph: bool = True
    """true: fail on a graph break. false: continue, and run slowly."""
    dynamic: Dynamic = Dynamic.never
    """`never`: a graph for each length of a row. `always`: one graph for all lengths, somewhat slower. `auto`: one
    graph for the first length, and one for all other lengths."""
    cuda_graphs: Switch = Switch.auto
    """Record forward and backward of a micro-batch as one launch. `auto`: for models so small that the device waits
    for launches."""

    @property
    def keep_gradients(self) -> bool:
        """Whether gradients stay in the same memory from step to step (techniques/compile/technique.py)."""
        return self.enabled and (self.mode is CompileMode.reduce_overhead or self.records)

    @property
    def records(self) -> bool:
        """Whether training passes are recorded. `auto` must be decided."""
        return self.enabled and self.cuda_graphs is Switch.on


@dataclass
class Techniques:
    """The options of all techniques, in the order of application. `Pipeline` (techniques/pipeline.py) adds the
    behaviour, and gives the reasons for the order."""

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
        """Yield (name, technique) for each enabled technique, in the order of application."""
        for entry in fields(self):
            technique = getattr(self, entry.name)
            if technique.enabled:
                yield entry.name, technique
