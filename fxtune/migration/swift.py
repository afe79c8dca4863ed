"""Reads a config of ms-swift (YAML, or args.json of a run). Its keys: swift.readthedocs.io."""

from __future__ import annotations

from typing import Any

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import Account, Rule, each, number, refused, to, without

OBJECTIVES = ("dpo", "kto", "orpo", "simpo")

RULES: dict[str, Rule] = {
    **shared.RULES,
    "model_revision": to("model.revision", str),
    "max_length": to("data.sequence_length", int),
    "num_train_epochs": to("train.epochs", number),
    "output_dir": to("run.dir", str),
    "system": to("data.system", str),
    "packing": to("data.packing", bool),
    "padding_free": without("fxtune packs so that rows are full"),
    "use_dora": to("techniques.lora.dora", bool),
    "use_rslora": to("techniques.lora.rslora", bool),
    "modules_to_save": to("techniques.lora.modules_to_save", list),
    "beta": to("objective.beta", number),
    "rpo_alpha": to("objective.sft_weight", number),
    "desirable_weight": to("objective.desirable_weight", number),
    "undesirable_weight": to("objective.undesirable_weight", number),
    "simpo_gamma": to("objective.gamma", number),
    "sequence_parallel_size": to("parallel.context", str),
    "freeze_vit": to("techniques.lora.vision", lambda value: not value),
    "freeze_aligner": to("techniques.lora.projector", lambda value: not value),
    "vit_lr": to("optimizer.lr_vision", number),
    "router_aux_loss_coef": to("techniques.router.aux_loss_coef", number),
    "use_liger_kernel": without(shared.KERNELS),
    "lazy_tokenize": without("tokens are cached by their content (data.cache_dir)"),
    **each(
        "model_type task_type model_author model_name load_from_cache_file check_model use_hf "
        "dataset_shuffle train_dataloader_shuffle val_dataset_shuffle create_checkpoint_symlink add_version strict "
        "stream bnb_4bit_compute_dtype bnb_4bit_quant_type "
        "bnb_4bit_use_double_quant logging_first_step",
        without("fxtune decides this itself, or it changes nothing that is trained"),
    ),
    **each("custom_register_path response_prefix", refused("rows of yours and their prefix: see docs/plugins.md")),
    **each("loss_scale", refused("weights of tokens: give a turn `weight` 0 or 1, or see data.learn")),
    **each(
        "loss_type num_generations vllm_mode reward_funcs teacher_model galore_rank",
        refused("fxtune does not train so"),
    ),
}


def read(account: Account) -> None:
    account.set("model.path", account.get("model"), "model")
    key = "tuner_type" if account.has("tuner_type") else "train_type"
    kind = account.get(key, "lora")
    adapters = kind == "lora"
    if kind in ("lora", "full"):
        account.note(f"techniques={kind}", key)
    else:
        account.refuse(f"{kind}: fxtune has LoRA and full fine-tuning (techniques=lora, techniques=full)", key)
    shared.precision(account, adapters, "torch_dtype")
    if adapters:
        shared.lora(account, ("lora_rank", "lora_alpha", "lora_dropout"), 8, 32, 0.05)
        shared.targets(account, "target_modules")
    bits = account.get("quant_bits")
    if bits in (4, 8):
        shared.quantize(account, "nf4" if bits == 4 else "int8", "quant_bits")
        account.note("by techniques.quantize", "quant_method")
    rlhf = account.get("rlhf_type")
    if rlhf in OBJECTIVES:
        account.set("objective", rlhf, "rlhf_type")
    elif rlhf == "rm":
        account.set("objective", "reward", "rlhf_type")
    elif rlhf:
        account.refuse(f"{rlhf}: fxtune has {', '.join(OBJECTIVES)} and rm", "rlhf_type")
    for key, target in (("dataset", "data.sources"), ("val_dataset", "data.eval_sources")):
        if account.has(key):
            account.set(target, [_source(name) for name in shared.entries(account.get(key))], key)
    if account.has("val_dataset"):
        account.note("val_dataset decides", "split_dataset_ratio")
    else:
        shared.held_out(account, "split_dataset_ratio")
    account.recipe["data.on_long"] = "truncate" if rlhf else "drop"
    if account.has("template"):
        shared.own_template(account, "template", "ms-swift")
    if account.get("truncation_strategy", "delete") == "delete":
        account.note("data.on_long", "truncation_strategy")
    else:
        account.refuse("set data.on_long after the import: fxtune leaves long chats out", "truncation_strategy")
    shared.trainer(account, 1e-4 if adapters else 1e-5, "cosine", 0.05, "early_stop_interval")
    account.follow(RULES)


def _source(name: Any) -> dict[str, Any]:
    """`org/data:subset#500`, or a file."""
    path, _, limit = str(name).partition("#")
    path, _, subset = path.partition(":") if "://" not in path else (path, "", "")
    source: dict[str, Any] = {"path": path}
    return source | ({"subset": subset} if subset else {}) | ({"limit": int(limit)} if limit else {})
