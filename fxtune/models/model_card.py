"""The model card README.md that lies beside what was trained: what it is, how to load it, and all that made it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from fxtune.system.redact import redact


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write the model card README.md, over the empty form that peft leaves.

    `facts`, all optional: title, base, revision, adapter (one that was merged in), data (the data's fingerprint), figures
    (metric -> value), facts (the machine's Facts), config (the run's config as plain data). Secrets are taken out of all.
    """
    import yaml

    facts = {**redact({name: value for name, value in facts.items() if name != "facts"}), "facts": facts.get("facts")}
    adapter = (folder / "adapter_config.json").exists()
    base, config, machine = str(facts.get("base") or ""), facts.get("config") or {}, facts.get("facts")
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["fxtune", *(["lora"] if adapter else [])],
    }
    if base and not Path(base).is_absolute():  # the hub rejects a card whose base_model is a path
        front["base_model"] = base
    run = config.get("run", {})
    summary = {
        "base": base,
        "revision": facts.get("revision"),
        "merged from": facts.get("adapter"),
        "run": run.get("name"),
        "seed": run.get("seed"),
        "data": facts.get("data"),
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {facts.get('title') or folder.name}",
        "Trained with fxtune.",
        _table(summary),
        f"## How to load it\n\n```python\n{_loading(folder, base)}```",
        *_long_context(folder, base),
    ]
    if facts.get("figures"):
        parts += ["## Figures", _table(facts["figures"])]
    if machine:
        parts += ["## Made with", _table({"device": machine.device_name, "dtype": machine.dtype, **machine.packages})]
    if config:
        parts += ["## Config", f"```yaml\n{yaml.safe_dump(config, sort_keys=False, allow_unicode=True)}```"]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _loading(folder: Path, base: str) -> str:
    """The Python lines that load what lies in `folder`."""
    if not (folder / "adapter_config.json").exists():
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # where this file lies',
            "model = AutoModelForCausalLM.from_pretrained(folder)",
        ]
    elif (folder / "config.json").exists():
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # where this file lies',
            "config = AutoConfig.from_pretrained(folder)  # the base's, with the RoPE scaling that it was trained with",
            f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}", config=config)',
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # where this file lies',
            f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}")',
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    return "\n".join([*lines, "tokenizer = AutoTokenizer.from_pretrained(folder)", ""])


def _long_context(folder: Path, base: str) -> list[str]:
    """What has to be known of a model whose RoPE is scaled; nothing of another."""
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    text = config.get("text_config") or config
    parameters = text.get("rope_parameters") or {}
    every = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]  # one, or one a layer type
    kinds = {each.get("rope_type", "default") for each in every} - {"default"}
    if not kinds:
        return []
    positions = int(text["max_position_embeddings"])
    parts = [
        f"Its rotary embedding is scaled ({', '.join(sorted(kinds))}), for up to {positions:,} positions: `rope_parameters` "
        "in config.json says how."
    ]
    adapter = (folder / "adapter_config.json").exists()
    if adapter:
        parts[0] += (
            " An adapter cannot bring that along by itself: where the base is loaded without this config.json, as "
            "`AutoPeftModelForCausalLM.from_pretrained(folder)` does, the model runs unscaled, without a warning."
        )
    if kinds == {"dynamic"}:
        return [*parts, "vLLM computes dynamic scaling once, for the longest row, so it is another function there."]
    command = _serving(folder, base, config, positions, adapter)
    return [*parts, f"With vLLM (one that runs on transformers 5):\n\n```bash\n{command}\n```"]


def _serving(folder: Path, base: str, config: dict[str, Any], positions: int, adapter: bool) -> str:
    """The command that serves what lies in `folder` with vLLM, run there."""
    if not adapter:
        return f"vllm serve . --max-model-len {positions}"
    described = json.loads((folder / "adapter_config.json").read_text())
    if described.get("use_dora") or described.get("modules_to_save") or described.get("target_parameters"):
        return (
            f"fxtune merge . ../merged  # vLLM takes plain LoRA only\nvllm serve ../merged --max-model-len {positions}"
        )
    text = config.get("text_config") or config
    scaling = {"rope_parameters": text["rope_parameters"]}
    if (
        text["rope_parameters"].get("rope_type") == "llama3"
    ):  # the one type whose length vLLM does not multiply by the factor
        scaling["max_position_embeddings"] = positions
    overrides = json.dumps({"text_config": scaling} if "text_config" in config else scaling)
    rank = next((rank for rank in (8, 16, 32, 64, 128, 256, 320, 512) if rank >= described["r"]), described["r"])
    return (
        f"vllm serve {shlex.quote(base or 'BASE')} --enable-lora --max-lora-rank {rank} --lora-modules tuned=. \\\n"
        f"    --hf-overrides {shlex.quote(overrides)} \\\n    --max-model-len {positions}"
    )


def _table(rows: dict[str, Any]) -> str:
    cells = [
        (name, f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " "))
        for name, value in rows.items()
        if value not in (None, "")
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
