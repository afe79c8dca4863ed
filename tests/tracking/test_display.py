import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.errors import ConfigError
from fxtune.system.terminal.console import console
from fxtune.techniques.base import Evidence
from fxtune.tracking.display import (
    TimeLeft,
    clock_time,
    display,
    evidence_table,
    figures,
    sparkline,
)

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
METRICS = {
    "train/step": 3,
    "train/loss": 1.23456,
    "train/lr": 1e-4,
    "train/tokens_per_second": 12345.6,
    "train/mfu": 0.4123,
    "train/memory_gib": 23.8,
    "train/data_wait": 0.004,
}


def rendered(what, width=120):
    with console().capture() as capture:
        console().print(what, width=width)
    return capture.get()


# --- without a terminal


def test_plain_display_prints_one_line_per_log_interval(capsys):
    now = [0.0]
    with display("auto", clock=lambda: now[0]) as shown:
        shown.start(400, "my run")
        for step in (1, 2, 3):
            now[0] += 10.0 if step == 1 else 2.0  # the first step compiles
            shown.log(step, METRICS)
        shown.log(3, {"eval/loss": 2.0, "eval/perplexity": 7.389, "new thing/x": 1, "train/loss": float("nan")})
        shown.note("[bold]a note[/bold] with /a/path[0]")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert (
        lines[2]
        == "step=3/400 loss=1.2346 lr=1.00e-04 tok/s=12346 mfu=0.412 mem_gib=23.80 data_wait=0.004 left=0:13:14"
    )
    assert lines[3].startswith("step=3/400 loss=nan eval_loss=2.0000 eval_perplexity=7.389 new_thing_x=1")
    assert lines[4] == "[bold]a note[/bold] with /a/path[0]"
    assert len(lines) == 5


def test_long_lines_are_not_folded(capsys):
    shown = display("plain")
    shown.start(10, "run")
    shown.log(1, {f"group/metric_{at}": at for at in range(60)})
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_none_prints_nothing_and_rich_needs_a_terminal(capsys):
    shown = display("none")
    shown.start(2, "run")
    shown.log(1, METRICS)
    shown.note("x")
    shown.finish()
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="no terminal"):
        display("rich")


