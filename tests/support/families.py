"""Tiny tokenizers with the special tokens of each model family, and the families' chat templates."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"

# family: kind of tokenizer, beginning, end, other special tokens
FAMILIES = {
    "chatml": ("bytelevel", None, "<|im_end|>", ["<|im_start|>"]),
    "llama31": ("bytelevel_trimmed", "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen3": ("bytelevel", None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    "gemma3": ("metaspace", "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": ("metaspace_prefixed", "<s>", "</s>", ["[INST]", "[/INST]"]),
    "phi3": ("metaspace_prefixed", "<s>", "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
    "zephyr": ("metaspace_prefixed", "<s>", "</s>", []),
    "gptoss": ("bytelevel", "<|startoftext|>", "<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"]),
}

# The same for templates as published that write tools and tool calls.
TOOL_FAMILIES = {
    "qwen3": FAMILIES["qwen3"],
    "llama31": FAMILIES["llama31"],
    "mistral_v3": (
        "metaspace_prefixed",
        "<s>",
        "</s>",
        [
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
    ),
    "hermes": ("bytelevel", "<|begin_of_text|>", "<|im_end|>", ["<|im_start|>"]),
    "deepseek": (
        "bytelevel",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        [
            f"<｜tool▁{name}｜>"
            for name in (
                *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end"),
                *("output▁begin", "output▁end", "sep"),
            )
        ]
        + ["<｜User｜>", "<｜Assistant｜>"],
    ),
    "harmony": ("bytelevel", "<|startoftext|>", "<|return|>", [*FAMILIES["gptoss"][3], "<|call|>"]),
    "command": (
        "bytelevel",
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        ["<|START_OF_TURN_TOKEN|>"]
        + [f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")]
        + [f"<|{side}_{part}|>" for side in ("START", "END") for part in ("RESPONSE", "ACTION", "TOOL_RESULT")],
    ),
    "kimi": ("bytelevel", None, "<|end_of_msg|>", ["<|open|>", "<|close|>", "<|sep|>"]),
    "glm": (
        "bytelevel",
        None,
        "<|endoftext|>",
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    ),
}

_TEXT = [
    "the quick brown fox asks: what is two and two?  it is four.\n\nassistant user system tool [/INST] model"
] * 20


def template(family: str, marks: bool) -> str:
    """The family's template. Without `marks` it has no {% generation %} marks, as published."""
    source = (TEMPLATES / f"{family}.jinja").read_text()
    return source if marks else re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)


@lru_cache
def style(family: str) -> str:
    """How the family's tokenizer reads spaces: the text of tokens is exact for `bytelevel`."""
    return (FAMILIES | TOOL_FAMILIES)[family][0]


def tokenizer(family: str, marks: bool = False) -> PreTrainedTokenizerFast:
    style, bos, eos, others = (FAMILIES | TOOL_FAMILIES)[family]
    made = build_tokenizer(style, bos, eos, tuple(others))
    made.chat_template = template(family, marks)
    return made


def build_tokenizer(
    style: str, bos: str | None, eos: str | None, others: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    special = [token for token in ("<unk>", bos, eos, *others) if token]
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=style.startswith("metaspace")))
    alphabet: list[str] = []
    if style.startswith("bytelevel"):
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        prefix = [normalizers.Prepend("▁")] if style == "metaspace_prefixed" else []
        core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_TEXT, trainer)
    written = json.loads(core.to_str())  # byte tokens are ordinary vocabulary entries, as in Llama 2
    written["added_tokens"] = [token for token in written["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(written))
    steps = [processors.ByteLevel(trim_offsets=True)] if style == "bytelevel_trimmed" else []
    if bos:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]))
    if steps:
        core.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, unk_token="<unk>", additional_special_tokens=list(others)
    )
