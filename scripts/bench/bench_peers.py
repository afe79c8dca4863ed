"""Compares the speed of fxtune, TRL and Unsloth on this GPU with the same model, tokens and settings.

    python scripts/bench/bench_peers.py --json peers.json                                    # all cases, over an hour
    python scripts/bench/bench_peers.py --cases 8b_4x4096,1b_8x4096 --minutes 9 --json peers.json  # in parts: continues
    python scripts/bench/bench_peers.py --tools fxtune --cases 8b_4x4096 --set techniques.lora.fused=off
    python scripts/bench/bench_peers.py --tools fxtune --cases moe_4x4096 --profile          # also the time of each kernel
    python scripts/bench/bench_peers.py --minutes 0 --json peers.json  # only the table of finished cases
    python scripts/bench/bench_peers.py --gpus 2 --json peers.json     # the same on two cards; with one card in one table
    python scripts/bench/bench_peers.py --gpus 2 --tools fxtune --profile --json peers.json  # also what no kernel hides of the exchange
    python scripts/bench/bench_peers.py --cases classify_8b,embed_modernbert --minutes 9 --json companions.json
    python scripts/bench/bench_peers.py --cases embed_0_6b,distill_8b_1b,distill_8b_1b_chats --minutes 9 --json companions.json
    python scripts/bench/bench_peers.py --cases policy_8b_8x1024,policy_8b_mixed --minutes 9 --json policy.json
    python scripts/bench/bench_peers.py --smoke                                              # a short test on a CPU

Each case of each tool runs in its own process. It trains a Llama shape with random weights in bfloat16 with LoRA r=16
and alpha=32 on all linear layers of a block and all experts of a mixture, without dropout, with fused AdamW at a constant learning rate of
1e-4 and one micro-batch per optimizer step. All tools train on the same files. A file holds either documents of random
tokens, each exactly as long as a row, or chats with log-normal lengths of mean 500. Each tool tokenizes and packs the
chats itself into rows of the same length. The loss is over every token.

Cases with `full` in their name train all weights, which are bfloat16 in each tool, and so are AdamW's moments. On one
card fxtune rounds weights and moments stochastically. TRL runs torch's fused AdamW, which rounds to nearest. Sharded
over several cards, fxtune rounds to nearest, too. Cases whose names end in `fp8` or `8bit` change fxtune alone: TRL
still multiplies in bfloat16 and keeps its moments in bfloat16. In `fp8` fxtune multiplies by the layers' linears in fp8
(techniques.float8). In `8bit` its moments have 8 bits, and only weights are rounded stochastically.

Cases that begin with `dpo` train on pairs of answers. fxtune packs them; TRL pads each answer to the longest of the
micro-batch. All tools get the same token ids. Tokens of both documents of a pair count, the prompt in each. Cases with
`stored` in their name have the reference's log-probabilities computed before the first step, in TRL
`precompute_ref_log_probs`; these seconds are not measured. fxtune computes the prompt of a pair once, in rows that
are as much shorter (four pairs of 512 + 512 + 512 tokens fill 6,148 of 6,272, not 8,192); cases with `whole` in their
name compute it for each answer, as TRL does. Half of all tokens are prompt, so a quarter of them is not computed again.

Speed is document tokens per second over the steps after the warm-up. The clock synchronizes the device before and
after these steps and nowhere between, so compilation and loading count as warm-up. Peak memory is torch's figure for
the process. The table also shows the seconds from the command, as this script starts the process, to the end of the
second step, for which each tool waits for the device. What a tool has cached on this machine makes them fewer, so
compare rows whose caches were all empty or all filled.

Cases that begin with `vl` train Qwen2.5-VL's 7B shape with LoRA on its language model. A document is a chat with one
JPEG of noise and 320 tokens of text; its answer is supervised. In `vl_7b_1024` each image has 1,024 tokens and
a step 12 documents. In `vl_7b_mixed` images have 64 to 4,096 tokens. fxtune packs these documents into rows of 16,384
tokens; peers pad 12 documents a step, which is as many on average, in micro-batches of the size that is fastest for
them. Peers train with their own collators for images and with as many workers for data as fxtune. Tokens of images
and text count, padding does not. `waits` is the share of the time in which the tool's loop waits for data.

Cases that begin with `qwen3_5` train the language model of Qwen3.5, with adapters on the linears of a block's attention
or gated delta and of its MLP or experts, but none on the two small projections of a gated delta's decay and step. Chats
are packed by fxtune alone. Peers pad a step of 32 chats, which is as many on average, in micro-batches of 8. All tools
run the kernels of fla-core, where it is installed.

Cases that begin with `classify`, `embed` or `distill` train companion models and students (companions.py). Both tools
read the same random weights from a folder; the folders of all cases take 36 GB of `--scratch`. Only one peer runs. In
`classify_8b` it is plain transformers with peft (tool `transformers`), on texts of log-normal lengths of mean 200,
padded to the longest of a micro-batch. In `embed_*` it is sentence-transformers 6.2 (`pip install
sentence-transformers`) with CachedMultipleNegativesRankingLoss, on 1,024 pairs of 256 and 256 tokens a step. Both tools
train all weights, in float32 under bfloat16 autocast. In `distill_*` it is TRL 1.16's DistillationTrainer, which gets
the answers of the rows in place of the student's own. The divergence is the forward KL, and all weights of the student
are trained in bfloat16. Row and summary count tokens of texts once, though each text of `embed_*` is computed twice.

Cases that begin with `policy` train on the answers to four prompts a step, with eight answers to each prompt. TRL 1.16's
GRPOTrainer gets the same prompts, answers, log-probabilities and advantages in place of answers that it samples, so the
figures are of training alone (whole_step.py measures the other parts, too). Both tools read one folder of random
weights, each step has the same answers, and both have the same loss: the clipped surrogate, bounded at 0.8 and 1.28 and
divided by the step's tokens. In `policy_8b_8x1024` a prompt has 512 tokens and an answer 1,024; in `policy_8b_mixed`
lengths are drawn evenly from 1 to 2,048. fxtune packs answers and computes a prompt once for its eight answers; TRL
pads a micro-batch to the longest answer of the step. Tokens per second count the prompt with each answer, for both
tools; `sampled tokens/s` counts answers alone. The case `whole` computes the prompt for each answer, as TRL does.

With `--gpus N` each card has as many rows as the one card has without it. fxtune starts its ranks itself (run.gpus=N);
peers are started by torchrun and run as DistributedDataParallel, or FSDP2 in full fine-tuning, as their documentation
says. Tokens per second count all cards, memory is of the fullest card. The table compares this speed with N times the speed of one card,
if the file of --json also has a row of one card. With --profile it has the share of a step in which the first card does nothing but
exchange with the others (NCCL kernels that no other kernel hides, in two further steps). docs/distributed.md has figures.

Each peer runs as its documentation describes, with the fastest of its settings that fits: the first of VARIANTS that
runs; with images, where the fastest is not known before, the fastest of the first that fit of each group of ONE_SIZE or
SIZES. The table names it. Peers use no code of fxtune and no network. The table also shows the losses. Each tool draws
its own random weights, so the losses are close but not equal; a tool that trained on fewer tokens would show a
different loss.

A case that the JSON file already holds does not run again, nor do the settings of peers that a file beside it
(NAME.variants.json) holds. `--set KEY=VALUE` applies to fxtune only; its row shows the
value.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import baselines  # noqa: E402
import image_documents  # noqa: E402
from baselines import Measurement  # noqa: E402
from companions import Task  # noqa: E402
from peer_tools import is_mixture, write_model  # noqa: E402
from shapes import SHAPES, in_words, with_positions  # noqa: E402

TOOLS = ("fxtune", "trl", "unsloth", "transformers", "sentence_transformers")
TOKENIZER = ROOT / "fxtune" / "assets" / "tiny"
END = 330
"""The built-in tokenizer's end of an answer."""
WORDS = 1000
"""Upper limit of the random documents' token ids. The built-in tokenizer has all of them."""
MEAN, SIGMA = 500, 1.0
"""Mean (in tokens) and sigma of the chats' log-normal lengths."""
FAST = ("techniques=[lora,fast]",)
FULLY = ("techniques=[full,fast]", "model.dtype=bfloat16")
ROUNDED = (*FULLY, "optimizer.stochastic_rounding=true", "optimizer.moments=bfloat16")
ROUNDED_FP8 = ("techniques=[full_fp8,fast]", *ROUNDED[1:])
ROUNDED_8BIT = (*FULLY, "optimizer.stochastic_rounding=true", "optimizer.name=adamw_8bit")
SHARDED = (*FULLY, "parallel.replicate=1")
SHARDED_FP8 = (*ROUNDED_FP8[:1], *SHARDED[1:])
FP8 = (*FAST, "techniques.quantize.enabled=true", "techniques.quantize.type=fp8")
DPO = ("objective=dpo", "objective.reference=start")
DPO_STORED = ("objective=dpo", "objective.reference=stored")
WHOLE = ("data.share_prompts=false",)
IN_FLOAT32 = ("techniques=[full,fast]", "model.dtype=float32")
SMOKE_LORA, SMOKE_FULL = ("techniques=lora",), ("techniques=full", "model.dtype=float32")

