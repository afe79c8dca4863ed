"""Private parts of the tokenizers library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fxtune.errors import ConfigError, first_line


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ConfigError if the library's Rust code panics in the body, as at a regular expression that never ends.

    What: PanicException of pyo3, a BaseException that no module exports.
    Why: if the library gives up on a regular expression, it raises only this.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"The tokenizer fails on a text ({first_line(error)}): its tokenizer.json has a regular expression that "
            "never ends on this text, or another part that the installed tokenizers cannot run. Name the tokenizer of "
            "another copy of the model in model.tokenizer."
        ) from None


@contextmanager
def one_panic() -> Iterator[None]:
    """panics_as_errors() without the report that Rust prints for each text of a batch. In the body native code's
    stderr is held back. It is dropped after a panic, and otherwise written at the end."""
    try:
        held, shown = os.memfd_create("stderr"), os.dup(2)
    except (AttributeError, OSError):  # not Linux, or stderr is closed
        with panics_as_errors():
            yield
        return
    panicked = False
    os.dup2(held, 2)
    try:
        with panics_as_errors():
            yield
    except ConfigError:
        panicked = True
        raise
    finally:
        os.dup2(shown, 2)
        if not panicked and (size := os.fstat(held).st_size):
            os.write(2, os.pread(held, size, 0))
        os.close(held)
        os.close(shown)
