"""Every key of the schema acts or is refused, or a line of the run names it as unread. No number of any size ends in a
traceback or in no end.

`CASES` says, for each key, another value, what is set beside it, and where its effect is observed (support/observed.py:
batches, a step, a run). A new key fails until it has a line. What an observer sees is built or trained from the config,
and is never the config itself.

A quarter of the keys are seen here only as a refusal: one process on a CPU cannot show that `tf32`, `float8`,
`parallel.shard` and others act. The tests of their modules, tests/gpu and tests/distributed show it.

Slow are cases that train a whole run, each for a key that has a fast test elsewhere, and the ends of all ranges: fast
tests here refuse what is beyond them.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from support.harness import command, write_chats, write_texts
from support.lm_eval_standin import write_task
from support.observed import (
    batches,
    benched,
    built,
    compiled,
    evaluated_slowly,
    exhausted,
    launched,
    loaded,
    priced,
    rates,
    refreshed,
    spiking,
    step,
    tokenizing,
    tracked,
    trained,
)
from support.processors import write_model, write_picture_rows

from fxtune.config.compose import typed
from fxtune.config.introspection import LARGEST, Slot
from fxtune.config.root import Config
from fxtune.config.validate import Validator
from fxtune.errors import UserError
from fxtune.plugins import files_used

NARROW = (
    "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
    "head_dim: 8}"
)
PARSER = OverridesParser.create()
BASE = (
    f"model.architecture={NARROW}",
    "data.eval_fraction=0.3",
    "train.epochs=null",
    "train.max_steps=3",
    "train.global_batch_size=2",
    "checkpoint.every=1",
    "tracking.display=none",
    "run.report=false",
    "run.device=cpu",
)
"""What each case starts from: three steps of LoRA on chats (support/harness.py), with held-out data."""


@dataclass(frozen=True)
class Case:
    observe: Callable[[Config], Any]
    value: str
    """Another value, as it is typed."""
    beside: str = ""
    """What is set beside it, as words of a command line."""
    refused: str = ""
    """A part of the message, for a value that is refused here."""


INT8 = "techniques.quantize.type=int8"
READS_IMAGES = "model.architecture={model_type: qwen2_5_vl, text_config: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, vocab_size: 4096, rope_parameters: {rope_type: default, rope_theta: 1e4, mrope_section: [1, 1, 2]}}, vision_config: {depth: 1, hidden_size: 16, intermediate_size: 24, num_heads: 2, patch_size: 4, out_hidden_size: 16, fullatt_block_indexes: [0]}, image_token_id: 4090, video_token_id: 4091}"
MIXTURE = "model.architecture={model_type: mixtral, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, num_local_experts: 4, vocab_size: 4096}"
MIX = "techniques.checkpointing.policy=mix techniques.checkpointing.mix={input: 2}"
COMPILED = "data.packing=true"
ROPE = f"techniques.rope.factor=2.0 model.architecture={NARROW.replace('head_dim: 8', 'head_dim: 64')}"
BENCHED = "eval.tasks=[lamps] eval.task_folder=tasks"
ASKS = "data.questions.path=chats.jsonl data.questions.limit=2 data.on_overlap=keep data.questions.show=1"
PICTURES = "data.sources=[{path: pictures/rows.jsonl}] model.path=vision model.init=pretrained model.architecture={}"
TEXTS = "data.sources=[{path: texts.jsonl}]"
STOPS = "train.eval_every=1 train.stop.patience=1 train.max_steps=6"
RISES = "optimizer.lr=1.0 schedule.name=constant"
"""A rate at which the loss rises."""
SPIKES = f"{RISES} techniques.lora.enabled=false"
"""Trained whole, the model rises by more than the least spike."""
PAIRS = "objective.name=dpo data.sources=[{path: pairs.jsonl}] data.eval_fraction=0"
JUDGED = PAIRS.replace("dpo", "kto").replace("pairs.jsonl", "judged.jsonl")
DISTILLS = "objective.name=distillation objective.teacher=builtin:tiny"
LABELLED = PAIRS.replace("dpo", "classification").replace("pairs", "labelled")
REWARD = "{name: regex, options: {pattern: 'an|er|on'}}"
POLICY = (
    f"objective.name=policy objective.rewards=[{REWARD}] data.sources=[{{path: prompts.jsonl}}] data.eval_fraction=0 "
    "sampler.max_tokens=8 sampler.answers=4 train.max_steps=2 train.global_batch_size=4"
)
TRIPLETS = PAIRS.replace("dpo", "embedding").replace("pairs", "triplets") + " train.global_batch_size=8"
"""Four queries a step: a query that is alone has no candidate but its positive."""
PLUGIN = """
import time
from dataclasses import dataclass

