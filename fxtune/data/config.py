"""The `data` group of a recipe: sources, rows, packing, held-out data and questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Any, Optional

from omegaconf import BooleanNode

from fxtune.data.formats.registry import AUTO, FORMATS
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.stages import length_refusals
from fxtune.errors import ConfigError
from fxtune.plugins import METRICS, ROW_FORMATS


def template_time_now() -> str:
    """The present time, in the form of data.template_time."""
    return datetime.now().isoformat(timespec="seconds")


class TextUnit(str, Enum):
    document = "document"
    paragraph = "paragraph"
    line = "line"


class OnLong(str, Enum):
    split = "split"  # type: ignore[assignment]  # str has a method of that name
    truncate = "truncate"
    drop = "drop"
    error = "error"


class OnOverlap(str, Enum):
    error = "error"
    drop = "drop"
    keep = "keep"


class OnRewritten(str, Enum):
    split = "split"  # type: ignore[assignment]  # str has a method of that name
    context = "context"
    keep = "keep"


class Dedup(str, Enum):
    off = "off"
    exact = "exact"
    near = "near"


class ImageFeatures(str, Enum):
    computed = "computed"
    stored = "stored"


class OnBadRow(str, Enum):
    error = "error"
    quarantine = "quarantine"


class FormatNames:
    """The words that a source's `format` may be."""

    def __iter__(self) -> Iterator[str]:
        yield from (AUTO, *FORMATS, *ROW_FORMATS)


@dataclass
class SourceConfig:
    path: str = "???"
    """A file, a folder, a glob (`**` works), a hub id, or `builtin:NAME` for data that ships with fxtune."""
    format: str = field(default=AUTO, metadata={"kind": str, "words": FormatNames()})
    """The rows' format; `auto` detects it from the first rows and prints it. Plugins add others (docs/plugins.md)."""
    weight: Optional[float] = field(default=None, metadata={"above": 0})
    """Share of the supervised tokens, relative to the weights of the other sources. If no source has a weight, an
    epoch has every row once."""
    split: str = "train"
    """A split, or a slice of one in the notation of the datasets library: train, test, train[:10%], train[100:200],
    train[-5%:]. The splits of a folder are declared in its README.md, or follow from the names of its files
    (docs/data.md)."""
    subset: Optional[str] = None
    """Configuration name of a hub dataset, or of a folder whose README.md declares configurations."""
    revision: Optional[str] = None
    """Branch, tag or commit of a hub dataset."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames columns before the format is detected: {name in the data: name that fxtune reads}. `conv.messages` means
    the key messages of the objects in column conv."""
    unused: list[str] = field(default_factory=list)
    """Columns, and fields of turns, that are left out on purpose. It is an error if another part of a row does not
    reach the text."""
    instruction: Optional[str] = None
    """The text before each query of this source, for objective=embedding. Null: objective.instruction."""
    environment: Optional[str] = None
    """The environment of a plugin whose tools the model may call while it answers this source's prompts (docs/rl.md).
    For objective=policy."""
    text_unit: TextUnit = TextUnit.document
    """What one row of a .txt or .md file is."""
    limit: Optional[int] = field(default=None, metadata={"min": 1})
    """Use only the first `limit` rows. Blank lines of a JSONL file do not count."""
    eval_fraction: Optional[float] = field(default=None, metadata={"min": 0, "below": 1})
    """Hold out this share of the source's documents. Null: the share is data.eval_fraction, or 0 if there are
    data.eval_sources."""

    @property
    def plugin_format(self) -> str:
        """`format` if a plugin defines it; empty for a format of fxtune."""
        return "" if self.format in (AUTO, *FORMATS) else self.format


@dataclass
class QuestionsConfig:
    path: Optional[str] = None
    """Held-out chat rows in any chat format that data.sources takes. The last assistant turn is the reference answer,
    and the turns before it are the question. In a pair of preferences the chosen answer is the reference answer. The
    model answers the questions before and after training. Null: no questions."""
    limit: int = field(default=100, metadata={"min": 1})
    """Use the first `limit` rows."""
    show: int = field(default=3, metadata={"min": 0})
    """The number of questions that are printed with both answers."""
    max_new_tokens: int = field(default=64, metadata={"min": 1})
    """The number of tokens after which an answer is cut off."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of plugins for the answers, beside exact_match. Each is logged as questions/NAME (docs/plugins.md)."""


