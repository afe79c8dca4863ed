"""How fast this machine's cores multiply matrices now, as a multiple of the rate of a core in cards.py.

The rates of cards.CPU hold for two quiet cores of an AMD EPYC. Other cores are faster or slower, and other processes
take their share, so a forecast for this machine times a product first. On the same quiet cores it forecast
34 to 46 s for a quickstart of 35 s, and 120 s for four steps of SmolLM2 135M's shape that took 112 s. Beside other
processes a run takes longer than its forecast, because threads that wait for each other lose more than a product does.
"""

from __future__ import annotations

import time

import torch

ROWS, WIDTH, INNER = 2048, 576, 1536
"""The timed product: the MLP of a small model."""
SECONDS = 0.5
"""How long the product is repeated."""
PRODUCT = 145e9
"""FLOPs a second of this product, for each core, where cards.CPU is right."""


def cpu_speed(cores: int) -> float:
    """The speed of `cores` cores as a multiple of cards.CPU's. Takes half a second."""
    left, right = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, INNER)
    left @ right  # starts the threads
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < SECONDS or not count:
        left @ right
        count += 1
    return 2.0 * ROWS * WIDTH * INNER * count / taken / (PRODUCT * cores)
