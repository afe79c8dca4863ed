"""How fast this machine's cores multiply matrices now, as a multiple of what cards.py says of a core.

The rates of cards.CPU are those of a quickstart on two quiet cores. Other cores are faster or slower, and other
processes take their part, so a forecast for this machine times a product first. PRODUCT was measured on two quiet
cores of an AMD EPYC. On the same cores beside other processes forecasts were wrong by the load that came or went, and
low, because threads that wait for each other lose more: 38 s for a quickstart of 56 s, 61 s for one of 113 s, and 84 s
for a step of SmolLM2 135M's shape (4 rows of 1,024 tokens) of 46 to 84 s.
"""

from __future__ import annotations

import time

import torch

ROWS, WIDTH, INNER = 2048, 576, 1536
"""The timed product: the MLP of a small model."""
SECONDS = 0.5
"""How long the product is repeated."""
PRODUCT = 84e9
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
