"""Is it right, fast, installed: parity with plain transformers, benchmark, package checks, energy."""
