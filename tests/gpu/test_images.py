"""Packed documents with images on a GPU: each family and attention backend against plain transformers, in which each
document is its own forward pass; each technique; and resuming after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import image_reference, processors, reference
from support.endings import Ending
from support.harness import command, kill, run, start, wait_for
from support.image_reference import FAMILIES, isolation, ours, plain
from support.killing import MODES

from fxtune.errors import ConfigError
from fxtune.facts.options import Policy, WeightFormat
from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.models.kinds.known import images_of
from fxtune.techniques.attention.backends.registry import BACKENDS
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.technique import Quantize

MACHINE_LACKS = ("needs the package", "takes heads of", "does not support", "needs a", "is not available for")
SOME = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "internvl", "llava_onevision", "idefics3")
"""Families whose towers and tensors differ most, for what takes long."""


def using(backend: str, **techniques) -> Pipeline:
    pipeline = Pipeline(**techniques)
    pipeline.attention.backend = backend
    pipeline.precision.tf32 = False
    return pipeline


def sees_both_ways(family: str) -> bool:
    config = image_reference.config(family)
    return images_of(config).blocks(config, torch.zeros(1, 4, dtype=torch.long)) is not None


def skip_what_the_machine_lacks(error: ConfigError) -> None:
    if any(words in str(error) for words in MACHINE_LACKS):
        pytest.skip(str(error).splitlines()[1].strip())


def errors(seen, exact) -> dict[str, float]:
    return {name: float(f"{error:.3g}") for name, error in reference.relative_errors(seen, exact).items()}


def close_to_plain(seen, family: str, lora: bool = False) -> None:
    """Assert that the error against float32 is not larger than that of plain bfloat16. A mixture's router may choose
    another expert where two are almost as good."""
    modules = image_reference.adapted(seen) if lora else ()
    exact, rounded = (plain(family, dtype=dtype, adapted=modules) for dtype in ("float32", "bfloat16"))
    found, allowed = errors(seen, exact), errors(rounded, exact)
    print(family, "ours", found, "plain bfloat16", allowed)
    factor = 3.0 if family.endswith("_moe") else 1.5
    for name in ("logits", "grads"):
        assert found[name] <= factor * allowed[name], (name, found, allowed)
    assert found["loss"] <= max(factor * allowed["loss"], 2e-3), (found, allowed)


def isolated(made, family: str) -> None:
    own, others = isolation(*made, family)
    assert own > 1e-3
    assert others == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["flash4", "flash3", "flash2", "cudnn", "sdpa", "eager"])
def test_every_backend_equals_plain_transformers(backend, family):
    if sees_both_ways(family) and not takes_masks(backend):
        pytest.skip(f"{backend} takes no mask; test_backend_without_masks_refuses has it")
    try:
        seen, made = ours(using(backend), family)
    except ConfigError as error:
        skip_what_the_machine_lacks(error)
        raise
    close_to_plain(seen, family)
    isolated(made, family)


def takes_masks(backend: str) -> bool:
    return BACKENDS[backend].given_mask(torch.ones(1, 1, 4, 4, dtype=torch.bool)) is not None


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_compiled_block_masks(family):
    try:
        seen, made = ours(using("flex"), family)
    except ConfigError as error:  # transformers 5.17 has no flex for Qwen's text
        skip_what_the_machine_lacks(error)
        raise
    close_to_plain(seen, family)
    isolated(made, family)


@pytest.mark.parametrize("family", [family for family in FAMILIES if sees_both_ways(family)])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if not takes_masks(backend)])
def test_backend_without_masks_refuses_images_that_are_seen_both_ways(backend, family):
    with pytest.raises(ConfigError) as raised:
        ours(using(backend), family)
    skip_what_the_machine_lacks(raised.value)
    assert "see each other" in str(raised.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_plain_transformers(family):
    seen, made = ours(using("sdpa"), family, dtype="float32")
    found = errors(seen, plain(family))
    assert max(found["loss"], found["logits"]) < reference.LIMITS["float32"], found
    assert found["grads"] < 5 * reference.LIMITS["float32"], found  # sums in another order
    isolated(made, family)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_liger_and_the_fused_loss(family, lora):
    liger = Liger(True, ["fused_linear_cross_entropy"])
    seen, made = ours(using("sdpa", liger=liger), family, lora=lora)
    assert made[1].fused
    close_to_plain(seen, family, lora)


@pytest.mark.parametrize("policy", [Policy.full, Policy.selective], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_gradient(family, policy):
    """All parts are trained, so the vision encoder is recomputed, too."""
    again, without = (
        ours(using("sdpa", checkpointing=Checkpointing(enabled, policy=policy)), family)[0]
        for enabled in (True, False)
    )
    assert max(errors(again, without).values()) < 1e-3, errors(again, without)


@pytest.mark.parametrize("family", SOME)
def test_compiled_blocks(family):
    seen, made = ours(using("auto", compile=Compile(True)), family, lora=True)
    close_to_plain(seen, family, lora=True)
    isolated(made, family)


@pytest.mark.parametrize("images", [False, True], ids=["frozen tower", "adapters in tower and projector"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters(family, images):
    pipeline = using("auto")
    pipeline.lora.vision = pipeline.lora.projector = images
    seen, made = ours(pipeline, family, lora=True)
    model = made[1].model.get_base_model()
    beside = {id(weight) for part in image_modules(model) for weight in part.parameters()}
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    assert bool(beside & trained) == images
    close_to_plain(seen, family, lora=True)


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("techniques", [(), ("compile", "checkpointing")], ids=["alone", "fast"])
def test_quantized_base(name, techniques):
    """The language model's linears are quantized, so the reference is the same model on one document a row."""
    pipeline = using("auto", quantize=Quantize(True, WeightFormat(name)))
    for each in techniques:
        getattr(pipeline, each).enabled = True
    seen, (pipeline, head) = ours(pipeline, "qwen2_5_vl", lora=True)
    alone = image_reference.passed(pipeline, head, image_reference.batch("qwen2_5_vl", alone=True))
    found = errors(seen, alone)
    assert found["loss"] < 2e-3, found
    assert found["logits"] < 2e-2, found
    assert found["grads"] < 5e-2, found
    exact = errors(seen, plain("qwen2_5_vl", adapted=image_reference.adapted(seen)))
    assert exact["loss"] < 0.01, exact
    isolated((pipeline, head), "qwen2_5_vl")


