"""Settles a recipe for a machine: decides everything that can be decided without data and weights.

Training, `plan`, `preview`, `verify`, `bench`, `doctor` and `tune` all take the result of `settle()`, so they cannot
differ in what they refuse, choose or forecast. The result depends only on the config and on facts about a machine,
which may be another machine. Every rank computes the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fxtune.config.root import Config
from fxtune.data.config import AUTO, DataConfig, SourceConfig
from fxtune.data.read.sources import missing_reason
from fxtune.data.tokenized.cache import cache_root
from fxtune.distributed.launch import require_equal_parts
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HubError
from fxtune.estimate.weights import divides_experts
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import load_config
from fxtune.objectives.causal_lm import CausalLM
from fxtune.optim import config as optimizer_config
from fxtune.settle import determinism, freed_gradients
from fxtune.settle.degrees import with_degrees
from fxtune.settle.ranks import open_counts, share
from fxtune.settle.refusals import refusals
from fxtune.settle.rows import decide_rows
from fxtune.system.machine import tested_versions
from fxtune.system.machine.facts import MachineFacts
from fxtune.techniques.attention import isolation
from fxtune.techniques.package_checks import Heads, import_ahead, unusable
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.technique import Quantize

Tries = Callable[[MachineFacts, Iterable[str], Heads], dict[str, str]]
"""A function (machine, packages, heads of the model) -> the packages that do not work on the machine, with reasons."""
OF_FROZEN = ("attention", "precision", "liger", "apex", "compile")
"""The techniques of the recipe that also act on a frozen model."""


@dataclass(frozen=True)
class Settled:
    config: Config
    """The recipe, with `data.packing`, `data.buckets` and `data.share_prompts` decided."""
    hf_config: Any
    """The model's Hugging Face config, before any technique changes it."""
    techniques: Pipeline
    """The techniques, with every `auto` decided."""
    facts: Facts
    """The facts of one rank, with the options of these techniques."""
    notes: tuple[str, ...]
    """A line on each decision, with the reason."""

    def refusals(self) -> list[str]:
        """The reasons for which a run is refused, as one message; empty if it can run. For callers that told settle()
        not to check."""
        facts = replace(self.facts, techniques=self.config.techniques)
        try:
            self.config.techniques.resolved(facts, _refusals(self.config, facts))
        except ConfigError as error:
            return [str(error)]
        return []


def renewed(notes: Iterable[str], lines: Iterable[str]) -> tuple[str, ...]:
    """`notes` with `lines` added. Notes on the topics of `lines` are left out."""
    lines = list(lines)
    topics = {line.partition(":")[0] for line in lines}
    return (*(note for note in notes if note.partition(":")[0] not in topics), *lines)


def settle(
    config: Config,
    machine: MachineFacts,
    ranks: int | None = None,
    present: int = 1,
    tries: Tries | None = None,
    checks: bool = True,
    hf_config: Any = None,
    deterministic: bool | None = None,
) -> Settled:
    """Decide what a run of `config` on `machine` will do.

    `ranks`: the number of processes; None: the number that `fxtune` would start on this machine. `present`: the number
    of processes that share the host memory of `machine`. `tries`: a function that tries packages before they are used;
    a package that does not work counts as missing. None: every installed package counts as working. `checks`: whether
    to refuse what cannot run. `hf_config`: the model's config, if it has been read. `deterministic`: whether a resumed
    run has deterministic kernels; None: `run.deterministic` decides.

    Reads the model's config, but no weights and no rows. Raises one ConfigError with all reasons why the recipe cannot
    run on `machine`, and the errors of load_config().
    """
    if checks and (untested := tested_versions.refusals(machine.packages)):
        raise ConfigError("\n".join(untested))
    if hf_config is None:
        try:
            hf_config = load_config(config.model, config.objective.needs.head)
        except HubError as error:
            raise HubError(*error.reasons, *_missing_data(config.data)) from error
    if why := isolation.why_not_causal(hf_config):
        raise ConfigError(f"model.path: {why}. Use a decoder.")
    config, facts, notes = _with_working_packages(config, machine, present, hf_config, tries)
    degrees, why = share(config, facts, [ranks] if ranks else open_counts(config))
    require_equal_parts(degrees, config.train.micro_batches)
    notes += [f"parallel: {why}"] * (degrees.ranks > 1)
    facts, note = freed_gradients.decide(config, with_degrees(facts, degrees))
    facts = facts if deterministic is None else replace(facts, deterministic=deterministic)
    notes += [note] if note else []
    if (frozen := settle_frozen_model(config, facts)) and not config.objective.stored_tokens:
        facts = replace(facts, frozen=frozen.facts)
    if checks:
        techniques, decided = config.techniques.resolved(facts, _refusals(config, facts))
    else:
        techniques, decided = config.techniques.decided(facts)
    if deterministic is None and config.run.deterministic == AUTO:
        fixed, lines = determinism.decide(config.techniques, techniques, facts)
        if fixed is not None:
            techniques, facts = fixed, replace(facts, deterministic=True)
        decided = list(renewed(decided, lines))
    facts = replace(facts, techniques=techniques)
    if divides_experts(facts):
        decided.append(
            f"experts: 1/{degrees.shard * degrees.context} of each layer's on a rank, tokens travel to them"
        )
    remarks = _remarks(config, techniques, facts, hf_config, decided)
    return Settled(config, hf_config, techniques, facts, (*notes, *remarks, *decided))


