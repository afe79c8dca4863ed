"""Which bases parallel.shard divides over cards: each kind is trained for a few steps on one card and on several.

    python scripts/study/divided_bases.py --gpus 2            # on two cards
    python scripts/study/divided_bases.py --gpus 2 --smoke    # on processes of the CPU, where fp8 is refused

It prints a table in Markdown: the largest difference of a loss from one card's, or fxtune's reason for a refusal. Exit
code 1 if a base that docs/distributed.md calls divided was not, or one that it calls refused trained. The models are
small and random, so this says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

LINEARS = ["techniques.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"]
BASES: dict[str, tuple[str, bool, list[str]]] = {
    "model.dtype": ("llama", True, []),
    "trained": ("llama", True, ["techniques.lora.enabled=false"]),
    "fp8": ("llama", True, ["techniques.quantize.enabled=true", "techniques.quantize.type=fp8"]),
    "nf4": ("llama", False, ["techniques.quantize.enabled=true", "techniques.quantize.type=nf4"]),
    "int8": ("llama", False, ["techniques.quantize.enabled=true", "techniques.quantize.type=int8"]),
    "mxfp4 experts": (
        "mixtral",
        False,
        [*LINEARS, "techniques.quantize.enabled=true", "techniques.quantize.type=mxfp4"],
    ),
    "experts stored apart": ("mixtral", True, LINEARS),
    "trained experts stored apart": ("mixtral", True, ["techniques.lora.enabled=false"]),
    "experts in fp8": (
        "mixtral",
        True,
        [
            "techniques.lora.target_modules=[all-linear]",
            "techniques.quantize.enabled=true",
            "techniques.quantize.type=fp8",
            "techniques.quantize.experts=on",
        ],
    ),
    "experts with adapters": ("mixtral", True, ["techniques.lora.target_modules=[all-linear]"]),
}
"""Name -> (kind of model, whether docs/distributed.md says that it is divided, keys)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--bases", type=lambda text: text.split(","), default=list(BASES), help="some of them")
    parser.add_argument("--smoke", action="store_true", help="processes of the CPU")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = {kind: write_model(folder / kind, kind) for kind in {BASES[name][0] for name in args.bases}}
        print("| base | expected | on several cards |\n|---|---|---|")
        for name in args.bases:
            kind, divided, words = BASES[name]
            runs_here = divided and not (args.smoke and name.endswith("fp8"))
            common = [f"model.path={models[kind]}", *words, *(["run.device=cpu"] if args.smoke else [])]
            shared = [f"run.gpus={args.gpus}", f"parallel.shard={args.gpus}"]
            trained, seen = train(folder / "shared", [*common, *shared])
            if trained:
                alone, losses = train(folder / "alone", [*common, "run.gpus=1"])
                pairs = zip(seen, losses, strict=True) if alone else ()
                seen = (
                    [f"loss within {max(abs(one - other) for one, other in pairs):.1e} of one card's"]
                    if alone
                    else losses
                )
            wrong += trained is not runs_here
            print(f"| {name} | {'divided' if runs_here else 'refused'} | {seen[0]} |", flush=True)
    sys.exit(min(wrong, 1))


def write_model(folder: Path, kind: str) -> Path:
    """A small random model, with the tokenizer of the built-in one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    from fxtune.system.hub import locate

    torch.manual_seed(0)
    tiny = locate("builtin:tiny").folder
    tokens = json.loads((tiny / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": tokens, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    if kind == "llama":
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    else:
        MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)).save_pretrained(folder)
    for file in (*tiny.glob("tokenizer*"), *tiny.glob("*.jinja"), *tiny.glob("special_tokens*")):
        shutil.copy(file, folder)
    return folder


def train(folder: Path, words: list[str]) -> tuple[bool, list]:
    """Whether a short run in `folder` trained, and its losses; else fxtune's reason."""
    shutil.rmtree(folder, ignore_errors=True)
    recipe = [
        "+recipe=quickstart",
        f"run.dir={folder}",
        "train.max_steps=4",
        "tracking.display=plain",
        "run.report=false",
    ]
    rows = [
        "train.micro_batch_size=4",
        "train.global_batch_size=8",
        "data.sequence_length=256",
        "model.init=pretrained",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *recipe, *rows, "model.architecture={}", *words],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith(("parallel.shard", "techniques."))] or lines[-1:]
        return False, [f"exit {done.returncode}: {reasons[0]}"]
    rows_read = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return True, [row["train/loss"] for row in rows_read if "train/loss" in row]


if __name__ == "__main__":
    main()
