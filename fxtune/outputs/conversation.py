"""A conversation with the model that a run has trained. Prompts are written as in training, by the run's chat template
or as plain text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fxtune.config import compose
from fxtune.data.chat.encode import EncodedGroup, Encoder
from fxtune.data.config import DataConfig, ImageTokensConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.values import RowError
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference, find_image
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError
from fxtune.models import load as models
from fxtune.models.end_tokens import end_tokens
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.kinds.scorer import Scorer
from fxtune.models.load import ModelConfig
from fxtune.models.structure import image_arguments
from fxtune.outputs.adapter import open_adapter, stored_dtype
from fxtune.outputs.checkpoint_model import exported_model, run_of
from fxtune.outputs.run_output import OutputKind, RunOutput
from fxtune.settle.images import image_processor
from fxtune.training.answers import question_of
from fxtune.training.run.about import TEXTS
from fxtune.upstream.transformers import set_attention

Write = Callable[[str], None]
ANYWHERE = Path(os.sep)
"""The root folder. A person who chats may show any file."""


@dataclass
class Speaker:
    """A model, and the messages of the conversation as the model has seen it."""

    label: str
    model: Any
    adapter_off: bool = False
    """Whether the speaker is the base: the model with its adapters off."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[Any]:
        with torch.inference_mode(), self.model.disable_adapter() if self.adapter_off else contextlib.nullcontext():
            yield self.model


def load_speakers(
    output: RunOutput, show: str, trust_remote_code: bool
) -> tuple[list[Speaker], Any, ImageProcessor | None]:
    """The speakers that `show` names (tuned, base or both), the tokenizer of the run, and the image processor if the
    model reads images."""
    tuned, tokenizer, source, hf_config = load_tuned(output, show != "base", trust_remote_code)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bounds = (output.config.get("data") or {}).get("image_tokens") or {}
    data = DataConfig(image_tokens=ImageTokensConfig(**bounds))
    images = image_processor(source, data, tokenizer, hf_config)
    if tuned is not None and not (kind := kind_of(tuned.config)).writes:
        scores = kind.head == Scorer.head
        use = f"fxtune chat {output.folder} prints scores" if scores else "sentence-transformers loads it"
        raise ConfigError(f"{output.folder} gives {kind.gives} and writes no answers: {use} (docs/companions.md).")
    if hasattr(tuned, "peft_config"):
        model = tuned.to(device).eval()
        speakers = [Speaker("base", model, adapter_off=True), Speaker("tuned", model)]
        return [speaker for speaker in speakers if show in (speaker.label, "both")], tokenizer, images
    speakers = []
    if show != "tuned":
        own = output.config.get("model") or {}
        if not own.get("path") or own.get("init") == "random":
            raise ConfigError(f"{output.folder} names no base model to show beside it. Leave --show out.")
        base = ModelConfig(path=str(own["path"]), trust_remote_code=trust_remote_code)
        speakers.append(Speaker("base", _whole(base, device)))
    if show != "base":
        speakers.append(Speaker("tuned", tuned.to(device).eval()))
    return speakers, tokenizer, images


