"""What each objective of preferences makes of the built-in task, whose best answer to each order is known.

    python scripts/study/preference_quality.py --json preferences.json                       # continues if it is there
    python scripts/study/preference_quality.py --json preferences.json --trl VENV/bin/python # also TRL, in its own venv
    python scripts/study/preference_quality.py --json /tmp/smoke.json --smoke                # a short test

Each run is `fxtune +recipe=dpo_quickstart objective=NAME` with its default values, for three seeds, on all 1,000 pairs.
KTO gets their 2,000 answers, each judged by itself. A run is judged by the 120 pairs of the held-out file: `accuracy`
is the share of pairs whose chosen answer has the higher reward (for KTO: whose log ratio to the base is higher), `form`
the share of greedy answers in the form that the pairs prefer, `right` the share of answers that are the preferred
answer to the last character, and `log_probs` the mean log-probability of a token of the chosen answers.

TRL gets the same rows, steps, pairs a step, adapters and rates, and is asked the same questions. Its own evaluation
says its accuracy; `--trl` needs a Python with trl and peft.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import trl_trainers
from trl_trainers import DATA, judged_alone, pairs, write_rows

RECIPE = "dpo_quickstart"
RUNS = {
    "dpo": ["objective=dpo"],
    "dpo, lr 1e-3": ["objective=dpo", "optimizer.lr=1e-3"],
    "ipo": ["objective=ipo"],
    "kto": ["objective=kto"],
    "orpo": ["objective=orpo"],
    "simpo": ["objective=simpo"],
}
"""Name -> what differs from the recipe."""
PEERS = ("dpo", "ipo", "kto", "orpo", "simpo")
SEEDS = (0, 1, 2)
ON_PAIRS = ["data.eval_fraction=0", "data.eval_sources=[{path: builtin:preferences_test}]"]
LEARNING_RATE, WARMUP = 4e-4, 2
STEPS, PAIRS_A_STEP = 52, 19
KTO_STEPS, ANSWERS_A_STEP = 102, 20
"""Four packed rows hold about 19 pairs, or 20 answers of KTO with their mismatched answers."""
FORM = re.compile(r"Dear \w+, .+ will leave for \w+ today\.")

Figures = dict[str, Any]


def run_fxtune(words: list[str], seed: int, smoke: bool) -> Figures:
    with tempfile.TemporaryDirectory(prefix="fxtune-preferences-") as folder:
        run = Path(folder, "run")
        data = ON_PAIRS
        if is_kto := "objective=kto" in words:
            rows = Path(folder, "answers.jsonl")
            write_rows(rows, judged_alone(pairs("train")))
            data = [f"data.sources=[{{path: {rows}}}]", "data.eval_fraction=0", f"data.questions.path={DATA['test']}"]
            data.append("data.sequence_length=512")  # an answer and its mismatched one do not share their prompt
        command = [sys.executable, "-m", "fxtune", f"+recipe={RECIPE}", *words, *data, "data.questions.limit=120"]
        command += [f"run.seed={seed}", f"run.dir={run}", "run.report=false", "tracking.display=none"]
        command += ["train.max_steps=2", "data.questions.limit=4"] * smoke
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        answers = [json.loads(line) for line in (run / "answers_after.jsonl").read_text().splitlines()]
        if is_kto:  # its own evaluation judges answers, not pairs
            lines.append(ranking_of(run / "adapter"))
    evaluation = [line for line in lines if "eval/reward_accuracy" in line][-1]
    return {
        "accuracy": evaluation["eval/reward_accuracy"],
        "log_probs": evaluation["eval/log_probs_chosen"],
        **judged([row["answer"] for row in answers], [row["right"] for row in answers]),
    }


def ranking_of(adapter: Path) -> Figures:
    """The figures of DPO on the held-out pairs: a reward is the log ratio of the adapter to the base."""
    from fxtune.cli import evaluate
    from fxtune.config.compose import load

    words = [f"+recipe={RECIPE}", "objective.reference=base", *ON_PAIRS, "data.questions.path=null"]
    return evaluate.run(load([*words, f"model.adapter={adapter}"]))


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

    train, test, is_kto = pairs("train"), pairs("test"), objective == "kto"
    steps, rows_a_step = (KTO_STEPS, ANSWERS_A_STEP) if is_kto else (STEPS, PAIRS_A_STEP)
    # KTO's trainer reads the rows in their order: as they are, all good answers before all bad ones.
    shuffled_answers = Dataset.from_list(judged_alone(train)).shuffle(seed)
    torch.manual_seed(seed)
    tokenizer = trl_trainers.tokenizer()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory(prefix="trl-preferences-") as folder:
        common = dict(per_device_eval_batch_size=20, seed=seed)
        trainer = trl_trainers.trainer_class(objective)(
            model=trl_trainers.base(objective),
            args=trl_trainers.settings(
                objective,
                folder,
                per_device_train_batch_size=rows_a_step,
                max_steps=2 if smoke else steps,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="cosine",
                warmup_steps=WARMUP,
                **common,
            ),
            train_dataset=shuffled_answers if is_kto else Dataset.from_list(train),
            eval_dataset=None if is_kto else Dataset.from_list(test),
            processing_class=tokenizer,
            peft_config=lora,
        )
        trainer.train()
        judge = trainer
        if is_kto:  # its own evaluation judges answers, not pairs
            judge = trl_trainers.trainer_class("dpo")(
                model=trainer.model,
                ref_model=trl_trainers.base("dpo"),
                args=trl_trainers.settings("dpo", folder, **common),
                train_dataset=Dataset.from_list(test),
                eval_dataset=Dataset.from_list(test),
                processing_class=tokenizer,
            )
        accuracy = judge.evaluate()["eval_rewards/accuracies"]
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
    parser.add_argument("--json", type=Path, help="figures; what it has is not run again")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="a Python with trl and peft: also run TRL")
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS], help="(default: all)")
    parser.add_argument("--smoke", action="store_true", help="one seed of two steps: a short test")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        trl_trainers.reply(args.inside, lambda request: run_trl(**request))
        return
    if args.json is None:
        parser.error("--json: give a file for the figures")
    found: dict[str, Figures] = json.loads(args.json.read_text()) if args.json.exists() else {}

    def keep(key: str, run: Callable[[], Figures]) -> None:
        if key not in found:
            found[key] = run()
            args.json.write_text(json.dumps(found, indent=1))

    for seed in SEEDS[: 1 if args.smoke else None]:
        for name in args.runs:
            keep(f"{name} seed {seed}", partial(run_fxtune, RUNS[name], seed, args.smoke))
            if args.trl and name in PEERS:
                request = dict(objective=name, seed=seed, smoke=args.smoke)
                keep(f"{name} of TRL seed {seed}", partial(trl_trainers.ask, args.trl, __file__, request))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
