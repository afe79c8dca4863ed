"""A teacher that is a vLLM server: it gives the log-probabilities of answers that it has not written itself.

vLLM gives log-probabilities of a prompt at temperature 1 only, so the student samples with sampler.temperature=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fxtune.config.root import Config, SamplerConfig
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError, HardwareError
from fxtune.training.rollouts.client import TRIES, Client, ServerError, clients_of, side_by_side


class TeacherServer:
    """The servers at `urls`, which commas separate."""

    def __init__(self, urls: str, sampler: SamplerConfig) -> None:
        self.name, self.clients = urls, clients_of(urls, sampler.request_seconds)

    def require_ready(self, config: Config, tokenizer: Any) -> None:
        """Raise ConfigError if a server cannot be reached, reads too short texts, or has other tokens than the
        student."""
        if config.sampler.temperature != 1:
            raise ConfigError(
                f"sampler.temperature={config.sampler.temperature:g}: a server gives a teacher's log-probabilities at "
                "temperature 1. Set sampler.temperature=1, or a model in objective.teacher."
            )
        needed = config.data.sequence_length + 1  # the server writes a token
        for client in self.clients:
            start = f"Start one with: vllm serve MODEL --max-model-len {needed}"
            client.require_fit("objective.teacher", tokenizer, needed, start)

    def log_probs(self, table: TokenTable) -> np.ndarray:
        """The log-probability of each supervised token, float32 [tokens of the table]; 0 for other tokens. Raises
        HardwareError if the servers fail."""
        numbers = np.zeros(len(table.ids), np.float32)
        waiting: Sequence[int] = range(len(table.offsets) - 1)
        done, left, models = set[int](), TRIES, dict[str, str]()

        def ask(document: int, client: Client) -> None:
            own = slice(*(int(at) for at in table.offsets[document : document + 2]))
            ids = table.ids[own].tolist()
            if any(True for _ in table.placed_images(own.start, len(ids))):
                raise ConfigError("objective.teacher: prompts with images need a model, not the address of a server.")
            content = {"model": models[client.url], "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
            answer = client.call("/v1/completions", content)
            try:
                found = answer["choices"][0]["prompt_logprobs"]
                values = [0.0, *(at[str(token)]["logprob"] for at, token in zip(found[1:], ids[1:], strict=True))]
            except (LookupError, TypeError, ValueError) as error:
                raise HardwareError(
                    f"objective.teacher={client.url}: an answer lacks the log-probabilities of its prompt ({error}). "
                    "Use a version of vLLM that has `prompt_logprobs`."
                ) from error
            numbers[own] = np.where(table.supervised[own], values, 0.0)
            done.add(document)

        while waiting := [document for document in waiting if document not in done]:
            try:
                models |= {client.url: client.model for client in self.clients}
                side_by_side(ask, waiting, self.clients)
            except ServerError as error:
                left -= 1
                if not left or (400 <= error.status < 500 and error.status != 404):
                    raise HardwareError(
                        f"objective.teacher: {error}. The same command goes on from the last checkpoint."
                    ) from error
                for client in self.clients:
                    client.wait()
        if not np.isfinite(numbers).all():
            raise HardwareError(f"objective.teacher={self.name}: a log-probability is not finite.")
        return numbers
