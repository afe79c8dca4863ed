"""Reads a config of LLaMA-Factory (YAML). Its keys: src/llamafactory/hparams in its repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError
from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import UNSET, Account, Rule, each, number, refused, to, without

STAGES = {"sft": None, "pt": None, "dpo": "dpo", "kto": "kto", "rm": "reward"}
LOSSES = {
    "sigmoid": ("dpo", None),
    "hinge": ("dpo", "hinge"),
    "ipo": ("ipo", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "images": "images",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
    "messages": "messages",
}
"""Columns of dataset_info.json -> the column as fxtune reads it, in rows of Alpaca's kind."""
OTHER_METHODS = """
    use_galore use_apollo use_badam use_adam_mini use_dft_loss use_asft_loss asft_alpha use_eaft_loss use_llama_pro
    use_kt kt_config mixture_of_depths finetuning_args use_megatron use_mca use_ray use_hyper_parallel mtp_num_layers
"""

RULES: dict[str, Rule] = {
    **shared.RULES,
    "cutoff_len": to("data.sequence_length", int),
    "num_train_epochs": to("train.epochs", number),
    "output_dir": to("run.dir", str),
    "model_revision": to("model.revision", str),
    "adapter_name_or_path": to("model.adapter", str),
    "run_name": to("run.name", str),
    "use_dora": to("techniques.lora.dora", bool),
    "use_rslora": to("techniques.lora.rslora", bool),
    "additional_target": to(
        "techniques.lora.modules_to_save", lambda value: [name.strip() for name in str(value).split(",")]
    ),
    "mask_history": to("data.learn.last_turn_only", bool),
    "default_system": to("data.system", str),
    "pref_ftx": to("objective.sft_weight", number),
    "simpo_gamma": to("objective.gamma", number),
    "kto_chosen_weight": to("objective.desirable_weight", number),
    "kto_rejected_weight": to("objective.undesirable_weight", number),
    "moe_aux_loss_coef": to("techniques.router.aux_loss_coef", number),
    "flash_attn": without(shared.ATTENTION),
    "enable_liger_kernel": without(shared.KERNELS),
    "use_unsloth": without(shared.KERNELS),
    "use_unsloth_gc": without(shared.KERNELS),
    "bnb_4bit_compute_dtype": without("products run in the dtype of the model"),
    **each(
        "video_max_pixels tokenized_path cache_dir hf_hub_token streaming buffer_size data_shared_file_system "
        "print_param_status ray_run_name use_reentrant_gc quant_config double_quantization quantization_device_map "
        "predict_with_generate bnb_4bit_quant_type",
        without("fxtune decides this itself, or it changes nothing that is trained"),
    ),
    **each(
        "loraplus_lr_ratio loraplus_lr_embedding", refused("fxtune has one rate and its schedule for all text weights")
    ),
    **each(
        "ref_model reward_model mix_strategy shift_attn upcast_layernorm media_dir use_swanlab",
        refused("it has no counterpart here"),
    ),
    "disable_gradient_checkpointing": to("techniques.checkpointing.enabled", lambda value: not value),
    **each("pissa_init", to("techniques.lora.init", lambda value: "pissa" if value else "default")),
    **each("pissa_convert pissa_iter", without("the export is a plain adapter (docs/techniques.md)")),
    **each(OTHER_METHODS, refused("fxtune does not train so")),
    "pure_bf16": without("techniques=fast trains in bfloat16"),
    "fp8": refused("see techniques=full_fp8 and techniques=fp8"),
    "fp8_backend": without("see fp8"),
    "freeze_vision_tower": without(
        "full fine-tuning leaves the vision encoder as it is, unless optimizer.lr_vision is set"
    ),
    "freeze_multi_modal_projector": without("it stays with the vision encoder"),
    "freeze_language_model": refused("the language model is what fxtune trains"),
    "neat_packing": without("fxtune packs so that documents cannot see each other"),
}


def read(account: Account, folder: Path = Path()) -> None:
    """`folder`: of the config, above which data/dataset_info.json is looked for."""
    account.set("model.path", account.get("model_name_or_path"), "model_name_or_path")
    kind = account.get("finetuning_type", "lora")
    adapters = kind == "lora"
    shared.precision(account, adapters)
    if kind in ("lora", "full"):
        account.note(f"techniques={kind}", "finetuning_type")
    else:
        account.refuse(
            f"{kind}: fxtune has LoRA and full fine-tuning (techniques=lora, techniques=full)", "finetuning_type"
        )
    if adapters:
        shared.lora(account, ("lora_rank", "lora_alpha", "lora_dropout"), 8, None, 0.0)
        shared.targets(account, "lora_target", "all")
    bits = account.get("quantization_bit")
    if bits in (4, 8):
        shared.quantize(account, "nf4" if bits == 4 else "int8", "quantization_bit")
    elif bits:
        account.refuse(f"{bits} bits: techniques.quantize.type has nf4, int8, fp8 and mxfp4", "quantization_bit")
    method = account.get("quantization_method", "bnb")
    if method in ("bnb", "bitsandbytes"):
        account.note("by techniques.quantize", "quantization_method")
    else:
        account.refuse(f"{method}: techniques.quantize.type has nf4, int8, fp8 and mxfp4", "quantization_method")
    _objective(account)
    _rows(account, folder)
    shared.trainer(account, 5e-5, "linear", patience="early_stopping_steps")
    account.follow(RULES)


