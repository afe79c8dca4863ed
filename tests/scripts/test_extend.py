"""scripts/study/extend.py: its measures on inputs with known results, and its continuation.

Its --smoke option runs the script.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from support.architectures import on_disk
from torch.nn import functional as F

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    import extend
    import retrieval

    sys.path.remove(str(SCRIPTS))
    return extend, retrieval


def by_letters(texts: list[str]) -> list[list[int]]:
    """A tokenizer with one token per character."""
    return [[ord(letter) for letter in text] for text in texts]


def test_teaching_document_asks_for_its_facts_within_its_length(scripts):
    _, retrieval = scripts
    fillers = retrieval.Fillers(["".join(f"line {line} of text {text}\n" for line in range(200)) for text in range(5)])
    made = list(retrieval.documents(random.Random(0), fillers, by_letters, 300, 600, 1200))
    assert len(made) == 300
    assert max(map(len, made)) < 1200
    assert min(map(len, made)) > 400
    forms = dict.fromkeys((retrieval.PASS_KEY, *retrieval.NAMED), 0)
    patterns = {
        form: re.escape(form.question).replace(r"\{name\}", r"\w+").replace(r"\{value\}", r"(\d{5})") for form in forms
    }
    for text in made:
        last = text.splitlines()[-1]
        [(form, value)] = [(form, found[1]) for form in forms if (found := re.fullmatch(patterns[form], last))]
        assert text.count(value) >= 2, "the document holds the answer's fact"
        forms[form] += 1
    assert min(forms.values()) > 5


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_passkey_row_has_the_requested_length_depth_and_answer(scripts, depth):
    _, retrieval = scripts
    keys = retrieval.Passkeys(by_letters, by_letters(["filler " * 500])[0], seed=3)
    ids, answer = keys.row(400, depth)
    text = "".join(map(chr, ids))
    assert len(ids) == 400
    assert answer == 1 + retrieval.DIGITS
    assert text.endswith("The pass key is" + text[-answer:])
    at = text.index("\nThe pass key is" + text[-answer:] + ". Remember it.")
    assert at == pytest.approx(depth * 280, abs=25)
    assert text.count(text[-retrieval.DIGITS :]) == 3


def test_accuracy_counts_complete_answers(scripts):
    _, retrieval = scripts
    rows = [([5, 6, 7, 8, 9], 2), ([1, 2, 3, 4, 5], 2)]
    right = [[6, 7, 8, 9, 0], [0, 0, 4, 5, 0]]
    assert retrieval.accuracy(lambda ids: right, rows) == 1
    assert retrieval.accuracy(lambda ids: [right[0], [0, 0, 4, 9, 0]], rows) == 0.5
    assert retrieval.accuracy(lambda ids: [[6, 7, 0, 9, 0], [0, 0, 4, 9, 0]], rows) == 0


def test_judge_equals_plain_transformers(scripts, tmp_path):
    extend, _ = scripts
    from transformers import AutoModelForCausalLM

    folder = on_disk(tmp_path / "base", vocab_size=200, max_position_embeddings=256)
    draw = random.Random(0)
    held = [[draw.randrange(200) for _ in range(600)] for _ in range(3)]
    corpus = extend.Corpus(tmp_path, None, [], held, 600.0, 1.0)
    corpus.encode = by_letters
    args = argparse.Namespace(context=256, factor=2, samples=2, seed=0, evaluated=3, micro_tokens=1024)
    judge = extend.Judge(args, corpus)
    figures, scaled = judge.measure(folder), judge.measure(folder, yarn=True)
    rows = torch.tensor([ids[:512] for ids in held])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=rows).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
    assert list(figures["buckets"]) == ["0-128", "128-256", "256-512"]
    for bucket, (low, high) in zip(figures["buckets"].values(), ((0, 128), (128, 256), (256, 512)), strict=True):
        assert bucket == pytest.approx(losses[low:high].mean().item(), rel=1e-5)
    assert len(figures["by_position"]) == 64
    assert judge.short.shape == (6, 256)
    assert figures["passkey"] == {size: dict.fromkeys(map(str, extend.DEPTHS), 0.0) for size in ("128", "256", "512")}
    assert scaled["rope"]["rope_type"] == "yarn"
    assert scaled["short_loss"] != figures["short_loss"]
    table = extend.table({"base": figures, "extended": scaled}, args)
    assert f"{figures['short_loss']:.4f}" in table


def test_interrupted_call_continues_after_its_last_stage(scripts, tmp_path, monkeypatch, capsys):
    extend, _ = scripts
    out, calls = tmp_path / "out", []
    interrupted = {"train base", "measure base, scaled"}
    """Stages that are interrupted at their first call."""

    def call(name: str) -> None:
        calls.append(name)
        if name in interrupted:
            interrupted.remove(name)
            raise KeyboardInterrupt

    def train_for(config, seconds, limit):
        folder = Path(config.run.dir)
        folder.mkdir(parents=True)  # fails if files of an earlier call are left
        call(f"train {folder.name}")
        (folder / "result.json").write_text("{}")
        return {"steps": limit}

    class Judge:
        def __init__(self, *_):
            pass

        def measure(self, folder, yarn):
            call(f"measure {folder.parent.name}{', scaled' * yarn}")
            return {"short_loss": 2.0 if folder.parent.name == "base" else 1.0}

    def config(args, corpus, name="base"):
        return argparse.Namespace(run=argparse.Namespace(dir=str(args.out / name)))

    def gather_corpus(args, folder):
        folder.mkdir()
        call("text")

    for name, stand_in in {
        "train_for": train_for,
        "Judge": Judge,
        "pretraining": config,
        "extension": config,
        "gather_corpus": gather_corpus,
        "open_corpus": lambda *_: None,
        "table": lambda *_: "the table",
    }.items():
        monkeypatch.setattr(extend, name, stand_in)

    def main(*words: str) -> list[str]:
        calls.clear()
        monkeypatch.setattr(sys, "argv", ["extend.py", "--out", str(out), "--smoke", *words])
        extend.main()
        return calls

    with pytest.raises(KeyboardInterrupt):
        main()
    assert calls == ["text", "train base"]
    with pytest.raises(KeyboardInterrupt):
        main()
    assert calls == ["train base", "train extended", "measure base", "measure base, scaled"]
    with pytest.raises(SystemExit, match=r"was interrupted with extend_lr=0\.0003"):
        main("--extend-lr", "1")
    assert main() == ["measure base, scaled", "measure extended"]
    assert "the table" in capsys.readouterr().out
    record = json.loads((out / "extended.json").read_text())
    assert record["short_loss_change"] == -0.5
    assert set(record["runs"]) == {"base", "extended"}
    with pytest.raises(SystemExit):  # the extension is finished
        main()
    assert main("--again") == ["train extended-1", "measure base", "measure base, scaled", "measure extended-1"]


def test_time_to_the_same_loss_leaves_out_compiling(scripts):
    """Ten steps of 1 s in the first stage and of 2 s in the second; the first two of each take a minute more."""
    extend, _ = scripts
    seconds = [61, 61, 1, 1, 1, 62, 62, 2, 2, 2]
    lines = [{"train/step": at, "train/step_seconds": float(one)} for at, one in enumerate(seconds, 1)]
    lines += [{"train/step": at, "eval/loss": loss} for at, loss in ((4, 4.0), (8, 2.0), (10, 1.0))]
    settings = argparse.Namespace(length_schedule=[[0.0, 64], [0.5, 128]])
    config = argparse.Namespace(train=argparse.Namespace(max_steps=10), data=settings)
    growing = extend.curve(lines, config)
    assert growing == {"steps": [4, 8, 10], "seconds": [4.0, 11.0, 15.0], "losses": [4.0, 2.0, 1.0]}
    assert extend.seconds_to(3.0, growing) == 7.5
    assert extend.seconds_to(5.0, growing) == 4.0
    assert extend.seconds_to(0.5, growing) is None
    equal = {"seconds": [30.0], "losses": [3.0]}
    told = extend.verdict({extend.EQUAL: equal, extend.GROWING: growing})
    assert "growing rows reach it after 7.5 s (0.25x), and end with 1.0000 after 15.0 s" in told
