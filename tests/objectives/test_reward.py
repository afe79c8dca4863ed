"""Reward models: the formula by hand; then training, export, merging and evaluation by the public commands."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import slow_but
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import figures, same_export

from fxtune.cli import evaluate
from fxtune.cli.evaluate import of_output
from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.data.batches.batch import Batch
from fxtune.objectives.reward import Reward

DATA = [
    *("data.sources=[{path: pairs.jsonl}]", "data.sequence_length=128", "data.cache_dir=cache"),
    *("data.eval_fraction=0.2", "train.micro_batch_size=2", "train.global_batch_size=4", "tracking.display=plain"),
    *("run.report=false", "run.device=cpu"),
]
ADAPTERS = ["techniques.lora.enabled=true"]
LEARNS = ["objective=reward", *DATA, *ADAPTERS, "train.max_steps=20", "optimizer.lr=3e-3"]
NARROW = [
    *DATA,
    "model.init=random",
    f"model.architecture={SMALLER}",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
]
WORDS = [
    *("the", "a", "red", "blue", "green", "cat", "dog", "runs", "sleeps", "fast", "slow", "under", "over", "tree"),
    *("house", "river"),
]


def write_pairs(file: Path, count: int) -> list[dict]:
    """Pairs of answers whose chosen one has a polite word at any place."""
    draw, rows = random.Random(0), []
    for number in range(count):
        chosen, rejected = ([draw.choice(WORDS) for _ in range(draw.randint(3, 9))] for _ in range(2))
        chosen.insert(draw.randint(0, len(chosen)), "please")
        user, answers = {"role": "user", "content": f"Case {number}"}, {"chosen": chosen, "rejected": rejected}
        chats = {name: [user, {"role": "assistant", "content": " ".join(answer)}] for name, answer in answers.items()}
        rows.append({**chats, "margin": number % 3})
    write_jsonl(file, rows)
    return rows


@pytest.fixture
def pairs(cwd) -> list[dict]:
    return write_pairs(Path("pairs.jsonl"), 48)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """A folder with pairs, `run`, a reward model trained with an adapter, and its merged model."""
    folder = tmp_path_factory.mktemp("reward")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_pairs(Path("pairs.jsonl"), 200)
        assert main([*LEARNS, "run.dir=run"]) == 0
        assert main(["merge", "run"]) == 0
    return folder


class FakeModel:
    def __init__(self, scores: list[float]) -> None:
        self.values = torch.tensor(scores, requires_grad=True)

    def scores(self, batch):
        return self.values

    def router_terms(self, batch, count):
        assert count == 2
        return None, {}


def batch(*labels: float) -> Batch:
    """A packed row of two pairs, with padding between them and an unused slot."""
    ids = torch.zeros(1, 12, dtype=torch.long)
    return Batch(
        ids,
        ids,
        ids,
        torch.tensor([0, 2, 4, 6, 8, 12, 12], dtype=torch.int32),
        torch.tensor([0, 2, 3, 6, 8]),
        torch.tensor([7, 7, 7, 7, 7]),
        tokens=10,
        group_of=torch.tensor([0, 0, -1, 1, 1, -1]),
        document_labels=torch.tensor([*labels[:2], math.nan, *labels[2:], math.nan]),
    )


def test_loss_is_the_papers_formula_with_its_gradient():
    scores = [1.5, -0.5, 9.0, 0.25, 1.0, 9.0]
    nan = math.nan
    for objective, labels, margins in (
        (Reward(center=0.0), (nan, nan, nan, nan), (0, 0)),
        (Reward(center=0.3), (3.0, 1.0, nan, nan), (0, 0)),
        (Reward(margin=True), (3.0, 1.0, nan, nan), (2, 0)),
        (Reward(margin=True), (0.5, 0.0, 1.0, 0.0), (0.5, 1)),
    ):
        model = FakeModel(scores)
        loss, metrics = objective.loss(model, batch(*labels))
        wanted, slopes = 0.0, []
        for (chosen, rejected), margin in zip(((1.5, -0.5), (0.25, 1.0)), margins, strict=True):
            wrong = 1 / (1 + math.exp(chosen - rejected - margin))
            wanted += -math.log(1 - wrong) + objective.center * (chosen + rejected) ** 2
            slopes += [sign * wrong + 2 * objective.center * (chosen + rejected) for sign in (-1, 1)]
        assert loss.item() == pytest.approx(wanted, rel=1e-6)
        loss.backward()
        assert model.values.grad.tolist() == pytest.approx([*slopes[:2], 0, *slopes[2:], 0], rel=1e-5)
        found = {name: value.item() for name, value in metrics.items()}
        assert found == pytest.approx(
            {
                "reward_accuracy": 1,
                "reward_margin": 1.25,
                "reward_chosen": 1.75,
                "reward_rejected": 0.5,
                "length_chosen": 2,
                "length_rejected": 3,
            }
        )


def plain_scores(model, tokenizer, rows: list[dict]) -> list[list[float]]:
    """As the model card says."""
    found = []
    for row in rows:
        pair = []
        for messages in (row["chosen"], row["rejected"]):
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                pair.append(model(input_ids=ids).logits[0, 0].item())
        found.append(pair)
    return found


def test_export_scores_alike_in_plain_peft_and_merged(learned, monkeypatch):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(learned)
    figures = json.loads(Path("run/result.json").read_text())
    assert figures["eval/reward_accuracy"] > 0.9  # of pairs that training has not seen
    evaluated = of_output("run")
    assert evaluated["eval/reward_margin"] == pytest.approx(figures["eval/reward_margin"], rel=1e-4)
    assert "not learned" not in Path("run/adapter/README.md").read_text()

    adapter = Path("run/adapter")
    config = AutoConfig.from_pretrained(adapter)
    assert (config.num_labels, config.id2label) == (1, {0: "score"})
    base = AutoModelForSequenceClassification.from_pretrained(
        json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"], config=config
    )
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert tokenizer.pad_token_id == config.pad_token_id != tokenizer.eos_token_id
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    adapted = plain_scores(PeftModel.from_pretrained(base, adapter).eval(), tokenizer, rows[:40])
    assert sum(chosen > rejected for chosen, rejected in adapted) >= 37
    merged = AutoModelForSequenceClassification.from_pretrained("run/merged").eval()
    for one, other in zip(plain_scores(merged, tokenizer, rows[:40]), adapted, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=5e-2)  # the base is stored in bfloat16
    card = Path("run/merged/README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "model(input_ids=ids).logits[0, 0]" in card


def test_training_and_the_plain_export_agree_on_held_out_rewards(learned, monkeypatch):
    """The mean margin over all pairs, packed, is the mean of plain transformers' scores one answer at a time."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(learned)
    rows = write_pairs(Path("few.jsonl"), 12)
    words = [word for word in LEARNS if not word.startswith(("data.sources", "data.eval_fraction"))]
    evaluation = [
        "data.sources=[{path: pairs.jsonl}]",
        "data.eval_sources=[{path: few.jsonl}]",
        "data.on_overlap=keep",
    ]
    figures = evaluate.run(load([*words, *evaluation, "model.adapter=run/adapter"]))
    base = AutoModelForSequenceClassification.from_pretrained(
        json.loads(Path("run/adapter/adapter_config.json").read_text())["base_model_name_or_path"],
        config=AutoConfig.from_pretrained("run/adapter"),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained("run/adapter")
    scores = plain_scores(PeftModel.from_pretrained(base, "run/adapter").eval(), tokenizer, rows)
    margin = sum(chosen - rejected for chosen, rejected in scores) / len(scores)
    assert figures["eval/reward_margin"] == pytest.approx(margin, rel=1e-4)


def test_adapter_is_trained_further_and_others_are_refused(learned, monkeypatch, capsys):
    monkeypatch.chdir(learned)
    further = [*LEARNS, "train.max_steps=1", "optimizer.lr=1e-6", "model.adapter=run/adapter", "run.dir=further"]
    assert main(further) == 0
    assert figures("further", "reward_accuracy")[0] == (1.0,)
    capsys.readouterr()
    words = [*LEARNS[1:], "train.max_steps=1"]
    assert main(["objective=dpo", *words, "model.adapter=run/adapter", "run.dir=dpo"]) == 2
    assert "no log-probabilities of tokens" in " ".join(capsys.readouterr().err.split())
    assert main(["objective=simpo", *words, "run.dir=simpo"]) == 0
    capsys.readouterr()
    assert main(["objective=reward", *words, "model.adapter=simpo/adapter", "run.dir=from_simpo"]) == 2
    assert "has no head that scores documents" in " ".join(capsys.readouterr().err.split())


def chat_score(folder: str, line: str, monkeypatch) -> float:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
    assert main(["chat", folder, "--json", "said.json"]) == 0
    return json.loads(Path("said.json").read_text())["texts"][0]["labels"]["score"]


def test_chat_scores_a_prompt_and_an_answer_as_training_writes_them(learned, cwd, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = learned / "run/merged"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    turns = [{"role": "user", "content": "Case 3"}, {"role": "assistant", "content": "the cat please"}]
    ((score, _),) = plain_scores(model, AutoTokenizer.from_pretrained(folder), [{"chosen": turns, "rejected": turns}])
    assert chat_score(str(folder), "Case 3\tthe cat please", monkeypatch) == pytest.approx(score, rel=1e-2)
    texts = [{"prompt": f"Case {n}: ", "chosen": "the cat", "rejected": f"{WORDS[n % 9]} {n}"} for n in range(48)]
    write_jsonl(Path("pairs.jsonl"), texts)
    assert main(["objective=reward", *NARROW, "run.dir=texts"]) == 0
    plain = AutoModelForSequenceClassification.from_pretrained("texts/model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained("texts/model")
    with torch.no_grad():
        ids = [*tokenizer("Case 3: the cat")["input_ids"], tokenizer.eos_token_id]
        wanted = plain(torch.tensor([ids])).logits[0, 0].item()
    assert chat_score("texts", "Case 3: \tthe cat", monkeypatch) == pytest.approx(wanted, abs=1e-4)
    monkeypatch.setattr("sys.stdin", io.StringIO("Case 3\n"))
    assert main(["chat", "texts"]) == 3


def train(run: str, *words: str) -> list[tuple[float, ...]]:
    assert main(["objective=reward", *NARROW, f"run.dir={run}", *words]) == 0
    return figures(run, "loss", "reward_margin", "grad_norm")


@pytest.mark.parametrize(
    ("lora", "packing"),
    slow_but([(True, True), (False, False)], (True, True)),
)
def test_run_resumes_bit_for_bit_and_any_checkpoint_is_exported(pairs, lora, packing):
    words = [f"techniques.lora.enabled={lora}", f"data.packing={packing}"]
    whole = train("whole", *words)
    train("paused", "train.pause_after=2", *words)
    if not lora:
        assert main(["merge", "paused/step-2", "exported"]) == 0
        assert load_file("exported/model.safetensors")["score.weight"].shape == (1, 64)
    else:
        assert main(["merge", "--unmerged", "paused/step-2", "exported"]) == 0
        assert load_file("exported/adapter_model.safetensors")["base_model.model.score.weight"].shape == (1, 64)
    assert train("paused", *words) == whole
    assert same_export("whole", "paused")


def test_verify_compares_with_plain_transformers_in_any_micro_batches(pairs):
    assert main(["verify", "objective=reward", *NARROW, *ADAPTERS, "--loss", "--json", "seen.json"]) == 0
    words = ["techniques.lora.enabled=false", "data.packing=false", "objective.margin=true"]
    assert main(["verify", "objective=reward", *NARROW, *words, "--loss", "--json", "full.json"]) == 0
    for file in ("seen.json", "full.json"):
        variants = json.loads(Path(file).read_text())["loss"]
        assert len(variants) > 2
        assert all(variant["loss_off"] < 1e-5 for variant in variants)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data.questions.path=pairs.jsonl"], "answers no questions"),
        (
            ["techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]"],
            "the head `score` has no logits",
        ),
        (["model.architecture={model_type: granite}"], "no head that scores documents"),
        (["objective.center=-1"], "objective.center"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(pairs, words, reason, capsys):
    assert main(["objective=reward", *NARROW, *words, "run.dir=refused"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_two_ranks_learn_what_one_process_learns(pairs, ranks, cwd, lora):
    words = ["objective=reward", *NARROW, f"techniques.lora.enabled={lora}", "data.cache_dir=other"]
    alone = train("alone", f"techniques.lora.enabled={lora}")
    assert ranks.run([*words, "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(alone, figures("together", "loss", "reward_margin"), strict=True):
        assert other == pytest.approx(one[:2], rel=1e-4, abs=1e-6)
