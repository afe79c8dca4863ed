"""Compares the losses of preference training step by step: fxtune and TRL, in float32, from one adapter.

    python scripts/study/equal_preferences.py --trl VENV/bin/python                     # 30 steps of each case
    python scripts/study/equal_preferences.py --trl VENV/bin/python --cases ipo orpo

The base is the tiny model that ships with fxtune, and the pairs are `builtin:preferences_train`. The script draws one
adapter. Both tools continue it, and its start is the reference of both. fxtune runs first, one document a row; its plan
says which pairs each step has, and TRL gets these pairs in this order. Both take AdamW at a constant rate, clip the
gradient at 1, and divide by the pairs of the step.

TRL runs as it is. Where it departs from an objective, it runs again with the departure corrected, which must make the
losses equal: `Correction` says what TRL does. The table has the largest difference of a loss over all steps. The exit
code is 1 if it is above 1e-5 in the last run of a case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "fxtune" / "assets" / "tiny"
PAIRS_FILE = ROOT / "fxtune" / "assets" / "data" / "preferences_train.jsonl"
TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo": ("trl", "DPO", {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": ("trl", "DPO", {"loss_type": ["ipo"], "beta": 0.1}),
    "kto": ("trl", "KTO", {"beta": 0.1}),
    "orpo": ("trl.experimental.orpo", "ORPO", {"beta": 0.1}),
    "simpo": (
        "trl.experimental.cpo",
        "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "reward": ("trl", "Reward", {"center_rewards_coefficient": 0.01}),
}
"""fxtune's objective -> TRL's module, the name of its trainer, and the options with fxtune's default values."""
PAIRS, RATE, BOUND = 8, 1e-4, 1e-5
"""Pairs of a step (answers for KTO), the learning rate, and the largest difference of a loss."""
START = "objective.reference=start"

Row = dict[str, Any]


class Correction(str, Enum):
    """A place where TRL departs from the objective. The value says what TRL does."""

    end_of_turn = "counts the newline that the chat template writes after an answer as a token of the answer"
    second_end = "adds a second end token after that newline, and counts both as tokens of the answer"
    likelihood_of_pairs = "takes the likelihood as a mean over all tokens of the micro-batch"
    likelihood_of_answers = (
        "takes the likelihood over the prompt, too, and as a mean over all tokens of the micro-batch"
    )
    label_smoothing = "ignores `label_smoothing`"
    mismatched = "takes the mismatched answer from the row before it in the micro-batch"


@dataclass(frozen=True)
class Case:
    objective: str
    keys: list[str] = field(default_factory=list)
    """fxtune's."""
    options: dict[str, Any] = field(default_factory=dict)
    """TRL's."""
    corrections: tuple[Correction, ...] = ()


CASES = {
    "dpo": Case("dpo", [START]),
    "dpo, label_smoothing": Case(
        "dpo", [START, "objective.label_smoothing=0.1"], {"label_smoothing": 0.1}, (Correction.label_smoothing,)
    ),
    "dpo, hinge": Case("dpo", [START, "objective.loss_type=hinge"], {"loss_type": ["hinge"]}),
    "dpo, sft_weight": Case(
        "dpo",
        [START, "objective.sft_weight=1"],
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
        (Correction.likelihood_of_pairs, Correction.end_of_turn),
    ),
    "dpo, length_normalized": Case(
        "dpo", [START, "objective.length_normalized=0.5"], {"ld_alpha": 0.5}, (Correction.end_of_turn,)
    ),
    "ipo": Case("ipo", [START], corrections=(Correction.end_of_turn,)),
    "kto": Case("kto", [START], corrections=(Correction.mismatched,)),
    "orpo": Case("orpo", corrections=(Correction.likelihood_of_answers, Correction.second_end)),
    "simpo": Case("simpo", corrections=(Correction.second_end,)),
    "reward": Case("reward"),
}


def draw_adapter(objective: str, folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    task = "SEQ_CLS" if objective == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)
    model = get_peft_model(base_model(objective), lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=1e-3)
    model.save_pretrained(folder)


def base_model(objective: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if objective == "reward":
        return AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def rows_of(objective: str) -> list[Row]:
    """The pairs, with answers as turns of a chat. For KTO all chosen answers as good ones, then all rejected as bad."""
    sides = ("chosen", "rejected")
    pairs = [json.loads(line) for line in PAIRS_FILE.read_text().splitlines()]
    pairs = [{**pair, **{side: [{"role": "assistant", "content": pair[side]}] for side in sides}} for pair in pairs]
    if objective != "kto":
        return pairs
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for side in sides
        for pair in pairs
    ]


