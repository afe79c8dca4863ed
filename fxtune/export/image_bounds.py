"""Writes data.image_tokens into the processor files of a whole model. So served images are as large as in training.

data.image_tokens bounds the tokens of an image. An image processor bounds its pixels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxtune.models.kinds.decoder import PROCESSORS
from fxtune.upstream.transformers import read_processor

BOUNDS = {"min": "shortest_edge", "max": "longest_edge"}
"""{key of data.image_tokens: key of an image processor's `size`}. The values of `size` are numbers of pixels."""
OLD = ("min_pixels", "max_pixels")
"""Older keys of the processor files. They override `size`."""


def write_image_bounds(folder: Path, bounds: dict[str, int | None], tokenizer: Any, config: Any) -> None:
    """Write data.image_tokens into the processor files of `folder`, if it has such files. Raises OSError."""
    tokens = {name: count for name, count in bounds.items() if count}
    if not tokens or not any(folder.glob(PROCESSORS)):
        return
    found = read_processor(folder, tokenizer, config).image_processor
    pixels = (found.merge_size * found.patch_size) ** 2
    size = dict(found.size) | {BOUNDS[name]: count * pixels for name, count in tokens.items()}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        if not file.exists():
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        own = values if name == "preprocessor_config.json" else values.get("image_processor")
        if own:
            own["size"] = size
            for key in OLD:
                own.pop(key, None)
            file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
