"""`fxtune import`: each key of another tool's config is translated, without effect here, or refused; nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from fxtune.cli.import_config import TOOLS
from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.config.introspection import all_keys
from fxtune.config.root import Config
from fxtune.migration.account import KINDS

AXOLOTL = {
    "base_model": "org/base",
    "revision_of_model": "abc",
    "adapter": "qlora",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.05,
    "lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj",
    "datasets": [{"path": "rows.jsonl", "type": "chat_template", "field_messages": "turns", "split": "train[:20%]"}],
    "chat_template": "chatml",
    "val_set_size": 0.1,
    "sequence_len": 1024,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "learning_rate": "2e-5",
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "constant_with_warmup",
    "warmup_steps": 10,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "flash_attention": True,
    "special_tokens": {"pad_token": "<pad>"},
    "fsdp_config": {"offload_params": False},
    "resume_from_checkpoint": None,
    "wandb_project": "mine",
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
}
FACTORY = {
    "model_name_or_path": "org/base",
    "stage": "dpo",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "pref_beta": 0.2,
    "pref_loss": "simpo",
    "dataset": "mine, other",
    "template": "qwen3",
    "cutoff_len": 512,
    "max_samples": 100,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 5.0e-6,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "val_size": 200,
    "report_to": "wandb",
    "deepspeed": "ds_z3_config.json",
}
TRL = {
    "model_name_or_path": "org/base",
    "dataset_name": "org/rows",
    "use_peft": True,
    "lora_r": 4,
    "load_in_8bit": True,
    "beta": 0.3,
    "loss_type": "ipo",
    "max_length": 256,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-6,
    "bf16": True,
}
SWIFT = {
    "model": "org/base",
    "tuner_type": "lora",
    "target_modules": "all-linear",
    "dataset": ["org/rows:en#500", "mine.jsonl"],
    "torch_dtype": "bfloat16",
    "split_dataset_ratio": 0.01,
    "per_device_train_batch_size": 1,
    "max_length": 2048,
    "freeze_vit": True,
}
JOB = {
    "training_file": "train.jsonl",
    "validation_file": "test.jsonl",
    "suffix": "mine",
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
}
EXPECTED = {
    "axolotl": {
        "model.path": "org/base",
        "techniques.quantize.type": "nf4",
        "techniques.lora.target_modules": ["up_proj", "down_proj", "q_proj", "v_proj"],
        "data.sources.0.columns": {"turns": "messages"},
        "data.sources.0.split": "train[:20%]",
        "train.global_batch_size": 16,
        "train.epochs": 3,
        "optimizer.lr": 2e-5,
        "optimizer.name": "adamw_8bit",
        "schedule.name": "constant",
        "schedule.warmup_steps": 10,
        "data.on_long": "drop",
        "tracking.wandb.project": "mine",
        "techniques.liger.enabled": "auto",
    },
    "llamafactory": {
        "objective.name": "simpo",
        "objective.beta": 0.2,
        "data.sources.0.columns": {"prompt": "instruction", "better": "chosen", "worse": "rejected"},
        "data.sources.1.path": "org/other",
        "data.sources.1.limit": 100,
        "data.eval_limit": 200,
        "techniques.lora.alpha": 16,
        "tracking.wandb.mode": "online",
    },
    "trl": {
        "objective.name": "ipo",
        "techniques.quantize.type": "int8",
        "techniques.lora.alpha": 32,
        "objective.beta": 0.3,
    },
    "swift": {
        "data.sources.0.subset": "en",
        "data.sources.0.limit": 500,
        "data.eval_fraction": 0.01,
        "optimizer.lr": 1e-4,
    },
    "openai": {"model.path": "org/base", "train.epochs": 2, "run.name": "mine", "optimizer.lr": "auto"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "axolotl": AXOLOTL,
    "llamafactory": FACTORY,
    "trl": TRL,
    "swift": SWIFT,
    "openai": JOB,
}
OPTIONS = {"axolotl": ["--gpus", "2"], "trl": ["--method", "dpo"], "openai": ["--model", "org/base"]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {
        "mine": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "prompt", "chosen": "better", "rejected": "worse"}},
        "other": {"hf_hub_url": "org/other", "ranking": True},
    }  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(known))
    return tmp_path


def imported(folder, tool, **changes):
    """The exit code of importing a config of `tool` with `changes`, and what `--json` wrote."""
    file = folder / f"{tool}.yaml"
    file.write_text(yaml.safe_dump(CONFIGS[tool] | changes))
    code = main(["import", str(file), *OPTIONS.get(tool, []), "--json", "out.json"])
    return code, json.loads((folder / "out.json").read_text()) if (folder / "out.json").exists() else None


def value(config, path):
    for part in path.split("."):
        config = config[int(part)] if isinstance(config, list) else getattr(config, part)
    return getattr(config, "value", config)


@pytest.mark.parametrize("tool", CONFIGS)
def test_config_becomes_a_recipe_with_every_key_accounted_for(folder, tool):
    code, found = imported(folder, tool)
    assert code == 0
    assert {entry["key"].partition(".")[0] for entry in found["keys"]} == {*CONFIGS[tool]}
    assert found["tool"] == tool
    config = load([f"+recipe={tool}"])
    assert {path: value(config, path) for path in EXPECTED[tool]} == EXPECTED[tool]


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("axolotl", {"qat": {"weight_dtype": "int4"}}),
        ("axolotl", {"optimizer": "shampoo"}),
        ("axolotl", {"fsdp_config": {"offload_params": True}}),
        ("axolotl", {"datasets": [{"path": "x", "type": "chat_template", "field_thinking": "why"}]}),
        ("axolotl", {"lora_target_modules": r"layers\.(1|3)\.mlp\.(up|down)_proj"}),
        ("axolotl", {"no_such_key": 1}),
        ("axolotl", {"datasets": [{"path": "x", "type": "chat_template", "shards": 10}]}),
        ("axolotl", {"datasets": [{"path": "json", "type": "completion", "data_files": ["a.jsonl", "b.jsonl"]}]}),
        ("llamafactory", {"ref_model": "org/other"}),
        ("swift", {"truncation_strategy": "left"}),
        ("llamafactory", {"finetuning_type": "oft"}),
        ("llamafactory", {"dataset": "unknown"}),
        ("trl", {"loss_type": "bco_pair"}),
        ("trl", {"bnb_4bit_quant_type": "fp4"}),
        ("swift", {"rlhf_type": "grpo"}),
    ],
)
def test_what_fxtune_cannot_do_is_refused_and_no_recipe_written_unless_it_is_left_out(folder, tool, changes, capsys):
    (key,) = changes
    assert imported(folder, tool, **changes)[0] == 2
    assert f"\n  {key}: " in capsys.readouterr().err
    assert not (folder / f"recipes/{tool}.yaml").exists()
    command = ["import", f"{tool}.yaml", *OPTIONS.get(tool, []), "--data", "rows.jsonl", "--without", key]
    assert main(command) == 0
    assert f"{key}=" in (folder / f"recipes/{tool}.yaml").read_text()


@pytest.mark.parametrize(
    ("tool", "key", "fate", "said"),
    [
        ("axolotl", "adapter", "translated", "techniques="),
        ("axolotl", "saves_per_epoch", "differs", "checkpoint.every"),
        ("axolotl", "evals_per_epoch", "differs", "train.eval_every"),
        ("axolotl", "shuffle_merged_datasets", "no effect here", "shuffles"),
        ("axolotl", "datasets.0.split", "translated", "split=train[:20%]"),
        ("axolotl", "datasets.0.field_messages", "translated", "turns"),
        ("axolotl", "datasets.0.type", "translated", "columns="),
        ("trl", "use_peft", "translated", "techniques="),
        ("axolotl", "special_tokens", "no effect here", "tokenizer"),
        ("llamafactory", "finetuning_type", "translated", "techniques="),
    ],
)
def test_the_account_of_a_key_names_what_decides_it(folder, tool, key, fate, said):
    _, found = imported(folder, tool, **({} if key.partition(".")[0] in CONFIGS[tool] else {key: True}))
    (entry,) = (entry for entry in found["keys"] if entry["key"] == key)
    assert entry["fate"] == fate
    assert said in entry["text"]


def test_what_is_trained_otherwise_stands_in_the_recipe(folder):
    _, found = imported(folder, "axolotl")
    text = (folder / "recipes/axolotl.yaml").read_text()
    assert all(f"# Differs: {line}." in text for line in found["differences"])
    assert any("chatml" in line for line in found["differences"])


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "x: 1"])
def test_a_file_that_is_no_config_is_one_message(folder, capsys, text):
    (folder / "odd.yaml").write_text(text)
    assert main(["import", "odd.yaml"]) == 2
    assert "odd.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "changes", "word"),
    [
        ("axolotl", {"special_tokens": {"eos_token": "<end>"}}, "eos_token"),
        ("axolotl", {"evals_per_epoch": 4}, "train.eval_every"),
        ("axolotl", {"eval_steps": 0.25}, "train.eval_every"),
        ("axolotl", {"save_steps": 0.25}, "checkpoint.every"),
        ("axolotl", {"shuffle_merged_datasets": False}, "shuffles"),
        ("axolotl", {"datasets": [{"path": "rows.jsonl", "train_on_eos": "all"}]}, "train_on_eos"),
        ("axolotl", {"datasets": [{"path": "rows.jsonl", "type": "alpaca"}]}, "alpaca"),
        ("axolotl", {"rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}, "chatml.intel"),
        ("swift", {"dataset_shuffle": False}, "shuffles"),
        ("llamafactory", {"image_max_pixels": 262144}, "image_max_pixels"),
        ("trl", {"loss_type": "nll"}, "all tokens"),
    ],
)
def test_a_key_that_trains_otherwise_here_is_a_difference(folder, tool, changes, word):
    file = folder / "changed.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in CONFIGS[tool].items() if key != "beta"} | changes))
    assert main(["import", str(file), "--tool", tool, "--json", "out.json"]) == 0
    assert any(word in line for line in json.loads((folder / "out.json").read_text())["differences"])


@pytest.mark.parametrize(
    ("tool", "changes", "expected"),
    [
        ("axolotl", {"lr_scheduler": "constant"}, {"schedule.warmup_steps": 0}),
        ("axolotl", {"optimizer": "sgd"}, {"optimizer.momentum": 0}),
        ("axolotl", {"sequence_len": None}, {"data.sequence_length": 512}),
        ("axolotl", {"warmup_steps": 0}, {"schedule.warmup_steps": 0}),
        ("axolotl", {"max_steps": 5}, {"train.max_steps": 5, "train.epochs": None}),
        ("axolotl", {"context_parallel_size": 2}, {"train.global_batch_size": 8, "parallel.context": "2"}),
        ("axolotl", {"excess_length_strategy": "raise"}, {"data.on_long": "error"}),
        ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3}, {"objective.beta": 0.3}),
        ("axolotl", {"reward_model": True}, {"objective": "reward", "objective.center": 0}),
        ("axolotl", {"val_set_size": 0, "eval_steps": 5}, {"train.eval_every": None}),
        ("llamafactory", {"pref_beta": None}, {"objective.beta": 0.1, "objective.gamma": 0.5}),
        ("llamafactory", {"per_device_train_batch_size": None}, {"train.micro_batch_size": 16}),
        ("llamafactory", {"stage": "sft", "neat_packing": True}, {"data.packing": True, "objective.beta": None}),
        ("llamafactory", {"freeze_vision_tower": False}, {"techniques.lora.vision": True}),
        (
            "llamafactory",
            {"finetuning_type": "full", "freeze_vision_tower": False, "freeze_multi_modal_projector": False},
            {"optimizer.lr_vision": 5e-6, "techniques.lora.r": None},
        ),
        ("swift", {}, {"train.global_batch_size": 16, "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.1}),
        ("trl", {"use_peft": None}, {"techniques": ["full", "fast"]}),
        ("trl", {"bf16": None, "max_length": None, "max_seq_length": 64}, {"data.sequence_length": 64}),
        ("trl", {"eval_strategy": "steps"}, {"data.eval_sources": [{"path": "org/rows", "split": "test"}]}),
        ("trl", {"dataset_text_field": "body"}, {"data.sources": [{"path": "org/rows", "columns": {"body": "text"}}]}),
        ("trl", {}, {"data.packing": False, "techniques": ["lora", "fast"]}),
    ],
)
def test_what_the_tool_does_by_default_is_done_here(folder, tool, changes, expected):
    changes = {"load_in_4bit": False, "load_in_8bit": False} | changes if tool == "trl" else changes
    code, found = imported(folder, tool, **changes)
    recipe = found["recipe"]
    assert code == 0
    assert {key: recipe.get(key) for key in expected} == expected


PAIRS = {"train.micro_batch_size": 4, "train.global_batch_size": 32}


@pytest.mark.parametrize(
    ("tool", "method", "changes", "expected"),
    [
        ("trl", "dpo", {}, PAIRS),
        ("trl", "reward", {}, PAIRS),
        ("trl", "kto", {}, {"train.micro_batch_size": 2, "train.global_batch_size": 16}),
        ("llamafactory", "", {"stage": "dpo", "packing": True}, PAIRS | {"data.packing": False}),
        ("llamafactory", "", {"stage": "rm"}, PAIRS),
        ("llamafactory", "", {"stage": "kto"}, {"train.global_batch_size": 16}),
        ("llamafactory", "", {"stage": "sft"}, {"train.global_batch_size": 16}),
        ("swift", "", {"rlhf_type": "orpo"}, PAIRS),
        ("swift", "", {"rlhf_type": "dpo", "packing": True}, {"train.global_batch_size": 16, "data.packing": True}),
    ],
)
def test_a_step_has_the_pairs_of_the_other_tool(folder, tool, method, changes, expected):
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    own = CONFIGS[tool] | {
        "load_in_8bit": False,
        "loss_type": None,
        "pref_loss": None,
        "pref_beta": None,
        "beta": None,
    }
    file = folder / "pairs.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in (own | batch | changes).items() if value}))
    method_words = ["--method", method] if method else []
    assert main(["import", str(file), "--tool", tool, *method_words, "--json", "out.json"]) == 0
    found = json.loads((folder / "out.json").read_text())
    assert {key: found["recipe"].get(key) for key in expected} == expected
    learns_pairs = expected is PAIRS or "data.packing" in expected
    assert any("pairs" in line for line in found["differences"] if line.startswith("a step")) is learns_pairs


def test_a_pair_a_card_is_a_recipe_that_runs(folder):
    rows = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {"per_device_train_batch_size": 1, "val_size": None, "report_to": None, "bf16": None}
    (folder / "one.yaml").write_text(yaml.safe_dump(FACTORY | changes))
    assert main(["import", "one.yaml", "--model", "builtin:tiny", "--data", "rows.jsonl"]) == 0
    assert main(["preview", "+recipe=one"]) == 0


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("axolotl", {"val_set_size": None, "test_datasets": [{"path": "old.jsonl", "type": "chat_template"}]}),
        ("llamafactory", {"val_size": None, "eval_dataset": "no_such_entry"}),
        ("trl", {"load_in_8bit": False, "eval_strategy": "steps", "dataset_test_split": "old"}),
        ("swift", {"val_dataset": ["old.jsonl"]}),
        ("openai", {"validation_file": "old.jsonl"}),
    ],
)
def test_other_data_also_replace_the_rows_to_evaluate_on(folder, tool, changes):
    changes |= {} if tool == "openai" else {"eval_steps": 50}
    file = folder / f"{tool}.yaml"
    file.write_text(yaml.safe_dump(CONFIGS[tool] | changes))
    words = ["import", str(file), *OPTIONS.get(tool, []), "--data", "new.jsonl", "--json", "out.json"]
    assert main(words) == 0
    found = json.loads((folder / "out.json").read_text())
    config = load([f"+recipe={tool}"])
    assert [source.path for source in config.data.sources] == ["new.jsonl"]
    assert (config.data.eval_sources, config.data.eval_fraction > 0) == ([], True)
    assert config.train.eval_every == changes.get("eval_steps", 0)
    assert any("--data" in line for line in found["differences"])
    assert "old" not in str(found["recipe"])


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("axolotl", {"evals_per_epoch": 4, "early_stopping_patience": 3}),
        ("llamafactory", {"eval_strategy": "epoch", "early_stopping_steps": 3}),
    ],
)
def test_patience_that_counts_evaluations_of_an_epoch_is_a_difference(folder, tool, changes):
    _, found = imported(folder, tool, **changes)
    assert found["recipe"]["train.stop.patience"] == 3
    assert any("train.eval_every" in line for line in found["differences"])


def test_what_evaluates_has_no_effect_if_nothing_is_held_out(folder):
    _, found = imported(folder, "axolotl", val_set_size=0, evals_per_epoch=4)
    assert {entry["key"]: entry["fate"] for entry in found["keys"]}["evals_per_epoch"] == "no effect here"
    assert not any("evals_per_epoch" in line for line in found["differences"])


@pytest.mark.parametrize(
    ("tool", "key", "option"),
    [
        ("axolotl", "base_model", ["--model", "org/base"]),
        ("axolotl", "datasets", ["--data", "rows.jsonl"]),
        ("llamafactory", "dataset", ["--data", "rows.jsonl"]),
        ("trl", "dataset_name", ["--data", "rows.jsonl"]),
        ("swift", "model", ["--model", "org/base"]),
        ("openai", "training_file", ["--data", "rows.jsonl"]),
    ],
)
def test_a_recipe_lacks_neither_a_model_nor_rows(folder, tool, key, option, capsys):
    file = folder / f"{tool}.yaml"
    file.write_text(yaml.safe_dump(CONFIGS[tool]))
    words = ["import", str(file), *OPTIONS.get(tool, []), "--without", key]
    assert main(words) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert option[0] in last
    assert "--without" not in last
    assert not (folder / f"recipes/{tool}.yaml").exists()
    assert main([*words, *option]) == 0
    load([f"+recipe={tool}"])


def test_dataset_info_lies_beside_the_config(folder):
    (folder / "data/dataset_info.json").rename(folder / "dataset_info.json")
    assert imported(folder, "llamafactory")[0] == 0
    assert load(["+recipe=llamafactory"]).data.sources[0].path == str(folder / "pairs.json")


def test_a_job_of_preferences_is_a_recipe_whose_plan_is_not_refused(folder, capsys):
    rows = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(16)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"dpo": {"hyperparameters": {"beta": 0.2, "batch_size": 4}}}
    job = {"model": "gpt", "training_file": "file-abc123", "method": {"type": "dpo", **options}}
    (folder / "job.json").write_text(json.dumps(job))
    assert main(["import", "job.json", "--model", "builtin:tiny"]) == 2
    assert "--data FILE" in capsys.readouterr().err.splitlines()[-1]
    assert main(["import", "job.json", "--model", "builtin:tiny", "--data", "rows.jsonl"]) == 0
    config = load(["+recipe=job"])
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (2, 8)
    assert main(["plan", "+recipe=job", "--gpu", "H100"]) == 2  # the rows are longer than the model's positions
    assert "data.sequence_length=512" in capsys.readouterr().err
    assert main(["plan", "+recipe=job", "data.sequence_length=512", "--gpu", "H100"]) == 0


def test_an_odd_value_is_one_message(folder, capsys):
    assert imported(folder, "axolotl", micro_batch_size="many")[0] == 2
    assert "many" in capsys.readouterr().err
    assert main(["import", "axolotl.yaml", "--tool", "trl", "--method", "sfft"]) == 2


def test_no_file_is_overwritten(folder):
    assert imported(folder, "swift")[0] == 0
    assert imported(folder, "swift")[0] == 6


@pytest.mark.parametrize("tool", TOOLS)
def test_keys_yaml_names_keys_of_the_recipe_and_no_key_twice(tool):
    table = TOOLS[tool].table
    texts = [table["to"], *(text for kind in KINDS[1:] for text in table.get(kind, {}).values())]
    words = [word for text in texts for word in text.split()]
    assert len(words) == len({word.partition("=")[0] for word in words})
    targets = {word.partition(":")[0] for kind, _, word in table["lines"].values() if kind == "to"}
    assert targets - {*all_keys(Config)} <= {"data.chat_template_kwargs.enable_thinking"}