import torch

import fxtune


@fxtune.technique("halved")
@dataclass
class Halved(fxtune.Technique):
    def apply(self, model, world):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        return model

    def verify(self, model, probe):
        yield from ()


@fxtune.reward("slow")
def slow(completions, **columns):
    time.sleep(30)
"""
CASES: dict[str, Case] = {
    "run.name": Case(trained, "other", "run.dir=null"),
    "run.dir": Case(trained, "other"),
    "run.seed": Case(batches, "1"),
    "run.resume": Case(trained, "must", refused="run"),
    "run.deterministic": Case(step, "true"),
    "run.device": Case(step, "cuda", refused="GPU"),
    "run.gpus": Case(launched, "2", "train.global_batch_size=4"),
    "run.memory_gib": Case(trained, "1", refused="memory"),
    "run.export": Case(trained, "last", f"{RISES} train.eval_every=1 train.global_batch_size=4"),
    "run.report": Case(trained, "true"),
    "model.path": Case(batches, "no/folder", refused="no/folder"),
    "model.revision": Case(trained, "main", "tracking.display=plain"),
    "model.dtype": Case(built, "bfloat16"),
    "model.init": Case(built, "random", "model.init=pretrained model.architecture={}"),
    "model.architecture": Case(built, NARROW.replace("num_hidden_layers: 2", "num_hidden_layers: 1")),
    "model.adapter": Case(batches, "no/folder", refused="no/folder"),
    "model.tokenizer": Case(batches, "no/folder", refused="no/folder"),
    "model.add_tokens": Case(built, "['<|new|>']"),
    "model.trust_remote_code": Case(batches, "true", refused="trust_remote_code"),
    "data.sources.0.path": Case(batches, "more.jsonl"),
    "data.sources.0.format": Case(batches, "text", refused="text"),
    "data.sources.0.weight": Case(
        batches, "5.0", "data.sources=[{path: chats.jsonl, weight: 1.0},{path: more.jsonl, weight: 1.0}]"
    ),
    "data.sources.0.split": Case(batches, "'train[:50%]'"),
    "data.sources.0.subset": Case(batches, "second", "data.sources=[{path: subsets, subset: first}]"),
    "data.sources.0.revision": Case(batches, "main", refused="revision"),
    "data.sources.0.columns": Case(batches, "{title: text}", "data.sources=[{path: titled.jsonl}]"),
    "data.sources.0.unused": Case(batches, "[note]", "data.sources=[{path: noted.jsonl}]"),
    "data.sources.0.text_unit": Case(batches, "line", "data.sources=[{path: book.txt}]"),
    "data.sources.0.instruction": Case(batches, "Find", refused="instruction"),
    "data.sources.0.environment": Case(batches, "shop", refused="environment"),
    "data.sources.0.limit": Case(batches, "10"),
    "data.sources.0.eval_fraction": Case(batches, "0.6"),
    "data.eval_fraction": Case(batches, "0.6"),
    "data.eval_limit": Case(batches, "2"),
    "data.questions.path": Case(trained, "more.jsonl", f"{ASKS} data.questions.limit=3"),
    "data.questions.limit": Case(trained, "1", ASKS),
    "data.questions.show": Case(trained, "0", f"{ASKS} tracking.display=plain"),
    "data.questions.max_new_tokens": Case(trained, "1", ASKS),
    "data.questions.metrics": Case(batches, "[other]", ASKS, refused="metrics"),
    "data.sequence_length": Case(batches, "32", "data.packing=true"),
    "data.length_schedule": Case(batches, "[[0.0, 64], [0.5, 128]]", f"data.packing=true {TEXTS}"),
    "data.packing": Case(batches, "true"),
    "data.share_prompts": Case(batches, "false", f"{PAIRS} data.packing=true data.on_long=drop"),
    "data.buckets": Case(batches, "[64, 128]"),
    "data.on_long": Case(batches, "drop", f"{TEXTS} data.sequence_length=16"),
    "data.image_tokens.min": Case(batches, "8", f"{PICTURES} data.image_tokens.max=16"),
    "data.image_tokens.max": Case(batches, "5", PICTURES),
    "data.image_features": Case(batches, "stored", refused="the model reads no images"),
    "data.mix.long_share": Case(batches, "0.5", f"{TEXTS} data.mix.threshold=20 data.mix.long_share=0.2"),
    "data.mix.threshold": Case(batches, "40", f"{TEXTS} data.mix.threshold=20 data.mix.long_share=0.5"),
    "data.learn.roles": Case(batches, "[user]"),
    "data.learn.tool_calls": Case(
        batches, "false", "data.sources=[{path: calls.jsonl}] data.chat_template=plain.jinja"
    ),
    "data.learn.last_turn_only": Case(batches, "true"),
    "data.learn.since_last_question": Case(batches, "true"),
    "data.on_overlap": Case(batches, "drop", "data.eval_sources=[{path: chats.jsonl, limit: 5}] data.on_overlap=keep"),
    "data.dedup": Case(batches, "exact", "data.sources=[{path: doubled.jsonl}]"),
    "data.dedup_similarity": Case(batches, "0.2", "data.sources=[{path: near.jsonl}] data.dedup=near"),
    "data.on_bad_row": Case(batches, "quarantine", "data.sources=[{path: broken.jsonl}]"),
    "data.on_rewritten": Case(batches, "keep", "data.chat_template=rewriting.jinja"),
    "data.chat_template": Case(batches, "rewriting.jinja"),
    "data.chat_template_kwargs": Case(batches, "{mood: calm}", "data.chat_template=moody.jinja"),
    "data.template_time": Case(batches, "2020-01-01", "data.chat_template=dated.jinja data.template_time=2026-01-01"),
    "data.system": Case(batches, "Be brief."),
    "data.workers": Case(tokenizing, "5"),
    "data.cache_dir": Case(trained, "cache-2"),
    "data.cache_days": Case(tokenizing, "1"),
    "train.max_steps": Case(batches, "2"),
    "train.epochs": Case(batches, "0.1"),
    "train.micro_batch_size": Case(batches, "1"),
    "train.global_batch_size": Case(batches, "8"),
    "train.batch_ramp": Case(batches, "[[0.5, 8]]"),
    "train.eval_every": Case(trained, "1"),
    "train.eval_share": Case(evaluated_slowly, "0.1", "train.eval_every=1 train.max_steps=8"),
    "train.stop.patience": Case(trained, "1", f"{STOPS} {RISES} train.stop.patience=0"),
    "train.stop.min_delta": Case(trained, "100.0", STOPS),
    "train.stop.metric": Case(trained, "exact_match", f"{STOPS} {ASKS}"),
    "train.max_minutes": Case(trained, "1e-6", refused="max_minutes"),
    "train.pause_after": Case(trained, "1"),
    "train.log_every": Case(trained, "2"),
    "train.noise_scale": Case(step, "true", "train.global_batch_size=4"),
    "train.max_grad_norm": Case(step, "1e-3", "optimizer.name=sgd"),
    "train.max_skipped_steps": Case(trained, "1", "optimizer.lr=1e9 train.max_steps=12", refused="1 steps in a row"),
    "train.spikes": Case(spiking, "skip", SPIKES),
    "train.out_of_memory": Case(exhausted, "stop", refused="memory"),
    "objective.name": Case(batches, "other", refused="objective"),
    "objective.teacher": Case(batches, "no/folder", DISTILLS, refused="no/folder"),
    "objective.teacher_revision": Case(
        batches, "main", "objective.name=distillation objective.teacher=vision", refused="revision=main"
    ),
    "objective.teacher_quantize": Case(step, "nf4", DISTILLS),
    "objective.store": Case(trained, "3", DISTILLS),
    "objective.divergence": Case(step, "reverse_kl", DISTILLS),
    "objective.teacher_share": Case(step, "0.1", f"{DISTILLS} objective.divergence=jensen_shannon"),
    "objective.temperature": Case(step, "2.0", DISTILLS),
    "objective.text_weight": Case(step, "0.5", DISTILLS),
    "objective.reference": Case(step, "base", f"{PAIRS} techniques.lora.enabled=false", refused="stored"),
    "objective.beta": Case(step, "0.5", PAIRS),
    "objective.loss_type": Case(step, "hinge", PAIRS),
    "objective.label_smoothing": Case(step, "0.2", PAIRS),
    "objective.sft_weight": Case(step, "1.0", PAIRS),
    "objective.length_normalized": Case(step, "0.5", PAIRS),
    "objective.by_token": Case(step, "false", PAIRS.replace("dpo", "ipo")),
    "objective.desirable_weight": Case(step, "2.0", f"{JUDGED} optimizer.name=sgd train.max_grad_norm=100"),
    "objective.undesirable_weight": Case(step, "2.0", f"{JUDGED} optimizer.name=sgd train.max_grad_norm=100"),
    "objective.gamma": Case(
        step, "0.5", PAIRS.replace("dpo", "simpo") + " optimizer.name=sgd train.max_grad_norm=100"
    ),
    "objective.problem": Case(step, "multi_label", LABELLED),
    "objective.labels": Case(step, "[b,a]", LABELLED),
    "objective.class_weights": Case(step, "{a: 3.0}", LABELLED),
    "objective.balanced": Case(step, "true", LABELLED),
    "objective.losses": Case(
        step, "pairwise", LABELLED.replace("classification", "ranking").replace("labelled", "ranked")
    ),
    "objective.words": Case(
        step,
        "[n,y]",
        LABELLED.replace("classification", "ranking").replace("labelled", "ranked"),
        refused="no logits of words",  # of random weights; tests/objectives/test_ranking.py shows how it acts
    ),
    "objective.pool": Case(step, "mean", TRIPLETS),
    "objective.symmetric": Case(step, "true", TRIPLETS),
    "objective.false_negative_margin": Case(step, "0.0", TRIPLETS),
    "objective.matryoshka": Case(step, "[4]", TRIPLETS),
    "objective.instruction": Case(batches, "Find", TRIPLETS),
    "objective.rewards.0.name": Case(
        trained, "length", POLICY.replace(", options: {pattern: 'an|er|on'}", "").replace("regex", "number")
    ),
    "objective.rewards.0.weight": Case(trained, "2.0", POLICY),
    "objective.rewards.0.options": Case(trained, "{pattern: s}", POLICY),
    "objective.on_bad_reward": Case(batches, "later", POLICY, refused="on_bad_reward"),
    "objective.teacher_weight": Case(trained, "0.5", f"{POLICY} objective.teacher=base"),
    "objective.advantage": Case(trained, "std", POLICY),
    "objective.surrogate": Case(trained, "weighted", f"{POLICY} sampler.temperature=0.8"),
    "objective.ratio": Case(trained, "sequence", f"{POLICY} objective.clip_high=0.0"),
    "objective.clip_low": Case(trained, "0.0", POLICY),
    "objective.clip_high": Case(batches, "high", POLICY, refused="clip_high"),
    "objective.correction": Case(trained, "none", POLICY),
    "objective.correction_limit": Case(trained, "1.0", f"{POLICY} objective.correction=mask"),
    "objective.reduction": Case(batches, "words", POLICY, refused="reduction"),
    "objective.overlong": Case(trained, "4", POLICY),
    "objective.keep_truncated": Case(trained, "false", POLICY),
    "objective.max_gap": Case(batches, "0.0", POLICY, refused="max_gap"),  # tests/training/rollouts/test_vllm.py
    "objective.patience": Case(trained, "1", POLICY.replace("'an|er|on'", "'~~~~'"), refused="For 1 steps"),
    "sampler.name": Case(trained, "vllm", POLICY, refused="sampler.venv"),
    "sampler.url": Case(trained, "http://127.0.0.1:1", POLICY, refused="no vLLM server"),
    "sampler.venv": Case(trained, "nowhere", f"{POLICY} sampler.name=vllm", refused="nowhere"),
    "sampler.arguments": Case(batches, "[a]", POLICY, refused="is not read"),
    "sampler.answers": Case(trained, "2", POLICY),
    "sampler.turns": Case(batches, "2", POLICY, refused="is not read"),  # tests/training/rollouts/test_environment.py
    "sampler.max_tokens": Case(trained, "4", POLICY),
    "sampler.temperature": Case(trained, "0.5", POLICY),
    "sampler.batch": Case(trained, "2", POLICY),
    "sampler.request_seconds": Case(batches, "3.0", POLICY, refused="is not read"),
    "sampler.sleep": Case(batches, "true", POLICY, refused="is not read"),
    "sampler.ahead": Case(batches, "true", POLICY, refused="is not read"),
    "sampler.request_seeds": Case(batches, "false", POLICY, refused="is not read"),
    "sampler.reward_seconds": Case(trained, "1e-9", POLICY.replace(REWARD, "{name: slow}"), refused="reward_seconds"),
    "sampler.reward_workers": Case(batches, "0", POLICY, refused="reward_workers"),
    "objective.center": Case(step, "1.0", PAIRS.replace("dpo", "reward")),
    "objective.margin": Case(step, "true", PAIRS.replace("dpo", "reward")),
    "optimizer.name": Case(step, "sgd"),
    "optimizer.lr": Case(step, "1e-2"),
    "optimizer.lr_vision": Case(built, "1e-5", f"{READS_IMAGES} techniques.lora.enabled=false"),
    "optimizer.weight_decay": Case(step, "0.5"),
    "optimizer.betas": Case(step, "[0.5, 0.6]"),
    "optimizer.eps": Case(step, "0.1"),
    "optimizer.momentum": Case(step, "0.1", "optimizer.name=sgd"),
    "optimizer.stochastic_rounding": Case(step, "true", refused="stochastic_rounding"),
    "optimizer.moments": Case(step, "bfloat16", refused="moments"),
    "optimizer.offload": Case(step, "true", refused="offload"),
    "optimizer.in_backward": Case(step, "on", refused="in_backward"),
    "schedule.name": Case(rates, "linear"),
    "schedule.warmup_steps": Case(rates, "9"),
    "schedule.min_lr_ratio": Case(rates, "0.5"),
    "schedule.decay_steps": Case(rates, "9", "schedule.name=wsd"),
    "techniques.rope.enabled": Case(built, "true", f"{ROPE}"),
    "techniques.rope.type": Case(built, "linear", f"{ROPE}"),
    "techniques.rope.factor": Case(built, "4.0", f"{ROPE}"),
    "techniques.rope.original_max_position_embeddings": Case(built, "64", f"{ROPE}"),
    "techniques.rope.parameters": Case(built, "{beta_fast: 4.0}", f"{ROPE}"),
    "techniques.attention.enabled": Case(step, "false", "data.packing=true", refused="attention"),
    "techniques.attention.backend": Case(step, "eager"),
    "techniques.attention.trust_remote_code": Case(step, "true", refused="trust_remote_code"),
    "techniques.precision.enabled": Case(step, "false", "techniques.precision.autocast=bfloat16"),
    "techniques.precision.autocast": Case(step, "bfloat16"),
    "techniques.precision.tf32": Case(step, "true", refused="tf32"),
    "techniques.precision.cudnn_benchmark": Case(step, "true", refused="cudnn_benchmark"),
    "techniques.liger.enabled": Case(step, "true", "techniques.liger.kernels=[fused_linear_cross_entropy]"),
    "techniques.liger.kernels": Case(step, "[fused_linear_cross_entropy]"),
    "techniques.apex.enabled": Case(step, "true", refused="apex"),
    "techniques.quantize.enabled": Case(built, "true", INT8),
    "techniques.quantize.type": Case(built, "int8"),
    "techniques.quantize.compute_dtype": Case(step, "bfloat16", INT8),
    "techniques.quantize.skip": Case(built, "[down_proj]", INT8),
    "techniques.quantize.head": Case(step, "true", INT8, refused="head"),
    "techniques.quantize.embeddings": Case(step, "true", INT8, refused="embeddings"),
    "techniques.quantize.experts": Case(step, "on", INT8, refused="experts"),
    **{
        f"techniques.float8.{name}": Case(step, value, "techniques.lora.enabled=false", refused="float8")
        for name, value in (("enabled", "true"), ("weight_gradient", "bfloat16"), ("skip", "[down_proj]"))
    },
    "techniques.lora.enabled": Case(built, "false"),
    "techniques.lora.r": Case(built, "4"),
    "techniques.lora.alpha": Case(step, "8.0"),
    "techniques.lora.dropout": Case(step, "0.5"),
    "techniques.lora.target_modules": Case(built, "[q_proj]"),
    "techniques.lora.exclude_modules": Case(built, "[q_proj]"),
    "techniques.lora.vision": Case(built, "true", READS_IMAGES),
    "techniques.lora.projector": Case(built, "true", READS_IMAGES),
    "techniques.lora.layers_to_transform": Case(built, "[0]"),
    "techniques.lora.rank_pattern": Case(built, "{q_proj: 4}"),
    "techniques.lora.alpha_pattern": Case(step, "{q_proj: 4}"),
    "techniques.lora.modules_to_save": Case(built, "[norm]"),
    "techniques.lora.train_tokens": Case(built, "['<|im_end|>']"),
    "techniques.lora.rslora": Case(step, "true"),
    "techniques.lora.dora": Case(built, "true"),
    "techniques.lora.init": Case(built, "gaussian"),
    "techniques.lora.fused": Case(step, "on"),
    "techniques.router.enabled": Case(step, "false", f"{MIXTURE} techniques.router.aux_loss_coef=1.0"),
    "techniques.router.aux_loss_coef": Case(step, "1.0", MIXTURE),
    "techniques.plugins.enabled": Case(built, "false", "techniques.plugins.use={halved: {}}"),
    "techniques.plugins.use": Case(built, "{halved: {}}"),
    "techniques.checkpointing.enabled": Case(step, "true"),
    "techniques.checkpointing.policy": Case(step, "selective"),
    "techniques.checkpointing.every": Case(step, "2"),
    "techniques.checkpointing.save": Case(step, "[attention]", "techniques.checkpointing.policy=selective"),
    "techniques.checkpointing.recompute": Case(
        step, "[gate_proj, up_proj]", "techniques.checkpointing.policy=selective techniques.lora.r=4"
    ),
    "techniques.checkpointing.mix": Case(step, "{narrow: 1}", MIX),
    "techniques.checkpointing.budget": Case(step, "0.2", refused="budget"),
    "techniques.checkpointing.offload": Case(step, "inputs", refused="offload"),
    "techniques.checkpointing.mlp_tiles": Case(step, "2"),
    "techniques.compile.enabled": Case(compiled, "true", COMPILED),
    "techniques.compile.scope": Case(compiled, "model", COMPILED),
    "techniques.compile.mode": Case(compiled, "max_autotune", COMPILED),
    "techniques.compile.fullgraph": Case(compiled, "false", COMPILED),
    "techniques.compile.dynamic": Case(compiled, "always", COMPILED),
    "techniques.compile.cuda_graphs": Case(compiled, "on", COMPILED, refused="cuda_graphs"),
    **{
        f"parallel.{name}": Case(trained, value, beside, refused="rank")
        for name, value, beside in (
            ("replicate", "2", ""),
            ("shard", "2", ""),
            ("context", "2", ""),
            ("compression", "bfloat16", ""),
            ("average_every", "2", ""),
        )
    },
    "loader.num_workers": Case(loaded, "2"),
    "loader.prefetch_factor": Case(loaded, "2", "loader.num_workers=1"),
    "checkpoint.every": Case(trained, "2", "checkpoint.keep=9"),
    "checkpoint.keep": Case(trained, "1"),
    "checkpoint.keep_best": Case(
        trained, "false", f"{RISES} train.eval_every=1 checkpoint.keep=1 train.global_batch_size=4"
    ),
    "tracking.wandb.mode": Case(tracked, "offline"),
    **{
        f"tracking.wandb.{name}": Case(tracked, value, "tracking.wandb.mode=offline")
        for name, value in (
            ("project", "other"),
            ("entity", "other"),
            ("group", "other"),
            ("tags", "[other]"),
            ("init_timeout", "1.0"),
        )
    },
    "tracking.tensorboard": Case(tracked, "true"),
    "tracking.mlflow": Case(tracked, "other"),
    "tracking.trackio": Case(tracked, "other"),
    "tracking.display": Case(trained, "plain"),
    "tracking.cost.card_hour": Case(priced, "2.0"),
    "tracking.cost.kwh": Case(priced, "2.0"),
    "refresh.forgotten": Case(refreshed, "0.01"),
    "refresh.alpha": Case(refreshed, "0.49"),
    "refresh.held_out": Case(refreshed, "0.7"),
    "refresh.replay": Case(refreshed, "0.1"),
    "refresh.epochs": Case(refreshed, "1.0"),
    "refresh.bound": Case(refreshed, "0.5"),
    "refresh.gain": Case(refreshed, "0.5"),
    "eval.tasks": Case(benched, "[lamps,others]", BENCHED),
    "eval.task_folder": Case(benched, "other_tasks", BENCHED),
    "eval.limit": Case(benched, "1", BENCHED),
    "eval.chat_template": Case(benched, "true", BENCHED),
}
"""Each key with its case. The keys of eval_sources and general equal the keys of sources."""
CASES |= {
    key.replace("data.sources", f"data.{name}"): replace(case, beside=case.beside.replace("sources=", f"{name}="))
    for key, case in CASES.items()
    for name in ("eval_sources", "general")
    if key.startswith("data.sources")
}
for name in ("eval_sources", "general"):
    CASES[f"data.{name}.0.weight"] = Case(batches, "2.0", refused="weight")
    CASES[f"data.{name}.0.eval_fraction"] = Case(batches, "0.5", refused="eval_fraction")


def slots(slot: Slot, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Slot]]:
    """Each key that holds a value, and its slot."""
    entry = slot.below("0") if slot.container is list else None
    if slot.fields:
        for name, below in slot.fields.items():
            yield from slots(below, (*above, name))
    elif entry is not None and entry.fields:
        yield from slots(entry, (*above, "0"))
    else:
        yield ".".join(above), slot


KEYS = dict(slots(Slot(Config)))
NUMBERS = {
    key: number
    for key, slot in KEYS.items()
    for number in [slot.below("0") if slot.container in (list, dict) else slot]
    if number is not None and number.kind in (int, float)
}
"""Each key that holds numbers, and the slot of a number."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The working directory: the files that the cases name."""
    place = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(place)
        write_files(place)
        with files_used(["halved.py"]):
            yield place


