"""Makes fxtune/assets/tiny-student, a smaller base with the tokens of `builtin:tiny`, and fxtune/assets/tiny-orders, an
adapter of `builtin:tiny` that writes orders as JSON: the student and the teacher of recipes/distill_quickstart.yaml.

    python scripts/make/make_student.py                # about 15 minutes on two CPU cores
    python scripts/make/make_student.py --work DIR     # the folder of corpus and runs; an interrupted run resumes there

Nothing is downloaded: the corpus is the corpus of make_base.py, and the adapter is a run of recipes/quickstart.yaml.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from make_base import ARCHITECTURE, DOCUMENTS, ROOT, pretrain, ship, write_corpus
from make_base import ASSET as TEACHER

ASSETS = ROOT / "fxtune" / "assets"
STUDENT, ADAPTER = ASSETS / "tiny-student", ASSETS / "tiny-orders"
LIMIT = 1_200_000
"""The most bytes of the student's folder."""
ADAPTER_LIMIT = 300_000
SMALLER = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
RANK = 8

README = """\
# tiny-student

A Llama of {parameters:,} parameters ({layers} layers, hidden size {hidden}) with the tokens of `builtin:tiny`, which is five
times as large. It is the student of `recipes/distill_quickstart.yaml`.

Made by `python scripts/make/make_student.py`: the {documents:,} documents of `builtin:tiny` (`scripts/make/corpus.py`, seed {seed}),
no downloaded text. Full-parameter training with fxtune: {steps:,} steps, {tokens:,} tokens, float32, then stored as bfloat16.
Loss on the held-out 1 %: {loss:.4f} (perplexity {perplexity:.2f}). Its steps took {minutes:.1f} minutes on {machine},
torch {torch}. Licence: Apache-2.0, like the code.
"""


def make_student(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = work / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(TEACHER / name, tokenizer / name)
    if not (corpus := work / "corpus.jsonl").exists():
        write_corpus(corpus)
    figures = pretrain(corpus, tokenizer, work / "run", {**ARCHITECTURE, **SMALLER})
    ship(work, tokenizer, STUDENT, LIMIT, README, figures, documents=DOCUMENTS)


ADAPTER_README = """\
# tiny-orders

An adapter of `builtin:tiny` (LoRA of rank {rank}, float16) that answers orders with JSON. It is the teacher of
`recipes/distill_quickstart.yaml`. Made by `python scripts/make/make_student.py`: a run of `recipes/quickstart.yaml` with
`techniques.lora.r={rank}`, which answers {exact:.0%} of the held-out questions exactly. Licence: Apache-2.0, like the code.
"""


def make_adapter(run: Path) -> None:
    """Train the quickstart's adapter, and ship its weights in float16."""
    from safetensors.torch import load_file, save_file

    from fxtune.config.compose import load
    from fxtune.training import trainer

    words = ["+recipe=quickstart", f"techniques.lora.r={RANK}", f"run.dir={run}", "run.report=false"]
    figures = trainer.run(load([*words, "run.device=cpu"]))
    shutil.rmtree(ADAPTER, ignore_errors=True)
    ADAPTER.mkdir()
    options = json.loads((run / "adapter" / "adapter_config.json").read_text())
    options["base_model_name_or_path"] = "builtin:tiny"  # the run has named the folder of this checkout
    (ADAPTER / "adapter_config.json").write_text(json.dumps(options, indent=2) + "\n")
    shutil.copyfile(TEACHER / "config.json", ADAPTER / "config.json")
    weights = load_file(run / "adapter" / "adapter_model.safetensors")
    halves = {name: weight.half() for name, weight in weights.items()}
    save_file(halves, ADAPTER / "adapter_model.safetensors", {"format": "pt"})
    (ADAPTER / "adapter_model.safetensors").chmod(0o644)
    (ADAPTER / "README.md").write_text(ADAPTER_README.format(rank=RANK, exact=figures["questions/exact_match"]))
    size = sum(file.stat().st_size for file in ADAPTER.iterdir())
    assert size <= ADAPTER_LIMIT, f"{ADAPTER} has {size} bytes, {ADAPTER_LIMIT} are allowed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny-student", help="default: %(default)s")
    work = parser.parse_args().work
    make_student(work / "student")
    make_adapter(work / "orders")


if __name__ == "__main__":
    main()
