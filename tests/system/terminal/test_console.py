"""Tables of the console."""

import re

from fxtune.system.terminal.console import answers_table, console, table

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def rendered(what, width=120):
    with console().capture() as capture:
        console().print(what, width=width)
    return capture.get()


def test_tables_show_foreign_text_without_markup():
    evil = "[red]x[/red] [/] \x1b[2J\x07 [link=http://e.org]"
    out = ANSI.sub("", rendered(table(evil, [evil, "n"], [[evil, 3]])))
    assert out.count("[red]x[/red] [/] ␛[2J␇ [link=http://e.org]") == 3
    assert "\x1b[2J" not in rendered(table(evil, ["a", "b"], [[evil, 3]]))


def test_right_answers_have_a_tick():
    rows = [("q1", "four", "five", "four"), ("q2", "six", "six ", "[b]seven")]
    lines = [line for line in rendered(answers_table(rows)).splitlines() if "q1" in line or "q2" in line]
    assert re.search(r"q1 .*four .*✗ five .*✓ four", lines[0])
    assert re.search(r"q2 .*six .*✓ six .*✗ \[b\]seven", lines[1])
    assert "before" not in rendered(answers_table([("q", "a", None, "a")]))
