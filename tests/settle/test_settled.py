"""What cannot work is refused from configs alone, on any machine: no weight is loaded, all reasons come at once.

Each case is a recipe and a machine that is made up (plain MachineFacts), so no GPU is needed. A case names the keys that the message
must give as reasons, and a word of each cause.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from fxtune.config.compose import load
from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError, UserError
from fxtune.settle.settled import Settled, settle
from fxtune.system.machine import facts as machine_facts
from fxtune.system.machine.facts import PACKAGES, MachineFacts, installed_packages
from fxtune.system.machine.tested_versions import WITHIN

GB = 10**9
INSTALLED = {
    **dict.fromkeys(PACKAGES, "0.1"),
    **{name: version for name, version in installed_packages().items() if name in WITHIN},
    "flash-attn-4": "4.0.0b36",
    "bitsandbytes": "0.50.2",
    "torchao": "0.18.0",
    "liger-kernel": "0.8.5",
}
H200 = MachineFacts(
    device="cuda",
    device_name="NVIDIA H200",
    capability=(9, 0),
    memory=150 * GB,
    free_memory=149 * GB,
    host_memory=250 * GB,
    cores=16,
    packages=INSTALLED,
)
A100 = replace(H200, device_name="NVIDIA A100-SXM4-80GB", capability=(8, 0), memory=85 * GB, free_memory=84 * GB)
T4 = replace(H200, device_name="Tesla T4", capability=(7, 5), memory=16 * GB, free_memory=15 * GB)
CPU = MachineFacts(
    device="cpu",
    device_name="8 cores, x86_64",
    cores=8,
    memory=64 * GB,
    free_memory=64 * GB,
    host_memory=64 * GB,
    packages=INSTALLED,
)
BARE = replace(
    H200,
    packages={name: INSTALLED[name] for name in ("torch", "transformers", "peft", "datasets", "tokenizers", "wandb")},
)

SIZES = "hidden_size:512,intermediate_size:1024,num_hidden_layers:2,num_attention_heads:4,vocab_size:1024"


def model(kind: str, more: str = "", positions: int = 8192, heads: str = "num_key_value_heads:2,head_dim:128") -> str:
    """The word of the command line for a random model of this kind."""
    parts = [f"model_type:{kind}", SIZES, f"max_position_embeddings:{positions}", heads, more]
    return f"model.architecture={{{','.join(part for part in parts if part)}}}"


LLAMA = model("llama")
BIG = (
    "model.architecture={model_type:llama,hidden_size:4096,intermediate_size:14336,num_hidden_layers:32,"
    "num_attention_heads:32,num_key_value_heads:8,vocab_size:128256,max_position_embeddings:1048576}"
)
BFLOAT16, LORA = "model.dtype=bfloat16", "techniques=lora"


class Case(NamedTuple):
    what: str
    machine: MachineFacts
    words: tuple[str, ...]
    expected: dict[str, str]
    """Key -> a word of its reason (a regular expression)."""


def case(what: str, machine: MachineFacts, *words: str, architecture: str = LLAMA, **expected: str) -> Case:
    keys = {key.replace("__", "."): text for key, text in expected.items()}
    return Case(what, machine, (architecture, *words), keys)


ATTENTION, ROPE, COMPILE = "techniques.attention.backend", "techniques.rope", "techniques.compile"
CASES = [
    case("flash4 on Ampere", A100, BFLOAT16, f"{ATTENTION}=flash4", **{ATTENTION: "A100"}),
    case("flash2 without its package", BARE, BFLOAT16, f"{ATTENTION}=flash2", **{ATTENTION: "(?i)package.*install"}),
    case(
        "a kernel of the hub that is not pinned",
        H200,
        BFLOAT16,
        f"{ATTENTION}='hub:kernels-community/flash-attn'",
        **{ATTENTION: "pin", "techniques.attention.trust_remote_code": "code"},
    ),
    case(
        "packing with layers that carry state over",
        H200,
        BFLOAT16,
        "data.packing=true",
        architecture="model.architecture={model_type:rwkv,hidden_size:64,num_hidden_layers:2,vocab_size:1024}",
        **{ATTENTION: "data.packing=false"},
    ),
    case(
        "packing without its proof",
        H200,
        "data.packing=true",
        "techniques.attention.enabled=false",
        **{"techniques.attention.enabled": "data.packing"},
    ),
    case(
        "Liger without its package",
        BARE,
        BFLOAT16,
        "techniques.liger.enabled=true",
        "techniques.liger.kernels=[rms_norm]",
        **{"techniques.liger": "liger-kernel"},
    ),
    case(
        "more positions than the model has",
        H200,
        BFLOAT16,
        "data.sequence_length=8193",
        **{f"{ROPE}.enabled": "beyond the 8192"},
    ),
    case(
        "YaRN that does not reach",
        H200,
        BFLOAT16,
        "techniques.rope.enabled=true",
        "techniques.rope.factor=4",
        "data.sequence_length=65536",
        **{f"{ROPE}.factor": "fewer than data.sequence_length=65536"},
    ),
    case("bfloat16 weights on Turing", T4, BFLOAT16, **{"techniques.precision.autocast": "bfloat16"}),
    case("float16 weights trained in full", H200, "model.dtype=float16", **{"techniques.lora.enabled": "float16"}),
    case(
        "a quantised base without adapters",
        H200,
        BFLOAT16,
        "techniques.quantize.enabled=true",
        **{"techniques.quantize": "lora"},
    ),
    case(
        "too many lengths, compiled",
        H200,
        BFLOAT16,
        f"{COMPILE}.enabled=true",
        "data.packing=false",
        f"data.buckets=[{','.join(str(n) for n in range(64, 2048, 64))}]",
        **{COMPILE: "buckets"},
    ),
    case(
        "CUDA graphs on a CPU",
        CPU,
        f"{COMPILE}.enabled=true",
        f"{COMPILE}.mode=reduce_overhead",
        **{f"{COMPILE}.mode": "device is cpu"},
    ),
    case(
        "the compiler's budget without the compiler",
        H200,
        BFLOAT16,
        "techniques.checkpointing.enabled=true",
        "techniques.checkpointing.policy=budget",
        **{"techniques.checkpointing.policy": "compile"},
    ),
    # what no host's memory holds
    case(
        "8B weights and their moments in 64 GB",
        CPU,
        BIG,
        "model.dtype=float32",
        **{"model.path": r"take 119\.\d GiB, and this machine has 59\.6 GiB\. Use techniques\.lora"},
    ),
    case(
        "a million tokens in 64 GB",
        CPU,
        BIG,
        "model.dtype=bfloat16",
        LORA,
        "data.sequence_length=1048576",
        **{"data.sequence_length": r"1 x 1048576 tokens .* techniques\.checkpointing\.enabled=true"},
    ),
    case("8-bit AdamW without a package", BARE, BFLOAT16, "optimizer.name=adamw_8bit", optimizer__name="torchao"),
]
"""One or two for each technique, from a recipe and a machine to the key; the technique's own tests have the others."""


