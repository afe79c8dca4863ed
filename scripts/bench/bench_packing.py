"""Measures best-fit packing of log-normal length mixes: efficiency and time.

    python scripts/bench/bench_packing.py [DOCUMENTS]

Each line packs DOCUMENTS (default 1,000,000) lengths from a log-normal distribution with the given mean and sigma.
Longer documents are cut to the capacity, as `data.on_long=truncate` does. Efficiency is the share of the rows' tokens
that are not padding.
"""

import sys
import time

import numpy as np

from fxtune.data.batches.packing import assign_documents, packing_pattern

MIXES = [
    (mean, sigma, capacity)
    for capacity in (2048, 4096, 16384, 65536)
    for mean, sigma in ((500, 0.5), (500, 1.0), (500, 1.5), (2000, 1.0))
]


def main(documents: int) -> None:
    print(
        f"{documents:,} documents\n{'mean':>6}{'sigma':>7}{'capacity':>10}{'rows':>9}{'efficiency':>12}{'naive':>9}"
        f"{'pattern s':>11}{'assign s':>10}"
    )
    for mean, sigma, capacity in MIXES:
        draw = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, documents)
        lengths = np.clip(draw.astype(np.int64), 1, capacity)
        started = time.perf_counter()
        slots, offsets = packing_pattern(lengths, capacity)
        packed = time.perf_counter()
        assign_documents(lengths, slots, np.random.default_rng(1).permutation(documents))
        assigned = time.perf_counter()
        rows = len(offsets) - 1
        print(
            f"{mean:>6}{sigma:>7}{capacity:>10}{rows:>9}{lengths.sum() / (rows * capacity):>12.2%}"
            f"{lengths.mean() / capacity:>9.2%}{packed - started:>11.2f}{assigned - packed:>10.2f}"
        )
    print("naive: one document per row, padded to the capacity")


if __name__ == "__main__":
    main(int(sys.argv[1].replace("_", "")) if len(sys.argv) > 1 else 1_000_000)
