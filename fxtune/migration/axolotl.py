"""Reads a config of Axolotl (YAML). Its keys: docs.axolotl.ai/docs/config-reference."""

from __future__ import annotations

import re
from typing import Any

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import UNSET, Account, Rule, each, number, refused, to, without

OBJECTIVES = ("dpo", "ipo", "orpo", "simpo", "kto")
CHATS = re.compile(
    r"chat_template(\.default|\.argilla_chat)?|sharegpt.*|messages|chatml\..+|llama3\..+|zephyr\.nectar"
)
"""Types of datasets whose rows are chats, or pairs of chats with `rl`."""
TEXTS = ("completion", "pretrain")
COLUMNS = {
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
    "field": "text",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_label": "label",
}
"""Keys of a dataset that name a column -> the column as fxtune reads it."""
READ_AS = {"conversations": "messages"}
"""Columns that fxtune reads without being told."""
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
ROLES = {
    "system": ("system",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model"),
    "tool": ("tool",),
}
"""Names of roles that fxtune reads."""
LEARNS_DEFAULT = {
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "roles_to_train": (["assistant"], ["gpt"]),
}
PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "SpectrumPlugin")

KERNELS = """
    liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu liger_cross_entropy
    liger_rms_norm_gated liger_fused_linear_cross_entropy liger_use_token_scaling cut_cross_entropy use_kernels
    use_scattermoe use_sonicmoe experts_implementation lora_mlp_kernel
    lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy
    autotune_profiles
"""
ATTENTION = """
    flash_attention sdp_attention flex_attention xformers_attention eager_attention gemma4_hybrid_attn_impl
    flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp
"""
CLASSES = """
    model_type tokenizer_type processor_type tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
    is_llama_derived_model is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model base_model_config
    base_model_ignore_patterns device_map llama4_linearized_experts
"""
PACKING = """
    pad_to_sequence_len eval_sample_packing sample_packing_eff_est sample_packing_group_size sample_packing_bin_size
    sample_packing_sequentially batch_flattening total_num_tokens total_supervised_tokens
"""
CACHE = """
    dataset_prepared_path skip_prepare_dataset shuffle_merged_datasets push_dataset_to_hub dataset_keep_in_memory
    streaming streaming_multipack_buffer_size pretrain_multipack_buffer_size
"""
HARMLESS = """
    strict debug torchdistx_path gptq_groupsize gptq_model_v1 wandb_watch wandb_log_model wandb_run_id wandb_mode
    experimental_skip_move_to_device profiler_steps dataloader_drop_last save_first_step lora_on_cpu eval_table_size
    eval_max_new_tokens eval_causal_lm_metrics gc_steps embeddings_skip_upcast auto_resume_from_checkpoints
    ddp_bucket_cap_mb ddp_broadcast_buffers mean_resizing_embeddings resize_token_embeddings_to_32x
"""
OTHER_TRAINING = """
    ebft vllm distillation diffusion diffusion_lm mtp use_ray num_labels process_reward_model trl kd_trainer
    quantization mixture_of_depths spectrum dynamic_checkpoint nvfp4_training
"""