def _objective(account: Account) -> None:
    stage = account.get("stage", "sft")
    if stage not in STAGES:
        account.refuse(f"{stage}: fxtune trains sft, pt, dpo, kto and rm", "stage")
        return
    account.note("the rows say it", "stage")
    if stage == "dpo":
        loss = account.get("pref_loss", "sigmoid")
        if loss not in LOSSES:
            account.refuse(f"{loss}: fxtune has {', '.join(LOSSES)}", "pref_loss")
            return
        name, form = LOSSES[loss]
        account.set("objective", name, "stage", "pref_loss")
        if form:
            account.set("objective.loss_type", form, "pref_loss")
    elif STAGES[stage]:
        account.set("objective", STAGES[stage], "stage")
    if account.has("pref_beta") and stage in ("dpo", "kto"):
        account.set("objective.beta", number(account.get("pref_beta")), "pref_beta")
    if account.has("dpo_label_smoothing"):
        account.set("objective.label_smoothing", number(account.get("dpo_label_smoothing")), "dpo_label_smoothing")


def _rows(account: Account, folder: Path) -> None:
    place = account.get("dataset_dir", "data")
    known = _known(folder, str(place))
    account.note("where dataset_info.json is", "dataset_dir")
    for key, target in (("dataset", "data.sources"), ("eval_dataset", "data.eval_sources")):
        names = account.get(key)
        if names is None:
            continue
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        if known is None:
            account.refuse(
                f"{', '.join(names)}: names of {place}/dataset_info.json, which is not above {folder}. Copy it to "
                "data/ here, or give --data FILE",
                key,
            )
        elif missing := [name for name in names if name not in known[0]]:
            account.refuse(f"dataset_info.json has no {', '.join(missing)}", key)
        else:
            entries = [_source(account, known[0][name], known[1]) for name in names]
            if account.has("max_samples"):
                entries = [{**entry, "limit": int(account.get("max_samples"))} for entry in entries]
            account.set(target, entries, key)
    account.note("limit of each source", "max_samples")
    if account.has("eval_dataset"):
        account.note("eval_dataset decides", "val_size")
    else:
        shared.held_out(account, "val_size")
    if account.has("interleave_probs"):
        weights = [number(share) for share in str(account.get("interleave_probs")).split(",")]
        for source, weight in zip(account.recipe.get("data.sources", []), weights, strict=False):
            source["weight"] = weight
        account.note("weight of each source", "interleave_probs")
        account.differ("interleave_probs count rows, and the weights of sources supervised tokens")
    packing = bool(account.get("packing", account.get("stage") == "pt"))
    account.set("data.packing", packing, "packing")
    account.set(
        "data.on_long",
        "split"
        if account.get("stage") == "pt"
        else "truncate"
        if account.get("stage") in ("dpo", "kto", "rm")
        else "drop",
    )
    account.differ("documents longer than cutoff_len are left out, where LLaMA-Factory cuts them (data.on_long)")
    if account.get("train_on_prompt"):
        account.set("data.learn.roles", ["system", "user", "assistant"], "train_on_prompt")
    if account.has("template"):
        shared.own_template(account, "template", "LLaMA-Factory")
    for key in ("image_max_pixels", "image_min_pixels"):
        if account.has(key):
            account.note("images keep the size that the model's processor gives them", key)
            account.differ(f"{key}: images keep the processor's size (data.image_tokens.min and max bound it)")
    if account.has("enable_thinking"):
        account.set(
            "data.chat_template_kwargs", {"enable_thinking": bool(account.get("enable_thinking"))}, "enable_thinking"
        )


def _known(folder: Path, place: str) -> tuple[dict[str, Any], Path] | None:
    """The entries of dataset_info.json and its folder."""
    for above in (Path(), folder, *folder.resolve().parents):
        file = above / place / "dataset_info.json"
        if file.is_file():
            try:
                return json.loads(file.read_text(encoding="utf-8")), file.parent
            except ValueError as error:
                raise ConfigError(f"{file} is no JSON: {error}") from error
    return None


def _source(account: Account, entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An entry of data.sources."""
    left = {name: value for name, value in entry.items() if value not in UNSET}
    file = left.pop("file_name", None)
    source: dict[str, Any] = {"path": str(folder / file) if file else left.get("hf_hub_url") or left.get("script_url")}
    for name, target in (("split", "split"), ("subset", "subset")):
        if name in left:
            source[target] = left[name]
    if left.get("num_samples"):
        source["limit"] = left["num_samples"]
    columns = left.get("columns", {})
    if left.get("formatting") in ("sharegpt", "openai"):
        own = {
            name: column
            for name, column in columns.items()
            if name in ("messages", "system", "tools", "images", "chosen", "rejected", "kto_tag")
        }
    else:
        own = columns
    plain = (
        not left.get("ranking")
        and "response" not in own
        and "prompt" in own
        and left.get("formatting") in (None, "alpaca")
    )
    renames = {
        column: "text" if plain and name == "prompt" else COLUMNS[name]
        for name, column in own.items()
        if name in COLUMNS
    }
    renames = {
        column: name
        for column, name in renames.items()
        if column != name and (column, name) != ("conversations", "messages")
    }
    if renames:
        source["columns"] = renames
    return source
