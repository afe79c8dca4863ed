"""Base models with NaN weights are refused when they are read, with the tensor's name, before they affect a loss."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import pairs
from support.harness import ROOT, command

from fxtune.distributed.world import World
from fxtune.errors import StorageError
from fxtune.models.load import DType, ModelConfig, build, load_config

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def base(tmp_path) -> Path:
    return shutil.copytree(ROOT / "fxtune" / "assets" / "tiny", tmp_path / "base")


def put(folder: Path, **numbers: float) -> None:
    """Replace one number of each tensor."""
    tensors = load_file(folder / "model.safetensors")
    for name, number in numbers.items():
        tensors[name][3, 4] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def put_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[3, 4] = float("nan")
    return tensor


def load(folder: Path, **options) -> torch.nn.Module:
    model = ModelConfig(path=str(folder), **options)
    return build(model, load_config(model), World(torch.device("cpu")), seed=0).module


@pytest.mark.parametrize("lora", ["true", "false"], ids=["lora", "full"])
def test_base_with_nan_is_refused_before_the_first_step(lora, base, tmp_path, run_here):
    put(base, **{UP: float("nan"), DOWN: float("inf")})
    code, said = run_here(
        *command(
            tmp_path,
            "model.path=base",
            "model.init=pretrained",
            "model.architecture={}",
            "train.max_steps=3",
            f"techniques.lora.enabled={lora}",
        )
    )
    assert code == 6, said
    message = f"model.path=base: NaN or infinite numbers are in 2 of its tensors, the first being {DOWN} in "
    assert message in said
    assert "base/model.safetensors" in said
    assert "step=1/" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "dtype"),
    pairs([float("nan"), float("inf"), -float("inf")], [DType.float32, DType.bfloat16, DType.float16]),
)
def test_error_names_the_shard_of_the_tensor(number, dtype, base):
    put(base, **{UP: number})
    tensors = load_file(base / "model.safetensors")
    files = {name: f"model-0000{1 + (name == UP)}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file(
            {name: tensors[name] for name in tensors if files[name] == file}, base / file, metadata={"format": "pt"}
        )
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with pytest.raises(
        StorageError, match=rf"in 1 of its tensors, the first being {re.escape(UP)} in \S+/{files[UP]}\. "
    ):
        load(base, dtype=dtype)


def test_overflow_in_the_requested_dtype_has_its_own_message(base):
    put(base, **{UP: 1e6})
    with pytest.raises(
        StorageError, match=r"finite in its files are too large for torch\.float16.*model\.dtype.*bfloat16"
    ):
        load(base, dtype=DType.float16)
    assert load(base, dtype=DType.bfloat16).get_parameter(UP)[3, 4] > 9e5


@pytest.mark.parametrize(("kind", "message"), [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.complex64, "C64")])
@pytest.mark.filterwarnings("ignore")
def test_weights_of_an_unsupported_dtype_are_refused(kind, message, base):
    tensors = load_file(base / "model.safetensors")
    tensors[UP] = (100 * tensors[UP].float()).to(kind)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        StorageError, match=rf"{re.escape(UP)} is stored as {message} in \S+/model\.safetensors, which is no weight"
    ):
        load(base)


def test_nan_in_fp8_is_detected(base):
    tensors = load_file(base / "model.safetensors")
    tensors[UP] = put_nan(tensors[UP]).to(torch.float8_e4m3fn)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StorageError, match=rf"in 1 of its tensors, the first being {re.escape(UP)} in "):
        load(base)


def test_largest_finite_numbers_are_accepted(base):
    most = torch.finfo(torch.bfloat16).max  # the base has bfloat16 weights
    put(base, **{UP: most, DOWN: -most})
    assert load(base, dtype=DType.float32).get_parameter(UP)[3, 4] == most
