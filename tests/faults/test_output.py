"""The output of a whole run: each phase is announced before it starts, and no kind of output ends the run."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = [
    *("Loading the libraries", "Checking the recipe", "Reading the data", "Tokenizing", "Building the model"),
    *("Trying the loss on a small row", "Trying the techniques", "Making the optimizer"),
    *("Asking 2 questions", "Step 1 of 2", "Exporting the adapter"),
]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def command(folder: Path) -> list[str]:
    """A run of two steps with questions in Chinese."""
    rows = [
        {"messages": [{"role": "user", "content": f"你好 {at}?"}, {"role": "assistant", "content": f"再见 {at}…"}]}
        for at in range(40)
    ]
    for name, part in (("训练.jsonl", rows), ("questions.jsonl", rows[:2])):
        (folder / name).write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in part), encoding="utf-8")
    return [
        *(sys.executable, "-m", "fxtune", "+recipe=quickstart", f"run.dir={folder / 'run'}", "train.max_steps=2"),
        *(f"data.sources=[{{path: '{folder / '训练.jsonl'}'}}]", f"data.questions.path={folder / 'questions.jsonl'}"),
        *(
            "data.questions.max_new_tokens=4",
            f"data.cache_dir={folder / 'cache'}",
            "checkpoint.every=0",
            "data.on_overlap=keep",
        ),
        *("train.micro_batch_size=1", "train.log_every=1", "data.sequence_length=64"),
    ]


def environment(**more: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def require_announced(text: str) -> None:
    """Each phase is announced in order, and before its first figure."""
    assert [name for name in PHASES if name not in text] == [], text
    at = [text.index(name) for name in PHASES]
    assert at == sorted(at), text
    # On a busy machine the live display may draw nothing between the two steps.
    figures = re.search(r"step=1/2|[12]/2 ", text)
    assert figures, text
    assert text.index("Step 1 of 2") < figures.start(), text


@pytest.mark.slow
def test_run_into_an_ascii_pipe_announces_each_phase_and_exits_with_0(tmp_path):
    done = subprocess.run(
        command(tmp_path), capture_output=True, env=environment(PYTHONIOENCODING="ascii", LANG="C"), timeout=600
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr.decode()
    require_announced(text)
    assert "?? 0?" in text, "the question, as far as ASCII can show it"
    assert "\x1b" not in text


@pytest.mark.slow
def test_run_whose_reader_closes_the_pipe_trains_to_the_end(tmp_path):
    log = (tmp_path / "err").open("w")
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=log, env=environment()) as process:
        process.stdout.readline()
        process.stdout.close()
    assert process.returncode == 0
    assert (tmp_path / "err").read_text() == ""
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_run_in_a_narrow_terminal_announces_each_phase_and_shows_progress_within_a_step(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen(
        command(tmp_path), stdin=slave, stdout=slave, stderr=slave, env=environment(TERM="xterm-256color")
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the program has closed the terminal
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0, seen.decode()
    text = ANSI.sub("", seen.decode())
    require_announced(text)
    last = text[text.rindex("2/2 ") :]
    assert last.index("2/2") < last.index("loss"), last
