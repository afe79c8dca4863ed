"""Measures the whole steps of reinforcement learning with fxtune and with TRL's GRPOTrainer, in seconds by part.

    python scripts/bench/whole_step.py fxtune vllm --venv /tmp/vllm --shape 8b      # vLLM in a process of its own
    python scripts/bench/whole_step.py trl vllm --shape 8b                          # vLLM in TRL's process (colocate)
    python scripts/bench/whole_step.py fxtune model --shape 1b                      # the trained model writes the answers
    python scripts/bench/whole_step.py trl generate --shape 1b                      # transformers' generate()
    python scripts/bench/whole_step.py trl continuous --shape 1b                    # transformers' continuous batching
    python scripts/bench/whole_step.py fxtune model --smoke                         # a tiny model on a CPU

Both tools train LoRA r=16 on the same random weights with the same prompts and settings: the clipped surrogate of
ratios, rewards minus their group's mean, fused AdamW. Random weights rarely end an answer, so almost every answer has
--tokens tokens. The reward is the share of even token ids, so the rewards of a group differ.

A step's parts: `sync` gives the sampler the trained weights, `sampling` writes the answers, `rewards` scores them,
`training` is forward and backward pass and update, `rest` is everything else. In `rest` fxtune compares the sampler's
log-probabilities with the model's and writes the step to the disk; TRL computes the log-probabilities of the old policy
(only with vLLM). The device is synchronized at the end of each part. Step 1 compiles and allocates, so `median` leaves
it out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import companions  # noqa: E402
from peer_tools import LINEARS, write_model  # noqa: E402
from shapes import DECODERS  # noqa: E402

PARTS = ("sync", "sampling", "rewards", "training", "rest", "step")
TOKENIZER = ROOT / "fxtune" / "assets" / "tiny"


def main() -> None:
    args = arguments()
    args.scratch.mkdir(parents=True, exist_ok=True)
    model = write_model(
        DECODERS[args.shape], args.length, args.scratch / f"policy-{args.shape}", TOKENIZER, "AutoModelForCausalLM"
    )
    steps = (run_fxtune if args.tool == "fxtune" else run_trl)(args, model)
    print(f"{args.tool}, {args.sampler}: {args.prompts} prompts x {args.answers} answers x {args.tokens} tokens")
    print(f"| step | {' | '.join(PARTS)} |\n|---|{'---:|' * len(PARTS)}")
    for number, parts in enumerate(steps, 1):
        print(f"| {number} | {' | '.join(f'{parts[name]:.2f}' for name in PARTS)} |")
    medians = {name: statistics.median(parts[name] for parts in steps[1:] or steps) for name in PARTS}
    print(f"| median | {' | '.join(f'{medians[name]:.2f}' for name in PARTS)} |")
    tokens = args.prompts * args.answers * args.tokens
    print(f"{tokens / medians['step']:,.0f} answer tokens a second of a whole step", flush=True)
    print(json.dumps({"tool": args.tool, "sampler": args.sampler, "shape": args.shape, "steps": steps, **medians}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("fxtune", "trl"))
    parser.add_argument("sampler", choices=("model", "generate", "continuous", "vllm"))
    parser.add_argument("--shape", choices=DECODERS, default="8b")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro", type=int, default=8, help="TRL: answers of a micro-batch")
    parser.add_argument(
        "--rows", type=int, default=2, help="fxtune: rows of a micro-batch, each with a prompt's answers"
    )
    parser.add_argument("--recompute", action="store_true", help="TRL: with gradient checkpointing")
    parser.add_argument("--memory", type=float, default=0.3, help="the share of the card's memory that vLLM takes")
    parser.add_argument("--eager", action="store_true", help="vLLM: without CUDA graphs, which starts sooner")
    parser.add_argument("--venv", type=Path, help="fxtune: the environment with vLLM")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fxtune-peers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="fxtune: a further key")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens, for a CPU")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.prompts, args.answers, args.prompt, args.tokens = "tiny_128k", 2, 4, 40, 24
        args.micro, args.rows = 4, 1
    args.length = 64 * math.ceil((args.prompt + args.answers * (args.tokens + 1)) / 64)  # a row of fxtune
    return args


def prompts(args: argparse.Namespace) -> list[str]:
    """Texts of random words, which are one token each."""
    known, draw = companions.words(TOKENIZER), random.Random(0)
    return [" ".join(draw.choices(known, k=args.prompt)) for _ in range(args.prompts * args.steps)]


def run_fxtune(args: argparse.Namespace, model: Path) -> list[dict[str, float]]:
    """The seconds of each step's parts, from the run's own figures."""
    run, rows = args.scratch / "whole-step-run", args.scratch / "whole-step.jsonl"
    shutil.rmtree(run, ignore_errors=True)
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(args)))
    import torch

    cuda = torch.cuda.is_available()
    vllm = ["sampler=vllm", f"sampler.venv={args.venv}"]
    options = ["--gpu-memory-utilization", str(args.memory), *["--enforce-eager"] * args.eager]
    if cuda:
        total = torch.cuda.mem_get_info()[1] / 2**30
        vllm += [f"sampler.arguments=[{','.join(json.dumps(each) for each in options)}]"]
        vllm += [f"run.memory_gib={int(total * (0.95 - args.memory))}"]
    words = [
        f"model.path={model}",
        "objective=policy",
        "objective.rewards=[{name: even}]",
        "objective.max_gap=1",  # random weights round more coarsely than trained ones
        f"techniques={'[lora,fast]' if cuda else 'lora'}",
        f"data.sources=[{{path: '{rows}'}}]",
        f"data.cache_dir={args.scratch / 'tokens'}",
        f"data.sequence_length={args.length}",
        "data.packing=true",
        "data.eval_fraction=0",
        f"sampler.answers={args.answers}",
        f"sampler.max_tokens={args.tokens}",
        *(vllm if args.sampler == "vllm" else [f"sampler.batch={args.prompts * args.answers}"]),
        f"train.max_steps={args.steps}",
        f"train.global_batch_size={args.prompts}",
        f"train.micro_batch_size={args.rows}",
        "train.log_every=1",
        "optimizer.lr=1e-5",
        "optimizer.weight_decay=0",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
        f"run.dir={run}",
        *([] if cuda else ["run.device=cpu"]),
        *args.set,
    ]
    plugin = str(ROOT / "scripts" / "bench" / "ids_reward.py")
    subprocess.run([sys.executable, "-m", "fxtune", *words, "--plugin", plugin], check=True, cwd=ROOT)
    steps = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/step_seconds" in row:
            parts = {
                "sync": row.get("rollout/sync_seconds", 0.0),
                "sampling": row["rollout/sampling_seconds"],
                "rewards": row["rollout/reward_seconds"],
                "training": row["train/forward_backward_seconds"] + row["train/update_seconds"],
                "step": row["train/step_seconds"],
            }
            steps.append(with_rest(parts))
    return steps


def with_rest(parts: dict[str, float]) -> dict[str, float]:
    return {**parts, "rest": 2 * parts["step"] - sum(parts.values())}


def run_trl(args: argparse.Namespace, model: Path) -> list[dict[str, float]]:
    """The seconds of each step's parts, measured around the trainer's own methods."""
    if args.sampler == "vllm":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL reaches into vLLM's process
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda, seconds, steps = torch.cuda.is_available(), defaultdict[str, float](float), list[dict[str, float]]()

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(owner: Any, name: str, part: str) -> None:
        """Add the seconds of a method to `part`."""
        inner = getattr(owner, name)

        def outer(*given: Any, **named: Any) -> Any:
            began = now()
            try:
                return inner(*given, **named)
            finally:
                seconds[part] += now() - began

        setattr(owner, name, outer)

    class Clock(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            seconds.clear()
            seconds["step"] = -now()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            seconds["step"] += now()
            # Sampling contains the synchronization, and the training step contains everything.
            inside = seconds["sampling"] - seconds["sync"]
            training = seconds["training"] - seconds["making"]
            parts = {name: seconds[name] for name in ("sync", "rewards", "step")}
            steps.append(with_rest({**parts, "sampling": inside, "training": training}))

    def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]

    sampling: dict[str, Any] = {}
    if args.sampler == "vllm":
        sampling = dict(
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=args.memory,
            vllm_max_model_length=args.prompt + args.tokens,
        )
    elif args.sampler == "continuous":
        sampling = dict(use_transformers_continuous_batching=True)
    config = GRPOConfig(
        output_dir=str(args.scratch / "whole-step-trl"),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.prompts * args.answers // args.micro,
        num_generations=args.answers,
        max_completion_length=args.tokens,
        max_steps=args.steps,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="none",
        temperature=1.0,
        top_k=0,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=args.recompute,
        use_liger_kernel=cuda,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **sampling,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa"),
        reward_funcs=even,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts(args)]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, bias="none", target_modules=LINEARS
        ),
        callbacks=[Clock()],
    )
    timed(trainer, "_generate", "sampling")
    timed(trainer, "_calculate_rewards", "rewards")
    timed(trainer, "_prepare_inputs", "making")
    timed(trainer, "training_step", "training")
    if args.sampler == "vllm":
        timed(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    return steps


if __name__ == "__main__":
    main()
