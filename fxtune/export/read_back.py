"""Proves an export before it counts: plain peft and plain transformers load from its files what was trained.

    weights     the files have exactly the tensors of the model, bit by bit (weights.py)
    options     adapter_config.json, config.json and generation_config.json have the model's options
    tokenizer   read back from its files, it has the same tokens, ids and chat template
    modules     plain peft adapts the same modules with the same ranks, scalings and weights
    logits      plain peft over plain transformers answers a probe as the trained model does
    ending      with the exported generation config, plain generation ends its answer to a question of the data; if
                not, the export still counts, and the proof says so

For modules, logits and ending, a plain model is built from the configs in the files. It takes the base's weights from
the model in memory, so no base is read again or copied. It runs the code of transformers and peft, without fused
adapters, Liger or compiled layers. A quantized base stays quantized, so the comparison finds errors of the export and
not of the quantization. With PiSSA and OLoRA the base in memory has lost its first factors already, so peft does not
subtract them again.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.compiler import set_stance

from fxtune.distributed.chunks import is_divided
from fxtune.distributed.world import World
from fxtune.errors import first_line, shortened
from fxtune.export.weights import LoadMismatch, Mismatch, bits
from fxtune.models import shards
from fxtune.models.end_tokens import GENERATION_CONFIG, end_tokens
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.mixers import return_input_dtype, use_reference
from fxtune.models.peft_adapter import CONFIG, FACTORED, WEIGHTS, adapter_weights, comparable
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import Answer, kl, probe_logits
from fxtune.models.proof import Proof
from fxtune.models.replacement import PackedExperts, PackedLinear
from fxtune.models.structure import image_arguments
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.upstream.peft import alone
from fxtune.upstream.torch import without_class
from fxtune.upstream.transformers import set_attention

LIMIT = 1e-3
"""The largest mean KL divergence of the plain model's answers from the trained model's, in nats a token."""
ROUNDINGS = 8
"""Two ways to compute may differ by this many roundings of the input; see Answer.noise."""
WRITTEN_BY_SAVING = ("inference_mode", "peft_version", "auto_mapping", "transformers_version", "_name_or_path")
"""Options that saving writes by itself. They may differ, because they do not change the model."""
TEXT = "Hello, wörld! 1+1=2\n\n\tdef f(x): return x  # 你好 <|im_start|>"
CODE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class EndingProbe:
    """A question of the data. The plain model's answer to it should end."""

    prompt: list[int]
    """Token ids up to the answer."""
    room: int
    """The number of tokens that the plain model may write."""
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    """Arguments of forward() for the images of the prompt."""


def prove(
    prepared: PreparedModel,
    tokenizer: Any,
    folder: Path,
    tensors: int,
    answer: Callable[[], Answer] | None,
    world: World,
    question: EndingProbe | None = None,
) -> Proof:
    """Compare the files in `folder` with the model and the tokenizer that they were written from, on rank 0.

    `tensors`: the number of tensors that were compared before. `answer`: returns the trained model's answer to the
    probe; None: the model in memory is asked. Raises Mismatch, which names the file and the difference.
    """
    begin = time.perf_counter()
    model = prepared.module
    adapted = hasattr(model, "peft_config")
    _require_same_configs(prepared, folder, adapted)
    _require_same_tokenizer(tokenizer, folder)
    proof = Proof(tensors)
    if any(map(is_divided, model.parameters())):
        reason = f"the logits, because each of {world.size} ranks holds a part of the weights"
        return replace(proof, left_out=reason, seconds=time.perf_counter() - begin)
    try:
        wanted = answer() if answer else Answer.of(model)
        plain = _Plain(prepared, folder).build()
        if adapted:
            _require_same_modules(model, plain)
        with torch.autocast(wanted.logits.device.type, enabled=False):
            seen = probe_logits(plain)
    except CODE_ERRORS as error:
        found = out_of_memory_reason(error)
        why = f"memory is short: {found}" if found else f"the plain model does not run here: {first_line(error)}"
        return replace(proof, left_out=f"the logits, because {why}", seconds=time.perf_counter() - begin)
    distance = kl(wanted.logits, seen)
    allowed = LIMIT + ROUNDINGS**2 * wanted.noise
    if not distance <= allowed:
        library = "peft on the plain base" if adapted else "transformers"
        raise LoadMismatch(
            f"plain {library} answers a probe otherwise than the trained model: mean KL {distance:.1e} nats a token "
            f"(at most {allowed:.1e})"
        )
    difference = (wanted.logits.float() - seen.float()).abs().max().item()
    proof = replace(proof, kl=distance, difference=difference)
    if question is not None and kind_of(model.config).writes:
        try:
            proof = replace(proof, asked=question.room, ended_after=_ended_after(plain, model, folder, question))
        except CODE_ERRORS as error:
            why = out_of_memory_reason(error) or first_line(error)
            proof = replace(proof, left_out=f"how an answer ends, because generation fails here: {why}")
    return replace(proof, seconds=time.perf_counter() - begin)


