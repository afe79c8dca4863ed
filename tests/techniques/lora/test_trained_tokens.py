"""Rows of chosen tokens are trained beside adapters: no other row changes, as in peft, through a kill, export and merge."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import built, facts_of, logits, lora, on_disk, prepared_model, random_model, trained
from support.cases import slow_but
from support.harness import command
from support.killing import Aim, Reference, disturb
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.cli import verify
from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import Autocast, WeightFormat
from fxtune.models import load as models
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.outputs.merge import merge
from fxtune.techniques.pipeline import make_probe
from fxtune.tracking.throughput import training_cost
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder

ASSETS = Path(models.__file__).parents[1] / "assets"
START, END = 1, 2
ROWS = ["<|im_start|>", "<|im_end|>"]
BOTH = pytest.mark.parametrize("tied", [True, False])
MOSTLY_TIED = pytest.mark.parametrize("tied", slow_but([True, False], True))


def untrained_base(folder: Path, tied: bool) -> Path:
    """The built-in model, whose <|im_end|> has the row of <|im_start|> in the head: of two equal logits, greedy
    decoding takes the first, so that it never ends a turn."""
    shutil.copytree(ASSETS / "tiny", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.lm_head.weight[END] = model.lm_head.weight[START]
    model.save_pretrained(folder)
    return folder


def tables(folder: Path | str) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.fixture
def untrained(small, cwd, request):
    """A run over the untrained base, which chooses the rows."""
    tied = request.node.callspec.params["tied"]
    small.model, small.run.dir = ModelConfig(path=str(untrained_base(cwd / "base", tied))), "run"
    small.techniques.lora.train_tokens = "auto"
    return small


@MOSTLY_TIED
def test_only_the_rows_that_auto_finds_change_and_the_merged_model_ends_its_answers(untrained, cwd, said, tied):
    rows = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": "yes"}]
        for word in ["red", "lamp", "oslo"]
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    untrained.data.sources[0].path = "chats.jsonl"
    untrained.optimizer.lr, untrained.train.max_steps = 1e-2, 20
    without = replace(
        untrained, run=replace(untrained.run, dir="without"), techniques=copy.deepcopy(untrained.techniques)
    )
    without.techniques.lora.train_tokens = None
    for run in (untrained, without):
        trainer.run(run)
    evidence = [
        found for found in json.loads(Path("run/evidence.json").read_text()) if "train_tokens" in found["asked"]
    ]
    assert [found["acted"] for found in evidence] == [True]
    (note,) = [note for note in said if "never trained" in note]
    assert "techniques.lora.train_tokens=auto" in note
    saved = json.loads(Path("run/adapter/adapter_config.json").read_text())["trainable_token_indices"]
    assert saved == ([START, END] if tied else {"embed_tokens": [START, END], "lm_head": [START, END]})
    merge("run/adapter", "merged")
    for base, merged in zip(tables("base"), tables("merged"), strict=True):
        changed = (base != merged).any(-1).nonzero()[:, 0].tolist()
        assert changed == [START, END]
    merged, tokenizer = AutoModelForCausalLM.from_pretrained("merged"), AutoTokenizer.from_pretrained("merged")
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    from peft import PeftModel

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "run/adapter")
    torch.testing.assert_close(logits(merged), logits(plain), rtol=1e-5, atol=1e-4)
    ids = tokenizer.apply_chat_template(rows[0][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    never = AutoModelForCausalLM.from_pretrained(merge("without/adapter", "never"))
    for model, ends in ((merged, True), (never, False)):
        written = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert (END in written) == ends


@MOSTLY_TIED
def test_a_step_has_the_loss_and_the_gradients_of_plain_peft(untrained, cwd, capsys, tied):
    untrained.techniques.liger.enabled = True
    untrained.techniques.liger.kernels = ["fused_linear_cross_entropy"]
    seen = verify.run(untrained, loss=True)
    assert seen["techniques"]["lora"]["train_tokens"] == ROWS
    assert len(seen["loss"]) > 1, "verify raises unless each variant is within its bounds"
    (parameters,) = [row for row in seen["evidence"] if row["technique"] == "parameters"]
    assert "0 not as asked" in parameters["observed"]


@pytest.mark.parametrize(("family", "dtype"), [("llama", DType.bfloat16), ("gemma", DType.float32)])
def test_rows_are_float32_and_plain_peft_loads_them(family, dtype, tmp_path):
    """Gemma scales its embedding, and its head is the same tensor."""
    model = random_model(family, vocab_size=1024)
    base = tmp_path / "base"
    plain = built(lora(), replace(model, dtype=dtype), dtype=dtype.value).unload()
    plain.save_pretrained(base)
    load_tokenizer(replace(model, tokenizer="builtin:tiny")).save_pretrained(base)
    source = ModelConfig(path=str(base), dtype=dtype)
    pipeline = lora(train_tokens=["<|im_end|>", "<|im_start|>", "t"])
    prepared = prepared_model(pipeline, source, dtype=dtype.value)
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    rows = [weight for name, weight in mine.named_parameters() if "trainable_tokens" in name]
    assert {weight.dtype for weight in rows} == {torch.float32}
    expected = logits(trained(mine))
    adapter = save_model(prepared, load_tokenizer(source), tmp_path / "adapter")
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5 if dtype is DType.float32 else 0.05)
    again = prepared_model(pipeline, replace(source, adapter=str(adapter)), dtype=dtype.value)
    pipeline.lora.start_from(again, str(adapter))
    assert torch.equal(logits(again.module), expected)


@pytest.mark.slow
@BOTH
def test_a_run_that_is_killed_and_resumed_has_the_same_bits(forks, tmp_path, tied):
    base = untrained_base(tmp_path / "base", tied)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    words = [
        "model.init=pretrained",
        "model.architecture={}",
        f"model.path={base}",
        "techniques.lora.train_tokens=auto",
    ]
    command(broken)
    reference = Reference.of(forks, command(whole, *words, "train.epochs=1"), whole)
    outcome = disturb(forks, reference, broken, [Aim("training"), Aim("saving")])
    assert len(outcome.kills) == 2
    assert outcome.code == 0
    assert outcome.differences == []


@pytest.mark.parametrize("tied", slow_but([True, False], False))
def test_a_resumed_run_a_checkpoint_and_a_continued_adapter_keep_the_tokens_of_auto(untrained, cwd, tied):
    untrained.train.max_steps, untrained.train.pause_after, untrained.checkpoint.every = 4, 2, 2
    trainer.run(untrained)
    untrained.train.pause_after = None
    trainer.run(untrained)
    whole = replace(untrained, run=replace(untrained.run, dir="whole"))
    trainer.run(whole)
    adapters = [Path(run) / "adapter/adapter_model.safetensors" for run in ("run", "whole")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    out = merge("run/checkpoints/step-4", unmerged=True)
    assert (out / "adapter_model.safetensors").read_bytes() == adapters[0].read_bytes()
    further = replace(untrained, run=replace(untrained.run, dir="further"))
    further.model = replace(untrained.model, adapter="run/adapter")
    trainer.run(further)
    options = [json.loads(Path(run, "adapter/adapter_config.json").read_text()) for run in ("run", "further")]
    assert options[0]["trainable_token_indices"] == options[1]["trainable_token_indices"]
    further.run.dir, further.techniques.lora.train_tokens = "other", None
    with pytest.raises(ConfigError, match=r"train_tokens: None in the recipe, \['<\|im_start\|>', '<\|im_end\|>'\]"):
        trainer.run(further)


def test_auto_without_untrained_rows_says_so(small, cwd, capsys):
    small.techniques.lora.train_tokens, small.run.dir, small.train.max_steps = "auto", "run", 1
    trainer.run(small)
    assert "the base has trained all special tokens of the data" in capsys.readouterr().out
    assert "trainable_token_indices" not in Path("run/adapter/adapter_model.safetensors").read_text("latin1")


def test_rows_of_a_base_that_is_quantized_as_it_is_read_are_the_base_s(tmp_path, monkeypatch):
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}  # as the kernels need it
    model = ModelConfig(path=str(on_disk(tmp_path / "base", **wide)))
    pipeline = lora(train_tokens=["t5", "t9"])
    pipeline.quantize.enabled, pipeline.quantize.type = True, WeightFormat.int8
    pipeline, _ = pipeline.resolved(facts_of(model))
    whole = built(pipeline, model)
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    assert torch.equal(logits(mine), logits(whole))
    pipeline.lora.train_tokens = "auto"
    with pytest.raises(ConfigError, match="train_tokens: auto looks at the rows of the base, which is quantized here"):
        built(pipeline, model)


def test_trained_rows_are_updated_as_tables_and_cost_no_product():
    """Muon is for matrices between activations; an embedding looks rows up."""
    model = replace(random_model("llama", vocab_size=1024), tokenizer="builtin:tiny")
    with_rows, without = built(lora(train_tokens=ROWS), model), built(lora(), model)
    optimizer = Optimizer(with_rows, OptimizerConfig(name=OptimizerName.muon))
    muon = {weight for part in optimizer.parts if isinstance(part, torch.optim.Muon) for weight in weights_of(part)}
    names = {name for name, weight in with_rows.named_parameters() if weight in muon}
    assert names
    assert not any("trainable_tokens" in name for name in names)
    assert training_cost(with_rows) == training_cost(without)


def weights_of(part: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in part.param_groups for weight in group["params"]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train_tokens": []}, "train_tokens: empty"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save already trains lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules already trains model.embed_tokens"),
    ],
)
def test_what_cannot_act_is_refused_before_weights_load(options, reason):
    pipeline = lora(**{"train_tokens": ROWS, **options})
    assert reason in "\n".join(pipeline.lora.check(facts_of(random_model("llama"))))


@MOSTLY_TIED
def test_a_zero_row_starts_as_the_mean_so_that_its_gradient_is_like_the_others(tied, tmp_path):
    folder = untrained_base(tmp_path / "base", tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[START] = 0
    model.save_pretrained(folder)
    pipeline = lora(train_tokens=ROWS)
    prepared = prepared_model(pipeline, ModelConfig(path=str(folder)))
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    probe = make_probe(mine)
    probe["input_ids"][0, ::4] = START
    mine(**probe).logits.logsumexp(-1).mean().backward()
    start, end = mine.get_input_embeddings().token_adapter.trainable_tokens_delta["default"].grad.norm(dim=-1)
    assert 0 < start < 100, (start, end)


@pytest.mark.parametrize("words", [{"train_tokens": ["<|im_end|>"]}, {}])
def test_the_bound_of_the_proof_follows_from_the_dtype_that_computes(small, cwd, words):
    small.techniques.precision.autocast = Autocast.bfloat16
    small.model.add_tokens = [] if words else ["<own>"]
    small.techniques.lora = replace(small.techniques.lora, **words)
    _, evidence = RunBuilder(small).proven_model()
    assert any("train_tokens" in found.asked and found.acted for found in evidence)


def test_a_token_that_the_tokenizer_does_not_have_is_refused():
    model = replace(random_model("llama", vocab_size=1024), tokenizer="builtin:tiny")
    with pytest.raises(ConfigError, match=r"no token <\|im_stop\|>; did you mean `<\|im_start\|>`"):
        built(lora(train_tokens=["<|im_stop|>"]), model)