def settle_frozen_model(config: Config, facts: Facts) -> Settled | None:
    """The frozen model of the objective of `config`, such as the teacher of distillation, with its techniques decided;
    None if there is none. It gets the rows of the trained model, and runs with the same attention, kernels and
    precision, without adapters. `facts`: the facts of the trained model. Raises the errors of load_config()."""
    model = config.objective.frozen_model(config.model)
    if model is None:
        return None
    techniques = config.techniques
    off = {name: replace(each, enabled=False) for name, each in techniques.enabled() if name not in OF_FROZEN}
    off["quantize"] = Quantize(enabled=True, type=model.quantize) if model.quantize else Quantize()
    alone = replace(config, model=model, objective=CausalLM(), techniques=replace(techniques, **off))
    return settle(alone, facts, facts.degrees.ranks, checks=False)


def _refusals(config: Config, facts: Facts) -> list[str]:
    """refusals(), and the reasons for which the frozen model cannot run with the rows of `config`."""
    reasons = list(refusals(config, facts))
    if frozen := settle_frozen_model(config, facts):
        model = frozen.config.model
        for name, technique in frozen.config.techniques.enabled():
            for reason in technique.check(frozen.facts):
                if name == "quantize":  # one option of the objective stands for all options of the technique
                    reasons.append(f"{model.key}_quantize:{reason.partition(':')[2]}")
                else:
                    reasons.append(f"{model.key}={model.path}: techniques.{name}.{reason}")
    return reasons


def _missing_data(data: DataConfig) -> Iterator[str]:
    """Yield a reason for each dataset of the recipe that is not on this disk and cannot be reached. So one error can
    name all missing files of a recipe."""
    sources = {source.path: source for source in [*data.sources, *data.eval_sources, *data.general]}
    if data.questions.path is not None:
        sources.setdefault(data.questions.path, SourceConfig(path=data.questions.path))
    cache = cache_root(data) / "datasets" if data.cache_dir else None
    for source in sources.values():
        if why := missing_reason(source, cache):
            yield f"data.sources: {why}"


def settle_here(config: Config, world: World, ranks: int | None = None, deterministic: bool | None = None) -> Settled:
    """settle() for this machine, on which packages are tried. If a package fails on one rank, no rank uses it.

    `ranks` and `deterministic` are the same as in settle(). Raises the errors of settle().
    """
    machine = world.facts(config.run.strict)
    with import_ahead(machine, [name for name, _ in config.techniques.enabled()]) as imported:

        def tries(machine: MachineFacts, packages: Iterable[str], heads: Heads) -> dict[str, str]:
            broken_here = unusable(machine, packages, heads, imported, bool(config.techniques.compile.enabled))
            by_rank = world.gather(broken_here, "trying packages")
            return {name: why for broken in by_rank for name, why in broken.items()}

        return settle(config, machine, ranks, world.size, tries, deterministic=deterministic)


def _with_working_packages(
    config: Config, machine: MachineFacts, present: int, hf_config: Any, tries: Tries | None
) -> tuple[Config, Facts, list[str]]:
    """Decide the rows, with packages that work. Returns the config, the facts of one of `present` ranks, and notes.
    Decisions are made again after a package has failed, because other packages may then be used."""
    while True:
        data, notes, facts = decide_rows(config, machine, hf_config, present)
        if tries is None:
            break
        shape = Shape.of(facts.model)
        widest = max(shape.attentions, key=lambda each: each.width, default=None)
        heads = Heads(widest.heads, widest.key_heads, widest.width) if widest else Heads()
        heads = replace(heads, recurrences=shape.recurrences, experts=shape.expert_count > 1)
        needed = [*config.techniques.packages(facts), *optimizer_config.packages(config.optimizer, facts)]
        broken = tries(machine, needed, heads)
        if not broken:
            break
        working = {name: version for name, version in machine.packages.items() if name not in broken}
        machine = replace(machine, packages=working, broken={**machine.broken, **broken})
    return replace(config, data=data), facts, notes


def _remarks(config: Config, techniques: Pipeline, facts: Facts, hf_config: Any, decided: list[str]) -> list[str]:
    """Lines on facts that nobody decided: broken packages, parts of the model that are not trained, plugins."""
    remarks = [
        f"{package} {facts.lacks(package)}: not used (`fxtune doctor` says what repairs it)"
        for package, reason in facts.broken.items()
        if not any(reason in line for line in decided)
    ]
    if not techniques.lora.enabled and config.optimizer.lr_vision is not None:
        remarks.append(f"model: its vision encoder and projector are trained at {config.optimizer.lr_vision:g}")
    elif not techniques.lora.enabled and (untrained := kind_of(hf_config).untrained_parts(hf_config)):
        remarks.append(f"model: {untrained}")
    if facts.ships_mxfp4 and not techniques.keeps_mxfp4(facts.model):
        remarks.append(
            f"model: its experts are stored in MXFP4 and unpacked to {facts.dtype} as they are read, the same numbers"
        )
    return [*remarks, *(f"plugin {name}: {identity}" for name, identity in config.plugins().items())]
