"""A table of GPUs: the peak FLOP/s of their datasheets, and the rates that kernels reach on them.

Peaks are dense TFLOP/s by dtype with float32 accumulation, as in training. They come from the makers' datasheets. Most
datasheets print the figure with 2:4 sparsity, which is halved here. MFU is measured against these peaks. Rates are
measured on an H200. For other cards they are scaled by the datasheets. Only the ratios of a card's rates matter, so an
unknown card gets the rates of its generation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from fxtune.system.machine.facts import MachineFacts


@dataclass(frozen=True)
class Rates:
    """The FLOPs or bytes that kernels reach in a second."""

    matmul: float
    """FLOPs of matrix products in 16 bits."""
    fp8: float
    attention: float
    """FLOPs of causal attention, forward and backward together."""
    memory: float
    """Bytes that are read and written on the device."""
    link: float
    """Bytes that are copied to or from pinned host memory."""
    peer: float
    """Bytes that are sent to another GPU of the host: over NVLink if the card is sold with NVLink, else over PCIe."""


H200 = Rates(690e12, 1150e12, 600e12, 4.0e12, 50e9, 340e9)
H100 = Rates(670e12, 1100e12, 590e12, 3.1e12, 50e9, 340e9)
B200 = Rates(1500e12, 2800e12, 1100e12, 6.5e12, 50e9, 680e9)
A100 = Rates(250e12, 250e12, 150e12, 1.6e12, 24e9, 220e9)
L40S = Rates(240e12, 420e12, 140e12, 0.75e12, 24e9, 20e9)
RTX_3090 = Rates(65e12, 65e12, 50e12, 0.8e12, 24e9, 20e9)
CPU = Rates(140e9, 140e9, 70e9, 7e9, 50e9, 2e9)
"""The rates of one CPU core. The quickstart reaches them on two cores of a Xeon."""
GENERATIONS = {8: A100, 9: H200, 10: B200, 12: L40S}
"""The rates of each generation, by the major number of its compute capability."""


@dataclass(frozen=True)
class Card:
    pattern: str
    """A regular expression for the card's name."""
    bfloat16: float | None = None
    """The peak in TFLOP/s, as in the next three fields. None: the card lacks such a unit, or sources differ."""
    tf32: float | None = None
    float32: float | None = None
    half: float | None = None
    """The peak in float16. None: the same as in bfloat16."""
    rates: Rates | None = None
    """The card's rates. None: the rates of its generation."""


CARDS = (
    Card(r"\bG?B300\b"),
    Card(r"\bGB200\b", 2500.0, 1250.0, 80.0, rates=B200),
    Card(r"\bB200\b", 2250.0, 1125.0, 75.0, rates=B200),
    Card(r"\bGH200\b", 989.4, 494.7, 66.9, rates=Rates(690e12, 1150e12, 600e12, 3.4e12, 300e9, 340e9)),
    Card(r"\bH200\b.*\bNVL\b", 835.5, 417.5, 60.0, rates=H200),
    Card(r"\bH200\b", 989.4, 494.7, 66.9, rates=H200),
    Card(r"\bH100\b.*\bNVL\b", 835.5, 417.5, 60.0, rates=H100),
    Card(r"\bH100\b.*\bPCIe\b", 756.5, 378.0, 51.0, rates=Rates(480e12, 800e12, 400e12, 1.7e12, 50e9, 40e9)),
    Card(r"\bH[18]00\b", 989.4, 494.7, 66.9, rates=H100),
    Card(r"\bH20\b", 148.0, 74.0, 44.0, rates=Rates(130e12, 240e12, 115e12, 3.4e12, 50e9, 340e9)),
    Card(r"\bA[18]00\b", 312.0, 156.0, 19.5, rates=A100),
    Card(r"\bA30\b", 165.0, 82.0, 10.3),
    Card(r"\bA40\b", 149.7, 74.8, 37.4),
    Card(r"\bA10\b", 125.0, 62.5, 31.2),
    Card(r"\bA10G\b", 70.0, 35.0, 31.5, rates=Rates(56e12, 56e12, 40e12, 0.5e12, 24e9, 10e9)),
    Card(r"\bL40S\b", 362.0, 183.0, 91.6, rates=L40S),
    Card(r"\bL40\b", 181.0, 90.5, 90.5),
    Card(r"\bL4\b", 121.0, 60.0, 30.3, rates=Rates(60e12, 110e12, 40e12, 0.25e12, 12e9, 10e9)),
    Card(r"\bRTX 6000 Ada\b", 364.2, 182.1, 91.1, rates=Rates(240e12, 420e12, 140e12, 0.8e12, 24e9, 20e9)),
    Card(r"\bRTX A6000\b", 154.8, 77.4, 38.7, rates=Rates(120e12, 120e12, 80e12, 0.65e12, 24e9, 20e9)),
    Card(r"\bRTX 5090\b", 209.5, 104.8, 104.8, rates=Rates(190e12, 380e12, 140e12, 1.5e12, 50e9, 20e9)),
    Card(r"\bRTX 4090\b", 165.2, 82.6, 82.6, rates=Rates(150e12, 290e12, 120e12, 0.9e12, 24e9, 20e9)),
    Card(r"\bRTX 3090 Ti\b", 80.0, 40.0, 40.0, rates=RTX_3090),
    Card(r"\bRTX 3090\b", 71.0, 35.6, 35.6, rates=RTX_3090),
    Card(r"\bV100-SXM", float32=15.7, half=125.0),
    Card(r"\bV100-PCIE", float32=14.0, half=112.0),
    Card(r"\bT4\b", float32=8.1, half=65.0),
    Card(r"\bMI3(?:00|25)X\b", 1307.4, 653.7, 163.4),
)
"""All known cards. The first card whose pattern matches a name is used."""
PARTIAL_CHIP = re.compile(r"laptop|max-?q|mobile|\bMIG\b|\bvGPU\b|\bD\b", re.IGNORECASE)
"""Parts of the names of cards that have fewer units than the full chip. The chip's peak is wrong for these cards."""


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """The dense peak FLOP/s of a device for matmuls in `dtype`; None if it is unknown.

    `device_name`: as `torch.cuda.get_device_name()` returns it. `dtype`: a torch dtype or its name; `"tf32"` for
    float32 matmuls on the tensor cores.
    """
    card = None if PARTIAL_CHIP.search(device_name) else _card(device_name)
    name = str(dtype).removeprefix("torch.")
    if card is None or name not in ("bfloat16", "float16", "tf32", "float32"):
        return None
    peak: float | None = (card.half or card.bfloat16) if name == "float16" else getattr(card, name)
    return peak and peak * 1e12


def rates(machine: MachineFacts) -> Rates:
    """The rates of the machine's device."""
    if machine.device != "cuda":
        cores = machine.cores * machine.cpu_speed
        scaled = {name: cores * getattr(CPU, name) for name in ("matmul", "fp8", "attention", "memory")}
        return replace(CPU, **scaled)
    card = _card(machine.device_name)
    if card and card.rates:
        return card.rates
    return GENERATIONS.get((machine.capability or (9, 0))[0], H200)


def _card(device_name: str) -> Card | None:
    return next((card for card in CARDS if re.search(card.pattern, device_name)), None)
