"""Weights of exports: what transformers itself writes, in files of bounded size, read back before they count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import sharded
from support.cases import slow_but

from fxtune.errors import StorageError
from fxtune.export import weights
from fxtune.export.save import save_model
from fxtune.models.prepared import PreparedModel


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("kind", sharded.MODELS)
def test_files_are_those_of_transformers(tmp_path, kind):
    model = sharded.MODELS[kind]()
    model.save_pretrained(tmp_path / "theirs")
    save_model(PreparedModel(model), sharded.NoTokenizer(), tmp_path / "ours")
    for name in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    ours, theirs = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "theirs"))
    assert ours == {**theirs, "rope_theta": theirs["rope_parameters"]["rope_theta"]}, "transformers 4 reads it there"


def test_large_model_is_written_in_several_files(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(weights, "FILE_BYTES", 20_000)
    model = sharded.llama()
    save_model(PreparedModel(model), sharded.NoTokenizer(), tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "out" / name).stat().st_size < 22_000 for name in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert same(LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_file_that_differs_from_the_model_is_no_export(tmp_path, monkeypatch, kind):
    model = sharded.MODELS[kind]()
    save_model(PreparedModel(model), sharded.NoTokenizer(), tmp_path / "out")
    before, real = (tmp_path / "out" / "model.safetensors").read_bytes(), weights.write_tensors

    def broken(path: Path, given: dict[str, torch.Tensor]) -> None:
        real(path, given)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(weights, "write_tensors", broken)
    with pytest.raises(StorageError, match=r"read back from model\.safetensors, is not what the model holds"):
        save_model(PreparedModel(model), sharded.NoTokenizer(), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", slow_but(sharded.MODELS, "tied llama", mark=pytest.mark.vital))
def test_ranks_export_what_one_process_exports(tmp_path, kind):
    assert sharded.run_ranks(2, sharded.export, tmp_path / "out", kind, 10**9, -1) == ["", ""]
    save_model(PreparedModel(sharded.MODELS[kind]()), sharded.NoTokenizer(), tmp_path / "one" / "out")
    files = sorted(path.name for path in (tmp_path / "one" / "out").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in {*files} - {"README.md", "proof.json"}:  # they say how long the proof took
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "one" / "out" / name).read_bytes(), name


@pytest.mark.slow
def test_rank_that_holds_other_weights_ends_the_export_of_all(tmp_path):
    one, other = sharded.run_ranks(2, sharded.export, tmp_path / "out", "llama", 20_000, 1)
    assert one == other
    assert "rank 1: model.embed_tokens.weight, read back from model-00001" in one
    assert not list(tmp_path.iterdir()), "nothing is left, complete or not"
