"""A run before it is started: what is counted in its data, and what follows from it."""

import base64
import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.processors import write_model, write_picture_rows
from support.rows import write_pairs

from fxtune import api
from fxtune.config import compose
from fxtune.data.batches.build import prepare_data
from fxtune.distributed.world import Device, World
from fxtune.errors import ConfigError
from fxtune.estimate.machines import machine
from fxtune.models.load import ModelConfig, build, load_config, load_tokenizer
from fxtune.system.terminal.units import GIB
from fxtune.tracking.throughput import training_cost
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast import run_forecast
from fxtune.training.forecast.run_forecast import START_SECONDS, Lengths, changes_to_fit, count_tokens, forecast_run

SHAPE = (
    "model.architecture={model_type:llama,hidden_size:4096,intermediate_size:14336,num_hidden_layers:32,"
    "num_attention_heads:32,num_key_value_heads:8,vocab_size:128256,max_position_embeddings:8192}"
)
WORDS = [
    "model.path=null",
    "model.tokenizer=builtin:tiny",
    "model.init=random",
    SHAPE,
    "data.sequence_length=4096",
    "data.packing=true",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
]
LENGTHS = Lengths(epoch=8_000_000, padded=8_000_000, supervised_share=1.0, attended=4096)


@functools.cache
def forecast(*words, gpu="H200", gpus=1, lengths=LENGTHS):
    return forecast_run(compose.load([*WORDS, *words]), machine(gpu, 128), gpus, lengths)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function that makes a config whose data is a file with the given number of chats."""
    monkeypatch.chdir(tmp_path)

    def make(count, *words):
        with open("chats.jsonl", "w") as out:
            for at in range(count):
                turns = [{"role": "user", "content": f"What is {at}?"}, {"role": "assistant", "content": "A number."}]
                out.write(json.dumps({"messages": turns}) + "\n")
        where = ["data.sources=[{path: chats.jsonl}]", f"data.cache_dir={tmp_path / 'cache'}"]
        return compose.load(["model.path=builtin:tiny", *where, "data.sequence_length=64", *words])

    return make


def test_time_is_start_steps_and_evaluations():
    lengths = Lengths(8_000_000, 8_000_000, 1.0, 4096, held_out=800_000)
    run = forecast(
        "techniques=[lora,fast]", "train.epochs=2", "train.eval_every=100", "data.eval_fraction=0.1", lengths=lengths
    )
    assert run.steps == math.ceil(16_000_000 / (16 * 4096))
    assert run.evaluations == 1 + run.steps // 100
    assert (
        run.seconds == START_SECONDS["cuda"] + run.steps * run.step_seconds + run.evaluations * run.evaluation_seconds
    )
    assert run.tokens == run.steps * 16 * 4096
    assert 0.25 < run.evaluation_seconds / run.step_seconds / (800_000 / (16 * 4096)) < 0.5


def test_a_reference_is_a_forward_pass_in_each_step_or_one_before_the_first():
    words = ("techniques=[lora,fast]", "objective=dpo")
    plain, dpo = forecast("techniques=[lora,fast]"), forecast(*words)
    forward = dpo.step_seconds - plain.step_seconds
    assert 0.25 < forward / plain.step_seconds < 0.5
    assert dpo.reference_seconds == 0
    stored = forecast(*words, "objective.reference=stored")
    assert stored.step_seconds == pytest.approx(plain.step_seconds)
    assert stored.reference_seconds == pytest.approx(stored.steps * forward, rel=0.01)
    assert stored.seconds == pytest.approx(plain.seconds + stored.reference_seconds)
    assert (dpo.reference_bytes, stored.reference_bytes) == (0, 4 * LENGTHS.epoch)
    # More than one epoch: stored, as training decides.
    twice = forecast(*words, "train.epochs=2")
    assert twice.reference_seconds == pytest.approx(stored.reference_seconds)
    assert twice.step_seconds == pytest.approx(plain.step_seconds)


@pytest.mark.slow
def test_steps_of_dpo_have_the_tokens_and_the_work_that_a_run_counts(rows):
    """A run takes as many tokens a step, and what MFU counts for a reference is what the forecast adds."""
    write_pairs()
    words = (
        *("data.sources=[{path: pairs.jsonl}]", "data.eval_fraction=0", "data.packing=true"),
        *("data.share_prompts=true", "objective=dpo", "techniques=lora", "train.micro_batch_size=2"),
        *("train.global_batch_size=4", "train.epochs=1"),
    )
    config = rows(1, *words, "run.dir=run", "tracking.display=plain")
    here = replace(World.create(Device.cpu).facts(), cores=2)  # with many cores, what no core speeds up counts more
    lengths = count_tokens(config)
    assert isinstance(lengths, Lengths)
    run = forecast_run(config, here, 1, lengths)
    stored = forecast_run(rows(1, *words, "objective.reference=stored"), here, 1, lengths)
    api.train(config)
    result = json.loads(Path("run/result.json").read_text())
    assert run.steps == result["train/step"]
    assert run.tokens == pytest.approx(result["train/tokens"], rel=0.1)
    model = build(ModelConfig(), load_config(ModelConfig()), World.create(Device.cpu), 0).module.requires_grad_(False)
    with_reference, without = training_cost(model, forward_passes=1), training_cost(model)
    counted = with_reference.per_token / without.per_token
    assert run.step_seconds / stored.step_seconds == pytest.approx(counted, rel=0.1)


def test_max_steps_end_the_run_and_without_lengths_only_they_are_known():
    assert forecast("techniques=[lora,fast]", "train.max_steps=10").steps == 10
    assert forecast("techniques=[lora,fast]", "train.max_steps=10", lengths=None).seconds is not None
    unknown = forecast("techniques=[lora,fast]", lengths=None)
    assert unknown.steps is None
    assert unknown.seconds is None
    assert unknown.tokens is None
    assert unknown.step_seconds > 0


def test_padding_and_short_documents_count():
    full = forecast("techniques=[lora,fast]")
    padded = forecast("techniques=[lora,fast]", lengths=Lengths(4_000_000, 8_000_000, 1.0, 4096))
    short = forecast("techniques=[lora,fast]", lengths=Lengths(8_000_000, 8_000_000, 1.0, 500))
    assert padded.step_tokens == full.step_tokens / 2
    assert padded.steps == full.steps
    assert short.step_seconds < full.step_seconds


def test_two_cards_take_half_the_steps_time_and_the_exchange():
    one, two = forecast("techniques=[lora,fast]"), forecast("techniques=[lora,fast]", gpus=2)
    assert two.facts.degrees.replicate == 2
    assert 0.5 < two.step_seconds / one.step_seconds < 0.53


def test_full_fine_tuning_is_divided_where_a_card_does_not_hold_it():
    words = ("techniques=[full,fast]", "train.micro_batch_size=1")
    one, four = forecast(*words, gpu="A100-40GB"), forecast(*words, gpu="A100-40GB", gpus=4)
    assert not one.fits
    assert four.fits
    assert four.facts.degrees.shard > 1


def test_what_does_not_fit_has_changes_that_make_it_fit():
    config = compose.load([*WORDS, "techniques=lora"])
    run = forecast_run(config, machine("A100-80GB", 128), 1, LENGTHS)
    assert not run.fits
    changes = changes_to_fit(config, run)
    assert any(enough for _, enough in changes)
    for change, enough in changes:
        changed = compose.load([*WORDS, "techniques=lora", *change.setting.split()])
        assert forecast_run(changed, machine("A100-80GB", 128), 1, LENGTHS).fits == enough


def test_disk_holds_checkpoints_and_export():
    run = forecast("techniques=[lora,fast]", "techniques.lora.r=16")
    assert run.export_bytes == pytest.approx(4 * 41_943_040, rel=0.01)
    assert run.checkpoint_bytes == pytest.approx(3 * run.export_bytes)
    assert run.disk_bytes == run.checkpoints * run.checkpoint_bytes + run.export_bytes


def test_what_a_card_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"techniques\.attention\.backend"):
        forecast("techniques=[lora,fast]", "techniques.attention.backend=flash4", gpu="A100-80GB")


def test_tokens_are_those_of_the_data(rows):
    config = rows(200, "data.eval_fraction=0.2")
    found = count_tokens(config)
    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config.data, tokenizer, micro_batch_size=1, global_batch_size=1, progress=False)
    assert found.epoch == data.training.summary()["tokens"]
    assert found.held_out == data.evaluation.summary()["tokens"]
    assert 0 < found.supervised_share < 1
    assert found.sampled == ""


def with_pictures(tmp_path, *words):
    """A config whose model and data have images."""
    model, data = write_model("qwen2_5_vl", tmp_path / "model"), write_picture_rows(tmp_path / "data")
    where = [f"model.path={model}", f"data.sources=[{{path: {data}}}]", f"data.cache_dir={tmp_path / 'cache'}"]
    return compose.load([*where, "data.sequence_length=400", "data.packing=true", "techniques=lora", *words])


def test_images_are_those_of_the_data(tmp_path):
    config = with_pictures(tmp_path)
    found = count_tokens(config)
    assert found.images.images == 36
    assert found.images.patches == found.images.positions == 4 * found.images.features
    assert 0 < found.images.features / found.epoch < 1
    assert found.images.features / 36 < found.fullest < 400
    assert found.image_bytes == 0, "they are files"
    run = forecast_run(config, machine("H200", 128), 1, found)
    without = forecast_run(config, machine("H200", 128), 1, replace(found, images=None, fullest=0))
    assert run.step_seconds == pytest.approx(without.step_seconds + run.image_seconds)
    assert run.facts.image_features == found.fullest
    assert run.need.images > without.need.images == 0
    assert run.assumed == ""


def test_images_in_rows_take_their_bytes_beside_the_cached_tokens(tmp_path):
    config = with_pictures(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "data" / "rows.jsonl").read_text().splitlines()]
    files = [(tmp_path / "data" / name).read_bytes() for row in rows for name in row["images"]]
    for row in rows:
        data = [base64.b64encode((tmp_path / "data" / name).read_bytes()).decode() for name in row["images"]]
        row["images"] = [f"data:image/png;base64,{image}" for image in data]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert count_tokens(config).image_bytes == sum(map(len, set(files)))


def test_without_the_data_images_are_assumed_and_this_is_said(tmp_path):
    config = with_pictures(tmp_path, "data.image_tokens.max=16")
    unknown = forecast_run(config, machine("H200", 128), 1, None)
    assert unknown.assumed == "as if 50% of the tokens were of images, 16 for each"
    assert unknown.need.images > 0
    assert unknown.image_seconds > 0
    known = Lengths.full_rows(1_000_000, config)
    assert known.images.images == pytest.approx(0.5 * 1_000_000 / 16)
    assert forecast().assumed == ""


def test_a_run_counts_the_images_of_its_data(tmp_path):
    config = with_pictures(tmp_path, f"run.dir={tmp_path / 'run'}", "train.max_steps=2", "tracking.display=plain")
    lengths = count_tokens(config)
    builder = RunBuilder(config)
    builder.read()
    assert builder.facts.image_features == lengths.fullest
    again = builder.stage.with_images(2 * lengths.fullest)
    need, larger = (found.techniques.memory_need(found.facts) for found in (builder.stage, again))
    assert 0 < need.images < larger.images
    assert again.notes == builder.notes, "nothing else is decided"


def test_large_files_are_extrapolated_from_their_first_rows(rows, monkeypatch):
    config = rows(5000)
    whole = count_tokens(config)
    monkeypatch.setattr(run_forecast, "WHOLE_BYTES", 100_000)
    monkeypatch.setattr(run_forecast, "HEAD_BYTES", 50_000)
    part = count_tokens(config)
    assert part.sampled.startswith("the first 0.1 MB")
    assert part.epoch == pytest.approx(whole.epoch, rel=0.05)
    assert part.attended == pytest.approx(whole.attended, rel=0.05)


def test_data_that_is_not_here_is_not_known(rows, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = rows(1, "data.sources=[{path: somebody/no-such-dataset}]")
    assert "somebody/no-such-dataset" in count_tokens(config)


def test_memory_of_the_host_counts():
    run = forecast("techniques=[lora,fast,memory]", "train.micro_batch_size=16")
    assert run.need.host > 1 * GIB
