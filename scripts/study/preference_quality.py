"""What each objective of preferences makes of the built-in task, whose best answer to each order is known.

    python scripts/study/preference_quality.py --json preferences.json                       # continues if it is there
    python scripts/study/preference_quality.py --json preferences.json --trl VENV/bin/python # also TRL, in its own venv
    python scripts/study/preference_quality.py --json /tmp/smoke.json --smoke                # a short test

Each run is `fxtune +recipe=dpo_quickstart objective=NAME` with its default values, for three seeds, on all 1,000 pairs.
It is judged by the 120 pairs of the held-out file: `accuracy` is the share of pairs whose chosen answer has the higher
reward, `form` the share of greedy answers in the form that the pairs prefer, `right` the share of answers that are the
preferred answer to the last character, and `log_probs` the mean log-probability of a token of the chosen answers.

TRL gets the same pairs, steps, pairs a step, adapters and rates, and is asked the same questions. Its own evaluation
says its accuracy; `--trl` needs a Python with trl and peft.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, TINY = ROOT / "fxtune" / "assets" / "data", ROOT / "fxtune" / "assets" / "tiny"
RECIPE = "dpo_quickstart"
RUNS = {
    "dpo": ["objective=dpo"],
    "dpo, lr 1e-3": ["objective=dpo", "optimizer.lr=1e-3"],
    "ipo": ["objective=ipo"],
    "orpo": ["objective=orpo"],
    "simpo": ["objective=simpo"],
}
"""Name -> what differs from the recipe."""
PEERS = ("dpo", "ipo", "orpo", "simpo")
SEEDS = (0, 1, 2)
HELD_OUT = [
    "data.eval_fraction=0",
    "data.eval_sources=[{path: builtin:preferences_test}]",
    "data.questions.limit=120",
]
LEARNING_RATE, PAIRS_A_STEP, STEPS, WARMUP = 4e-4, 19, 52, 2
"""As the recipe has them: a step of four packed rows has about 19 pairs."""
CHOICES = ("chosen", "rejected")
FORM = re.compile(r"Dear \w+, .+ will leave for \w+ today\.")

Figures = dict[str, Any]


def run_fxtune(words: list[str], seed: int, smoke: bool) -> Figures:
    with tempfile.TemporaryDirectory(prefix="fxtune-preferences-") as folder:
        command = [sys.executable, "-m", "fxtune", f"+recipe={RECIPE}", *words, *HELD_OUT, f"run.seed={seed}"]
        command += [f"run.dir={folder}/run", "run.report=false", "tracking.display=none"]
        command += ["train.max_steps=2", "data.questions.limit=4"] * smoke
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        answers = [json.loads(line) for line in Path(folder, "run", "answers_after.jsonl").read_text().splitlines()]
    evaluation = [line for line in lines if "eval/reward_accuracy" in line][-1]
    return {
        "accuracy": evaluation["eval/reward_accuracy"],
        "log_probs": evaluation["eval/log_probs_chosen"],
        **judged([row["answer"] for row in answers], [row["right"] for row in answers]),
    }


def judged(answers: list[str], right: list[str]) -> Figures:
    return {
        "form": sum(bool(FORM.fullmatch(answer)) for answer in answers) / len(answers),
        "right": sum(given == best for given, best in zip(answers, right, strict=True)) / len(answers),
    }


def run_trl(objective: str, seed: int, smoke: bool) -> Figures:
    """Runs in the venv of TRL: train, evaluate, and answer the questions."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if objective in ("dpo", "ipo"):
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer

        options = {"loss_type": "ipo" if objective == "ipo" else "sigmoid", "beta": 0.1}
    elif objective == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        options = {"beta": 0.1}
    else:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Trainer

        options = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}

    def rows(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (DATA / f"preferences_{name}.jsonl").read_text().splitlines()]
        turns = {side: [[{"role": "assistant", "content": row[side]}] for row in lines] for side in CHOICES}
        return [
            {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
            for row, chosen, rejected in zip(lines, turns["chosen"], turns["rejected"], strict=True)
        ]

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    test = rows("test")
    with tempfile.TemporaryDirectory(prefix="trl-preferences-") as folder:
        config = Config(
            output_dir=folder,
            per_device_train_batch_size=PAIRS_A_STEP,
            per_device_eval_batch_size=20,
            max_steps=2 if smoke else STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP,
            weight_decay=0.0,
            max_length=512,
            seed=seed,
            report_to=[],
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            **options,
        )
        trainer = Trainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows("train")),
            eval_dataset=Dataset.from_list(test),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    answers = []
    for row in test[: 4 if smoke else None]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            written = trainer.model.generate(**ids, max_new_tokens=64, do_sample=False)
        answers.append(tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return {"accuracy": accuracy, **judged(answers, [row["chosen"][0]["content"] for row in test[: len(answers)]])}


def table(found: dict[str, Figures]) -> Iterable[str]:
    """The figures of all seeds, as a table of Markdown."""
    yield "| run | held-out accuracy | preferred form | exactly right | log-probability of a chosen token |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(key.rpartition(" seed ")[0] for key in found):
        seeds = [figures for key, figures in found.items() if key.rpartition(" seed ")[0] == name]
        shares = [
            ", ".join(f"{100 * figures[column]:.0f}" for figures in seeds) + " %"
            for column in ("accuracy", "form", "right")
        ]
        known = [f"{figures['log_probs']:.2f}" for figures in seeds if "log_probs" in figures]
        yield f"| {name} | {' | '.join(shares)} | {', '.join(known)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="figures; what it has is not run again")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="a Python with trl and peft: also run TRL")
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS], help="(default: all)")
    parser.add_argument("--smoke", action="store_true", help="one seed of two steps: a short test")
    parser.add_argument("--inside", nargs=2, metavar=("OBJECTIVE", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        args.json.write_text(json.dumps(run_trl(args.inside[0], int(args.inside[1]), args.smoke)))
        return
    found: dict[str, Figures] = json.loads(args.json.read_text()) if args.json.exists() else {}
    for seed in SEEDS[: 1 if args.smoke else None]:
        for name in args.runs:
            if (key := f"{name} seed {seed}") not in found:
                found[key] = run_fxtune(RUNS[name], seed, args.smoke)
                args.json.write_text(json.dumps(found, indent=1))
            key = f"{name} of TRL seed {seed}"
            if args.trl and name in PEERS and key not in found:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder, "figures.json")
                    command = [args.trl, __file__, "--json", out, "--inside", name, str(seed)]
                    command += ["--smoke"] * args.smoke
                    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
                    found[key] = json.loads(out.read_text())
                args.json.write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
