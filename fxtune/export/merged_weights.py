"""Computes a merged model again from its base and its adapter, tensor by tensor, and compares it with the files.

    W = base + scaling * B A            scaling: alpha / r, or alpha / sqrt(r)
    W = m / |base + scaling * B A| * (base + scaling * B A)      DoRA, the norm over each output's row

The formulas come from the papers and not from peft's code, which did the merge. The base's files, the adapter's file
and the merged files are read: one tensor of each is in host memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fxtune.export.weights import Mismatch
from fxtune.models.peft_adapter import FACTORED, WEIGHTS
from fxtune.models.weights import readable_files
from fxtune.system.hub import Origin

PREFIX = "base_model.model."
DECODERS = ("model.language_model.", "language_model.model.", "model.")
"""Beginnings of the names of a decoder's tensors. A model with a tower has another one in its files than in memory."""
UNKNOWN = {
    "trainable_token_indices": "trained tokens",
    "lora_bias": "biases of adapters",
    "layer_replication": "repeated layers",
}
"""Options of adapters whose merge is not computed again here."""


def recompute(folder: Path, base: Origin, adapter: Origin, lora: Any) -> tuple[int, str]:
    """Compare the merged model in `folder` with what its base and its adapter give.

    `lora`: peft's options of the adapter. Returns how many tensors were computed, and a clause that says which
    were left out and why. Raises Mismatch for the first tensor that is something else.
    """
    if lora.init_lora_weights in FACTORED:
        return 0, f"the sums of base and adapter, because {lora.init_lora_weights} changes the base"
    if odd := [what for option, what in UNKNOWN.items() if getattr(lora, option, None)]:
        return 0, f"the sums of base and adapter, because of {odd[0]}"
    with ExitStack() as opened:
        merged, stored = (_Tensors(opened, readable_files(origin)) for origin in (Origin(folder, str(folder)), base))
        adapters = _Adapters(_Tensors(opened, [adapter.folder / WEIGHTS]), lora, merged.files)
        count, passed = 0, []
        for name in sorted(merged.files):
            source = next((spelled for spelled in (*_spellings(name), *_tied(name)) if spelled in stored.files), None)
            # By its dimensions, because families name experts differently (Granite-MoE).
            of_experts = bool(lora.target_parameters) and merged[name].dim() > 2
            if of_experts or adapters.passes_over(name) or (source is None and not adapters.replacement(name)):
                passed.append(name)
                continue
            wanted, changed = adapters.applied(name, None if source is None else stored[source])
            _require_close(name, merged.files[name].name, merged[name], wanted, changed)
            count += 1
    why = "which the base stores otherwise, or whose adapters are of no linear"
    return (
        count,
        f"the sums of base and adapter in {len(passed)} tensors, {why}, such as {passed[0]}" if passed else "",
    )


class _Tensors:
    """The tensors of safetensors files, read one at a time."""

    def __init__(self, opened: ExitStack, files: list[Path]) -> None:
        from safetensors import safe_open

        self.files: dict[str, Path] = {}
        self._handles: dict[str, Any] = {}
        for file in files:
            handle = opened.enter_context(safe_open(file, "pt"))
            for name in handle.keys():  # noqa: SIM118
                self.files[name], self._handles[name] = file, handle

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


