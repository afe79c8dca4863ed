"""`fxtune chat RUN`: talk to the model that a run has trained, in the terminal.

    fxtune chat runs/quickstart                # or its name: fxtune chat quickstart
    fxtune chat quickstart --show both         # the base and the tuned model, side by side
    fxtune chat quickstart/step-87             # a checkpoint of it
    fxtune chat quickstart < prompts.txt       # answers each line of a file or a pipe, and ends

RUN is a run's folder or name, a checkpoint of a run, or the folder of an adapter or a model. Prompts are written as
in training, by the run's chat template. In a terminal the conversation goes on; /new starts another one, Ctrl-D ends.
Each line of a pipe is a separate conversation. Answers are the most likely tokens, unless --temperature is above 0.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.live import Live
from rich.table import Column, Table

from fxtune.cli.merge import open_adapter, stored_dtype
from fxtune.cli.run_output import OutputKind, RunOutput, find_output
from fxtune.data.chat.encode import EncodedGroup, Encoder
from fxtune.data.formats.registry import FORMATS
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError, Stopped
from fxtune.models import load as models
from fxtune.models.end_tokens import end_tokens
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import ModelConfig
from fxtune.system import progress
from fxtune.system.console import console, plain, say
from fxtune.training.answers import question_of
from fxtune.training.checkpoint_model import exported_model
from fxtune.upstream.transformers import set_attention

Write = Callable[[str], None]


@dataclass
class Speaker:
    """A model, and the conversation as that model has seen it."""

    label: str
    model: Any
    adapter_off: bool = False
    """It is the base of an adapted model."""
    messages: list[dict[str, str]] = field(default_factory=list)

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
        speakers, tokenizer = load_speakers(output, show, trust_remote_code)
    chat = Chat(speakers, tokenizer, output.config, max_new_tokens, temperature)
    try:
        if sys.stdin.isatty():
            chat.talk()
        else:
            for line in sys.stdin:
                if prompt := line.strip():
                    chat.reply(prompt)
                    chat.start_anew()
    except Stopped as stop:
        stop.outcome = "the chat is over."
        raise


def load_speakers(output: RunOutput, show: str, trust_remote_code: bool) -> tuple[list[Speaker], Any]:
    """The speakers that `show` names (tuned, base or both), and the tokenizer of the run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = str(output.folder)
    if output.kind is OutputKind.checkpoint:
        prepared, tokenizer, _ = exported_model(output.folder, trust_remote_code)
        tuned = prepared.module
    elif output.kind is OutputKind.adapter:
        adapter = open_adapter(folder, "loaded", trust_remote_code)
        tuned, tokenizer = adapter.adapt(adapter.build_base(device).module), adapter.tokenizer
    else:
        source = ModelConfig(path=folder, trust_remote_code=trust_remote_code)
        tuned, tokenizer = None if show == "base" else _whole(source, device), models.load_tokenizer(source)
    if tuned is not None and not kind_of(tuned.config).writes:
        raise ConfigError(
            f"{output.folder} scores documents and writes no answers. docs/reward_models.md shows its use."
        )
    if hasattr(tuned, "peft_config"):
        model = tuned.to(device).eval()
        speakers = [Speaker("base", model, adapter_off=True), Speaker("tuned", model)]
        return [speaker for speaker in speakers if show in (speaker.label, "both")], tokenizer
    speakers = []
    if show != "tuned":
        base = ModelConfig(path=_base_of(output), trust_remote_code=trust_remote_code)
        speakers.append(Speaker("base", _whole(base, device)))
    if show != "base":
        speakers.append(Speaker("tuned", tuned.to(device).eval()))
    return speakers, tokenizer


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
        self, speakers: list[Speaker], tokenizer: Any, config: dict[str, Any], max_new_tokens: int, temperature: float
    ) -> None:
        self.speakers, self.tokenizer = speakers, tokenizer
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        data = config.get("data") or {}
        template, self.system = data.get("chat_template"), data.get("system")
        self.encoder: Encoder | None = None
        if template or tokenizer.chat_template:
            variables = data.get("chat_template_kwargs")
            self.encoder = Encoder(tokenizer, FORMATS["messages"], template, variables=variables)
        else:
            say("The model has no chat template, so it continues your text.")
        self.start_anew()

    def start_anew(self) -> None:
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": self.system}] if self.system else []

    def talk(self) -> None:
        """Read prompts from the terminal until Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lets input() edit the line
        say("/new starts another conversation, Ctrl-D ends.")
        with contextlib.suppress(EOFError):
            while True:
                prompt = input("> ").strip()
                if prompt == "/new":
                    self.start_anew()
                elif prompt:
                    self.reply(prompt)
        say("")

    def reply(self, prompt: str) -> None:
        """Print what each speaker answers, as it writes."""
        if len(self.speakers) == 1:
            self.answer(self.speakers[0], prompt, _print_piece)
            _print_piece("\n")
        elif console().is_terminal:
            self._reply_side_by_side(prompt)
        else:
            for speaker in self.speakers:
                _print_piece(f"{speaker.label}: ")
                self.answer(speaker, prompt, _print_piece)
                _print_piece("\n")

    def _reply_side_by_side(self, prompt: str) -> None:
        texts = [""] * len(self.speakers)

        def page() -> Table:
            shown = Table(*(Column(speaker.label, ratio=1) for speaker in self.speakers), expand=True)
            shown.add_row(*map(plain, texts))
            return shown

        with Live(page(), console=console(), auto_refresh=False) as live:
            for index, speaker in enumerate(self.speakers):

                def write(piece: str, index: int = index) -> None:
                    texts[index] += piece
                    live.update(page(), refresh=True)

                self.answer(speaker, prompt, write)

    def answer(self, speaker: Speaker, prompt: str, write: Write) -> None:
        """Pass on the answer of `speaker` to `prompt`, in pieces. It and the prompt join the conversation."""
        speaker.messages.append({"role": "user", "content": prompt})
        try:
            ids, ends = self._prompt(speaker.messages)
        except DataError as error:  # of this prompt, so the conversation goes on
            speaker.messages.pop()
            write(f"({error})")
            return
        room = speaker.model.config.get_text_config().max_position_embeddings - len(ids)
        if room <= 0:
            speaker.messages.pop()
            write("(The conversation is longer than the model can read: /new starts another one.)")
            return
        with speaker.speaking() as model:
            known = end_tokens(model.generation_config)
            given = torch.tensor([ids], device=model.device)
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
            )
        text = self.tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
        speaker.messages.append({"role": "assistant", "content": text.strip() or "..."})

    def _prompt(self, messages: list[dict[str, str]]) -> tuple[list[int], set[int]]:
        """The token ids up to the answer, as in training, and the token that ends it there."""
        if self.encoder is None:
            return self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"], set()
        row = {"messages": [*messages, {"role": "assistant", "content": "x"}]}
        (document,) = self.encoder.encode([row])
        assert not isinstance(document, EncodedGroup)
        question = document if isinstance(document, str) else question_of(row, document, self.tokenizer)
        if isinstance(question, str):
            raise DataError(f"The prompt cannot be written by the chat template: {question}")
        return question.prompt, set() if question.end is None else {question.end}


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
