"""Encoders as bodies of a head that scores documents, against plain transformers with one document at a time."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.architectures import CPU
from support.cases import slow_but
from support.rows import write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import fxtune
from fxtune.cli.evaluate import of_output
from fxtune.cli.main import main
from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.errors import ConfigError
from fxtune.models.dims import Shape
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import Init, ModelConfig, build, load_config
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.score_model import ScoreModel
from fxtune.techniques.attention import isolation
from fxtune.techniques.attention.backends.registry import EAGER, FLASH4, SDPA
from fxtune.techniques.pipeline import make_probe
from fxtune.upstream.transformers import set_attention

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
}
WINDOWS = {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 64}
ENCODERS = {
    "bert": {"model_type": "bert", **SIZES},
    "xlm-roberta": {"model_type": "xlm-roberta", **SIZES},
    "modernbert": {"model_type": "modernbert", **SIZES, **WINDOWS},
    "modernbert mean": {"model_type": "modernbert", **SIZES, **WINDOWS, "classifier_pooling": "mean"},
    "eurobert": {"model_type": "eurobert", **SIZES, "num_key_value_heads": 2, "classifier_pooling": "bos"},
    "eurobert late": {"model_type": "eurobert", **SIZES, "num_key_value_heads": 2, "classifier_pooling": "late"},
}
LENGTHS = [5, 20, 3, 7, 8, 2]
every_family = pytest.mark.parametrize("family", ENCODERS)


def scorer(family: str, backend=SDPA, **changes):
    model = ModelConfig(path=None, init=Init.random, architecture={**ENCODERS[family], **changes})
    config = load_config(model, "score")
    backend.prepare()
    set_attention(config, backend.implementation)
    return build(model, config, CPU, 0).module


def batch(packed: bool) -> tuple[Batch, list[list[int]]]:
    draw, count = np.random.default_rng(0), len(LENGTHS)
    documents = [draw.integers(3, 120, length).tolist() for length in LENGTHS]

    class Table:
        ids = np.concatenate([np.array(document, np.int32) for document in documents])
        supervised = np.ones(len(ids), bool)
        stored = images = None

    spec = BatchSpec(
        source=np.zeros(count, np.int64),
        start=np.cumsum([0, *LENGTHS[:-1]]),
        length=np.array(LENGTHS),
        offsets=np.array([0, 2, count]) if packed else np.arange(count + 1),
        width=28 if packed else 22,
        packed=packed,
        pad_id=1,
        slots=count + 4,
    )
    return build_batch([Table()], spec), documents


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("backend", [SDPA, EAGER, FLASH4], ids=lambda backend: backend.name)
@every_family
def test_scores_and_gradients_are_those_of_each_document_alone(family, backend, packed):
    ours = scorer(family, backend).eval()
    plain = copy.deepcopy(ours)
    plain.set_attn_implementation("sdpa")
    given, documents = batch(packed)
    slots = given.document_of_target().unique()
    scores = ScoreModel(PreparedModel(ours)).scores(given)[slots]
    wanted = torch.stack([plain(input_ids=torch.tensor([document])).logits[0, 0] for document in documents])
    assert wanted.std() > 1e-3
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6)
    weights = torch.arange(1.0, 1 + len(documents))
    for values in (scores, wanted):
        (values * weights).sum().backward()
    expected, compared = dict(plain.named_parameters()), 0
    for name, parameter in ours.named_parameters():
        gradient = expected[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            compared += 1
            assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name
    assert compared > 15


@pytest.mark.parametrize("backend", [SDPA, EAGER, FLASH4], ids=lambda backend: backend.name)
@every_family
def test_no_bit_of_a_document_depends_on_another(family, backend):
    model = scorer(family, backend).eval()
    with torch.no_grad():
        count, moved, leaked = isolation.movement(model, make_probe(model))
    assert (count, leaked) == (3, 0.0)
    assert moved > 0


@every_family
def test_trials_find_encoders_isolated_and_without_shared_prompts(family):
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=ENCODERS[family]), "score")
    assert isolation.try_small_model(config).packed is None
    assert isolation.try_small_model(config, by_bounds=True).packed is None


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "eurobert"])
def test_prediction_of_tokens_is_refused(family):
    with pytest.raises(ConfigError, match=r"an encoder.*later tokens.*cannot be trained to predict"):
        load_config(ModelConfig(path=None, init=Init.random, architecture=ENCODERS[family]), "lm")


@every_family
def test_layers_are_counted_as_attention_to_both_sides(family):
    model = scorer(family)
    shape = Shape.of(model.config.to_dict())
    assert (shape.layers, shape.hidden, shape.vocabulary, shape.causal) == (2, 64, 128, False)
    assert shape.linear_parameters + shape.other_parameters == sum(each.numel() for each in model.parameters())
    mlp = 3 if family.startswith(("modern", "euro")) else 2
    keys = 2 * 64 * (32 if family.startswith("euro") else 64)
    assert shape.linear_parameters == 2 * (2 * 64 * 64 + keys + mlp * 64 * 96)
    assert {each.window for each in shape.attentions} == ({0, 4} if family.startswith("modern") else {0})


@every_family
def test_a_base_with_a_head_over_the_vocabulary_gives_the_body(family, tmp_path):
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=ENCODERS[family]))
    base = AutoModelForMaskedLM.from_config(config)
    base.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(Path(fxtune.__file__).parent / "assets/tiny").save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    one, again = (build(model, load_config(model, "score"), CPU, 3).module for _ in range(2))
    stored = base.base_model.state_dict()
    for name, weight in one.base_model.state_dict().items():
        assert name.startswith("pooler") or torch.equal(weight, stored[name])
    for (name, weight), other in zip(one.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other), name
    linear = kind_of(one.config).head_of(one)
    assert 0.01 < linear.weight.std() < 0.04
    assert not linear.bias.any()


ROUNDED = {"model.dtype=bfloat16", "techniques.precision.autocast=bfloat16"}
WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "green",
    "cat",
    "dog",
    "runs",
    "sleeps",
    "fast",
    "slow",
    "under",
    "over",
    "tree",
    "house",
    "river",
    "please",
]
TRAINS = [
    *("objective=reward", "model.path=base", "data.sources=[{path: pairs.jsonl}]", "data.sequence_length=30"),
    *(
        "data.on_long=drop",
        "data.cache_dir=cache",
        "data.eval_sources=[{path: held.jsonl}]",
        "train.micro_batch_size=2",
    ),
    *("train.global_batch_size=8", "optimizer.lr=3e-3", "tracking.display=plain", "run.report=false"),
    *("run.device=cpu", "train.max_steps=30", "run.dir=run", "schedule.name=constant"),
]


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before a text and </s> after it, as BERT's and RoBERTa's do."""
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def write_pairs(file: str, count: int, seed: int) -> list[dict[str, str]]:
    """Pairs of answers whose chosen one has a polite word at any place."""
    draw, rows = np.random.default_rng(seed), []
    for _ in range(count):
        prompt, chosen, rejected = ([*draw.choice(WORDS[:-1], draw.integers(3, 7))] for _ in range(3))
        chosen.insert(draw.integers(0, len(chosen) + 1), "please")
        rows.append({"prompt": " ".join(prompt) + " ", "chosen": " ".join(chosen), "rejected": " ".join(rejected)})
    write_jsonl(Path(file), rows)
    return rows


