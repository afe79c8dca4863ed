"""Selects the attention kernel, and proves that packed documents do not see each other.

Packed rows carry no attention mask. Kernels for documents of any length read from `cu_seqlens` where each begins
(packed.py). For other kernels transformers reads it from `position_ids`, which restart at 0 in each document, and
builds a mask. A model or a kernel that ignores both trains without an error, to a worse result (0.03 to 0.15 of final
loss in reports). So `verify` changes the tokens of one document: the logits of all others must stay the same.

Speed, forward and backward in TFLOP/s, measured on an H200 with 32 query and 8 key heads of 128, causal:

              4 x 4k   1 x 64k
    flash4       522       609   FlashAttention-4, package flash-attn-4
    cudnn        488       547   cuDNN's, in torch. It runs packed rows document by document, so `auto` skips it there
    sdpa         264       326   torch's built-in FlashAttention-2

Only `flash4`, `flex` and `eager` take sinks (gpt-oss), and only `flash4` without the scores or a block mask.

`flash3` and `flash2` are the packages' kernels, called by transformers; `flex` compiles a kernel for a block mask;
`eager` stores the scores, which takes rows x heads x length^2 memory, and supports everything. `hub:ORG/KERNEL@COMMIT`
takes a compiled kernel from the Hugging Face hub. Each backend is a file in backends/, and registry.py there lists the
backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import nearest
from fxtune.facts.execution import Execution
from fxtune.facts.options import AttentionOptions
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import observing, outputs
from fxtune.system.process.profiler import Observed, observe_operators, short_name
from fxtune.techniques.attention import context, isolation, linear, recurrent, vision_encoder
from fxtune.techniques.attention.backends.backend import Backend, offers
from fxtune.techniques.attention.backends.eager import EAGER
from fxtune.techniques.attention.backends.registry import ALL, BACKENDS, HUB, backend_of, called, hub
from fxtune.techniques.attention.backends.sdpa import SDPA
from fxtune.techniques.base import NO_IMAGE, Evidence, Technique
from fxtune.upstream.transformers import attention_of, set_attention

ISOLATING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
ATTENDING_LAYERS = ISOLATING_LAYERS | {"attention", "hybrid"}
"""Layers that call attention, some of them beside recurrent parts."""
RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"}
ISOLATED = "packed documents do not see each other"
SHARES_PROMPT = "two answers see one prompt, and not each other"
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}(:\w+)?")


@dataclass
class Attention(AttentionOptions, Technique):
    _packed = False  # whether rows are packed: resolve() sets it
    _shares = False  # whether answers share the prompt in a row: resolve() sets it
    _operators = False  # whether linear.py's operators run here: resolve() sets it
    _by_auto = False  # whether resolve() chose the backend: then layers without attention are no error

    def __post_init__(self) -> None:
        self._running: Backend | None = None
        """The backend that runs for the recipe's `backend`; resolve() sets it."""

    def check(self, facts: Facts) -> Iterator[str]:
        kind = facts.text.get("model_type", "this model")
        if self.trust_remote_code and not self.backend.startswith(HUB):
            yield f"trust_remote_code: only backend=hub:... reads it, and backend is {self.backend}. Set it to false."
        if (why := facts.broken.get(linear.PACKAGE)) and facts.device == "cuda" and recurrent.is_served(facts.model):
            yield (  # transformers calls the package, too, so its gradients would be wrong without fxtune's operators
                f"backend: the recurrent layers of {kind} run {linear.PACKAGE} on this GPU, and its test fails: "
                f"{why}. Install what the message names, or uninstall {linear.PACKAGE}: then slower code runs."
            )
        others = set(facts.text.get("layer_types") or ()) - ISOLATING_LAYERS
        unsure = facts.packing and (others or kind in RECURRENT)
        if unsure and (unknown := recurrent.kinds_without(facts.model, facts.text, others)):
            yield (  # attention to blocks of earlier tokens: rows of a small model are too short to show it
                f"backend: the {', '.join(sorted(unknown))} layers of {kind} carry state from one packed document "
                "into the next with any backend. Set data.packing=false."
            )
        elif (
            unsure
            and (why := isolation.try_small_model(facts.text).packed)
            and isolation.try_small_model(facts.text, by_bounds=True).packed  # else the backends' refusals decide
        ):
            yield (
                f"backend: {why}, because of its {', '.join(sorted(others)) or 'recurrent'} layers, with any backend. "
                "Set data.packing=false."
            )
        scaled = facts.text.get("floor_scale") if facts.text.get("attn_temperature_tuning") else None
        if facts.packing and scaled and facts.sequence_length > scaled:
            yield (  # Llama 4's layers without RoPE; rows of a small model are too short to show it
                f"backend: in {kind} of transformers, queries are scaled by their place in the row, not in their "
                f"document, in rows of more than floor_scale={scaled} tokens. Set data.packing=false."
            )
        if not attention_layers(facts.text):
            if self.backend != "auto":
                yield f"backend: {kind} has no attention that {self.backend} could run. Set it to auto."
            return
        if self.backend == "auto":
            if all(any(backend.refusals(facts)) for backend in BACKENDS.values()):
                yield (
                    "backend: auto finds no backend that can run. "
                    + "; ".join(f"{name} {next(backend.refusals(facts))[0]}" for name, backend in BACKENDS.items())
                    + "."
                )
            return
        of_hub = self.backend.startswith(HUB)
        if not of_hub and self.backend not in BACKENDS:
            near = nearest(self.backend, BACKENDS)
            names = f"There are auto, {', '.join(BACKENDS)} and hub:ORG/KERNEL@COMMIT."
            yield f"backend: there is no {self.backend}. {f'Did you mean {near}?' if near else names}"
            return
        if of_hub and not PINNED.fullmatch(self.backend.removeprefix(HUB)):
            yield (
                f"backend: {self.backend} is not pinned. A kernel of the hub is compiled code, so give the commit "
                "that you trust: hub:ORG/KERNEL@ and its 40 digits."
            )
        if of_hub and not self.trust_remote_code:
            yield (
                f"trust_remote_code: false, but backend={self.backend} runs compiled code of its author. Set it to "
                "true if you trust that commit."
            )
        for cause, change in (hub(self.backend) if of_hub else BACKENDS[self.backend]).refusals(facts):
            yield f"backend: {self.backend} {cause}. {change}."

    def packages(self, facts: Facts) -> Iterator[str]:
        backends = [BACKENDS[self.backend]] if self.backend in BACKENDS else []
        if self.backend == "auto" and attention_layers(facts.text):
            backends = [backend for backend in BACKENDS.values() if not backend.why_passed_over(facts)][:1]
        for backend in backends:
            if backend.package is not None:
                yield backend.package.name
        if facts.device == "cuda" and recurrent.is_served(facts.model):
            yield linear.PACKAGE

    def resolve(self, facts: Facts) -> str | None:
        self._packed, self._shares = facts.packing, facts.shares_prompts
        self._operators = linear.has_kernels(facts)
        if not attention_layers(facts.text):
            self.enabled = facts.packing  # then it proves that documents are kept apart
            none = f"{facts.text.get('model_type')} has no attention"
            return f"proves that documents are kept apart; {none}" if facts.packing else f"off, because {none}"
        note, passed = None, []
        for name in BACKENDS if self.backend == "auto" else ():
            if why := BACKENDS[name].why_passed_over(facts):
                passed.append(f"{name} {why}")
                continue
            self.backend, self._by_auto = name, True
            why = f" ({'; '.join(passed)})" if passed and facts.device == "cuda" else ""
            note = f"auto chose {name}, the fastest that is correct here{why}"
            break
        chosen = backend_of(self.backend)
        self._running = chosen.running(facts) if chosen else None
        return note

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        backend = backend_of(self.backend)
        return replace(execution, repeats_keys=facts.device != "cuda" or (backend is not None and not backend.fused))

    def reads_bounds(self, facts: Facts) -> bool:
        """Whether the backend that resolve() takes reads the bounds of documents (packed.py)."""
        running = self._to_run(facts)
        return running is not None and running.core is not None

    def why_not_shared(self, facts: Facts) -> str | None:
        """Why documents of a row cannot share their prompt; None if they can."""
        if attention_layers(facts.text) and not Shape.of(facts.model).causal:
            return f"in {facts.text.get('model_type')} the tokens of a prompt also see the answer"
        facts = replace(facts, shares_prompts=True)
        running = self._to_run(facts)
        if running is None:
            return f"techniques.attention.backend={self.backend} does not take bounds of keys"
        if not running.shares:
            return f"{running.name} does not take bounds of keys here"
        cause = next((cause for cause, _ in running.refusals(facts)), None)
        return f"{running.what} {cause}" if cause else isolation.why_not_shared(facts.text)

    def _to_run(self, facts: Facts) -> Backend | None:
        """The backend that runs in place of the chosen backend; None before a choice, and for a kernel of the hub."""
        if not attention_layers(facts.text):
            return None
        candidates = [backend for name, backend in BACKENDS.items() if self.backend in ("auto", name)]
        chosen = next((backend for backend in candidates if not backend.why_passed_over(facts)), None)
        return None if chosen is None else chosen.running(facts)

    def configure(self, hf_config: Any) -> None:
        backend = self._backend(hf_config)
        backend.prepare()
        set_attention(hf_config, backend.implementation)
        # Attention in a vision encoder is not causal, which kernels for packed documents are.
        images = kind_of(hf_config).images
        for vision in images.configs(hf_config) if images else ():
            set_attention(vision, (EAGER if backend is EAGER else SDPA).implementation)

    def apply(self, model: PreparedModel, world: World) -> None:
        if world.context_ranks > 1:
            context.register(self._backend(model.module.config))
        recurrent.separate(model.module, self._operators, self._packed)
        if self._backend(model.module.config) is not EAGER:
            vision_encoder.attend_at_once(model.module, world.device)

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        backend = self._backend(model.module.config)
        implementation = backend.implementation
        text = model.module.config.get_text_config()
        layers = attention_layers(text.to_dict())
        seen: list[tuple[str, str, bool]] = []
        # Without compiled code: compiling the layers for the probe's length, too, would take minutes.
        with observing(model.module):
            if layers:
                calls, observation = _operators(model.module, probe, layers)
                # Not every config of a hybrid says how many of its layers attend.
                some = self._by_auto and [*calls] == [implementation] and text.model_type not in isolation.PROVEN
                acted = calls.get(implementation, 0) >= layers or some
                seen.append((f"{self.backend}: {backend.what}", observation, acted))
            if in_recurrence := recurrent.observe(model.module, probe):
                seen.append(in_recurrence)
            if isolation.document_numbers(probe).any():
                seen.append(self._isolation(model.module, probe))
                if kind_of(model.module.config).images:
                    seen.append(self._isolation_of_images(model.module))
            if in_encoder := vision_encoder.observe(model.module):
                seen.append(in_encoder)
            if self._shares:
                seen.append(self._shared(model.module))
        yield from (Evidence("attention", *observation) for observation in seen)

    @staticmethod
    def _isolation(model: nn.Module, probe: dict[str, Any]) -> tuple[str, str, bool]:
        count, moved, leaked = isolation.movement(model, probe)
        return (
            ISOLATED,
            f"changing {min(count, isolation.MOST_DOCUMENTS)} of {count} documents, one by one, moved its own logits "
            f"by at least {moved:.2g}, the others' by at most {leaked:.2g}",
            isolation.is_isolated(moved, leaked),
        )

    @staticmethod
    def _shared(model: nn.Module) -> tuple[str, str, bool]:
        seen = isolation.share_prompt(model)
        return (
            SHARES_PROMPT,
            f"the second answer's logits are within {seen.difference:.1e} of its logits alone; changing the first "
            f"answer moved its own logits by {seen.moved:.2g}, all others by at most {seen.leaked:.2g}",
            seen.is_exact,
        )

    @staticmethod
    def _isolation_of_images(model: Any) -> tuple[str, str, bool]:
        images = images_of(model.config)
        if not images.probe(model):
            return ISOLATED, NO_IMAGE, True
        if not any(feature.any() for feature in images.features(model)):
            return ISOLATED, "all features of an image are 0, as a new projector of Gemma 3 makes them", True
        moved, leaked = isolation.image_movement(model)
        seen = f"changing a document's image moved its own logits by {moved:.2g}, the others' by at most {leaked:.2g}"
        return ISOLATED, seen, isolation.is_isolated(moved, leaked)

    def _backend(self, hf_config: Any) -> Backend:
        """The backend that runs. An unresolved `auto` takes transformers' default."""
        if self._running is not None and self._running.name == self.backend:
            return self._running
        if chosen := backend_of(self.backend):
            return chosen
        text = hf_config.get_text_config()
        capped = getattr(text, "attn_logit_softcapping", None)
        return SDPA if offers(text.model_type, SDPA.flag) and not capped else EAGER


