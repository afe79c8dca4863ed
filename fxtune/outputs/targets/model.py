"""A plain folder, which transformers and peft load. `fxtune merge` and `fxtune push` ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from fxtune.outputs.merge import merge
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions


class ModelTarget:
    reads: ClassVar[set[str]] = {"unmerged", "card"}

    def __init__(self, source: Source, options: ExportOptions) -> None:
        self.source, self.options = source, options

    def check(self, folder: Path | None) -> None:
        """merge() itself refuses what it cannot write, before it reads weights."""

    def write(self, folder: Path | None) -> Exported:
        options, trust = self.options, self.source.trust_remote_code
        card, unmerged = options.card, options.unmerged
        found = merge(self.source.name, folder, trust_remote_code=trust, unmerged=unmerged, card=card)
        return Exported(found, "adapter" if (found / "adapter_config.json").exists() else "merged model")
