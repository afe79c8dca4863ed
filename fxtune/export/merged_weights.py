"""Computes a merged model again from its base and its adapter, tensor by tensor, and compares it with the files.

    W = base + scaling * B A            scaling: alpha / r, or alpha / sqrt(r)
    W = m / |base + scaling * B A| * (base + scaling * B A)      DoRA; the norm is taken over each output's row

The formulas come from the papers, because peft's code made the merge that is checked here. One tensor of the base's
files, of the adapter's file and of the merged files is in host memory at a time. A tensor may have another name in a
file than in the model, so names are translated by transformers' rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fxtune.export.rounding import Survival
from fxtune.export.weights import Mismatch, bits
from fxtune.models.peft_adapter import FACTORED, WEIGHTS
from fxtune.models.shards import names_in_files
from fxtune.models.weights import readable_files
from fxtune.system.files.hub import Origin

PREFIX, TOKENS = "base_model.model.", ".trainable_tokens_delta"
UNKNOWN = {"lora_bias": "biases of adapters", "layer_replication": "repeated layers"}
"""{option of peft: its meaning}. The merge of an adapter with such an option is not computed again."""


def recompute(folder: Path, base: Origin, adapter: Origin, lora: Any, model: Any) -> tuple[int, str, dict[str, Any]]:
    """Compare the merged model in `folder` with the sums of its base and its adapter.

    `lora`: peft's options of the adapter. `model`: the merged model, for the names of its tensors. Returns the number
    of tensors that were compared, words about the tensors that were not compared, and Survival.shares()
    (rounding.py). Raises Mismatch for the first tensor that differs, and LostUpdateError
    if too little survives.
    """
    if lora.init_lora_weights in FACTORED:
        return 0, f"the sums of base and adapter, because {lora.init_lora_weights} changes the base", {}
    if odd := [what for option, what in UNKNOWN.items() if getattr(lora, option, None)]:
        return 0, f"the sums of base and adapter, because of {odd[0]}", {}
    survival = Survival()
    with ExitStack() as opened:
        merged, stored = (_Tensors(opened, readable_files(origin)) for origin in (Origin(folder, str(folder)), base))
        adapters = _Adapters(_Tensors(opened, [adapter.folder / WEIGHTS]), lora, model)
        in_base, tied, passed = names_in_files(model, stored.files), _tied(model), set(merged.files)
        for name, key in sorted(names_in_files(model, merged.files).items()):
            found = next((spelled for spelled in (name, tied.get(name)) if spelled in in_base), name)
            source = in_base.get(found)
            # Tensors of experts are recognized by their dimensions, because families name them differently.
            of_experts = bool(lora.target_parameters) and merged[key].dim() > 2
            if of_experts or adapters.passes_over(found) or (source is None and not adapters.replacement(name)):
                continue
            wanted, changed = adapters.applied(name, None if source is None else stored[source])
            _require_close(key, merged.files[key].name, merged[key], wanted, changed)
            if changed and source is not None and not adapters.replacement(name):  # a copy loses nothing
                survival.add(key, stored[source], wanted, merged[key])
            passed.discard(key)
        # Layers for multi-token prediction, and experts without adapters that the files store one by one.
        same = {key for key in passed & stored.files.keys() if torch.equal(bits(merged[key]), bits(stored[key]))}
        passed -= same
    why = "which the base stores otherwise, or whose adapters are of no linear or of single tokens"
    return (
        len(merged.files) - len(passed),
        f"the sums of base and adapter in {len(passed)} tensors, {why}, such as {min(passed)}" if passed else "",
        survival.shares(),
    )


class _Tensors:
    """The tensors of safetensors files, read one at a time."""

    def __init__(self, opened: ExitStack, files: list[Path]) -> None:
        self.files: dict[str, Path] = {}
        self._handles: dict[str, Any] = {}
        for file in files:
            handle = opened.enter_context(safe_open(file, "pt"))
            for name in handle.keys():  # noqa: SIM118
                self.files[name], self._handles[name] = file, handle

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handles[name].get_tensor(name)


class _Adapters:
    """The adapters of a file, applied to the tensors of a base."""

    def __init__(self, trained: _Tensors, lora: Any, model: Any) -> None:
        self.trained, self.lora = trained, lora
        modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in trained.files if ".lora_" in name}
        weights, own = {f"{module}.weight" for module in modules}, model.state_dict().keys()
        # The adapter may have older names of its family, because peft still reads them.
        named = {**names_in_files(model, weights - own), **{name: name for name in weights & own}}
        parameters = tuple(lora.target_parameters or ())
        self.modules = {
            name.removesuffix(".weight"): weight.removesuffix(".weight")
            for name, weight in named.items()
            if not name.endswith(parameters)
        }
        """{module of the model whose weight is adapted: its name in the adapter's file}."""
        others = modules.difference(self.modules.values())
        self._others = {module.removesuffix(".base_layer").rpartition(".")[2] for module in others if parameters}
        tokens = [name.removesuffix(TOKENS) for name in trained.files if name.endswith(TOKENS)]
        self._others |= {module.removesuffix(".token_adapter").rpartition(".")[2] for module in tokens}
        if others and not parameters:
            raise Mismatch(f"{min(others)} has an adapter, and no tensor of the merged model is its weight")

    def passes_over(self, name: str) -> bool:
        """Whether the tensor `name` is in a module whose adapter is on a parameter (experts) or on single tokens."""
        return not self._others.isdisjoint(name.split("."))

    def replacement(self, name: str) -> str | None:
        """The adapter's tensor that replaces the tensor `name`: a bias, or a tensor of a module trained in full."""
        module, _, leaf = name.rpartition(".")
        spelled = (f"{PREFIX}{module}.{leaf}", f"{PREFIX}{module}.base_layer.{leaf}")
        own = leaf != "weight" or module not in self.modules
        return next((path for path in spelled if own and path in self.trained.files), None)

    def applied(self, name: str, start: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """(the tensor `name` as the merge should write it, whether the adapter changes it). `start`: the same tensor
        in the base; None if the adapter replaces it."""
        if replacement := self.replacement(name):
            return self.trained[replacement], True
        assert start is not None
        module, _, leaf = name.rpartition(".")
        if module not in self.modules or leaf != "weight":
            return start, False
        return self._sum(self.modules[module], start.float()), True

    def _sum(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        embedding = f"{PREFIX}{module}.lora_embedding_A" in self.trained.files
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        a, b = (self.trained[f"{PREFIX}{module}.{name}"].float() for name in names)
        delta = b @ a * _scaling(self.lora, module, len(a))  # [out, in]
        # GPT-2's linears and all embeddings are stored as [in, out]. The option decides only for square weights.
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


def _tied(model: Any) -> dict[str, str]:
    """{name of the head's weight: name of the embedding's weight}. A base that ties both weights stores one tensor."""
    paths = {id(module): f"{path}.weight" for path, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return {} if head is None else {paths[id(head)]: paths[id(embedding)]}


def _require_close(name: str, file: str, seen: torch.Tensor, wanted: torch.Tensor, changed: bool) -> None:
    """Raise Mismatch unless the merged tensor `seen` is `wanted`. Both must be equal in the dtype of `seen` if no
    adapter changes the tensor (`changed`); otherwise they may differ by rounding."""
    if seen.shape != wanted.shape:
        raise Mismatch(
            f"{name} in {file} has the shape {list(seen.shape)}, and base and adapter give {list(wanted.shape)}"
        )
    exact = wanted.to(seen.dtype).float()
    off = (seen.float() - exact).abs()
    step = torch.finfo(seen.dtype).eps if changed else 0.0
    # peft adds the r products in another order. Allowed are one rounding error of the dtype, and one rounding error of
    # float32 at the largest number.
    allowed = step * exact.abs() + (4e-6 * exact.abs().max() if changed else 0.0)
    if not bool((off <= allowed).all()):
        worst = int(torch.nan_to_num(off - allowed, nan=math.inf).argmax())
        raise Mismatch(
            f"{name} in {file} is not base + scaling * B A: number {worst} is {seen.flatten()[worst].item():.6g}, and "
            f"{exact.flatten()[worst].item():.6g} was computed"
        )