def run_fxtune(case: Case, steps: int, adapter: Path, folder: Path) -> tuple[list[float], list[int]]:
    """(the loss of each step, the rows in the order of training)"""
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(case.objective)))
    words = [
        "+recipe=dpo_quickstart",
        f"objective={case.objective}",
        *case.keys,
        f"model.adapter={adapter}",
        f"data.sources=[{{path: {data}}}]",
        "data.packing=false",
        "data.eval_fraction=0",
        "data.questions.path=null",
        f"data.cache_dir={folder / 'tokens'}",
        f"train.micro_batch_size={2 * PAIRS}",
        f"train.global_batch_size={2 * PAIRS}",
        f"train.max_steps={steps}",
        "train.epochs=null",
        "train.eval_every=0",
        "train.log_every=1",
        f"optimizer.lr={RATE}",
        "optimizer.weight_decay=0",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.eps=1e-8",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
        "run.device=cpu",
        "run.report=false",
        "tracking.display=none",
        f"run.dir={folder / 'run'}",
    ]
    subprocess.run([sys.executable, "-m", "fxtune", *words], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    with ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        builder = RunBuilder(load(words))
        plan = builder.read()[1].training
    documents = [document for step in range(steps) for _, document in plan.documents(step, 0)]
    order = [document // 2 for document in documents if document % 2 == 0]
    assert len(order) == steps * PAIRS
    return [line["train/loss"] for line in lines if "train/loss" in line], order


def run_trl(request: dict[str, Any]) -> list[float]:
    """Runs in the venv of TRL: the loss of each step."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer

    case, corrections = CASES[request["case"]], [Correction[name] for name in request["corrections"]]
    module, prefix, options = TRAINERS[case.objective]
    of_trl, rows = importlib.import_module(module), rows_of(case.objective)
    kind = getattr(of_trl, f"{prefix}Trainer")
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    if {Correction.end_of_turn, Correction.second_end} & {*corrections}:
        tokenizer.chat_template = without_last_newline(tokenizer.chat_template)
    if Correction.label_smoothing in corrections:
        _smooth_labels(case.options["label_smoothing"])
    # The mean over the tokens of a micro-batch of one pair is the mean over the answer.
    pairs = 1 if Correction.likelihood_of_pairs in corrections else PAIRS

    class Corrected(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
            prepared = super()._prepare_dataset(dataset, *given)
            if Correction.mismatched not in corrections:
                return prepared
            others = [_mismatched(rows, row) for row in request["order"]]
            others = super()._prepare_dataset(Dataset.from_list(others), *given)["completion_ids"]
            return prepared.remove_columns("KL_completion_ids").add_column("KL_completion_ids", list(others))

        def concatenated_forward(self, *given: Any) -> Any:
            means, *others = super().concatenated_forward(*given)
            if Correction.likelihood_of_answers in corrections:
                others[3] = -means.mean()
            return means, *others

    trainer = Corrected(
        model=PeftModel.from_pretrained(base_model(case.objective), request["adapter"], is_trainable=True),
        args=getattr(of_trl, f"{prefix}Config")(
            output_dir=request["folder"],
            weight_decay=0.0,
            max_length=512,
            report_to=[],
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=pairs,
            gradient_accumulation_steps=PAIRS // pairs,
            max_steps=request["steps"],
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            **{**options, **case.options},
        ),
        train_dataset=Dataset.from_list([rows[row] for row in request["order"]]),
        processing_class=tokenizer,
    )
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def noting(*arguments: Any, **named: Any) -> Any:
        found = compute_loss(*arguments, **named)
        losses.append((found[0] if isinstance(found, tuple) else found).item())
        return found

    trainer.compute_loss = noting  # its log rounds to four digits
    trainer.train()
    return [statistics.mean(losses[first : first + PAIRS // pairs]) for first in range(0, len(losses), PAIRS // pairs)]


def ask_trl(python: Path, request: dict[str, Any]) -> list[float]:
    """run_trl() in the venv of `python`, which has no fxtune."""
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps(request))
        command = [python, __file__, "--inside", file]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL)
        return list(json.loads(file.read_text()))


def without_last_newline(template: str) -> str:
    """The chat template of the tiny model, without the newline after a chat that ends with an answer."""
    newline, end = "{{- '\\n' }}", "\n{%- endfor %}"
    assert newline + end in template
    return template.replace(newline + end, "{{- '\\n' if add_generation_prompt or not loop.last }}" + end)


def _smooth_labels(share: float) -> None:
    """cDPO in the place of TRL's log-sigmoid: with `share` the rejected answer is the better one."""
    from types import SimpleNamespace

    from torch.nn import functional
    from trl.trainer import dpo_trainer

    def log_sigmoid(margin: Any) -> Any:
        return (1 - share) * functional.logsigmoid(margin) + share * functional.logsigmoid(-margin)

    dpo_trainer.F = SimpleNamespace(**{**vars(functional), "logsigmoid": log_sigmoid})


def _mismatched(rows: list[Row], row: int) -> Row:
    """The row whose answer is mismatched in fxtune: the next row with another prompt and another answer."""
    own, later = rows[row], rows[row + 1 :] + rows[:row]
    return next(
        other for other in later if other["prompt"] != own["prompt"] and other["completion"] != own["completion"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="a Python with trl and peft")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], help="(default: all)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        args.inside.write_text(json.dumps(run_trl(json.loads(args.inside.read_text()))))
        return
    if args.trl is None:
        parser.error("--trl: give a Python with trl and peft")
    worst = 0.0
    print("| case | first loss | last loss | TRL as it is | TRL corrected | TRL |\n|---|---:|---:|---:|---:|---|")
    for name in args.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="equal-preferences-") as scratch:
            folder = Path(scratch)
            draw_adapter(case.objective, folder / "adapter")
            losses, order = run_fxtune(case, args.steps, folder / "adapter", folder)
            request = dict(case=name, steps=args.steps, order=order, adapter=str(folder / "adapter"))
            differences = []
            for corrections in dict.fromkeys([(), case.corrections]):
                names = [correction.name for correction in corrections]
                asked = {**request, "corrections": names, "folder": str(folder / "trl")}
                theirs = ask_trl(args.trl, asked)
                differences.append(max(abs(mine - other) for mine, other in zip(losses, theirs, strict=True)))
        worst = max(worst, differences[-1])
        figures = [f"{loss:.6f}" for loss in (losses[0], losses[-1])] + [f"{most:.1e}" for most in differences]
        figures += [""] * (not case.corrections)
        print(f"| {name} | {' | '.join(figures)} | {'; '.join(case.corrections)} |", flush=True)
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
