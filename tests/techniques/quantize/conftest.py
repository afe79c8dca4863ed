"""The base of the tests of quantize."""

from __future__ import annotations

import pytest
from support.architectures import on_disk
from support.quantized import WIDE


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("quantize") / "base", **WIDE)