def write_files(place: Path) -> None:
    def jsonl(name: str, rows: list[Any]) -> None:
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    chats = write_chats(place / "chats.jsonl").read_text().splitlines()
    write_chats(place / "more.jsonl", 20, seed=1)
    write_model("qwen2_5_vl", place / "vision")
    write_picture_rows(place / "pictures")
    held = write_chats(place / "held.jsonl", 20, seed=2).read_text().splitlines()
    write_chats(place / "new.jsonl", 60, seed=3)
    write_texts(place / "texts.jsonl")
    pairs = [
        {"documents": [json.loads(chosen), json.loads(rejected)], "labels": [2.0, 0.0]}
        for chosen, rejected in zip(chats[::2], chats[1::2], strict=True)
    ]
    judged = [{**json.loads(chat), "label": number % 2 == 0} for number, chat in enumerate(chats)]
    (place / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    labelled = [{"text": f"Row {number} says so.", "label": "aab"[number % 3]} for number in range(40)]
    (place / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    passages = [f"Answer {number} says so." for number in range(2)]
    ranked = [{"query": f"Row {number}?", "passages": passages, "labels": [1, 0]} for number in range(40)]
    (place / "ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked))
    triplets = [{"query": f"Where is {number}?", "positive": f"{number} is here."} for number in range(40)]
    (place / "triplets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in triplets))
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    jsonl("prompts.jsonl", [{"prompt": f"Row {number}?", "answer": number} for number in range(40)])
    jsonl("titled.jsonl", [{"text": f"text {row}", "title": f"title {row}"} for row in range(40)])
    jsonl("noted.jsonl", [{**json.loads(chat), "note": "a note"} for chat in held])
    jsonl("doubled.jsonl", [*map(json.loads, chats), *map(json.loads, chats)])
    texts = [json.loads(line)["text"] for line in (place / "texts.jsonl").read_text().splitlines()]
    jsonl("near.jsonl", [{"text": text + end} for text in texts for end in (" red lamp", " blue table from Oslo")])
    jsonl("broken.jsonl", [*map(json.loads, chats), {"messages": 3}])
    (place / "subsets").mkdir()
    subsets = {"first": chats, "second": held}
    for name, rows in subsets.items():
        jsonl(f"subsets/{name}.jsonl", [*map(json.loads, rows)])
    listed = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in subsets)
    (place / "subsets" / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    (place / "book.txt").write_text("".join(f"line {row} of the book\n" for row in range(40)))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    calls = [
        {
            "messages": [
                {"role": "user", "content": f"question {row}"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "seen"},
                {"role": "assistant", "content": f"answer {row}"},
            ]
        }
        for row in range(20)
    ]
    jsonl("calls.jsonl", calls)
    turn = (
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ m['tool_calls'] | tojson if m['tool_calls'] }}<|im_end|>\n"
    )
    plain = "{% for m in messages %}" + turn + "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    lamps = [(f"Lamp {number}?", ["red", "blue"], number % 2) for number in range(3)]
    write_task(place / "tasks", "lamps", lamps)
    write_task(place / "tasks", "others", lamps)
    write_task(place / "other_tasks", "lamps", lamps[1:])
    (place / "halved.py").write_text(PLUGIN)
    (place / "plain.jinja").write_text(plain)
    (place / "moody.jinja").write_text("{{ mood }}" + plain)
    (place / "dated.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}" + plain)
    thought = "{{ 'Hm. ' if loop.last and m['role'] == 'assistant' }}"
    (place / "rewriting.jinja").write_text(plain.replace("{{ m['content'] }}", thought + "{{ m['content'] }}"))


def config(words: str) -> Config:
    """The config of BASE with `words`, checked as that of a command line."""
    values = copy.deepcopy(_base())
    _set(values, words)
    return typed(values)


@functools.cache
def _base() -> DictConfig:
    fixed = {word.partition("=")[0] for word in BASE}
    values = OmegaConf.create()
    for word in (*(word for word in command(Path()) if word.partition("=")[0] not in fixed), *BASE):
        _set(values, word)
    return values


def _set(values: DictConfig, words: str) -> None:
    for key, value in _pairs(words):
        parsed = PARSER.parse_override(f"{key}={value}").value()
        OmegaConf.update(values, key, parsed, merge=False, force_add=True)


def _pairs(words: str) -> list[tuple[str, str]]:
    return re.findall(r"(?:^|\s)([a-z_0-9.]+)=(.*?)(?=\s[a-z_0-9.]+=|$)", words)


def beside(key: str, case: Case) -> str:
    """The words beside a key; an option of a technique is tried with the technique."""
    group, _, option = key.rpartition(".")
    on = group.startswith("techniques.") and option != "enabled" and group != "techniques.plugins"
    name = next((name for name in ("eval_sources", "general") if key.startswith(f"data.{name}.")), None)
    source = f"data.{name}=[{{path: held.jsonl}}]" if name else ""
    words = [source, f"{group}.enabled=true" if on else "", case.beside]
    return " ".join(filter(None, words))


def observe(case: Case, words: str) -> Any:
    """What `case` observes for a config of `words`, or the message that refuses it."""
    for left in ("run", "runs", "other", "cache-2", "parent"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        return case.observe(config(words))
    except UserError as error:
        return error


@functools.cache
def unchanged(observer: Callable[[Config], Any], words: str) -> Any:
    return observe(Case(observer, ""), words)


def test_every_key_has_a_case():
    missing, gone = KEYS.keys() - CASES.keys(), CASES.keys() - KEYS.keys()
    assert not missing, (
        f"Give {sorted(missing)} a line in CASES of {__file__}: another value, the settings that it needs, and the "
        "observer that sees it act or the refusal."
    )
    assert not gone, f"Remove these keys from CASES, the schema has lost them: {sorted(gone)}"


def is_slow(key: str) -> bool:
    """Whether the case of `key` trains a whole run, and a faster test covers the key. None covers min_delta."""
    case = CASES.get(key)
    trains = case is not None and case.observe in (trained, spiking, evaluated_slowly) and not case.refused
    return trains and key != "train.stop.min_delta"


@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.slow] * is_slow(key)) for key in KEYS])
def test_every_key_acts_or_is_refused(key):
    case = CASES[key]
    words = beside(key, case)
    seen = observe(case, f"{words} {key}={case.value}")
    if case.refused:
        assert isinstance(seen, UserError), seen
        assert case.refused in str(seen)
        return
    before = unchanged(case.observe, words)
    assert not isinstance(seen, UserError), seen
    assert before != seen, f"{key}={case.value} changes nothing"


