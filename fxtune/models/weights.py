"""Draws the weights of a model at random, or reads them from safetensors. An incomplete checkpoint is an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.known import kind_of
from fxtune.models.kinds.scorer import LM_HEADS, SCORE_WORDS
from fxtune.system.files.hub import Origin, fetch
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.upstream.transformers import forget_conversions


def start_on_device(hf_config: Any, dtype: torch.dtype, world: World, code: bool, random: bool) -> bool:
    """Whether weights that will be quantized start on world.device and not in host memory.

    Random weights start there if they fit, because a GPU draws them a hundred times faster. Weights from files pass
    through host memory anyway. They start on the device only if they do not fit in host memory, because all weights at
    once would fragment the GPU's memory.
    """
    if world.device.type == "cpu":
        return True
    needed, facts = bytes_of(hf_config, dtype, code), world.facts()
    return needed < 0.9 * facts.free_memory if random else needed > 0.9 * facts.host_memory


def fits_whole(hf_config: Any, dtype: torch.dtype, world: World, code: bool, random: bool) -> bool:
    """Whether world.device or host memory has room for all weights before they are quantized.

    Random weights are not put into host memory if there is a GPU: a host draws about 2e8 numbers a second on any
    number of cores. A 70B model has 7e10 weights, and each is drawn twice (in the constructor and in the init
    function).
    """
    needed, facts = bytes_of(hf_config, dtype, code), world.facts()
    host = 0 if random and world.device.type == "cuda" else facts.host_memory
    return needed <= 0.9 * max(facts.free_memory, host)


def bytes_of(hf_config: Any, dtype: torch.dtype, code: bool) -> int:
    """Bytes of a model's weights in `dtype`."""
    with torch.device("meta"):
        skeleton = kind_of(hf_config).auto.from_config(copy.deepcopy(hf_config), trust_remote_code=code)
    return sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize


def unpacks(origin: Origin, hf_config: Any) -> bool:
    """Whether read() unpacks weights in the folder of `origin`: gpt-oss's experts in MXFP4, 4 bits a weight and a
    scale for each 32 weights (OCP Microscaling Formats 1.0). Scales are powers of two, so the weights are exact in
    bfloat16. shards.read() can read the experts packed."""
    if hf_config.model_type != "gpt_oss":
        return False
    stored = json.loads((origin.folder / "config.json").read_text(encoding="utf-8")).get("quantization_config") or {}
    return bool(stored.get("quant_method") == "mxfp4")


def draw(hf_config: Any, dtype: torch.dtype, world: World, seed: int, code: bool) -> Any:
    """A model with random weights."""
    start_head({}, hf_config, seed, None)
    cards = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), world.device:
        torch.manual_seed(seed)
        try:
            return kind_of(hf_config).auto.from_config(hf_config, dtype=dtype, trust_remote_code=code)
        except (ImportError, ValueError, TypeError, RuntimeError, KeyError, ZeroDivisionError) as error:
            if out_of_memory_reason(error):
                raise
            raise ConfigError(
                f"model.init=random: a {hf_config.model_type} of this config cannot be built: {first_line(error)}"
            ) from error


