"""The recurrent parts of hybrid models' layers, and their parameters that keep the precision of the files.

Released hybrids store some parameters in float32 beside weights in bfloat16. In Qwen3.5 these are `A_log` and the
weight of the norm in each mixer. A state decays by a power of exp(-exp(A_log)) with each token, so a rounding error of
`A_log` grows with the length of a document. transformers rounds such parameters to the dtype of the other weights,
except in a few families. keep_float32() reads them again.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection
from typing import Any

from torch import nn

from fxtune.models.dims import DECAYS
from fxtune.models.shards import names_in_files
from fxtune.models.structure import base_dtype, decoder_layers
from fxtune.models.weights import readable_files, stored
from fxtune.system.files.hub import Origin
from fxtune.upstream.transformers import calls, with_operators

SCALARS = ("A_log", "dt_bias", "D")
"""Parameters of a gated delta rule, of KDA and of a state-space model: the decay, the bias of the step size, and the
share of the input in the output. fxtune's operators compute with them in float32."""

GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Linears of Qwen's gated delta rule with one or two outputs for each head: the decay, and the share of the new value.
They get adapters only if a recipe names them, because servers leave such adapters out (gates_note())."""


def gates_note(modules: Collection[str]) -> str:
    """What servers do with adapters of GATES; empty if `modules`, the names of adapted modules, has none of them."""
    names = " and ".join(f"`{name}`" for name in sorted({*GATES}.intersection(modules)))
    why = "and only warns in its log (sglang#30499): serve the merged model there."
    return f"SGLang of July 2026 leaves out the adapters of {names} {why}" if names else ""


KERNELS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
"""Functions of transformers that run fla-core's kernels, on any device, where the package is installed."""


def mixers(model: nn.Module) -> list[nn.Module]:
    """The recurrent parts of the layers: modules that own a convolution over tokens or the decay of a state."""
    parts: list[nn.Module] = []
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves or any(hasattr(module, name) for name in DECAYS):
            parts.append(module)
    inner = {id(part) for module in parts for part in module.modules() if part is not module}
    return [module for module in parts if id(module) not in inner]


def precise_parameters(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """The parameters of mixers that may be float32 beside weights in another dtype, and their modules: SCALARS, and
    the weights of norms. Linears and convolutions need weights in the dtype of their inputs."""
    return {
        parameter: module
        for part in mixers(model)
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name in SCALARS or (name == "weight" and parameter.dim() == 1)
    }


def keep_float32(model: Any, origin: Origin | None) -> None:
    """Read again, in float32 and in place, those precise_parameters() that the files of `origin` store in float32. On
    the meta device only the dtype changes. Without an `origin` the weights are random, and all become float32."""
    if not (precise := precise_parameters(model)):
        return
    if origin is None:
        for parameter in precise:
            parameter.data = parameter.data.float()
    else:
        files = readable_files(origin)
        names = names_in_files(model, [key for _, key, _ in stored(files)])
        parameters = model.named_parameters()
        keys = {names[name]: weight for name, weight in parameters if weight in precise and name in names}
        for _, key, opened in stored(files):
            if key in keys and opened.get_slice(key).get_dtype() == "F32":
                parameter = keys[key]
                values = parameter if parameter.is_meta else opened.get_tensor(key).to(parameter.device)
                parameter.data = values.detach().float().clone()
    return_input_dtype(model)


def use_reference(model: nn.Module) -> None:
    """Let recurrent parts of a model on a CPU run transformers' own code, in place. transformers chooses fla-core's
    kernels when it imports a family, before it knows a tensor's device."""
    if next(model.parameters()).device.type != "cpu":
        return
    for part in mixers(model):
        forward = type(part).forward
        if not calls(forward).isdisjoint(KERNELS):
            plain = with_operators(forward, tuple((name, inspect.unwrap) for name in KERNELS))
            part.forward = types.MethodType(plain, part)


def return_input_dtype(model: nn.Module) -> None:
    """Let norms in mixers whose weight is float32 return the dtype of their input, in place. The norms of Mamba-2
    families return the dtype of the weight, and the linear after them would refuse it."""
    dtype = base_dtype(model)
    for parameter, module in precise_parameters(model).items():
        if parameter.dtype is not dtype and parameter is getattr(module, "weight", None):
            module.register_forward_hook(lambda _, inputs, output: output.to(inputs[0].dtype))