@pytest.fixture(autouse=True)
def _compilers(monkeypatch):
    """The machines have compilers, whatever is installed here."""
    monkeypatch.setattr(machine_facts.shutil, "which", lambda name: f"/usr/bin/{name}")


def settled(machine: MachineFacts, *words: str) -> Settled:
    return settle(load(["model.path=null", "model.init=random", "model.tokenizer=builtin:tiny", *words]), machine, 1)


def reasons(error: UserError) -> list[str]:
    return [line.strip().replace("`", "") for line in str(error).splitlines()]


@pytest.mark.parametrize("given", CASES, ids=[each.what for each in CASES])
def test_recipe_is_refused_with_key_and_cause(given):
    with pytest.raises(ConfigError) as caught:
        settled(given.machine, *given.words)
    found = reasons(caught.value)
    for key, cause in given.expected.items():
        assert any(key in line and re.search(cause, line.partition(key)[2]) for line in found), found


@pytest.mark.parametrize("machine", [H200, A100, CPU, BARE], ids=["H200", "A100", "CPU", "no packages"])
def test_supported_recipe_is_not_refused(machine):
    words = (
        LLAMA,
        "model.dtype=float32" if machine is CPU else BFLOAT16,
        LORA,
        "techniques.rope.enabled=true",
        "techniques.rope.factor=2",
        "data.sequence_length=16384",
        "techniques.checkpointing.enabled=true",
    )
    assert "auto" not in str(settled(machine, *words).techniques.attention.backend)


def test_large_recipe_is_refused_only_on_a_small_host():
    small = replace(CPU, memory=24 * GB, host_memory=24 * GB)
    recipe = load(
        ["+recipe=llama_yarn_64k", "model=llama_8b_shape", "model.dtype=float32", "techniques.compile.enabled=false"]
    )
    with pytest.raises(ConfigError, match=r" 22\.4 GiB\. Use "):
        settle(recipe, small, 1)
    settle(recipe, replace(small, memory=200 * GB), 1)
    settled(replace(small, device="cuda", capability=(9, 0)), BIG, BFLOAT16, LORA)  # a card's own word is soon enough