def read(
    origin: Origin, hf_config: Any, dtype: torch.dtype, world: World, code: bool, path: str, seed: int = 0
) -> Any:
    """A model with the weights in the folder of `origin`. `path`: model.path, for messages. `seed`: for drawing a head
    that the base lacks."""
    files, place = readable_files(origin), f"model.path={path}: the weights in {origin.folder}"
    kind = kind_of(hf_config)
    loader: Any = kind.auto.from_pretrained
    placement = {} if world.device.type == "cpu" else {"device_map": {"": world.device}}
    if unpacked := unpacks(origin, hf_config):
        hf_config = copy.deepcopy(hf_config)
        hf_config.quantization_config = {"quant_method": "mxfp4", "dequantize": True}  # transformers removes it
    # ImportError is raised if config.json names a kernel that is not installed.
    unusable = (OSError, ValueError, TypeError, KeyError, RuntimeError, AssertionError, ArithmeticError, ImportError)
    try:
        built, report = loader(
            origin.folder,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            **placement,
        )
    except (*unusable, SafetensorError) as error:
        if out_of_memory_reason(error):
            raise
        raise StorageError(
            f"{place} cannot be loaded as its config.json says: {first_line(error)}. Use a complete copy."
        ) from error
    if troubles := _misfits_of(report, kind):
        raise StorageError(
            f"{place} do not fit its config.json ({hf_config.model_type}): {troubles}. transformers would continue "
            "with random weights. Use a complete copy."
        )
    drawn = {name: built.get_parameter(name) for name in sorted(kind.drawn_weights(set(report["missing_keys"])))}
    start_head(drawn, hf_config, seed, origin)
    if unpacked:
        forget_conversions(built)  # otherwise save_pretrained would give these tensors the packed names
        for name, weight in built.named_parameters():
            if ".experts." in name:
                weight.data = weight.data.to(dtype)  # transformers 5.17 unpacks to bfloat16, exactly
    if reason := _packed_weight(files, built) or ("" if all_finite(built) else _why_not_finite(files, dtype)):
        raise StorageError(f"model.path={path}: {reason}")
    return built


def _misfits_of(report: dict[str, Any], kind: Decoder) -> str:
    """The misfits() in transformers' report on the weights that transformers has loaded."""
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    homeless = unexpected.difference(kind.unused_weights(unexpected))
    shapes = [
        f"{name} ({tuple(stored)} in the file, {tuple(expected)} in the config)"
        for name, stored, expected in report["mismatched_keys"]
    ]
    return misfits(
        ("weights of the architecture are not in the files", missing.difference(kind.drawn_weights(missing))),
        ("weights in the files have no place in the architecture", homeless),
        ("weights have another shape", shapes),
        ("errors", report["error_msgs"]),
    )


def start_head(drawn: dict[str, torch.Tensor], hf_config: Any, seed: int, origin: Origin | None) -> None:
    """Fill `drawn`, the weights of a head that the base lacks, with random numbers. Where objective.words names two
    words, the head is the difference of their rows in the base's head over the vocabulary. Raises ConfigError if the
    base has no such rows, or a word is not one token."""
    for number, (name, weight) in enumerate(drawn.items()):
        draw_weight(name, weight, hf_config, seed + number)
    if not (words := getattr(hf_config, SCORE_WORDS, [])):
        return
    if not drawn or origin is None:
        raise ConfigError("objective.words: model.path has a score, or no weights, so no logits of words. Remove it.")
    tokenizer = kind_of(hf_config).read_tokenizer(origin.folder, trust_remote_code=False)
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    for word, found in zip(words, ids, strict=True):
        if len(found) != 1:
            raise ConfigError(
                f"objective.words: {word!r} is {len(found)} tokens of this model. Name words of one token."
            )
    weight = next(iter(drawn.values()))
    shape = [hf_config.get_text_config().vocab_size, weight.shape[1]]
    rows = {
        name: [opened.get_slice(name)[found[0]].float() for found in ids]
        for _, name, opened in stored(readable_files(origin))
        if list(opened.get_slice(name).get_shape()) == shape
    }
    # The embedding is the head if the two are tied, and the files then have no other matrix of this shape.
    first, second = rows[max(rows, key=lambda name: any(head in name for head in LM_HEADS))]
    with torch.no_grad():
        weight.copy_(second - first)


@torch.no_grad()
def draw_weight(name: str, weight: torch.Tensor, hf_config: Any, seed: int) -> None:
    """Draw a matrix from a normal distribution, as transformers draws linears. Every device gets the same numbers. A
    bias becomes 0, the scale of a norm 1."""
    if weight.dim() < 2:
        weight.fill_(float(name.endswith("norm.weight")))
        return
    spread = float(getattr(hf_config.get_text_config(), "initializer_range", None) or 0.02)
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * spread)