@dataclass
class MixConfig:
    """Put short and long documents into every step, so that a model learns long documents and keeps its quality on
    short documents. Lengths are counted after data.on_long has split or cut documents."""

    long_share: Optional[float] = field(default=None, metadata={"above": 0, "below": 1})
    """Share of each step's tokens that come from long documents, exact to one row. Null: the share that the data
    has."""
    threshold: int = field(default=8192, metadata={"min": 1})
    """Documents with more tokens than this are long. Set it to the context length that the base model
    was trained with."""


@dataclass
class ImageTokensConfig:
    """Bounds for the tokens of an image. An image outside the bounds is made smaller or larger. Null: the bounds of
    the model. Only for families whose images have more tokens if they are larger (Qwen-VL)."""

    min: Optional[int] = field(default=None, metadata={"min": 1})
    """A smaller image is enlarged to this many tokens."""
    max: Optional[int] = field(default=None, metadata={"min": 1})
    """A larger image is reduced to this many tokens."""


@dataclass
class DataConfig:
    sources: list[SourceConfig] = field(default_factory=list)
    """What the model is trained on: a list of sources, each with its own keys."""
    eval_sources: list[SourceConfig] = field(default_factory=list)
    """Held-out sources for evaluation. If there are any, data.eval_fraction has no effect; the eval_fraction of a
    single source still has."""
    eval_fraction: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """Hold out this share of the documents of `sources`. The content of a document decides whether it is held out. So
    new rows move no document between training and evaluation, and copies of a document are on the same side. In
    preferences the prompt decides."""
    eval_limit: Optional[int] = field(default=None, metadata={"min": 1})
    """Evaluate on at most this many of the held-out documents of each source of `sources`."""
    questions: QuestionsConfig = field(default_factory=QuestionsConfig)
    general: list[SourceConfig] = field(default_factory=lambda: [SourceConfig(path="builtin:general")])
    """Texts or chats about other things than the task. A run with held-out data or questions measures on them, before
    and after training, how far tuning has moved the model: what it has forgotten (docs/forgetting.md).
    `builtin:general` is 64 short passages; for the models that ship with fxtune, sentences like their training data.
    []: nothing is measured."""
    sequence_length: int = field(default=2048, metadata={"min": 2, "max": 2**24})
    """Tokens in a row: at least one to read and one to predict."""
    length_schedule: list[list[Any]] = field(default_factory=list)
    """Let rows grow: with [[0.0, 8192], [0.3, 16384], [0.6, 65536]] rows have 8,192 tokens at first, and 65,536 tokens
    from 60 % of the run's steps on. The last length must be sequence_length, and every earlier length must divide it.
    A step with n times shorter rows has n times more rows, so all steps have room for the same tokens. A document
    longer than a row waits for a later stage of the epoch whose rows hold it whole. Text is cut if no such stage
    follows, or if shorter documents do not fill the steps."""
    packing: Any = field(default=AUTO, metadata={"kind": bool, "words": (AUTO,)})
    """Put several documents into one row; they cannot attend to each other. False: one document a row, with padding.
    `auto`: true if the model and its attention keep documents apart and there are no `buckets`. Otherwise false, and a
    line says why."""
    buckets: list[int] = field(default_factory=list, metadata={"min": 1})
    """Without packing: the lengths to pad to, ascending. Empty: pad to the longest document of the micro-batch; with
    packing=auto and the compiler, to an eighth, a quarter, a half or all of sequence_length."""
    share_prompts: Any = field(default=AUTO, metadata={"kind": bool, "words": (AUTO,)})
    """Compute the common prompt of a pair of answers only once. Both answers see the prompt, and not each other. The
    numbers stay the same. `auto`: true if rows are packed and the attention supports shared prompts. Otherwise false,
    and a line says why."""
    on_long: OnLong = OnLong.split
    """What to do with a document longer than sequence_length. `split` divides text anywhere, and chats at their turns,
    with the system prompt in each piece. In a row of preferences `truncate` cuts the beginning of the prompt, never an
    answer. Such a row cannot be divided: with `split` a long row is an error."""
    image_tokens: ImageTokensConfig = field(default_factory=ImageTokensConfig)
    image_features: ImageFeatures = ImageFeatures.computed
    """Where the decoder's features of images come from. `computed`: the vision encoder runs in each step. `stored`: a
    frozen vision encoder runs once for each image, before the first step, and later runs with the same encoder and
    tokens read the features beside the tokens. 1,024 features of width 3,584 take 7.3 MB in bfloat16."""
    mix: MixConfig = field(default_factory=MixConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    on_overlap: OnOverlap = OnOverlap.error
    """What to do with rows of `sources` that `eval_sources` or `questions` also have. Rows are compared by their
    tokens, rows of preferences by the tokens of their prompts. `drop`: leave these rows out of training. `keep`: train
    on them."""
    dedup: Dedup = Dedup.off
    """Use each document of `sources` once. `exact`: leave out documents with the same tokens as an earlier one.
    `near`: also leave out documents that are similar to an earlier document, or to a document of eval_sources. A
    document that is left out is neither trained on nor held out."""
    dedup_similarity: float = field(default=0.8, metadata={"above": 0, "max": 1})
    """With `near`: documents are similar if their sets of 5-grams of tokens have this Jaccard similarity or more."""
    on_bad_row: OnBadRow = OnBadRow.error
    """What to do with a row that cannot be used. `quarantine` writes it to quarantine.jsonl in
    the run folder and goes on."""
    on_rewritten: OnRewritten = OnRewritten.split
    """What to do with turns that the chat template rewrites when another turn follows (Qwen3 and gpt-oss: it drops the
    reasoning of earlier answers). `split`: make a document for each question, which ends with the answer, as in
    generation. `context`: do not learn such turns. `keep`: learn such turns as the whole chat has them."""
    chat_template: Optional[str] = None
    """A Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, in training, evaluation and questions: {enable_thinking: false}. A row
    can set other values in a column chat_template_kwargs."""
    template_time: Optional[str] = None
    """The date and time that a chat template writes with strftime_now, such as 2026-11-25T09:00. Null: the time of the
    run's first start. A resumed run keeps this time."""
    system: Optional[str] = None
    """A system message for each chat that has none, in training, evaluation and questions. Null: none is added."""
    workers: int = field(default=0, metadata={"min": 0, "max": 1024})
    """Processes that tokenize; 0: one per core."""
    cache_dir: Optional[str] = None
    """The folder that keeps the tokens of sources. Null: $XDG_CACHE_HOME/fxtune, or ~/.cache/fxtune."""
    cache_days: Optional[int] = field(default=30, metadata={"min": 1})
    """When new tokens are cached, remove tokens that no run has used for this many days, and
    print a line. Null: keep all."""

    def __post_init__(self) -> None:
        for name in ("packing", "share_prompts"):
            if (value := getattr(self, name)) != AUTO:  # as OmegaConf reads a bool: true, "true", 1, yes, on
                setattr(self, name, BooleanNode().validate_and_convert(value))

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents. An undecided `auto` counts as true, unless there are buckets."""
        return not self.buckets if self.packing == AUTO else bool(self.packing)

    @property
    def shares_prompts(self) -> bool:
        """Whether a row has the prompt of a pair only once. An undecided `auto` counts as false. Rows that are not
        packed have whole documents."""
        return self.share_prompts is True and self.packs

    @property
    def has_tools(self) -> bool:
        """Whether answers may call tools of an environment."""
        return any(source.environment for source in (*self.sources, *self.eval_sources))

    @property
    def held_out_shares(self) -> tuple[float, ...]:
        """For each of `sources`, the share of its documents that is held out of training."""
        common = 0.0 if self.eval_sources else self.eval_fraction
        return tuple(common if source.eval_fraction is None else source.eval_fraction for source in self.sources)

    def mean_row_length(self) -> float:
        """Mean tokens in a row, over the steps of the run."""
        stages = [*(self.length_schedule or [[0.0, self.sequence_length]]), [1.0, self.sequence_length]]
        return float(sum((end - begin) * length for (begin, length), (end, _) in pairwise(stages)))

    @property
    def holds_out(self) -> bool:
        """Whether there is held-out data to evaluate on."""
        shares = self.held_out_shares or (self.eval_fraction,)  # a recipe may have no sources yet
        return bool(self.eval_sources) or any(shares)

    def applicable_questions(self) -> QuestionsConfig:
        """`questions`. They lose their path if they ship with fxtune and data.sources names no data that does."""
        shipped = any(source.path.startswith("builtin:") for source in self.sources)
        foreign = (self.questions.path or "").startswith("builtin:") and not shipped
        return replace(self.questions, path=None) if foreign else self.questions

    def unasked(self) -> list[str]:
        """A line if applicable_questions() leaves the questions out."""
        if self.applicable_questions() is self.questions:
            return []
        return [
            f"data.questions.path={self.questions.path} belongs to data that ships with fxtune, which data.sources "
            "does not name: no questions are asked. Name held-out chats of your own there."
        ]

    def row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows can have, ascending; empty if any length is possible.

        The lengths are the buckets shorter than `sequence_length`, the lengths of `length_schedule`, and the longest
        row: the first bucket that holds `sequence_length` tokens, or `sequence_length` if there is no such bucket or
        rows grow.
        """
        stages = [int(length) for _, length in self.length_schedule]
        if self.packs:
            return tuple(stages) or (self.sequence_length,)
        if not self.buckets:
            return ()
        shorter = sorted(length for length in {*self.buckets, *stages} if length < self.sequence_length)
        if stages:
            return (*shorter, self.sequence_length)
        longest = next((length for length in self.buckets if length >= self.sequence_length), self.sequence_length)
        return (*shorter, longest)

    def source_weights(self) -> Optional[tuple[float, ...]]:
        """The weight of each source; None if no source has one. Raises ConfigError if only some have one."""
        weights = tuple(float(source.weight) for source in self.sources if source.weight is not None)
        if weights and len(weights) < len(self.sources):
            without = ", ".join(source.path for source in self.sources if source.weight is None)
            raise ConfigError(
                f"data.sources: {without} without a weight while others have one. Give every source a weight, or none."
            )
        return weights or None

    def with_format(self, name: str) -> DataConfig:
        """These settings, with the row format `name` in sources whose format is `auto`."""

        def settled(sources: list[SourceConfig]) -> list[SourceConfig]:
            return [replace(each, format=name) if each.format == AUTO else each for each in sources]

        return replace(self, sources=settled(self.sources), eval_sources=settled(self.eval_sources))

    def validate(self) -> None:
        """Raise ConfigError for settings that contradict each other, before any file is read."""
        if self.template_time is not None:
            try:
                datetime.fromisoformat(self.template_time)
            except ValueError:
                raise ConfigError(
                    f"data.template_time={self.template_time} is no date and time: write 2026-11-25 or "
                    "2026-11-25T09:00."
                ) from None
        for name in self.questions.metrics:
            if name not in METRICS:
                raise ConfigError(f"data.questions.metrics: {METRICS.unknown(name)}")
        if self.buckets and self.packs:
            raise ConfigError(
                "data.buckets sets the lengths that single documents are padded to, but data.packing=true makes "
                f"every row {self.sequence_length} tokens long. Set data.packing=false, or data.buckets=[]."
            )
        if any(low >= high for low, high in pairwise(self.buckets)):
            raise ConfigError(f"data.buckets={list(self.buckets)}: give lengths in ascending order, each once.")
        if wrong := length_refusals(self.length_schedule, self.sequence_length):
            raise ConfigError(wrong[0])
        weights = self.source_weights()
        if any(source.weight is not None for source in self.eval_sources):
            raise ConfigError(
                "data.eval_sources have no weights: every document is evaluated once. Remove weight there."
            )
        if any(source.eval_fraction is not None for source in self.eval_sources):
            raise ConfigError("data.eval_sources are held out as a whole. Remove eval_fraction there.")
        if any(source.weight is not None or source.eval_fraction is not None for source in self.general):
            raise ConfigError("data.general is never trained on. Remove weight and eval_fraction there.")
        if self.mix.long_share is None:
            return
        if self.mix.threshold >= self.sequence_length:
            raise ConfigError(
                f"data.mix.threshold={self.mix.threshold}: no document can be longer than "
                f"data.sequence_length={self.sequence_length}, so none would be long. Set a smaller threshold: the "
                "context length that the base model was trained with."
            )
        if self.length_schedule:
            raise ConfigError(
                "data.mix.long_share sets the share of long documents in every step, and data.length_schedule makes "
                "long documents wait for longer rows. Leave one of the two keys out."
            )
        if weights is not None:
            raise ConfigError(
                "data.mix.long_share and the weights of data.sources both set how often a document is used. Keep one: "
                "remove the weights, or set data.mix.long_share=null."
            )
