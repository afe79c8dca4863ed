"""The data of a run. Training, `fxtune preview` and `fxtune plan` all use this module, so they have the same steps and
refuse the same rows. Last in the file: special tokens of the data that the base does not know, at which answers end or
which have no trained row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fxtune.config.root import Config
from fxtune.data.batches.batch_images import LostImageError
from fxtune.data.batches.build import PreparedData, prepare_data
from fxtune.data.batches.plan import Plan
from fxtune.data.batches.segments import Side
from fxtune.data.config import DataConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized.ends import used_special_tokens
from fxtune.data.tokenized.rows import place_of_image
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError, DataError, UserError
from fxtune.models.end_tokens import add_end_tokens, read_end_tokens
from fxtune.models.prepared import PreparedModel
from fxtune.models.untrained_tokens import untrained_rows
from fxtune.system.files.hub import locate_adapter
from fxtune.system.terminal.units import counted
from fxtune.techniques.lora.technique import Lora

LOOKS = 8
"""How many steps documents_padding() looks at."""


def run_data(
    config: Config,
    tokenizer: Any,
    images: ImageProcessor | None,
    refused: Callable[[str], None] | None = None,
    complete: bool = True,
    **options: Any,
) -> PreparedData:
    """The token tables and plans of a run of `config`. settle() has decided how the rows of `config` are laid out.

    `refused`: called with each reason why the objective cannot learn from these rows; the rows are then planned
    unchanged. None: the reasons are raised as errors. `complete`: whether these are all rows of the run. `options`:
    more arguments of prepare_data().
    """
    train, objective, accepted = config.train, config.objective, True

    def accept(
        tables: list[TokenTable], held_out: list[TokenTable], data: DataConfig
    ) -> tuple[list[TokenTable], list[TokenTable]]:
        nonlocal accepted
        try:
            return objective.accept(tables, held_out, data)
        except (ConfigError, DataError) as error:
            if refused is None:
                raise
            refused(str(error))
            accepted = False
        return tables, held_out

    data = prepare_data(
        rows_to_read(config),
        tokenizer,
        images=images,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        max_steps=train.max_steps,
        epochs=train.epochs,
        ramp=train.batch_ramp,
        seed=config.run.seed,
        accept=accept,
        **options,
    )
    if accepted and complete and (reason := "\n".join(objective.plan_refusals(data.training))):
        if refused is None:
            raise ConfigError(reason)
        refused(reason)
    return data


def rows_to_read(config: Config) -> DataConfig:
    """`config.data` for the rows of the sources. With rollouts these are prompts, each with room for an answer."""
    rows = config.objective.data_config(config.data)
    if not config.objective.needs.rollouts:
        return rows
    room = config.data.sequence_length - config.sampler.max_tokens
    return replace(rows, sequence_length=room, packing=False, buckets=[], share_prompts=False)


def held_out_note(evaluation: Plan) -> str:
    """A line for the user on the held-out documents."""
    used = dropped = 0
    for table, counts in zip(evaluation.tables, evaluation.stream.counts, strict=True):
        # Long chats were dropped before the hold-out, so they are on no side of it.
        own = 0 if table.split.chats and evaluation.stream.settings.side is not Side.all else counts.dropped
        used, dropped = used + counts.documents - own * (not table.split.chats), dropped + own
    summary = evaluation.summary()
    too_long = f"; {dropped:,} longer than {evaluation.stream.settings.sequence_length:,} tokens are left out"
    supervised = f"{summary['supervised_tokens']:,} supervised tokens"
    held_out = counted(used, evaluation.tables[0].format.noun)
    return f"held out for evaluation: {held_out}, {supervised}{too_long * bool(dropped)}"


def data_notes(config: Config, data: PreparedData) -> Iterator[str]:
    """Lines for the user on the documents of a run."""
    yield from data.training.notes()
    yield from config.objective.plan_notes(data.training)
    if data.evaluation:
        yield from config.objective.held_out_notes(data.evaluation)


def name_lost_image(error: LostImageError, config: DataConfig, data: PreparedData) -> None:
    """Make `error` name the row of its image, if the data file still exists."""
    held_out = data.evaluation.tables if data.evaluation and config.eval_sources else ()
    for source, table in zip((*config.sources, *config.eval_sources), (*data.tables, *held_out), strict=False):
        if error.table is not None and table.folder == error.table.folder:
            with suppress(UserError, OSError, StopIteration):
                error.place = place_of_image(source, table, error.image, config)
            return


def documents_padding(plan: Plan) -> str:
    """A line on how many tokens recurrent layers compute for packed rows: they pad each document to the longest of its
    micro-batch (techniques/attention/recurrent.py). The forecast is made before the data is read and cannot know this
    number."""
    most = 1.0
    for step in range(min(LOOKS, plan.steps)):
        for micro in range(plan.micro_batches(step)):
            lengths = [part.length for row in plan.contents(step, micro) for part in row]
            most = max(most, len(lengths) * max(lengths) / (plan.micro_rows(step) * plan.max_row_length(step)))
    return (
        f"recurrent layers: padded to the longest, the documents of a packed micro-batch have up to {most:.1f} times "
        f"the tokens of its rows (in the first {min(LOOKS, plan.steps)} steps), which the forecast of memory leaves "
        "out. data.packing=false pads rows instead."
    )


def teach_ends(
    prepared: PreparedModel, tokenizer: Any, ends: list[int], adapter: str | None, lora: Lora
) -> Iterator[str]:
    """Make generation by the trained model stop at `ends`, the tokens that end answers in the data. Yields a line if
    generation by the base does not stop at them. `adapter`: the adapter that training starts from."""
    earlier = read_end_tokens(locate_adapter(adapter).folder) if adapter else []
    if new := add_end_tokens(prepared, [*earlier, *ends]):
        tokens = ", ".join(tokenizer.convert_ids_to_tokens(new))
        place = "model's generation_config.json names them too"
        if lora.enabled:
            place = "adapter gets a generation_config.json, which merging and the code of its model card read"
        yield f"answers end with {tokens}, at which generation by the base does not stop; the {place}"


def untrained_tokens(prepared: PreparedModel, tokenizer: Any, data: PreparedData, lora: Lora) -> Iterator[str]:
    """Yield a line if special tokens of the data have no trained row in the base. It names the option that trains
    them."""
    if not lora.enabled:
        return
    used = [token for token in used_special_tokens(data.tables, tokenizer) if token not in lora.token_ids]
    if untrained := untrained_rows(prepared.module, used):
        tokens = sorted({token for rows in untrained.values() for token in rows})
        yield (
            f"the base has never trained {', '.join(tokenizer.convert_ids_to_tokens(tokens))}: these rows of "
            f"{' and '.join(untrained)} are zero or equal other rows, and adapters do not change them. Set "
            "techniques.lora.train_tokens=auto to train them, or use a chat template with other tokens "
            "(data.chat_template)"
        )