def misfits(*problems: tuple[str, Collection[str]]) -> str:
    """A message with each problem, how many weights have it, and the first name of these weights; empty if no weight
    has a problem."""
    return "; ".join(f"{len(names)} {problem}, such as {min(names)}" for problem, names in problems if names)


def all_finite(model: torch.nn.Module) -> bool:
    """Whether no weight is NaN or infinite. Computes the ends of each tensor on its device, waits for the device once,
    and needs no memory. An 8B model takes about 15 ms on a GPU, 2 s on one core."""
    # min and max propagate NaN and, unlike a sum, never overflow. A finite number times 0 is 0; NaN or an infinite
    # number times 0 is NaN.
    ends = [
        torch.stack(torch.aminmax(weight.detach()))
        for weight in model.parameters()
        if weight.numel() and weight.is_floating_point() and weight.itemsize > 1  # fp8 has no min and max
    ]
    return not ends or bool((torch.stack([pair.float() for pair in ends]) * 0 == 0).all())


def _packed_weight(files: list[Path], model: torch.nn.Module) -> str | None:
    """A message about the first weight that is stored as integers or complex numbers but would be read as real
    numbers; None if all are stored as real numbers."""
    floating = {key for key, weight in model.named_parameters() if weight.is_floating_point()}
    for file, key, opened in stored(files):
        if key in floating and "F" not in (dtype := opened.get_slice(key).get_dtype()):
            return (
                f"{key} is stored as {dtype} in {file}, which is no weight: a library that packs weights saved it, or "
                "it is damaged. Give the model that it was made from."
            )
    return None


def _why_not_finite(files: list[Path], dtype: torch.dtype) -> str:
    """Why some weights are not finite. Reads the files again, tensor by tensor, to name the tensor and its file."""
    broken = []
    for file, key, opened in stored(files):
        weight = opened.get_tensor(key)
        if not (weight.float() if weight.itemsize == 1 else weight).isfinite().all():  # fp8 has no isfinite
            broken.append((key, file))
    if not broken:
        return (
            f"weights that are finite in its files are too large for {dtype}, where they become infinite. Set "
            "model.dtype to the dtype of the files: bfloat16 or float32."
        )
    key, file = broken[0]
    return (
        f"NaN or infinite numbers are in {len(broken)} of its tensors, the first being {key} in {file}. Nothing can "
        "be learned from such weights. Use another copy of the model, or an earlier checkpoint of it."
    )


def names(origin: Origin) -> set[str]:
    """The names of the weights in the files of `origin`."""
    return {name for _, name, _ in stored(readable_files(origin))}


def stored(files: list[Path]) -> Iterator[tuple[Path, str, Any]]:
    """Yield (file, name, opened file) for each tensor in `files`. Reads only the files' headers."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in sorted(opened.keys()):
                yield file, key, opened


def readable_files(origin: Origin) -> list[Path]:
    """Fetch the safetensors files that the model's index names, check each file, and return their paths."""
    files = ["model.safetensors"]
    index = origin.folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not files:
                raise ValueError("it names no files")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StorageError(
                f"{index} is not a safetensors index: {first_line(error)}. Use a complete copy of the model."
            ) from error
    pickles = sorted(path.name for path in origin.folder.glob("*.bin"))
    if origin.revision is None and not (origin.folder / files[0]).exists() and pickles:
        raise ConfigError(
            f"model.path={origin.name} holds pickled weights ({pickles[0]}), which can run code when they are read. "
            "fxtune reads safetensors only: convert them (save_pretrained of transformers writes safetensors)."
        )
    fetch(origin, files)
    paths = [origin.folder / file for file in files]
    for path in paths:
        try:
            next(stored([path]), None)
        except (SafetensorError, OSError) as error:
            raise StorageError(
                f"{path} is broken or cut short ({first_line(error)}). Delete it and fetch or copy it again."
            ) from error
    return paths
