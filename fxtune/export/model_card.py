"""Writes the model card (README.md) of a trained model: what it is, how to load it, and how it was made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from fxtune.export import vllm
from fxtune.export.config import versions_of_readers
from fxtune.export.image_bounds import BOUNDS
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.kinds.decoder import PROCESSORS, Decoder
from fxtune.models.mixers import gates_note
from fxtune.system.files.atomic_files import read_json
from fxtune.system.terminal.redact import redact

_MERGE_FIRST = (
    "sentence-transformers takes this folder for a whole model, because the adapter has a config.json beside it. So "
    "merge it first (`fxtune merge`), and name the merged folder."
)


def write_card(folder: Path, kind: Decoder, card: dict[str, Any]) -> None:
    """Write README.md for the model or adapter in `folder`. Secrets are redacted.

    `card`, all optional: title, base, revision, grown_from and mtp (the names of the tensors; see PreparedModel),
    adapter (the name of the merged adapter), data (the plan's fingerprint), weights (a sentence about the step at
    which they were taken), figures (metric -> value), proof (a sentence), machine (the run's Facts), config (the run's
    config as plain data).
    """
    machine = card.get("machine")
    card = redact({name: value for name, value in card.items() if name != "machine"})
    adapter, hf_config = (
        read_json(file) if file.exists() else {} for file in (folder / "adapter_config.json", folder / "config.json")
    )
    base, config = str(card.get("base") or ""), card.get("config") or {}
    front_matter: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": kind.pipeline_tag,
        "tags": ["fxtune", *(["lora"] if adapter else [])],
    }
    if base and not Path(base).is_absolute():  # the hub rejects a card whose base_model is a path
        front_matter["base_model"] = base
    tensors: list[str] = []
    if adapter:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            tensors += file.keys()
    refusals = vllm.refusals(adapter, tensors) if adapter else []
    run = config.get("run", {})
    summary = {
        "base": base,
        "revision": card.get("revision"),
        "merged from": card.get("adapter"),
        "run": run.get("name"),
        "seed": run.get("seed"),
        "data": card.get("data"),
        "weights": card.get("weights"),
    }
    grown_from = card.get("grown_from") if adapter else None
    code = _loading_code(folder, kind, base, bool(adapter), hf_config, grown_from)
    rope_note, vllm_rope_note = _rope_notes(hf_config, base, adapter, refusals)
    parts = [
        f"---\n{yaml.safe_dump(front_matter, sort_keys=False)}---",
        f"# {_escaped(card.get('title') or folder.name)}",
        "Trained with fxtune.",
        _table(summary),
        f"## How to load it\n\n```python\n{code}```",
        *filter(None, [kind.use(list((hf_config.get("id2label") or {}).values()))]),
        *([_MERGE_FIRST] if adapter and hf_config and kind.head == "pool" else []),
        *_image_note(folder, kind, base, bool(adapter), image_bounds(card)),
        f"Read by {versions_of_readers(folder)}.",
        *_notes_on_use(folder, bool(adapter), card),
        *([rope_note] if rope_note else []),
        *([vllm_rope_note] if vllm_rope_note and kind.writes else []),
    ]
    if adapter:
        parts.append(_vllm_note(adapter, refusals) if kind.writes else "Loads in vLLM: not tried.")
        parts += _linear_attention_note({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
        if kind.images and not refusals:
            parts.append(_vllm_image_note(vllm.is_beside_language_model(tensors)))
    elif hf_config.get("dtype") == "float32" and kind.writes:
        parts.append("vLLM would round these weights to 16 bits: add `--dtype float32`.")
    if card.get("proof"):
        parts += ["## Proof", str(card["proof"])]
    # Figures of single classes are in the page of the run.
    if figures := {name: value for name, value in (card.get("figures") or {}).items() if name.count("/") < 2}:
        parts += ["## Figures", _table(figures)]
    if machine:
        parts += ["## Made with", _table({"device": machine.device_name, "dtype": machine.dtype, **machine.packages})]
    if config:
        parts += ["## Config", f"```yaml\n{yaml.safe_dump(config, sort_keys=False, allow_unicode=True)}```"]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _loading_code(
    folder: Path, kind: Decoder, base: str, adapter: bool, hf_config: Any, grown_from: int | None
) -> str:
    """The Python lines that load the model or adapter. `hf_config`: the content of config.json in `folder`, or {}.
    `grown_from`: the rows of the base's embedding, if the run has added rows to it."""
    classes = f"{kind.auto_class}, {kind.tokenizer_class}"
    set_folder = 'folder = "."  # where this file lies'
    load_config = ["config = AutoConfig.from_pretrained(folder)  # the base's config with the changes of training"]
    grow = []
    if grown_from:
        rows = (hf_config.get("text_config") or hf_config)["vocab_size"]
        load_config.append(f"config.get_text_config().vocab_size = {grown_from}  # the rows in the base's files")
        tables = f"base.get_input_embeddings(),{' base.get_output_embeddings()' * kind.writes}"
        grow = [
            f"base.resize_token_embeddings({rows}, mean_resizing=False)",
            f"for table in ({tables}):",
            f"    table.weight.data[{grown_from}:] = table.weight.data[:{grown_from}].mean(0)",
        ]
    has_config, has_generation_config = bool(hf_config), adapter and (folder / GENERATION_CONFIG).exists()
    stop = "base.generation_config = GenerationConfig.from_pretrained(folder)  # stops at the end tokens of training"
    if adapter:
        names = f"{'AutoConfig, ' * has_config}{classes}{', GenerationConfig' * has_generation_config}"
        lines = [
            "from peft import PeftModel",
            f"from transformers import {names}",
            "",
            set_folder,
            *(load_config if has_config else []),
            f'base = {kind.auto_class}.from_pretrained("{base or "BASE"}"{", config=config" * has_config})',
            *grow,
            *([stop] if has_generation_config else []),
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        load = f"model = {kind.auto_class}.from_pretrained(folder)"
        lines = [f"from transformers import {classes}", "", set_folder, load]
    return "\n".join([*lines, f"tokenizer = {kind.tokenizer_class}.from_pretrained(folder)", ""])


def _notes_on_use(folder: Path, adapter: bool, card: dict[str, Any]) -> list[str]:
    notes = []
    if adapter and (folder / GENERATION_CONFIG).exists():
        notes.append(
            f"The adapter's answers end with a token at which the base does not stop. {GENERATION_CONFIG} names the "
            "end tokens of both: the code above loads this file, `fxtune merge` copies it into the merged model, and "
            "a server of base and adapter needs it (vLLM: `--generation-config .`)."
        )
    if tensors := card.get("mtp"):
        notes.append(
            f"Its layers for multi-token prediction ({len(tensors)} tensors, such as `{tensors[0]}`) are the base's, "
            "byte for byte. Servers can decode speculatively with them. They were not trained with this model, so "
            "servers may accept fewer of their guesses."
        )
    if variables := ((card.get("config") or {}).get("data") or {}).get("chat_template_kwargs"):
        given = "".join(f", {name}={value!r}" for name, value in variables.items())
        notes.append(
            "In training the prompts were written with variables of the chat template. Write prompts in the same way: "
            f"`tokenizer.apply_chat_template(messages, add_generation_prompt=True{given})`."
        )
    return notes


def _rope_notes(config: dict[str, Any], base: str, adapter: dict[str, Any], refusals: list[str]) -> tuple[str, str]:
    """(a note on scaled RoPE, a note on it for vLLM), empty for models without scaling. `refusals`: reasons why vLLM
    does not load the adapter."""
    if not (types := vllm.rope_types(config)):
        return "", ""
    positions = int((config.get("text_config") or config)["max_position_embeddings"])
    note = (
        f"Its rotary embedding is scaled ({', '.join(sorted(types))}) for up to {positions:,} positions: see "
        "`rope_parameters` in config.json."
    )
    if adapter:
        note += (
            " PEFT's files of an adapter do not hold the scaling: if the base is loaded without this config.json, as "
            "`AutoPeftModelForCausalLM.from_pretrained(folder)` does, the model runs unscaled, without a warning."
        )
    if types == {"dynamic"}:
        return note, "vLLM computes dynamic scaling once, for the longest row, so its results differ."
    command = _vllm_command(config, base, positions, adapter, refusals)
    return note, f"With a version of vLLM that runs on transformers 5:\n\n```bash\n{command}\n```"


def _vllm_image_note(beside_language_model: bool) -> str:
    """What vLLM needs for an adapter of a model that reads images. `beside_language_model`: see
    vllm.is_beside_language_model()."""
    if beside_language_model:
        begin = (
            "This adapter changes the vision encoder or the projector, too. By default vLLM applies adapters to the "
            "language model only. Some of its model classes take the rest with `--enable-tower-connector-lora`; with "
            "others serve the merged model: `fxtune merge . ../merged`."
        )
    else:
        begin = "This adapter changes the language model only, as vLLM expects by default."
    return (
        f"{begin} The names of its tensors are for the base that reads images. A base of the text-only class loads "
        "the adapter in vLLM, too, and ignores it without a warning: compare an answer with and without the adapter."
    )


def image_bounds(card: dict[str, Any]) -> dict[str, int | None]:
    """data.image_tokens (`min` and `max`) of the run that this card describes."""
    return ((card.get("config") or {}).get("data") or {}).get("image_tokens") or {}


def _image_note(folder: Path, kind: Decoder, base: str, adapter: bool, bounds: dict[str, Any]) -> list[str]:
    """How to ask a model about an image. `bounds`: see image_bounds()."""
    if not kind.images or not (adapter or any(folder.glob(PROCESSORS))):
        return []
    # A whole model has the bounds in its processor files.
    sizes = [f'"{BOUNDS[name]}": {bounds[name]} * side**2' for name in BOUNDS if adapter and bounds.get(name)]
    resize = [
        "side = processor.image_processor.merge_size * processor.image_processor.patch_size  # pixels of a token",
        f"size = {{**dict(processor.image_processor.size), {', '.join(sizes)}}}  # data.image_tokens of training",
        "processor.image_processor.size = size",
    ]
    code = "\n".join(
        [
            "from transformers import AutoProcessor",
            "",
            f'processor = AutoProcessor.from_pretrained("{base or "BASE"}")'
            if adapter
            else "processor = AutoProcessor.from_pretrained(folder)",
            *(["processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template"] * adapter),
            *(resize if sizes else []),
            'content = [{"type": "image", "image": "picture.png"}, {"type": "text", "text": "What is it?"}]',
            "inputs = processor.apply_chat_template(",
            '    [{"role": "user", "content": content}],',
            '    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",',
            ").to(model.device, dtype=model.dtype)",
            "written = model.generate(**inputs, max_new_tokens=64)",
            'print(processor.decode(written[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
            "",
        ]
    )
    return [
        f"With an image (`pip install pillow torchvision`):\n\n```python\n{code}```",
        "In a terminal: `fxtune chat .`, and then `/image picture.png What is it?`",
    ]


def _vllm_note(adapter: dict[str, Any], refusals: list[str]) -> str:
    if not refusals:
        return f"Loads in vLLM: yes, with `--enable-lora --max-lora-rank {vllm.max_rank(adapter['r'])}`."
    return f"Loads in vLLM: no. vLLM takes {'; '.join(refusals)}. Serve the merged model: `fxtune merge . ../merged`."


def _linear_attention_note(modules: Collection[str]) -> list[str]:
    """What servers do with adapters on the linears of Qwen3.5's linear attention. `modules`: the names of
    adapted modules."""
    notes = []
    if not {"in_proj_qkv", "in_proj_z"}.isdisjoint(modules):
        notes.append(
            "Versions of vLLM before April 2026 fail to load adapters of `in_proj_z` (vllm#36478, vllm#38927), and "
            "versions 0.21 to 0.24 fail if only one of `in_proj_qkv` and `in_proj_z` has adapters (vllm#47639). "
            "llama.cpp does not convert such adapters to GGUF (llama.cpp#21125): convert the merged model."
        )
    return [*notes, *filter(None, [gates_note(modules)])]


def _vllm_command(
    config: dict[str, Any], base: str, positions: int, adapter: dict[str, Any], refusals: list[str]
) -> str:
    """The command that serves the model or adapter with vLLM from its folder."""
    length = f"--max-model-len {positions}"
    if not adapter:
        return f"vllm serve . {length}" + " --dtype float32" * (config.get("dtype") == "float32")  # else 16 bits
    if refusals:
        return f"fxtune merge . ../merged\nvllm serve ../merged {length}"
    overrides = vllm.rope_overrides(config, positions)
    rank = vllm.max_rank(adapter["r"])
    return (
        f"vllm serve {shlex.quote(base or 'BASE')} --enable-lora --max-lora-rank {rank} --lora-modules tuned=. \\\n"
        f"    --hf-overrides {shlex.quote(overrides)} \\\n    {length}"
    )


def _table(rows: dict[str, Any]) -> str:
    cells = [
        (name, f"{value:.6g}" if isinstance(value, float) else _escaped(value))
        for name, value in rows.items()
        if value not in (None, "")
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def _escaped(value: Any) -> str:
    """A value as one line of Markdown. Its markup is escaped, because a name may have any characters."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", str(value).replace("\n", " "))
