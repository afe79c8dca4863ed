"""Each rank reads its rows of each weight."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import image_models
from support.architectures import ARCHITECTURES, SIZES
from support.cases import slow_but
from support.mixtures import mixture
from support.sharded import run_ranks
from support.sharding import assert_same, built
from torch import nn

from fxtune.distributed.chunks import chunk_of, local
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.sharding import materialize, shard
from fxtune.distributed.world import Device, World
from fxtune.errors import StorageError
from fxtune.models import shards, weights
from fxtune.models.load import ModelConfig, WeightSource, build, load_config
from fxtune.models.shards import Piece
from fxtune.models.structure import decoder_layers
from fxtune.system.files.hub import Origin, locate


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
    WeightSource(model, config, made, world, seed).fill(pieces)
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


MIXTURES = {
    "deepseek_v3": {},
    "jamba": {
        "attn_layer_offset": 0,
        "attn_layer_period": 1,
        "expert_layer_offset": 0,
        "expert_layer_period": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
    },
    "mixtral": {},
    "phimoe": {"num_local_experts": 4},
    "qwen3_moe": {},
}
"""Families whose files store each expert apart. deepseek_v3's have buffers, too; mixtral and phimoe rename parts;
jamba's layers have no `mlp`."""


def saved(kind, folder):
    """A mixture's files as transformers saves them, and its config."""
    model = mixture(kind, **({} if kind in ARCHITECTURES else SIZES), **MIXTURES[kind])
    made = weights.draw(load_config(model), torch.float32, World.create(Device.cpu), 3, False)
    for buffer in made.buffers():
        buffer.uniform_()
    made.save_pretrained(folder)
    assert any(".experts.3." in name for name in load_file(folder / "model.safetensors"))
    return Origin(folder, str(folder)), load_config(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_that_files_store_apart_are_those_that_transformers_loads(world, kind, tmp_path):
    origin, config = saved(kind, tmp_path)
    model, pieces = built(config, world)
    shards.read(origin, model, pieces, world, str(tmp_path))
    assert_same(model, weights.read(origin, config, torch.float32, world, False, str(tmp_path)))


def test_experts_that_files_store_transposed_are_turned(world, tmp_path):
    """Qwen3-VL's older files. transformers goes by the shape, so a square matrix stays."""
    image_models.model("qwen3_vl_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    down = {name: weight.mT.contiguous() for name, weight in stored.items() if name.endswith("experts.down_proj")}
    save_file({**stored, **down}, tmp_path / "model.safetensors", {"format": "pt"})
    config = load_config(ModelConfig(path=str(tmp_path)))
    model, pieces = built(config, world)
    shards.read(Origin(tmp_path, ""), model, pieces, world, str(tmp_path))
    assert down
    for name, weight in down.items():
        assert torch.equal(model.get_parameter(name), weight.mT)


def test_experts_are_read_a_few_at_a_time_and_alone(world, tmp_path, monkeypatch):
    """A block of one expert, and one tensor of experts whole, for a format that packs whole tensors."""
    monkeypatch.setattr(shards, "BLOCK", 2 * 32 * 64)
    origin, config = saved("qwen3_moe", tmp_path)
    expected = weights.read(origin, config, torch.float32, world, False, str(tmp_path))
    model, pieces = built(config, world)
    shards.read(origin, model, pieces, world, str(tmp_path))
    assert_same(model, expected)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    wanted, found = {name: tuple(expected.get_parameter(name).shape)}, {}
    model = shards.empty(config, torch.float32, world, False)
    shards.read_each(origin, model, wanted, world, torch.float32, str(tmp_path), found.__setitem__)
    assert torch.equal(found[name], expected.get_parameter(name))


def read_a_part(folder, world):
    """Read the experts that this rank holds. Returns their number in each layer, and the names that differ."""
    world = world.divided(Degrees(shard=world.size))
    origin, config = Origin(folder, str(folder)), load_config(ModelConfig(path=str(folder)))
    model = shards.empty(config, torch.float32, world, False)
    pieces = shards.pieces_of(model)
    shard(model, decoder_layers(model), None, [], world)
    shards.read(origin, model, pieces, world, str(folder))
    expected = weights.read(origin, config, torch.float32, world, False, str(folder)).state_dict()
    differ = []
    for name, parameter in model.named_parameters():
        chunk = chunk_of(parameter)
        if not torch.equal(local(parameter), expected[name][chunk.within(chunk.whole(chunk.shape))]):
            differ.append(name)
    held = [len(local(weight)) for name, weight in model.named_parameters() if name.endswith("experts.gate_up_proj")]
    return held, differ


@pytest.mark.parametrize(("ranks", "held"), slow_but([(2, [2, 2]), (3, [2, 2, 0])], (3, [2, 2, 0])))
def test_each_rank_reads_its_experts(ranks, held, tmp_path):
    """Three ranks do not divide four experts: the last rank has none."""
    saved("qwen3_moe", tmp_path)
    assert run_ranks(ranks, read_a_part, tmp_path) == [([own, own], []) for own in held]


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(UP), rf"\. 1 weights of the architecture are not in the files, such as {UP}\. Use"),
        (
            lambda stored: [stored.pop(UP.replace(".2.", f".{expert}.")) for expert in range(4)],
            rf"\. 4 weights of the architecture are not in the files, such as {UP.replace('.2.', '.0.')}\. Use",
        ),
        (
            lambda stored: stored.update({UP.replace(".2.", ".4."): stored[UP].clone()}),
            rf"\. 1 weights in the files have no place in the architecture, such as {UP.replace('.2.', '.4.')}\. Use",
        ),
        (
            lambda stored: stored.update({UP: torch.ones(3, 64)}),
            rf"\. 1 weights have another shape, such as {UP} \(\(3, 64\) in the file, \(32, 64\) in the config\)\. Use",
        ),
        (
            lambda stored: stored.update({UP: stored[UP].to(torch.int8)}),
            rf"\. 1 weights are packed, such as {UP} \(I8\)\. Use",
        ),
        (lambda stored: stored[UP].fill_(torch.nan), rf"hold NaN or infinite numbers.*, in {UP}\. Use"),
    ],
    ids=("missing", "all of one matrix missing", "one too many", "shape", "packed", "nan"),
)
def test_experts_that_do_not_fit_are_refused(world, tmp_path, change, message):
    origin, config = saved("qwen3_moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model, pieces = built(config, world)
    with pytest.raises(StorageError, match=message):
        shards.read(origin, model, pieces, world, str(tmp_path))
    model = shards.empty(config, torch.float32, world, False)
    wanted = {name: shape for parts in pieces.values() for name, _, shape in parts if name.endswith("gate_up_proj")}
    with pytest.raises(StorageError, match=message):
        shards.read_each(origin, model, wanted, world, torch.float32, str(tmp_path), lambda *_: None)


def test_other_conversion_is_refused(world, tmp_path):
    """A family whose experts transformers puts together along another dimension."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    origin, config = saved("mixtral", tmp_path)
    model, pieces = built(config, world)
    for change in model._weight_conversions:
        if change.source_patterns == [".experts.*.w1.weight", ".experts.*.w3.weight"]:
            change.operations = [MergeModulelist(dim=0), Concatenate(dim=2)]
    message = (
        r"2 weights are converted in a way that fxtune does not know row by row, such as "
        r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight \(MergeModulelist\(0\), Concatenate\(2\)\)\. Use"
    )
    with pytest.raises(StorageError, match=message):
        shards.read(origin, model, pieces, world, str(tmp_path))