RULES: dict[str, Rule] = {
    **shared.RULES,
    "revision_of_model": to("model.revision", str),
    "tokenizer_config": to("model.tokenizer", str),
    "lora_model_dir": to("model.adapter", str),
    "tokens": to("model.add_tokens", list),
    "output_dir": to("run.dir", str),
    "sequence_len": to("data.sequence_length", int),
    "dataset_processes": to("data.workers", int),
    "num_epochs": to("train.epochs", number),
    "cosine_min_lr_ratio": to("schedule.min_lr_ratio", number),
    "peft_use_dora": to("techniques.lora.dora", bool),
    "peft_use_rslora": to("techniques.lora.rslora", bool),
    "peft_layers_to_transform": to("techniques.lora.layers_to_transform", list),
    "lora_modules_to_save": to("techniques.lora.modules_to_save", list),
    "context_parallel_size": to("parallel.context", str),
    "sequence_parallel_degree": to("parallel.context", str),
    "dp_shard_size": to("parallel.shard", str),
    "dp_replicate_size": to("parallel.replicate", str),
    "router_aux_loss_coef": to("techniques.router.aux_loss_coef", number),
    "wandb_project": to("tracking.wandb.project", str),
    "wandb_entity": to("tracking.wandb.entity", str),
    "wandb_name": to("run.name", str),
    "use_tensorboard": to("tracking.tensorboard", bool),
    "gpu_memory_limit": to("run.memory_gib", lambda value: number(str(value).removesuffix("GiB"))),
    "dataset_exact_deduplication": to("data.dedup", lambda value: "exact" if value else "off"),
    **each(ATTENTION, without(shared.ATTENTION)),
    **each(KERNELS, without(shared.KERNELS)),
    **each(CLASSES, without("transformers takes the classes from the model's files")),
    **each(PACKING, without("fxtune packs so that rows are full and documents cannot see each other")),
    **each(CACHE, without("tokens are cached by their content (data.cache_dir)")),
    **each(HARMLESS, without("fxtune decides this itself, or it changes nothing that is trained")),
    **each("hub_model_id hub_strategy", without("upload when the run has ended: fxtune push RUN org/name")),
    **each("eot_tokens", without("fxtune finds the ends of answers in the chat template, and learns them")),
    **each(
        "loss_watchdog_threshold loss_watchdog_patience",
        without("fxtune undoes steps that are not finite, and reports spikes (train.spikes)"),
    ),
    **each("fsdp fsdp_version fsdp_final_state_dict_type", without(shared.SHARDING)),
    **each(
        "expert_parallel_size tensor_parallel_size",
        lambda account, key: (
            account.note("off", key)
            if int(account.get(key)) == 1
            else account.refuse("fxtune divides each weight over cards (parallel.shard). Leave this key out", key)
        ),
    ),
    **each(
        "unfrozen_parameters freeze_mm_modules",
        refused("some weights in full, the others frozen: fxtune trains all weights, or adapters (techniques=lora)"),
    ),
    "quantize_moe_experts": without("techniques.quantize.experts=auto decides it"),
    **each("qat", refused("training for a quantized model (QAT) is not supported")),
    **each("relora relora_steps relora_prune_ratio jagged_restart_steps", refused("ReLoRA is not supported")),
    "eta_min": lambda account, key: account.set(
        "schedule.min_lr_ratio", number(account.get(key)) / number(account.get("learning_rate")), key
    ),
    **each(
        "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups cosine_constant_lr_ratio",
        refused("fxtune has one rate and its schedule for all text weights"),
    ),
    **each(
        "mlflow_tracking_uri mlflow_experiment_name use_mlflow use_comet comet_project_name use_swanlab "
        "use_otel_metrics",
        refused("fxtune logs to W&B and TensorBoard"),
    ),
    **each(OTHER_TRAINING, refused("fxtune does not train so")),
}


def read(account: Account) -> None:
    account.set("model.path", account.get("base_model"), "base_model")
    adapters = account.get("adapter") in ("lora", "qlora")
    shared.precision(account, adapters)
    _adapter(account)
    pairs = _objective(account)
    _rows(account, pairs)
    shared.batches(account, "micro_batch_size")
    if account.has("learning_rate"):
        account.set("optimizer.lr", number(account.get("learning_rate")), "learning_rate")
    shared.optimizer(account, "optimizer", "adamw_torch_fused")
    shared.schedule(account, "lr_scheduler", "cosine", warmup_ratio=0.03)
    shared.checkpointing(account)
    shared.saving(account)
    per_epoch = "train.eval_every and checkpoint.every count steps; the end is evaluated and saved"
    account.note(per_epoch, *filter(account.has, ("saves_per_epoch", "evals_per_epoch")))
    shared.evaluation(account, "eval_strategy")
    shared.stop_early(account)
    if not account.has("max_steps"):
        account.recipe["train.epochs"] = 1
    if account.has("wandb_project") and account.get("wandb_mode") != "disabled":
        account.recipe["tracking.wandb.mode"] = "online"
    _nested(account)
    account.follow(RULES)


def _adapter(account: Account) -> None:
    kind = account.get("adapter")
    if kind in ("lora", "qlora"):
        account.note("techniques=lora", "adapter")
        shared.lora(account, ("lora_r", "lora_alpha", "lora_dropout"), 8, None, 0.0)
        if account.get("lora_target_linear"):
            account.set("techniques.lora.target_modules", ["all-linear"], "lora_target_linear")
            account.note("lora_target_linear decides", "lora_target_modules")
        else:
            shared.targets(account, "lora_target_modules")
            account.note("lora_target_modules decides", "lora_target_linear")
        _expert_targets(account)
        init = account.get("peft_init_lora_weights")
        if init is not None and init is not True:
            known = str(init) in ("pissa", "olora")
            if known:
                account.set("techniques.lora.init", str(init), "peft_init_lora_weights")
            else:
                why = f"fxtune has no initialization {init}: see `fxtune help techniques.lora.init`"
                account.refuse(why, "peft_init_lora_weights")
    elif kind:
        account.refuse(f"{kind}: fxtune has LoRA, DoRA, rsLoRA, PiSSA and OLoRA (techniques.lora)", "adapter")
    else:
        unused = [key for key in account.config if key.startswith(("lora_", "peft_")) and account.has(key)]
        account.note("there is no adapter", *(key for key in unused if key != "lora_model_dir"))
    for key, form in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if account.get(key) and kind in ("lora", "qlora"):
            shared.quantize(account, form, key)
        elif account.get(key):
            account.refuse(
                "a quantized model is trained through adapters alone: set adapter, or load_in_*: false", key
            )
        else:
            account.note("off", key)


