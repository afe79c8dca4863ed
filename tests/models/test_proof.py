"""proof.json: an export whose files have changed since is not read. For the commands see tests/cli/test_run_output.py."""

from __future__ import annotations

import json

import pytest
from support.architectures import CPU, built, lora, prepared_model, trained

from fxtune.errors import StorageError
from fxtune.export.save import save_model
from fxtune.models.load import ModelConfig, build, load_config, load_tokenizer
from fxtune.models.proof import changed_since, require_unchanged
from fxtune.system.files.hub import Origin


@pytest.fixture
def adapter(base, tmp_path):
    model = ModelConfig(path=str(base))
    return save_model(trained(prepared_model(lora(), model)), load_tokenizer(model), tmp_path / "adapter")


def change(file) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def reason(origin: Origin, share: tuple[int, int]) -> str:
    try:
        require_unchanged(origin, "here", share)
    except StorageError as error:
        return str(error)
    return ""


def test_training_starts_from_no_adapter_that_has_changed(base, adapter):
    model = ModelConfig(path=str(base), adapter=str(adapter))
    built(lora(), model)
    change(adapter / "adapter_model.safetensors")
    with pytest.raises(
        StorageError, match=r"model\.adapter=.* is not what was proven .*adapter_model\.safetensors is not"
    ):
        built(lora(), model)
    (adapter / "proof.json").unlink()  # the way out that the message names
    built(lora(), model)


def test_no_model_is_built_from_files_that_have_changed(base, tmp_path):
    model = ModelConfig(path=str(base))
    folder = save_model(build(model, load_config(model), CPU, seed=0), load_tokenizer(model), tmp_path / "model")
    model = ModelConfig(path=str(folder))
    build(model, load_config(model), CPU, seed=0)
    change(folder / "model.safetensors")
    with pytest.raises(StorageError, match=r"model\.path=.* is not what was proven .*model\.safetensors is not"):
        build(model, load_config(model), CPU, seed=0)


def test_each_file_is_read_by_one_of_the_ranks(adapter):
    origin = Origin(adapter, str(adapter))
    for file in sorted(adapter.glob("*.json*")):
        if file.name == "proof.json":
            continue
        before = file.read_bytes()
        change(file)
        refused = [rank for rank in range(3) if file.name in reason(origin, (rank, 3))]
        assert len(refused) == 1, file.name
        file.write_bytes(before)
    require_unchanged(origin, "here")


def test_of_a_hub_repository_only_fetched_files_are_compared(adapter):
    (adapter / "tokenizer.json").unlink()
    require_unchanged(Origin(adapter, "me/lamps", "0" * 40), "here")
    with pytest.raises(StorageError, match=r"tokenizer\.json"):
        require_unchanged(Origin(adapter, str(adapter)), "here")
    assert len(changed_since(adapter)[1]) == 1


def test_a_proof_that_cannot_be_read_is_no_proof(adapter):
    before = json.loads((adapter / "proof.json").read_text())
    outside = {**before, "files": {"../elsewhere": {"sha256": "", "bytes": 1}}}
    for found in ({}, outside):
        (adapter / "proof.json").write_text(json.dumps(found))
        with pytest.raises(StorageError, match=r"proof\.json cannot be read"):
            require_unchanged(Origin(adapter, str(adapter)), "here")
