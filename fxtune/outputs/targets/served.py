"""Proves an export: the server loads the files and answers the run's questions, and so does plain transformers.

Both get the token ids of training's prompts and decode greedily, so a difference comes from the weights or the
arithmetic. The server also writes each prompt from its messages. compare() checks the tokens of this prompt, because
the server's chat template or tokenizer may differ. For quantised files, the share of right answers and the perplexity
of held-out reference answers show the cost of fewer bits.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

import torch

from fxtune.errors import HardwareError
from fxtune.outputs.conversation import load_tuned
from fxtune.outputs.targets.source import Source
from fxtune.system.process.process_group import end_process
from fxtune.system.terminal.progress import phase
from fxtune.training.answers import exact_match
from fxtune.training.rollouts.client import Client, ServerError
from fxtune.training.rollouts.server_process import end_of, start_server

Made = TypeVar("Made")

TOP = 20
"""The number of likeliest first tokens that a server returns. vLLM returns no more by default."""
RATED = 1000
"""After this many tokens of reference answers, the perplexity takes no further question."""
BATCH = 8
"""Questions that plain transformers answers at once."""
CLOSE = 0.02
"""The largest mean KL divergence of first tokens, in nats, of a correct unquantised export."""
SECONDS = 600.0
"""The time limit for an answer of a server."""


class Unproven(Exception):
    """There is no server or there are no questions, so the export is not proven."""


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    ended: bool
    """Whether the answer ended by itself, and not at the limit of tokens."""
    first: Mapping[int, float]
    """Log-probabilities of the likeliest first tokens, by id."""


class Server(Protocol):
    """A server that has loaded an export. All calls raise ServerError. A log-probability is NaN where the server's
    JSON has null."""

    def write_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of the prompt that the server writes for messages."""

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        """The greedy answer to a prompt of token ids."""

    def rate(self, prompt: list[int], token: int) -> float | None:
        """The log-probability of `token` after a prompt; None: fxtune does not ask this server."""
        return None


@contextmanager
def started(name: str, words: Sequence[str], make: Callable[[Client], Made]) -> Iterator[Made]:
    """Start a server with the command `words`, and end it with the context. Raises HardwareError if the server does
    not start, or fails in the body."""
    with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch:
        log = Path(scratch) / "server.log"
        process, url = start_server(name, words, log)
        try:
            yield make(Client(url, SECONDS))
        except ServerError as error:
            raise HardwareError(f"{name} failed while it was asked: {error}. Its log ends:\n{end_of(log)}") from error
        finally:
            end_process(process)


@dataclass(frozen=True)
class Plain:
    """The answers of plain transformers and peft to the questions of a source: on a GPU in the model's stored dtype,
    on a CPU in float32."""

    ids: list[list[int]]
    """The answers without their end tokens."""
    ended: list[bool]
    first: torch.Tensor
    """Log-probabilities of the first tokens, float32 [questions, vocabulary]."""

    @staticmethod
    def of(source: Source) -> Plain:
        assert source.output is not None
        model = load_tuned(source.output, trust_remote_code=source.trust_remote_code)[0].eval()
        model = model.float() if model.device.type == "cpu" else model
        ends, pad = source.ends, source.tokenizer.pad_token_id or 0
        plain: Any = dict(do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0)
        rows, first = list[list[int]](), list[torch.Tensor]()
        with phase("Asking transformers", len(source.questions), "questions") as work, torch.inference_mode():
            for at in range(0, len(source.questions), BATCH):
                prompts = [question.prompt for question in source.questions[at : at + BATCH]]
                width = max(map(len, prompts))
                ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
                mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
                found = model.generate(
                    ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    max_new_tokens=source.data.questions.max_new_tokens,
                    eos_token_id=ends,
                    pad_token_id=pad,
                    output_logits=True,
                    return_dict_in_generate=True,
                    **plain,
                )
                rows += found.sequences[:, width:].tolist()
                first.append(found.logits[0].float().log_softmax(-1).cpu())
                work.advance(len(prompts))
        del model, found  # the server needs the memory of the GPU
        gc.collect()
        torch.cuda.empty_cache()
        return Plain([cut(row, ends) for row in rows], [bool({*row} & {*ends}) for row in rows], torch.cat(first))


