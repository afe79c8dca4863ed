"""A small tokenizer, and a function that tokenizes a path into a cache of the test's own."""

import pytest
from support.rows import TOKENIZE_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.read import sources
from fxtune.data.tokenized import tokenize as tokens
from fxtune.data.tokenized.tokenize import tokenize


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        ["what is the colour of answer number"] * 9,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TOKENIZE_TEMPLATE
    return fast


@pytest.fixture
def table_of(tokenizer, tmp_path):
    """Tokenize a path with the given settings, with a cache in tmp_path."""

    def call(
        path,
        quarantine=None,
        progress=False,
        workers=1,
        on_bad_row=OnBadRow.error,
        chat_template=None,
        sequence_length=2048,
        **source,
    ):
        data = DataConfig(
            cache_dir=str(tmp_path / "cache"),
            workers=workers,
            on_bad_row=on_bad_row,
            chat_template=chat_template,
            sequence_length=sequence_length,
        )
        return tokenize(SourceConfig(path=str(path), **source), data, tokenizer, quarantine, progress)

    return call


@pytest.fixture
def many_shards(monkeypatch):
    """Files of a few kilobytes are cut into many shards and go to worker processes."""
    monkeypatch.setattr(sources, "SHARD_BYTES", 500)
    monkeypatch.setattr(tokens, "IN_PROCESS_BYTES", 0)
