"""Each rank reads its rows of each weight."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.sharding import assert_same, built
from torch import nn

from fxtune.distributed.sharding import materialize
from fxtune.distributed.world import Device, World
from fxtune.errors import StorageError
from fxtune.models import shards, weights
from fxtune.models.load import ModelConfig, build, fill, load_config
from fxtune.models.shards import Piece
from fxtune.system.hub import Origin, locate


@pytest.fixture(scope="module")
def world():
    return World.create(Device.cpu)


def test_read_weights_are_those_that_transformers_loads(world):
    config = load_config(ModelConfig())
    origin = locate("builtin:tiny", None)
    model, pieces = built(config, world)
    shards.read(origin, model, pieces, world, "builtin:tiny")
    assert_same(model, weights.read(origin, config, torch.float32, world, False, "builtin:tiny"))


def test_head_that_a_base_lacks_is_drawn_and_a_stored_head_is_read_as_in_one_process(world, tmp_path):
    base = ModelConfig(path="builtin:tiny")
    config = load_config(base, head="score")
    whole = build(base, config, world, seed=3).module
    assert_same(_read_by_rows(base, config, world), whole)
    whole.save_pretrained(tmp_path)
    trained = ModelConfig(path=str(tmp_path), tokenizer="builtin:tiny")
    assert_same(_read_by_rows(trained, load_config(trained, head="score"), world, seed=4), whole)


def _read_by_rows(model, config, world, seed=3):
    made = build(model, config, world, seed, by_rows=True)
    pieces = shards.pieces_of(made.module)
    materialize(made.module, world.device)
    fill(model, config, made, pieces, world, seed)
    return made.module


def test_joined_weights_take_the_rows_of_each():
    parts = [nn.Parameter(torch.empty(rows, 2)) for rows in (2, 3)]
    for name, part in zip("ab", parts, strict=True):
        setattr(part, shards.MARK, [Piece(name, 0, tuple(part.shape))])
    whole = nn.Module()
    whole.weight = nn.Parameter(torch.full((6, 4), 7.0))  # one row and two columns are of no part
    shards.mark_joined(whole.weight, parts)
    stored = {"a": torch.arange(4.0).view(2, 2), "b": 10 + torch.arange(6.0).view(3, 2)}
    shards.fill(whole, shards.pieces_of(whole), lambda name, first, end: stored[name][first:end])
    assert torch.equal(whole.weight[:5, :2], torch.cat([stored["a"], stored["b"]]))
    assert not whole.weight[5:].any()
    assert not whole.weight[:, 2:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop("model.norm.weight"), r"1 weights of the architecture are not in the files"),
        (lambda stored: stored.update(other=torch.ones(2)), r"1 weights in the files have no place.*such as other"),
        (lambda stored: stored.update({"model.norm.weight": torch.ones(3)}), r"1 weights have another shape"),
        (lambda stored: stored["model.norm.weight"].fill_(torch.nan), r"hold NaN or infinite numbers.*model\.norm"),
    ],
    ids=("missing", "unknown", "shape", "nan"),
)
def test_files_that_do_not_fit_are_refused(world, tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(locate("builtin:tiny", None).folder, folder)
    file = next(folder.glob("*.safetensors"))
    stored = load_file(file)
    change(stored)
    save_file(stored, file, {"format": "pt"})
    model, pieces = built(load_config(ModelConfig(path=str(folder))), world)
    with pytest.raises(StorageError, match=message):
        shards.read(Origin(folder, str(folder)), model, pieces, world, str(folder))
