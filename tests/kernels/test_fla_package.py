"""The choices of fla-core that fxtune fixes. tests/gpu/test_linear_attention.py runs its kernels."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from fxtune.kernels import fla_package

PROGRAM = """
import os, sys, torch
from importlib import metadata
capability, version = sys.argv[1:]
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: tuple(map(int, capability.split(".")))
metadata.version = lambda name: version
from fxtune.kernels import fla_package
fla_package.prepare()
print(os.environ["FLA_CACHE_MODE"], os.environ["FLA_TILELANG"], os.environ["FLA_FLASH_QLA"], "FLA_CONFIG_DIR" in os.environ)
"""


@pytest.mark.parametrize(
    ("capability", "triton", "given", "expected"),
    [
        ("9.0", "3.6.0", {}, "strict 1 0 True"),
        ("9.0", "3.7.1", {}, "strict 0 0 True"),
        ("9.0", "3.3.1", {}, "strict 0 0 True"),
        ("8.0", "3.6.0", {}, "strict 0 0 False"),
        ("9.0", "3.7.1", {"FLA_TILELANG": "1"}, "strict 1 0 True"),
    ],
)
def test_the_kernels_that_run_follow_from_card_and_triton_unless_the_user_chose(capability, triton, given, expected):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLA_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, capability, triton],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_the_table_of_launch_settings_is_in_the_form_that_fla_core_reads():
    files = sorted(fla_package.SETTINGS.glob("*.json"))
    assert files
    for file in files:
        table = json.loads(file.read_text())
        assert table["kernel_name"] == file.stem
        for key, entry in table["autotune_entries"].items():
            text = json.dumps(entry["autotune_key"], separators=(",", ":"), sort_keys=True)
            assert key == hashlib.md5(text.encode()).hexdigest()
            assert entry["config"]["num_warps"] in (1, 2, 4, 8)
