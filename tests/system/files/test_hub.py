"""Models of the hub: pinned, cached, and one clear error where the hub refuses or cannot be reached."""

from __future__ import annotations

import pytest
from support.architectures import CPU, on_disk

from fxtune.errors import ConfigError, StorageError
from fxtune.models.load import ModelConfig, build, load_config
from fxtune.system.files import hub


def test_unreachable_hub_is_one_storage_error_after_one_request(monkeypatch):
    import huggingface_hub

    requests = []

    def repo_info(self, name, **_):
        requests.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_pause", [])
    for revision in (None, "0123456789" * 4):
        with pytest.raises(StorageError, match=r"nobody/nothing.*hub cannot be reached"):
            load_config(ModelConfig(path="nobody/nothing", revision=revision))
    assert requests == ["nobody/nothing"]


def test_hub_refusals_say_what_to_do(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    for refusal, message in (
        (errors.GatedRepoError("no", response=response), "hf auth login"),
        (errors.RepositoryNotFoundError("no", response=response), "no such model on the hub"),
        (errors.RevisionNotFoundError("no", response=response), "no revision 'v9'"),
    ):

        def refuse(*_, refusal=refusal, **__):
            raise refusal

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ConfigError) as caught:
            load_config(ModelConfig(path="some/model", revision="v9"))
        assert message in str(caught.value)


def test_hub_model_is_pinned_to_resolved_commit(tmp_path, monkeypatch):
    """A stand-in for the hub gives the small files first, and the weights when they are named."""
    import shutil

    import huggingface_hub

    base = on_disk(tmp_path / "base")
    commit, downloads = "0123456789abcdef" * 2 + "01234567", []
    snapshot = tmp_path / "snapshots" / commit

    def download(name, revision, allow_patterns, local_files_only=False, tqdm_class=None):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing was fetched yet")
        downloads.append((revision, list(allow_patterns)))
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in base.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "resolve_commit", lambda name, revision: (commit, None))
    model = ModelConfig(path="some/model", revision="main")
    loaded = build(model, load_config(model), CPU, seed=0)
    assert (loaded.module.name_or_path, loaded.base_revision) == ("some/model", commit)
    assert downloads[-1] == (commit, ["model.safetensors"])
