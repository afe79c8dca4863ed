"""`fxtune chat RUN`: talk to the model that a run has trained, in the terminal.

    fxtune chat runs/quickstart                # or its name: fxtune chat quickstart
    fxtune chat quickstart --show both         # the base and the tuned model, side by side
    fxtune chat quickstart/step-87             # a checkpoint of it
    fxtune chat quickstart < prompts.txt       # answers each line of a file or a pipe, and ends

RUN is a run's folder or name, a checkpoint of a run, or the folder of an adapter or a model. Prompts are written as
in training, by the run's chat template. In a terminal the conversation goes on; /new starts another one, Ctrl-D ends.
Each line of a pipe is a separate conversation. Answers are the most likely tokens, unless --temperature is above 0.

`/image FILE` shows a file to a model that reads images. The image belongs to the prompt on the same line, or else to
the next prompt:

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.live import Live
from rich.table import Column, Table

from fxtune.cli.answer import ANSWER
from fxtune.cli.merge import open_adapter, stored_dtype
from fxtune.cli.run_output import OutputKind, RunOutput, find_output
from fxtune.config import compose
from fxtune.data.chat.encode import EncodedGroup, Encoder
from fxtune.data.config import DataConfig, ImageTokensConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.values import RowError
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference, find_image
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError, Stopped
from fxtune.models import load as models
from fxtune.models.end_tokens import end_tokens
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.load import ModelConfig
from fxtune.models.structure import image_arguments
from fxtune.settle.images import image_processor
from fxtune.system import progress
from fxtune.system.console import console, plain, say
from fxtune.training.answers import question_of
from fxtune.training.checkpoint_model import exported_model, run_folder
from fxtune.upstream.transformers import set_attention

Write = Callable[[str], None]
COMMAND = "/image"
ANYWHERE = Path(os.sep)
"""The root folder: a user of the chat may show any file."""


@dataclass
class Speaker:
    """A model, and the conversation as that model has seen it."""

    label: str
    model: Any
    adapter_off: bool = False
    """Whether the speaker is the base: the model with its adapters off."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[Any]:
        with torch.inference_mode(), self.model.disable_adapter() if self.adapter_off else contextlib.nullcontext():
            yield self.model


def run(
    run: str,
    *,
    show: str = "tuned",
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    trust_remote_code: bool = False,
) -> None:
    """Answer the prompts of standard input until it ends. Raises ConfigError for a missing run, or one that has no
    base to show."""
    output = find_output(run)
    with progress.shown("auto" if console().is_terminal else "none"), progress.phase("Loading the model"):
        speakers, tokenizer, images = load_speakers(output, show, trust_remote_code)
    chat = Chat(speakers, tokenizer, output.config, max_new_tokens, temperature, images)
    try:
        if sys.stdin.isatty():
            chat.talk()
        else:
            for line in sys.stdin:
                if (prompt := line.strip()) and chat.take(prompt):
                    chat.start_anew()
    except Stopped as stop:
        stop.outcome = "the chat is over."
        raise