MIXED = (*FAST, "techniques.lora.rank_pattern={gate_up_proj: 16}", "techniques.lora.alpha_pattern={gate_up_proj: 32}")
"""Rank 16 on gate and up together, as peers have it. By default fxtune has 16 for each of them, as peft reads the names
gate_proj and up_proj."""
MIXED_FP8 = (*MIXED, *FP8[len(FAST) :])
MIXED_MXFP4 = (*MIXED, "techniques.quantize.enabled=true", "techniques.quantize.type=mxfp4", "run.memory_gib=24")
NF4 = (*FAST, "techniques.quantize.enabled=true", "techniques.quantize.type=nf4")


@dataclass(frozen=True)
class Case:
    shape: str
    length: int
    rows: int
    ours: tuple[str, ...] = FAST
    """Command-line keys of fxtune in addition to the common ones."""
    several: Optional[tuple[str, ...]] = None
    """The same on several cards, if they differ."""
    peer_case: Optional[str] = None
    """The case whose peer rows this case is compared with, if it has none of its own."""
    chats: bool = False
    pairs: int = 0
    """Pairs of a step; 0: no preferences."""
    packed_length: int = 0
    """Tokens of fxtune's rows, if a step's pairs fill fewer tokens because their prompts are computed once; 0:
    `length`."""
    steps: int = 20
    warm_up: int = 3
    full: bool = False
    """Full fine-tuning in place of LoRA; sharded over the cards, if there are several."""
    most_gpus: Optional[int] = None
    """The most cards that the case runs on; None: any number."""
    images: Optional[tuple[int, int]] = None
    """Least and most tokens of an image, of which each document has one; None: no images."""
    step_documents: int = 0
    """Documents of a step of peers, with images."""
    text: int = 0
    """Tokens of a document beside its image."""
    task: Optional[Task] = None
    """What a companion model learns, or a student; None: the loss of every token, or pairs."""
    micro_batches: int = 1
    """fxtune's micro-batches of a step on a card."""
    context: bool = False
    """Whether the cards share each row (parallel.context), in place of rows for each card."""

    def keys(self, gpus: int) -> tuple[str, ...]:
        """fxtune's own keys on `gpus` cards."""
        keys = self.ours if gpus == 1 or self.several is None else self.several
        return (*keys, f"parallel.context={gpus}") if self.context and gpus > 1 else keys

    def step_rows(self, gpus: int) -> int:
        """Rows of a step, on all cards together."""
        return self.rows * self.micro_batches * (1 if self.context else gpus)

    @property
    def peers(self) -> tuple[str, ...]:
        return (self.task.peer,) if self.task else ("trl", "unsloth")

    @property
    def workers(self) -> int:
        """Processes that read data, for each tool."""
        return 8 if self.images else 1


def _learning(
    shape: str, length: int, rows: int, ours: tuple[str, ...], task: Task, micro_batches: int = 1, steps: int = 20
) -> Case:
    some = dict(steps=2, warm_up=2) if task.repeats else dict(steps=steps)
    return Case(shape, length, rows, ours, most_gpus=1, task=task, micro_batches=micro_batches, **some)


ANSWERS = 8
"""Answers to a prompt in the cases of policies."""


