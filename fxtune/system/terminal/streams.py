"""Standard input, output and error. A supervisor may start a process with some of them closed."""

import os
import sys


def open_closed_streams() -> None:
    """Open the null device in place of each closed standard stream. Otherwise Python has no stream there, and the next
    file that is opened gets the stream's number: what libraries and child processes print would go into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