def _expert_targets(account: Account) -> None:
    """Adapters on tensors that hold all experts: fxtune takes them by the names of their linears."""
    names = account.get("lora_target_parameters")
    if names is None:
        return
    last = sorted({str(name).rpartition(".")[2] for name in ([names] if isinstance(names, str) else names)})
    chosen = account.recipe.get("techniques.lora.target_modules", [])
    wanted = chosen if chosen == ["all-linear"] else [*dict.fromkeys([*chosen, *last])]
    account.set("techniques.lora.target_modules", wanted, "lora_target_parameters")


def _objective(account: Account) -> bool:
    """Whether rows are pairs of answers, or judged answers."""
    rl = account.get("rl")
    if account.get("reward_model"):
        account.set("objective", "reward", "reward_model")
        return True
    account.note("off", "reward_model")
    if rl in OBJECTIVES:
        account.set("objective", rl, "rl")
        if account.has("rl_beta") and rl != "ipo":
            account.set("objective.beta", number(account.get("rl_beta")), "rl_beta")
        for key, target in (
            ("rpo_alpha", "sft_weight"),
            ("kto_desirable_weight", "desirable_weight"),
            ("kto_undesirable_weight", "undesirable_weight"),
            ("simpo_gamma", "gamma"),
            ("dpo_label_smoothing", "label_smoothing"),
        ):
            if account.has(key):
                account.set(f"objective.{target}", number(account.get(key)), key)
        return True
    if rl:
        account.refuse(f"{rl}: fxtune has {', '.join(OBJECTIVES)} and reward (`fxtune help objective`)", "rl")
    return False


def _rows(account: Account, pairs: bool) -> None:
    sources = [
        source for entry in account.get("datasets", []) if (source := _source(account, "datasets", entry, pairs))
    ]
    for entry in shared.entries(account.get("pretraining_dataset", [])):
        entry = {"path": entry} if isinstance(entry, str) else entry
        sources += filter(None, [_source(account, "pretraining_dataset", {"type": "pretrain", **entry}, pairs)])
    for key in ("datasets", "pretraining_dataset"):
        if account.has(key) and key not in account.entries:
            account.set("data.sources", sources, key)
    tests = [
        _source(account, "test_datasets", {"split": "test", **entry}, pairs)
        for entry in account.get("test_datasets", [])
    ]
    if tests and "test_datasets" not in account.entries:
        account.set("data.eval_sources", tests, "test_datasets")
    if tests:
        account.note("test_datasets decide", "val_set_size")
    else:
        shared.held_out(account, "val_set_size")
    texts = all(entry.get("type") in TEXTS for entry in account.get("datasets", []))
    account.set("data.on_long", "split" if texts else "drop", "excess_length_strategy")
    if account.get("excess_length_strategy") == "truncate":
        account.set("data.on_long", "truncate", "excess_length_strategy")
    account.set("data.packing", "auto" if account.get("sample_packing") else False, "sample_packing")
    if account.get("train_on_inputs"):
        account.set("data.learn.roles", ["system", "user", "assistant"], "train_on_inputs")
        account.differ("train_on_inputs: the texts of all turns are learned, without the template's headers")
    else:
        account.note("off", "train_on_inputs")
    _template(account)


def _template(account: Account) -> None:
    name, own = account.get("chat_template", "tokenizer_default"), str(account.get("chat_template_jinja", ""))
    account.note("the tokenizer's chat template", "chat_template", "chat_template_jinja")
    if name == "jinja" and own.endswith(".jinja"):
        account.set("data.chat_template", own, "chat_template_jinja")
    elif name == "jinja":
        account.refuse("write the template to a file NAME.jinja, and name the file here", "chat_template_jinja")
    elif name != "tokenizer_default":
        shared.own_template(account, "chat_template", "Axolotl")


