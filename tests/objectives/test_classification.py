"""Classifiers: losses and figures against transformers and scikit-learn, rows of many shapes, and public commands."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import figures, history, same_export
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from fxtune.cli.main import main
from fxtune.data.formats.labelled import LabelledFormat, label_name
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.formats.values import RowError
from fxtune.objectives.classification import Classification, Problem

WORDS = ["red", "blue", "green", "cat", "dog", "house", "river", "tree", "fast", "slow", "under", "over"]
MODEL = [
    *("model.init=random", f"model.architecture={SMALLER}", "optimizer.lr=1e-2", "data.sequence_length=64"),
    *("data.cache_dir=cache", "run.report=false", "tracking.display=plain", "run.device=cpu", "data.dedup=off"),
    *("train.micro_batch_size=2", "train.global_batch_size=2", "train.max_steps=4"),
]
SOURCE = "data.sources=[{path: rows.jsonl}]"
LEARNS = ["objective=classification", *MODEL, SOURCE, "data.eval_fraction=0.3"]


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 20)))


def write(labels: list, file: str = "rows.jsonl", count: int = 40) -> list[dict]:
    draw = random.Random(0)
    rows = [{"text": text(draw), "label": labels[number % len(labels)]} for number in range(count)]
    write_jsonl(Path(file), rows)
    return rows


def run(*words: str) -> None:
    assert main([*LEARNS, *words]) == 0


def error(capsys, *words: str) -> str:
    assert main([*LEARNS, "run.dir=refused", *words]) in (2, 3)  # 3: the data is at fault
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("spam", "spam"), (" spam ", "spam"), (1, "1"), ("1", "1"), (1.0, "1"), ("1.0", "1"), (0.25, "0.25")),
        *((True, "true"), (-3, "-3"), ("007", "007"), (["b", "a", "b"], '["a", "b"]'), ('["b", 1]', '["1", "b"]')),
        *(([], "[]"), (1e-5, "0.00001"), ("1e-05", "0.00001"), ("9007199254740993", "9007199254740993"), ("-0", "0")),
    ],
)
def test_a_label_has_one_name_however_it_is_written(given, name):
    assert label_name(given) == name


@pytest.mark.parametrize("given", [float("nan"), "NaN", float("inf"), "", "  ", {"a": 1}, None])
def test_what_is_no_label(given):
    with pytest.raises(RowError):
        label_name(given)


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"text": "a", "label": 1}, ("a", None)),
        ({"sentence": "a", "label": 1, "idx": 3}, ("a", None)),
        ({"sentence1": "a", "sentence2": "b", "label": 0, "idx": 3}, ("a", "b")),
        ({"premise": "a", "hypothesis": "b", "label": 2}, ("a", "b")),
        ({"question1": "a", "question2": "b", "label": 1}, ("a", "b")),
        ({"question": "a", "sentence": "b", "label": "yes"}, ("a", "b")),
    ],
)
def test_published_shapes_are_read(row, texts):
    content = LabelledFormat().read(row, LearnConfig())
    assert (content.content.text, content.content.second) == texts


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
def test_the_loss_is_the_loss_of_transformers(kind):
    torch.manual_seed(0)
    numbers = 1 if kind == "regression" else 3
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        num_labels=numbers,
        pad_token_id=0,
        problem_type=kind if kind == "regression" else f"{kind}_classification",
    )
    plain = AutoModelForSequenceClassification.from_config(config)
    ids = torch.randint(1, 64, (6, 9))
    names = {"single_label": list("abc"), "multi_label": ['["a", "c"]', "[]", '["b"]'], "regression": []}[kind]
    labels = torch.tensor([0.0, 2.0, 1.0, 1.0, 0.0, 2.0])
    objective = Classification(problem=Problem(kind), labels=list("abc")[:numbers])
    objective._names = names
    targets = labels if kind == "regression" else labels.long()
    if kind == "multi_label":
        targets = torch.tensor([[one in json.loads(name) for one in "abc"] for name in names])[targets].float()
    expected = plain(input_ids=ids, labels=targets).loss

    class Given:
        def numbers(self, batch):
            return plain(input_ids=ids).logits

        def router_terms(self, batch, count):
            return None, {}

    batch = type("Batch", (), {"document_labels": labels})
    found = objective.loss(Given(), batch)[0] / len(labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient, other = (torch.autograd.grad(loss, plain.score.weight)[0] for loss in (found, expected))
    torch.testing.assert_close(gradient, other)


def test_weights_and_smoothing_are_those_of_torch():
    numbers, labels = torch.randn(5, 2, generator=torch.manual_seed(0)), torch.tensor([0.0, 1, 1, 0, 1])
    objective = Classification(
        problem=Problem.single_label, labels=["a", "b"], class_weights={"b": 3.0}, label_smoothing=0.2
    )
    given = type("Given", (), {"numbers": lambda self, batch: numbers})()
    losses = objective.group_losses(given, type("Batch", (), {"document_labels": labels})).losses
    each = torch.nn.functional.cross_entropy(numbers, labels.long(), reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(losses, each * torch.tensor([1.0, 3.0])[labels.long()])


def test_figures_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    labels, numbers = draw.integers(0, 3, 50), draw.normal(size=(50, 3))
    objective = Classification(problem=Problem.single_label, labels=["a", "b", "c"])
    found = objective.judge(np.column_stack([labels, numbers]).astype(np.float32))
    chosen = numbers.argmax(1)
    assert found["f1"] == pytest.approx(metrics.f1_score(labels, chosen, average="macro"))
    assert found["confusion/a/b"] == ((labels == 0) & (chosen == 1)).sum()
    shares = torch.tensor(numbers).softmax(-1).numpy()
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(labels, shares, multi_class="ovr"), rel=1e-5)
    sure = np.full((50, 3), -20.0)
    sure[np.arange(50), labels] = 20
    assert objective.judge(np.column_stack([labels, sure]))["calibration_error"] == pytest.approx(0, abs=1e-6)
    wrong = np.roll(sure, 1, axis=1)
    assert objective.judge(np.column_stack([labels, wrong]))["calibration_error"] == pytest.approx(1, abs=1e-6)


def test_each_class_of_several_has_its_threshold():
    objective = Classification(problem=Problem.multi_label, labels=["a", "b"])
    objective._names = ['["a"]', '["a", "b"]', "[]"]
    values = np.array([[0, 2, -3], [1, 1, -1], [2, 0.5, -2], [1, 3, -1]], np.float32)  # b: above -1 or so
    found = objective.judge(values)
    assert 1 / (1 + np.exp(2)) < found["threshold/b"] < 1 / (1 + np.exp(1))  # between the shares of two documents
    assert found["auc"] == 1


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """A folder with two runs on the tiny base that ships: `run` with an adapter, and its merged model."""
    folder = tmp_path_factory.mktemp("classifier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["+recipe=classify_quickstart", "run.dir=run", "run.report=false"]) == 0
        assert main(["merge", "run"]) == 0
    return folder


def test_it_learns_and_says_what_it_knew_before(learned):
    rows = history(learned / "run")
    before = next(row for row in rows if "before/accuracy" in row)
    after = [row for row in rows if "eval/accuracy" in row][-1]
    assert before["before/accuracy"] < 0.6
    assert after["eval/accuracy"] > 0.9
    matrix = [after[f"eval/confusion/{a}/{b}"] for a in ("fine", "spam", "insult") for b in ("fine", "spam", "insult")]
    assert sum(matrix) > 150
    assert sum(matrix[::4]) / sum(matrix) == pytest.approx(after["eval/accuracy"])


def test_plain_libraries_load_it_and_chat_shows_the_same_shares(learned, monkeypatch, capsys):
    from peft import PeftModel
    from transformers import AutoConfig

    monkeypatch.chdir(learned)
    adapter = Path("run/adapter")
    config = AutoConfig.from_pretrained(adapter)
    assert config.id2label == {0: "fine", 1: "insult", 2: "spam"}
    assert config.problem_type == "single_label_classification"
    path = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=torch.float32)
    model, tokenizer = PeftModel.from_pretrained(base, adapter).eval(), AutoTokenizer.from_pretrained(adapter)
    texts = ["You idiots sent lamps to Rome.", "  Free lamps for all in Rome!  "]
    for folder, loaded in (
        ("run", model),
        ("run/merged", AutoModelForSequenceClassification.from_pretrained("run/merged", dtype=torch.float32).eval()),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in texts)))
        assert main(["chat", folder, "--system", "Be brief."]) == 2
        assert main(["chat", folder, "--json", "said.json"]) == 0
        said = json.loads(Path("said.json").read_text())["texts"]
        for entry, text in zip(said, texts, strict=True):
            with torch.no_grad():
                shares = loaded(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
            wanted = {config.id2label[index]: share for index, share in enumerate(shares.tolist())}
            assert entry["labels"] == pytest.approx(wanted, abs=1e-2)
    assert "id2label" in Path("run/merged/README.md").read_text()
    for refused, reason in (("", "a line for this model is a text"), ("red " * 600, "the model reads 512")):
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO(f"Free lamps\n{refused}\nFree shirts\n"))
        assert main(["chat", "run"]) == 3
        said = capsys.readouterr()
        assert "line 2 of the input" in said.err
        assert reason in said.err
        assert len(said.out.splitlines()) == 1


def test_the_report_shows_figures_before_and_after_and_the_confusion_matrix(learned, monkeypatch):
    monkeypatch.chdir(learned)
    assert main(["report", "run", "--output", "page.html"]) == 0
    page = " ".join(re.sub("<[^>]*>", " ", Path("page.html").read_text()).split())
    result = json.loads(Path("run/result.json").read_text())
    assert f"Held-out accuracy {result['before/accuracy']:.4g} → {result['eval/accuracy']:.4g}" in page
    classes = ["fine", "insult", "spam"]
    cells = [[a, *(f"{result[f'eval/confusion/{a}/{b}']:.0f}" for b in classes)] for a in classes]
    assert f"true \\ predicted fine insult spam {' '.join(' '.join(row) for row in cells)}" in page


def test_eval_of_a_run_judges_as_the_run_did(learned, monkeypatch, capsys):
    monkeypatch.chdir(learned)
    after = [row for row in history(Path("run")) if "eval/accuracy" in row][-1]
    for output in ("run", next(Path("run/checkpoints").glob("step-*")).as_posix()):
        assert main(["eval", output, "--json", "seen.json"]) == 0
        found = json.loads(Path("seen.json").read_text())["figures"]
        assert found["eval/f1"] == pytest.approx(after["eval/f1"], abs=1e-6)
        out = capsys.readouterr().out
        assert "true \\ predicted" in out
        assert "eval/confusion" not in out
        assert "questions" not in out


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["b", "a", "c"], ["objective.balanced=true", "objective.label_smoothing=0.1"]),
        ([["a"], ["a", "b"], [], ["c", "b"]], ["objective.class_weights={a: 2.0}"]),
        ([0.5, -1, "2.25"], []),
    ],
    ids=["single", "multi", "regression"],
)
def test_gradients_equal_plain_transformers_in_any_micro_batches(cwd, labels, words):
    write(labels)
    for packing in ("true", "false"):
        adapters = f"techniques.lora.enabled={packing}"
        words = [*words, f"data.packing={packing}", adapters, "train.global_batch_size=4"]
        assert main(["verify", *LEARNS, *words, "--loss", "--json", "seen.json"]) == 0
        variants = json.loads(Path("seen.json").read_text())["loss"]
        assert len(variants) > 2
        assert all(variant["loss_off"] < 1e-5 for variant in variants)


@pytest.mark.parametrize("labels", [["b", "a"], [["a"], ["a", "b"], []]], ids=["single", "multi"])
def test_a_run_resumes_bit_for_bit(cwd, labels):
    write(labels)
    run("run.dir=whole")
    run("run.dir=paused", "train.pause_after=2")
    run("run.dir=paused")
    assert figures("paused", "loss", "accuracy") == figures("whole", "loss", "accuracy")
    assert same_export("whole", "paused")


def shares_of(folder: str, texts: list[str], monkeypatch) -> list[dict]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in texts)))
    assert main(["chat", folder, "--json", "said.json"]) == 0
    return json.loads(Path("said.json").read_text())["texts"]


def test_the_exported_thresholds_are_those_of_its_step_and_decide_at_use(cwd, monkeypatch, capsys):
    rows = write([["a"], ["a", "b"], [], ["c", "b"]])
    words = ["model=tiny", "techniques=lora", "objective=classification", *MODEL[2:], SOURCE, "data.eval_fraction=0.3"]
    assert main([*words, "run.dir=run", "train.eval_every=1", "optimizer.lr=0.1"]) == 0
    step = json.loads(Path("run/result.json").read_text())["export/step"]
    (judged,) = (row for row in history(Path("run")) if "eval/f1" in row and row["train/step"] == step)
    expected = {one: judged[f"eval/threshold/{one}"] for one in "abc"}
    checkpoint = next(Path("run/checkpoints").glob(f"step-*{step}"))
    assert main(["merge", "run"]) == 0
    assert main(["merge", str(checkpoint), "step"]) == 0
    for folder in ("run/adapter", "run/merged", "step"):
        assert json.loads((Path(folder) / "config.json").read_text())["thresholds"] == pytest.approx(expected)
    card = Path("run/adapter/README.md").read_text()
    assert "model.config.thresholds" in card
    assert "eval/f1" in card
    assert "eval/threshold" not in card, "config.json has the thresholds of the exported step"
    assert main(["report", "run"]) == 0
    assert f"{expected['b']:.3f}" in Path("run/report.html").read_text()
    capsys.readouterr()
    for folder in ("run", str(checkpoint), "run/merged"):
        for entry in shares_of(folder, [row["text"] for row in rows[:9]], monkeypatch):
            chosen = {one for one, share in entry["labels"].items() if share >= expected[one]}
            assert set(entry["classes"]) == chosen
    assert "No evaluation" not in capsys.readouterr().out


def test_without_held_out_rows_a_class_counts_from_one_half(cwd, monkeypatch, capsys):
    rows = write([["a"], ["a", "b"], []])
    run("run.dir=run", "data.eval_fraction=0")
    capsys.readouterr()
    for entry in shares_of("run", [row["text"] for row in rows[:9]], monkeypatch):
        assert set(entry["classes"]) == {one for one, share in entry["labels"].items() if share >= 0.5}
    assert "No evaluation has chosen a threshold for a, b" in capsys.readouterr().out


@pytest.mark.slow
def test_a_refresh_keeps_the_classes_of_its_run(cwd, capsys):
    write(["c", "a", "b"], count=120)
    run("run.dir=run")
    words = ["refresh", "run", "refresh.alpha=0.2", "refresh.epochs=0.2", "data.cache_dir=cache"]
    write(["a", "z"], "new.jsonl", 50)
    capsys.readouterr()
    assert main([*words, "data.sources=[{path: new.jsonl}]"]) in (2, 3)
    said = " ".join(capsys.readouterr().err.split())
    assert "new.jsonl: objective.labels has no class z" in said
    assert "train a new run" in said
    rows = write(["c", "a"], "new.jsonl", 50)
    write_jsonl(Path("new.jsonl"), [{**row, "text": f"now {row['text']}"} for row in rows])
    assert main([*words, "data.sources=[{path: new.jsonl}]", "--force"]) in (0, 11)  # 11: trained, and then rejected
    config = json.loads(Path("run.refresh/run-1/model/config.json").read_text())
    assert list(config["id2label"].values()) == ["a", "b", "c"]


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(ranks, cwd):
    write([["a"], ["a", "b"], []])
    run("run.dir=alone", "train.global_batch_size=4")
    words = ["train.global_batch_size=4", "run.dir=together", "data.cache_dir=other"]
    assert ranks.run([*LEARNS, *words], cwd) == [0, 0]
    names = "loss", "accuracy"
    for one, other in zip(figures("alone", *names), figures("together", *names), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    alone, together = (
        [row["eval/f1"] for row in history(Path(name)) if "eval/f1" in row] for name in ("alone", "together")
    )
    assert alone == pytest.approx(together)


def test_documents_are_what_the_tokenizer_makes_of_the_texts(cwd):
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    draw = random.Random(1)
    rows = [{"text": text(draw), "text_pair": text(draw), "label": number % 2} for number in range(6)]
    rows += [{"text": " ".join(WORDS * 9), "label": 1}]
    write_jsonl(Path("rows.jsonl"), rows)
    tokenizer, data = RunBuilder(load([*LEARNS, "data.eval_fraction=0"])).read()
    (table,) = data.tables
    found = [table.ids[begin:end].tolist() for begin, end in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
    for row, ids in zip(rows, found, strict=True):
        assert ids == tokenizer(row["text"], row.get("text_pair"), truncation=True, max_length=64)["input_ids"]
    line = tokenizer("\n", add_special_tokens=False)["input_ids"]  # the base's tokenizer separates no two texts
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("red", "blue"))
    assert tokenizer("red", "blue")["input_ids"] == one + line + two
    tokenizer.save_pretrained("saved")
    assert AutoTokenizer.from_pretrained("saved")("red", "blue")["input_ids"] == one + line + two


def test_chat_of_a_classifier_of_two_texts_reads_both_from_a_line(cwd, monkeypatch, capsys):
    draw = random.Random(2)
    rows = [{"premise": text(draw), "hypothesis": text(draw), "label": number % 2} for number in range(20)]
    write_jsonl(Path("rows.jsonl"), rows)
    run("data.eval_fraction=0", "run.dir=pairs")
    model = AutoModelForSequenceClassification.from_pretrained("pairs/model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained("pairs/model")
    with torch.no_grad():
        shares = model(tokenizer("red cat", "a dog", return_tensors="pt")["input_ids"]).logits[0].softmax(-1)
    (said,) = shares_of("pairs", ["red cat\ta dog"], monkeypatch)
    assert [said["labels"]["0"], said["labels"]["1"]] == pytest.approx(shares.tolist(), abs=1e-4)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("red cat\n"))
    assert main(["chat", "pairs"]) == 3
    assert "a tab and" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"red\xfc\ta dog\n"), encoding="utf-8"))
    assert main(["chat", "pairs"]) == 3
    assert "line 1 of the input: not UTF-8" in capsys.readouterr().err


def test_chat_of_a_classifier_of_chats_reads_a_line_as_training_reads_its_turns(cwd, monkeypatch, capsys):
    draw = random.Random(3)
    roles = ("user", "assistant", "user")
    chats = [[{"role": role, "content": text(draw)} for role in roles[: 1 + 2 * (turn % 2)]] for turn in range(20)]
    write_jsonl(Path("rows.jsonl"), [{"messages": chat, "label": turn % 2} for turn, chat in enumerate(chats)])
    run("data.eval_fraction=0", "run.dir=chats", "data.system=Be strict.", "data.sequence_length=256")
    model = AutoModelForSequenceClassification.from_pretrained("chats/model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained("chats/model")
    said = shares_of("chats", ["\t".join(turn["content"] for turn in chat) for chat in chats[:2]], monkeypatch)
    for chat, line in zip(chats, said, strict=False):
        turns = [{"role": "system", "content": "Be strict."}, *chat]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            shares = model(ids).logits[0].softmax(-1).tolist()
        assert [line["labels"]["0"], line["labels"]["1"]] == pytest.approx(shares, abs=1e-4)
    assert "lies in no run" not in capsys.readouterr().out
    shutil.copytree("chats/model", "elsewhere")
    shares_of("elsewhere", ["red cat"], monkeypatch)
    assert "lies in no run" in capsys.readouterr().out


def test_rows_of_a_csv_file_by_the_names_of_its_columns(cwd):
    lines = [f"{text(random.Random(number))},{number % 2},{number}" for number in range(20)]
    Path("rows.csv").write_text("body,stars,id\n" + "\n".join(lines) + "\n")
    run("data.sources=[{path: rows.csv, columns: {body: text, stars: label}}]", "run.dir=csv")
    assert json.loads(Path("csv/about.json").read_text())["objective"]["labels"] == ["0", "1"]


def test_a_run_says_what_it_cuts_and_which_texts_have_two_labels(cwd, capsys):
    rows = write(["a", "b"])
    long = {"text": " ".join(WORDS * 9), "label": "a"}
    odd = [{"text": "twice", "label": "a"}, {"text": "twice", "label": "b"}, {"text": "red", "label": "B"}]
    write_jsonl(Path("rows.jsonl"), [*rows, long, *odd])
    run("data.eval_fraction=0")
    out = " ".join(capsys.readouterr().out.split())
    assert "rows.jsonl: 1 document longer than 64 tokens was truncated" in out
    assert "rows.jsonl: 1 texts have several rows with different labels" in out
    assert "labels: B, b differ in upper and lower case" in out


@pytest.mark.parametrize("labels", [["b", "a"], [["a"], ["a", "b"], []]], ids=["single", "multi"])
def test_a_class_without_a_row_on_one_side_is_named(cwd, capsys, labels):
    draw = random.Random(5)
    rare = [{"text": text(draw), "label": ["c"] if isinstance(labels[0], list) else "c"} for _ in range(2)]
    write_jsonl(Path("both.jsonl"), write(labels) + rare)
    write_jsonl(Path("rare.jsonl"), rare)
    sources = "data.sources=[{path: both.jsonl}]"
    run(sources, "data.eval_sources=[{path: rows.jsonl}]", "data.on_overlap=keep", "run.dir=seen")
    assert "no held-out row has the class c" in capsys.readouterr().out
    run(sources, "data.eval_sources=[{path: rare.jsonl}]", "data.on_overlap=drop", "run.dir=few")
    assert "no row to train on has the class c" in capsys.readouterr().out


def test_mistakes_are_refused_with_the_change(cwd, capsys):
    write(["a"])
    assert "nothing to tell apart" in error(capsys)
    write(["a", "b"])
    assert "has the class c" in error(capsys, "objective.labels=[a,b,c]")
    assert "no class b" in error(capsys, "objective.labels=[a,c]")
    assert "a more than once" in error(capsys, "objective.labels=[a,b,a]")
    assert "objective.class_weights" in error(capsys, "objective.class_weights={z: 2.0}")
    assert "objective.problem=single_label" in error(capsys, "objective.problem=regression")
    write(["a", "c"], "other.jsonl")
    held_out = ["data.eval_fraction=0", "data.eval_sources=[{path: other.jsonl}]", "data.on_overlap=keep"]
    assert "other.jsonl: the rows to train on have no class c" in error(capsys, *held_out)
    write([["a"], "b"])
    assert "objective.problem=multi_label" in error(capsys, "objective.problem=single_label")
    write(["a", float("nan")])
    assert "rows.jsonl:2: label is nan" in error(capsys)
    write([0.5, 1e39])
    assert "has the label 1e+39" in error(capsys)
    write_jsonl(Path("rows.jsonl"), [{"text": "a b c"}] * 8)
    assert "label" in error(capsys)
    write(["a", None])
    assert "rows.jsonl:2: label is null" in error(capsys)
    write_jsonl(Path("rows.jsonl"), [{"text": 7, "label": "a"}] * 8)
    assert "rows.jsonl:1: text is a number" in error(capsys)


def test_a_classifier_is_trained_further_and_others_are_refused(learned, monkeypatch, capsys):
    monkeypatch.chdir(learned)
    words = ["train.max_steps=1", "run.report=false", "optimizer.lr=1e-6"]
    further = ["+recipe=classify_quickstart", *words, "model.adapter=run/adapter", "run.dir=further"]
    assert main(further) == 0
    after = [row for row in history(Path("further")) if "eval/accuracy" in row][-1]
    assert after["eval/accuracy"] > 0.8
    write_jsonl(Path("rows.jsonl"), [{"text": "a b", "label": "x"}, {"text": "c d", "label": "y"}])
    others = [SOURCE, "data.eval_sources=[]", "run.dir=others"]
    capsys.readouterr()
    assert main([*further[:-1], *others]) == 2
    assert "its head has the labels fine, insult, spam, and the rows x, y" in " ".join(capsys.readouterr().err.split())
