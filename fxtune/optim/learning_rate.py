"""`optimizer.lr=auto`: a learning rate for AdamW from the size of the model, the adapters and the batch.

    5e-5 x (10 for adapters) x (2000 / hidden size)^P x (32 / alpha) x sqrt(documents in a step / 128)

The first three factors are Thinking Machines' rule, fitted to sweeps of Llama (P = 0.781) and Qwen (P = 0.0775) models
(the guide to hyperparameters of their tinker-cookbook; "LoRA Without Regret", 2025, has the factor 10). Other families
get Llama's exponent, which is safer: it gives large models a lower rate. The rule is for adapters that are scaled by
alpha / r with alpha = 32. With this scale the best rate does not depend on r. An adapter's update grows with alpha and
with the rate, so a larger alpha divides the rate; with alpha = 2 r the rate falls as 1 / r (arXiv 2602.06204 finds
both). The last factor is the guide's factor for batches; 128 documents are the batch of its sweeps. fxtune keeps this
factor between 1 and 2: small batches need no reduction (arXiv 2507.07101, and the built-in model agrees:
docs/learning_rate.md), and adapters tolerate large batches less than full fine-tuning does ("LoRA Without Regret").

The result is a first guess. `fxtune lr` tests rates on the data.
"""

from __future__ import annotations

import math

from fxtune.facts.run import Facts
from fxtune.optim.config import OptimizerConfig

BASE = 5e-5
ADAPTERS = 10.0
HIDDEN = 2000
EXPONENTS = {"qwen": 0.0775, "llama": 0.781}
"""The exponent P of each family. A family is the beginning of a `model_type`."""
ALPHA = 32.0
DOCUMENTS = 128.0
LARGEST = 2.0
"""The largest factor for a batch."""


def guess(config: OptimizerConfig, facts: Facts, documents: float) -> tuple[float, str]:
    """(the learning rate of optimizer.lr=auto, to three digits; a line with its derivation). `documents`: the mean
    number of documents in a step of the run. no_rule() of optim/config.py refuses recipes without a rule before this
    call."""
    lora, hidden, family = facts.techniques.lora, int(facts.text["hidden_size"]), str(facts.text.get("model_type"))
    like = next((name for name in EXPONENTS if family.startswith(name)), "llama")
    exponent = EXPONENTS[like]
    rate = BASE * (HIDDEN / hidden) ** exponent
    whose = "" if family.startswith(like) else f", as of {like}: {family} has no fitted exponent"
    factors = [f"{BASE:g}", f"({HIDDEN} / hidden size {hidden})^{exponent:g}{whose}"]
    if lora.enabled:
        alpha = lora.alpha * (math.sqrt(lora.r) if lora.rslora else 1.0)
        rate *= ADAPTERS * ALPHA / alpha
        of = f" x sqrt(r {lora.r})" if lora.rslora else ""
        factors += [f"{ADAPTERS:g} for adapters", f"{ALPHA:g} / alpha {lora.alpha:g}{of}"]
    factor = min(max(math.sqrt(documents / DOCUMENTS), 1.0), LARGEST)
    rate *= factor
    factors.append(f"{factor:.3g} for {documents:.3g} documents in a step")
    rate = float(f"{rate:.3g}")
    return rate, f"optimizer.lr: auto chose {rate:g} = {' x '.join(factors)} (Thinking Machines' rule for AdamW)"