def cut(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens of an answer before its first end token."""
    return list(ids[: next((at for at, token in enumerate(ids) if token in ends), None)])


def compare(source: Source, plain: Plain, server: Server) -> dict[str, float]:
    """The figures of a server's answers beside plain transformers; shares are between 0 and 1. Raises ServerError.

    equal: equal answers. equal_20: equal first 20 tokens. prompts: prompts with the ids of training, among the chats.
    ended: answers that end where transformers ends, among answers with the same tokens up to there. kl: the KL
    divergence of the first token in nats, over the TOP likeliest tokens and one outcome for all others. right: exactly
    right answers. perplexity: the perplexity of the reference answers in `source.rated`.
    """
    questions, ends, tokenizer = source.questions, source.ends, source.tokenizer
    prompts, served, rated = list[bool](), list[Answer](), list[float]()
    with phase("Asking the server", len(questions), "questions") as work:
        for question in questions:
            if (messages := source.messages(question)) is not None:
                prompts.append(server.write_prompt(messages) == question.prompt)
            served.append(server.answer(question.prompt, source.data.questions.max_new_tokens))
            work.advance(1)
        for question in source.rated:
            if len(rated) < RATED:
                ids = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
                found = [server.rate(question.prompt + ids[:at], token) for at, token in enumerate(ids)]
                rated += [value for value in found if value is not None]
    answers = [cut(answer.ids, ends) for answer in served]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
    pairs = list(zip(plain.ids, answers, strict=True))
    figures = {
        "equal": _share(theirs == mine for theirs, mine in pairs),
        "equal_20": _share(theirs[:20] == mine[:20] for theirs, mine in pairs),
        "prompts": _share(prompts),
        "ended": _share(
            mine.ended and cut(mine.ids, ends) == ids
            for mine, ids, ended in zip(served, plain.ids, plain.ended, strict=True)
            if ended and mine.ids[: len(ids)] == ids
        ),
        "kl": fmean([_divergence(row, answer.first) for row, answer in zip(plain.first, served, strict=True)]),
        "right": exact_match(texts, questions),
        "perplexity": math.exp(-fmean(rated)) if rated else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def problems(figures: Mapping[str, float], exact: bool) -> list[str]:
    """How an export differs from training. `exact`: its weights have at least 16 bits."""
    found = []
    if (share := figures.get("prompts", 1.0)) < 1:
        found.append(f"the server writes {1 - share:.0%} of the prompts with other tokens than training")
    if exact and (share := figures.get("ended", 1.0)) < 1:
        found.append(f"{1 - share:.0%} of the answers do not end as in training")
    if exact and not figures["kl"] <= CLOSE:  # NaN too
        found.append(f"its first tokens differ from the trained model (KL {figures['kl']:.2g} nats)")
    return found


def number(value: float | None) -> float:
    """A number of a server's JSON, in which null means NaN."""
    return math.nan if value is None else float(value)


def _share(values: Iterable[bool]) -> float | None:
    return fmean(found) if (found := [float(value) for value in values]) else None


def _divergence(plain: torch.Tensor, served: Mapping[int, float]) -> float:
    """The KL divergence in nats. `plain`: log-probabilities of all tokens; `served`: of the likeliest, by token id."""
    p, q = plain[list(served)].double().exp(), torch.tensor(list(served.values()), dtype=torch.float64).exp()
    p, q = (torch.cat([part, (1 - part.sum()).clamp(min=1e-9)[None]]) for part in (p, q))
    return max(float((p * (p / q).log()).sum()), 0.0)