def load_speakers(
    output: RunOutput, show: str, trust_remote_code: bool
) -> tuple[list[Speaker], Any, ImageProcessor | None]:
    """The speakers that `show` names (tuned, base or both), the tokenizer of the run, and the image processor if the
    model reads images."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = str(output.folder)
    if output.kind is OutputKind.checkpoint:
        prepared, tokenizer, _ = exported_model(output.folder, trust_remote_code)
        tuned = prepared.module
        source, hf_config = compose.of_run(run_folder(output.folder), trust_remote_code).model, tuned.config
    elif output.kind is OutputKind.adapter:
        adapter = open_adapter(folder, "loaded", trust_remote_code)
        tuned, tokenizer = adapter.adapt(adapter.build_base(device).module), adapter.tokenizer
        named = (output.config.get("model") or {}).get("tokenizer")  # the run read the image processor from there, too
        source, hf_config = replace(adapter.model, tokenizer=named), adapter.hf_config
    else:
        source = ModelConfig(path=folder, trust_remote_code=trust_remote_code)
        hf_config = models.load_config(source)
        tuned, tokenizer = None if show == "base" else _whole(source, device), models.load_tokenizer(source)
    bounds = (output.config.get("data") or {}).get("image_tokens") or {}
    data = DataConfig(image_tokens=ImageTokensConfig(**bounds))
    images = image_processor(source, data, tokenizer, hf_config)
    if tuned is not None and not kind_of(tuned.config).writes:
        raise ConfigError(
            f"{output.folder} scores documents and writes no answers. docs/reward_models.md shows its use."
        )
    if hasattr(tuned, "peft_config"):
        model = tuned.to(device).eval()
        speakers = [Speaker("base", model, adapter_off=True), Speaker("tuned", model)]
        return [speaker for speaker in speakers if show in (speaker.label, "both")], tokenizer, images
    speakers = []
    if show != "tuned":
        base = ModelConfig(path=_base_of(output), trust_remote_code=trust_remote_code)
        speakers.append(Speaker("base", _whole(base, device)))
    if show != "base":
        speakers.append(Speaker("tuned", tuned.to(device).eval()))
    return speakers, tokenizer, images


def _whole(source: ModelConfig, device: torch.device) -> Any:
    """A model without adapters, in its stored dtype."""
    hf_config = models.load_config(source)
    source = replace(source, dtype=stored_dtype(hf_config, str(source.path)))
    set_attention(hf_config, "eager")  # the kernels that it names may not be installed
    return models.build(source, hf_config, World(device), seed=0).module.eval()


def _base_of(output: RunOutput) -> str:
    model = output.config.get("model") or {}
    if not model.get("path") or model.get("init") == "random":
        raise ConfigError(f"{output.folder} names no base model to show beside it. Leave --show out.")
    return str(model["path"])


class Chat:
    """A conversation with each speaker."""

    def __init__(
        self,
        speakers: list[Speaker],
        tokenizer: Any,
        config: dict[str, Any],
        max_new_tokens: int,
        temperature: float,
        images: ImageProcessor | None = None,
    ) -> None:
        self.speakers, self.tokenizer, self.images = speakers, tokenizer, images
        self.shown: list[str] = []
        """Image files for the next prompt."""
        self.said: list[dict[str, Any]] = []
        """Each prompt with what each speaker answered, for --json."""
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        data = config.get("data") or {}
        template, self.system = data.get("chat_template"), data.get("system")
        self.encoder: Encoder | None = None
        if template or tokenizer.chat_template:
            variables = data.get("chat_template_kwargs")
            self.encoder = Encoder(tokenizer, FORMATS["messages"], template, variables=variables, images=images)
        else:
            say("The model has no chat template, so it continues your text.")
        self.start_anew()

    def start_anew(self) -> None:
        self.shown.clear()
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": self.system}] if self.system else []

    def talk(self) -> None:
        """Read prompts from the terminal until Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lets input() edit the line
        images = "/image FILE shows an image, " if self.images is not None else ""
        say(f"{images}/new starts another conversation, Ctrl-D ends.")
        with contextlib.suppress(EOFError):
            while True:
                prompt = input("> ").strip()
                if prompt == "/new":
                    self.start_anew()
                elif prompt:
                    self.take(prompt)
        say("")

    def take(self, line: str) -> bool:
        """Answer the prompt of a line, and return whether the line has a prompt. Images of the line (`/image FILE`)
        belong to its prompt, or else to the next prompt."""
        try:
            files, prompt = _files_and_prompt(line)
            for file in files:
                self._require_readable(file)
        except RowError as reason:
            say(plain(f"({reason})"))
            self._record(line, error=str(reason))
            return False
        self.shown += files
        if prompt:
            self.reply(prompt)
        return bool(prompt)

    def _require_readable(self, file: str) -> None:
        """Raise RowError if the model cannot see this image."""
        if self.images is None:
            raise RowError("The model reads no images, or its folder has no preprocessor_config.json.")
        if self.encoder is None:
            raise RowError("The model has no chat template, so an image has no place in its prompt.")
        find_image(file, ANYWHERE)

    def _record(self, prompt: str, **answers: Any) -> None:
        self.said.append({"prompt": prompt, **answers})
        ANSWER.put({"answers": self.said})

    def reply(self, prompt: str) -> None:
        """Print what each speaker answers, as it writes."""
        shown, self.shown = self.shown, []
        answers: dict[str, Any] = {}
        if len(self.speakers) > 1 and console().is_terminal:
            answers = self._reply_side_by_side(prompt, shown)
        else:
            for speaker in self.speakers:
                _print_piece(f"{speaker.label}: " * (len(self.speakers) > 1))
                answers[speaker.label] = self.answer(speaker, prompt, _print_piece, shown)
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

                answers[speaker.label] = self.answer(speaker, prompt, write, shown)
        return answers

    def answer(self, speaker: Speaker, prompt: str, write: Write, shown: Sequence[str] = ()) -> dict[str, str]:
        """Write the answer of `speaker` to `prompt`, in pieces, and return {"answer": text}, or {"error": why there is
        none}. The conversation gets the prompt and the answer. `shown`: image files."""
        shown = [os.path.abspath(file) for file in shown]
        parts = [{"type": "image", "image": file} for file in shown]
        content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
        speaker.messages.append({"role": "user", "content": content})
        try:
            for file in shown:
                self._require_readable(file)
            ids, ends, references = self._prompt(speaker.messages)
            tensors = self.images.read(references) if self.images is not None and references else {}
        except (DataError, RowError) as error:  # the conversation goes on without this prompt
            speaker.messages.pop()
            write(f"({error})")
            return {"error": str(error)}
        room = speaker.model.config.get_text_config().max_position_embeddings - len(ids)
        if room <= 0:
            speaker.messages.pop()
            write("(The conversation is longer than the model can read: /new starts another one.)")
            return {"error": "The conversation is longer than the model can read."}
        with speaker.speaking() as model:
            known = end_tokens(model.generation_config)
            given = torch.tensor([ids], device=model.device)
            arguments = image_arguments(model, tensors, given.device)
            if arguments:
                arguments |= images_of(model.config).token_types(model.config, given)
            streamer = _streamer(self.tokenizer, write)
            written = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                streamer=streamer,
                max_new_tokens=min(self.max_new_tokens, room),
                eos_token_id=sorted({*ends, *known, self.tokenizer.eos_token_id} - {None}) or None,
                pad_token_id=self.tokenizer.pad_token_id or 0,
                do_sample=self.temperature > 0,
                temperature=self.temperature or None,
                top_k=None,
                top_p=None,
                **arguments,
            )
        text = self.tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
        speaker.messages.append({"role": "assistant", "content": text.strip() or "..."})
        return {"answer": text.strip()}

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], set[int], Sequence[ImageReference]]:
        """(token ids up to the answer, as in training; tokens that end the answer in training; images of the
        prompt)"""
        if self.encoder is None:
            return self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"], set(), ()
        row = {"messages": [*messages, {"role": "assistant", "content": "x"}]}
        (document,) = self.encoder.encode([row], [ANYWHERE])
        assert not isinstance(document, EncodedGroup)
        question = document if isinstance(document, str) else question_of(row, document, self.tokenizer)
        if isinstance(question, str):
            raise DataError(f"The prompt cannot be written by the chat template: {question}")
        return question.prompt, set() if question.end is None else {question.end}, question.images


def _files_and_prompt(line: str) -> tuple[list[str], str]:
    """(the files of a line, each as `/image FILE`; the prompt after them). A name with spaces is in quotes, or has a
    backslash before each space. Raises RowError if a name is missing."""
    files = []
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


def _streamer(tokenizer: Any, write: Write) -> Any:
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
