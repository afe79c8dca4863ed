"""A small base model on disk, for every test of models/."""

from __future__ import annotations

import shutil

import pytest
from support.architectures import on_disk


@pytest.fixture(scope="package")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def copy(base, tmp_path):
    """A copy of the base that a test may break."""
    return shutil.copytree(base, tmp_path / "copy")
