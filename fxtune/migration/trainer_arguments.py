"""Keys that tools pass on to transformers' Trainer, so that they mean the same in each tool."""

from __future__ import annotations

import re
from typing import Any

from fxtune.migration.account import Account, Rule, each, number, refused, to, without

OPTIMIZERS = {
    "adamw": "adamw_torch adamw_torch_fused adamw_hf paged_adamw paged_adamw_32bit",
    "adamw_8bit bitsandbytes": "adamw_bnb_8bit adamw_8bit paged_adamw_8bit",
    "adamw_8bit torchao": "adamw_torch_8bit ao_adamw_8bit",
    "apex_adamw": "adamw_apex_fused",
    "lion": "lion_pytorch lion_32bit paged_lion_32bit",
    "adamw_schedulefree": "schedule_free_adamw",
    "adafactor": "",
    "sgd": "",
    "muon": "",
}
"""optimizer.name, and optimizer.library, of their names of optimizers; each is also its own name."""
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
ATTENTION = "techniques.attention.backend=auto takes the fastest attention that is correct here"
KERNELS = "techniques=fast turns on the fused kernels that help this model"
SHARDING = "fxtune divides the weights over the cards where that helps (run.gpus, parallel.shard)"
OFFLOAD = "weights on the host are not supported. Take techniques=qlora, more cards (parallel.shard), or leave it out"

RULES: dict[str, Rule] = {
    "weight_decay": to("optimizer.weight_decay", number),
    "adam_epsilon": to("optimizer.eps", number),
    "max_grad_norm": to("train.max_grad_norm", number),
    "max_steps": lambda account, key: (
        account.set("train.max_steps", int(account.get(key)), key)
        if int(account.get(key)) > 0
        else account.note("no limit", key)
    ),
    "seed": to("run.seed", int),
    "logging_steps": to("train.log_every", lambda value: max(1, int(number(value)))),
    "save_total_limit": to("checkpoint.keep", int),
    "tf32": to("techniques.precision.tf32", bool),
    "label_smoothing_factor": refused("cross-entropy without label smoothing is what fxtune computes"),
    "neftune_noise_alpha": refused("noise on embeddings (NEFTune) is not supported"),
    "resume_from_checkpoint": refused("fxtune continues its own runs: the same command again. Leave it out"),
    "group_by_length": without("data.packing, or rows padded to their micro-batch"),
    "length_column_name": without("data.packing, or rows padded to their micro-batch"),
    "optim_args": refused("options of optimizers are keys of `optimizer`: see `fxtune help optimizer`"),
    "lr_scheduler_kwargs": refused("options of schedules are keys of `schedule`: see `fxtune help schedule`"),
    "push_to_hub": refused("upload when the run has ended: fxtune push RUN org/name"),
    "deepspeed": lambda account, key: (
        account.refuse(OFFLOAD, key) if "offload" in str(account.get(key)) else account.note(SHARDING, key)
    ),
    "use_cpu": to("run.device", lambda value: "cpu" if value else "auto"),
    "trust_remote_code": without("fxtune builds the families of transformers from transformers' own code"),
    **each("torch_compile use_liger_kernel use_liger", without(KERNELS)),
    **each("attn_impl attn_implementation flash_attn flash_attention", without(ATTENTION)),
    **each(
        "do_train do_eval overwrite_output_dir overwrite_cache remove_unused_columns plot_loss ddp_timeout "
        "dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers "
        "preprocessing_num_workers dataset_num_proc save_safetensors save_only_model load_best_model_at_end "
        "metric_for_best_model greater_is_better ddp_find_unused_parameters include_num_input_tokens_seen "
        "logging_first_step logging_dir logging_strategy logging_nan_inf_filter disable_tqdm log_level run_name "
        "save_strategy eval_accumulation_steps per_device_eval_batch_size eval_batch_size full_determinism "
        "gradient_checkpointing_kwargs skip_memory_metrics local_rank average_tokens_across_devices "
        "include_tokens_per_second report_to_each_step hub_strategy hub_private_repo hub_token data_seed "
        "torch_compile_backend torch_compile_mode eval_on_start eval_do_concat_batches use_fast_tokenizer "
        "low_cpu_mem_usage",
        without("fxtune decides this itself, or it changes nothing that is trained"),
    ),
}


def batches(account: Account, micro: str, accumulation: str = "gradient_accumulation_steps") -> None:
    """The batch of a step: rows of a card x accumulation x cards."""
    rows, times = int(account.get(micro, 1)), int(account.get(accumulation, 1))
    account.set("train.micro_batch_size", rows, micro)
    account.set("train.global_batch_size", rows * times * account.gpus, accumulation, micro)
    account.differ(
        f"a step has {rows} x {times} x {account.gpus} rows (of a card, accumulated, cards): --gpus N says on how "
        "many cards the config ran, and fxtune keeps that batch on any number"
    )


