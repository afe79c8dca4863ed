"""The quickstart with fewer steps: it learns its task, and plain peft and transformers load the result."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.runs import history

from fxtune.cli.main import main

ASSETS = Path(__file__).resolve().parents[2] / "fxtune" / "assets"

pytestmark = pytest.mark.slow


def exact_matches(folder: Path) -> list[float]:
    """A run's exact match before and after training."""
    return [line["questions/exact_match"] for line in history(folder) if "questions/exact_match" in line]


def generate_answer(model, question: dict, tokenizer) -> str:
    ids = tokenizer.apply_chat_template(
        question["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        written = model.generate(input_ids=ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_quickstart_learns_and_plain_peft_loads_the_adapter(cwd):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = subprocess.run(
        [sys.executable, "-m", "fxtune", "+recipe=quickstart", "train.max_steps=36"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder, out = Path("runs/quickstart"), done.stdout
    before, after = exact_matches(folder)
    assert before <= 0.1
    assert after >= 0.9
    assert "Exactly right on 100 held-out questions" in out
    assert "The adapter is in runs/quickstart/adapter" in out
    assert (
        out.splitlines()[-1]
        == "Next: fxtune chat quickstart, fxtune eval quickstart, fxtune export quickstart --to vllm"
    )
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    questions = [
        json.loads(line) for line in (ASSETS / "data" / "quickstart_test.jsonl").read_text().splitlines()[:10]
    ]
    right = [
        generate_answer(model, question, tokenizer) == question["messages"][-1]["content"] for question in questions
    ]
    assert sum(right) >= 8
    card = (folder / "adapter" / "README.md").read_text()
    assert "builtin:tiny" in card
    assert "questions/exact_match" in card


def test_dpo_learns_the_preferred_answers(cwd, capsys):
    """A third of the pairs are enough."""
    words = ["data.questions.limit=20", "data.sources.0.limit=400", "optimizer.lr=8e-4"]
    assert main(["+recipe=dpo_quickstart", *words]) == 0
    before, after = exact_matches(Path("runs/dpo_quickstart"))
    assert before == 0
    assert after >= 0.8
    last = [line for line in history(Path("runs/dpo_quickstart")) if "eval/reward_accuracy" in line][-1]
    assert last["eval/reward_accuracy"] >= 0.9
    assert last["eval/reward_margin"] > 0
    out = capsys.readouterr().out
    assert f"Preferences met in {last['eval/reward_accuracy']:.1%} of held-out rows (reward_accuracy)" in out
    page = Path("runs/dpo_quickstart/report.html").read_text()
    assert "Reward margin" in page


def test_full_fine_tuning_learns_and_plain_transformers_loads_the_model(cwd):
    """A third of the steps are enough. It runs in this process, since the test above starts the command."""
    from transformers import AutoModelForCausalLM

    assert main(["+recipe=full_quickstart", "data.questions.limit=20", "train.max_steps=30"]) == 0
    folder = Path("runs/full_quickstart")
    before, after = exact_matches(folder)
    assert before <= 0.1
    assert after >= 0.9
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), base.parameters(), strict=True))


def test_vision_quickstart_reads_held_out_pictures_and_plain_transformers_loads_the_merged_model(cwd):
    """Half of the questions are enough. The base sees and answers in English, so fine-tuning teaches the format. The
    processor is read by fxtune, as transformers' own needs torchvision."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    from fxtune.upstream.transformers import read_processor

    assert main(["+recipe=vision_quickstart", "data.questions.limit=50"]) == 0
    folder = Path("runs/vision_quickstart")
    before, after = exact_matches(folder)
    assert before == 0
    assert after >= 0.9
    answers = [json.loads(line) for line in (folder / "answers_before.jsonl").read_text().splitlines()]
    assert not any("{" in answer["answer"] for answer in answers)
    seen = [json.loads(answer["right"])["shape"].split()[2] in answer["answer"] for answer in answers]
    assert sum(seen) >= 40, "the base must tell the color of most shapes"
    assert main(["merge", str(folder)]) == 0
    merged = folder / "merged"
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(merged)
    processor = read_processor(merged, tokenizer, AutoConfig.from_pretrained(merged))
    lines = (ASSETS / "data" / "vision_test.jsonl").read_text().splitlines()[:10]
    right = 0
    for *question, answer in (json.loads(line)["messages"] for line in lines):
        picture = question[-1]["content"][0]["image"].partition(",")[2]
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[text], images=[[Image.open(BytesIO(b64decode(picture)))]], return_tensors="pt")
        with torch.no_grad():
            written = model.generate(**inputs, max_new_tokens=96, do_sample=False)
        said = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += said.strip() == answer["content"]
    assert right >= 8


def test_sweep_and_python_api_over_objectives_of_preferences(cwd):
    import fxtune

    short = ["train.max_steps=2", "data.questions.limit=2", "data.sources.0.limit=60", "run.report=false"]
    assert main(["-m", "+recipe=dpo_quickstart", *short, "objective=ipo,simpo"]) == 0
    swept = json.loads(next(Path("runs").rglob("sweep.json")).read_text())["runs"]
    assert len(swept) == 2
    assert all("eval/reward_accuracy" in run["figures"] for run in swept)
    run = fxtune.train("dpo_quickstart", [*short, "objective=orpo", "run.dir=api"])
    assert run.result["eval/length_chosen"] > 0
    assert run.generate("Ida from Bern ordered two red hats.")
