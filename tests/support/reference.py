"""The references of the GPU tests: compares fxtune with plain transformers in float32, where each document is its own
forward pass.

`plain` runs in another process, in which no technique was ever applied, because some kernels (Liger's) patch the
modules of transformers. That process starts once per session. Its results are cached, so tests may request the same
reference again.

A bfloat16 model differs from a float32 model by bfloat16's rounding, which grows with depth. So tests compare single
operators on rounded inputs with float32, and complete models with `plain(..., dtype="bfloat16")`: fxtune's error may
be as large as that of plain bfloat16. All weights are bfloat16 numbers, so loading them rounds nothing.

All functions also run on a CPU (`device="cpu"`), where tests/repository/test_gpu_references.py checks it.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import itertools
import json
import multiprocessing
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.decoder_sizes import decoder_sizes

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-2}
"""Largest relative error of an operator in each dtype, against float32 on the same rounded inputs."""

_COMMON = dict(
    **decoder_sizes(1024, 2816, layers=2, heads=8, key_heads=2, head_dim=128, vocabulary=4096),
    max_position_embeddings=8192,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(_COMMON, model_type="llama", rope_theta=500000.0, rms_norm_eps=1e-5),
    "qwen3": dict(_COMMON, model_type="qwen3", rope_theta=1000000.0),
    "mistral": dict(_COMMON, model_type="mistral", sliding_window=None),
    "gemma": dict(
        _COMMON,
        model_type="gemma",
        **decoder_sizes(head_dim=256, heads=4, key_heads=2),
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
}
LAYERS_OF_8B = dict(
    model_type="llama",
    **decoder_sizes(4096, 14336, heads=32, key_heads=8, vocabulary=8192),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
)
"""Layers as wide as those of Llama 3's 8B; a test sets their number."""
SMALL = dict(
    SHAPES["llama"],
    **decoder_sizes(vocabulary=1024, layers=4, hidden=512, intermediate=1536, heads=4),
)
Shape = str | dict[str, Any]
"""A name in SHAPES, or an architecture."""


@dataclass
class Result:
    """The result of one forward and backward pass of one batch. Tensors are in float32 on the CPU."""

    loss: float
    """Cross-entropy in nats, summed over the supervised tokens."""
    logits: torch.Tensor
    """[supervised, vocabulary], in the order of `Batch.supervised_at`."""
    grads: dict[str, torch.Tensor]
    """The gradients of the trained parameters by name."""
    evidence: list[Any] = field(default_factory=list)
    """The evidence of Pipeline.prove; only for `ours`."""
    notes: list[str] = field(default_factory=list)
    """The decision for each `auto`; only for `ours`."""


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """|out - ref| / |ref|, both norms over all elements in float64. Infinite if a value is not finite."""
    assert out.shape == ref.shape, f"{tuple(out.shape)} against {tuple(ref.shape)}"
    ref = ref.detach().double()
    error = ((out.detach().to(ref.device).double() - ref).norm() / ref.norm()).item()
    return error if error == error else float("inf")


def relative_errors(one: Result, other: Result) -> dict[str, float]:
    """Relative errors of `loss`, `logits` and `grads`, where `grads` is one vector of all parameters."""
    assert one.grads.keys() == other.grads.keys(), sorted(one.grads.keys() ^ other.grads.keys())[:4]
    names = sorted(other.grads)
    flat = [torch.cat([result.grads[name].flatten() for name in names]) for result in (one, other)]
    return {
        "loss": abs(one.loss - other.loss) / abs(other.loss),
        "logits": relative(one.logits, other.logits),
        "grads": relative(*flat),
    }


