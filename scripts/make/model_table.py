"""Tries `techniques=[lora,fast]` on every causal architecture of the installed transformers, on rows of text, and writes
the table of docs/models.md.

Each architecture gets a tiny model with random weights: the sizes of its config's defaults are made small by their
names (`tiny`). Then fxtune trains it for two steps with adapters and the fast settings, as for a user, but without the
compiler's last stage: the layers are traced, and the graphs run as they are.

    python scripts/make/model_table.py --write               # all that docs/models.md lacks; all take 20 minutes
    python scripts/make/model_table.py --write llama         # this row of docs/models.md again
    python scripts/make/model_table.py llama qwen3_moe       # prints these rows, and changes no file
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from fxtune.config.compose import load
from fxtune.errors import ConfigError, UserError, first_line
from fxtune.models.kinds.image_families import FAMILIES as IMAGE_FAMILIES
from fxtune.models.load import Init
from fxtune.techniques.liger.technique import FAMILIES
from fxtune.tracking import display
from fxtune.training import trainer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = "| model type | `[lora,fast]` | adapters on | packed rows | compiled layers | Liger's kernels | images |"
WRITE = "--write"
VOCABULARY = 1024
"""Tokens of the built-in tokenizer."""
WIDTHS = re.compile(
    r"(hidden_size|hidden_size_global|hidden_dim|d_model|n_embd|dim|emb_dim|embedding_dim|embedding_size|attention_hidden_size|lru_width|"
    r"(in|out)put_embedding_size|word_embed_proj_dim|backbone_hidden_size|adapter_in_dim|adapter_input_size|dim_model_base)$"
)
COUNTS = {
    r"_?(num_)?(hidden_|encoder_|decoder_)?(layers|blocks)$|n_layers?$|num_layers_per_stack$": 2,
    r"moe_intermediate_size$|expert_(intermediate|ffn_hidden)_size$": 32,
    r"intermediate_size(_mlp)?$|ffn_dim$|n_inner$|(ffn_hidden|feed_forward|intermediate_multiple)_size$|d?ff$|d_inner$": 96,
    r"(num_key_value_heads|num_kv_heads|linear_num_key_heads|num_query_groups|num_global_key_value_heads)$": 2,
    r"((num|n|attention|conf|mamba|linear|index)_(attention_|value_|kv_)?heads?|num_heads|_heads|n_head)$": 4,
    r"(head_dim|d_head|kv_channels|head_size|dim_head|headdim|_head_dim|hidden_size_per_head)$": 16,
    r"(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|index_topk)$": 2,
    r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$": 4,
    r"(n_group|topk_group|num_expert_group)$": 1,
    r"lora_rank$|state_size$|d_state$": 16,
    r"first_k_dense_replace$|num_dense_layers$": 1,
    r"rotary_dim$": 8,
    r"(mamba_)?n_?groups$|o_groups$": 2,
}
"""A size by the name of its key in a config; the first pattern counts."""
LIMITS = {r"(max_position_embeddings|n_positions|n_ctx|max_seq_len)$": 256, r"(sliding_window|window_size)$": 16}
"""The largest allowed size, by the name of its key."""
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}}
OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": M_ROPE,
    "qwen2_5_vl_text": M_ROPE,
    "qwen3_vl_text": {**M_ROPE, "head_dim": 16},
    "qwen3_vl_moe_text": {**M_ROPE, "head_dim": 16},
    "gemma3": {"mm_tokens_per_image": 4},
    "idefics3_vision": {"patch_size": 28},
    "smolvlm_vision": {"patch_size": 28},
    "qwen2_5_vl_vision": {"out_hidden_size": 64},
    "qwen3_vl_vision": {"out_hidden_size": 64},
    "qwen3_vl_moe_vision": {"out_hidden_size": 64},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 1024},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8},
    "gemma4_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "qk_head_dim": 32, "head_dim": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Keys that are not sizes, or that depend on several."""


@dataclass
class Row:
    kind: str
    result: str
    """`acts`, `refused: ...` or `fails: ...`"""
    adapters: str = ""
    packed: str = ""
    compiled: str = ""

    @property
    def liger(self) -> str:
        return "yes" if self.kind in FAMILIES else ""

    def __str__(self) -> str:
        cells = [f"`{self.kind}`", self.result, self.adapters, self.packed, self.compiled]
        return "| " + " | ".join([*(cell.replace("|", "/") for cell in cells), self.liger, self.images]) + " |"

    @property
    def images(self) -> str:
        """What happens to images: the tests compare each family of IMAGE_FAMILIES with plain transformers."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        if self.kind in IMAGE_FAMILIES:
            return "yes"
        return "no: its text alone is trained" if self.kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else ""


def kinds() -> list[str]:
    """The model types with a causal language model in this transformers, with images or without."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *IMAGE_FAMILIES})


def tiny(kind: str) -> dict[str, Any]:
    """A tiny `model.architecture` of this model type. Raises ConfigError if its config class refuses its own defaults."""
    try:
        defaults = transformers.CONFIG_MAPPING[kind]().to_dict()
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"its config class refuses its own defaults: {first_line(error)}") from error
    return {"model_type": kind, **_small(defaults, kind)}


