"""Trains one small task with fxtune and with TRL's GRPOTrainer, and prints the held-out reward over the seconds of training.

    python scripts/bench/reward_over_time.py                                  # both tools, seeds 0, 1 and 2; CPU or GPU
    python scripts/bench/reward_over_time.py --tools trl --own                # TRL with its own advantages and bounds
    python scripts/bench/reward_over_time.py --seeds 0 --steps 4 --every 2    # a short test

The task comes from +recipe=rl_quickstart: the tiny base of fxtune writes the answers of a shop's clerk in four forms, and
the reward is 1 for the exact answer in the preferred form, else 0. Both tools get the same base in float32, the same
prompts, LoRA r=16 on all linears, the same constant learning rate, and 16 prompts with 8 answers a step. The loss is
the clipped surrogate, bounded at 0.8 and 1.28, of rewards minus their group's mean, and each token counts the same.
--own leaves advantages and bounds at TRL's defaults: divided by the group's deviation, bounded at 0.8 and 1.2.

The held-out reward is the share of right answers to 100 other orders, one sampled answer each. Seconds count
sampling, rewards and training, not the start and the evaluations. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from peer_tools import LINEARS  # noqa: E402

TINY, DATA = ROOT / "fxtune" / "assets" / "tiny", ROOT / "fxtune" / "assets" / "data"
PROMPTS, ANSWERS, TOKENS, QUESTIONS = 16, 8, 64, 100
Curve = list[tuple[int, float, float]]
"""(step, seconds of training, held-out reward)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=("fxtune", "trl"), default=["fxtune", "trl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--micro", type=int, default=PROMPTS * ANSWERS, help="TRL: answers of a micro-batch")
    parser.add_argument("--own", action="store_true", help="TRL: its own advantages and bounds")
    parser.add_argument("--goal", type=float, default=0.5, help="also print the seconds to this reward")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fxtune-reward")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a process of TRL: the file of its curve
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    if args.one:
        Path(args.one).write_text(json.dumps(run_trl(args, args.seeds[0])))
        return
    curves: dict[str, dict[int, Curve]] = {}
    for tool in args.tools:
        for seed in args.seeds:
            curve = run_fxtune(args, seed) if tool == "fxtune" else run_trl_in_process(args, seed)
            curves.setdefault(tool, {})[seed] = curve
            shown = ", ".join(f"{reward:.2f} at {seconds:.0f} s" for _, seconds, reward in curve)
            print(f"{tool} seed {seed}: {shown}", flush=True)
    print("| tool | seed | step | seconds | held-out reward |\n|---|---:|---:|---:|---:|")
    for tool, seeds in curves.items():
        for seed, curve in seeds.items():
            for step, seconds, reward in curve:
                print(f"| {tool} | {seed} | {step} | {seconds:.1f} | {reward:.3f} |")
    for tool, seeds in curves.items():
        reached = [next((at for _, at, reward in curve if reward >= args.goal), None) for curve in seeds.values()]
        last = statistics.mean(curve[-1][2] for curve in seeds.values())
        print(f"{tool}: seconds to a reward of {args.goal:g}: {reached}; mean reward at the end {last:.3f}")
    print(json.dumps({"own": args.own, "lr": args.lr, "curves": curves}))


def run_fxtune(args: argparse.Namespace, seed: int) -> Curve:
    run = args.scratch / f"fxtune-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    words = [
        "+recipe=rl_quickstart",
        "model.dtype=float32",
        "data.eval_fraction=0",
        "data.questions.path=null",
        "data.eval_sources=[{path: 'builtin:preferences_test', columns: {chosen: answer}, unused: [rejected], "
        f"limit: {QUESTIONS}}}]",
        f"data.cache_dir={args.scratch / 'tokens'}",
        "techniques.lora.r=16",
        "techniques.lora.alpha=32",
        f"sampler.batch={PROMPTS * ANSWERS}",
        f"train.max_steps={args.steps}",
        f"train.micro_batch_size={PROMPTS}",
        f"train.eval_every={args.every}",
        "train.log_every=1",
        f"optimizer.lr={args.lr}",
        "optimizer.weight_decay=0",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
        f"run.seed={seed}",
        f"run.dir={run}",
        "run.report=false",
    ]
    with (args.scratch / f"fxtune-{seed}.log").open("w") as log:
        subprocess.run([sys.executable, "-m", "fxtune", *words], check=True, cwd=ROOT, stdout=log, stderr=log)
    curve, seconds = [], 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        seconds += row.get("train/step_seconds", 0.0)
        if "eval/reward" in row:
            curve.append((int(row["train/step"]), seconds, float(row["eval/reward"])))
    return curve


def run_trl_in_process(args: argparse.Namespace, seed: int) -> Curve:
    out = args.scratch / f"trl-{seed}.json"
    given = [f"--{name}={getattr(args, name)}" for name in ("steps", "every", "lr", "micro", "scratch")]
    given += ["--own"] * args.own
    with (args.scratch / f"trl-{seed}.log").open("w") as log:
        words = [sys.executable, __file__, *given, "--seeds", str(seed), "--one", str(out)]
        subprocess.run(words, check=True, stdout=log, stderr=log)
    return [(step, seconds, reward) for step, seconds, reward in json.loads(out.read_text())]


def rows(name: str) -> list[dict[str, Any]]:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    found = map(json.loads, lines)
    return [{"prompt": row["prompt"], "answer": row["chosen"]} for row in found]


def run_trl(args: argparse.Namespace, seed: int) -> Curve:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda, curve = torch.cuda.is_available(), Curve()
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    questions = rows("preferences_test")[:QUESTIONS]

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def exact(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return [float(each[0]["content"].strip() == right) for each, right in zip(completions, answer, strict=True)]

    def held_out(model: Any) -> float:
        asked: Any = tokenizer.apply_chat_template(
            [row["prompt"] for row in questions],
            add_generation_prompt=True,
            return_dict=True,
            padding=True,
            return_tensors="pt",
        )
        asked = asked.to(model.device)
        model.eval()
        with torch.no_grad():
            made = model.generate(**asked, max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        model.train()
        texts = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(text.strip() == row["answer"] for text, row in zip(texts, questions, strict=True)) / len(questions)

    class Clock(TrainerCallback):
        began, seconds = 0.0, 0.0

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.began = now()

        def on_step_end(self, _: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:  # type: ignore[override]
            self.seconds += now() - self.began
            if state.global_step % args.every == 0 or state.global_step == args.steps:
                curve.append((state.global_step, self.seconds, held_out(model)))

    same = {} if args.own else dict(scale_rewards="none", epsilon=0.2, epsilon_high=0.28)
    config = GRPOConfig(
        output_dir=str(args.scratch / f"trl-{seed}"),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=PROMPTS * ANSWERS // args.micro,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        max_steps=args.steps,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        top_k=0,
        bf16=False,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        learning_rate=args.lr,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=seed,
        **same,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows("preferences_train")),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, bias="none", target_modules=LINEARS
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    return curve


if __name__ == "__main__":
    main()
