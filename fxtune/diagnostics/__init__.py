"""Is it right, fast, installed: parity with plain transformers, benchmark, system report, links, energy."""