def attention_layers(text: dict[str, Any]) -> int:
    """How many layers of a model call attention, from the config of its decoder. Others are recurrent."""
    if text.get("model_type") in RECURRENT:
        return 0
    kinds = text.get("layer_types")
    depth = next((text[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if text.get(name)), 1)
    return sum(kind in ATTENDING_LAYERS for kind in kinds) if kinds else int(depth)


def _operators(model: nn.Module, probe: dict[str, Any], layers: int) -> tuple[dict[str, int], str]:
    """The calls of each implementation in one forward pass, by the profiler; and a description of them."""
    own = called(attention_of(model.config))
    backends = {backend.implementation: backend for backend in (*ALL, own)}
    # Of backends with one operator, only the model's own.
    patterns = {
        name: backend.ran
        for name, backend in backends.items()
        if backend.ran and (backend.ran != own.ran or name == own.implementation)
    }
    with own.counting() as count:
        ran = observe_operators(lambda: outputs(model, **probe), patterns)
        if count[0]:
            ran[own.implementation] = Observed(count[0] // 2)  # observe_operators() calls the model twice
    ran = {name: seen for name, seen in ran.items() if seen.calls}
    # Do not count the kernel that sdpa chose a second time.
    ran = {name: seen for name, seen in ran.items() if backends[name].part_of not in ran}
    if len(ran) > 1:
        ran = {name: seen for name, seen in ran.items() if not backends[name].elsewhere}
    calls = (
        " and ".join(f"{seen.calls} calls of {backends[name].what}" for name, seen in ran.items())
        or "no attention operator"
    )
    kernels = sorted({short_name(kernel) for seen in ran.values() for kernel in seen.kernels})
    return (
        {name: seen.calls for name, seen in ran.items()},
        f"{calls} in {layers} layers" + (f", on the device: {', '.join(kernels)}" if kernels else ""),
    )