def _small(values: dict[str, Any], kind: str) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = {"model_type": value.get("model_type"), **_small(value, value.get("model_type") or "")}
            if not small[key]["model_type"]:
                del small[key]["model_type"]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = _size(key, value, values)
            if size != value:
                small[key] = size
    return {**small, **OWN.get(kind, {})}


def _size(key: str, value: int, values: dict[str, Any]) -> int:
    if key == "vocab_size":
        return VOCABULARY
    if key.endswith("vocab_size"):
        return min(value, VOCABULARY)
    if key.endswith(("_token_id", "_token_index")):
        return value if value < VOCABULARY - 24 else 3
    if WIDTHS.match(key):
        return 64
    if values.get("kv_lora_rank") and key == "num_key_value_heads":
        return 4
    for pattern, limit in LIMITS.items():
        if re.search(pattern, key):
            return min(value, limit)
    return next((size for pattern, size in COUNTS.items() if value > 0 and re.search(pattern, key)), value)


def attempt(kind: str, chats: Path, folder: Path) -> Row:
    """Train a tiny model of this type for two steps, in `folder`. `chats`: see write_chats()."""
    said: list[str] = []
    torch._dynamo.reset()
    shutil.rmtree(folder, ignore_errors=True)
    keys = {
        "techniques": "[lora,fast]",
        "data.sources": f"[{{path: {chats}}}]",
        "data.sequence_length": 64,
        "data.cache_dir": chats.parent / "cache",
        "train.max_steps": 2,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 4,
        "tracking.display": "none",
        "run.dir": folder,
    }
    printed = io.StringIO()
    try:
        config = load([f"{key}={value}" for key, value in keys.items()])
        config.model.init, config.model.architecture = Init.random, tiny(kind)
        with _collect_notes(said), contextlib.redirect_stdout(printed):
            trainer.run(config)
    except UserError as error:
        return Row(kind, f"refused: {_refusal(str(error))}")
    except Exception as error:  # noqa: BLE001  the table says which architectures fail, and how
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().split("\n")[0]
        return Row(kind, f"fails: {type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})")
    evidence = json.loads((folder / "evidence.json").read_text())
    adapters = next(one["observed"] for one in evidence if one["asked"].startswith("adapters of rank"))
    experts = any(one["asked"].startswith("adapters of experts") for one in evidence)
    lines = [*said, *printed.getvalue().splitlines()]
    return Row(kind, "acts", _adapters(adapters, experts), _decision("packing", lines), _decision("compile", lines))


@contextlib.contextmanager
def _collect_notes(said: list[str]) -> Iterator[None]:
    """Append the notes of runs to `said`."""
    own = display.Display.note
    display.Display.note = lambda self, text: said.append(text)  # type: ignore[method-assign]
    try:
        yield
    finally:
        display.Display.note = own  # type: ignore[method-assign]


def _decision(topic: str, lines: list[str]) -> str:
    """`yes`, or why `topic` is off."""
    start = f"{topic}: off, because "
    for number, line in enumerate(lines):
        if line.startswith(start):
            reason = line.removeprefix(start).split(";")[0]
            if "cannot be one graph" in reason:  # the place and the reason are in the next line
                reason = "graph break at " + lines[number + 1].strip()
            return f"no: {_short(reason)}"
    return "yes"


def _adapters(observed: str, experts: bool) -> str:
    parts = observed.partition(": ")[2].split("; left out ")
    left = [reason for part in parts[1:] if "expert" in (reason := part.partition(")")[0].strip("("))]
    return "linears" + " and experts" * experts + "".join(f" (not: {reason})" for reason in left)


def _refusal(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0])


def _short(text: str) -> str:
    return text if len(text) <= 150 else text[:147] + "..."


def write_chats(folder: Path) -> Path:
    """24 short conversations, of nearly one length, so that few lengths are compiled."""
    draw, file = random.Random(0), folder / "chats.jsonl"
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair"]
    with file.open("w") as out:
        for _ in range(24):
            messages = [
                {"role": role, "content": " ".join(draw.choices(words, k=7))} for role in ("user", "assistant")
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def rows_of(page: str) -> dict[str, str]:
    """The rows of a page by model type."""
    return {match[1]: match[0] for match in re.finditer(r"^\| `([\w.-]+)` \|.*$", page, re.M)}


def merged(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows in place of those of the same model types, sorted, and with the number of types tried."""
    every = {**rows_of(page), **{row.kind: str(row) for row in rows}}
    table = "\n".join([HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", *(every[kind] for kind in sorted(every))])
    said = f"{len(every)} of {len(kinds())} causal model types of transformers {transformers.__version__}"
    text = re.sub(r"\d+ of \d+ causal model types of transformers [\w.]+", said, page.split(HEAD)[0])
    return f"{text}{table}\n"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    known = rows_of(PAGE.read_text()) if WRITE in names else {}
    names = [name for name in names if name != WRITE] or [kind for kind in kinds() if kind not in known]
    with tempfile.TemporaryDirectory() as scratch:
        chats = write_chats(Path(scratch))
        for kind in names:
            row = attempt(kind, chats, Path(scratch) / "run")
            print(row, flush=True)
            if WRITE in sys.argv:  # after each row, so that the next call continues an interrupted one
                PAGE.write_text(merged(PAGE.read_text(), [row]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1:])