@pytest.mark.slow
def test_run_goes_on_when_the_reader_of_its_output_dies():
    code = (
        "from fxtune.tracking.display import display\nimport sys\nd = display('auto'); d.start(20000, 'r')\n"
        "for step in range(20000): d.log(step, {'train/loss': 1.0})\nd.finish()\nprint('to the end', file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read().strip() == "to the end"
    assert process.wait() == 0


# --- time left


def test_time_left_after_a_resume_uses_this_process_only():
    now = [1000.0]
    pace = TimeLeft(total=1000, done=900, clock=lambda: now[0])
    assert pace.left() is None
    now[0] += 30.0  # compiles
    pace.reached(901)
    assert pace.left() == 99 * 30
    for step in range(902, 911):
        now[0] += 2.0
        pace.reached(step)
    assert pace.left() == 90 * 2
    now[0] += 1.5  # it runs down between two log lines
    assert pace.left() == 90 * 2 - 1.5
    pace.reached(1000)
    assert pace.left() == 0


@given(st.integers(0, 10**6))
def test_clock_time_reads_back(seconds):
    days, rest = re.fullmatch(r"(?:(\d+)d)?(.*)", clock_time(seconds)).groups()
    hours, minutes, second = map(int, rest.split(":"))
    assert ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + second == seconds


# --- the course of the loss


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 40))
def test_sparkline_fits_and_spans(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    if len(set(values)) > 1 and len(values) <= width:
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


# --- tables


def test_evidence_table():
    out = rendered(
        evidence_table([Evidence("lora", "r=8", "14 adapters", True), Evidence("rope", "yarn", "unchanged", False)])
    )
    assert re.search(r"lora .*r=8 .*14 adapters .*✓", out)
    assert re.search(r"rope .*yarn .*unchanged .*✗", out)


def test_figures_contain_no_spaces():
    shown = figures({"a b/c": "two words", "train/loss": None})
    assert {column.name: text for column, text in shown.items()} == {"loss": "nan", "a_b_c": "two_words"}


# --- in a pseudo-terminal


PROGRAM = """
import os, sys, time
from fxtune.tracking.display import display
columns = int(sys.argv[-1]) if sys.argv[-1].isdigit() else None
with display("auto") as shown:
    shown.start(40, "quickstart [bold]", done_steps=10)
    for step in range(11, 41):
        shown.log(step, {"train/loss": 3.0 / step, "train/lr": 1e-3, "train/tokens_per_second": 1234.5, "train/mfu": 0.5,
                         "train/memory_gib": 1.5, "train/data_wait": 0.25})
        time.sleep(0.05)
        if step == 15:
            shown.note("saved [checkpoint]")
            print("a stray print")
            while columns and os.get_terminal_size().columns != columns:
                time.sleep(0.01)
        if step == 30 and "fail" in sys.argv:
            raise RuntimeError("boom")
        if step == 30 and "interrupt" in sys.argv:
            raise KeyboardInterrupt
"""


def in_terminal(*arguments, columns=100, then=None, **environment):
    """Run PROGRAM in a pseudo-terminal, resized to `then` columns after its first note, for which PROGRAM waits. Returns its
    output, its exit code, and whether the terminal's settings are unchanged."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments, *([str(then)] if then else [])],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.DEVNULL,
        env={
            **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")},
            "TERM": "xterm-256color",
            "PYTHONIOENCODING": "utf-8",
            **environment,
        },
    )
    seen, ended = b"", False
    os.set_blocking(master, False)
    while True:
        try:
            seen += os.read(master, 65536)
        except BlockingIOError:
            if ended:  # before this read, so nothing can follow
                break
            ended = process.poll() is not None
            time.sleep(0.01)
        if then and b"saved [checkpoint]" in seen:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, then, 0, 0))
            then = None
    after = termios.tcgetattr(slave)
    os.close(master)
    os.close(slave)
    return seen.decode(), process.returncode, before == after


def hidden(out):
    return out.rfind("\x1b[?25l") > out.rfind("\x1b[?25h")


@pytest.mark.slow
def test_live_display_in_a_terminal():
    out, code, same = in_terminal()
    assert (code, same, hidden(out)) == (0, True, False)
    text = ANSI.sub("", out)
    assert "saved [checkpoint]" in text
    assert "a stray print" in text
    last = text[text.rindex("40/40") :]
    assert "quickstart [bold]" in last
    for part in ("loss 0.0750", "lr 1.00e-03", "tok/s 1,234", "MFU 50.0%", "mem 1.50 GiB", "data wait 25.0%"):
        assert part in last, part
    assert re.search("[▁▂▃▄▅▆▇█]{10}", last)
    assert "left" in text
    assert "━" in last


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail", "interrupt"])
def test_terminal_is_restored_after_an_exception(how):
    out, code, same = in_terminal(how)
    assert code != 0
    assert same
    assert not hidden(out)
    assert "30/40" in ANSI.sub("", out)


@pytest.mark.slow
def test_live_display_on_narrow_and_resized_terminals():
    out, code, _ = in_terminal(columns=100, then=32)
    assert code == 0
    text = ANSI.sub("", out)
    lines = re.split(r"[\r\n]+", text[text.rindex("40/40") :])
    assert all(len(line.rstrip()) <= 32 for line in lines), lines
    assert any("loss 0.0750" in line for line in lines)


@pytest.mark.slow
def test_no_color_is_respected():
    out, code, _ = in_terminal(NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-9]|38;5;\d+|9[0-7])m", out)


def test_the_reward_of_rollouts_is_shown_and_its_parts_are_hidden():
    given = {"train/loss": 0.0, "rollout/reward": 0.5, "rollout/reward/exact": 0.5, "rollout/reward_deviation": 0.1}
    assert [column.name for column in figures(given)] == ["loss", "reward"]
