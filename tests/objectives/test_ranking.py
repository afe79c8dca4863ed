"""Rerankers: losses and figures against the formulas and scikit-learn, rows of many shapes, and public commands."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from sklearn.metrics import ndcg_score
from support.harness import SMALLER
from support.rows import write_jsonl
from support.runs import figures, history, same_export
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import fxtune
from fxtune.cli.main import main
from fxtune.data.chat.encode import Encoder
from fxtune.data.formats.candidates import CandidatesFormat
from fxtune.data.formats.row_format import LearnConfig
from fxtune.errors import ConfigError
from fxtune.objectives.ranking import Ranking, RankingLoss

WORDS = ["red", "blue", "green", "cat", "dog", "house", "river", "tree"]
LEARNS = [
    *("objective=ranking", "data.sources=[{path: rows.jsonl}]", "data.eval_fraction=0.2", "data.sequence_length=128"),
    *("model.init=random", f"model.architecture={SMALLER}", "optimizer.lr=1e-2", "data.cache_dir=cache"),
    *("run.report=false", "tracking.display=plain", "run.device=cpu", "train.max_steps=4"),
    *("train.micro_batch_size=2", "train.global_batch_size=4"),
]


def write(count: int = 40) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        size = draw.randint(2, 4)
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(size)]
        rows.append(
            {"query": draw.choice(WORDS), "passages": texts, "labels": [2, *[draw.randint(0, 1)] * (size - 1)]}
        )
    write_jsonl(Path("rows.jsonl"), rows)


GROUPS = torch.tensor([0, 0, 0, -1, 1, 1, -1])
RELEVANCES = torch.tensor([1.0, 0.0, 0.5, float("nan"), 0.0, 1.0, float("nan")])


def losses(kind: RankingLoss, scores: torch.Tensor):
    class Given:
        def scores(self, batch):
            return scores

    batch = type("Batch", (), {"document_labels": RELEVANCES, "group_of": GROUPS})
    return Ranking(losses=kind).group_losses(Given(), batch)


@pytest.mark.parametrize("kind", list(RankingLoss))
def test_losses_are_the_formulas_of_each_query(kind):
    scores = torch.tensor([0.3, 1.2, -0.4, 9.0, 0.7, 0.1, 9.0], requires_grad=True)
    found = losses(kind, scores)
    assert found.counted.tolist() == [True, False, False, False, True, False, False]
    expected = []
    for group in range(2):
        s, r = scores[group == GROUPS], RELEVANCES[group == GROUPS]
        if kind is RankingLoss.listwise:
            expected.append(F.cross_entropy(s, r.softmax(0)))
        elif kind is RankingLoss.pointwise:
            expected.append(F.binary_cross_entropy_with_logits(s, r))
        else:
            pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if r[i] > r[j]]
            expected.append(-sum(F.logsigmoid(s[i] - s[j]) for i, j in pairs) / len(pairs))
    torch.testing.assert_close(found.losses[found.counted], torch.stack(expected))
    ours, theirs = (
        torch.autograd.grad(total, scores, retain_graph=True)[0]
        for total in (found.total(found.losses), torch.stack(expected).sum())
    )
    torch.testing.assert_close(ours, theirs)


def test_figures_are_those_of_scikit_learn():
    for seed in range(20):
        scores = torch.randn(7, generator=torch.manual_seed(seed))
        found = losses(RankingLoss.listwise, scores)
        for group, slot in ((0, 0), (1, 4)):
            s, r = scores[group == GROUPS], RELEVANCES[group == GROUPS]
            gain = (2**r - 1).numpy()
            assert found.metrics["ndcg"][slot].item() == pytest.approx(ndcg_score([gain], [s.numpy()], k=10), abs=1e-6)
            rank = 1 + int((s > s[r.argmax()]).sum())
            assert found.metrics["mrr"][slot].item() == pytest.approx(1 / rank)
            assert found.metrics["first"][slot].item() == (rank == 1)


def test_equal_scores_rank_nothing():
    assert not losses(RankingLoss.listwise, torch.zeros(7)).metrics["first"].any()


@pytest.mark.parametrize(
    ("row", "relevances"),
    [
        ({"query": "q", "passages": ["a", "b"], "labels": [0, 1]}, [0, 1]),
        ({"query": "q", "documents": ["a", "b"], "scores": [0.5, 1]}, [0.5, 1]),
        ({"query": "q", "passages": {"passage_text": ["a", "b"], "is_selected": [1, 0]}}, [1, 0]),
        ({"query": "q", "positive": "a", "negative": "b"}, [1, 0]),
        ({"anchor": "q", "pos": ["a"], "neg": ["b", "c"]}, [1, 0, 0]),
        ({"query": "q", "positive": "a", "negative_1": "b", "negative_2": "c"}, [1, 0, 0]),
    ],
)
def test_published_shapes_are_read(row, relevances):
    content = CandidatesFormat().read(row, LearnConfig())
    assert content.labels == relevances
    assert all(text.text == "q" and text.second in "abc" for text in content.texts.values())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "passages": ["a"], "labels": [1]}, "fewer than two candidates"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1, 1]}, "nothing to rank"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1]}, "as many `labels`"),
        ({"query": "q", "passages": ["a", "b"], "labels": [1, None]}, "labels[1] is null"),
        ({"query": "q", "passages": None, "positive": [], "negative": "b"}, "no positive"),
        ({"query": "q", "positive": "a", "negative": "q"}, "negative is equal to query"),
        ({"query": "q", "positive": "a", "negative": ["a", "b"]}, "negative[0] is also a positive"),
    ],
)
def test_mistakes_name_the_row(cwd, capsys, row, reason):
    write_jsonl(Path("rows.jsonl"), [row] * 8)
    assert main([*LEARNS, "run.dir=refused"]) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert reason in error
    assert "rows.jsonl:1" in error


@pytest.mark.parametrize("packing", ["true", "false"])
def test_gradients_equal_plain_transformers(cwd, packing):
    rows = [{"query": word, "passages": ["a cat", "the dog runs"], "labels": [1, 0]} for word in WORDS * 4]
    write_jsonl(Path("rows.jsonl"), rows)
    words = [f"data.packing={packing}", f"techniques.lora.enabled={packing}", "data.eval_fraction=0", "data.dedup=off"]
    assert main(["verify", *LEARNS, *words, "--loss", "--json", "seen.json"]) == 0
    variants = json.loads(Path("seen.json").read_text())["loss"]
    assert all(variant["loss_off"] < 1e-5 for variant in variants)


def test_a_run_shows_what_it_knew_before_and_resumes_bit_for_bit(cwd, capsys):
    write()
    assert main([*LEARNS, "run.dir=whole"]) == 0
    assert "mrr" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained("whole/model").chat_template is None, "a CrossEncoder would write chats"
    for words in (["train.pause_after=2"], []):
        assert main([*LEARNS, "run.dir=paused", *words]) == 0
    assert figures("paused", "loss", "ndcg") == figures("whole", "loss", "ndcg")
    assert same_export("whole", "paused")


def test_eval_reads_the_pairs_that_the_run_has_read(cwd):
    """The base's tokenizer has a template for chats."""
    write()
    assert main([*LEARNS, "techniques.lora.enabled=true", "model=tiny", "run.dir=run"]) == 0
    assert main(["eval", "run", "--json", "seen.json"]) == 0
    seen, trained = (json.loads(Path(file).read_text()) for file in ("seen.json", "run/result.json"))
    assert seen["figures"]["eval/loss"] == pytest.approx(trained["eval/loss"])