class _Adapters:
    """The adapters of a file, applied to the tensors of a base."""

    def __init__(self, trained: _Tensors, lora: Any, merged: Collection[str]) -> None:
        self.trained, self.lora = trained, lora
        names = [name.removeprefix(PREFIX) for name in trained.files]
        modules = {name.rpartition(".lora_")[0] for name in names if ".lora_" in name}
        weights = {module: [f"{path}.weight" for path in _spellings(module)] for module in modules}
        parameters = tuple(lora.target_parameters or ())
        self.modules = {
            module
            for module, spelled in weights.items()
            if any(name in merged and not name.endswith(parameters) for name in spelled)
        }
        others = {module.removesuffix(".base_layer") for module in modules - self.modules} if parameters else set()
        self._others = {path.rpartition(".")[2] for path in others}
        if stray := sorted(modules - self.modules) if not parameters else []:
            raise Mismatch(f"{stray[0]} has an adapter, and no tensor of the merged model is its weight")

    def passes_over(self, name: str) -> bool:
        """Whether the tensor is in a module with an adapter on one of its tensors, such as experts."""
        return not self._others.isdisjoint(name.split("."))

    def replacement(self, name: str) -> str | None:
        """The tensor of the adapter's file that replaces this one: a bias, or a tensor of a module trained in full."""
        module, _, leaf = name.rpartition(".")
        spelled = (f"{PREFIX}{module}.{leaf}", f"{PREFIX}{module}.base_layer.{leaf}")
        own = leaf != "weight" or not self._module(name)
        return next((path for path in spelled if own and path in self.trained.files), None)

    def _module(self, name: str) -> str | None:
        modules = (spelled.rpartition(".")[0] for spelled in _spellings(name))
        return next((module for module in modules if module in self.modules), None)

    def applied(self, name: str, start: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """What the merged tensor `name` must be, from the base's, and whether the adapter changes it."""
        if replacement := self.replacement(name):
            return self.trained[replacement], True
        assert start is not None
        module = self._module(name)
        if module is None or not name.endswith(".weight"):
            return start, False
        return self._sum(module, start.float()), True

    def _sum(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        embedding = f"{PREFIX}{module}.lora_embedding_A" in self.trained.files
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        a, b = (self.trained[f"{PREFIX}{module}.{name}"].float() for name in names)
        delta = b @ a * _scaling(self.lora, module, len(a))  # [out, in]
        # GPT-2's linears and embeddings are stored as [in, out]; a square one is known by the option alone.
        transposed = embedding or self.lora.fan_in_fan_out
        if delta.shape != delta.T.shape:
            transposed = delta.shape != weight.shape
        total = weight + (delta.T if transposed else delta)
        magnitude = f"{PREFIX}{module}.lora_magnitude_vector"
        found = next((path for path in (magnitude, f"{magnitude}.weight") if path in self.trained.files), None)
        if found is None:
            return total
        outputs = 0 if transposed else 1
        scale = self.trained[found].float().flatten() / torch.linalg.norm(total, dim=outputs)
        return total * scale.unsqueeze(outputs)


def _scaling(lora: Any, module: str, r: int) -> float:
    """alpha / r, or alpha / sqrt(r), with the module's own alpha if a pattern gives one."""
    patterns: Mapping[str, float] = lora.alpha_pattern or {}
    own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), lora.lora_alpha)
    return float(own) / (math.sqrt(r) if lora.use_rslora else r)


def _spellings(name: str) -> tuple[str, ...]:
    """A tensor's name as different versions of a family's files have it."""
    prefixed = (f"{prefix}{name}" for prefix in ("model.", "transformer.", "language_model."))
    begun = [prefix for prefix in DECODERS if name.startswith(prefix)]
    moved = (f"{other}{name.removeprefix(prefix)}" for prefix in begun for other in DECODERS if other != prefix)
    shorter = (name.removeprefix(prefix) for prefix in ("model.", "transformer.", "language_model."))
    return (name, *shorter, *prefixed, *moved)


def _tied(name: str) -> tuple[str, ...]:
    """The embedding's names, for a head: a base that ties the two stores one of them."""
    tables = (*(f"{prefix}embed_tokens.weight" for prefix in DECODERS), "transformer.wte.weight", "wte.weight")
    return tables if name in ("lm_head.weight", "language_model.lm_head.weight") else ()


def _require_close(name: str, file: str, seen: torch.Tensor, wanted: torch.Tensor, changed: bool) -> None:
    """Raise Mismatch unless the merged tensor is `wanted`, rounded to its dtype: exactly if no adapter changes it."""
    if seen.shape != wanted.shape:
        raise Mismatch(
            f"{name} in {file} has the shape {list(seen.shape)}, and base and adapter give {list(wanted.shape)}"
        )
    exact = wanted.to(seen.dtype).float()
    off = (seen.float() - exact).abs()
    step = torch.finfo(seen.dtype).eps if changed else 0.0
    # Sums of r products in another order: one rounding of the dtype, and float32's of the largest number.
    allowed = step * exact.abs() + (4e-6 * exact.abs().max() if changed else 0.0)
    if not bool((off <= allowed).all()):
        worst = int(torch.nan_to_num(off - allowed, nan=math.inf).argmax())
        raise Mismatch(
            f"{name} in {file} is not base + scaling * B A: number {worst} is {seen.flatten()[worst].item():.6g}, and "
            f"{exact.flatten()[worst].item():.6g} was computed"
        )
