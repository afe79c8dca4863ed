"""The small base of equal_loss.py: text, tokenizer, and training from random weights for a given time.

gather.py collects the text, which stays on this machine. fxtune trains with bfloat16 matmuls over float32 weights and
compiled layers on a GPU, in float32 on a CPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
from gather import Document, is_held_out
from make_base import byte_level_bpe

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_BYTES = 20_000_000
"""Upper limit of the text that a tokenizer is trained on."""
ROPE = {"rope_type": "default", "rope_theta": 150000.0}
"""The positions of a gpt-oss of few tokens. By default the type has YaRN, for 131,072 tokens."""


def split(found: Iterable[Document], kept: Path, held: Path, share: float, megabytes: float) -> None:
    """Write documents to two JSONL files until they hold `megabytes` of text.

    About `share` of the documents go to `held`.
    """
    size = 0.0
    with kept.open("w", encoding="utf-8") as kept_file, held.open("w", encoding="utf-8") as held_file:
        for document in found:
            (held_file if is_held_out(document.text, share) else kept_file).write(line(document))
            size += len(document.text.encode()) / 1e6
            if size >= megabytes:
                break


def texts(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for each in lines:
            yield json.loads(each)["text"]


def line(document: Document) -> str:
    return json.dumps(document._asdict(), ensure_ascii=False) + "\n"


def train_tokenizer(found: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a tokenizer on the first TOKENIZER_BYTES."""
    from transformers import PreTrainedTokenizerFast

    bpe = byte_level_bpe(_first(found, TOKENIZER_BYTES), vocabulary, [END_OF_TEXT])
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT).save_pretrained(folder)


def _first(found: Iterable[str], size: int) -> Iterator[str]:
    for text in found:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def base_config(out: Path, name: str, seed: int) -> Any:
    """A config of full training in the folder `out`: on a GPU with bfloat16 matmuls over float32 weights and compiled
    layers.
    """
    import torch

    from fxtune.checkpoint.manager import CheckpointConfig
    from fxtune.config.root import Config, RunConfig
    from fxtune.facts.options import Autocast
    from fxtune.optim.config import OptimizerConfig
    from fxtune.tracking.tracker import DisplayKind, TrackingConfig

    config = Config(
        run=RunConfig(name=name, dir=str(out / name), seed=seed),
        optimizer=OptimizerConfig(weight_decay=0.1, betas=[0.9, 0.95]),
        checkpoint=CheckpointConfig(every=0, keep=1),
        tracking=TrackingConfig(display=DisplayKind.plain),
    )
    config.data.cache_dir = str(out / "cache")
    config.techniques.lora.enabled = False
    if torch.cuda.is_available():
        config.techniques.precision.autocast = Autocast.bfloat16
        config.techniques.compile.enabled = True
    return config


def random_llama(
    tokenizer: Path, hidden: int, layers: int, head: int, context: int, experts: int = 0, mixture: str = "qwen3_moe"
) -> Any:
    """The model config of a Llama with random weights, `hidden` / `head` attention heads and half as many key-value
    heads. `experts`: above 0 the model is a `mixture` (qwen3_moe or gpt_oss) with this many experts in each layer, two
    for each token.
    """
    from transformers import PreTrainedTokenizerFast

    from fxtune.models.load import DType, Init, ModelConfig

    heads = max(hidden // head, 2)
    kind: dict[str, Any] = {"model_type": "llama", "intermediate_size": round(hidden * 2.7 / 64) * 64}
    if experts:
        kind |= {
            "model_type": mixture,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "head_dim": hidden // heads,
        }
    if mixture == "gpt_oss":
        kind |= {"intermediate_size": hidden, "sliding_window": context // 8, "rope_parameters": ROPE}
        del kind["moe_intermediate_size"], kind["norm_topk_prob"]
    return ModelConfig(
        path=None,
        tokenizer=str(tokenizer),
        init=Init.random,
        dtype=DType.float32,
        architecture={
            **kind,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2 or 1,
            "tie_word_embeddings": True,
            "max_position_embeddings": context,
            "vocab_size": len(PreTrainedTokenizerFast.from_pretrained(tokenizer)),
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
    )


def micro_batch(rows: int, length: int, limit: int) -> int:
    """The largest number of rows that divides the step's rows and has at most `limit` tokens."""
    return max(size for size in range(1, rows + 1) if rows % size == 0 and (size == 1 or size * length <= limit))


def train_for(config: Any, seconds: float, limit: int) -> dict[str, Any]:
    """Train for about `seconds`, at most `limit` steps. A trial of a few steps measures the step time and compiles."""
    import torch

    from fxtune.training import trainer

    trial = replace(
        config,
        run=replace(config.run, dir=f"{config.run.dir}-trial"),
        train=replace(config.train, max_steps=8, log_every=1),
    )
    trainer.run(trial)
    log = Path(trial.run.dir, "metrics.jsonl").read_text().splitlines()
    took = [line["train/step_seconds"] for line in map(json.loads, log) if "train/step_seconds" in line]
    steps = max(min(int(seconds / statistics.median(took[3:])), limit), 4)
    config.train.max_steps, config.train.log_every = steps, max(steps // 20, 1)
    torch._dynamo.reset()
    started = time.perf_counter()
    figures = trainer.run(config)
    torch._dynamo.reset()
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "tokens": figures["train/tokens"],
        "tokens_per_second": figures["train/tokens_per_second"],
        "loss": figures["train/loss"],
    }
