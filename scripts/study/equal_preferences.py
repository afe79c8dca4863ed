"""Compares the losses of preference training step by step: fxtune and TRL, in float32, from one adapter.

    python scripts/study/equal_preferences.py --trl VENV/bin/python            # 30 steps of DPO
    python scripts/study/equal_preferences.py --trl VENV/bin/python --objectives ipo

The base is the tiny model that ships with fxtune, and the pairs are `builtin:preferences_train`. The script draws one
adapter. Both tools continue it, and its start is the reference of both. fxtune runs first, one document a row; its plan
says which pairs each step has, and TRL gets these pairs in this order. Both take AdamW at a constant rate, clip the
gradient at 1, and divide by the pairs of the step. The table has the largest difference of a loss over all steps, and
the exit code is 1 if one is above 1e-5.

IPO is not equal: from the second step on its loss differs by some 1e-4 of itself, so the margins do. TRL's users report
that its mean a token counts a token too many (huggingface/trl#6879). Not compared: KTO, whose KL term TRL takes from
neighbours in a micro-batch, and ORPO, whose likelihood covers the prompt in TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, TINY = ROOT / "fxtune" / "assets" / "data", ROOT / "fxtune" / "assets" / "tiny"
PAIRS, RATE, BOUND = 8, 1e-4, 1e-5
"""Pairs of a step, the learning rate, and the largest difference of a loss."""
START = ["objective.reference=start"]
OBJECTIVES = {
    "dpo": (START, ("trl", "DPO"), {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": (START, ("trl", "DPO"), {"loss_type": ["ipo"], "beta": 0.1}),
}
"""fxtune's keys, TRL's module and trainer, and its options."""


def draw_adapter(folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=1e-3)
    model.save_pretrained(folder)


def run_fxtune(objective: str, steps: int, adapter: Path, folder: Path) -> tuple[list[float], list[int]]:
    """(the loss of each step, the rows of the file in the order of training)"""
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    words = [
        "+recipe=dpo_quickstart",
        f"objective={objective}",
        *OBJECTIVES[objective][0],
        f"model.adapter={adapter}",
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
        "schedule.warmup_ratio=0",
        "schedule.warmup_steps=0",
        "run.device=cpu",
        "run.report=false",
        "tracking.display=none",
        f"run.dir={folder / objective}",
    ]
    subprocess.run([sys.executable, "-m", "fxtune", *words], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / objective / "metrics.jsonl").read_text().splitlines()]
    with ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        plan = RunBuilder(load(words)).read()[1].training
    documents = [document for step in range(steps) for _, document in plan.documents(step, 0)]
    chosen = [document // 2 for document in documents if document % 2 == 0]
    assert len(chosen) == steps * PAIRS
    return [line["train/loss"] for line in lines if "train/loss" in line], chosen


def run_trl(request: dict[str, Any]) -> list[float]:
    """Runs in the venv of TRL: the loss of each step."""
    import importlib

    import torch
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, (module, name), options = OBJECTIVES[request["objective"]]
    library = importlib.import_module(module)
    kind, settings = getattr(library, f"{name}Trainer"), getattr(library, f"{name}Config")

    class InOrder(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    lines = [json.loads(line) for line in (DATA / "preferences_train.jsonl").read_text().splitlines()]
    rows = [
        {
            "prompt": lines[at]["prompt"],
            **{side: [{"role": "assistant", "content": lines[at][side]}] for side in ("chosen", "rejected")},
        }
        for at in request["order"]
    ]
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = settings(
        output_dir=request["folder"],
        per_device_train_batch_size=PAIRS,
        max_steps=request["steps"],
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=512,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        **options,
    )
    trainer = InOrder(
        model=PeftModel.from_pretrained(base, request["adapter"], is_trainable=True),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TINY, padding_side="left"),
    )
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def noting(*arguments: Any, **named: Any) -> Any:
        found = compute_loss(*arguments, **named)
        losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found

    trainer.compute_loss = noting  # its log rounds to four digits
    trainer.train()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="a Python with trl and peft")
    parser.add_argument("--objectives", nargs="+", default=["dpo"], choices=[*OBJECTIVES], help="(default: dpo)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        request = json.loads(args.inside.read_text())
        args.inside.write_text(json.dumps(run_trl(request)))
        return
    if args.trl is None:
        parser.error("--trl: give a Python with trl and peft")
    worst = 0.0
    print("| objective | first loss | last loss | largest difference |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="equal-preferences-") as scratch:
        folder = Path(scratch)
        draw_adapter(folder / "adapter")
        for objective in args.objectives:
            losses, order = run_fxtune(objective, args.steps, folder / "adapter", folder)
            request = dict(objective=objective, steps=args.steps, order=order, adapter=str(folder / "adapter"))
            file = folder / f"{objective}.json"
            file.write_text(json.dumps({**request, "folder": str(folder / "trl")}))
            command = [args.trl, __file__, "--inside", file]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL)
            theirs = json.loads(file.read_text())
            difference = max(abs(mine - other) for mine, other in zip(losses, theirs, strict=True))
            worst = max(worst, difference)
            print(f"| {objective} | {losses[0]:.6f} | {losses[-1]:.6f} | {difference:.1e} |", flush=True)
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