@pytest.mark.parametrize(
    ("family", "options"),
    slow_but(
        [
            ("bert", ["techniques.lora.enabled=true"]),
            ("bert", ["optimizer.lr=1e-3", "techniques.precision.autocast=bfloat16"]),
            (
                "xlm-roberta",
                ["techniques.lora.enabled=true", "data.packing=false", "techniques.checkpointing.enabled=true"],
            ),
            ("modernbert", ["techniques.lora.enabled=true", "techniques.lora.fused=on", "model.dtype=bfloat16"]),
            ("modernbert mean", ["optimizer.lr=1e-3", "techniques.attention.backend=eager"]),
            ("eurobert late", ["techniques.lora.enabled=true", "techniques.lora.fused=on"]),
        ],
        ("bert", ["techniques.lora.enabled=true"]),
    ),
)
def test_a_trained_encoder_scores_in_plain_transformers_what_tokenizer_text_gives(family, options, cwd):
    keys = dict(ENCODERS[family])
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained("base")
    encoder_tokenizer().save_pretrained("base")
    write_pairs("pairs.jsonl", 160, seed=0)
    rows, words = write_pairs("held.jsonl", 24, seed=1), [*TRAINS, *options]
    assert main([*words, "train.max_steps=15"]) == 0
    assert main(words) == 0, "it resumes"
    if adapted := "techniques.lora.enabled=true" in options:
        folder = Path("run/adapter")
        config = AutoConfig.from_pretrained(folder)
        base = AutoModelForSequenceClassification.from_pretrained("base", config=config)
        assert main(["merge", "run"]) == 0
        merged = AutoModelForSequenceClassification.from_pretrained("run/merged").float().eval()
    else:
        folder = Path("run/model")
        base = AutoModelForSequenceClassification.from_pretrained(folder)
    model = (PeftModel.from_pretrained(base, folder) if adapted else base).float().eval()
    tokenizer, near = AutoTokenizer.from_pretrained(folder), 0.05 if {*options} & ROUNDED else 1e-4
    scores = []
    for row in rows:
        texts = [row["prompt"] + row[answer] for answer in ("chosen", "rejected")]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad():
            scores.append(model(**inputs).logits[:, 0])
            if adapted:
                assert (merged(**inputs).logits[:, 0] - scores[-1]).abs().max() < near
    chosen, rejected = torch.stack(scores).unbind(1)
    assert (chosen > rejected).float().mean() > 0.9
    # Held-out rows have the scores that plain transformers gives for tokenizer(text).
    figures = of_output("run")
    assert figures["eval/reward_chosen"] == pytest.approx(chosen.mean().item(), abs=near)
    assert figures["eval/reward_rejected"] == pytest.approx(rejected.mean().item(), abs=near)


