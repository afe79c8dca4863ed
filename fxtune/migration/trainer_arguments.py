"""Rules for keys of other tools that cannot be translated one by one, because they depend on each other: batch,
optimizer, precision, adapters, held-out rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from fxtune.migration.account import OFF, Account, Rule, listed

ADAPTERS = ("lora_", "peft_", "use_dora", "use_rslora", "target_modules", "modules_to_save", "additional_target")


def trainer(account: Account, kind: str) -> None:
    """Translate the keys of transformers' Trainer that act together. `kind`: `lora`; all else is full fine-tuning."""
    # The precision. Training in bfloat16 also gets fxtune's fast bundle.
    kind = "lora" if kind == "lora" else "full"
    half = str(account.get("bf16") or account.get("pure_bf16")).lower() in ("true", "auto", "full", "bfloat16")
    half = half and (account.has("bf16") or not account.get("fp16"))
    account.set("techniques", [kind, "fast"] if half else [kind], *(["bf16"] if half else []))
    if account.has("bf16") and not half:
        account.set("model.dtype", "float32", "bf16")
    if account.get("fp16"):
        account.set("techniques.precision.autocast", "float16", "fp16")
        account.set("model.dtype", "float32", "fp16")
    if kind == "full":
        keys = {*account.config, *map(account.own, account.tool.table["defaults"])} - {"lora_model_dir"}
        account.note("there is no adapter", *(key for key in keys if key.startswith(ADAPTERS)))
    elif not account.get("lora_alpha"):
        account.set("techniques.lora.alpha", 2 * int(account.get("lora_r")), "lora_alpha")
    # The batch: rows of a card x accumulated micro-batches x cards that take different rows.
    micro, accumulate = "per_device_train_batch_size", "gradient_accumulation_steps"
    cards, rows = max(1, account.gpus // int(account.get("context_parallel_size") or 1)), int(account.get(micro))
    times = account.get(accumulate, 1)
    times = max(1, math.ceil(16 / rows / account.gpus)) if times == "auto" else int(times)  # ms-swift's default
    pairs, packs = account.objective.kind.needs.are_pairs, account.recipe.get("data.packing", account.get("packing"))
    each = 2 if pairs and not packs else 1  # without packing each answer of a pair has a row
    account.set("train.micro_batch_size", each * rows, micro)
    account.set("train.global_batch_size", each * rows * times * cards, accumulate, micro)
    noun = "rows" if not pairs else "rows, each of the pairs that fit," if packs else "pairs of 2 rows each"
    account.differ(
        f"a step has {rows} x {times} x {cards} {noun}: of a card, accumulated, cards (--gpus N says how many)"
    )
    looks = float(account.get("evals_per_epoch") or account.get("eval_strategy") == "epoch")
    if looks and account.get("early_stopping_patience"):
        account.differ(f"patience counts {looks:g} evaluations an epoch; here 20 a run, or by train.eval_every")
    if float(account.get("max_steps", 0)) > 0:
        account.note("max_steps decides", "num_train_epochs")
    # The optimizer and its rate.
    theirs, ours = str(account.get("optim")), account.word("optim")
    account.set("optimizer.name", ours, "optim")
    if ours == "sgd":
        account.set("optimizer.momentum", 0, "optim")  # as torch's default
    if theirs.startswith("paged"):
        account.differ(f"{theirs}: the optimizer's state stays on the card")
    betas = [float(account.get("adam_beta1", 0.9)), float(account.get("adam_beta2", 0.999))]
    if betas != [0.9, 0.999]:
        account.set("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    form = "constant" if ours == "adamw_schedulefree" else account.word("lr_scheduler_type")
    account.set("schedule.name", form, "lr_scheduler_type")
    steps, constant = float(account.get("warmup_steps", 0)), account.get("lr_scheduler_type") == "constant"
    if steps >= 1 and not constant:
        account.set("schedule.warmup_steps", int(steps), "warmup_steps")
        account.note("warmup_steps decides", "warmup_ratio")
    else:  # transformers' `constant` has no warm-up; newer versions take warmup_steps below 1 as a share of the steps
        given = account.has("warmup_steps") and (steps or not account.has("warmup_ratio"))
        share = 0 if constant else steps if given else account.get("warmup_ratio")
        account.set("schedule.warmup_steps", share, "warmup_steps", "warmup_ratio")
    if account.recipe.get("objective") == "simpo" and float(account.get("cpo_alpha", 0)):
        account.differ("the loss of the chosen answers is not added to SimPO's", "cpo_alpha")
    # The memory of activations.
    recompute, offload = "gradient_checkpointing", "activation_offloading"
    if account.get(recompute) in ("offload", "offload_disk", "legacy") or account.get(offload):
        account.set("techniques.checkpointing.enabled", True, recompute)
        account.set("techniques.checkpointing.offload", "inputs", recompute, offload)
    elif half:
        account.note("techniques=fast recomputes as much as the card's memory needs", recompute)


def quantize(account: Account, name: str) -> None:
    if account.get(name) in OFF:
        account.note("off", name)
    elif "lora" not in account.recipe["techniques"]:
        account.refuse("a quantized model is trained through adapters alone: take adapters, or leave it out", name)
    else:
        account.set("techniques.quantize.enabled", True, name)
        forms = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
        account.set("techniques.quantize.type", forms.get(name) or account.word(name), name)


def targets(account: Account, name: str) -> None:
    """Translate the names of the linears, and of the tensors of experts, that get adapters."""
    wanted = account.get(name) or "all-linear"
    if not account.get(name):
        account.differ(f"{name} is not set: peft adapts a few linears, which the model's family decides, fxtune all")
    if account.get("lora_target_linear"):
        account.set("techniques.lora.target_modules", "all-linear", "lora_target_linear")
        return account.note("lora_target_linear decides", name)
    if isinstance(wanted, str) and any(sign in wanted for sign in "()[]\\|*"):
        if (wanted := _names_of(wanted)) is None:
            return account.refuse("a regular expression: give names of modules", name)
        account.differ(f"{account.own(name)} is a regular expression; the recipe has the names of linears that end it")
    experts = [str(word).rpartition(".")[2] for word in listed(account.get("lora_target_parameters", []))]
    found = [*dict.fromkeys([*map(str, listed(wanted)), *sorted(experts)])]
    found = ["all-linear"] if {*found} & {"all", "all-linear"} else found
    account.set("techniques.lora.target_modules", found, name, "lora_target_parameters")


def _names_of(pattern: str) -> list[str] | None:
    """The names of linears at the end of a regular expression for modules; None if the expression may mean more or
    less than these linears. A group gives several names: `mlp.(up|down)_proj` gives up_proj and down_proj."""
    *path, last = re.split(r"\\?\.(?![^(]*\))", pattern.rstrip("$"))
    if "|" in re.sub(r"\([^()]*\)", "", pattern) or any(re.search(r"\([^)]*\d", part) for part in path):
        return None  # the expression has several patterns, or names some layers only
    found = re.fullmatch(r"(\w*)(?:\(([\w|]+)\)(\w*))?", last)
    names = (found[2] or "").split("|") if found and last else []
    return [f"{found[1]}{name}{found[3] or ''}" for name in names] if found and names else None


def sharding(account: Account, name: str) -> None:
    """Judge a section or a file of DeepSpeed, FSDP or accelerate: only weights on the host are refused."""
    if "offload" in re.sub(r"'\w*offload\w*': (False|None)", "", str(account.get(name))):
        account.refuse("weights on the host are not supported. Take techniques=qlora, or more cards", name)
    else:
        account.note("fxtune divides the weights over the cards where that helps (parallel.shard)", name)


def vision(account: Account, name: str) -> None:
    """Translate whether the vision encoder (freeze_vit) or the projector (freeze_aligner) is frozen."""
    if account.get(name) not in OFF:
        account.note("the vision encoder and its projector stay as they are", name)
    elif "lora" in account.recipe["techniques"]:
        account.set("techniques.lora.vision" if name == "freeze_vit" else "techniques.lora.projector", True, name)
    elif account.get("freeze_vit", True) in OFF:
        rate = account.get("learning_rate", account.recipe.get("optimizer.lr"))
        account.set("optimizer.lr_vision", account.get("vit_lr", rate), name)
    else:
        account.refuse("full fine-tuning trains the projector with the vision encoder alone", name)


def learn_all(account: Account, name: str) -> None:
    account.note("off", name)
    if account.get(name):
        account.set("data.learn.roles", ["system", "user", "assistant"], name)
        account.differ(f"{account.own(name)}: the texts of all turns are learned, without the template's headers")


def tracking(account: Account, name: str) -> None:
    """Translate the trackers of metrics from transformers' names."""
    account.note("metrics.jsonl and the report are always written", name)
    names = {str(word).lower() for word in listed(account.get(name))}
    if "wandb" in names:
        account.set("tracking.wandb.mode", "online", name)
    for tracker in sorted(names & {"tensorboard", "mlflow", "trackio"}):
        account.set(f"tracking.{tracker}", tracker == "tensorboard" or "fxtune", name)
    if names - {"wandb", "tensorboard", "mlflow", "trackio", "none", "all"}:
        account.refuse("fxtune logs to W&B, TensorBoard, MLflow and Trackio", name)


def rows(account: Account, target: str, name: str, source: Callable[[Account, str, Any], dict[str, Any]]) -> None:
    """Add the entries of the key `name` to `target`, which is data.sources or data.eval_sources. `source`
    translates an entry, and raises ValueError to refuse it."""
    try:
        found = [source(account, name, entry) for entry in listed(account.get(name, []))]
    except ValueError as error:
        return account.refuse(str(error), name)
    if found:
        account.set(target, account.recipe.get(target, []) + found, name)
    if any("limit" in entry for entry in found):
        account.differ(f"{account.own(name)}: a limited source gives its first rows, where the tool may draw them")


def held_out(account: Account, name: str) -> None:
    """Translate the share or the number of held-out rows. It has no effect if there are data.eval_sources."""
    value = float(account.get(name))
    if value <= 0 or "data.eval_sources" in account.recipe:
        return account.note("no share of the rows is held out", name)
    account.set("data.eval_fraction", value if value < 1 else 0.05, name)
    account.differ("held-out rows are chosen by their content")
    if value >= 1:
        account.set("data.eval_limit", value, name)
        account.differ(f"{account.own(name)}={value:g}: 5 % of the rows are held out, and at most {value:g} evaluated")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quant_bits"), quantize),
    **dict.fromkeys(("deepspeed", "fsdp_config", "accelerator_config"), sharding),
    **dict.fromkeys(("freeze_vit", "freeze_aligner"), vision),
    "train_on_inputs": learn_all,
    "lora_target_modules": targets,
    "report_to": tracking,
    "val_set_size": held_out,
}
