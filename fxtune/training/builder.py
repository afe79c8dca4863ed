"""Builds a run up to its first step. Training, evaluation, `fxtune verify`, `bench` and `doctor` share this code, so
their results hold for training."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fxtune.config.root import Config
from fxtune.data.batches.batch_images import LostImageError
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.loader import Loader, start_fork_server
from fxtune.data.batches.plan import Plan
from fxtune.data.config import AUTO, DataConfig, template_time_now
from fxtune.data.tokenized.ends import used_special_tokens
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, UnavailableError, UserError
from fxtune.estimate.weights import scattered_parameters
from fxtune.facts.options import Autocast
from fxtune.facts.run import Facts
from fxtune.models import load as models
from fxtune.models.added_tokens import about_added_tokens
from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.prepared import FirstPass, PreparedModel
from fxtune.models.reference import ReferenceModel
from fxtune.models.structure import in_mode
from fxtune.objectives.base import CONTRACT, Objective, contract_broken
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.reference import Reference, WithReference
from fxtune.objectives.registry import OBJECTIVES
from fxtune.optim import config as optimizer_config
from fxtune.optim.learning_rate import guess
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.schedule import learning_rate
from fxtune.settle.freed_gradients import change_for
from fxtune.settle.images import image_processor
from fxtune.settle.images import refusals as image_refusals
from fxtune.settle.settled import settle_frozen_model, settle_here
from fxtune.settle.stages import Stage
from fxtune.system.process.determinism import nondeterministic_operator, reset_process, use_deterministic_kernels
from fxtune.system.process.oom import MemoryExhausted, catch_out_of_memory, free_cached_memory, out_of_memory_reason
from fxtune.system.terminal.console import say
from fxtune.system.terminal.progress import phase
from fxtune.techniques import divided_weights
from fxtune.techniques.assemble import assemble, assemble_frozen
from fxtune.techniques.attention import context, recurrent
from fxtune.techniques.attention.technique import attention_layers
from fxtune.techniques.base import Evidence
from fxtune.techniques.experts.full import observe_computed
from fxtune.techniques.pipeline import Pipeline, make_probe, require_acted
from fxtune.techniques.precision import LossScale
from fxtune.techniques.withdrawal import Withdrawal, wish
from fxtune.tracking.throughput import Meter
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import in_backward, kept_proofs
from fxtune.training.data.image_features import store_features, use_stored_features
from fxtune.training.data.run_data import documents_padding, run_data
from fxtune.training.data.stored_numbers import Numbers, ReferenceNumbers, TeacherNumbers, store
from fxtune.training.evaluation import HeldOutEvaluation
from fxtune.training.forecast import oom_advice
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.step import TrainStep

CHANGE_NUMBERS = ("rope", "attention", "precision", "quantize", "float8", "plugins")
"""Techniques whose options change numbers of a frozen model by more than rounding."""
DETERMINISTIC = "run.deterministic"
LONGEST_PASS = 1 << 15
"""Proofs run a pass over so many tokens at most, three times: about the seconds of compiling a layer again."""


class RunBuilder:
    """Settles a recipe for this machine, and builds the data, the model and the training step on demand.

    The constructor refuses impossible recipes from configs alone, before a weight is loaded or a row is read. It
    raises errors as settle() and World.create() do.
    """

    @phase("Checking the recipe", part="checks")
    def __init__(
        self, config: Config, ahead: bool = False, threads: int | None = None, deterministic: bool | None = None
    ) -> None:
        """`ahead`: whether this process only examines the run before its ranks are started. `facts` are then the facts
        of one rank, and no model can be built. `threads`, `deterministic`: for a resumed run, the number of CPU
        threads at its first start, and whether its kernels were deterministic."""
        self._compared: Sequence[Plan] = ()
        """The plans whose documents need the stored log-probabilities of a reference or of a teacher."""
        self._compared_documents: np.ndarray | None = None
        """Digests of the documents of these plans that need log-probabilities; None: all documents of their tables."""
        self._tables: list[TokenTable] = []
        """The tables with images."""
        self.keeps_decisions = False
        """Whether this is a resumed run, in which each `auto` keeps its decision from the run's start."""
        self.special_tokens: list[int] = []
        """Special tokens of the data, if model.add_tokens or techniques.lora.train_tokens=auto needs them. read() sets
        this."""
        reset_process()
        self.world = World.create(config.run.device, config.run.memory_gib, threads)
        if config.run.deterministic is not False:
            # A workspace with which cuBLAS's products are the same each time. cuBLAS reads this at its first product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.settled = settle_here(config, self.world, None if ahead else self.world.size, deterministic)
        self.stage = Stage.first(self.settled)
        """The latest stage: the config, facts and techniques that now apply."""
        use_deterministic_kernels(self.facts.deterministic)
        if not ahead:
            self.world = self.world.divided(self.facts.degrees)

    @property
    def config(self) -> Config:
        return self.stage.config

    @property
    def hf_config(self) -> Any:
        """The config of the model to build."""
        return self.config.objective.configured(self.settled.hf_config)

    @property
    def facts(self) -> Facts:
        return self.stage.facts

    @property
    def techniques(self) -> Pipeline:
        """The techniques, with every `auto` decided and without options that turned out not to act."""
        return self.stage.techniques

    @property
    def notes(self) -> tuple[str, ...]:
        """A line on each decision so far, with the reason."""
        return self.stage.notes

    @phase("Reading the data", part="data")
    def read(self, quarantine: Path | None = None, template_time: str | None = None) -> tuple[Any, PreparedData]:
        """Read the tokenizer and the data. This comes before the weights, because a bad row is found in seconds and an
        8B model takes a minute to load. Decides optimizer.lr if it is `auto`. `quarantine`: see tokenize().
        `template_time`: the time in the tokens of a resumed run; None: the present. data.template_time, if set, counts
        instead."""
        if self.config.data.template_time is None:
            # Rank 0's clock counts, because all ranks must take the same tokens from the cache.
            chosen = self.world.from_main(lambda: template_time or template_time_now(), "agreeing on the time")
            self.stage = self.stage.decided((), data=replace(self.config.data, template_time=chosen))
        config = self.config
        tokenizer = self.world.main_first(
            partial(models.load_tokenizer, config.model, self.settled.hf_config), "waiting for the tokenizer"
        )
        config.objective.set_template(tokenizer, config.data)
        read_images = partial(
            image_processor, config.model, config.data, tokenizer, self.settled.hf_config, self.facts.dtype
        )
        prepare = partial(
            run_data,
            config,
            tokenizer,
            self.world.main_first(read_images, "waiting for the processor"),
            quarantine=quarantine if self.world.main else None,
            progress=self.world.main and config.tracking.display is not DisplayKind.none,
        )
        data = self.world.main_first(prepare, "waiting for rank 0 to tokenize")
        self.stage = self.stage.with_images(data.training.epoch_images()[1], not self.keeps_decisions)
        trains, has_images = (
            any(table.images is not None for table in tables) for tables in (data.training.tables, data.tables)
        )
        if reasons := list(image_refusals(self.config, self.techniques, self.facts, trains, has_images)):
            raise ConfigError("\n".join(reasons))
        added, notes = config.model.add_tokens, list[str]()
        if added or self.techniques.lora.train_tokens == AUTO:
            self.special_tokens = used_special_tokens(data.tables, tokenizer)
        if added:
            rows = models.rows_of_base(config.model), self.facts.text["vocab_size"]
            notes += about_added_tokens(tokenizer, added, *rows, self.special_tokens)
        if config.optimizer.lr == optimizer_config.AUTO:
            rate, note = guess(config.optimizer, self.facts, data.training.documents_per_step)
            self.stage = self.stage.decided((), optimizer=replace(config.optimizer, lr=rate))
            notes.append(note)
        if self.facts.packing and recurrent.by_document(self.facts):
            notes.append(documents_padding(data.training))
        self.stage = self.stage.decided(notes)
        self.inform(data.training.tables)
        plans = [plan for plan in (data.training, data.evaluation) if plan]
        self.compare_on(plans)
        self._tables = [table for plan in plans for table in plan.tables if table.images is not None]
        return tokenizer, data

    def inform(self, tables: Sequence[TokenTable]) -> None:
        """Give the objective what it takes from the rows of `tables`."""
        objective, notes = self.config.objective.informed(tables)
        self.stage = self.stage.decided(notes, objective=objective)

    def compare_on(self, plans: Sequence[Plan], from_base: bool = False, documents: np.ndarray | None = None) -> None:
        """Settle the reference, if the objective has one. `plans`: the plans of the documents for which it is needed.
        `from_base`: whether the adapters are trained already and the reference is the model without them. `documents`:
        see `only` of store()."""
        objective = self.config.objective
        if objective.stored_tokens:
            self._compared = plans
        if not isinstance(objective, WithReference):
            return
        epochs = plans[0].epoch(plans[0].steps)
        lora = self.techniques.lora
        if from_base and lora.factored:
            raise ConfigError(
                f"model.adapter={self.config.model.adapter}: with techniques.lora.init={lora.init.value} the model "
                f"without its adapter is not what training started from, which objective={objective.name} compares "
                "with. Evaluate the run: fxtune eval RUN."
            )
        which = Reference.base if from_base else objective.settle_reference(lora.enabled, epochs)
        self._compared, self._compared_documents = (plans if which is Reference.stored else ()), documents
        decided = replace(objective, reference=which)
        self.stage = self.stage.decided([f"reference: {which.describe()}"], objective=decided)

    @phase("Building the model", part="model")
    def build(self) -> PreparedModel:
        """The model with every technique applied."""
        start_fork_server(self.config.loader, self.world.device, self._tables)
        if self._compared and self.config.objective.stored_tokens:
            self._store_teacher()
        with self.oom_context("Building the model"):
            return assemble(
                self.techniques,
                self.config.model,
                self.hf_config,
                self.world,
                self.config.run.seed,
                self.special_tokens,
                trains_images=self.config.optimizer.lr_vision is not None,
            )

    @phase("Trying the loss on a small row", part="proofs")
    def language_model(self, model: PreparedModel) -> LanguageModel:
        """`model` with its loss head, configured by the techniques."""
        # Autocast is on, as in training, because the constructor compares its logits with the logits of the model's
        # forward().
        with self.oom_context("Trying the loss on a small row"), self.techniques.precision.context(self.world.device):
            reference = None
            if isinstance(self.config.objective, WithReference):
                which = self.config.objective.reference
                if which is not Reference.stored:
                    reference = ReferenceModel(model, keeps_start=which is Reference.start)
            made = self.config.objective.interface(model, self.techniques.liger, self.world.context_group, reference)
            self.config.objective.prepare(made, self.frozen_model)
            if self.config.objective.needs.rollouts:
                made.temperature = temperature = self.config.sampler.temperature
                if made.cap and temperature != 1:
                    raise ConfigError(
                        f"sampler.temperature={temperature}: this model caps its logits, which the fused loss cannot "
                        "divide afterwards. Set sampler.temperature=1."
                    )
            return made

    @phase("Building the frozen model", part="model")
    def frozen_model(self) -> LanguageModel:
        """The frozen model of the objective, in evaluation mode. Raises ConfigError if its documents see each
        other."""
        settled = settle_frozen_model(self.config, self.facts)
        assert settled is not None, "the objective has a frozen model"
        model, techniques = settled.config.model, settled.techniques
        prepared = assemble_frozen(techniques, model, settled.hf_config, self.world, self.config.run.seed)
        made = LanguageModel(prepared, techniques.liger, self.world.context_group)
        probe = make_probe(prepared.module, self.facts.packing)
        seen = [*techniques.attention.verify(prepared, probe), *made.evidence]
        if techniques.quantize.enabled:
            seen += techniques.quantize.verify(prepared, probe)
        for evidence in require_acted(seen):
            say(f"{model.key}: {evidence.technique}: {evidence.observed}")
        return made

    def proven_model(self, plan: Plan | None = None) -> tuple[LanguageModel, list[Evidence]]:
        """The result of observed_model(). Raises ConfigError if a technique did not act."""
        model, evidence = self.observed_model(plan)
        require_acted(evidence)
        if self._tables and self.facts.stores_images:
            with self.oom_context("Computing features of images"):
                store_features(model, self._tables, self.techniques, self.config.loader, self.world)
        return model, evidence

    def observed_model(self, plan: Plan | None = None, anew: bool = False) -> tuple[LanguageModel, list[Evidence]]:
        """Build the model with its loss head, and collect evidence of every technique and of the loss. `plan`: the
        steps that follow; see observe(). `anew`: take no kept evidence.

        An option that cannot act is switched off and a line says so. Then the model is built again. Raises
        UnavailableError if the recipe demands the option.
        """
        while True:
            model, seen, found = None, list[Evidence](), None
            try:
                model = self.build()
                language_model = self.language_model(model)
                seen = self.observe(language_model, plan, anew)
            except UnavailableError as error:
                if (key := wish(self.config.techniques, error.key)) is None:
                    raise
                if model is not None and self.world.degrees.shard > 1:  # other ranks may wait for this rank in a pass
                    raise ConfigError(
                        f"techniques.{error.key}: {error.why}. Ranks that share weights cannot go on without it "
                        "in the middle of a pass: switch it off, or set parallel.shard=1."
                    ) from error
                found = Withdrawal(key, error.why)
            except (RuntimeError, UserError) as error:
                if (operator := self.nondeterministic(error)) is None:
                    raise
                found = Withdrawal(DETERMINISTIC, operator)
            found = found or Withdrawal.of_idle(self.config.techniques, seen)
            found = next(filter(None, self.world.gather(found, "comparing what acts")), None)
            if found is None:
                if self._compared and isinstance(self.config.objective, WithReference):
                    options = self.techniques.options()
                    self.store(language_model, ReferenceNumbers(), options, self._compared, self._compared_documents)
                if self._tables and self.facts.stores_images:
                    with self.oom_context("Trying stored features"):
                        seen.append(use_stored_features(language_model, self._tables[0], self.techniques, self.world))
                return language_model, [*(each.evidence() for each in self.stage.withdrawn), *seen]
            if found.key == DETERMINISTIC:
                self.use_fastest_kernels(found.why)
            else:
                self.stage = self.stage.without(found)
            say(self.notes[-1])
            model = language_model = None  # type: ignore[assignment]  # frees memory for the next model
            torch.compiler.reset()
            gc.collect()

    def nondeterministic(self, error: Exception) -> str | None:
        """The operator that raised `error` because it has no deterministic kernel. None for other errors, if the
        recipe demands such kernels, or if ranks share weights or rows: these cannot go on in the middle of a pass."""
        is_wish = self.facts.deterministic and self.config.run.deterministic == AUTO and not self.world.shares
        return nondeterministic_operator(error) if is_wish else None

    def use_fastest_kernels(self, operator: str) -> None:
        """Switch to the fastest kernels, because `operator` has no deterministic kernel, and add a note about it."""
        self.stage = self.stage.without_determinism(operator)
        use_deterministic_kernels(False)

    def _store_teacher(self) -> None:
        """Store the likeliest tokens of the objective's frozen model for the tables of the plans. The frozen model is
        in memory only here."""
        objective: Any = self.config.objective
        model, own = self.frozen_model(), self.techniques.options()
        options = {name: own[name] for name in own if name in ("attention", "precision")}
        vocabulary = min(self.facts.text["vocab_size"], model.model.config.get_text_config().vocab_size)
        numbers = TeacherNumbers(min(objective.stored_tokens, vocabulary), objective.temperature, vocabulary)
        options |= {"quantize": objective.teacher_quantize}
        self.store(model, numbers, options, self._compared, self._compared_documents)
        self._compared = ()
        del model
        gc.collect()

    def store(
        self,
        model: LanguageModel,
        numbers: Numbers,
        options: dict[str, Any],
        plans: Sequence[Plan],
        documents: np.ndarray | None = None,
        data: DataConfig | None = None,
    ) -> None:
        """Store the numbers of `model` for the tables of `plans`. Call this before the first step. `documents`: see
        `only` of store(). `data`: how some short documents fit into rows; None: as the recipe says."""
        kept = {name: options[name] for name in CHANGE_NUMBERS if name in options} | {"dtype": str(self.facts.dtype)}
        precision, loader = self.techniques.precision, self.config.loader
        loader, data = (loader, self.config.data) if data is None else (replace(loader, num_workers=0), data)
        with self.oom_context(f"Computing {numbers.title}"):
            store(model, plans, data, loader, precision, self.world, kept, numbers, documents)

    def prove_objective(self, model: LanguageModel, objective: Objective, plan: Plan) -> list[Evidence]:
        """Evidence that a plugin's objective keeps the protocol on the first micro-batch. Raises ConfigError if it
        does not. Empty for built-in objectives, because tests check them."""
        name = objective.name
        if name not in OBJECTIVES.added():
            return []
        with self.oom_context("Trying the objective", MemoryPhase.training), torch.enable_grad():
            batch = self.own(plan).batch(0, 0).to(self.world.device)
            with self.techniques.precision.context(self.world.device):
                try:
                    returned = objective.loss(model, batch)
                except (RuntimeError, UserError) as error:
                    if (operator := self.nondeterministic(error)) is None:
                        raise
                    self.use_fastest_kernels(operator)
                    say(self.notes[-1])
                    returned = objective.loss(model, batch)
            if found := contract_broken(returned, objective.normalizer(plan, 0)):
                plugin = OBJECTIVES.added()[name]
                raise ConfigError(f"{plugin.file}: the objective `{name}` must return {CONTRACT}: {found}.")
            if model.routers is not None and model.routers.coefficient and not model.asked_routers:
                raise ConfigError(
                    f"techniques.router.aux_loss_coef={model.routers.coefficient:g}, and the objective `{name}` adds "
                    "no auxiliary loss. Set it to 0, or add what model.router_terms() returns to the loss."
                )
        loss, metrics = returned
        seen = f"{loss.item():.4g} for a micro-batch; metrics: {', '.join(metrics) or 'none'}"
        return [Evidence("objective", f"{name}: {CONTRACT}", seen, acted=True)]

    @phase("Trying the techniques", part="proofs")
    def observe(self, model: LanguageModel, plan: Plan | None = None, anew: bool = False) -> list[Evidence]:
        """Collect evidence of every technique and of the loss on `model`, which build() made. `plan`: its first
        micro-batch is compiled, so that the first step need not compile its forward pass. None: a small row is
        compiled. `anew`: take no evidence of earlier starts (kept_proofs.py)."""
        with self.oom_context("Trying the techniques"):
            probe = make_probe(model.model, self.facts.packing)
            file = kept_proofs.proof_file(self.config, self.hf_config, self.facts, self.techniques)
            kept = {} if anew else kept_proofs.read_kept(file)
            verify = partial(self.techniques.verify, model.prepared, probe, kept)
            model.prepared.first_pass = first = self._first_pass(model, plan)
            seen = catch_out_of_memory(verify) if first else verify()
            model.prepared.first_pass = None
            if isinstance(seen, MemoryExhausted):  # then the small row is compiled, and training halves its rows
                self.techniques.compile.drop()
                free_cached_memory(self.world.device)
                seen = verify()
            if not kept:
                kept_proofs.keep(file, seen)
            observed = [*seen, *model.evidence]
            if self.facts.device == "cuda":
                asked = f"{DETERMINISTIC}={str(self.config.run.deterministic).lower()}"
                kernels = "deterministic kernels" if self.facts.deterministic else "the fastest kernels"
                observed.append(Evidence("kernels", asked, kernels, acted=True))
            if self.facts.in_backward:
                with self.techniques.precision.context(self.world.device):
                    observed.append(in_backward.observe(model.model, probe))
            if self.world.context_ranks > 1:
                with self.techniques.precision.context(self.world.device):
                    layers = attention_layers(self.facts.text)
                    observed.append(context.observe(model.model, self.world, layers, self.facts.packing))
            if model.prepared.sharding is not None:
                model.prepared.sharding.free_gathered()
            with self.techniques.precision.context(self.world.device):
                if model.prepared.sharding is not None:
                    observed += divided_weights.observe(model.model, probe, model.prepared.sharding)
                elif (experts := observe_computed(model.model, probe)) is not None:
                    observed.append(experts)
            return observed

    def _first_pass(self, model: LanguageModel, plan: Plan | None) -> FirstPass | None:
        """The pass over this rank's first micro-batch of `plan`. None if nothing is compiled, if the steps have no
        rows yet, if the pass takes longer than compiling again or sends tensors to the host, or if ranks share weights
        or rows: they must run the same passes, and a pass may not fit on one rank."""
        if plan is None or not self.techniques.compile.enabled or self.config.objective.needs.rollouts:
            return None
        if self.facts.tokens > LONGEST_PASS or model.prepared.offload or self.world.shares:
            return None
        try:
            batch = self.own(plan).batch(0, 0).to(self.world.device)
        except LostImageError:
            return None  # the first step names the row

        def run() -> torch.Tensor:
            with in_mode(model.model, training=True), torch.enable_grad():
                return model.prepared.with_head(lambda: model.states(batch))

        return FirstPass(run, *batch.input_ids.shape)

    @phase("Making the optimizer", part="optimizer")
    def train_step(
        self, model: LanguageModel, objective: Objective, loss_scale: LossScale | None = None, recorded: bool = True
    ) -> TrainStep:
        """The training step of `model` with a new optimizer.

        `loss_scale`: None: the recipe's loss scale. `recorded`: whether passes may run as CUDA graphs if
        techniques.compile asks for these.
        """
        config, precision, compile = self.config, self.techniques.precision, self.techniques.compile
        with self.oom_context("Making the optimizer"):
            if (sharding := model.prepared.sharding) is not None and self.facts.device == "cuda":
                spare = self.facts.free_memory - self.techniques.memory_need(self.facts).device
                sharding.accumulates = 4 * scattered_parameters(self.facts) < spare
            one_by_one = self.facts.in_backward
            images = for_images(model.model)
            optimizer = Optimizer(model.model, config.optimizer, compile.keep_gradients, one_by_one, sharding, images)
            loss_scale = loss_scale or precision.loss_scale(self.facts.dtype, self.world.device)
            return TrainStep(
                model,
                objective,
                optimizer,
                precision,
                loss_scale,
                config.train,
                config.run.seed,
                recorded=recorded and compile.records,
                world=self.world,
                parallel=config.parallel,
                bucket_bytes=config.parallel.bucket_bytes(self.techniques.lora.enabled),
            )

    def learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of step `step` in a run of `steps` steps."""
        return learning_rate(self.config.schedule, self.config.optimizer.lr, step, steps)

    def own(self, plan: Plan) -> Plan:
        """This rank's part of `plan`: its micro-batches, and its piece of their rows."""
        world = self.world
        return plan.for_rank(world.data_rank, world.data_ranks).with_row_piece(world.context_rank, world.context_ranks)

    def held_out(self, plan: Plan, model: LanguageModel, objective: Objective, **loader: Any) -> HeldOutEvaluation:
        """The evaluation of `model` on `plan`. The caller must close it. `loader`: other options of the loader."""
        load = partial(Loader, config=replace(self.config.loader, **loader), device=self.world.device)
        return HeldOutEvaluation(plan, load, model, objective, self.techniques.precision, self.world)

    def meter(self, model: nn.Module, plan: Plan, tokens: int = 0, supervised_tokens: int = 0) -> Meter:
        """A throughput meter for the steps of `plan`. `tokens`, `supervised_tokens`: counts of earlier steps."""
        autocast = self.techniques.precision.autocast
        dtype = None if autocast is Autocast.none else autocast.value
        return Meter(
            model,
            plan,
            self.world.device,
            tokens,
            supervised_tokens,
            dtype=dtype,
            ranks=self.world.size,
            forward_passes=self.config.objective.forward_passes,
        )

    @contextmanager
    def oom_context(self, part: str, phase: MemoryPhase = MemoryPhase.weights) -> Iterator[None]:
        """A context that raises the error of out_of_memory() if its body runs out of memory. `part`: names the body's
        work in the message."""
        try:
            with self.world.connected():
                yield
        except (RuntimeError, MemoryError) as error:
            if found := out_of_memory_reason(error):
                raise self.out_of_memory(f"{part} ran out of memory: {found}", phase) from error
            raise

    def out_of_memory(
        self,
        message: str,
        phase: MemoryPhase,
        rows: int | None = None,
        row_length: int | None = None,
        micro_batches: int = 1,
    ) -> HardwareError:
        """An error with `message` and the changes of the recipe that would help most.

        `rows`, `row_length`: the size of the micro-batch that did not fit; None: the largest of the recipe.
        `micro_batches`: how many its step has.
        """
        rows = rows or self.facts.micro_batch_size
        row_length = row_length or self.facts.row_length
        facts = replace(self.facts, micro_batch_size=rows, rows=(row_length,))
        keys = change_for(self.config, facts) if micro_batches == 1 else ""
        needed, changes = oom_advice.advice(facts, self.techniques, self.config.optimizer, phase, keys)
        return HardwareError(f"{message}\n{oom_advice.to_text(needed, changes, phase, rows, row_length)}")
