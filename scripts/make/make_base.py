"""Makes fxtune/assets/tiny, the base model that ships with fxtune: corpus, tokenizer, pre-training with fxtune, bf16.

    python scripts/make/make_base.py                # 1.5 minutes on an H200; about 30 minutes on a CPU core (extrapolated)
    python scripts/make/make_base.py --work DIR     # the folder of corpus, tokenizer and run; an interrupted run resumes there

Nothing is downloaded: the corpus comes from corpus.py and a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from corpus import documents

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / "fxtune" / "assets" / "tiny"
LIMIT = 6_000_000
"""The most bytes that the folder may have: it is part of every clone and wheel."""

SEED = 0
DOCUMENTS = 110_000
TOKENIZER_DOCUMENTS = 20_000
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Small, so that a rare name is spelled in pieces that are the same with and without a space before the word: copying it
# between quotes is then no new skill.
VOCABULARY = 1024
CONTEXT = 512
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index(TURN_END),
    "pad_token_id": SPECIAL.index(END_OF_TEXT),
}
# GPT-2's split into words, with digits one by one.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_corpus(file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for text in islice(documents(SEED), DOCUMENTS):
            out.write(json.dumps({"text": text}) + "\n")


def byte_level_bpe(texts: Iterable[str], vocabulary: int, special: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer with single digits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[*special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def train_tokenizer(
    texts: Iterable[str],
    folder: Path,
    vocabulary: int = VOCABULARY,
    placeholders: Sequence[str] = (),
    template: str = TEMPLATE,
) -> None:
    """Byte-level BPE with the chat template, saved in `folder`. `placeholders`: special tokens beside SPECIAL."""
    from transformers import PreTrainedTokenizerFast

    from fxtune.export.tokenizer import rename_for_4

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, vocabulary, [*SPECIAL, *placeholders]),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, *placeholders],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    rename_for_4(folder / "tokenizer_config.json")


def pretrain(
    corpus: Path, tokenizer: Path, run: Path, architecture: dict[str, Any] = ARCHITECTURE
) -> dict[str, float]:
    """Full-parameter training on the corpus as text, one epoch, with fxtune. Returns the run's last figures."""
    from fxtune.checkpoint.manager import CheckpointConfig
    from fxtune.config.root import Config, RunConfig, TrainConfig
    from fxtune.data.config import DataConfig, SourceConfig
    from fxtune.models.load import DType, Init, ModelConfig
    from fxtune.optim.config import OptimizerConfig
    from fxtune.optim.schedule import ScheduleConfig
    from fxtune.training import trainer

    config = Config(
        run=RunConfig(name="tiny", dir=str(run), seed=SEED),
        model=ModelConfig(
            path=None, tokenizer=str(tokenizer), init=Init.random, architecture=architecture, dtype=DType.float32
        ),
        data=DataConfig(sources=[SourceConfig(path=str(corpus))], eval_fraction=0.01, sequence_length=CONTEXT),
        train=TrainConfig(epochs=1, micro_batch_size=8, global_batch_size=8, eval_every=500, log_every=20),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1, betas=[0.9, 0.95]),
        schedule=ScheduleConfig(warmup_steps=0.05, min_lr_ratio=0.02),
        checkpoint=CheckpointConfig(every=250, keep=1, keep_best=False),
    )
    config.techniques.lora.enabled = False
    return trainer.run(config)


def minutes(run: Path) -> float:
    """Minutes of all steps, also of those before an interruption."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/step_seconds" in line]
    done = [0, *(line["train/step"] for line in logged)]
    return (
        sum(
            line["train/step_seconds"] * (now - before)
            for line, before, now in zip(logged, done, done[1:], strict=False)
        )
        / 60
    )


def machine() -> str:
    """What this process trains on, in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def ship(
    work: Path, tokenizer: Path, asset: Path, limit: int, readme: str, figures: dict[str, float], **words: Any
) -> None:
    """The model of the run in `work`, in bf16, with its tokenizer and a README, as the asset. `limit`: the most bytes of
    the asset; `figures`: of the run; `words`: other values that `readme` names."""
    import torch
    from transformers import AutoConfig

    from fxtune.export.config import write_rope_for_4
    from fxtune.models.kinds.known import kind_of

    trained = work / "run" / "model"
    config = AutoConfig.from_pretrained(trained)
    model = kind_of(config).model_class(type(config)).from_pretrained(trained, dtype=torch.bfloat16)
    shutil.rmtree(asset, ignore_errors=True)
    model.save_pretrained(asset)
    write_rope_for_4(asset, model.config)
    shutil.copytree(tokenizer, asset, dirs_exist_ok=True)
    text = model.config.get_text_config()
    (asset / "README.md").write_text(
        readme.format(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            context=CONTEXT,
            seed=SEED,
            tokens=int(figures["train/tokens"]),
            steps=int(figures["train/step"]),
            loss=figures["eval/loss"],
            perplexity=figures["eval/perplexity"],
            minutes=minutes(work / "run"),
            machine=machine(),
            torch=torch.__version__,
            **words,
        )
    )
    size = sum(file.stat().st_size for file in asset.iterdir())
    assert size <= limit, f"{asset} has {size} bytes, {limit} are allowed"


README = """\
# tiny

A Llama of {parameters:,} parameters ({layers} layers, hidden size {hidden}, {vocabulary} byte-level BPE tokens,
{context} positions) that fxtune pre-trained from random weights, so that a newcomer can fine-tune a real model on a CPU,
without a hub and an account. It writes simple sentences about people, towns and things, and answers orders to a shop
politely. It knows nothing else.

Made by `python scripts/make/make_base.py`: {documents:,} documents from a generator (`scripts/make/corpus.py`, seed {seed}), no
downloaded text. Full-parameter training with fxtune: {steps:,} steps, {tokens:,} tokens, float32, then stored as bfloat16.
Loss on the held-out 1 %: {loss:.4f} (perplexity {perplexity:.2f}). Its steps took {minutes:.1f} minutes on {machine},
torch {torch}.

Chat markup: `<|im_start|>role`, a newline, the content, `<|im_end|>`; the template marks what the assistant writes with
`{{% generation %}}`. Licence: Apache-2.0, like the code.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "tiny", help="working folder (default: %(default)s)"
    )
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    write_corpus(work / "corpus.jsonl")
    train_tokenizer(islice(documents(SEED), TOKENIZER_DOCUMENTS), work / "tokenizer")
    figures = pretrain(work / "corpus.jsonl", work / "tokenizer", work / "run")
    ship(work, work / "tokenizer", ASSET, LIMIT, README, figures, documents=DOCUMENTS)


if __name__ == "__main__":
    main()