def test_every_number_has_a_lower_limit():
    without = [key for key, slot in NUMBERS.items() if not {"min", "above"} & slot.limits.keys()]
    assert not without, f"give the fields of {without} the metadata min or above"


def one_of(key: str, number: float | str) -> str:
    """`number` as `key` takes it."""
    text = (
        f"{{{'q_proj' if 'lora' in key else 'beta_fast' if 'rope' in key else 'input'}: {number}}}"
        if KEYS[key].container is dict
        else f"{number}"
    )
    return f"{key}={f'[{number}, {number}]' if KEYS[key].container is list else text}"


def test_numbers_beyond_every_range_are_refused_in_one_message():
    for key, slot in NUMBERS.items():
        below = min(2 * slot.limits.get("min", 0), -1.0)
        for number in [-1, 2**63, 10**30] if slot.kind is int else [below, 1e308, math.nan, math.inf]:
            validator = Validator(Config, lambda _: "on the command line")
            validator.check(slot, number, tuple(key.split(".")))
            (message,) = validator.problems
            assert key in message


@pytest.mark.slow
@pytest.mark.parametrize("key", NUMBERS)
def test_the_ends_of_every_range_are_refused_or_act_in_time(key):
    """The lowest and the highest number either builds (a run that is longer than a test is not started), or ends in a
    message of fxtune's."""
    slot, case = NUMBERS[key], CASES[key]
    trains = batches if "name=policy" in case.beside else step  # rollouts exist only in a run
    built = {trained: trains, exhausted: step, evaluated_slowly: step, launched: batches}.get(
        case.observe, case.observe
    )
    for number in {*([lowest(slot)] if slot.kind is float else []), highest(slot)}:
        observe(replace(case, observe=built), f"{beside(key, case)} {one_of(key, number)}")


def lowest(slot: Slot) -> float:
    return slot.limits.get("min", 1 if slot.kind is int else 1e-300)


def highest(slot: Slot) -> float:
    if "below" in slot.limits:
        return math.nextafter(slot.limits["below"], -math.inf)
    return slot.limits.get("max", LARGEST[slot.kind])