TEMPLATE = """{{ bos_token }}Judge.{% for message in messages if message.role == 'system' %} {{ message.content }}{% endfor %}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
Answer: """
JUDGES = [
    *("objective=ranking", "objective.words=[n,y]", "model=tiny", "model.dtype=float32", "data.sequence_length=512"),
    *("data.sources=[{path: builtin:retrieval_train}]", "data.eval_sources=[{path: held.jsonl}]", "run.report=false"),
    *("data.system=Be fair.", "data.chat_template=pairs.jinja", "data.cache_dir=cache", "tracking.display=plain"),
    *("train.micro_batch_size=2", "train.global_batch_size=2", "train.max_steps=2", "run.device=cpu"),
]


def listwise(score, tokenizer, rows) -> float:
    """The mean loss of `rows`. `score`: a function of the ids that the template gives."""
    template, found = Path("pairs.jinja").read_text(), []
    for row in rows:
        scores = []
        for text in (row["positive"], *row["negative"]):
            turns = {"system": "Be fair.", "query": row["query"], "document": text}
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            ids = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)
            with torch.no_grad():
                scores.append(score(torch.tensor([ids])))
        found.append(F.cross_entropy(torch.stack(scores), torch.tensor([1.0, *[0.0] * (len(scores) - 1)]).softmax(0)))
    return torch.stack(found).mean().item()


