"""The references of GPU tests with images: packed documents with images in fxtune, compared with plain transformers, in
which each document is its own forward pass in another process (support/reference.py).

Models are those of support/image_models.py, wide enough for kernels of a GPU. All functions also run on a CPU
(`device="cpu"`), where tests/repository/test_gpu_references.py checks them.
"""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import image_models, reference
from support.decoder_sizes import decoder_sizes
from support.reference import Result

PARTS: tuple[list[Any], ...] = (
    [40, (2, 3), 150],
    [200],
    [30, (3, 3), 30, (1, 3), 60],
    [3, (2, 2), 9],
    [129],
)
"""Documents: tokens of text, and images of several sizes (image_models.document)."""
ROWS = (2, 3)
"""Documents of each packed row."""
CHANGED = 2
"""The document whose images isolation() changes: the first one of the second row."""
WIDE_TEXT = dict(
    **decoder_sizes(256, 384, heads=4, key_heads=2, head_dim=64),
    max_position_embeddings=4096,
)
WIDE_VISION = dict(hidden_size=128, embed_dim=128, intermediate_size=192, out_hidden_size=256, head_dim=64)
FAMILIES = tuple(image_models.CONFIGS)


def config(family: str) -> Any:
    """image_models.config() with heads of 64 dimensions."""
    model_type, values = image_models.CONFIGS[family]
    values = copy.deepcopy(values)
    text, vision = values["text_config"], values["vision_config"]
    text.update(WIDE_TEXT, vocab_size=512)
    if "rope_parameters" in text:
        partial = "partial_rotary_factor" in text["rope_parameters"]
        text["rope_parameters"]["mrope_section"] = [2, 3, 3] if partial else [8, 12, 12]
    text.update({name: 64 for name in text if name in ("linear_key_head_dim", "linear_value_head_dim")})
    if "global_head_dim" in text:
        text["global_head_dim"] = 128
    if "moe_intermediate_size" in text:
        text["moe_intermediate_size"] = 128
    vision.update({name: value for name, value in WIDE_VISION.items() if name in vision})
    if family == "qwen2_vl":  # whose name of the projector's width is another
        vision["hidden_size"] = WIDE_TEXT["hidden_size"]
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**values)