def trainer(account: Account, rate: float, schedule_: str, warmup_ratio: float = 0.0, patience: str = "") -> None:
    """The keys that tools hand to transformers' Trainer by its own names. `rate`, `schedule_`, `warmup_ratio`: the
    tool's defaults; `patience`: its key of early stopping."""
    batches(account, "per_device_train_batch_size")
    account.set("optimizer.lr", number(account.get("learning_rate", rate)), "learning_rate")
    optimizer(account, "optim")
    schedule(account, "lr_scheduler_type", schedule_, warmup_ratio)
    checkpointing(account)
    saving(account)
    evaluation(account, "eval_strategy")
    stop_early(account, patience or "early_stopping_patience")
    tracking(account)
    limited = int(account.get("max_steps", 0)) > 0
    if not limited:
        account.recipe["train.epochs"] = 3.0  # the Trainer's default


def quantize(account: Account, form: str, key: str) -> None:
    account.set("techniques.quantize.enabled", True, key)
    account.set("techniques.quantize.type", form, key)


def own_template(account: Account, key: str, tool: str) -> None:
    """A chat template that the tool brings along."""
    account.note("the tokenizer's chat template", key)
    account.differ(
        f"{key}={account.get(key)}: {tool} writes its own template of this name, fxtune the tokenizer's "
        "(data.chat_template=FILE.jinja sets another)"
    )


def entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def optimizer(account: Account, key: str, default: str = "adamw") -> None:
    name = str(account.get(key, default))
    found = next((ours for ours, theirs in OPTIMIZERS.items() if name in (ours, *theirs.split())), None)
    if found is None:
        account.refuse(f"fxtune has no optimizer {name}: see `fxtune help optimizer.name`", key)
    else:
        for option, value in zip(("name", "library"), found.split(), strict=False):
            account.set(f"optimizer.{option}", value, key)
        if name.startswith("paged"):
            account.differ(f"{name}: the optimizer's state stays on the card")
    betas = [number(account.get(f"adam_beta{n}", usual)) for n, usual in ((1, 0.9), (2, 0.999))]
    if account.has("adam_beta1") or account.has("adam_beta2"):
        account.set("optimizer.betas", betas, "adam_beta1", "adam_beta2")


def schedule(account: Account, key: str, default: str, warmup_ratio: float = 0.0) -> None:
    name = str(account.get(key, default))
    if (found := SCHEDULES.get(name)) is None:
        account.refuse(f"fxtune has no schedule {name}. Take one of {', '.join(sorted({*SCHEDULES.values()}))}", key)
        return
    account.set(
        "schedule.name", "constant" if account.recipe.get("optimizer.name") == "adamw_schedulefree" else found, key
    )
    steps, ratio = account.get("warmup_steps"), account.get("warmup_ratio")
    if steps is not None and 0 < float(steps) < 1:  # newer versions of transformers read a share there
        steps, ratio = None, steps
        account.set("schedule.warmup_ratio", number(ratio), "warmup_steps")
    if steps:
        account.set("schedule.warmup_steps", int(steps), "warmup_steps")
        account.note("warmup_steps decides", "warmup_ratio")
    else:
        account.note("warmup_ratio decides", *(["warmup_steps"] if account.has("warmup_steps") and not ratio else []))
        account.set("schedule.warmup_ratio", number(ratio if ratio is not None else warmup_ratio), "warmup_ratio")


def precision(account: Account, adapters: bool, key: str = "bf16") -> None:
    """16-bit training, and fxtune's fast bundle with it. `key`: says bfloat16."""
    half = str(account.get(key, key == "torch_dtype")).lower() in ("true", "auto", "full", "bfloat16")
    if account.get("fp16"):
        account.set("techniques.precision.autocast", "float16", "fp16")
        account.recipe["model.dtype"] = "float32"
    else:
        account.note("off", *(["fp16"] if account.has("fp16") else []))
    if half:
        account.set("techniques", ["lora" if adapters else "full", "fast"], key)
    else:
        account.recipe.setdefault("techniques", ["lora" if adapters else "full"])
        if account.has(key):
            account.set("model.dtype", "float32", key)


