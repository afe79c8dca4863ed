"""Runs of a multirun, by name. test_main.py has the command lines."""

from __future__ import annotations

import re

from fxtune.cli.invocation import title_of


def test_job_folder_names_differ_and_fit_a_file_system():
    paths = [f"data.sources.0.path=/{path}.jsonl" for path in ("a b/c", "a_b/c", "x" * 300, "x" * 301)]
    titles = [title_of([path], 1) for path in paths]
    assert len(set(titles)) == 4
    assert all(re.fullmatch(r"[\w.=,+-]{1,120}", title) for title in titles)
