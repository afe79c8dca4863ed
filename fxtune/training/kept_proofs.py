"""Keeps evidence of earlier starts, so that later starts of the same recipe need not observe it again.

Which operators run, which documents they keep apart and what layers save for the backward pass follows from the
model, the options, the code, the packages and the card. If a part of this key changes, the techniques in KEPT are
observed again. `fxtune verify` observes them each time. Proofs of values (the loss, adapters, quantized weights,
experts) run in each start, and torch.compile is observed in each start, because its compilers can fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fxtune.config.root import Config
from fxtune.facts.run import Facts
from fxtune.system.files import code_digest
from fxtune.system.files.atomic_files import add_cached, json_or_empty
from fxtune.system.machine.host import cache_home
from fxtune.techniques.base import Evidence
from fxtune.techniques.package_checks import environment_digest
from fxtune.techniques.pipeline import Pipeline

KEPT = ("attention", "checkpointing", "liger")
"""The techniques whose evidence is kept."""
VARIABLES = ("TORCH", "PYTORCH", "FLASH_", "FLA_", "TRITON_", "USE_HUB_KERNELS")
"""Beginnings of the names of environment variables that choose kernels."""


def proof_file(config: Config, hf_config: Any, facts: Facts, techniques: Pipeline) -> Path | None:
    """The file of the evidence for these decisions. None on a CPU, whose proofs are short; for a model with its own
    code, which may change; for images, whose evidence depends on the weights; and with several ranks, whose machines
    may differ."""
    depends = config.model.trust_remote_code or facts.reads_images or facts.degrees.ranks > 1
    if facts.device != "cuda" or depends:
        return None
    decided = techniques.options(), facts.dtype, facts.packing, facts.deterministic
    rows = facts.micro_batch_size, facts.row_length, facts.image_features, facts.shares_prompts
    code = environment_digest(facts.device_name), code_digest.digest(), config.plugins()
    named = config.model.path, config.model.revision, config.model.init.value, config.objective.name
    variables = sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES))
    everything = decided, rows, code, named, hf_config.to_dict(), variables
    text = json.dumps(everything, sort_keys=True, default=str)
    return cache_home() / "proofs" / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def read_kept(file: Path | None) -> dict[str, list[Evidence]]:
    """The kept evidence of each technique, with the time of its observation. Empty without a file or if it is
    damaged."""
    kept = dict[str, list[Evidence]]()
    try:
        found = json_or_empty(file) if file else {}
        for seen in (Evidence(**values) for values in found.get("evidence", ())):
            if seen.technique not in KEPT or seen.acted is not True:
                return {}
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["at"]))
            kept.setdefault(seen.technique, []).append(replace(seen, observed=f"{seen.observed} (kept from {since})"))
    except (AttributeError, LookupError, OSError, TypeError, ValueError, OverflowError):
        return {}
    return kept


def keep(file: Path | None, seen: Iterable[Evidence]) -> None:
    """Write the evidence of the techniques in KEPT if all of it acted; else remove earlier evidence."""
    seen = list(seen)
    names = {*KEPT} - {evidence.technique for evidence in seen if not evidence.lasting}
    found = [evidence for evidence in seen if evidence.technique in names]
    if file is None or not found:
        return
    if all(evidence.acted for evidence in found):
        add_cached(file, {"at": time.time(), "evidence": [asdict(evidence) for evidence in found]})
    else:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