def checkpointing(account: Account, key: str = "gradient_checkpointing") -> None:
    value = account.get(key)
    if value in ("offload", "offload_disk", "legacy") or account.get("activation_offloading"):
        account.set("techniques.checkpointing.enabled", True, key)
        account.set("techniques.checkpointing.offload", True, key, "activation_offloading")
        return
    account.note("off", *(["activation_offloading"] if account.has("activation_offloading") else []))
    if value is not None and "fast" in account.recipe.get("techniques", []):
        account.note("techniques=fast recomputes as much as the memory of the card needs, and no more", key)
    elif value is not None:
        account.set("techniques.checkpointing.enabled", bool(value), key)


def saving(account: Account) -> None:
    if (steps := account.get("save_steps")) is not None:
        if float(steps) >= 1:
            account.set("checkpoint.every", int(steps), "save_steps")
        else:
            account.note("a share of the run; checkpoint.every counts steps, and is 100", "save_steps")


def evaluation(account: Account, *strategies: str) -> None:
    steps = account.get("eval_steps")
    if steps is not None and float(steps) >= 1:
        account.set("train.eval_every", int(steps), "eval_steps")
    elif steps is not None:
        account.note("a share of the run; train.eval_every counts steps, and the end is evaluated", "eval_steps")
    account.note("train.eval_every counts steps, and the end is evaluated", *filter(account.has, strategies))


def held_out(account: Account, key: str) -> None:
    """A share or a count of the rows."""
    value = number(account.get(key, 0))
    if 0 < value < 1:
        account.set("data.eval_fraction", value, key)
    elif value >= 1:
        account.set("data.eval_fraction", 0.05, key)
        account.set("data.eval_limit", int(value), key)
        account.differ(
            f"{key}={value} is a count: 5 % of the rows are held out, and at most {value} of them evaluated"
        )
    else:
        account.note("nothing is held out", key)
        return
    account.differ(
        "held-out rows are chosen by their content, and the weights of the lowest held-out loss are exported "
        "(run.export=last: of the end)"
    )


def stop_early(account: Account, key: str = "early_stopping_patience") -> None:
    if account.get(key):
        account.set("train.stop.patience", int(account.get(key)), key)


def tracking(account: Account, key: str = "report_to") -> None:
    """Where metrics go, by transformers' names."""
    wanted = account.get(key, [])
    names = {str(name).lower() for name in (wanted if isinstance(wanted, list) else [wanted])}
    if "wandb" in names:
        account.set("tracking.wandb.mode", "online", key)
    if "tensorboard" in names:
        account.set("tracking.tensorboard", True, key)
    if others := names - {"wandb", "tensorboard", "none", "all"}:
        account.refuse(f"fxtune logs to W&B and TensorBoard, not to {', '.join(sorted(others))}", key)
    elif not names & {"wandb", "tensorboard"}:
        account.note("metrics.jsonl and the report are always written", key)


def lora(account: Account, keys: tuple[str, str, str], r: int, alpha: float | None, dropout: float) -> None:
    """LoRA's numbers. `keys`: of r, alpha and dropout; the others: the tool's defaults (alpha None: 2 r)."""
    rank = int(account.get(keys[0], r))
    account.set("techniques.lora.r", rank, keys[0])
    account.set("techniques.lora.alpha", number(account.get(keys[1], 2 * rank if alpha is None else alpha)), keys[1])
    account.set("techniques.lora.dropout", number(account.get(keys[2], dropout)), keys[2])


def targets(account: Account, key: str, default: Any = "all-linear") -> None:
    """The modules that get adapters."""
    wanted = account.get(key, default)
    if isinstance(wanted, str) and any(sign in wanted for sign in "()[]\\|*"):
        if (wanted := _names_of(wanted)) is None:
            account.refuse("a regular expression: give names of modules in techniques.lora.target_modules", key)
            return
        account.differ(f"{key} is a regular expression; the recipe has the names of linears that end it")
    names = [name.strip() for name in wanted.split(",")] if isinstance(wanted, str) else [str(name) for name in wanted]
    account.set("techniques.lora.target_modules", ["all-linear"] if {*names} & {"all", "all-linear"} else names, key)


def _names_of(pattern: str) -> list[str] | None:
    """The names of linears with which the modules of a regular expression end; None if that is not clear. A group
    gives several: `mlp.(up|down)_proj` gives up_proj and down_proj."""
    *path, last = re.split(r"\\?\.(?![^(]*\))", pattern.rstrip("$"))
    if "|" in re.sub(r"\([^()]*\)", "", pattern) or any(re.search(r"\([^)]*\d", part) for part in path):
        return None  # several patterns, or some layers only
    found = re.fullmatch(r"(\w*)(?:\(([\w|]+)\)(\w*))?", last)
    if found is None or not last:
        return None
    before, choices, after = found.groups()
    return [f"{before}{choice}{after or ''}" for choice in (choices or "").split("|")]