def _policy_case(
    shape: str,
    length: int,
    prompts: int,
    answers: tuple[int, int],
    prompt: int,
    ours: tuple[str, ...] = FAST,
    peer_case: Optional[str] = None,
) -> Case:
    """`prompts`: of a step. `answers`: the `mean` and `longest` of Task. `prompt`: tokens of a prompt."""
    log_prob = -math.log(SHAPES[shape]["vocab_size"])
    task = Task(
        "policy",
        prompts * ANSWERS,
        *answers,
        prompt=prompt,
        answers=ANSWERS,
        log_prob=log_prob,
        repeats=True,
    )
    return Case(shape, length, 1, ours, peer_case=peer_case, warm_up=2, most_gpus=1, task=task, micro_batches=prompts)


CASES = {
    "8b_4x4096": Case("8b", 4096, 4),
    "8b_4x4096_fp8": Case("8b", 4096, 4, FP8, peer_case="8b_4x4096"),
    "1b_8x4096": Case("1b", 4096, 8),
    "1b_8x4096_fp8": Case("1b", 4096, 8, FP8, peer_case="1b_8x4096"),
    "8b_chats": Case("8b", 4096, 4, chats=True),
    "8b_chats_fp8": Case("8b", 4096, 4, FP8, peer_case="8b_chats", chats=True),
    "8b_1x65536": Case("8b", 65536, 1, steps=4, warm_up=2),
    "8b_1x65536_fp8": Case("8b", 65536, 1, FP8, peer_case="8b_1x65536", steps=4, warm_up=2),
    "8b_1x65536_30gib": Case("8b", 65536, 1, (*FAST, "run.memory_gib=30"), peer_case="8b_1x65536", steps=4, warm_up=2),
    "8b_1x131072": Case("8b", 131072, 1, steps=1, warm_up=1, context=True),
    "8b_1x409600": Case("8b", 409600, 1, steps=1, warm_up=1, context=True),
    "70b_1x4096": Case("70b", 4096, 1, FAST, (*FAST, "parallel.replicate=1")),
    "70b_1x4096_fp8": Case("70b", 4096, 1, FP8, (*FP8, "parallel.replicate=1")),
    "70b_1x4096_nf4": Case("70b", 4096, 1, NF4, most_gpus=1),
    "moe_4x4096": Case("moe", 4096, 4, MIXED),
    "moe_4x4096_fp8": Case("moe", 4096, 4, MIXED_FP8, peer_case="moe_4x4096"),
    "30b_a3b_4x4096": Case("30b_a3b", 4096, 4, MIXED, (*MIXED, "parallel.replicate=1")),
    "30b_a3b_4x4096_fp8": Case(
        "30b_a3b", 4096, 4, MIXED_FP8, (*MIXED_FP8, "parallel.replicate=1"), peer_case="30b_a3b_4x4096"
    ),
    "gpt_oss_4x4096": Case("gpt_oss", 4096, 4, MIXED),
    "gpt_oss_4x4096_mxfp4": Case("gpt_oss", 4096, 4, MIXED_MXFP4, peer_case="gpt_oss_4x4096", most_gpus=1),
    "moe_full_4x4096": Case("moe", 4096, 4, ROUNDED, SHARDED, full=True),
    "30b_a3b_full_2x4096": Case("30b_a3b", 4096, 2, ROUNDED, SHARDED, full=True),
    "1b_full_8x4096": Case("1b", 4096, 8, ROUNDED, SHARDED, full=True),
    "1b_full_8x4096_fp8": Case("1b", 4096, 8, ROUNDED_FP8, SHARDED_FP8, peer_case="1b_full_8x4096", full=True),
    "8b_full_2x8192": Case("8b", 8192, 2, ROUNDED, SHARDED, full=True),
    "8b_full_2x8192_fp8": Case("8b", 8192, 2, ROUNDED_FP8, SHARDED_FP8, peer_case="8b_full_2x8192", full=True),
    "8b_full_2x8192_8bit": Case("8b", 8192, 2, ROUNDED_8BIT, peer_case="8b_full_2x8192", full=True, most_gpus=1),
    "dpo_8b_8x1024": Case("8b", 8192, 1, (*FAST, *DPO), pairs=4, packed_length=6272),
    "dpo_8b_8x1024_whole": Case("8b", 8192, 1, (*FAST, *DPO, *WHOLE), peer_case="dpo_8b_8x1024", pairs=4),
    "dpo_8b_8x1024_stored": Case("8b", 8192, 1, (*FAST, *DPO_STORED), pairs=4, packed_length=6272),
    "dpo_8b_8x1024_stored_whole": Case(
        "8b", 8192, 1, (*FAST, *DPO_STORED, *WHOLE), peer_case="dpo_8b_8x1024_stored", pairs=4
    ),
    "dpo_8b_8x1024_fp8": Case("8b", 8192, 1, (*FP8, *DPO), peer_case="dpo_8b_8x1024", pairs=4, packed_length=6272),
    "dpo_8b_8x1024_stored_fp8": Case(
        "8b", 8192, 1, (*FP8, *DPO_STORED), peer_case="dpo_8b_8x1024_stored", pairs=4, packed_length=6272
    ),
    "dpo_8b_chats": Case("8b", 4096, 4, (*FAST, *DPO), chats=True, pairs=16),
    "dpo_8b_chats_whole": Case("8b", 4096, 4, (*FAST, *DPO, *WHOLE), peer_case="dpo_8b_chats", chats=True, pairs=16),
    "dpo_8b_chats_stored": Case("8b", 4096, 4, (*FAST, *DPO_STORED), chats=True, pairs=16),
    "vl_7b_1024": Case("qwen2_5_vl_7b", 16128, 1, images=(1024, 1024), step_documents=12, text=320),
    "vl_7b_1024_fp8": Case(
        "qwen2_5_vl_7b", 16128, 1, FP8, peer_case="vl_7b_1024", images=(1024, 1024), step_documents=12, text=320
    ),
    "vl_7b_mixed": Case("qwen2_5_vl_7b", 16384, 1, images=(64, 4096), step_documents=12, text=320),
    "vl_7b_mixed_fp8": Case(
        "qwen2_5_vl_7b", 16384, 1, FP8, peer_case="vl_7b_mixed", images=(64, 4096), step_documents=12, text=320
    ),
    "qwen3_5_4b_4x4096": Case("qwen3_5_4b", 4096, 4),
    "qwen3_5_9b_4x4096": Case("qwen3_5_9b", 4096, 4),
    "qwen3_5_9b_chats": Case("qwen3_5_9b", 4096, 4, chats=True, step_documents=32),
    "qwen3_5_9b_1x65536": Case("qwen3_5_9b", 65536, 1, steps=2, warm_up=2),
    "qwen3_5_35b_4x4096": Case("qwen3_5_35b", 4096, 4, MIXED),
    "qwen3_vl_8b_1024": Case("qwen3_vl_8b", 16128, 1, images=(1024, 1024), step_documents=12, text=320),
    "qwen3_5_vl_9b_1024": Case("qwen3_5_vl_9b", 16128, 1, images=(1024, 1024), step_documents=12, text=320),
    "gemma4_31b_4x4096": Case("gemma4_31b", 4096, 4),
    "llama4_scout_4x4096": Case("llama4_scout", 4096, 4, MIXED),
    "classify_8b": _learning("8b", 4096, 4, FAST, Task("classification", 80, 200, longest=1024)),
    "embed_modernbert": _learning("modernbert", 8192, 4, IN_FLOAT32, Task("embedding", 1024, 256, pool="mean"), 16),
    "embed_0_6b": _learning("qwen3_0_6b", 8192, 4, IN_FLOAT32, Task("embedding", 1024, 256, pool="last"), 16, 3),
    "distill_8b_1b": _learning("1b", 2048, 4, ROUNDED, Task("distillation", 4, 2048, teacher="8b")),
    "distill_8b_1b_chats": _learning("1b", 2048, 4, ROUNDED, Task("distillation", 16, MEAN, 2048, teacher="8b")),
    "policy_8b_8x1024": _policy_case("8b", 8832, 4, (1024, 0), 512),
    "policy_8b_8x1024_fp8": _policy_case("8b", 8832, 4, (1024, 0), 512, FP8, "policy_8b_8x1024"),
    "policy_8b_8x1024_whole": _policy_case("8b", 12288, 4, (1024, 0), 512, (*FAST, *WHOLE), "policy_8b_8x1024"),
    "policy_8b_mixed": _policy_case("8b", 8832, 4, (1024, 2048), 512),
    "smoke_policy": _policy_case("tiny", 256, 2, (24, 0), 40, SMOKE_LORA),
    "smoke_policy_mixed": _policy_case("tiny", 256, 2, (24, 48), 40, SMOKE_LORA),
    "smoke_classify": _learning("tiny", 1024, 1, SMOKE_LORA, Task("classification", 8, 60, 128, repeats=True)),
    "smoke_embed_encoder": _learning(
        "modernbert_tiny", 256, 1, SMOKE_FULL, Task("embedding", 8, 32, pool="mean", repeats=True), 2
    ),
    "smoke_embed_decoder": _learning(
        "tiny", 256, 1, SMOKE_FULL, Task("embedding", 8, 32, pool="last", repeats=True), 2
    ),
    "smoke_distill": _learning(
        "tiny", 1024, 1, SMOKE_FULL, Task("distillation", 8, 60, 128, teacher="tiny_teacher", repeats=True)
    ),
    "smoke_hybrid": Case("qwen3_5_tiny", 256, 2, steps=2, warm_up=2),
    "smoke_hybrid_chats": Case("qwen3_5_tiny", 1024, 2, chats=True, step_documents=4, steps=2, warm_up=2),
    "smoke": Case("tiny", 256, 2, steps=2, warm_up=2),
    "smoke_chats": Case("tiny", 1024, 2, chats=True, steps=2, warm_up=2),
    "smoke_dpo": Case("tiny", 512, 1, DPO, pairs=2, steps=2, warm_up=2),
    "smoke_vl": Case("qwen2_5_vl_tiny", 512, 1, images=(4, 64), step_documents=4, text=80, steps=2, warm_up=2),
}
SMOKE = tuple(name for name in CASES if name.startswith("smoke"))
DOES_NOT_FIT = "does not fit"
SPREAD = 0.15
"""p95 and p5 of a step's time that are further apart, as a share of p50, are reported: such a figure is of no steady machine."""
SHOWN = 0.005
"""Share of a step's time from which --profile shows a kernel."""
NONE, FULL = "checkpointing=none", "checkpointing=full"
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trl": ((NONE, "liger=on"), (FULL, "liger=on")),
    "unsloth": ((NONE,), ("checkpointing=unsloth",)),
}
"""Each peer's settings, the fastest first. The first that fits gives its row."""
FULL_ALONE = {"trl": VARIANTS["trl"], "unsloth": ()}
"""The same for full fine-tuning on one card. Unsloth's is not among the cases."""
FULL_FSDP = {"trl": (("fsdp=recompute", "liger=on"),), "unsloth": ()}
"""The same on several cards. Unsloth has none there."""
MIXTURE = {"trl": ((NONE, "liger=off"), (FULL, "liger=off")), "unsloth": VARIANTS["unsloth"]}
"""The same for a mixture of experts, with which Liger's kernels of TRL end in an error."""
WHOLE_MIXTURE = {"trl": MIXTURE["trl"][1:], "unsloth": VARIANTS["unsloth"][1:]}
"""The same for all 48 layers of Qwen3-30B-A3B, whose activations fit no card of 141 GB beside 57 GiB of weights."""
SINKS = {
    "trl": (
        *((one, "liger=off", "attention=flash_attention_4") for one in (NONE, FULL)),
        (FULL, "liger=off", "attention=eager"),
    ),
    "unsloth": VARIANTS["unsloth"],
}
"""The same for gpt-oss, whose attention has sinks. transformers cannot use torch's SDPA for it."""
PAIRED = {"trl": tuple((one, liger) for one in (NONE, FULL) for liger in ("liger=on", "liger=off")), "unsloth": ()}
"""The same for pairs. Unsloth's DPO is TRL's trainer over its own model; it is not compared here."""
LONG = {"trl": ((FULL, "liger=on"),), "unsloth": (("checkpointing=unsloth",),)}
"""The same for long rows, which fit no peer without recomputation."""
PADDED = {
    "trl": tuple((one, "liger=off", "micro=8") for one in (NONE, FULL)),
    "unsloth": tuple((one, "micro=8") for one in (NONE, "checkpointing=unsloth")),
}
"""The same for chats with recurrent layers. TRL packs them with `position_ids` alone, with which the state of a document
reaches the next one, so its rows are padded; Unsloth pads them by itself."""
TRL_KERNELS = (
    ("liger=on", "attention=flash_attention_2"),
    ("liger=on", "attention=flash_attention_4", "tower=sdpa"),
    ("liger=on", "attention=sdpa"),
    ("liger=off", "attention=sdpa"),
)
"""TRL's settings with images. FlashAttention 4 does not take the tower's heads of 80 dimensions on each card."""
ONE_SIZE = {
    "trl": (((NONE, "micro=12"), (NONE, "micro=4"), (FULL, "micro=12")),),
    "unsloth": (((NONE, "micro=12"), (NONE, "micro=4")), (("checkpointing=unsloth", "micro=12"),)),
}
"""For cases with images of one size: groups of settings that differ in memory, of which the first that fits is measured.
The fastest group gives the row. `micro`: documents of a micro-batch, which are padded to the longest."""
SIZES = {
    "trl": tuple(((NONE, micro), (FULL, micro)) for micro in ("micro=1", "micro=2", "micro=4")),
    "unsloth": tuple(((NONE, micro), ("checkpointing=unsloth", micro)) for micro in ("micro=1", "micro=2", "micro=4")),
}
"""The same for images of several sizes."""
PACKED_TRL = tuple(
    (*variant, f"attention={name}")
    for name in ("flash_attention_2", "flash_attention_4", "sdpa")
    for variant in VARIANTS["trl"]
)
"""TRL needs flash attention for packing. A variant whose package is not installed is skipped."""


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    began, left_out = time.monotonic(), []
    args.scratch.mkdir(parents=True, exist_ok=True)
    for name, tool in cases_to_run(args.cases, args.tools):
        key = row_key(name, tool, args.gpus)
        if key in rows and not args.again:
            continue
        if why := reason_not_to_run(tool, args.smoke, args.gpus):
            print(f"{key}: {why}", flush=True)
            continue
        left = args.minutes * 60 - (time.monotonic() - began)
        if left <= 0:
            left_out.append(key)
            continue
        print(f"{key} ...", flush=True)
        try:
            found = run_fxtune(name, args, left) if tool == "fxtune" else run_peer(name, tool, args, left)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            print(f"  {error}", flush=True)
            left_out.append(key)
            continue
        if (task := CASES[name].task) and "error" not in found:
            file = documents(CASES[name], args.scratch, args.steps or CASES[name].steps, args.gpus)
            found["examples_per_second"] = found["tokens_per_second"] / task.mean_tokens(file)
            if task.prompt:
                answer = task.mean_tokens(file) - task.prompt
                found["sampled_tokens_per_second"] = found["examples_per_second"] * answer
        print(f"  {found.get('error') or summary(found)}", flush=True)
        rows[key] = {"case": name, "tool": tool, "gpus": args.gpus, **found}
        if args.json:  # a case that failed for another reason than memory runs again next time
            kept = {key: row for key, row in rows.items() if row.get("error") in (None, DOES_NOT_FIT)}
            args.json.write_text(json.dumps(kept, indent=1))
    print(table(rows))
    counts = {row.get("gpus", 1) for row in rows.values()}
    found = [measurement(row, row.get("gpus", 1) if len(counts) > 1 else None) for row in rows.values()]
    baselines.save(args.baseline, found, max(counts, default=1))
    if left_out:
        print(f"\nNot run, the time limit ({args.minutes:g} minutes) was reached: {', '.join(left_out)}")


def arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=words, help=f"choose from {', '.join(CASES)}; default: all but the smoke cases"
    )
    parser.add_argument("--tools", type=words, default=list(TOOLS), help=f"choose from {', '.join(TOOLS)}")
    parser.add_argument("--gpus", type=int, default=1, help="cards that train together (1)")
    parser.add_argument("--steps", type=int, help="measured steps; default: 20, fewer for long rows")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time and list what did not run")
    parser.add_argument("--json", type=Path, help="add the rows to this file; cases that it holds do not run again")
    parser.add_argument("--again", action="store_true", help="also run the cases that the file holds")
    baselines.add_option(parser)
    parser.add_argument("--profile", action="store_true", help="also fxtune's time of a step by kernel")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key for fxtune only")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()) / "fxtune-peers",
        help="folder for documents, token caches and the models that Unsloth loads, whose weights take no space",
    )
    parser.add_argument("--smoke", action="store_true", help="run the tiny cases; works without a GPU")
    args = parser.parse_args()
    if args.gpus < 1:
        parser.error("--gpus: give 1 or more")
    args.cases = args.cases or [
        name
        for name, case in CASES.items()
        if (name in SMOKE) == args.smoke and args.gpus <= (case.most_gpus or args.gpus)
    ]
    for given, known in ((args.cases, CASES), (args.tools, TOOLS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    if args.steps is not None and args.steps < 1:
        parser.error("--steps: give 1 or more")
    return args


def cases_to_run(cases: list[str], tools: list[str]) -> Iterator[tuple[str, str]]:
    """(case, tool) in order. A peer runs once for all cases that share its rows."""
    seen = set()
    for name in cases:
        for tool in tools:
            pair = (name if tool == "fxtune" else CASES[name].peer_case or name), tool
            if pair not in seen and tool in ("fxtune", *CASES[name].peers):
                seen.add(pair)
                yield pair


def row_key(name: str, tool: str, gpus: int) -> str:
    """The key of a row in the file of --json."""
    return f"{name} {tool}" + f" x{gpus}" * (gpus > 1)


def reason_not_to_run(tool: str, smoke: bool, gpus: int = 1) -> str | None:
    """Why a tool cannot run on this machine, or None if it can."""
    if tool != "fxtune" and importlib.util.find_spec(tool) is None:
        return f"not run, {tool} is not installed here (pip install {tool.replace('_', '-')})"
    if tool == "unsloth" or not smoke:
        import torch

        if not torch.cuda.is_available():
            return "not run, it needs a GPU (--smoke runs a tiny shape without one)"
        if torch.cuda.device_count() < gpus:
            return f"not run, it needs {gpus} GPUs, and torch sees {torch.cuda.device_count()}"
    return None


def run_fxtune(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one case with fxtune, through its complete data path."""
    from fxtune.diagnostics.benchmark import measure_in_process

    case, steps = CASES[name], args.steps or CASES[name].steps
    words, _ = fxtune_words(name, args, args.gpus), write_folders(case, args.scratch)
    if case.task and case.task.objective == "policy":
        os.environ["FXTUNE_ROLLOUTS"] = str(documents(case, args.scratch, steps, args.gpus))
        words += ["--plugin", str(ROOT / "scripts" / "bench" / "given_rollouts.py")]
    with baselines.circumstances(visible_cards(args.gpus)) as made:
        found = measure_in_process([*words, *["--profile"] * args.profile], steps, case.warm_up, seconds)
    if "error" in found or found["loss"] is None:
        return {**made, "error": found.get("error", "the loss is not finite")}
    if args.profile:
        show_kernels(found["kernels"])
    kept = (
        *("tokens_per_second", "step_seconds", "step_seconds_p5", "step_seconds_p95", "memory_gib", "mfu", "loss"),
        *("device", "joules_per_token", "second_step_seconds", "startup_seconds", "slowest_behind", "decided"),
        *("data_wait", "memory_reserved_gib", "exchange_seconds"),
    )
    return {
        **made,
        **{key: found[key] for key in kept},
        "first_loss": found["losses"][0],
        "how": ", ".join(args.set) or "default",
        "keys": [*case.keys(args.gpus), *args.set],
        "command": words,
    }


def write_folders(case: Case, scratch: Path) -> dict[str, str]:
    """Write the models that both tools of a task read, if they do not exist. Returns their folders."""
    models = case.task.models(case.shape, scratch) if case.task else {}
    for shape, folder in models.values():
        write_model(SHAPES[shape], case.length, folder, TOKENIZER, case.task.head if case.task else "")
    return {name: str(folder) for name, (_, folder) in models.items()}


def show_kernels(kernels: list[tuple[str, float, float]]) -> None:
    """A step by kernel, the longest first. Kernels with a smaller share than SHOWN are added up in the last line."""
    from fxtune.system.process.profiler import short_name

    total = sum(seconds for _, seconds, _ in kernels)
    shown = [kernel for kernel in kernels if kernel[1] > SHOWN * total]
    rest = total - sum(seconds for _, seconds, _ in shown)
    for name, seconds, calls in [*shown, (f"{len(kernels) - len(shown)} others", rest, 0)]:
        print(f"    {seconds * 1e3:8.2f} ms {seconds / total:6.1%} {calls:6.0f} x {short_name(name)}", flush=True)


def fxtune_words(name: str, args: argparse.Namespace, gpus: int) -> list[str]:
    """fxtune's keys for a case on `gpus` cards."""
    import torch

    case, steps = CASES[name], args.steps or CASES[name].steps
    drawn = [
        "model.path=null",
        f"model.tokenizer={processor_folder(case, args.scratch) if case.images else 'builtin:tiny'}",
        "model.init=random",
        f"model.architecture={in_words(with_positions(SHAPES[case.shape], case.length))}",
    ]
    return [
        *(case.task.keys(case.shape, args.scratch) if case.task else drawn),
        f"data.sources=[{{path: '{documents(case, args.scratch, steps, gpus)}'}}]",
        f"data.cache_dir={args.scratch / 'tokens'}",
        f"data.sequence_length={case.packed_length or case.length}",
        "data.packing=true",
        f"data.workers={case.workers}",
        f"run.gpus={gpus}",
        *(["run.device=cpu"] if args.smoke and not torch.cuda.is_available() else []),
        f"train.micro_batch_size={case.rows}",
        f"train.global_batch_size={case.step_rows(gpus)}",
        "train.log_every=10",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
        *(["techniques=lora", *case.ours * bool(case.pairs)] if args.smoke and not case.task else case.keys(gpus)),
        *args.set,
    ]


def processor_folder(case: Case, scratch: Path) -> Path:
    """The folder of the processor of a case with images."""
    shape = SHAPES[case.shape]
    return image_documents.write_processor(TOKENIZER, scratch / f"processor-{shape['model_type']}", shape)


def run_peer(name: str, tool: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one case with a peer, with its fastest settings that fit."""
    case, began = CASES[name], time.monotonic()
    steps = args.steps or case.steps
    groups = settings_to_try(case, tool, args.gpus)[-1 if args.smoke else 0 :]
    if not groups:
        return {"error": "not compared here"}
    tokenizer = processor_folder(case, args.scratch) if case.images else TOKENIZER
    request = dict(
        tool=tool,
        shape=SHAPES[case.shape],
        length=case.length,
        rows=case.rows,
        steps=steps,
        warm_up=case.warm_up,
        chats=case.chats,
        pairs=case.pairs,
        stored="stored" in name,
        full=case.full,
        step_documents=case.task.documents if case.task else case.step_documents,
        step_tokens=step_tokens(case),
        workers=8 if case.task else case.workers,  # sentence-transformers tokenizes in them, fxtune before
        documents=str(documents(case, args.scratch, steps, args.gpus)),
        tokenizer=str(tokenizer),
        task=asdict(case.task) if case.task else None,
        **write_folders(case, args.scratch),
        out=str(args.scratch / "peer.json"),
    )
    if tool == "unsloth":
        request["model"] = str(
            write_model(SHAPES[case.shape], case.length, args.scratch / f"random-{case.shape}", tokenizer)
        )
    measured: list[dict[str, Any]] = []
    found: dict[str, Any] = {"error": "no package that it needs is installed"}
    tried: list[str] = []
    for group in groups:
        for variant in group:
            if needs_missing_package(variant):
                continue
            found = run_variant(name, variant, request, args, seconds - (time.monotonic() - began))
            if "error" not in found:
                measured.append(found)
                break
            tried.append(f"{', '.join(variant)}: {found['error']}")
            if case.images and found["error"] != DOES_NOT_FIT:  # a group differs in memory alone
                break
    if not measured:
        return {**found, "tried": tried} if tried else found
    fastest = max(measured, key=lambda one: one["tokens_per_second"])
    slower = [f"{one['how']}: {summary(one)}" for one in measured if one is not fastest]
    return {**fastest, "tried": tried + slower}


def run_variant(
    name: str, variant: tuple[str, ...], request: dict[str, Any], args: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """Run one case with a peer and these of its settings, or look it up. Raises subprocess.TimeoutExpired."""
    tool, how, out = request["tool"], ", ".join(variant), Path(request["out"])
    store = args.json.with_suffix(".variants.json") if args.json else None
    known = json.loads(store.read_text()) if store and store.exists() else {}
    key = f"{row_key(name, tool, args.gpus)} {request['steps']} {how}"
    if key in known and not args.again:
        return dict(known[key])
    log = args.scratch / f"{name}-{tool}.log"
    out.unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    command = [
        sys.executable,
        *(torchrun if args.gpus > 1 else []),
        str(ROOT / "scripts" / "bench" / "peer_tools.py"),
        json.dumps({**request, **dict(word.split("=") for word in variant)}),
    ]
    cards = visible_cards(args.gpus)
    with baselines.circumstances(cards) as made:
        started = time.time()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=args.scratch,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": cards},
            timeout=max(1.0, seconds),
        )
    log.write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        measured = json.loads(out.read_text())
        second_step = measured.pop("second_step_at") - started
        found = {**made, **measured, "second_step_seconds": second_step, "how": how}
    else:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else done.returncode
        why = DOES_NOT_FIT if "out of memory" in done.stderr else f"failed: {last}"[:300]
        found = {**made, "error": why, "log": str(log)}
    if store and found.get("error") in (None, DOES_NOT_FIT):
        store.write_text(json.dumps({**known, key: found}, indent=1))
    return found


def step_tokens(case: Case) -> int | None:
    """Tokens of each step of a peer; None if steps differ."""
    if case.task:
        return case.task.step_tokens
    if not case.images:
        return None if case.chats else case.rows * case.length
    least, most = case.images
    return case.step_documents * (least + case.text) if least == most else None


def settings_to_try(case: Case, tool: str, gpus: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Groups of a peer's settings for a case on `gpus` cards; in a group the fastest first. None if it is not compared
    there."""
    if case.task:
        return case.task.settings()
    if case.images:
        groups = (ONE_SIZE if case.images[0] == case.images[1] else SIZES)[tool]
        kernels = TRL_KERNELS if tool == "trl" else ((),)
        return tuple(tuple((*variant, *given) for variant in group) for given in kernels for group in groups)
    found = one_group(case, tool, gpus)
    return (found,) if found else ()


def one_group(case: Case, tool: str, gpus: int) -> tuple[tuple[str, ...], ...]:
    """A peer's settings for a case without images."""
    if case.pairs:
        return PAIRED[tool]
    mixture = is_mixture(SHAPES[case.shape])
    if case.full:
        return () if mixture else (FULL_ALONE if gpus == 1 else FULL_FSDP)[tool]
    if mixture:
        special = {"gpt_oss": SINKS, "30b_a3b": WHOLE_MIXTURE, "qwen3_5_35b": WHOLE_MIXTURE}
        return special.get(case.shape, MIXTURE)[tool]
    hybrid = "linear_key_head_dim" in SHAPES[case.shape]
    if case.chats and hybrid:
        return PADDED[tool]
    if case.chats and tool == "trl":
        return PACKED_TRL
    return (LONG if case.length > 16384 else VARIANTS)[tool]


def visible_cards(gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES with `gpus` cards only: with more, a peer's trainer would use all of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join((visible.split(",") if visible else [str(number) for number in range(gpus)])[:gpus])


def needs_missing_package(variant: tuple[str, ...]) -> bool:
    """Whether a variant needs a package that is not installed."""
    if "attention=flash_attention_2" in variant:
        return importlib.util.find_spec("flash_attn_2_cuda") is None
    if "attention=flash_attention_4" in variant:
        return importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None
    return False


def documents(case: Case, folder: Path, steps: int, gpus: int = 1) -> Path:
    """The JSONL file with a case's documents, enough for all steps. Writes the file if it does not exist."""
    count = (steps + case.warm_up) * case.step_rows(gpus)
    if case.images:
        (least, most), side = case.images, image_documents.side(SHAPES[case.shape])
        # Steps of peers have a fixed number of documents; rows of documents of several sizes are never quite full.
        all_steps = (steps + case.warm_up) * gpus
        tokens = count * case.length if least == most else (count + 1) * case.length
        return image_documents.write_documents(
            folder / f"images-{side}-{least}-{most}-{case.text}-{count}",
            all_steps * case.step_documents,
            tokens,
            case.text,
            (least, most),
            TOKENIZER,
            side,
        )
    if case.task:
        return case.task.write_documents(folder, steps + case.warm_up, TOKENIZER)
    kind = "pairs-" * bool(case.pairs) + ("chats" if case.chats else "random")
    file = folder / f"{kind}-{case.length}-{count}.jsonl"
    if not file.exists():
        made = (
            pairs(case, (steps + case.warm_up) * gpus)
            if case.pairs
            else chats(case.length, count * case.length)
            if case.chats
            else (
                {"input_ids": random.Random(number).choices(range(3, WORDS), k=case.length)} for number in range(count)
            )
        )
        staging = file.with_suffix(".part")
        with staging.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in made)
        staging.rename(file)
    return file


def pairs(case: Case, steps: int) -> Iterator[dict[str, Any]]:
    """Pairs of random tokens as groups of two documents, of which the answers are supervised. A document is half prompt
    and half answer; without chats all have the same length, and a step's pairs fill its rows."""
    draw = random.Random(0)
    each = case.rows * case.length // (2 * case.pairs)

    def length() -> int:
        if not case.chats:
            return each // 2
        return min(max(2, round(draw.lognormvariate(math.log(MEAN / 2) - SIGMA**2 / 2, SIGMA))), case.length // 4)

    # Chats have more pairs than a step needs, because a packed row can hold more short ones.
    for _ in range(steps * case.pairs * (2 if case.chats else 1)):
        prompt = draw.choices(range(3, WORDS), k=length())
        answers = [[*draw.choices(range(3, WORDS), k=length() - 1), END] for _ in range(2)]
        documents = [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer} for answer in answers]
        yield {"documents": documents}


def chats(longest: int, tokens: int) -> Iterator[dict[str, str]]:
    """Chats of about `tokens` tokens in total, each at most `longest`, as plain text in the template's markup.

    Plain text has no roles, so every tool computes the loss over every token.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    draw = random.Random(0)
    words = [
        "".join(draw.choices("etaoinshrdlucmfwypvbgkqjxz", range(26, 0, -1), k=draw.randint(1, 9)))
        for _ in range(5000)
    ]
    pool = " ".join(draw.choices(words, [1 / (rank + 3) for rank in range(5000)], k=200_000))
    chars_per_token = len(pool[:200_000]) / len(tokenizer.encode(pool[:200_000]).ids)
    frame = len(tokenizer.encode(rendered(["", ""])).ids)

    def text(size: float) -> str:
        start = draw.randrange(len(pool) - int(size * chars_per_token) - 1)
        return pool[start : start + max(1, int(size * chars_per_token))].strip()

    made = 0
    while made < tokens:
        size = draw.lognormvariate(0, SIGMA) * MEAN / 2.718281828 ** (SIGMA**2 / 2)
        turns = 2 * draw.randint(1, 1 + min(3, int(size / 100)))
        body = max(turns, min(size, 0.9 * longest) - frame * turns / 2) / turns
        chat = rendered([text(body * (0.4 if at % 2 == 0 else 1.6)) for at in range(turns)])
        length = len(tokenizer.encode(chat).ids)
        if length <= longest:
            made += length
            yield {"text": chat}


def rendered(turns: list[str]) -> str:
    """A chat in ChatML, as the tokenizer's template renders it, without the final line break."""
    roles = ("user", "assistant")
    return "\n".join(f"<|im_start|>{roles[at % 2]}\n{text}<|im_end|>" for at, text in enumerate(turns))


def measurement(row: dict[str, Any], cards: int | None = None) -> Measurement:
    """A row as a file of benchmarks/baselines holds it. `cards`: of the row, in a file with several numbers of cards."""

    def rounded(name: str, digits: int, factor: float = 1.0) -> float | None:
        value = row.get(name)
        return None if value is None else round(factor * value, digits or None)

    case, parts, exchange = CASES[row["case"]], row.get("startup_seconds"), row.get("exchange_seconds")
    return Measurement(
        row["case"],
        row["tool"],
        row["how"] if row.get("how", "default") != "default" else "",
        keys=row.get("keys"),
        shape=case.shape,
        rows=case.rows,
        length=case.length,
        packed=case.chats,
        tokens_per_second=rounded("tokens_per_second", 0),
        step_ms=rounded("step_seconds", 0, 1e3),
        step_ms_p5=rounded("step_seconds_p5", 0, 1e3),
        step_ms_p95=rounded("step_seconds_p95", 0, 1e3),
        memory_gib=rounded("memory_gib", 2),
        reserved_gib=rounded("memory_reserved_gib", 2),
        joules_per_token=rounded("joules_per_token", 4),
        seconds_to_second_step=rounded("second_step_seconds", 1),
        startup_seconds=parts and {part: round(seconds, 1) for part, seconds in parts.items()},
        cards=cards,
        exchange_share=None if exchange is None else round(exchange / row["step_seconds"], 4),
        clock_mhz=row.get("clock_mhz"),
        error=row.get("error", ""),
        date=row.get("date", ""),
        card=baselines.card(row["device"]) if row.get("device") else "",
        versions=row.get("versions"),
    )


def summary(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s{examples(row)}, {times(row)}, {gib(row)} GiB, "
        f"loss {row['first_loss']:.3f} -> {row['loss']:.3f}{waits(row)} ({row['how']})"
    )


def times(row: dict[str, Any]) -> str:
    """p5, p50 and p95 of a step's time, and how far p5 and p95 are apart if they are far apart."""
    low, middle, high = row.get("step_seconds_p5"), row["step_seconds"], row.get("step_seconds_p95")
    if low is None or high is None:  # files of earlier versions have the median alone
        return f"{middle * 1e3:,.0f} ms"
    apart = (high - low) / middle
    said = f" (p5 and p95 are {apart:.0%} of p50 apart)" if apart > SPREAD else ""
    return f"{low * 1e3:,.0f}, {middle * 1e3:,.0f}, {high * 1e3:,.0f} ms{said}"


def examples(row: dict[str, Any]) -> str:
    rate, sampled = row.get("examples_per_second"), row.get("sampled_tokens_per_second")
    return (f", {rate:,.1f} examples/s" if rate else "") + (f", {sampled:,.0f} sampled tokens/s" if sampled else "")


def waits(row: dict[str, Any]) -> str:
    share, behind = row.get("data_wait"), row.get("slowest_behind")
    return (f", waits {share:.0%}" if share else "") + ("" if behind is None else f", slowest rank {behind:+.1%}")


def gib(row: dict[str, Any]) -> str:
    return "?" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown.

    fxtune / peer is fxtune's speed divided by the peer's; in fxtune's row, by the best peer's.
    """
    lines = [
        "| case | cards | tool | settings | tokens/s | p5, p50, p95 of a step | peak GiB | s to step 2 | first loss | loss "
        "| fxtune / peer | of N times one card | exchange not hidden |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    cards = sorted({row.get("gpus", 1) for row in rows.values()})
    for name, gpus in itertools.product(CASES, cards):
        mine = rows.get(row_key(name, "fxtune", gpus))
        keys = [row_key(CASES[name].peer_case or name, tool, gpus) for tool in TOOLS[1:]]
        peers = [rows[key] for key in keys if key in rows]
        measured = [row for row in peers if "error" not in row]
        best = max((row["tokens_per_second"] for row in measured), default=None)
        shown = [row for row in peers if row["case"] == name]
        for row in [*([mine] if mine else []), *shown]:
            against = (best if row is mine else row.get("tokens_per_second")) if mine and "error" not in mine else None
            ratio = f"{mine['tokens_per_second'] / against:.2f}x" if mine and against else ""
            lines.append(table_row(row, ratio, rows.get(row_key(row["case"], row["tool"], 1), {})))
    return "\n".join(lines)


def table_row(row: dict[str, Any], ratio: str, one: dict[str, Any]) -> str:
    """`one`: the same row of one card, empty if there is none."""
    gpus = row.get("gpus", 1)
    where = f"| {row['case']} | {gpus} | {row['tool']} |"
    if "error" in row:
        return f"{where} {row['error']} | | | | | | | | | |"
    alone, exchange = one.get("tokens_per_second") if gpus > 1 else None, row.get("exchange_seconds")
    several = f"{row['tokens_per_second'] / alone / gpus:.3f}" if alone else ""
    share = "" if exchange is None or gpus == 1 else f"{exchange / row['step_seconds']:.2%}"
    start = row.get("second_step_seconds")  # files of earlier versions have none of peers
    return (
        f"{where} {row['how']} | {row['tokens_per_second']:,.0f} | {times(row)} | "
        f"{gib(row)} | {'' if start is None else f'{start:.0f}'} | {row['first_loss']:.3f} | {row['loss']:.3f} | {ratio} | "
        f"{several} | {share} |"
    )


if __name__ == "__main__":
    main()