def milliseconds(run: Callable[[], Any]) -> float:
    """How long `run` takes on the GPU: the mean of ten calls after three."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def small(shape: str) -> dict[str, Any]:
    """The same architecture at a size for the CPU: hidden 64, head_dim 16 (gemma 32), vocabulary 128."""
    whole = SHAPES[shape]
    return {
        **whole,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": whole["head_dim"] // 8,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }


def batch(
    shape: Shape,
    lengths: tuple[int, ...] = (700, 600, 500),
    seed: int = 0,
    device: str = "cuda",
    rows: int = 1,
    padding: int = 0,
    packed: bool = True,
    supervised: float = 0.5,
) -> Any:
    """A Batch of `rows` packed rows of documents with these lengths and random tokens. About `supervised` of them are
    supervised.

    Each row ends with `padding` tokens of padding. As in training, `cu_seqlens` has unused entries.
    """
    from fxtune.data.batches.batch import BatchSpec, build_batch

    draw = np.random.default_rng(seed)
    total = rows * sum(lengths)
    table: Any = SimpleNamespace(
        images=None,
        ids=draw.integers(3, _architecture(shape)["vocab_size"], total).astype(np.int32),
        supervised=draw.random(total) < supervised,
        stored=None,
    )
    each = np.array(lengths * rows, np.int64)
    return build_batch(
        [table],
        BatchSpec(
            source=np.zeros(len(each), np.int64),
            start=np.concatenate([[0], each.cumsum()[:-1]]),
            length=each,
            offsets=np.arange(rows + 1) * len(lengths),
            width=sum(lengths) + padding,
            packed=packed,
            pad_id=0,
            slots=len(each) + rows + 2,
        ),
    ).to(torch.device(device))


def weights(shape: Shape) -> dict[str, torch.Tensor]:
    """A fixed state dict in float32: matrices of standard deviation 0.02, norms close to the identity.

    The name of a tensor is its seed, so architectures with equal names and sizes have equal values.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(_config(shape))
    drawn = {}
    for name, tensor in built.state_dict().items():
        noise = _draw(name, tuple(tensor.shape))
        if tensor.dim() > 1:
            values = 0.02 * noise
        else:  # a norm; Gemma adds 1 to its weight
            values = 0.1 * noise + (0.0 if "gemma" in _architecture(shape)["model_type"] else 1.0)
        drawn[name] = values.bfloat16().float()
    if _architecture(shape).get("tie_word_embeddings"):
        drawn.pop("lm_head.weight", None)
    return drawn


def path(shape: Shape) -> Path:
    """A folder with this shape's config and weights(), written once. Plain transformers and fxtune load it."""
    return _saved(json.dumps(_architecture(shape), sort_keys=True))


def plain(
    shape: Shape, given: Any, dtype: str = "float32", attention: str = "eager", lora: bool = False, scale: float = 1.0
) -> Result:
    """The result of plain transformers (and peft): one forward pass per document, no mask, no autocast, no TF32.

    `lora`: r=16, alpha=32 on all linear layers except the head, with float32 adapters of the same weights as in
    `ours`. `scale`: multiply the loss before the backward pass, and divide the gradients by it (float16).
    """
    tensors = [getattr(given, name).cpu().numpy() for name in ("input_ids", "targets", "position_ids")]
    key = (
        json.dumps(_architecture(shape), sort_keys=True),
        dtype,
        attention,
        lora,
        scale,
        given.input_ids.device.type,
        hashlib.blake2b(b"".join(tensor.tobytes() for tensor in tensors)).hexdigest(),
    )
    if key not in _KEPT:
        asked = (str(path(shape)), tensors, dtype, attention, lora, scale, str(given.input_ids.device))
        loss, logits, grads = elsewhere(_plain, *asked)
        _KEPT[key] = (loss, torch.from_numpy(logits), {name: torch.from_numpy(value) for name, value in grads.items()})
    loss, logits, grads = _KEPT[key]
    return Result(loss, logits, dict(grads))


