"""Writes a trained model or adapter to a folder that plain transformers or plain peft loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.errors import StorageError, not_written
from fxtune.export.config import write_rope_for_4
from fxtune.export.image_bounds import write_image_bounds
from fxtune.export.model_card import image_bounds, write_card
from fxtune.export.read_back import EndingProbe, prove
from fxtune.export.rounding import LostUpdateError
from fxtune.export.tokenizer import write_tokenizer
from fxtune.export.vectors import write_vector_files
from fxtune.export.weights import ExportedWeights, LoadMismatch, Mismatch, on_main
from fxtune.models.kinds.embedder import Embedder
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import ModelConfig, tokenizer_folder
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import Answer
from fxtune.models.proof import Proof, write_proof
from fxtune.system.files.atomic_files import replace_folder, sync


def staging_folders(folder: Path) -> tuple[Path, Path]:
    """(the folder that save_model() writes and renames to `folder`, the backup of an older `folder`)."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")


def save_model(
    model: PreparedModel,
    tokenizer: Any,
    folder: Path,
    card: dict[str, Any] | None = None,
    world: World | None = None,
    *,
    answer: Callable[[], Answer] | None = None,
    check: Callable[[Path], tuple[int, str, dict[str, Any]]] | None = None,
    question: EndingProbe | None = None,
    record: Callable[[Proof], None] | None = None,
    keeps: str = "",
    merged: Path | None = None,
) -> Path:
    """Write the model, its tokenizer and its model card (see write_card() for `card`), and return `folder`.

    With adapters: PEFT's layout. If the run edited the base's config (RoPE scaling) or added end tokens
    (end_tokens.py), config.json or the generation config lies beside the adapter. The card describes both files, and
    with_changes_of() reads them. Without adapters: the whole model in safetensors, with a config.json that has the
    raised max_position_embeddings, and RoPE for transformers 5, transformers 4 and vLLM. The image processor's files
    have the run's data.image_tokens.

    The folder is proven before it counts (read_back.py). `answer`, `question`: see prove(). `check`: one more check of
    the written files, see Proof.with_check(). `record` gets the proof, which is also in the card and in proof.json.

    The folder is written under another name and then renamed, so it is complete or absent. It replaces an existing
    folder. `world`: the ranks that hold the model. All of them call this, and rank 0 writes. Raises StorageError, on
    all ranks, if the disk refuses the files or the files differ from the trained model. `keeps`: a sentence for this
    error, which says where the trained weights still are. `merged`: the folder of the adapter that `model` was merged
    from; LostUpdateError is raised as it is.
    """
    world, folder = world or World(torch.device("cpu")), Path(folder)
    staging, old = staging_folders(folder)

    def begin() -> None:
        _restore(folder, old)
        for leftover in (staging, old):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir(parents=True)

    def complete() -> None:
        write_rope_for_4(staging, model.module.config)
        if not hasattr(model.module, "peft_config"):
            named = ((card or {}).get("config") or {}).get("model", {}).get("tokenizer")
            # A run reads the image processor from the folder of the tokenizer.
            source = tokenizer_folder(ModelConfig(tokenizer=named)) if named else None
            kind_of(model.module.config).write_beside(model.module.config, staging, source)
            write_image_bounds(staging, image_bounds(card or {}), tokenizer, model.module.config)
        write_tokenizer(tokenizer, staging)
        if kind_of(model.module.config).head == Embedder.head:
            write_vector_files(staging, (card or {}).get("config"), merged, model.module.config.get_text_config())

    def prove_files() -> Proof:
        proof = prove(model, tokenizer, staging, len(written.files), answer, world, question)
        return proof.with_check(partial(check, staging)) if check else proof

    def end() -> None:
        origin = {
            "base": model.module.name_or_path,
            "revision": model.base_revision,
            "grown_from": model.grown_from,
            "mtp": [] if hasattr(model.module, "peft_config") else sorted(model.mtp),
        }
        full_card = {"title": folder.name, **origin, **(card or {}), "proof": proof.sentence()}
        write_card(staging, kind_of(model.module.config), full_card)
        write_proof(staging, proof, merged)
        # safetensors lets only the owner read. A power cut after the renaming must not leave empty files.
        readable = (staging / "README.md").stat().st_mode
        for path in sorted(staging.rglob("*"), reverse=True):  # files before their folder
            if path.is_file():
                path.chmod(readable)
            sync(path)
        replace_folder(staging, folder, old)

    try:
        on_main(world, begin)
        written = ExportedWeights.write(model, staging, world)
        on_main(world, complete)
        written.compare(world)
        proof = on_main(world, prove_files)
        on_main(world, end)
    except OSError as error:
        if world.main:
            with suppress(OSError):
                _restore(folder, old)
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, LostUpdateError):
            raise
        if isinstance(error, Mismatch):
            disk = "" if isinstance(error, LoadMismatch) else "the disk, and "
            raise StorageError(
                f"The files for {folder} were written and differ from the trained model: {error}. They were removed. "
                f"{keeps or 'The source of these files is unchanged: try again.'} If it happens again, check {disk}"
                "the versions of peft, transformers and safetensors."
            ) from error
        raise not_written(f"The trained model cannot be written to {folder}", error) from error
    if record is not None:
        record(proof)
    return folder


def _restore(folder: Path, old: Path) -> None:
    """If a replacement was interrupted, so that there is no `folder`, make `old` the folder again."""
    if old.is_dir() and not old.is_symlink() and not folder.exists():
        old.rename(folder)
