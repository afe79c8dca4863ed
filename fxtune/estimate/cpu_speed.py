"""Measures how fast this machine's cores multiply matrices now, as a multiple of a core's rate in cards.py.

The rates of cards.CPU are right for two idle cores of an AMD EPYC. Other cores are faster or slower, and other
processes take a part of their time. So fxtune times a matrix product before it forecasts a run on this machine. On the
same idle cores the forecast was 34 to 46 s for a quickstart that took 35 s, and 120 s for four steps of SmolLM2 135M's
shape that took 112 s. If other processes run, a run takes longer than its forecast: threads of a run wait for each
other, so they lose more time than the timed product does.
"""

from __future__ import annotations

import time

import torch

ROWS, WIDTH, INNER = 2048, 576, 1536
"""Sizes of the timed product, which is a product of a small model's MLP."""
SECONDS = 0.5
"""The product is repeated for this time."""
PRODUCT = 145e9
"""FLOP/s of this product on each core of a machine for which cards.CPU is right."""


def cpu_speed(cores: int) -> float:
    """Measure the speed of `cores` cores as a multiple of the speed in cards.CPU. This takes half a second."""
    left, right = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, INNER)
    left @ right  # this product is not timed: it starts the threads
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < SECONDS or not count:
        left @ right
        count += 1
    return 2.0 * ROWS * WIDTH * INNER * count / taken / (PRODUCT * cores)