@functools.cache
def folder(family: str) -> Path:
    """A folder with a model whose weights are bfloat16 numbers, so that loading them rounds nothing."""
    from transformers import AutoModelForImageTextToText

    made = Path(tempfile.mkdtemp(prefix="fxtune-images-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = AutoModelForImageTextToText.from_config(config(family), dtype=torch.float32)
    image_models.draw(built)
    built.bfloat16().save_pretrained(made)
    return made


@functools.cache
def documents(family: str, saved: Path) -> tuple[image_models.Document, ...]:
    """The documents of PARTS for the model in a folder."""
    built = _load(saved, torch.float32)
    return tuple(image_models.document(family, built, parts, seed) for seed, parts in enumerate(PARTS))


def batch(family: str, device: str = "cuda", changed: bool = False, alone: bool = False) -> Any:
    """The documents in packed rows. `changed`: with other images in document CHANGED. `alone`: one document a row."""
    shown = [copy.copy(document) for document in documents(family, folder(family))]
    if changed:
        images = shown[CHANGED].images
        shown[CHANGED].images = {**images, "pixel_values": images["pixel_values"].neg()}
    rows = [shown[: ROWS[0]], shown[ROWS[0] :]]
    from types import SimpleNamespace

    built: Any = SimpleNamespace(config=_config(family))
    made = image_models.batch(built, [[one] for one in shown] if alone else rows, packed=not alone)
    return made.to(torch.device(device))


def ours(
    pipeline: Any, family: str, device: str = "cuda", dtype: str = "bfloat16", lora: bool = False
) -> tuple[Result, Any]:
    """The result of fxtune on the packed documents, with log-probabilities of supervised tokens for logits, and its
    LanguageModel. All parts are trained, or with `lora` the adapters. As reference.ours() else."""
    from fxtune.objectives.language_model import LanguageModel

    given = batch(family, device)
    prepared, pipeline, evidence, notes = reference.prepare_saved(
        pipeline, folder(family), given, dtype, lora, trains_images=not lora
    )
    head = LanguageModel(prepared, pipeline.liger)
    assert all(one.acted for one in head.evidence), head.evidence
    found = passed(pipeline, head, given)
    return Result(found.loss, found.logits, found.grads, evidence, notes), (pipeline, head)


def passed(pipeline: Any, head: Any, given: Any) -> Result:
    """The result of one forward and backward pass."""
    head.model.zero_grad()
    with pipeline.precision.context(given.input_ids.device):
        loss = head.summed_loss(given)
        loss.backward()
        logits = head.log_probs(given).detach()
    grads = {
        reference._plain_name(name): parameter.grad.float().cpu()
        for name, parameter in head.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return Result(loss.item(), logits.float().cpu(), grads)


def isolation(pipeline: Any, head: Any, family: str, device: str = "cuda") -> tuple[float, float]:
    """By how much the log-probabilities of a document move when its images change, and those of all others: the
    largest differences."""
    given, other = (batch(family, device, changed) for changed in (False, True))
    with pipeline.precision.context(given.input_ids.device), torch.no_grad():
        shifts = (head.log_probs(given) - head.log_probs(other)).abs().cpu()
    first_in_row = int((given.cu_seqlens < given.input_ids.shape[1]).sum())  # behind the padding of the first row
    inside = given.document_of_target().cpu() == first_in_row
    return shifts[inside].max().item(), shifts[~inside].max().item()


def plain(family: str, device: str = "cuda", dtype: str = "float32", adapted: tuple[str, ...] = ()) -> Result:
    """The result of plain transformers (and peft): one forward pass a document, no mask, no autocast, no TF32.

    `adapted`: names of modules with adapters, as those of `ours`; without, all weights are trained.
    """
    key = family, device, dtype, adapted
    if key not in _KEPT:
        loss, seen, grads = reference.elsewhere(_plain, family, str(folder(family)), device, dtype, adapted)
        named = {name: torch.from_numpy(gradient) for name, gradient in grads.items()}
        _KEPT[key] = Result(loss, torch.from_numpy(seen), named)
    return _KEPT[key]


def adapted(result: Result) -> tuple[str, ...]:
    """The names of the modules whose adapters have gradients in `result`."""
    names = (name.removeprefix("base_model.model.").partition(".lora_")[0] for name in result.grads)
    return tuple(sorted({name.replace(".base_layer", "") for name in names}))


_KEPT: dict[Any, Result] = {}


@functools.cache
def _config(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder(family))


def _load(saved: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(saved, dtype=dtype, attn_implementation="eager").eval()


def _plain(
    family: str, saved: str, device: str, dtype: str, modules: tuple[str, ...]
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """The work of `plain` in the other process."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    shown, half = documents(family, Path(saved)), getattr(torch, dtype)
    built = _load(Path(saved), half).to(device)
    trained: Any = built
    if modules:
        import peft

        parts = {name: isinstance(built.get_submodule(name), torch.nn.Linear) for name in modules}
        linears, experts = ([name for name in modules if parts[name] == linear] for linear in (True, False))
        options = peft.LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=linears,
            target_parameters=[f"{name}.{weight}" for name in experts for weight in ("gate_up_proj", "down_proj")],
            task_type="CAUSAL_LM",
        )
        trained = peft.get_peft_model(built, options)
        for name, parameter in trained.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
        reference._fill_adapters(trained)
    total, seen = 0.0, []
    for document in shown:
        ids = document.ids[None].to(device)
        images = {
            name: tensor.to(device, half if tensor.is_floating_point() else None)
            for name, tensor in document.images.items()
        }
        out = trained(input_ids=ids, **images, **image_models.type_ids(built, ids), use_cache=False)
        later = ids[0, 1:]
        wanted = later != image_models.IMAGE_TOKEN
        chosen = out.logits[0, :-1].float().log_softmax(-1).gather(1, later[:, None])[wanted, 0]
        loss = -chosen.sum()
        loss.backward()
        total += loss.item()
        seen.append(chosen.detach().cpu())
    grads = {
        name: parameter.grad.float().cpu().numpy()
        for name, parameter in trained.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    del built, trained
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return total, torch.cat(seen).numpy(), grads