def _ended_after(plain: Any, model: Any, folder: Path, question: EndingProbe) -> int | None:
    """The number of tokens that the plain model writes up to an end token of the exported generation config; None if
    the first `question.room` tokens have no end token."""
    from transformers import GenerationConfig

    exported = (folder / GENERATION_CONFIG).exists()
    generation = GenerationConfig.from_pretrained(folder) if exported else copy.deepcopy(model.generation_config)
    ids = torch.tensor([question.prompt], device=next(plain.parameters()).device)
    shown = image_arguments(plain, question.images, ids.device)
    if shown:
        shown |= images_of(model.config).token_types(model.config, ids)
    with torch.inference_mode(), torch.autocast(ids.device.type, enabled=False), set_stance("force_eager"):
        written = plain.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation,
            do_sample=False,
            max_new_tokens=question.room,
            pad_token_id=0,
            **shown,
        )[0, len(question.prompt) :].tolist()
    return len(written) if written and written[-1] in end_tokens(generation) else None


def _require_same_configs(prepared: PreparedModel, folder: Path, adapted: bool) -> None:
    model = prepared.module
    if adapted:
        live = next(iter(model.peft_config.values())).to_dict()
        saved = _read(folder / CONFIG)
        _require_same(CONFIG, live, saved)
        if (saved.get("base_model_name_or_path") or "") != (model.name_or_path or ""):
            raise Mismatch(
                f"{CONFIG}: base_model_name_or_path is {saved.get('base_model_name_or_path')}, and the model was "
                f"trained on {model.name_or_path}"
            )
    file = folder / "config.json"
    if not file.exists() and (not adapted or prepared.config_edited):
        raise Mismatch("config.json is missing")
    if file.exists():
        _require_same(file.name, model.config.to_dict(), _loaded(type(model.config), file))
    generation, file = getattr(model, "generation_config", None), folder / GENERATION_CONFIG
    written = bool(prepared.added_ends) if adapted else model.can_generate()
    if generation is not None and written:
        _require_same(file.name, generation.to_dict(), _loaded(type(generation), file))


