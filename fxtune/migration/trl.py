"""Reads a config of TRL's command line (`trl sft --config FILE`). Its keys: SFTConfig, DPOConfig, ModelConfig."""

from __future__ import annotations

from fxtune.migration import trainer_arguments as shared
from fxtune.migration.account import Account, Rule, each, number, refused, to, without

METHODS = {"sft": None, "dpo": "dpo", "kto": "kto", "reward": "reward", "orpo": "orpo"}
LOSSES = ("sigmoid", "hinge", "robust", "exo_pair", "sppo_hard")

RULES: dict[str, Rule] = {
    **shared.RULES,
    "model_revision": to("model.revision", str),
    "max_length": to("data.sequence_length", int),
    "max_seq_length": to("data.sequence_length", int),
    "num_train_epochs": to("train.epochs", number),
    "output_dir": to("run.dir", str),
    "run_name": to("run.name", str),
    "packing": to("data.packing", bool),
    "eval_packing": without("fxtune packs so that documents cannot see each other"),
    "packing_strategy": without("fxtune packs so that rows are full"),
    "padding_free": without("fxtune packs so that rows are full"),
    "beta": to("objective.beta", number),
    "label_smoothing": to("objective.label_smoothing", number),
    "desirable_weight": to("objective.desirable_weight", number),
    "undesirable_weight": to("objective.undesirable_weight", number),
    "center_rewards_coefficient": to("objective.center", number),
    "use_dora": to("techniques.lora.dora", bool),
    "use_rslora": to("techniques.lora.rslora", bool),
    "lora_modules_to_save": to("techniques.lora.modules_to_save", list),
    "chat_template_path": to("data.chat_template", str),
    "dataset_text_field": without("a column `text`"),
    "max_prompt_length": without("data.on_long=truncate cuts the beginning of a prompt"),
    "max_completion_length": without("an answer is never cut"),
    "truncation_mode": without("data.on_long=truncate cuts the beginning of a prompt"),
    "precompute_ref_log_probs": to("objective.reference", lambda value: "stored" if value else "auto"),
    "assistant_only_loss": without("answers alone are learned"),
    "completion_only_loss": without("answers alone are learned"),
    "activation_offloading": to("techniques.checkpointing.offload", bool),
    **each(
        "dataset_streaming ignore_bias_buffers bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant "
        "pad_token pad_to_multiple_of dtype torch_dtype lora_task_type disable_dropout",
        without("fxtune decides this itself, or it changes nothing that is trained"),
    ),
    **each(
        "eos_token model_init_kwargs", refused("fxtune takes the tokenizer and the model as their files have them")
    ),
    **each(
        "loss_weights sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        refused("fxtune has one loss and a fixed reference"),
    ),
    **each(
        "num_generations max_new_tokens vllm_mode use_vllm reward_funcs", refused("fxtune does not train on rollouts")
    ),
}


def read(account: Account, method: str = "sft") -> None:
    """`method`: of METHODS; TRL has it in the command, not in the file."""
    account.set("model.path", account.get("model_name_or_path"), "model_name_or_path")
    adapters = bool(account.get("use_peft")) or account.has("lora_r")
    account.note("techniques=lora" if adapters else "techniques=full", "use_peft")
    shared.precision(account, adapters)
    if adapters:
        shared.lora(account, ("lora_r", "lora_alpha", "lora_dropout"), 16, 32, 0.05)
        shared.targets(account, "lora_target_modules")
    for key, form in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if account.get(key):
            shared.quantize(account, form, key)
        else:
            account.note("off", key)
    if METHODS[method]:
        account.recipe["objective"] = METHODS[method]
        loss = account.get("loss_type", "sigmoid")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if loss == "ipo":
            account.set("objective", "ipo", "loss_type")
        elif loss == "sigmoid" or (method == "kto" and loss == "kto"):
            account.note("the objective's own", "loss_type")
        elif loss in LOSSES and method == "dpo":
            account.set("objective.loss_type", loss, "loss_type")
        else:
            account.refuse(f"{loss}: see `fxtune help objective.loss_type`", "loss_type")
    elif account.get("loss_type") not in (None, "nll"):
        account.refuse(
            "fxtune learns chats and text by cross-entropy. Is this a config of DPO? Give --method dpo", "loss_type"
        )
    else:
        account.note("cross-entropy", "loss_type")
    source = {"path": account.get("dataset_name")}
    for key, target in (("dataset_config", "subset"), ("dataset_train_split", "split")):
        if account.has(key):
            source[target] = account.get(key)
            account.note(f"{target} of the source", key)
    account.set("data.sources", [source], "dataset_name")
    if account.has("dataset_test_split") and account.get("eval_strategy", "no") != "no":
        account.set(
            "data.eval_sources", [{**source, "split": account.get("dataset_test_split")}], "dataset_test_split"
        )
    else:
        account.note("nothing is evaluated", "dataset_test_split")
    account.recipe["data.on_long"] = "drop" if method == "sft" else "truncate"
    if method == "sft":
        account.differ("documents longer than max_length are left out, where TRL cuts them (data.on_long)")
        if not account.get("assistant_only_loss") and account.get("completion_only_loss") is not True:
            account.differ(
                "chats teach the assistant's turns alone; TRL learns all tokens of a chat (data.learn.roles)"
            )
    shared.trainer(account, 2e-5 if method == "sft" else 1e-6, "linear")
    account.follow(RULES)
