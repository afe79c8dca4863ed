"""The reasons why a run is refused that are known from its config, beside those of its techniques."""

from __future__ import annotations

from collections.abc import Iterator

from fxtune.config.root import Config
from fxtune.optim import config as update_rule
from fxtune.techniques.facts import Facts
from fxtune.training import in_backward, noise_scale


def refusals(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason, with its key, why a run of `config` cannot start under `facts`. Training and
    `fxtune plan` share them."""
    yield from update_rule.check(config.optimizer, facts)
    yield from noise_scale.refusals(config, facts.degrees)
    yield from in_backward.refusals(config, facts)
    lora, quantize = config.techniques.lora, config.techniques.quantize
    if config.model.add_tokens:
        if facts.degrees.shard > 1:
            yield "model.add_tokens: weights divided over ranks cannot grow. Remove it, or set parallel.shard=1."
        if lora.enabled and quantize.enabled and (quantize.head or quantize.embeddings):
            yield (
                "model.add_tokens: its rows are trained, and the head or the embedding is stored in fp8. Set "
                "techniques.quantize.head=false and techniques.quantize.embeddings=false."
            )
    if facts.degrees.shard > 1 and facts.ships_mxfp4:
        yield (
            f"parallel.shard: {facts.degrees.shard} ranks would read the weights row by row, and this checkpoint has "
            "its experts in MXFP4, which are unpacked as whole matrices. Set parallel.shard=1, or save the model in "
            "16 bits with transformers first."
        )
