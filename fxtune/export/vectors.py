"""The files by which sentence-transformers loads an embedding model: transformer, pooling, normalisation, prompts.

    modules.json                       the three modules, and their folders
    sentence_bert_config.json          the transformer in the root: the longest text
    1_Pooling/config.json              how hidden states become a vector
    2_Normalize/                       no options
    config_sentence_transformers.json  prompts, and cosine as the similarity

The names come from sentence-transformers 3. Later versions read them, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
)
POOLING = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def write_vector_files(folder: Path, recipe: Mapping[str, Any] | None, source: Path | None, text_config: Any) -> None:
    """Write the files into the export `folder`. They follow from the `recipe` of a run with objective=embedding, or
    are copied from the export `source` if there is no recipe. Without both, no file is written. Raises OSError."""
    if recipe is None:
        for name in FILES:
            if source is not None and (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        return
    pool = POOLING[recipe["objective"]["pool"]]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(MODULES)
    ]
    pooling = {
        "word_embedding_dimension": text_config.hidden_size,
        **{f"pooling_mode_{name}": name == pool for name in POOLING.values()},
        "include_prompt": True,
    }
    contents: tuple[Any, ...] = (
        modules,
        {"max_seq_length": text_config.max_position_embeddings, "do_lower_case": False},
        {"prompts": _prompts(recipe), "default_prompt_name": None, "similarity_fn_name": "cosine"},
        pooling,
        {},
    )
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _prompts(recipe: Mapping[str, Any]) -> dict[str, str]:
    """{name: text before a text}. `query` is the instruction of the objective, or of the first source that has one.
    Other instructions are `query_2` and so on."""
    given = [recipe["objective"]["instruction"], *(source["instruction"] for source in recipe["data"]["sources"])]
    found = list(dict.fromkeys(filter(None, given))) or [""]
    names = ["query", *(f"query_{number}" for number in range(2, len(found) + 1))]
    return {**dict(zip(names, found, strict=True)), "document": ""}
