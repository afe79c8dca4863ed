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
    beta_fast: float = field(default=32.0, metadata={"above": 0})
    """yarn only: pairs with more rotations than this over the original context keep their frequency."""
    beta_slow: float = field(default=1.0, metadata={"above": 0})
    """yarn only: pairs with fewer rotations than this are slowed down by `factor`; pairs between the two by a part of
    it."""
    attention_factor: Optional[float] = field(default=None, metadata={"above": 0})
    """yarn only: the scale of queries and of keys, so its square scales the logits; null: 0.1 ln(factor) + 1."""
    low_freq_factor: float = field(default=1.0, metadata={"above": 0})
    """llama3 only: like beta_slow."""
    high_freq_factor: float = field(default=4.0, metadata={"above": 0})
    """llama3 only: like beta_fast."""


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
    initial_scale: float = field(default=65536.0, metadata={"above": 0})
    """float16's first loss scale, a power of two. If it is too large, each halving costs one skipped step."""
    scale_growth_interval: int = field(default=2000, metadata={"min": 1})
    """Double the loss scale after this many good steps in a row."""
    tf32: Optional[bool] = None
    """Let float32 matmuls round their inputs to TF32. Null: on if the card has it (Ampere and newer)."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new shape of a convolution. Other layers are not affected."""

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return self.enabled and self.autocast is not Autocast.none


@dataclass
class LigerOptions(AutoOptions):
    rms_norm: Switch = Switch.auto
    """`auto` here and below: on with a GPU; off under torch.compile, which fuses the same operations. `on` and
    torch.compile exclude each other."""
    layer_norm: Switch = Switch.auto
    """Liger's LayerNorm."""
    rope: Switch = Switch.auto
    """fxtune's own kernel, on any device. `auto`: on with a GPU, unless torch.compile fuses RoPE with norms of queries
    and keys."""
    swiglu: Switch = Switch.auto
    """Liger's product of the gate (SiLU) and the up projection."""
    geglu: Switch = Switch.auto
    """For the tanh form of GELU, as in Gemma."""
    fused_linear_cross_entropy: Switch = Switch.auto
    """Loss and head as one operation that never holds all logits. `auto`: on if a micro-batch's logits exceed 64
    MiB."""
    chunk_rows: Optional[int] = field(default=None, metadata={"min": 1})
    """Rows of logits held at a time; null: as many as fit into 1 GiB."""


@dataclass
class ApexOptions(Options):
    layer_norm: bool = True
    """Replace LayerNorm."""
    rms_norm: bool = True
    """Replace RMSNorm."""


class Library(str, Enum):
    """The package that stores weights or the optimizer's moments in 8 or 4 bits."""

    auto = "auto"
    bitsandbytes = "bitsandbytes"
    torchao = "torchao"


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
    `fp8`: products in 8-bit floating point, the fastest; `transpose` says how much memory it takes. `mxfp4`: the
    experts of a mixture in 4 bits, in blocks of 32, as gpt-oss ships them; linears stay in model.dtype."""
    library: Library = Library.auto
    """The package that stores the weights. `auto`: bitsandbytes if installed (its nf4 is faster), else torchao. fp8
    and mxfp4 need none."""
    double: bool = True
    """nf4: also quantize the blocks' scales, which saves 0.37 bits a weight."""
    compute_dtype: ComputeDtype = ComputeDtype.auto
    """The dtype of dequantized weights and their matmuls. `auto`: that of the model's other matmuls."""
    skip: list[str] = field(default_factory=list)
    """Linears to leave unquantized, such as `down_proj` or `layers.0.mlp.up_proj`. The head has its own option."""
    head: bool = False
    """fp8: also compute the output head's product in fp8. Its rounding shows in the reported loss."""
    embeddings: bool = False
    """fp8: store token embeddings in fp8 and dequantize the rows that are read: half of their memory."""
    transpose: Switch = Switch.auto
    """fp8: keep the transpose of each weight, too, 2 bytes a weight in place of 1. Without it each backward product
    transposes the codes first, which takes 1 or 2 % of a step. `auto`: on if the transposes take at most an eighth of
    the card's free memory."""
    experts: Switch = Switch.auto
    """Also the experts of a mixture. `auto`: on where their architecture and sizes allow it; otherwise they stay in
    model.dtype, and a line says why. Experts that a checkpoint ships in MXFP4 stay so, except in fp8."""
    linears: Switch = Switch.auto
    """fp8: also the linears beside experts in fp8. `auto`: off if all of them are small, because then they take hardly
    any memory, and quantizing their input takes about as long as the faster product saves (by calculation)."""


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


class Matmul(str, Enum):
    auto = "auto"
    cublas = "cublas"
    cute = "cute"


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
    grouped_experts: Switch = Switch.auto
    """Run a mixture's experts and their adapters as grouped matmuls. `auto`: where transformers describes the model's
    experts; others run as in peft, which adds an adapter's product to a copy of all experts in each pass.
    """
    matmul: Matmul = Matmul.auto
    """GEMM backend for the 16-bit weights of fused adapters and for the fused loss's head: `cublas`, or `cute`, a
    kernel of quack-kernels for Hopper that computes large products in 2 to 7 % less time. `auto`: cute where it is
    available.
    """

    @property
    def factored(self) -> bool:
        """Whether the adapters start from a factorization of the weights, which are changed by it."""
        return self.init in (AdapterInit.pissa, AdapterInit.olora)


@dataclass
class RouterOptions(Options):
    enabled: bool = True
    """Add the auxiliary loss of a mixture of experts. Nothing happens where the model has none."""
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
    """policy=mix: how many layers keep `everything`, the `wide` products (gate, up) and all below, the `narrow` ones
    (q, k, v, o) and all below, `attention`, or their `input`: {narrow: 12, wide: 20}. Layers that are not counted keep
    their input. Those that keep little come first."""
    budget: float = field(default=0.5, metadata={"min": 0, "max": 1})
    """policy=budget: the share that the compiler may keep of what it would keep. 0: layers' inputs only; 1: all of
    it."""
    offload: bool = False
    """Hold what offload_what says in pinned host memory from forward to backward, copied while layers compute (needs a
    GPU)."""
    offload_what: Offloaded = Offloaded.inputs
    """`inputs`: layers' inputs; `kept`: also what else they keep, except for products wider than the hidden state
    (compiled)."""
    offload_layers: Optional[int] = field(default=None, metadata={"min": 1})
    """How many layers send, from the first; null: all except the last one, whose tensors are needed at once."""
    mlp_tiles: int = field(default=1, metadata={"min": 1, "max": 1024})
    """Run each MLP in this many tiles of the sequence and recompute them one by one; 1: no tiles."""

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
            self.offload_what.value if self.offload else "",
            self.offload_layers,
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
    max_graph_breaks: int = field(default=0, metadata={"min": 0})
    """With fullgraph=false: fail if there are graph breaks at more places than this."""
    max_recompiles: int = field(default=8, metadata={"min": 0})
    """Fail if rows of one length are compiled again more often than this. Training, evaluation, the first layer (whose
    input needs no gradient) and each kind of layer take one each."""

    @property
    def keep_gradients(self) -> bool:
        """Whether the optimizer must add gradients to memory of its own (techniques/compile/technique.py)."""
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
