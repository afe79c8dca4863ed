"""`fxtune chat RUN`: talk to the model that a run has trained, in the terminal.

    fxtune chat runs/quickstart                # or its name: fxtune chat quickstart
    fxtune chat quickstart --show both         # the base and the tuned model, side by side
    fxtune chat quickstart/step-87             # a checkpoint of the run
    fxtune chat quickstart < prompts.txt       # answers each line of a file or a pipe, and ends
    fxtune chat quickstart --system "Be brief."    # a system turn, in place of `data.system`

RUN is a run's folder or name, a checkpoint of a run, or the folder of an adapter or a model. The run's chat template
writes the prompts, as in training. In a terminal all prompts belong to one conversation, until /new starts another
one or Ctrl-D ends the chat. With a pipe each line is a separate conversation. The model answers with the most likely
tokens, unless --temperature is above 0.

A classifier, a reranker or a reward model prints the classes, or the score, of each line:

    echo "you have won a prize" | fxtune chat classify_quickstart
    spam 0.993, fine 0.005, insult 0.002

A line of a reranker has a query, a tab and a candidate; of a reward model a prompt, a tab and an answer; of a
classifier of two texts these two with a tab between them.

If a text may have several classes, the line begins with the classes whose share reaches their threshold.

`/image FILE` shows a file to a model that reads images. The image belongs to the prompt on the same line. On a line
without a prompt, it belongs to the next prompt:

    > /image receipt.jpg What is the total?
    > /image "before the storm.png" /image after.png
    > What has changed?
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from typing import IO, Any

from rich.live import Live
from rich.table import Column, Table

from fxtune.cli.answer import ANSWER
from fxtune.data.formats.values import RowError
from fxtune.errors import ConfigError, DataError, Stopped, nearest
from fxtune.objectives.classification import ALL_ABOVE
from fxtune.outputs.conversation import Conversation, Speaker, Write
from fxtune.outputs.run_output import RunOutput, find_output
from fxtune.outputs.text_classifier import TextClassifier, scores_texts
from fxtune.system.terminal import progress
from fxtune.system.terminal.console import console, plain, say

COMMAND = "/image"
CLASSES = 5
"""The most likely classes of a text that a line shows."""


def run(
    run: str,
    *,
    show: str = "tuned",
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    system: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Answer the prompts of standard input until the input ends. Raises ConfigError if the run does not exist, or has
    no base for --show, or no place for --system. Raises DataError at the end of a pipe if the model cannot read a line
    of it, or at a line that it cannot score."""
    output = find_output(run)
    if scores_texts(output):
        if system or show != "tuned":
            option = "--system" if system else "--show"
            raise ConfigError(f"{option}: {output.folder} scores texts and writes no answers. Leave it out.")
        return _read_texts(output, trust_remote_code)
    with progress.shown("auto" if console().is_terminal else "none"), progress.phase("Loading the model"):
        chat = Chat(Conversation(output, show, trust_remote_code, max_new_tokens, temperature, system))
    try:
        if sys.stdin.isatty():
            say(plain(f"{output.folder} answers."))  # a name may be the name of several runs
            chat.talk()
        else:
            for line in _lines():
                if (prompt := line.strip()) and chat.handle_line(prompt):
                    chat.start_anew()
            if chat.errors:
                raise DataError(f"Lines without an answer: {len(chat.errors)} of {len(chat.said)}. {chat.errors[0]}")
    except Stopped as stop:
        stop.outcome = "the chat is over."
        raise


