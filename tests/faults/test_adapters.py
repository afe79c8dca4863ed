"""Adapters with NaN weights and merges to unwritable folders fail with a message and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import lora, on_disk, prepared_model, trained
from support.cases import pairs
from support.harness import command, small_disk

from fxtune.cli.main import main
from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.outputs import merge as merging
from fxtune.outputs.merge import merge

UP = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
DOWN = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
NORM = "base_model.model.model.norm.weight"


@pytest.fixture(scope="module")
def trained_adapter(base) -> Path:
    """A trained adapter of `base` that also trained a norm."""
    model = ModelConfig(path=str(base))
    return save_model(
        trained(prepared_model(lora(modules_to_save=["norm"]), model)), load_tokenizer(model), base.parent / "adapter"
    )


@pytest.fixture
def adapter(trained_adapter, tmp_path) -> Path:
    """A copy of the adapter, which a test may change: without proof.json, as a stranger's."""
    return shutil.copytree(trained_adapter, tmp_path / "adapter", ignore=shutil.ignore_patterns("proof.json"))


def change(adapter: Path, **tensors) -> None:
    """Replace tensors of the adapter. Each value is a function of the old tensor."""
    file = adapter / "adapter_model.safetensors"
    found = load_file(file)
    save_file(
        {**found, **{name: make(found[name]) for name, make in tensors.items()}}, file, metadata={"format": "pt"}
    )


def put(number):
    """A function that sets one element of a tensor to `number`."""

    def change(tensor):
        tensor.view(-1)[5] = number
        return tensor

    return change


def words(base: Path) -> list[str]:
    return [
        f"model.path={base}",
        "model.init=pretrained",
        "model.architecture={}",
        "model.adapter=adapter",
        "techniques.lora.r=4",
        "techniques.lora.alpha=32",
        "techniques.lora.modules_to_save=[norm]",
        "techniques.lora.target_modules=[all-linear]",
    ]


@pytest.mark.parametrize("word", [[], ["eval"], ["merge"]], ids=["train", "eval", "merge"])
def test_adapter_with_nan_is_refused_by_every_command(word, adapter, base, tmp_path, run_here):
    change(adapter, **{UP: put(float("nan")), DOWN: put(float("inf"))})
    given = command(tmp_path, *words(base), "data.eval_fraction=0.2", "data.sequence_length=64", "train.max_steps=3")
    (tmp_path / "chats.jsonl").write_text("".join(f'{{"text": "t{row} t5 t{row + 9}"}}\n' for row in range(40)))
    given = ["adapter", "merged"] if word == ["merge"] else given
    code, said = run_here(*word, *given)
    assert code == 6, said
    assert f"NaN or infinite numbers are in 2 of its tensors, the first being {DOWN} in " in said
    assert "adapter/adapter_model.safetensors" in said
    assert "Traceback" not in said
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (UP, put(float("nan")), "NaN or infinite numbers are in 1"),
        (DOWN, put(-float("inf")), "NaN or infinite numbers are in 1"),
        (NORM, put(float("nan")), "NaN or infinite numbers are in 1"),
        (UP, lambda tensor: put(float("nan"))(tensor.bfloat16()), "NaN or infinite numbers are in 1"),
        (
            UP,
            lambda tensor: torch.full_like(tensor, float("nan")).to(torch.float8_e4m3fn),
            "NaN or infinite numbers are in 1",
        ),
        (UP, lambda tensor: put(1e300)(tensor.double()), r"numbers too large for torch\.float32 are in 1"),
        (UP, lambda tensor: (100 * tensor).int(), r"numbers of torch\.int32, which cannot be weights, are in 1"),
        (UP, lambda tensor: tensor.to(torch.complex64), r"numbers of torch\.complex64"),
    ],
    ids=["nan", "infinite", "norm", "bfloat16", "fp8", "float64", "int", "complex"],
)
def test_error_names_the_tensor_with_invalid_numbers(name, make, message, adapter, tmp_path):
    change(adapter, **{name: make})
    with pytest.raises(StorageError, match=f"{message}.* of its tensors, the first being {name} in .*another copy"):
        merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_largest_finite_numbers_are_accepted(adapter, tmp_path):
    change(adapter, **{NORM: put(torch.finfo(torch.float32).max)})
    assert load_file(merge(adapter, tmp_path / "merged") / "model.safetensors")["model.norm.weight"][5] > 3e38


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float16, 3e3)])
def test_finite_numbers_whose_sum_is_not_are_refused(dtype, size, tmp_path):
    """In float16 the sum of the second case overflows, and the base would have infinite weights."""
    base = on_disk(tmp_path / "base", dtype=dtype)
    model = ModelConfig(path=str(base))
    adapter = save_model(prepared_model(lora(), model), load_tokenizer(model), tmp_path / "adapter")
    (adapter / "proof.json").unlink()
    change(
        adapter,
        **{name: lambda tensor: torch.full_like(tensor, size) for name in (UP, UP.replace("lora_A", "lora_B"))},
    )
    with pytest.raises(
        StorageError, match=r"makes NaN or infinite float\d\d numbers, first in model\.layers\.1\.mlp\.up_proj"
    ):
        merge(adapter, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


@pytest.mark.parametrize(
    ("make", "suffix"),
    pairs(
        [
            os.mkfifo,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path.parent),
            Path.touch,
            lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
        ],
        ["partial", "old"],
    ),
    ids=["pipe", "device", "link", "file", "socket"],
)
def test_file_at_a_temporary_path_of_the_merge_is_an_error_and_does_not_block(
    make, suffix, adapter, tmp_path, run_here, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    there = tmp_path / f".merged.{suffix}"
    make(there)
    before = there.lstat()
    code, said = run_here("merge", "adapter", "merged")
    assert (code, f".merged.{suffix} stands where the merged model is put together, and is no folder" in said) == (
        6,
        True,
    ), said
    assert there.lstat() == before
    assert not (tmp_path / "merged").exists()


def test_leftovers_of_a_killed_merge_are_removed(adapter, tmp_path):
    left = tmp_path / ".merged.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    os.mkfifo(left / "pipe")
    merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"]
    assert not (tmp_path / "merged" / "pipe").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "config.json"])
