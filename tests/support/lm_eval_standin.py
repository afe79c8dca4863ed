"""A small package with the names and signatures of lm-eval that fxtune uses, and a virtual environment with lm-eval.

The stand-in follows lm-eval's public interface for tasks of one kind, and computes with plain transformers. It shows
that fxtune calls lm-eval correctly, where lm-eval is not installed. The slow tests run the real package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import types
import venv
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import yaml

LM_EVAL = "0.4.13"
PROMPTS: list[str] = []
"""The prompts of the last evaluation."""
ROOT = Path(__file__).resolve().parents[2]


def write_task(folder: Path, name: str, rows: Sequence[tuple[str, Sequence[str], int]]) -> None:
    """Write a task of lm-eval, with its documents: (question, choices, number of the right choice)."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"question": question, "choices": list(choices), "answer": answer})
        for question, choices, answer in rows
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((folder / f"{name}.jsonl").absolute())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


class Task:
    def __init__(self, file: Path) -> None:
        self.documents = [json.loads(line) for line in Path(file).read_text().splitlines()]
        self.seeds = list[int]()

    def set_fewshot_seed(self, seed: int) -> None:
        self.seeds.append(seed)


class TaskManager:
    def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
        found = [yaml.safe_load(file.read_text()) for file in Path(include_path or "no folder").rglob("*.yaml")]
        self._files = {each["task"]: each["dataset_kwargs"]["data_files"]["test"] for each in found}

    @property
    def all_tasks(self) -> list[str]:
        return sorted(self._files)

    def load(self, names: list[str]) -> dict[str, Any]:
        return {"tasks": {name: Task(self._files[name]) for name in names}, "groups": {}, "group_map": {}}


class HFLM:
    def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int) -> None:
        self.model, self.tokenizer = pretrained, tokenizer
        self.model.eval()
        self.tokenizer.pad_token = "<changed>"  # the real one chooses a pad token

    def likelihood(self, question: str, choice: str) -> float:
        start = len(self.tokenizer(question)["input_ids"])
        ids = torch.tensor([self.tokenizer(question + choice)["input_ids"]])
        logits = self.model(ids.to(self.model.device)).logits[0].float().log_softmax(-1).cpu()
        return logits[start - 1 : -1].gather(1, ids[0, start:, None]).sum().item()


def evaluate(
    lm: HFLM, task_dict: dict[str, Any], limit: int | None, bootstrap_iters: int, apply_chat_template: bool
) -> dict[str, Any]:
    PROMPTS.clear()
    torch.rand(1)  # the real one may draw numbers
    results, samples = dict[str, Any](), dict[str, Any]()
    for name, task in task_dict["tasks"].items():
        samples[name] = []
        for document in task.documents[:limit]:
            question = document["question"]
            if apply_chat_template:
                chat = [{"role": "user", "content": question}]
                question = lm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            PROMPTS.append(question)
            likely = [lm.likelihood(question, f" {choice}") for choice in document["choices"]]
            samples[name].append({"filter": "none", "acc": float(likely.index(max(likely)) == document["answer"])})
        mean = sum(sample["acc"] for sample in samples[name]) / len(samples[name])
        results[name] = {"alias": name, "acc,none": mean, "acc_stderr,none": "N/A"}
    return {"results": results, "samples": samples, "group_subtasks": {name: [] for name in results}}


def install(monkeypatch: Any) -> None:
    """Make the stand-in importable as lm_eval."""
    names: dict[str, dict[str, Any]] = {
        "lm_eval": {"evaluate": evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def real_lm_eval() -> Path:
    """The Python of a virtual environment with lm-eval beside the packages of these tests, made once a machine. The
    versions of requirements.lock hold, except that lm-eval's writer of tables becomes an old one."""
    folder = Path.home() / ".cache" / "fxtune-tests" / f"lm-eval-{LM_EVAL}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _put_beside(folder)
        wanted = [f"lm-eval[api]=={LM_EVAL}", "-c", str(ROOT / "requirements.lock")]
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *wanted], check=True)
        (folder / "ready").touch()
    _put_beside(folder)  # the environment of these tests may have moved
    return folder / "bin" / "python"


def _put_beside(folder: Path) -> None:
    """Let the virtual environment in `folder` also find the packages of these tests."""
    (own,) = folder.glob("lib/python3*/site-packages")
    (own / "beside.pth").write_text(sysconfig.get_path("purelib"))