RUNS = {
    "lora": ("techniques.checkpointing.enabled=true",),
    "full": ("techniques.lora.enabled=false", "optimizer.lr_vision=1e-3", "techniques.checkpointing.enabled=true"),
}


def ending(folder: Path, mode: str, killed: bool) -> Ending:
    """The images are decoded by two workers of the loader."""
    processors.write_model("qwen2_5_vl", folder / "model")
    processors.write_picture_rows(folder / "pictures")
    words = command(folder, *MODES["images"], "run.device=auto", *RUNS[mode])
    if killed:
        process = start(words, folder)
        wait_for(lambda: list((folder / "run" / "checkpoints").glob("step-*")), process, timeout=280)
        kill(process)
        assert not (folder / "run" / "result.json").exists(), "the run ended before the kill"
    done = run(words, folder, timeout=280)
    assert done.code == 0, done.text[-3000:]
    assert ("Resuming" in done.text) == killed
    return Ending.of(folder / "run", [])


@pytest.mark.parametrize("mode", RUNS)
def test_killed_run_with_images_gives_equal_bits(mode, tmp_path):
    whole = ending(tmp_path / "whole", mode, killed=False)
    assert whole.differences(ending(tmp_path / "killed", mode, killed=True)) == []
    losses = [line["train/loss"] for line in whole.lines if "train/loss" in line]
    assert losses[-1] < losses[0]