def test_pipe_among_the_files_of_an_adapter_does_not_block(name, adapter, run_here):
    (adapter / name).unlink(missing_ok=True)
    os.mkfifo(adapter / name)
    code, said = run_here("merge", "adapter", "merged")
    assert (code, f"{name} is no regular file" in said) == (2, True), said


@pytest.mark.parametrize(
    "make",
    [lambda out: out.symlink_to("/nowhere/at/all"), os.mkfifo, Path.touch, Path.mkdir],
    ids=["link", "pipe", "file", "folder"],
)
def test_existing_target_is_not_overwritten(make, adapter, tmp_path):
    out = tmp_path / "out"
    make(out)
    before = out.lstat()
    with pytest.raises(StorageError, match=r"out exists, and exporting never writes over"):
        merge(adapter, out)
    assert out.lstat() == before


def test_target_written_by_another_merge_meanwhile_is_not_overwritten(adapter, tmp_path, monkeypatch):
    out, fold = tmp_path / "out", merging._merge_into_base

    def folded(*given):
        (out / "kept").mkdir(parents=True)
        return fold(*given)

    monkeypatch.setattr(merging, "_merge_into_base", folded)
    with pytest.raises(StorageError, match="out exists"):
        merge(adapter, out)
    assert (out / "kept").exists()


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "adapter/adapter_config.json/x", "nul\0"])
def test_invalid_folder_name_is_refused_before_any_work(name, adapter, tmp_path):
    with pytest.raises(StorageError, match="cannot be a folder for the merged model"):
        merge(adapter, tmp_path / name)


def test_full_disk_is_reported_before_the_merge(adapter, base, cwd, capsys):
    with small_disk(cwd / "disk", "64k") as disk:
        assert main(["merge", "adapter", "disk/below/merged"]) == 6
        said = capsys.readouterr().err
        assert "The disk of disk/below/merged has no room for the merged model: it takes 0." in said
        assert not list(disk.iterdir())


def test_full_disk_leaves_no_partial_merge(adapter, base, tmp_path):
    """The disk has space for the weights but not for the tokenizer."""
    tensors = (base / "model.safetensors").stat().st_size
    with small_disk(tmp_path / "disk", f"{tensors // 4096 * 4 + 8}k") as disk:
        with pytest.raises(StorageError, match=r"cannot be written to .*No space left"):
            merge(adapter, disk / "merged")
        assert not list(disk.iterdir())


def test_read_only_disk_is_an_error(adapter, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StorageError, match=r"disk may not be written to"):
            merge(adapter, disk / "below" / "merged")


def test_pickles_of_an_adapter_are_named_and_not_copied(adapter, tmp_path):
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    merge(adapter, tmp_path / "merged")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        StorageError,
        match=r"adapter_model\.safetensors is missing\. adapter_model\.bin in the same folder is a pickle",
    ):
        merge(adapter, tmp_path / "again")
    assert not (tmp_path / "merged" / "adapter_model.bin").exists()


@pytest.mark.parametrize("name", ["old/base", "./old/base", "/nowhere/base", "x" * 5000, "adapter"])
def test_missing_base_error_names_the_file_that_refers_to_it(name, adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": name}))
    with pytest.raises(
        (ConfigError, StorageError),
        match=r"its base, as base_model_name_or_path in adapter/adapter_config\.json "
        r"names it: .*If the base has moved, write where it is into that file",
    ):
        merge("adapter", "merged")


def test_relative_base_is_relative_to_the_working_directory(adapter, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "near" / "base")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "near/base"}))
    assert (merge("adapter", "merged") / "model.safetensors").exists()
