"""LoRA training with plain transformers, peft and torch's AdamW: the reference of equal_loss.py. It imports nothing of
fxtune.

The rows come as a .npz file with the ids, targets and positions of every step and of the held-out rows, so both sides
train on the same tokens in the same order. Attention is torch's SDPA with an explicit mask: a token attends to itself
and to earlier tokens of its document. (gpt-oss, whose attention has sinks, runs transformers' eager attention, with a
second mask for layers with a window.) There is no packing kernel, no fused kernel and no compilation. The loss is
torch's cross-entropy of float32 logits, averaged over the step's targets.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

SPREAD = 1e-4
"""Standard deviation of B in an initial adapter. An untrained adapter has B = 0; here B is only close to it."""


@dataclass(frozen=True)
class Job:
    """One training of the adapter in `start` over `base`."""

    base: str
    start: Optional[str]
    """None: all weights of the base are trained, and there is no adapter."""
    rows: str
    """ids, targets, positions: int32 [steps, rows, length]; held_ids, held_targets, held_positions: [rows, length]."""
    rates: tuple[float, ...]
    """The learning rate of each step."""
    eval_every: int
    betas: tuple[float, float]
    eps: float
    clip: float
    float32: bool = False
    """In float32, also on a GPU."""


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": "all-linear"},
    "qwen3_moe": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "gpt_oss": {
        "target_modules": ATTENTION,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
"""The linear layers of attention and of the experts, in the names that peft knows, by the type of the base.
transformers keeps the experts of a layer in one tensor."""


def make_start(base: str, folder: str, seed: int, r: int, alpha: float) -> None:
    """Draw an adapter for all linear layers of `base`, but a mixture's routers, and write it to `folder`. All variants
    start from it."""
    import peft
    import torch

    torch.manual_seed(seed)
    plain = _load_base(base)
    lora = peft.LoraConfig(r=r, lora_alpha=alpha, task_type="CAUSAL_LM", **TARGETS[plain.config.model_type])
    model = peft.get_peft_model(plain, lora)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=SPREAD)
    model.save_pretrained(folder, save_embedding_layers=False)  # by default peft queries the hub


def tune(job: Job) -> dict[str, Any]:
    """Train.

    Returns the loss of each step, (step, held-out loss) pairs (step 0 is before training) and the median step time.
    """
    import numpy as np
    import torch

    rows = dict(np.load(job.rows))  # np.load reads an array again at each access
    model = _load_adapted(job.base, job.start, job.float32).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # All weights take the fused AdamW, as in transformers' Trainer: the other rounds each intermediate to bfloat16.
    options = {"betas": job.betas, "eps": job.eps, "weight_decay": 0.0, "fused": None if job.start else True}
    optimizer = torch.optim.AdamW(trained, lr=job.rates[0], **options)
    losses: list[float] = []
    held_out = [(0, _held_out_loss(model, rows))]
    seconds: list[float] = []
    for step, rate in enumerate(job.rates):
        began = time.perf_counter()
        total, count = _summed_loss(model, *(rows[name][step] for name in ("ids", "targets", "positions")))
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        if (step + 1) % job.eval_every == 0 or step + 1 == len(job.rates):
            held_out.append((step + 1, _held_out_loss(model, rows)))
    assert "fxtune" not in sys.modules, "the reference must not use fxtune"
    return {"train": losses, "held_out": held_out, "step_seconds": float(np.median(seconds))}


def judge(base: str, adapter: Optional[str], rows: str) -> float:
    """The held-out loss of `base`, with the adapter in `adapter` over it, in plain transformers and peft."""
    import numpy as np

    return _held_out_loss(_load_adapted(base, adapter), dict(np.load(rows)))


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _load_base(base: str, float32: bool = False) -> Any:
    """The base in bfloat16 on a GPU, or in float32 on a CPU and with `float32`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = _device()
    dtype = torch.bfloat16 if device.type == "cuda" and not float32 else torch.float32
    attention = "eager" if AutoConfig.from_pretrained(base).model_type == "gpt_oss" else "sdpa"
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation=attention).to(device)


def _load_adapted(base: str, adapter: Optional[str], float32: bool = False) -> Any:
    import peft

    if adapter is None:
        return _load_base(base, float32)

    return peft.PeftModel.from_pretrained(_load_base(base, float32), Path(adapter), is_trainable=True)


def _held_out_loss(model: Any, rows: Any) -> float:
    """Mean loss in nats over the targets of the held-out rows. Restores the model's training mode."""
    import torch

    training, size = model.training, rows["ids"].shape[1]
    model.eval()
    held = [rows[f"held_{name}"] for name in ("ids", "targets", "positions")]
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(held[0]), size):
            some, targets = _summed_loss(model, *(part[first : first + size] for part in held))
            total, count = total + some.item(), count + targets
    model.train(training)
    return total / count


def _summed_loss(model: Any, ids: Any, targets: Any, positions: Any) -> tuple[Any, int]:
    """Cross-entropy in nats summed over the targets of [rows, length], and the number of targets."""
    import torch
    from torch.nn import functional as F

    device = _device()
    ids, targets, positions = (torch.from_numpy(part).long().to(device) for part in (ids, targets, positions))
    document = (positions == 0).cumsum(1)
    length = ids.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask: Any = ((document[:, :, None] == document[:, None, :]) & before)[:, None]
    if model.config.model_type == "gpt_oss":  # eager attention adds its mask, and every second layer has a window
        near = torch.ones_like(before).triu(1 - model.config.sliding_window)
        least = torch.finfo(model.dtype).min
        mask = {
            name: torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill(~seen, least)
            for name, seen in (("full_attention", mask), ("sliding_attention", mask & near))
        }
    with _autocast(device.type if model.dtype is torch.bfloat16 else "float32"):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return losses, int((targets != -100).sum())


def _autocast(device: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else nullcontext()
