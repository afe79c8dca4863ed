"""Cards are found by their names: peak FLOP/s for MFU, rates for the step-time estimate."""

from __future__ import annotations

import pytest
import torch

from fxtune.estimate import cards
from fxtune.estimate.cards import peak_flops, rates
from fxtune.system.machine.facts import MachineFacts


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA RTX A6000", "bfloat16", 154.8),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", torch.float32, 82.6),
        ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("Tesla T4", "float16", 65),
        ("Tesla V100-SXM2-32GB", "float32", 15.7),
    ],
)
def test_peak_flops_of_known_cards(name, dtype, tflops):
    assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),
        ("", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("Tesla T4", "bfloat16"),
        ("Some New Card", "float32"),
        ("NVIDIA H200", torch.float64),
        ("NVIDIA GeForce GTX 1080 Ti", "float16"),
    ],
)
def test_peak_flops_of_unknown_cards_are_none(name, dtype):
    assert peak_flops(name, dtype) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", cards.H200),
        ("NVIDIA H200 NVL", cards.H200),
        ("NVIDIA H100 80GB HBM3", cards.H100),
        ("NVIDIA A100-SXM4-80GB", cards.A100),
        ("NVIDIA GeForce RTX 3090 Ti", cards.RTX_3090),
        ("some card", cards.A100),
    ],
)
def test_a_card_has_its_own_rates_or_those_of_its_generation(name, expected):
    assert rates(MachineFacts(device="cuda", device_name=name, capability=(8, 6))) == expected


def test_rates_of_similar_names_differ():
    def found(name):
        return rates(MachineFacts(device="cuda", device_name=name, capability=(9, 0)))

    assert found("NVIDIA H100 PCIe").matmul == 480e12
    assert found("NVIDIA GH200 480GB").link == 300e9
    assert found("NVIDIA GeForce RTX 4090 Laptop GPU") == found("NVIDIA GeForce RTX 4090")


def test_rates_without_a_gpu_are_those_of_a_cpu():
    assert rates(MachineFacts()) == cards.CPU