def _lines() -> IO[str]:
    """Standard input as UTF-8, whatever the locale is. Other bytes become characters that the model's texts refuse."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def _read_texts(output: RunOutput, trust_remote_code: bool) -> None:
    """Print the classes, or the score, of each line of standard input."""
    with progress.shown("auto" if console().is_terminal else "none"), progress.phase("Loading the model"):
        classifier = TextClassifier(output, trust_remote_code)
    thresholds = classifier.thresholds
    if unknown := [name for name in thresholds if name not in classifier.chosen]:
        say(plain(f"No evaluation has chosen a threshold for {', '.join(unknown)}: it is {ALL_ABOVE}."))
    if sys.stdin.isatty():
        say(f"{', a tab and '.join(classifier.parts).capitalize()} a line; Ctrl-D ends.")
    read: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(), 1):
        # Blanks at the edges stay, because training learns a text with them.
        if (text := line.rstrip("\r\n")).strip() or not sys.stdin.isatty():
            try:
                found = classifier.read(text)
            except DataError as reason:
                if not sys.stdin.isatty():
                    raise DataError(f"line {number} of the input: {reason}.") from None
                say(plain(f"({reason})"))
                continue
            shares = ", ".join(f"{name} {number:.3f}" for name, number in list(found.items())[:CLASSES])
            read.append({"text": text, "labels": found})
            if thresholds:
                chosen = [name for name, share in found.items() if share >= thresholds[name]]
                read[-1]["classes"], shares = chosen, f"{', '.join(chosen) or 'no class'} ({shares})"
            say(plain(shares))
            ANSWER.put({"texts": read})


class Chat:
    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.speakers = conversation, conversation.speakers
        self.pending_images: list[str] = []
        """Image files for the next prompt."""
        self.errors: list[str] = []
        """The reason of each prompt that has no answer."""
        self.said: list[dict[str, Any]] = []
        """One dict for each prompt, with the answers of all speakers, for --json."""
        if conversation.continues_text:
            say(conversation.continues_text)

    def start_anew(self) -> None:
        self.pending_images.clear()
        self.conversation.start_anew()

    def talk(self) -> None:
        """Read prompts from the terminal until Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lets input() edit the line
        images = "/image FILE shows an image, " if self.conversation.images is not None else ""
        say(f"{images}/new starts another conversation, Ctrl-D ends.")
        with contextlib.suppress(EOFError):
            while True:
                prompt = input("> ").strip()
                if prompt == "/new":
                    self.start_anew()
                elif prompt:
                    self.handle_line(prompt)
        say("")

    def handle_line(self, line: str) -> bool:
        """Answer the prompt of a line, and return whether the line has a prompt. The images of a line without a prompt
        (`/image FILE`) are kept for the next prompt."""
        try:
            files, prompt = _files_and_prompt(line)
            for file in files:
                self.conversation.require_readable(file)
        except RowError as reason:
            say(plain(f"({reason})"))
            self.errors.append(str(reason))
            self._record(line, error=str(reason))
            return False
        self.pending_images += files
        if prompt:
            self.reply(prompt)
        return bool(prompt)

    def _record(self, prompt: str, **answers: Any) -> None:
        self.said.append({"prompt": prompt, **answers})
        ANSWER.put({"answers": self.said})

    def reply(self, prompt: str) -> None:
        """Print the answer of each speaker while the speaker writes it."""
        shown, self.pending_images = self.pending_images, []
        answers: dict[str, Any] = {}
        if len(self.speakers) > 1 and console().is_terminal:
            answers = self._reply_side_by_side(prompt, shown)
        else:
            for speaker in self.speakers:
                _print_piece(f"{speaker.label}: " * (len(self.speakers) > 1))
                answers[speaker.label] = self._answer(speaker, prompt, _print_piece, shown)
                _print_piece("\n")
        self._record(prompt, **answers)

    def _reply_side_by_side(self, prompt: str, shown: Sequence[str]) -> dict[str, Any]:
        texts, answers = [""] * len(self.speakers), dict[str, Any]()

        def page() -> Table:
            table = Table(*(Column(speaker.label, ratio=1) for speaker in self.speakers), expand=True)
            table.add_row(*map(plain, texts))
            return table

        with Live(page(), console=console(), auto_refresh=False) as live:
            for index, speaker in enumerate(self.speakers):

                def write(piece: str, index: int = index) -> None:
                    texts[index] += piece
                    live.update(page(), refresh=True)

                answers[speaker.label] = self._answer(speaker, prompt, write, shown)
        return answers

    def _answer(self, speaker: Speaker, prompt: str, write: Write, shown: Sequence[str]) -> dict[str, str]:
        try:
            return {"answer": self.conversation.answer(speaker, prompt, write, shown)}
        except DataError as error:
            write(f"({error})")
            self.errors.append(str(error))
            return {"error": str(error)}


def _files_and_prompt(line: str) -> tuple[list[str], str]:
    """(the files that a line names by `/image FILE`, the prompt after these). A file name with spaces is in quotes, or
    has a backslash before each space. Raises RowError if a file name is missing or the command is misspelled."""
    files = []
    word = next(iter(line.split()), "")
    if word.startswith("/") and word != COMMAND and nearest(word, [COMMAND], 0.8):
        raise RowError(f"{word} is no command; did you mean {COMMAND}? A prompt may not begin with it")
    while line.split(maxsplit=1)[:1] == [COMMAND]:
        rest = io.StringIO(line.removeprefix(COMMAND))
        reader = shlex.shlex(rest, posix=True)
        reader.whitespace_split, reader.commenters = True, ""
        try:
            file = reader.get_token()
        except ValueError:
            file = None
        if not file:
            raise RowError(f"{COMMAND} takes the name of a file: {COMMAND} receipt.jpg What is the total?")
        files.append(os.path.abspath(os.path.expanduser(file)))
        line = rest.read().strip()
    return files, line


def _print_piece(piece: str) -> None:
    console().print(plain(piece), end="", soft_wrap=True)
    console().file.flush()