def _source(account: Account, key: str, entry: Any, pairs: bool) -> dict[str, Any] | None:
    """An entry of data.sources; None if it is refused."""
    left = {name: value for name, value in dict(entry).items() if value not in UNSET}
    source: dict[str, Any] = {"path": left.pop("path", None)}
    kind = left.pop("type", None)
    files = left.pop("data_files", None)
    left.pop("ds_type", None)
    if files:
        files = shared.entries(files)
        if len(files) > 1:
            account.refuse(f"{key}: give each of data_files as an entry with its own path", key)
            return None
        source["path"] = files[0] if "://" not in str(files[0]) else f"{source['path']}"
    for name, target in (
        ("split", "split"),
        ("train_on_split", "split"),
        ("name", "subset"),
        ("revision", "revision"),
    ):
        if name in left:
            source[target] = left.pop(name)
    fields = {**kind, **left} if isinstance(kind, dict) else left
    named = {fields.pop(name): column for name, column in COLUMNS.items() if isinstance(fields.get(name), str)}
    if columns := {name: column for name, column in named.items() if column not in (name, READ_AS.get(name))}:
        source["columns"] = columns
    mappings = fields.pop("message_property_mappings", {})
    roles = mappings.get("role", fields.pop("message_field_role", "role"))
    texts = mappings.get("content", fields.pop("message_field_content", "content"))
    if roles not in ROLE_KEYS or texts not in TEXT_KEYS:
        account.refuse(f"{key}: turns with {roles} and {texts}: rename them to role and content in the rows", key)
        return None
    if fields.pop("chat_template", "tokenizer_default") != "tokenizer_default":
        account.differ(f"{key}: a chat template for one dataset; fxtune has one for all (data.chat_template)")
    for name in ("trust_remote_code", "conversation"):
        fields.pop(name, None)
    if all(given in ROLES.get(role, ()) for role, names in fields.get("roles", {}).items() for given in names):
        fields.pop("roles", None)
    for name, usual in LEARNS_DEFAULT.items():
        if name in fields and fields[name] in usual:
            fields.pop(name)
    if isinstance(kind, dict):
        prompt = str(fields.pop("format", "{instruction}")).strip()
        fields.pop("no_input_format", None)
        if prompt not in ("{instruction}", "{instruction} {input}", "{instruction}\n{input}"):
            account.differ(
                f"{key}: the prompt text {prompt[:60]!r} is not written: rows become chats of the tokenizer's template"
            )
    elif isinstance(kind, str) and kind.startswith("alpaca"):
        account.differ(
            "alpaca: Axolotl writes Alpaca's prompt texts (`### Instruction:`), fxtune a chat of the tokenizer's "
            "template, as a server writes it"
        )
    elif kind in TEXTS:
        source["format"] = "text"
    elif kind is not None and not (isinstance(kind, str) and CHATS.fullmatch(kind)) and not pairs:
        account.refuse(f"{key}: rows of type {kind}. Write chats: {{messages: [{{role, content}}]}}", key)
        return None
    if fields:
        account.refuse(
            f"{key}: {', '.join(fields)} of {source['path']} {'are' if len(fields) > 1 else 'is'} not translated", key
        )
        return None
    return source


def _nested(account: Account) -> None:
    """Keys whose value is a section, and lists of plugins."""
    if account.has("special_tokens"):
        account.note("fxtune needs no padding token, and takes the others from the tokenizer", "special_tokens")
        if changed := {*account.get("special_tokens")} - {"pad_token"}:
            account.differ(f"special_tokens: {', '.join(sorted(changed))} stay those of the tokenizer's files")
    for key in ("fsdp_config", "accelerator_config", "deepspeed"):
        config = account.get(key)
        if isinstance(config, dict) and (config.get("offload_params") or config.get("fsdp_offload_params")):
            account.refuse(shared.OFFLOAD, key)
        elif isinstance(config, dict):
            account.note(shared.SHARDING, key)
    others = [name for name in account.get("plugins", []) if not str(name).endswith(PLUGINS)]
    if others:
        account.refuse(f"plugins: {', '.join(map(str, others))} have no counterpart (docs/plugins.md)", "plugins")
    else:
        account.note(shared.KERNELS, "plugins")
    changed = {*account.get("overrides_of_model_config", {}), *account.get("model_config", {})}
    if changed - {"output_router_logits", "use_cache"}:
        account.refuse(
            "other values of the model's config: they need model.init=random",
            "overrides_of_model_config",
            "model_config",
        )
    else:
        account.note("fxtune sets this itself", "overrides_of_model_config", "model_config")
