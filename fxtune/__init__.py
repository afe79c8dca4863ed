"""fxtune: fine-tune Hugging Face language models from short recipes, fast, and prove that every option acted."""

import os

__version__ = "0.1.0"

# OpenMP threads that spin while they wait take a core from whatever else wants one: beside one busy process a CPU run
# is up to six times slower. OpenMP reads this when torch loads it, and child processes inherit it.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
