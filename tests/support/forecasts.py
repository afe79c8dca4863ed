"""Facts of a GPU that trains an 8B Llama, and memory on a CPU, for tests of the memory and step-time estimates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from support.architectures import enable
from support.decoder_sizes import decoder_sizes

from fxtune.facts.run import Facts
from fxtune.system.terminal.units import GIB

LLAMA = dict(
    model_type="llama",
    **decoder_sizes(4096, 14336, layers=32, heads=32, key_heads=8, vocabulary=128256),
)
TECHNIQUES = {
    "lora": {"r": 16, "target_modules": ["all-linear"], "fused": "on"},
    "compile": {},
    "attention": {"backend": "flash4"},
    "precision": {"autocast": "bfloat16"},
    "liger": {"kernels": ["fused_linear_cross_entropy"]},
}
PEFT = {**TECHNIQUES, "lora": {"r": 16, "target_modules": ["all-linear"], "fused": "off"}}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    **decoder_sizes(vocabulary=248320, hidden=4096, intermediate=12288, layers=32, heads=16, key_heads=4),
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "head_dim": 256, "linear_conv_kernel_dim": 4},
}
"""Qwen3.5-9B: 24 recurrent layers, 8 layers of attention."""


def card(gib: float, length: int, rows: int = 1, host: float = 256, **known) -> Facts:
    return Facts(
        **{
            "device": "cuda",
            "device_name": "NVIDIA H200",
            "capability": (9, 0),
            "memory": int(gib * GIB),
            "free_memory": int(gib * GIB),
            "host_memory": int(host * GIB),
            "model": LLAMA,
            "dtype": "bfloat16",
            "packing": True,
            "sequence_length": length,
            "rows": (length,),
            "micro_batch_size": rows,
            **known,
            "techniques": enable(**known.get("techniques", TECHNIQUES)),
        }
    )


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that `run` allocates on the CPU, by torch's profiler: at the peak, and with its result at the end. Without
    oneDNN, whose copies of bfloat16 numbers depend on the CPU's instructions."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    with torch.backends.mkldnn.flags(enabled=False), profile(activities=activities, profile_memory=True) as seen:
        held = run()
    events = seen.profiler.kineto_results.events()
    sizes = [*accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    del held
    return max(sizes), sizes[-1]
