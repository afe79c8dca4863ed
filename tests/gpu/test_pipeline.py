"""All techniques together: the loss follows plain transformers and peft in bfloat16.

test_deterministic.py tests that a killed run with them loses nothing.

A small base is pre-trained here for seconds on Python's own library (plain torch), then LoRA-tuned on torch's C++
headers: real text with documents of all lengths, and a loss that falls far enough for a difference to show.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.decoder_sizes import decoder_sizes

ASSETS = Path(__file__).resolve().parents[2] / "fxtune" / "assets"
SIZES = dict(
    **decoder_sizes(512, 1536, layers=4, heads=4, key_heads=2, head_dim=128, vocabulary=1024),
    max_position_embeddings=4096,
    rope_theta=10000.0,
    pad_token_id=0,
    eos_token_id=2,
)
STEPS, WARMUP, RATE = 200, 10, 1e-3
EVERYTHING = ("techniques=[fast,lora,selective]",)


def text(folder: Path, suffix: str, total: int) -> list[str]:
    """Files below `folder` in a fixed shuffled order, until they have `total` characters."""
    files = [path for path in sorted(folder.rglob(f"*{suffix}")) if 500 < path.stat().st_size < 40_000]
    random.Random(0).shuffle(files)
    found: list[str] = []
    while files and sum(map(len, found)) < total:
        found.append(files.pop().read_text(errors="replace"))
    return found


def make_base(folder: str, texts: list[str], sizes: dict[str, Any], steps: int, device: str) -> None:
    """Pre-train a base with plain transformers, and save it with a tokenizer and a peft adapter to start from.

    B of the adapter is small and not zero: an adapter with B = 0 is refused as never trained.
    """
    import peft
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    ids = torch.cat([torch.tensor([*each, 2]) for each in tokenizer(texts)["input_ids"]])
    rows = ids[: len(ids) // 512 * 512].view(-1, 512)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (32,))].to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
    model = model.bfloat16()
    model.save_pretrained(f"{folder}/base")
    tokenizer.save_pretrained(f"{folder}/base")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=1e-4)
    adapted.save_pretrained(f"{folder}/start")


def plain_run(folder: str, steps: list[list[tuple[np.ndarray, np.ndarray]]], device: str) -> list[float]:
    """The losses of plain bfloat16 training, with the documents of a step padded into one masked batch."""
    import peft
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        f"{folder}/base", dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = peft.PeftModel.from_pretrained(model.to(device), f"{folder}/start", is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses = []
    for step, documents in enumerate(steps):
        longest = max(len(tokens) for tokens, _ in documents)
        ids = torch.zeros(len(documents), longest, dtype=torch.long)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, (tokens, wanted) in enumerate(documents):
            for into, values in ((ids, tokens), (targets, wanted), (mask, np.ones_like(tokens))):
                into[row, : len(tokens)] = torch.from_numpy(values)
        ids, mask, targets = ids.to(device), mask.to(device), targets.to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> SimpleNamespace:
    return make_setting(tmp_path_factory.mktemp("together"), "cuda")


def make_setting(
    folder: Path,
    device: str,
    sizes: dict[str, Any] = SIZES,
    pretrain: int = 300,
    size: int = 8_000_000,
    length: int = 4096,
) -> SimpleNamespace:
    """A base, an adapter to start from, and documents, in `folder`."""
    before = text(Path(sysconfig.get_paths()["stdlib"]), ".py", size // 2)
    after = text(Path(torch.__file__).parent / "include", ".h", size)
    assert sum(map(len, after)) > size / 2, "torch has no headers on this machine"
    reference.elsewhere(make_base, str(folder), before, sizes, pretrain, device)
    (folder / "headers.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in after))
    return SimpleNamespace(folder=folder, device=device, length=length)


def command(setting: SimpleNamespace, name: str, steps: int) -> list[str]:
    folder = setting.folder
    return [
        sys.executable,
        "-m",
        "fxtune",
        f"model.path={folder / 'base'}",
        f"model.adapter={folder / 'start'}",
        f"data.sources=[{{path: '{folder / 'headers.jsonl'}'}}]",
        f"data.sequence_length={setting.length}",
        f"data.cache_dir={folder / 'cache'}",
        f"run.dir={folder / name}",
        f"run.device={setting.device}",
        f"train.max_steps={steps}",
        "train.epochs=100",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        f"optimizer.lr={RATE}",
        "schedule.name=constant",
        f"schedule.warmup_steps={WARMUP}",
        "checkpoint.every=0",
        "tracking.wandb.mode=disabled",
        "tracking.display=plain",
        *EVERYTHING,
    ]


def trained(line: list[str]) -> list[float]:
    """Run the command `line` to its end and return its losses."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return logged(Path(next(word for word in line if word.startswith("run.dir=")).removeprefix("run.dir=")))


def logged(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def documents(setting: SimpleNamespace, line: list[str]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The documents of each step of the command `line`: the plan's rows, split where positions restart."""
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    plan = RunBuilder(load(line[3:])).read(setting.folder / "quarantine.jsonl")[1].training
    steps = []
    for step in range(plan.steps):
        found = []
        for micro in range(plan.micro_batches(step)):
            batch = plan.batch(step, micro)
            for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
                starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
                found += [
                    (ids[a:b].numpy(), targets[a:b].numpy())
                    for a, b in itertools.pairwise(starts)
                    if (targets[a:b] != -100).any()
                ]
        steps.append(found)
    return steps


def smooth(losses: list[float], window: int = 20) -> np.ndarray:
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def test_200_steps_with_all_techniques_stay_within_one_percent_of_plain_bfloat16(setting):
    line = command(setting, "all", STEPS)
    seen = trained(line)
    evidence = {each["technique"] for each in json.loads((setting.folder / "all" / "evidence.json").read_text())}
    assert {"attention", "precision", "loss", "lora", "checkpointing", "compile"} <= evidence
    wanted = reference.elsewhere(plain_run, str(setting.folder), documents(setting, line), setting.device)
    assert len(seen) == len(wanted) == STEPS
    ours, plain = smooth(seen), smooth(wanted)
    assert plain[-1] < 0.9 * plain[0], "the loss must fall, else equal losses prove nothing"
    apart = float(np.mean(np.abs(ours - plain) / plain))
    print(f"\nloss {plain[0]:.4f} -> {plain[-1]:.4f} (plain), {ours[-1]:.4f} (ours); {apart:.3%} apart on average")
    assert apart < 0.01
    assert math.isclose(ours[-1], plain[-1], rel_tol=0.01)
