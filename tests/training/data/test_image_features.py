"""Features of images in each step and stored, by the public command: the same losses, and never a stale file."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.cases import slow_but
from support.harness import command, kill, run, small_disk, start, wait_for, write_chats
from support.processors import FAMILIES, write_model, write_picture_pairs, write_picture_rows
from support.rows import write_jsonl
from support.runs import exported, figures, losses, same_export
from support.stopping import stopped_below, stops_before
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.errors import ConfigError, DataError, StorageError
from fxtune.models.kinds.image_decoder.parts import vision_encoders
from fxtune.techniques.attention import vision_encoder
from fxtune.training.builder import RunBuilder
from fxtune.training.data.image_features import use_stored_features

WORDS = [
    "model.path=model",
    "data.sources=[{path: pictures/rows.jsonl}]",
    "data.sequence_length=256",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "techniques.lora.enabled=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.epochs=2",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]
STORED = "data.image_features=stored"


@pytest.fixture
def qwen(cwd) -> None:
    """The working directory has a model and rows with pictures."""
    write("qwen3_vl")


def write(family: str) -> None:
    write_model(family, Path("model"))
    write_picture_rows(Path("pictures"))


def train(name: str, *words: str) -> list[tuple[float, ...]]:
    """The losses and gradient norms of a run."""
    assert main([*WORDS, f"run.dir={name}", *words]) == 0
    return figures(name, "loss", "grad_norm")


def files() -> list[Path]:
    return sorted(Path("cache").rglob("image_features-*.npy"))


def assert_alike(*words: str) -> None:
    """Runs with computed and with stored features have the same steps, evaluation and export."""
    computed, stored = (train(name, f"data.image_features={name}", *words) for name in ("computed", "stored"))
    assert len(computed) > 3
    for mine, theirs in zip(computed, stored, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    one, other = (json.loads(Path(f"{name}/result.json").read_text()) for name in ("computed", "stored"))
    assert one["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    ours, theirs = exported("computed"), exported("stored")
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_vl", "gemma3"))
def test_two_epochs_are_those_of_computed_features(family, cwd):
    write(family)
    assert_alike()


def test_questions_with_images_are_asked_with_the_vision_encoder(cwd):
    write("qwen3_vl")
    shutil.copytree("pictures", "asked")
    assert_alike("data.questions.path=asked/rows.jsonl", "data.on_overlap=keep", "data.questions.limit=4")
    one, other = (Path(f"{name}/answers_after.jsonl").read_text() for name in ("computed", "stored"))
    assert one == other


def test_pairs_that_share_a_prompt_with_an_image(cwd):
    write_model("qwen2_5_vl", Path("model"))
    write_picture_pairs(Path("pictures"))
    words = ["objective=dpo", "data.sources=[{path: pictures/pairs.jsonl}]", "data.packing=true"]
    assert_alike(*words)
    table = next(Path("cache").rglob("reference-*.npy")).parent
    assert [*table.glob("image_features-*.npy")]


@pytest.mark.slow
def test_full_fine_tuning_resumes_after_kills(cwd):
    """One kill while features are computed, if the signal comes in time, and one in training after a checkpoint."""
    for folder in ("one", "other"):
        write_model("qwen3_vl", Path(folder, "model"))
        write_picture_rows(Path(folder, "pictures"))
    words = [f"model.{rest}" for rest in ("init=pretrained", "path=model", "architecture={}")]
    words += [WORDS[1], STORED, "data.sequence_length=256", "techniques.lora.enabled=false", "checkpoint.every=2"]
    words = command(cwd / "one", *words)
    assert run(words, cwd / "one").code == 0
    process = start(words, cwd / "other", **stops_before(1, cwd))
    wait_for(lambda: [*Path("other").glob("cache/**/image_features-*")])
    kill(process, signal.SIGKILL)
    process = start(words, cwd / "other", **stops_before(6, cwd))
    stopped_below(process)
    assert [*Path("other").glob("run/checkpoints/step-*")]
    assert kill(process, signal.SIGKILL) == -9
    assert run(words, cwd / "other").code == 0
    assert losses(cwd / "one/run") == losses(cwd / "other/run")
    assert same_export("one/run", "other/run")
    assert not [*Path("other/cache").rglob("*.staging")]


def test_features_are_computed_once(qwen, monkeypatch):
    first = train("first", STORED)
    (file,) = files()
    before, calls = file.stat().st_mtime_ns, []
    assert train("again", STORED) == first
    computed = Qwen3VLVisionModel.forward

    def counted(*inputs, **options):
        calls.append(0)
        return computed(*inputs, **options)

    monkeypatch.setattr(Qwen3VLVisionModel, "forward", counted)
    counts = []
    for steps in (1, 4):
        train(f"steps_{steps}", STORED, "train.epochs=null", f"train.max_steps={steps}", "data.eval_fraction=0")
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1]
    assert files() == [file]
    assert file.stat().st_mtime_ns == before


def test_computed_and_stored_features_give_the_same_bits(qwen):
    assert train("computed", "data.image_features=computed") == train("stored", STORED)


@pytest.mark.slow
def test_workers_compute_and_read_the_same_features(qwen):
    alone = train("alone", STORED)
    (file,) = files()
    before = file.read_bytes()
    file.unlink()
    assert train("workers", STORED, "loader.num_workers=2") == alone
    assert file.read_bytes() == before


def test_an_image_that_is_gone_while_features_are_computed_is_one_error(qwen, monkeypatch, capsys):
    """The data is read before the model is built."""
    built = RunBuilder.build

    def without_pictures(builder):
        shutil.rmtree("pictures")
        return built(builder)

    monkeypatch.setattr(RunBuilder, "build", without_pictures)
    assert main([*WORDS, "run.dir=gone", STORED]) == DataError.exit_code
    assert "there is no such file. It was read when the data was tokenized" in capsys.readouterr().err
    assert not files()


@pytest.mark.slow
def test_compiled_code_of_the_steps_computes_the_features(cwd, monkeypatch):
    """A run waits seconds for each graph. As on a card, attention takes all images at once."""

    def attend_at_once(model, device):
        for encoder in vision_encoders(model):
            vision_encoder.call(encoder, "fxtune_tower_flash4")

    monkeypatch.setattr(vision_encoder, "attend_at_once", attend_at_once)
    write("qwen2_5_vl")
    words, counts = [*WORDS, "data.packing=true", "techniques.compile.enabled=true"], []
    for features in ("computed", "stored"):
        builder = RunBuilder(load([*words, f"data.image_features={features}"]))
        builder.proven_model(builder.read()[1].training)
        counts.append(builder.techniques.compile.report().graphs)
    assert files()
    assert counts[0] == counts[1] > 0


def test_verify_observes_the_model_and_stores_nothing(qwen):
    assert main(["verify", *WORDS[:-3], WORDS[-1], STORED, "--loss", "--json", "seen.json"]) == 0
    (row,) = [row for row in json.loads(Path("seen.json").read_text())["evidence"] if "image features" in row["asked"]]
    assert row["acted"]
    assert row["observed"].startswith("0 calls of the vision encoder")
    assert not files()


def test_an_image_of_several_documents_is_stored_once(qwen):
    Image.new("RGB", (32, 32), "red").save("pictures/red.png")
    turns = [{"role": "user", "content": "<image>Which color?"}, {"role": "assistant", "content": "Red."}]
    write_jsonl(Path("pictures/rows.jsonl"), [{"messages": turns, "images": ["red.png"]}] * 9)
    train("same", STORED, "data.eval_fraction=0")
    assert len(np.load(files()[0])) == 16


def test_held_out_sources_are_stored_too(qwen):
    write_picture_rows(Path("held_out"), 6)
    train("held", STORED, "data.eval_sources=[{path: held_out/rows.jsonl}]", "data.on_overlap=keep")
    assert len(files()) == 2


def test_a_full_disk_is_one_error_without_a_leftover(cwd, monkeypatch, capsys):
    """Another program takes the room after it was looked up. A memory map without room would end the process."""
    write_model("qwen3_vl", Path("model"))
    write_picture_rows(Path("pictures"), 300)
    usage = shutil.disk_usage(".")
    with small_disk(cwd / "small", "600k") as disk:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert main([*WORDS, "run.dir=full", STORED, f"data.cache_dir={disk}"]) == StorageError.exit_code
        assert not [*disk.rglob("image_features-*")]
    assert "cannot be written" in capsys.readouterr().err


def test_other_weights_or_a_damaged_file_are_computed_again(qwen):
    first = train("first", STORED)
    files()[0].write_bytes(b"")
    Path(f"{files()[0]}.staging").write_bytes(b"")
    assert train("repaired", STORED) == first
    weights = load_file("model/model.safetensors")
    name = next(name for name in weights if "visual.blocks.0.attn.qkv.weight" in name)
    save_file(weights | {name: weights[name] * 2}, "model/model.safetensors", {"format": "pt"})
    train("other", STORED)
    assert len(files()) == 2


def test_another_image_or_another_size_is_computed_anew(qwen):
    train("first", STORED)
    before = files()[0].read_bytes()
    for name in Path("pictures").glob("*-0.*"):
        Image.new("RGB", Image.open(name).size, "white").save(name)
    assert train("changed", STORED) == train("computed", "data.image_features=computed")
    assert before not in [file.read_bytes() for file in files()]
    train("smaller", STORED, "data.image_tokens.max=4")
    assert len({file.parent for file in files()}) == 2


def test_too_little_disk_is_refused_with_the_size(qwen, monkeypatch, capsys):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    assert main([*WORDS, "run.dir=small", STORED, "checkpoint.every=0"]) == StorageError.exit_code
    assert "data.cache_dir" in capsys.readouterr().err
    assert not files()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("techniques.lora.vision=on",), "techniques.lora.vision trains"),
        (("techniques.lora.projector=on",), "techniques.lora.projector trains"),
        (("techniques.lora.enabled=false", "optimizer.lr_vision=1e-4"), "optimizer.lr_vision trains"),
        (("objective=policy", "sampler.max_tokens=8"), "makes its rows in each step"),
    ],
)
def test_what_changes_the_features_is_refused(words, reason, qwen):
    with pytest.raises(ConfigError, match=reason):
        RunBuilder(load([*WORDS, STORED, *words]))


def test_dropout_of_the_vision_encoder_is_refused(cwd):
    write_model("llava", Path("model"))
    config = json.loads(Path("model/config.json").read_text())
    config["vision_config"]["attention_dropout"] = 0.1
    Path("model/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"dropout \(attention_dropout"):
        RunBuilder(load([*WORDS, STORED]))


def test_a_trained_vision_encoder_is_refused_on_the_built_model(qwen):
    """As a technique of a plugin may train it."""
    builder = RunBuilder(load([*WORDS, STORED]))
    table = builder.read()[1].training.tables[0]
    model = builder.language_model(builder.build())
    model.model.get_base_model().model.visual.blocks[0].attn.qkv.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"a plugin trains model.visual.blocks.0.attn.qkv.*weight"):
        use_stored_features(model, table, builder.techniques, builder.world)


def test_rows_and_models_without_images_are_refused(qwen):
    words = [*WORDS, STORED, f"data.sources=[{{path: {write_chats(Path('chats.jsonl'))}}}]"]
    with pytest.raises(ConfigError, match=r"no row of data.sources has an image"):
        RunBuilder(load(words)).read()
    with pytest.raises(ConfigError, match="the model reads no images"):
        RunBuilder(load([*words, "model.path=builtin:tiny"]))


def test_the_plan_has_the_size_and_no_vision_encoder(qwen, capsys):
    found = []
    for features in ("computed", "stored"):
        words = [*WORDS[:-1], f"data.image_features={features}", "--gpu", "H200", "--json", f"{features}.json"]
        assert main(["plan", *words]) == 0
        found.append(json.loads(Path(f"{features}.json").read_text()))
    train("first", STORED)
    assert found[1]["feature_gib"] * 2**30 == pytest.approx(files()[0].stat().st_size / 2, rel=0.05)  # bfloat16
    assert found[1]["feature_seconds"] > 0 == found[1]["tower_seconds"]
    assert found[1]["step_seconds"] < found[0]["step_seconds"]
    assert found[1]["memory_gib"] < found[0]["memory_gib"]
    assert "36 images" in capsys.readouterr().out
