"""The page about a run, and about several."""

import base64
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from support.recorded import evidence, record

from fxtune.errors import StorageError
from fxtune.reports.page import write_report

EVIL = "</script><script>alert(1)</script><img src=http://evil.test/x onerror=alert(2)>\"'&"


class Elements(HTMLParser):
    """The elements of a page, its addresses, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.handlers, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page(*folders, at=None):
    file = at or folders[0] / "report.html"
    write_report(folders, file)
    return Elements(file.read_text())


def test_a_run_is_shown_with_what_it_recorded(tmp_path):
    shown = page(record(tmp_path / "mine", evidence=[evidence("lora", "rank 16", "21 modules", acted=True)]))
    for words in (
        *("finished, 40 steps", "Held-out loss 0.125", "Tokens/s 500", "Peak memory 0.5 GiB", "Whole time 1 min 40 s"),
        *("forward and backward 76.0% 1 min 16 s", "lora rank 16 21 modules ✓ yes"),
        *("What? right ✗ wrong: dunno ✓ right: right", "chats.jsonl training 8 4,000 40.0% 100.0% 480 700 800 1"),
        *("100 to 299 3", "command fxtune +recipe=mine", "torch 2.13"),
        *("GPU power: not recorded on a CPU.", "Nothing to change"),
    ):
        assert words in shown.text
    assert shown.tags.count("svg") == 5  # loss, learning rate, gradient norm, speed, memory
    assert shown.tags.count("path") > 10


def test_a_classifier_has_its_measures_and_tables(tmp_path):
    names = ["a/b", "b", EVIL]
    counts = {f"eval/confusion/{true}/{one}": float(len(one)) for true in names for one in names}
    before = {"time": 1.7e9, "train/step": 0, "before/loss": 2.0, "before/f1": 0.25, "before/confusion/b/b": 7}
    after = {"time": 1.8e9, "train/step": 40, "eval/f1": 0.75, "eval/threshold/a/b": 0.4321, **counts}
    folder = record(tmp_path / "mine", lines=[before, after])
    shown = page(folder)
    assert "Held-out f1 0.25 → 0.75" in shown.text
    assert f"true \\ predicted a/b b {EVIL} a/b 3 1 {len(EVIL)} b 3 1 {len(EVIL)}" in shown.text
    assert "class share a/b 0.432" in shown.text
    both = page(folder, record(tmp_path / "other"), at=tmp_path / "both.html")
    assert "Held-out f1 0.25 → 0.75 –" in both.text


def test_the_page_loads_nothing(tmp_path):
    shown = page(record(tmp_path / "mine"))
    assert shown.addresses == ["data:,"]
    text = unescape((tmp_path / "mine" / "report.html").read_text())
    assert set(re.findall(r"https?://[^\s\"'<]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_text_of_a_run_cannot_become_markup(tmp_path):
    folder = record(
        tmp_path / "mine",
        evidence=[evidence(EVIL, EVIL, EVIL)],
        about={"command": EVIL, "system": EVIL},
        config={"data": {"system": EVIL, EVIL: EVIL}},
        setting={"machine": {EVIL: EVIL}},
        result={"train/ended_early": EVIL},
    )
    for when in ("before", "after"):
        row = {"question": EVIL, "right": EVIL, "answer": EVIL}
        (folder / f"answers_{when}.jsonl").write_text(json.dumps(row) + "\n")
    about = json.loads((folder / "about.json").read_text())
    about["training"]["sources"][0]["name"] = about["training"]["lengths"][0]["name"] = EVIL
    (folder / "about.json").write_text(json.dumps(about))
    other = record(tmp_path / "x<b onclick=alert(3)>&'", config={"data": {"system": "harmless"}})
    for shown in (page(folder), page(folder, other, at=tmp_path / "both.html")):
        assert shown.tags.count("script") == 1
        assert "img" not in shown.tags
        assert not shown.handlers
        assert shown.addresses == ["data:,"]
        assert "alert(1)" in shown.text  # it is there, as text


def test_questions_have_their_pictures(tmp_path):
    folder = record(tmp_path / "mine")
    (folder / "question_images").mkdir()
    for number in (1, 2):
        (folder / "question_images" / f"{number:016x}.jpg").write_bytes(b"picture %d" % number)
    (folder / "question_images" / f"{3:016x}.jpg").write_bytes(bytes(1 << 20))
    (folder / "secret.jpg").write_bytes(b"secret")
    digests = [f"{number:016x}" for number in (1, 2, 3)] + ["../secret", EVIL]
    for when, answer in (("before", "dunno"), ("after", "right")):
        rows = [
            {"question": "What?", "right": "right", "images": [{"name": EVIL, "digest": digest}], "answer": answer}
            for digest in digests
        ]
        (folder / f"answers_{when}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = page(folder)
    assert shown.tags.count("img") == 2
    pictures = [base64.b64decode(address.split(",")[1]) for address in shown.addresses if address != "data:,"]
    assert pictures == [b"picture 1", b"picture 2"]
    assert shown.text.count("✗ wrong: dunno ✓ right: right") == 5, "questions with one text differ by their images"
    assert shown.text.count("(images not shown: 1)") == 3
    assert not shown.handlers
    assert shown.tags.count("script") == 1


def test_several_runs_stand_side_by_side(tmp_path):
    first = record(tmp_path / "a")
    second = record(tmp_path / "b", {"train/loss": 2.0}, config={"optimizer": {"lr": 5e-3}})
    shown = page(first, second, at=tmp_path / "both.html")
    assert "2 runs side by side" in shown.text
    assert "optimizer.lr 0.001 0.005" in shown.text
    assert "run.name" not in shown.text.partition("Differences between the runs")[2].partition("Answers")[0]
    values = re.findall(r'data-values="([^"]*)"', (tmp_path / "both.html").read_text())
    loss = json.loads(values[0].replace("&#34;", '"'))
    assert [(line["name"], line["steps"], line["values"][-1]) for line in loss] == [
        ("a", [10, 20, 30, 40], 0.1),
        ("b", [10, 20, 30, 40], 2.0),
    ]


def test_what_runs_have_in_common_stands_once(tmp_path):
    runs = [record(tmp_path / name) for name in ("a", "b")]
    other = record(tmp_path / "c", evidence=[evidence("lora", "rank 32")])
    assert page(*runs, at=tmp_path / "2.html").text.count("rank 16") == 1
    shown = page(*runs, other, at=tmp_path / "3.html").text
    assert "a, b: 1 options technique" in shown
    assert "c: 1 options technique" in shown
    assert shown.count("chats.jsonl training 8") == 1


def test_what_is_missing_is_named(tmp_path):
    folder = record(tmp_path / "begun", {"energy/gpu_watts": None})
    for name in (
        *("result.json", "about.json", "setting.json", "evidence.json", "answers_before.jsonl", "metrics.jsonl"),
    ):
        (folder / name).unlink()
    (folder / "answers_after.jsonl").unlink()
    shown = page(folder)
    for words in (
        *("not finished, 0 steps so far", "No step was logged.", "Loss: not recorded.", "No times were recorded"),
        *("Nothing was recorded.", "Its figures were not recorded"),
    ):
        assert words in shown.text
    with_power = record(tmp_path / "gpu", {"energy/gpu_watts": 300.0}, setting={"machine": {"device": "H200"}})
    both = page(with_power, folder, at=tmp_path / "both.html")
    assert "GPU power: not recorded in begun." in both.text


def test_values_that_are_not_finite_and_single_points_are_drawn(tmp_path):
    folder = record(tmp_path / "run", {"train/grad_norm": None, "train/lr": 0.0})
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(f"{lines[0]}\n" + '{"train/step": 11, "train/loss": NaN}\n{"train/st')
    shown = page(folder)
    assert "Gradient norm: not recorded." in shown.text
    assert "Learning rate" in shown.text


def test_a_long_run_has_a_small_page(tmp_path):
    rows = [{"train/step": step, "train/loss": 1 / step + step % 7} for step in range(1, 20_001)]
    folder = record(tmp_path / "long", lines=[])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page(folder)
    assert (folder / "report.html").stat().st_size < 100_000


def test_files_that_are_not_as_fxtune_writes_them_are_named(tmp_path):
    folder = record(tmp_path / "run", about={"training": {"lengths": [{"name": "a"}], "sources": [{}]}})
    with pytest.raises(StorageError, match="hold something that fxtune does not write there"):
        write_report([folder], tmp_path / "x.html")
    (folder / "about.json").write_text("{")
    with pytest.raises(StorageError, match=r"about\.json cannot be read"):
        write_report([folder], tmp_path / "x.html")


def test_preferences_have_charts_of_margins_rewards_and_lengths(tmp_path):
    """Of training and held out; a run on other rows does not miss them."""
    answers = {
        f"{part}/{metric}": value
        for part in ("train", "eval")
        for metric, value in {
            "reward_accuracy": 0.75,
            "reward_margin": 1.5,
            "reward_chosen": 0.5,
            "reward_rejected": -1.0,
            "log_probs_chosen": -0.25,
            "log_probs_rejected": -2.5,
            "length_chosen": 17.0,
            "length_rejected": 19.0,
        }.items()
    }
    shown = page(record(tmp_path / "pairs", answers)).text
    titles = ("Reward accuracy", "Reward margin", "Rewards", "Log-probabilities", "Length of answers")
    assert all(f"{title} " in shown for title in titles)
    assert "chosen, held out" in shown
    assert "Held-out reward accuracy 75.0%" in shown
    assert "a row" in shown
    other = page(record(tmp_path / "chats")).text
    assert not any(title in other for title in titles)
