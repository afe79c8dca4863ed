"""A panic of the tokenizers library is a configuration error, and what native code prints otherwise is not lost."""

import os
from contextlib import suppress

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fxtune.errors import ConfigError
from fxtune.upstream.tokenizers import one_panic, panics_as_errors


@pytest.fixture(scope="module")
def backtracking() -> Tokenizer:
    found = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    return found


def test_a_panic_is_a_configuration_error(backtracking):
    with pytest.raises(ConfigError, match=r"model\.tokenizer"), panics_as_errors():
        backtracking.encode("a" * 40 + "b")


def test_panics_of_a_batch_print_nothing(backtracking, capfd):
    with pytest.raises(ConfigError), one_panic():
        backtracking.encode_batch(["a" * 40 + "b"] * 3)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_other_output_and_other_errors_pass(capfd):
    with one_panic():
        os.write(2, b"said")
    with suppress(KeyError), one_panic():
        os.write(2, b" and raised")
        raise KeyError
    assert capfd.readouterr().err == "said and raised"
