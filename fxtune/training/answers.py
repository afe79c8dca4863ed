"""Asks a model held-out questions, and computes the share of its greedy answers that is exactly right.

A question is a row like the rows of training. The supervised tokens of its last assistant turn are the right answer,
and the tokens before them are the prompt. So prompts have the same tokens as in training, and an answer ends at the
end-of-turn token that the model was trained to write. In a preference pair the chosen answer is right.

Prompts of similar length form a batch (generation.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Optional

from fxtune.checkpoint.run_folder import PICTURES
from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.config import DataConfig, QuestionsConfig, SourceConfig
from fxtune.data.formats.image_parts import IMAGE, MARK, read_content
from fxtune.data.formats.values import RowError
from fxtune.data.images.decode import thumbnail
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference
from fxtune.data.read.row import Row, file_and_place
from fxtune.data.read.sources import open_source
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError, writing
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import device_of
from fxtune.plugins import METRICS
from fxtune.reports.run_files import ANSWERS, PICTURES_OF_QUESTION
from fxtune.system.files.atomic_files import replacing
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal.progress import phase
from fxtune.training.generation import in_batches, likeliest, write


@dataclass(frozen=True)
class Question:
    text: str
    """The last user turn, for display."""
    prompt: list[int]
    """Token ids up to the answer."""
    answer: str
    """The right answer, without special tokens and outer whitespace."""
    end: Optional[int] = None
    """The special token that ends the answer, if the chat template writes one."""
    images: tuple[ImageReference, ...] = ()
    """The images among the tokens of the prompt, in order."""
    row: Row | None = field(default=None, compare=False)
    """The row that was read; None for a question that was made otherwise."""

    @property
    def label(self) -> str:
        """`text` for a terminal. The names of images replace the <image> marks."""
        parts = self.text.split(MARK)
        names = [image.name for image in self.images][1 - len(parts) :] if len(parts) > 1 else []
        if len(names) != len(parts) - 1:  # some marks are text of the row
            return self.text
        return "".join([f"{part}[{name}] " for part, name in zip(parts, names, strict=False)] + parts[-1:])


def load_questions(
    data: DataConfig, tokenizer: Any, images: ImageProcessor | None = None, skips: bool = False
) -> list[Question]:
    """Read the first `data.questions.limit` rows of `data.questions.path` as questions. Their prompts use the chat
    template and the system prompt of `data`. `skips`: leave out bad rows, which a run has put into quarantine.

    Raises DataError if the data does not exist, or if a row cannot be read, has no answer, or names an image that is
    missing or broken. For a row, the error names file and line.
    """
    config = data.questions
    assert config.path is not None
    source = open_source(SourceConfig(path=config.path, limit=config.limit))
    source.keeps_images = images is not None
    form = source.format()
    if not form.is_question:
        raise DataError(
            f"data.questions.path={config.path} holds rows of format {form.name}, which have no question with one "
            "answer. Use chat or prompt/completion rows, or pairs of preferences."
        )
    rows = list(islice(source.rows(), config.limit))
    for row in rows:
        if row.value is None and not skips:
            raise DataError(f"{row.where}: {row.error}")
    rows = [row for row in rows if row.value is not None]
    values = [row.value for row in rows if row.value is not None]
    questions = []
    # Questions are not trained on, so their rows may have unused columns.
    encoder = Encoder.of(data, tokenizer, form, images, unused=None)
    documents = encoder.encode(values, [source.folders.get(file_and_place(row.where)[0]) for row in rows])
    for row, value, document in zip(rows, values, documents, strict=True):
        if isinstance(document, EncodedGroup):  # a pair: the chosen answer is right
            document = document.documents[0]
        question = document if isinstance(document, str) else question_of(value, document, tokenizer)
        if isinstance(question, str):
            if skips:
                continue
            raise DataError(f"{row.where}: {question}")
        questions.append(replace(question, row=row))
    return questions


def answer(
    model: PreparedModel,
    tokenizer: Any,
    questions: Sequence[Question],
    batch_size: int = 32,
    max_new_tokens: int = 64,
    batch_sizes: RowsPerPass | None = None,
    world: World | None = None,
    images: ImageProcessor | None = None,
) -> list[str]:
    """The model's greedy answers, in the order of the questions, without special tokens and outer whitespace.

    The model's mode and the random state do not change. `batch_sizes`: reduces `batch_size` when memory runs out. Each
    rank of `world` answers one batch at a time, and every rank gets all answers. The batches are the same for any
    number of ranks. `images`: the processor for questions with images.

    Raises DataError if an image file has changed since load_questions().
    """
    device = device_of(model.module)
    world, batch_sizes = world or World(device), batch_sizes or RowsPerPass(device)
    ends = {question.end for question in questions if question.end is not None}
    ends |= {tokenizer.eos_token_id} - {None}
    choose, pad = likeliest(world), tokenizer.pad_token_id or 0

    def ask(batch: Sequence[Question]) -> list[str]:
        try:
            written = write(model, ends, pad, max_new_tokens, batch, choose, images)
        except DataError as error:
            raise DataError(f"data.questions: {error}") from None
        return [_text(tokenizer, list(takewhile(lambda token: token not in ends, row))) for row in written.tolist()]

    with phase(f"Asking {len(questions):,} questions", len(questions), "questions", part="questions") as work:
        return in_batches(questions, ask, world, batch_sizes, "questions", batch_size, work)


def exact_match(answers: Sequence[str], questions: Sequence[Question]) -> float:
    """The share of answers that equal the right answer, ignoring outer whitespace."""
    right = sum(given.strip() == question.answer for given, question in zip(answers, questions, strict=True))
    return right / len(questions)


def scores(answers: Sequence[str], questions: Sequence[Question], metrics: Sequence[str]) -> dict[str, float]:
    """The scores by name: exact_match, and the mean of each of `metrics`, which plugins have registered. Raises
    ConfigError if a metric gives no finite number."""
    means = {"exact_match": exact_match(answers, questions)}
    for name in metrics:
        values = [METRICS[name](given, question.answer) for given, question in zip(answers, questions, strict=True)]
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                file = METRICS.added()[name].file
                raise ConfigError(f"{file}: the metric `{name}` gives {value!r}, which is no finite number.")
        means[name] = sum(values) / len(values)
    return means


@dataclass
class AnswerEvaluation:
    """The questions of a run, asked before and after training. Answers are kept in the run folder for resumed runs."""

    config: QuestionsConfig
    tokenizer: Any
    questions: list[Question]
    folder: Path
    answers: dict[str, list[str]] = field(default_factory=dict)
    """The answers by time: "before" or "after" training."""
    images: ImageProcessor | None = None
    judge: Callable[[Sequence[Question], Sequence[str]], float] | None = None
    """A function that gives the mean reward of answers; None: the run has no rewards."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The mean rewards by time, as in `answers`."""

    @staticmethod
    def open(
        data: DataConfig, tokenizer: Any, folder: Path, images: ImageProcessor | None = None
    ) -> AnswerEvaluation | None:
        """Load the questions, and answers that the folder holds. Returns None if `data` has no questions about its
        task. Raises DataError as load_questions() does."""
        config = data.applicable_questions()
        if config.path is None:
            return None
        questions = load_questions(data, tokenizer, images)
        evaluation = AnswerEvaluation(config, tokenizer, questions, folder, images=images)
        for when in ("before", "after"):
            evaluation._read(when)
        return evaluation

    def ask(
        self, model: PreparedModel, when: str, batch_sizes: RowsPerPass | None = None, world: World | None = None
    ) -> dict[str, float]:
        """Ask the questions. Returns the scores() of the answers with keys like questions/exact_match. Unless `when`
        is empty, the answers are kept under this key, and rank 0 writes them to a file. `batch_sizes`, `world`: see
        answer()."""
        config, questions = self.config, self.questions
        limits: Any = dict(max_new_tokens=config.max_new_tokens, batch_sizes=batch_sizes)
        given = answer(model, self.tokenizer, questions, **limits, world=world, images=self.images)
        figures = {f"questions/{name}": score for name, score in scores(given, questions, config.metrics).items()}
        if self.judge is not None:
            figures["questions/reward"] = reward = self.judge(questions, given)
            self.rewards |= {when: reward} if when else {}
        if when:
            self.answers[when] = given
            if world is None or world.main:
                self._write(when)
        return figures

    def _write(self, when: str) -> None:
        lines = [
            json.dumps({**_recorded(question), "answer": text}, ensure_ascii=False)
            for question, text in zip(self.questions, self.answers[when], strict=True)
        ]
        file = self._file(when)
        with writing(f"{file} cannot be written", "or set run.dir to another disk"):
            for question in self.questions[:ANSWERS]:  # thumbnails of the images that the report shows
                for image in question.images[:PICTURES_OF_QUESTION]:
                    picture = self.folder / PICTURES / f"{_digest(image)}.jpg"
                    if picture.exists():
                        continue
                    picture.parent.mkdir(exist_ok=True)
                    with suppress(RowError), replacing(picture) as out:  # an image that has changed is skipped
                        out.write(thumbnail(image.read()))
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def shown(self) -> list[tuple[str, str, str | None, str | None]]:
        """The first `config.show` questions for a terminal, each as (question, right answer, answer before training,
        answer after)."""
        before, after = (self.answers.get(when) for when in ("before", "after"))
        return [
            (question.label, question.answer, before[index] if before else None, after[index] if after else None)
            for index, question in enumerate(self.questions[: self.config.show])
        ]

    def verdict(self) -> str:
        """One sentence with the scores, for the display."""
        scores = [f"{exact_match(given, self.questions):.0%} {when} training" for when, given in self.answers.items()]
        rewards = [f"{reward:.3g} {when} training" for when, reward in self.rewards.items()]
        more = f"; reward: {', '.join(rewards)}" if rewards else ""
        return f"Exactly right on {len(self.questions)} held-out questions: {', '.join(scores)}{more}"

    def _file(self, when: str) -> Path:
        return self.folder / f"answers_{when}.jsonl"

    def _read(self, when: str) -> None:
        try:
            rows = [json.loads(line) for line in self._file(when).read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return  # there are no complete answers, so the run asks again
        asked = [(question.answer, _recorded(question).get("images")) for question in self.questions]
        if [(row.get("right"), row.get("images")) for row in rows] == asked:
            self.answers[when] = [row["answer"] for row in rows]


def _recorded(question: Question) -> dict[str, Any]:
    """A question as an entry in a file of answers."""
    images = [{"name": image.name, "digest": _digest(image)} for image in question.images]
    return {"question": question.text, "right": question.answer, **({"images": images} if images else {})}


def _digest(image: ImageReference) -> str:
    return f"{image.digest:016x}"


def question_of(row: dict[str, Any], document: Document, tokenizer: Any) -> Question | str:
    """The question whose right answer is the row's last run of supervised tokens. If the row has no such question, the
    result is a str that says why."""
    supervised = document.supervised
    if True not in supervised:
        return "the row has no assistant turn with an answer in it"
    end = len(supervised) - supervised[::-1].index(True)
    start = next((index + 1 for index in range(end - 1, -1, -1) if not supervised[index]), 0)
    if start == 0:
        return "the row has an answer and nothing before it, so there is no question"
    prompt, right = document.ids[:start], document.ids[start:end]
    if not (text := _text(tokenizer, right)):
        return "the right answer is empty"
    last = right[-1]
    special = tokenizer.added_tokens_decoder.get(last)
    images = [image for image in document.images if image.start < start]
    return Question(
        _last_user_turn(row) or _prompt_text(tokenizer, prompt, images),
        prompt,
        text,
        last if special and special.special else None,
        tuple(image.image for image in images),
    )


def _last_user_turn(row: dict[str, Any]) -> str | None:
    """The text of a chat row's last user turn, with <image> for each image; None for rows of other formats."""
    chat: list[dict[str, Any]] = next(
        (row[key] for key in ("messages", "prompt") if isinstance(row.get(key), list)), []
    )
    turns = (turn.get("content") for turn in reversed(chat) if turn.get("role") == "user")
    content = next((content for content in turns if content is not None), None)
    return None if content is None else read_content(content, "content")[0].replace(IMAGE, MARK)


def _prompt_text(tokenizer: Any, prompt: list[int], images: Sequence[PlacedImage]) -> str:
    """The text of a prompt, with <image> for each image."""
    ends = [0, *(image.end for image in images)]
    starts = [*(image.start for image in images), len(prompt)]
    return MARK.join(_text(tokenizer, prompt[end:start]) for end, start in zip(ends, starts, strict=True))


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()
