"""Writes the launch settings of fla-core's kernels that fxtune ships, from the choices of Triton's autotuner on this card.

    TRITON_CACHE_DIR=/tmp/tuned python scripts/make/launch_settings.py --tune
    python scripts/make/launch_settings.py /tmp/tuned          # writes fxtune/kernels/launch_settings/hopper/

`--tune` runs the gated delta rule and its convolution at the shape of Qwen3.5 9B, 16,384 tokens in four documents, and
takes two minutes on an H200. The settings depend on the width of heads, and hardly on their number, so the table holds
the same settings for the numbers of heads of all sizes of Qwen3.5, and of the smoke test. A kernel or shape that the
table does not hold is tuned once and kept in Triton's cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[2] / "fxtune" / "kernels" / "launch_settings" / "hopper"
TUNED = (16, 32)
"""Key heads and value heads of Qwen3.5 9B."""
HEADS = (TUNED, (16, 16), (16, 48), (16, 64), (2, 4))
WIDTH = 128
KEPT = ("kwargs", "num_warps", "num_stages", "num_ctas")


def channels(heads: tuple[int, int]) -> int:
    """Channels of the convolution over queries, keys and values."""
    return (2 * heads[0] + heads[1]) * WIDTH


def tune() -> None:
    # Before fxtune is imported, which turns the table on.
    os.environ.update(FLA_CACHE_MODE="disabled", FLA_CACHE_RESULTS="1")
    import torch

    from fxtune.kernels.linear_attention import document_chunks, linear_attention
    from fxtune.kernels.short_convolution import short_convolution

    tokens = 16384
    draw = lambda *sizes: torch.randn(tokens, *sizes, device="cuda", dtype=torch.bfloat16).requires_grad_()  # noqa: E731
    bounds = torch.arange(0, tokens + 1, tokens // 4, device="cuda", dtype=torch.int32)
    places = bounds, document_chunks(bounds, tokens)
    q, k, v = draw(TUNED[0], WIDTH), draw(TUNED[0], WIDTH), draw(TUNED[1], WIDTH)
    g = -torch.rand(tokens, TUNED[1], device="cuda")
    step = torch.rand(tokens, TUNED[1], device="cuda").bfloat16().requires_grad_()
    linear_attention(q, k, v, g.requires_grad_(), step, WIDTH**-0.5, *places).sum().backward()
    weight = torch.randn(channels(TUNED), 4, device="cuda", dtype=torch.bfloat16)
    short_convolution(draw(channels(TUNED)), weight, None, True, *places).sum().backward()


def for_all_heads(key: list[Any]) -> Iterator[list[Any]]:
    """The autotuner's key with the numbers of heads, or of channels, of each size."""
    for heads in HEADS:
        if key[0] == channels(TUNED):
            yield [channels(heads), *key[1:]]
        elif key[:2] == [*TUNED]:
            yield [*heads, *key[2:]]
        elif key[:2] == [1, TUNED[1]]:  # a sum within a chunk: rows, value heads
            yield [1, heads[1], *key[2:]]
        else:
            raise ValueError(f"{key}: no number of heads or channels is known in it")


def write(cache: Path) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for file in sorted(cache.rglob("*.autotune.json")):
        found, name = json.loads(file.read_text()), file.name.removesuffix(".autotune.json")
        best, _ = min(found["configs_timings"], key=lambda pair: pair[1])
        settings = {one: best[one] for one in KEPT}
        for key in for_all_heads(found["key"]):
            # fla-core finds an entry by this hash.
            text = json.dumps(key, separators=(",", ":"), sort_keys=True)
            entry = dict(autotune_key=key, config=settings)
            tables.setdefault(name, {})[hashlib.md5(text.encode()).hexdigest()] = entry
    if not tables:
        raise SystemExit(f"{cache}: no file *.autotune.json. Run --tune with this folder as TRITON_CACHE_DIR first.")
    TARGET.mkdir(parents=True, exist_ok=True)
    for stale in TARGET.glob("*.json"):
        stale.unlink()
    for name, entries in tables.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(entries.items()))
        (TARGET / f"{name}.json").write_text(f'{{"kernel_name": "{name}", "autotune_entries": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the kernels, which fills TRITON_CACHE_DIR")
    parser.add_argument("cache", nargs="?", type=Path, help="the folder that --tune filled: write the table from it")
    args = parser.parse_args()
    if args.tune:
        tune()
    if args.cache:
        write(args.cache)
