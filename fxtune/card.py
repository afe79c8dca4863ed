"""The model card README.md that lies beside what was trained: what it is, how to load it, and all that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write the model card README.md, over the empty form that peft leaves.

    `facts`, all optional: title, base, revision, adapter (one that was merged in), data (the data's fingerprint), figures
    (metric -> value), facts (the machine's Facts), config (the run's config as plain data, with nothing secret in it).
    """
    import yaml

    adapter = (folder / "adapter_config.json").exists()
    base, config, machine = str(facts.get("base") or ""), facts.get("config") or {}, facts.get("facts")
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation",
                             "tags": ["fxtune", *(["lora"] if adapter else [])]}
    if base and not Path(base).is_absolute():  # the hub rejects a card whose base_model is a path
        front["base_model"] = base
    run = config.get("run", {})
    summary = {"base": base, "revision": facts.get("revision"), "merged from": facts.get("adapter"), "run": run.get("name"),
               "seed": run.get("seed"), "data": facts.get("data")}
    parts = [f"---\n{yaml.safe_dump(front, sort_keys=False)}---", f"# {facts.get('title') or folder.name}",
             "Trained with fxtune.", _table(summary), f"## How to load it\n\n```python\n{_loading(folder, base)}```"]
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
        lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", "", 'folder = "."  # where this file lies',
                 "model = AutoModelForCausalLM.from_pretrained(folder)"]
    elif (folder / "config.json").exists():
        lines = ["from peft import PeftModel", "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer", "",
                 'folder = "."  # where this file lies',
                 "config = AutoConfig.from_pretrained(folder)  # the base's, with the RoPE scaling that it was trained with",
                 f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}", config=config)',
                 "model = PeftModel.from_pretrained(base, folder)"]
    else:
        lines = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
                 'folder = "."  # where this file lies',
                 f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}")',
                 "model = PeftModel.from_pretrained(base, folder)"]
    return "\n".join([*lines, "tokenizer = AutoTokenizer.from_pretrained(folder)", ""])


def _table(rows: dict[str, Any]) -> str:
    cells = [(name, f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " "))
             for name, value in rows.items() if value not in (None, "")]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
