"""Special tokens of the data that the base does not know: ends of answers, and tokens without a trained row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxtune.data.batches.build import PreparedData
from fxtune.data.tokenized.ends import used_special_tokens
from fxtune.models.end_tokens import add_end_tokens, read_end_tokens
from fxtune.models.prepared import PreparedModel
from fxtune.models.untrained_tokens import untrained_rows
from fxtune.system.files.hub import locate_adapter
from fxtune.techniques.lora.technique import Lora


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
