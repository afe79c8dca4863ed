"""The sampler that runs in this process: the trained model itself writes the answers.

An answer's random numbers depend on the run's seed, the step, the prompt and the number of the answer alone. So any
number of ranks draws the same answers, up to rounding: a batch of other prompts may change the last bits of a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from fxtune.config.root import SamplerConfig
from fxtune.data.batches.segments import splitmix64
from fxtune.data.images.processor import ImageProcessor
from fxtune.distributed.world import World
from fxtune.models.prepared import PreparedModel
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal.progress import phase
from fxtune.techniques.precision import Precision
from fxtune.training.generation import in_batches, write
from fxtune.training.rollouts.episodes import Episodes, Request, Sampled
from fxtune.training.rollouts.folder import Answer


class Sampler(Protocol):
    name: str
    """The engine and its version."""
    repeats: bool
    """Whether the same weights and seeds give the same answers, bit for bit."""
    sync_seconds: float
    """The seconds in which the newest answers' weights were given to the sampler."""

    def sample(self, episodes: Episodes, weights_version: str) -> Callable[[], list[Answer]]:
        """Begin to write the answers `episodes` by the weights `weights_version`: the model's, or weights that the
        sampler has(). All ranks call this together. Rank 0 calls the returned function, which waits for the answers,
        before the next sample(). The function may run in another thread."""

    def has(self, weights_version: str) -> bool:
        """Whether the sampler can still use these weights after the model has changed. Rank 0 calls this."""

    def close(self) -> None: ...


def uniform(seeds: Sequence[int], count: int) -> np.ndarray:
    """Numbers from 0 to below 1 for each seed, float64 [seeds, count]."""
    start = splitmix64(np.array(seeds, np.uint64))[:, None]
    bits = splitmix64(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draw:
    """Draws the next token of each row, and keeps its log-probability. The token is the first one at which the sum of
    the probabilities exceeds a random number. So a rounding error rarely changes a token."""

    def __init__(self, seeds: Sequence[int], temperature: float, most: int, world: World) -> None:
        self.numbers, self.temperature, self.world = uniform(seeds, most), temperature, world
        self.log_probs = list[torch.Tensor]()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        log_probs = (logits.float() / self.temperature).log_softmax(-1)
        sums = log_probs.double().exp().cumsum(-1)
        number = torch.from_numpy(self.numbers[:, len(self.log_probs)]).to(logits.device)
        chosen = torch.searchsorted(sums, (number * sums[:, -1])[:, None], right=True)
        chosen = chosen.clamp(max=logits.shape[-1] - 1)[:, 0]
        if self.world.degrees.shard > 1:  # see likeliest()
            chosen = self.world.copy_first(chosen, "drawing a token")
        self.log_probs.append(log_probs.gather(1, chosen[:, None])[:, 0])
        return chosen


class ModelSampler:
    """Samples from the model that is trained. `ends`: tokens that end an answer. `pad`: the id of padding."""

    def __init__(
        self,
        model: PreparedModel,
        config: SamplerConfig,
        precision: Precision,
        world: World,
        rows_per_pass: RowsPerPass,
        ends: set[int],
        pad: int,
        images: ImageProcessor | None = None,
    ) -> None:
        self.model, self.config, self.precision, self.world = model, config, precision, world
        self.rows_per_pass, self.ends, self.pad, self.images = rows_per_pass, ends, pad, images
        self.name, self.repeats, self.sync_seconds = f"the trained model, torch {torch.__version__}", False, 0.0

    def sample(self, episodes: Episodes, weights_version: str) -> Callable[[], list[Answer]]:
        requests = episodes.begin()
        while requests:
            turns = self._turns(requests)
            requests = self.world.from_main(partial(episodes.go_on, turns), "calling tools")
        return lambda: episodes.answers

    def _turns(self, requests: Sequence[Request]) -> list[Sampled]:
        batch, sizes = self.config.batch, self.rows_per_pass
        with phase(f"Writing {len(requests):,} answers", len(requests), "answers", announce=False) as work:
            return in_batches(requests, self._write, self.world, sizes, "sampling", batch, work)

    def has(self, weights_version: str) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, requests: Sequence[Request]) -> list[Sampled]:
        limit, context = max(each.room for each in requests), self.precision.context(self.world.device)
        draw = Draw([each.seed for each in requests], self.config.temperature, limit, self.world)
        rows = write(self.model, self.ends, self.pad, limit, requests, draw, self.images, context).tolist()
        log_probs = torch.stack(draw.log_probs, dim=1).tolist()
        written = zip(rows, log_probs, requests, strict=True)
        return [self._until_end(ids[: each.room], values[: each.room]) for ids, values, each in written]

    def _until_end(self, ids: list[int], log_probs: list[float]) -> Sampled:
        end = next((at for at, token in enumerate(ids) if token in self.ends), None)
        count = len(ids) if end is None else end + 1
        return Sampled(ids[:count], log_probs[:count], end is not None)