def test_scores_start_as_the_logits_of_two_words_in_a_template_of_pairs(cwd):
    Path("pairs.jinja").write_text(TEMPLATE)
    builtin = Path(fxtune.__file__).parent / "assets"
    rows = [json.loads(line) for line in (builtin / "data/retrieval_test.jsonl").read_text().splitlines()[:6]]
    write_jsonl(Path("held.jsonl"), rows)
    assert main([*JUDGES, "techniques.lora.enabled=true", "run.dir=run"]) == 0
    before, after = (
        next(line[f"{when}/loss"] for line in history(Path("run")) if f"{when}/loss" in line)
        for when in ("before", "eval")
    )
    tokenizer = AutoTokenizer.from_pretrained("run/adapter")
    assert tokenizer.chat_template == Path("pairs.jinja").read_text(), "a CrossEncoder writes pairs with it"
    base = AutoModelForCausalLM.from_pretrained(builtin / "tiny", dtype=torch.float32).eval()
    n, y = (tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in "ny")
    wanted = listwise(lambda ids: base(ids).logits[0, -1, y] - base(ids).logits[0, -1, n], tokenizer, rows)
    assert before == pytest.approx(wanted, abs=1e-5)
    assert "score_words" not in json.loads(Path("run/adapter/config.json").read_text())
    config = AutoConfig.from_pretrained("run/adapter")
    plain = AutoModelForSequenceClassification.from_pretrained(builtin / "tiny", config=config, dtype=torch.float32)
    trained = PeftModel.from_pretrained(plain, "run/adapter").eval()
    assert after == pytest.approx(listwise(lambda ids: trained(ids).logits[0, 0], tokenizer, rows), abs=1e-5)


@pytest.mark.parametrize("template", [True, False])
def test_the_code_of_the_cards_and_chat_score_a_pair_alike(cwd, monkeypatch, capsys, template):
    Path("pairs.jinja").write_text(TEMPLATE)
    write_jsonl(Path("held.jsonl"), [{"query": "q", "positive": "a", "negative": "b"}])
    words = ["data.system=null", *["data.chat_template=null"] * (not template), "techniques.lora.enabled=true"]
    assert main([*JUDGES, *words, "run.dir=run"]) == 0
    assert main(["merge", "run"]) == 0
    said, scores = [], []
    for folder in ("run/adapter", "run/merged"):
        names: dict = {"query": "Where is it?", "candidate": "In the red house."}
        for block in Path(folder, "README.md").read_text().split("```python\n")[1:]:
            exec(block.split("```")[0].replace('folder = "."', f"folder = {folder!r}"), names)
        scores.append(names["score"].item())
        monkeypatch.setattr("sys.stdin", io.StringIO("Where is it?\tIn the red house.\n"))
        assert main(["chat", folder, "--json", "said.json"]) == 0
        said.append(json.loads(Path("said.json").read_text())["texts"][0]["labels"]["relevance"])
    assert said[0] == pytest.approx(scores[0], abs=5e-2)  # chat reads the base in bfloat16, as it is stored
    assert said[1] == pytest.approx(scores[1], abs=1e-3)
    capsys.readouterr()
    for line in ("Where is it?", "Where is it?\t", "a\tb\tc"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"a\tb\n{line}\n"))
        assert main(["chat", "run"]) == 3
        assert "line 2" in capsys.readouterr().err
    assert main(["chat", "run", "--show", "base"]) == 2
    shutil.copytree("run/merged", "elsewhere")
    assert main(["chat", "elsewhere"]) == 2, "how its texts are written is not known"
    with pytest.raises(ConfigError) as refused:
        fxtune.Run("run").generate("hi")
    assert f"fxtune chat {Path('run/adapter').absolute()}" in str(refused.value)
    assert "show" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["objective.words=[no,y]"], 2, "'no' is 2 tokens of this model"),
        (["objective.words=[y]"], 2, "name two words"),
        (["model.init=random", f"model.architecture={SMALLER}"], 2, "no logits of words"),
        (["data.chat_template=other.jinja"], 3, "does not name the roles"),
        (["data.chat_template=silent.jinja"], 3, "leaves out the text of the role `query` or `document`"),
        *(
            (["data.packing=false", f"data.sequence_length={n}"], 3, "the chat template and the query alone")
            for n in (8, 20)
        ),
    ],
)
def test_words_and_templates_that_say_nothing_are_refused(cwd, capsys, words, code, reason):
    Path("pairs.jinja").write_text(TEMPLATE)
    Path("silent.jinja").write_text("{# 'query' 'document' #}Judge.")
    Path("other.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    write_jsonl(Path("held.jsonl"), [{"query": "q", "positive": "a", "negative": "b"}])
    assert main([*JUDGES, *words]) == code
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_long_candidate_loses_its_end_and_the_template_stays(cwd):
    tokenizer = AutoTokenizer.from_pretrained(Path(fxtune.__file__).parent / "assets/tiny")
    tokenizer.chat_template = TEMPLATE
    given = Encoder(tokenizer, CandidatesFormat(), system="Be fair.")
    row = {"query": "red", "positive": "the red house Answer: and so on", "negative": "a cat"}
    whole = given.encode([row])[0].documents
    given.longest = len(whole[0].ids) - 4
    cut = given.encode([row])[0].documents
    assert [document.lost for document in cut] == [4, 0]
    assert cut[1].ids == whole[1].ids
    text, shorter = (tokenizer.decode(side[0].ids) for side in (whole, cut))
    assert shorter.endswith("\nAnswer: ")
    assert text.startswith(shorter.removesuffix("\nAnswer: "))
    assert "the red house" in shorter
