"""Copies a base's layers for multi-token prediction (MTP), with which servers decode speculatively, into an export.

They guess the tokens after the next one (arXiv 2404.19737, DeepSeek-V3). transformers' model classes have no such
layers and skip their tensors: `mtp.*` in Qwen3.5, a layer after the last one in DeepSeek-V3 and GLM-4.5. An
export copies these tensors from the base's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fxtune.models.kinds.known import kind_of
from fxtune.models.weights import readable_files, stored
from fxtune.system.files.hub import Origin
from fxtune.upstream.transformers import not_in_files

NAMED = re.compile(r"(^|\.)mtp[._]")
LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def mtp_tensors(origin: Origin, model: Any, grown_from: int) -> dict[str, Path]:
    """{name of a tensor for multi-token prediction: its file} of the files from which `model` was read.

    `grown_from`: the size of the vocabulary before tokens were added; 0: none was added. Tensors that embed the old
    vocabulary (GLM-4.5) no longer fit, so the result is empty."""
    if not kind_of(model.config).writes:
        return {}
    skipped = [re.compile(pattern) for pattern in not_in_files(model)]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", 0)

    def predicts(name: str) -> bool:
        layer = LAYER.match(name)
        return bool(NAMED.search(name)) or (layer is not None and int(layer[1]) >= depth)

    found = {
        name: (file, opened.get_slice(name).get_shape())
        for file, name, opened in stored(readable_files(origin))
        if predicts(name) and any(pattern.search(name) for pattern in skipped)
    }
    outgrown = grown_from and any(grown_from in shape for _, shape in found.values())
    return {} if outgrown else {name: file for name, (file, _) in found.items()}


def read_mtp(files: dict[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each of `files`, the result of mtp_tensors(). Raises OSError."""
    with ExitStack() as stack:
        try:
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in {*files.values()}}
            for name, file in files.items():
                yield name, opened[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise OSError(f"the base's layers for multi-token prediction cannot be read: {error}") from error