def load_tuned(
    output: RunOutput, whole: bool = True, trust_remote_code: bool = False
) -> tuple[Any, Any, ModelConfig, Any]:
    """(the model, its tokenizer, the config that names its files, its Hugging Face config) of a run's output. `whole`:
    whether to load the weights of a model without an adapter; otherwise the model is None."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = str(output.folder)
    if output.kind is OutputKind.checkpoint:
        prepared, tokenizer, _ = exported_model(output.folder, trust_remote_code)
        tuned = prepared.module
        source, hf_config = compose.of_run(run_of(output.folder), trust_remote_code).model, tuned.config
    elif output.kind is OutputKind.adapter:
        adapter = open_adapter(folder, "loaded", trust_remote_code)
        tuned, tokenizer = adapter.adapt(adapter.build_base(device).module), adapter.tokenizer
        named = (output.config.get("model") or {}).get("tokenizer")  # the image processor is in the same folder
        source, hf_config = replace(adapter.model, tokenizer=named), adapter.hf_config
    else:
        source = ModelConfig(path=folder, trust_remote_code=trust_remote_code)
        hf_config = models.load_config(source)
        tuned, tokenizer = _whole(source, device) if whole else None, models.load_tokenizer(source)
    return tuned, tokenizer, source, hf_config


def _whole(source: ModelConfig, device: torch.device) -> Any:
    """A model without adapters, in its stored dtype."""
    hf_config = models.load_config(source)
    source = replace(source, dtype=stored_dtype(hf_config, str(source.path)))
    set_attention(hf_config, "eager")  # the attention kernels that the config names may not be installed
    return models.build(source, hf_config, World(device), seed=0).module.eval()


class Conversation:
    """A conversation with the speakers that `show` names: tuned, base or both. `system`: the text of its system turn;
    empty: no such turn; None: the recipe's `data.system`. Raises ConfigError if the output has no base to show, if its
    model writes no answers, or if it continues text and `system` is given."""

    def __init__(
        self,
        output: RunOutput,
        show: str,
        trust_remote_code: bool = False,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        system: str | None = None,
    ) -> None:
        self.speakers, self.tokenizer, self.images = load_speakers(output, show, trust_remote_code)
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        data = output.config.get("data") or {}
        template, self.recipe_system, self.system = data.get("chat_template"), data.get("system"), system
        self.encoder: Encoder | None = None
        """The encoder that writes prompts by the chat template; None: the model continues plain text."""
        self.continues_text = ""
        """The reason why the model continues plain text; empty if it does not."""
        if output.about(TEXTS):
            self.continues_text = "The run has learned from plain texts, so the model continues your text."
        elif not (template or self.tokenizer.chat_template):
            self.continues_text = "The model has no chat template, so it continues your text."
        else:
            variables, images = data.get("chat_template_kwargs"), self.images
            self.encoder = Encoder(self.tokenizer, FORMATS["messages"], template, variables=variables, images=images)
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all messages but the system turn."""
        if self.continues_text and self.system:
            raise ConfigError(f"{self.continues_text} A text has no system turn: leave it out.")
        system = self.recipe_system if self.system is None else self.system
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": system}] if system else []

    def require_readable(self, file: str) -> None:
        """Raise RowError if the model cannot see this image."""
        if self.images is None:
            raise RowError("The model reads no images, or its folder has no preprocessor_config.json.")
        if self.encoder is None:
            raise RowError("The prompt is a plain text, in which an image has no place.")
        find_image(file, ANYWHERE)

    def answer(self, speaker: Speaker, prompt: str, write: Write, shown: Sequence[str] = ()) -> str:
        """Return the answer of `speaker` to `prompt`, and write it piece by piece. The prompt and the answer join the
        speaker's messages. `shown`: image files. If the model cannot read the prompt, forgets it and raises DataError.
        """
        shown = [os.path.abspath(file) for file in shown]
        parts = [{"type": "image", "image": file} for file in shown]
        content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
        speaker.messages.append({"role": "user", "content": content})
        try:
            for file in shown:
                self.require_readable(file)
            ids, ends, references = self._prompt(speaker.messages)
            tensors = self.images.read(references) if self.images is not None and references else {}
            limit = speaker.model.config.get_text_config().max_position_embeddings
            if len(ids) >= limit:
                raise DataError(
                    f"The conversation has {len(ids):,} tokens, and the model reads {limit:,}. Shorten it, or start "
                    "another one (/new)."
                )
        except DataError:
            speaker.messages.pop()
            raise
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
                max_new_tokens=min(self.max_new_tokens, limit - len(ids)),
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
        return str(text.strip())

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


def _streamer(tokenizer: Any, write: Write) -> Any:
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
