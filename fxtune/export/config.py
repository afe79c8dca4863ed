"""The config.json of an export, with RoPE in the forms of transformers 4 and 5.

transformers 5 writes `rope_parameters`. transformers 4, and tools that follow it, read `rope_theta` and `rope_scaling`
at the top of the config. Without these keys they take a theta of 10,000 and no scaling, without a warning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxtune.export.tokenizer import CONFIG as TOKENIZER
from fxtune.export.tokenizer import ONLY_5

CONFIG = "config.json"


def write_rope_for_4(folder: Path, config: Any) -> None:
    """Add the keys of transformers 4 to config.json, unless the class of `config` then reads another config from the
    file. Raises OSError."""
    file = folder / CONFIG
    if not file.exists():
        return
    before = file.read_text(encoding="utf-8")
    values = json.loads(before)
    text = values.get("text_config") or values
    added = _of_4(text.get("rope_parameters") or {})
    if not added:
        return
    text.update(added)
    kind = type(config)
    read = kind.from_pretrained(folder).to_dict()
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    try:
        same = kind.from_pretrained(folder).to_dict() == read
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        same = False
    if not same:  # in this family these keys have another meaning
        file.write_text(before, encoding="utf-8")


def versions_of_readers(folder: Path) -> str:
    """The versions of transformers that read the files of an export."""
    config, tokenizer = (
        json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).exists() else {}
        for name in (CONFIG, TOKENIZER)
    )
    text = config.get("text_config") or config
    only_5 = "rope_theta" not in text if text.get("rope_parameters") else False
    if only_5 or tokenizer.get("tokenizer_class") == ONLY_5:
        return "transformers 5"
    return "transformers 5, and 4.57 if it has this family of models"


def _of_4(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as keys of transformers 4; empty if transformers 4 does not know this kind of RoPE."""
    local = rope.get("sliding_attention")
    main = rope if "rope_theta" in rope else rope.get("full_attention")
    if not isinstance(main, dict) or "rope_theta" not in main:
        return {}
    found = {"rope_theta": main["rope_theta"]}
    if isinstance(local, dict) and local.get("rope_theta") != main["rope_theta"]:
        found["rope_local_base_freq"] = local.get("rope_theta")
    if main.get("partial_rotary_factor", 1.0) != 1.0:
        found["partial_rotary_factor"] = main["partial_rotary_factor"]
    if main.get("rope_type", "default") != "default":
        apart = ("rope_theta", "partial_rotary_factor")
        found["rope_scaling"] = {name: value for name, value in main.items() if name not in apart}
    return found
