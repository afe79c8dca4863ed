"""Decides `run.deterministic=auto`: the same bits in each run, if this costs next to nothing.

The decision chooses kernels only. As with `false`, decisions may depend on clocks and free memory, and other cards or
versions may give other bits. In deterministic mode attention's backward pass adds up the gradients of queries in a
fixed order, so its blocks wait for each other. The forecast counts only this pass. docs/faults.md compares forecasts
with measured steps.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fxtune.estimate.step_time import attention_backward_share
from fxtune.facts.run import Facts
from fxtune.techniques.attention.backends.backend import head_widths
from fxtune.techniques.attention.technique import attention_layers
from fxtune.techniques.pipeline import Pipeline

MOST = 0.02
"""The largest share of a step's time that `auto` spends for the same bits."""

SLOWER: dict[tuple[str, str, int], tuple[tuple[int, float], ...]] = {
    ("H[12]00", "flash4", 64): ((1024, 0.27), (4096, 0.10), (16384, 0.02), (65536, 0.02)),
    ("H[12]00", "flash4", 128): ((1024, 0.18), (4096, 0.18), (16384, 0.12), (65536, 0.52)),
    ("H[12]00", "flash4", 256): ((1024, 0.30), (4096, 0.31), (16384, 0.37), (65536, 0.77)),
    ("H[12]00", "cudnn", 128): ((4096, 1.43), (65536, 2.2)),
    ("H[12]00", "sdpa", 64): ((1024, 0.0), (4096, 0.13), (16384, 0.44), (65536, 0.44)),
    ("H[12]00", "sdpa", 128): ((1024, 0.01), (4096, 0.13), (16384, 0.74), (65536, 0.76)),
    ("H[12]00", "sdpa", 256): ((1024, 0.49), (4096, 0.97), (16384, 1.5), (65536, 1.5)),
    ("H[12]00", "sdpa float32", 64): ((1024, 0.0), (4096, 0.0), (16384, 2.0)),
    ("H[12]00", "sdpa float32", 128): ((1024, 0.0), (4096, 0.01), (16384, 2.7)),
    ("H[12]00", "sdpa float32", 256): ((1024, 0.0), (4096, 0.74), (16384, 5.7)),
}
"""The time that the deterministic backward pass of attention adds, as a share of the ordinary pass. Keys are (card,
attention backend, head size), values are (tokens of a document, share). `python scripts/bench/bench_determinism.py`
measured an H100 and an H200 (torch 2.11, flash-attn-4 4.0.0b36); the table has the larger of the two figures. The row
of cuDNN is calculated: cuDNN's kernel has no fixed order, so torch's slower FlashAttention-2 runs in its place. The
difference comes from the figures of attention/technique.py."""
ONE_ORDER = ("eager", "flex")
"""Backends whose backward pass uses the same kernel in both modes."""


def decide(asked: Pipeline, usual: Pipeline, facts: Facts) -> tuple[Pipeline | None, list[str]]:
    """Return the techniques for deterministic kernels, or None to keep the fastest kernels, and lines on the decision.
    A CPU has deterministic kernels only: the result is None, without a line. `asked`: the techniques before any `auto`
    is decided; `usual`: with each `auto` decided for the fastest kernels."""
    if facts.device != "cuda":
        return None, []
    fixed = replace(facts, techniques=asked, deterministic=True)
    techniques, notes = asked.possible(fixed)[0].decided(fixed)
    same = [name for name, _ in techniques.enabled()] == [name for name, _ in usual.enabled()]
    why = (techniques if same else usual).nondeterministic_option(facts)
    share = cost(replace(facts, techniques=usual))
    if why is None and share is None:
        why = f"what it costs is not measured for this attention and row on {facts.device_name}"
    elif why is None and share is not None and share > MOST:
        why = f"it costs about {share:.1%} of a step here"
    if why is not None:
        return None, [line(why)]
    return techniques, [
        *notes,
        f"deterministic: on, the same bits each time on this card, for some {share:.1%} of a step by forecast",
    ]


def line(why: str) -> str:
    """The line that says why deterministic kernels are off."""
    return (
        f"deterministic: off, because {why}; two runs, or a resumed one, may differ in their last digits "
        "(run.deterministic=true asks for the same bits)"
    )


def cost(facts: Facts) -> float | None:
    """The time that deterministic kernels add, as a share of a step, by forecast. None if SLOWER lacks this card,
    backend, head size or length. Techniques in `facts` must be decided."""
    attention = facts.techniques.attention
    backend = attention.backend if attention.enabled else "sdpa"  # transformers uses sdpa by default
    if backend in ONE_ORDER or not attention_layers(facts.text):
        return 0.0
    kernel = f"{backend} float32" if facts.compute_dtype == "float32" else backend
    measured = [key for key in SLOWER if re.search(rf"\b{key[0]}\b", facts.device_name) and key[1] == kernel]
    width = max(head_widths(facts), default=0)
    key = min((key for key in measured if key[2] >= width), key=lambda key: key[2], default=None)
    if key is None or facts.row_length > SLOWER[key][-1][0]:
        return None
    # Documents of a row may be shorter than the row.
    end = next(length for length, _ in SLOWER[key] if length >= facts.row_length)
    slower = max(share for length, share in SLOWER[key] if length <= end)
    return max(slower, 0.0) * attention_backward_share(facts)
