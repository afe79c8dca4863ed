"""keys.txt holds every key, command and option: what a user can type changes only where this file changes."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from dataclasses import dataclass, field

from support.documents import ROOT

from fxtune.config.introspection import Slot

sys.path.insert(0, str(ROOT / "scripts" / "make"))
import keys

sys.path.remove(str(ROOT / "scripts" / "make"))


def test_no_key_and_no_option_has_changed_unseen():
    frozen, now = keys.FILE.read_text(), keys.text()
    difference = "\n".join(
        difflib.unified_diff(frozen.splitlines(), now.splitlines(), "keys.txt", "now", "", "", 0, "")
    )
    assert frozen == now, f"run `python scripts/make/keys.py` and commit {keys.FILE.name}\n{difference}"


def test_a_new_key_a_new_range_and_a_new_default_are_seen():
    @dataclass
    class Section:
        lr: float = field(default=0.1, metadata={"above": 0})

    lines = list(keys.keys(Slot(Section)))
    assert lines == ["lr: float, above 0 = 0.1"]
    changed = [
        [("lr", float, field(default=0.2, metadata={"above": 0}))],
        [("lr", float, field(default=0.1, metadata={"min": 0}))],
        [("lr", int, field(default=0.1, metadata={"above": 0}))],
        [("lr", float, field(default=0.1, metadata={"above": 0})), ("new", str, field(default="x"))],
    ]
    for fields in changed:
        assert list(keys.keys(Slot(dataclasses.make_dataclass("Section", fields)))) != lines