def ours(pipeline: Any, shape: Shape, given: Any, dtype: str = "bfloat16", lora: bool = False) -> Result:
    """The result of fxtune for the same batch: the pipeline is resolved, built and proven as in training, with
    fxtune's loss.

    `lora` enables techniques.lora and sets fixed adapter weights (a new adapter's B is zero, which would hide A).
    Raises ConfigError, as training does, if a technique is refused or did not act.
    """
    model, pipeline, evidence, notes = build(pipeline, shape, given, dtype, lora)
    with pipeline.precision.context(given.input_ids.device):
        loss = loss_of(pipeline, model, given)
    loss.backward()
    grads = {
        _plain_name(name): parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return Result(loss.item(), logits(pipeline, model, given).cpu(), grads, evidence, notes)


def build(
    pipeline: Any, shape: Shape, given: Any, dtype: str = "bfloat16", lora: bool = False
) -> tuple[Any, Any, list[Any], list[str]]:
    """prepare() with the module of the model."""
    prepared, *others = prepare(pipeline, shape, given, dtype, lora)
    return prepared.module, *others


def prepare(
    pipeline: Any, shape: Shape, given: Any, dtype: str = "bfloat16", lora: bool = False
) -> tuple[Any, Any, list[Any], list[str]]:
    """(PreparedModel, resolved pipeline, evidence, notes), as training builds them. The model is in training mode."""
    return prepare_saved(pipeline, path(shape), given, dtype, lora)


def prepare_saved(
    pipeline: Any,
    folder: Path,
    given: Any,
    dtype: str = "bfloat16",
    lora: bool = False,
    trains_images: bool = False,
) -> tuple[Any, Any, list[Any], list[str]]:
    """prepare() for the model in a folder. `trains_images`: without LoRA also train the parts that read images."""
    from fxtune.distributed.world import World
    from fxtune.facts.run import Facts
    from fxtune.models.load import DType, ModelConfig, load_config
    from fxtune.techniques.assemble import assemble
    from fxtune.techniques.pipeline import make_probe

    pipeline = copy.deepcopy(pipeline)
    if lora:
        pipeline.lora.enabled = True
    config = ModelConfig(path=str(folder), dtype=DType(dtype))
    hf_config = load_config(config)
    world = World(given.input_ids.device)
    rows, length = given.input_ids.shape
    packing = bool((given.position_ids == 0).sum() > rows)
    facts = Facts.of(
        world.facts(),
        degrees=world.degrees,
        model=hf_config.to_dict(),
        dtype=dtype,
        packing=packing,
        sequence_length=length,
        rows=(length,),
        micro_batch_size=rows,
    )
    pipeline, notes = pipeline.resolved(facts)
    prepared = assemble(pipeline, config, hf_config, world, 0, trains_images=trains_images)
    model = prepared.module
    evidence = pipeline.prove(prepared, make_probe(model, packing))
    if pipeline.lora.enabled and pipeline.lora.init.value == "default":
        _fill_adapters(model)
    model.train()
    return prepared, pipeline, evidence, notes


def with_head(pipeline: Any, model: Any) -> Any:
    """The LanguageModel of a module that build() returned with `pipeline`."""
    from fxtune.kernels.matmul import CUTE
    from fxtune.models.prepared import PreparedModel
    from fxtune.objectives.language_model import LanguageModel

    gemm = CUTE if pipeline.lora.enabled and pipeline.lora._by_quack else ""
    return LanguageModel(PreparedModel(model, gemm=gemm), pipeline.liger)


def loss_of(pipeline: Any, model: Any, given: Any) -> torch.Tensor:
    """fxtune's loss of one batch, summed over its supervised tokens."""
    made = with_head(pipeline, model)
    assert all(one.acted for one in made.evidence), made.evidence
    return made.summed_loss(given)


def passed(model: Any, pipeline: Any, given: Any) -> Result:
    """The result of one forward and backward pass. Gradients have the model's own names."""
    model.zero_grad()
    with pipeline.precision.context(given.input_ids.device):
        loss = loss_of(pipeline, model, given)
    loss.backward()
    grads = {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Result(loss.item(), logits(pipeline, model, given).cpu(), grads)


def logits(pipeline: Any, model: Any, given: Any) -> torch.Tensor:
    """Logits [supervised, vocabulary] in float32.

    Gradients stay enabled, so compiled code is the same as in training.
    """
    from fxtune.techniques.attention.inputs import model_inputs

    with pipeline.precision.context(given.input_ids.device):
        seen = model(**model_inputs(model, given.input_ids, given.position_ids, given.cu_seqlens)).logits
    return seen.detach().flatten(0, 1)[given.supervised_at].float()


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a module's function in the process with plain transformers.

    Arguments and results are arrays, not tensors.
    """
    return _other_process().submit(function, *arguments).result()


_KEPT: dict[Any, Any] = {}


def _architecture(shape: Shape) -> dict[str, Any]:
    return SHAPES[shape] if isinstance(shape, str) else shape


def _config(shape: Shape) -> Any:
    from transformers import AutoConfig

    sizes = dict(_architecture(shape))
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


@functools.cache
def _saved(architecture: str) -> Path:
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="fxtune-reference-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape = json.loads(architecture)
    _config(shape).save_pretrained(folder)
    drawn = {name: tensor.bfloat16() for name, tensor in weights(shape).items()}  # exact, and faster to read
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _plain_name(name: str) -> str:
    """A parameter's name without the prefixes of layer wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _fill_adapters(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                parameter.copy_(0.05 * _draw(_plain_name(name), tuple(parameter.shape)))


@functools.cache
def _other_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _plain(
    folder: str, tensors: list[np.ndarray], dtype: str, attention: str, lora: bool, scale: float, device: str
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """The work of `plain` in the other process."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    model = model.to(device)
    if lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        _fill_adapters(model)
    model.train()
    total, seen = 0.0, []
    ids, targets, positions = (torch.from_numpy(tensor) for tensor in tensors)
    for row in range(len(ids)):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        for start, end in itertools.pairwise(starts):
            wanted = targets[row, start:end].to(device)
            if not (wanted != -100).any():  # padding
                continue
            out = model(input_ids=ids[row : row + 1, start:end].to(device), use_cache=False).logits[0].float()
            loss = torch.nn.functional.cross_entropy(out, wanted, ignore_index=-100, reduction="sum")
            (loss * scale).backward()
            total += loss.item()
            seen.append(out.detach()[wanted != -100].cpu())
    grads = {
        name: (parameter.grad.float() / scale).cpu().numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    del model
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return total, torch.cat(seen).numpy(), grads
