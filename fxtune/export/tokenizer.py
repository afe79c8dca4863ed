"""The tokenizer of an export, in files for transformers 4 and 5 and for converters to GGUF and MLX.

save_pretrained() of transformers 5 writes files that transformers 4 refuses: the class TokenizersBackend, and a list
in `extra_special_tokens`. Converters know the files of the base's author. So the files of an unchanged tokenizer are
copied from the base, byte for byte. A changed tokenizer is written with names that both versions know.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
TEMPLATES = (TEMPLATE, "chat_template.json", "additional_chat_templates/*.jinja")
ONLY_5 = "TokenizersBackend"
"""The tokenizer class that transformers 4 does not have."""


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer's files into `folder`. Raises OSError."""
    source = Path(str(getattr(tokenizer, "name_or_path", "") or "."))
    if not (source / "tokenizer.json").is_file() or not _is_unchanged(tokenizer, source):
        _save(tokenizer, folder)
        return
    same_template = tokenizer.chat_template == _read(tokenizer, source).chat_template
    for file in _files(source, FILES + TEMPLATES if same_template else FILES):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    if not same_template:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if values.pop("chat_template", None) is not None:
            _write(folder / CONFIG, values)
        if tokenizer.chat_template is not None:
            (folder / TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")


def rename_for_4(file: Path) -> None:
    """Rename the keys of a tokenizer_config.json that transformers 5 wrote, so that transformers 4 reads it, too.
    Raises OSError."""
    values = json.loads(file.read_text(encoding="utf-8"))
    for name in ("backend", "is_local", "local_files_only"):
        values.pop(name, None)
    if values.get("tokenizer_class") == ONLY_5:
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    _write(file, values)


def _is_unchanged(tokenizer: Any, source: Path) -> bool:
    """Whether the tokenizer is the tokenizer in the folder `source`. The chat template may differ. The pad token may
    differ if the files have none, because load_tokenizer() chooses one."""
    values = json.loads((source / CONFIG).read_text(encoding="utf-8")) if (source / CONFIG).is_file() else {}
    if "auto_map" in values or not isinstance(tokenizer.chat_template, str | None):
        return False
    found = _read(tokenizer, source)
    special = dict(tokenizer.special_tokens_map)
    if found.pad_token is None:
        special.pop("pad_token", None)
    same_tokens = special == dict(found.special_tokens_map) and str(tokenizer.added_tokens_decoder) == str(
        found.added_tokens_decoder
    )
    return same_tokens and _rules(tokenizer) == _rules(found)


def _rules(tokenizer: Any) -> dict[str, Any]:
    """The rules of a fast tokenizer, without the truncation and the padding that its last call has set."""
    rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in rules.items() if name not in ("truncation", "padding")}


def _read(tokenizer: Any, folder: Path) -> Any:
    return type(tokenizer).from_pretrained(folder)


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (file for file in folder.glob(pattern) if file.is_file())


def _save(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception where a disk refuses a file
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error
    if (folder / CONFIG).exists():
        rename_for_4(folder / CONFIG)


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