OFFLOAD = (BIG, BFLOAT16, "optimizer.offload=true", "optimizer.stochastic_rounding=true", "train.max_grad_norm=0")
"""Full fine-tuning of 8B. Its moments are in float32, 59.8 GiB."""


@pytest.mark.parametrize("words", [(), ("policy=full", "offload=inputs")], ids=["auto", "offloaded inputs"])
def test_moments_that_exceed_the_hosts_memory_are_one_refusal(words):
    words = (
        *OFFLOAD,
        "techniques.checkpointing.enabled=true",
        *(f"techniques.checkpointing.{word}" for word in words),
    )
    with pytest.raises(ConfigError) as caught:
        settled(replace(H200, host_memory=64 * 2**30), *words)
    (line,) = reasons(caught.value)[1:]
    assert line.startswith("optimizer.offload: the moments of a rank take 59.8 GiB. ")
    assert "64.0 GiB" in line
    assert "optimizer.moments to bfloat16" in line
    settled(replace(H200, host_memory=64 * 2**30), *words, "optimizer.moments=bfloat16")


def test_activations_get_the_hosts_memory_that_moments_leave():
    words = (*OFFLOAD, *(f"techniques.checkpointing.{it}" for it in ("enabled=true", "policy=full", "offload=inputs")))
    words = (*words, "data.sequence_length=131072")

    def senders(gib: float, *more: str) -> int | None:
        return settled(replace(H200, host_memory=int(gib * 2**30)), *words, *more).techniques.checkpointing.senders

    assert senders(140) is None
    assert senders(80) == 4  # of 64 GiB, moments leave 4.2 GiB, and an input has 1 GiB
    assert senders(80, "optimizer.offload=false") is None
    with pytest.raises(ConfigError, match=r"not one layer's tensors .* without the optimizer's moments"):
        senders(75)


def test_five_mistakes_are_reported_in_one_message():
    with pytest.raises(ConfigError) as caught:
        settled(
            A100,
            LLAMA,
            BFLOAT16,
            "data.packing=false",
            "techniques.rope.enabled=true",
            "techniques.rope.factor=1",
            f"{ATTENTION}=flash4",
            "techniques.lora.enabled=true",
            "techniques.lora.dora=true",
            "techniques.lora.init=pissa",
            "techniques.checkpointing.enabled=true",
            "techniques.checkpointing.every=9",
            f"{COMPILE}.enabled=true",
        )
    keys = [line.partition(":")[0] for line in reasons(caught.value)[1:]]
    assert keys == [
        f"{ROPE}.factor",
        ATTENTION,
        "techniques.lora.init",
        "techniques.checkpointing.every",
        f"{COMPILE}.enabled",
    ]


def test_a_package_that_fails_counts_as_missing_and_the_next_choice_is_tried():
    config = load(["model.path=null", "model.init=random", "model.tokenizer=builtin:tiny", LLAMA, BFLOAT16, LORA])
    fails, asked = {"flash-attn-4": "ImportError: no CTK"}, []

    def tries(machine, packages, heads):
        asked.append(set(packages))
        return {name: why for name, why in fails.items() if name in packages and name in machine.packages}

    found, whole = settle(config, H200, 1, tries=tries), settle(config, H200, 1)
    assert whole.techniques.attention.backend == "flash4"
    assert found.techniques.attention.backend != "flash4"
    assert "flash-attn-4" in asked[0]
    assert "flash-attn-4" not in found.facts.packages
    assert found.facts.broken == fails
    assert any("no CTK" in note for note in found.notes)


def test_facts_are_of_one_of_the_ranks_before_and_after_they_start():
    config = load(
        ["model.path=null", "model.init=random", "model.tokenizer=builtin:tiny", LLAMA, "train.global_batch_size=4"]
    )
    alone = settle(config, CPU, 2).facts
    there = settle(config, replace(CPU, host_memory=CPU.host_memory // 2), 2, present=2).facts
    assert alone == there
    assert alone.degrees == Degrees(replicate=2)
    assert alone.host_memory == CPU.host_memory // 2


def test_what_cannot_run_is_settled_without_checks():
    words = (LLAMA, "model.dtype=float32", f"{ATTENTION}=flash4")
    with pytest.raises(ConfigError, match="flash4"):
        settled(CPU, *words)
    config = load(["model.path=null", "model.init=random", "model.tokenizer=builtin:tiny", *words])
    assert settle(config, CPU, 1, checks=False).facts.sequence_length == config.data.sequence_length