def _require_same(file: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise Mismatch for the first option that differs between a file (`saved`) and the model (`live`)."""
    plain = json.loads(json.dumps(live, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))
    for name in sorted(plain.keys() | saved.keys()):
        ours, written = comparable(plain.get(name)), comparable(json.loads(json.dumps(saved.get(name), default=str)))
        if ours != written and name not in WRITTEN_BY_SAVING:
            raise Mismatch(f"{file}: {name} is {shortened(written)} in it, and {shortened(ours)} in the model")


def _loaded(kind: Any, file: Path) -> dict[str, Any]:
    """The config in a file as transformers reads it."""
    _read(file)
    try:
        found: dict[str, Any] = kind.from_pretrained(file.parent).to_dict()
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise Mismatch(f"{file.name} cannot be read back: {first_line(error)}") from error
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Mismatch(f"{file.name} cannot be read back: {first_line(error)}") from error
    return found


def _require_same_tokenizer(tokenizer: Any, folder: Path) -> None:
    if not hasattr(tokenizer, "backend_tokenizer"):
        return
    try:
        saved = type(tokenizer).from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise Mismatch(f"the tokenizer cannot be read back: {first_line(error)}") from error
    chosen = tokenizer.pad_token
    for what, read in {
        "its chat template": lambda made: made.chat_template,
        # If the base's files have no pad token, load_tokenizer() has chosen one.
        "its special tokens": lambda made: {**made.special_tokens_map, "pad_token": made.pad_token or chosen},
        "its added tokens": lambda made: {str(token) for token in made.added_tokens_decoder.values()},
        "its vocabulary": lambda made: made.get_vocab(),
        "the ids of a text": lambda made: made(TEXT)["input_ids"],
    }.items():
        if (mine := read(tokenizer)) != (theirs := read(saved)):
            raise Mismatch(
                f"the tokenizer, read back from {folder.name}: {what} differ: {shortened(theirs)} in the files, "
                f"{shortened(mine)} in training"
            )


class _Plain:
    """Builds the plain model from the files, with the weights of the base in memory."""

    def __init__(self, prepared: PreparedModel, folder: Path) -> None:
        model, self.code = prepared.module, prepared.trust_remote_code
        self.adapted, self.folder = hasattr(model, "peft_config"), folder
        self.base = model.get_base_model() if self.adapted else model
        self.live = dict(_base_modules(self.base))
        self.shared: dict[Any, nn.Parameter] = {}

    def build(self) -> Any:
        file, held = self.folder / "config.json", self.base
        config = type(held.config).from_pretrained(self.folder) if file.exists() else copy.deepcopy(held.config)
        set_attention(config, "eager")  # another kernel may need the bounds of documents, or a GPU
        floating = (weight for weight in held.parameters() if weight.is_floating_point() and weight.itemsize > 1)
        dtype = next((weight.dtype for weight in floating), torch.float32)
        # A trusted model's code is read from the file that training used, not from the copy that saving made.
        config.name_or_path = held.config.name_or_path
        plain = shards.empty(config, dtype, World(next(held.parameters()).device), self.code)
        for path, module in list(plain.named_modules()):
            self._fill(plain, path, module)
        return_input_dtype(plain)
        use_reference(plain)
        plain.eval()
        if not self.adapted:
            return plain
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # peft reads these flags when it adds adapters
            setattr(plain, flag, getattr(held, flag, False))
        with alone() as peft, warnings.catch_warnings(action="ignore"):
            options = peft.LoraConfig.from_pretrained(str(self.folder))
            if options.init_lora_weights in FACTORED:
                options.init_lora_weights = True  # the base in memory has lost its first factors already
            adapted = peft.PeftModel.from_pretrained(plain, str(self.folder), config=options)
        every: list[Any] = list(adapted.modules())
        for module in every:  # peft cannot add an adapter's product to experts that are stored as fp8 codes
            if hasattr(module, "parameter_name") and isinstance(experts := module.get_base_layer(), PackedExperts):
                experts.run_grouped(module)
        return adapted

    def _fill(self, plain: Any, path: str, module: nn.Module) -> None:
        """Give a module the tensors of the live module. If these are packed or have other shapes, put the live module
        in its place."""
        live = self.live.get(path)
        tensors = {
            name: getattr(live, name, None) for name, weight in module._parameters.items() if weight is not None
        }
        shapes = {name: getattr(tensor, "shape", None) for name, tensor in tensors.items()}
        packed = any(getattr(tensor, "itemsize", 4) == 1 for tensor in tensors.values())
        if live is not None and (
            isinstance(live, PackedLinear)
            or packed
            or any(shape != module._parameters[name].shape for name, shape in shapes.items())  # type: ignore[union-attr]
        ):
            plain.set_submodule(path, live)
            return
        for name, tensor in tensors.items():
            if tensor is None:
                raise LookupError(f"{path}.{name} is not in the model that was trained")
            place = (tensor.data_ptr(), tensor.shape)  # tied weights stay one parameter
            if place not in self.shared:
                self.shared[place] = nn.Parameter(without_class(tensor), requires_grad=False)
            module._parameters[name] = self.shared[place]
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            module._buffers[name] = live._buffers[name] if live is not None else None


def _base_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of a base with adapters, by the names that modules have without adapters."""
    for path, module in base.named_modules():
        parts = path.split(".")
        if not any(part.startswith(("lora_", "modules_to_save", "trainable_tokens")) for part in parts):
            wrappers = ("base_layer", "original_module", "token_adapter")
            yield ".".join(part for part in parts if part not in wrappers), module


def _require_same_modules(model: Any, plain: Any) -> None:
    mine, theirs = _adapters(model), _adapters(plain)
    if odd := sorted(mine.keys() ^ theirs.keys()):
        where = "only in the trained model" if odd[0] in mine else "only in what plain peft builds from it"
        raise LoadMismatch(f"{CONFIG}: {len(odd)} adapted modules differ, such as {odd[0]}, which is {where}")
    for path, acts in mine.items():
        for what, value in acts.items():
            if value != theirs[path][what]:
                raise LoadMismatch(
                    f"{CONFIG}: {what} of {path} is {theirs[path][what]} in plain peft, and {value} in the model"
                )
    wanted, seen = adapter_weights(model), adapter_weights(plain)
    for name in sorted(wanted.keys() | seen.keys()):
        # In plain peft copies of whole modules have the base's dtype.
        if name not in seen or name not in wanted or not _same(wanted[name].to(seen[name].dtype), seen[name]):
            raise LoadMismatch(f"{WEIGHTS}: plain peft does not give {name} the weights of the model")


def _adapters(model: Any) -> dict[str, dict[str, Any]]:
    from peft.tuners.lora import LoraLayer

    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            (name,) = module.r
            found[path] = {
                "the rank": module.r[name],
                "the scaling": module.scaling[name],
                "the variant": type(module.lora_variant.get(name)).__name__,
                "fan_in_fan_out": bool(getattr(module, "fan_in_fan_out", False)),
                "lora_bias": bool(module.lora_bias.get(name)),
            }
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bits(one), bits(other))