@pytest.mark.parametrize(
    ("family", "pool", "options"),
    slow_but(
        [
            ("bert", "mean", ["techniques.lora.enabled=true"]),
            ("xlm-roberta", "cls", ["optimizer.lr=1e-3"]),
            (
                "modernbert",
                "cls",
                [
                    *("techniques.lora.enabled=true", "data.packing=false"),
                    *("train.micro_batch_size=3", "train.global_batch_size=9"),
                ],
            ),
            ("modernbert", "mean", ["optimizer.lr=1e-3"]),
            ("eurobert late", "last", ["optimizer.lr=1e-3"]),
        ],
        ("bert", "mean", ["techniques.lora.enabled=true"]),
    ),
)
def test_vectors_of_a_trained_encoder_are_those_of_plain_transformers(family, pool, options, cwd):
    keys = {**ENCODERS[family], "initializer_range": 0.3}
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained("base")
    encoder_tokenizer().save_pretrained("base")
    for file, count, seed in (("pairs.jsonl", 96, 0), ("held.jsonl", 12, 1)):
        draw, rows = np.random.default_rng(seed), []
        for _ in range(count):
            query, other = (draw.choice(WORDS, 5).tolist() for _ in range(2))
            rows.append({"query": " ".join(query), "positive": " ".join(query[::-1]), "negative": " ".join(other)})
        write_jsonl(Path(file), rows)
    words = [*TRAINS[1:], "objective=embedding", f"objective.pool={pool}", *options, "train.max_steps=6"]
    assert main(words) == 0
    folder = Path("run/adapter" if "techniques.lora.enabled=true" in options else "run/model")
    plain = AutoModel.from_pretrained("base" if folder.name == "adapter" else folder)
    model = (PeftModel.from_pretrained(plain, folder) if folder.name == "adapter" else plain).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert "token_type_ids" not in tokenizer("red", "blue")

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return F.normalize({"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pool], dim=0)

    similarity = torch.stack([vector(row["query"]) @ vector(row["positive"]) for row in rows]).mean()
    assert of_output("run")["eval/similarity_positive"] == pytest.approx(similarity.item(), abs=1e-5)
