"""The models that `fxtune new` proposes, by what they read. Their configs ship with fxtune (models/shipped.py)."""

from __future__ import annotations

DATE = "2026-11-28"
TEXT = (
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-0.6B",
)
"""Largest first: chat models of one family, with an open licence and no gate."""
IMAGES = ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-2B-Instruct")
TINY = {False: "builtin:tiny", True: "builtin:tiny-vision"}
"""Without a card, by whether rows have images."""
