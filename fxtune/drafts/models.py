"""The models that `fxtune new` proposes. Their configs ship with fxtune (models/shipped.py)."""

from __future__ import annotations

DATE = "2026-11-28"
TEXT = (
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-0.6B",
)
"""Chat models of one family, the largest first, with an open licence and no gate."""
IMAGES = (
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3-VL-2B-Instruct",
)
TINY = {False: "builtin:tiny", True: "builtin:tiny-vision"}
"""{whether rows have images: the model to propose without a GPU}."""
