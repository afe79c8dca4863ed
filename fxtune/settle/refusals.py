"""The reasons why a run is refused that its config shows. Techniques have reasons of their own (Technique.check)."""

from __future__ import annotations

from collections.abc import Iterator

from fxtune.config.root import Config
from fxtune.distributed.parallel import Compression, Degrees
from fxtune.facts.options import WeightFormat
from fxtune.facts.run import Facts
from fxtune.models.structure import skeleton, towers
from fxtune.objectives.reference import WithReference
from fxtune.optim import config as optimizer_config
from fxtune.settle import in_backward
from fxtune.settle.rows import why_whole
from fxtune.techniques.quantize.selection import takes_experts


def refusals(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason, with its key, why a run of `config` cannot start under `facts`."""
    yield from optimizer_config.refusals(config.optimizer, facts)
    yield from config.objective.refusals(facts.degrees)
    yield from _noise_scale(config, facts.degrees)
    yield from in_backward.refusals(config, facts)
    yield from _scores(config, facts)
    yield from _images(config, facts)
    if isinstance(config.objective, WithReference):
        yield from config.objective.reference_refusals(config.techniques.lora.enabled, config.techniques.lora.factored)
    if config.data.share_prompts is True and (why := why_whole(config, facts)):
        yield (
            f"data.share_prompts: true, but {why}. Set it to auto. A run that was started with shared prompts goes on "
            "only where they can be shared."
        )
    lora, quantize = config.techniques.lora, config.techniques.quantize
    if config.model.add_tokens:
        if facts.degrees.shard > 1:
            yield "model.add_tokens: weights divided over ranks cannot grow. Remove it, or set parallel.shard=1."
        if lora.enabled and quantize.enabled and (quantize.head or quantize.embeddings):
            yield (
                "model.add_tokens: its rows are trained, and the head or the embedding is stored in fp8. Set "
                "techniques.quantize.head=false and techniques.quantize.embeddings=false."
            )
    keeps_mxfp4 = lora.enabled and quantize.enabled and quantize.type is WeightFormat.mxfp4
    if facts.degrees.shard > 1 and facts.ships_mxfp4 and not (keeps_mxfp4 and takes_experts(quantize, facts)):
        yield (
            f"parallel.shard: {facts.degrees.shard} ranks would read the weights row by row, and this checkpoint has "
            "its experts in MXFP4, which are unpacked as whole matrices. Set techniques.quantize.enabled=true and "
            "techniques.quantize.type=mxfp4, parallel.shard=1, or save the model in 16 bits with transformers first."
        )


def _scores(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason why a model that scores documents cannot be trained as `config` says."""
    if facts.head != "score":
        return
    needs = f"objective={config.objective.name} trains a head that scores documents"
    if config.data.questions.path is not None:
        yield f"data.questions.path: {needs} and answers no questions. Remove it."


def _images(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason why optimizer.lr_vision trains nothing."""
    if config.optimizer.lr_vision is None:
        return
    model, lora = skeleton(facts.model), config.techniques.lora
    if model is None or not towers(model):
        yield f"optimizer.lr_vision: {facts.text.get('model_type')} reads no images. Set it to null."
    elif lora.enabled and not (lora.vision or lora.projector):
        yield (
            "optimizer.lr_vision: adapters are on the language model alone. Set techniques.lora.vision=on or "
            "techniques.lora.projector=on, or lr_vision=null."
        )


def _noise_scale(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield each reason why train.noise_scale cannot be measured with these ranks, worded as what to change."""
    if not config.train.noise_scale:
        return
    off = "or set train.noise_scale=false."
    if degrees.shard > 1 or degrees.context > 1:
        yield (
            f"train.noise_scale: it compares gradients of whole rows and whole weights, and this run has {degrees}. "
            f"Set parallel.shard=1 and parallel.context=1, {off}"
        )
    parallel = config.parallel
    if degrees.ranks > 1 and (parallel.average_every > 1 or parallel.compression is Compression.powersgd):
        yield (
            "train.noise_scale: with parallel.average_every and parallel.compression=powersgd no rank sees the sum of "
            f"the gradients. Set them to their defaults, {off}"
        )
