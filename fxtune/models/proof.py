"""Writes and checks `proof.json`: what was proven of an export, and the digests of its files.

export/read_back.py compares a new export with the trained model. proof.json says what was compared, and holds the
sha256 of each file. fxtune reads an export with a proof.json only if its files still have these digests. Without this
check, an adapter with a flipped bit would load without an error and give other answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxtune.errors import StorageError, shortened
from fxtune.system.files.atomic_files import FileDigest, digest, find_damage, read_json
from fxtune.system.files.hub import Origin

PROOF = "proof.json"
UNPROVEN = {PROOF, "README.md"}
MADE_FROM = "made_from"
"""In proof.json of a merged model: proof_digest() of its adapter."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and by how much the two models differ."""

    tensors: int
    """Tensors that were read back and equal the model's bit by bit."""
    kl: float | None = None
    """Mean KL divergence between the answers of the plain model and of the trained model to the probe, in nats a
    token."""
    difference: float | None = None
    """The largest difference between the logits of these answers."""
    recomputed: int | None = None
    """For a merged model: how many tensors equal the base's plus scaling * B A, computed again from the files."""
    survives: float | None = None
    """For a merged model: the share of the adapter's update that is left after rounding (export/rounding.py)."""
    weakest: str = ""
    """The weight with the least such share, and the share."""
    asked: int | None = None
    """The limit of tokens for the plain model's answer to one question of the data; None: no question was asked."""
    ended_after: int | None = None
    """Tokens after which the answer ended by itself; None: it did not end, or no question was asked."""
    left_out: str = ""
    """What was not compared, and why."""
    seconds: float = 0.0

    def with_check(self, check: Callable[[], tuple[int, str, dict[str, Any]]]) -> Proof:
        """This proof with the result of one more check: how many tensors it computed again, what it left out, and
        the fields of Survival.shares() (export/rounding.py)."""
        begin = time.perf_counter()
        count, left_out, shares = check()
        seconds = self.seconds + time.perf_counter() - begin
        left_out = "; ".join(filter(None, [self.left_out, left_out]))
        return replace(self, recomputed=count, left_out=left_out, seconds=seconds, **shares)

    def figures(self) -> dict[str, float]:
        """The figures of this proof as metrics of the run, by name."""
        found = {"kl": self.kl, "max_difference": self.difference, "proof_seconds": self.seconds}
        figures = {f"export/{name}": value for name, value in found.items() if value is not None}
        if self.asked is not None:
            figures["export/answer_ended"] = float(self.ended_after is not None)
        return figures

    def sentence(self) -> str:
        parts = [f"{self.tensors} tensors are the model's, bit by bit"]
        if self.recomputed is not None:
            parts.append(f"{self.recomputed} of them are the base's plus scaling * B A, computed again")
        if self.survives is not None:
            least = f" (least in {self.weakest})" * bool(self.weakest)
            parts.append(f"{self.survives:.1%} of the adapter's update survive the rounding{least}")
        if self.kl is not None:
            parts.append(
                f"loaded with the plain libraries it gives the same logits (mean KL {self.kl:.1e} nats a token, "
                f"largest difference {self.difference:.1e})"
            )
        if ended := self.ending():
            parts.append(ended)
        left_out = f" Not compared: {self.left_out}." if self.left_out else ""
        return f"Read back in {self.seconds:.1f} s: {'; '.join(parts)}.{left_out}"

    def ending(self) -> str:
        """A clause that says whether the answer to the question ended; empty if no question was asked."""
        if self.asked is None:
            return ""
        if self.ended_after is None:
            return f"its answer to a question of the data did not end within {self.asked} tokens"
        return f"its answer to a question of the data ended by itself, after {self.ended_after} tokens"


def write_proof(folder: Path, proof: Proof, made_from: Path | None = None) -> None:
    """Write proof.json: the figures, and the sha256 of each file except the model card, which users may edit.
    `made_from`: the folder of the export whose weights these are."""
    files = {name: asdict(digest(folder / name)) for name in files_of(folder)}
    made = {MADE_FROM: proof_digest(made_from)} if made_from else {}
    text = json.dumps({"proof": asdict(proof), "files": files, **made}, indent=2)
    (folder / PROOF).write_text(text + "\n")


def proof_digest(folder: Path) -> str | None:
    """The sha256 of the proof.json in `folder`, which no other export has; None without the file."""
    return digest(folder / PROOF).sha256 if (folder / PROOF).is_file() else None


def changed_since(folder: Path) -> tuple[Proof, list[str]]:
    """The proof of an exported folder, and a line for each file that has changed since the proof.

    Raises StorageError if the folder has no readable proof.
    """
    if not (folder / PROOF).exists():
        raise StorageError(f"{folder} holds no {PROOF}: fxtune has not proven what is in it. Export it again.")
    proof, files = _read(folder)
    damages = [damage.reason for name, written in files.items() if (damage := find_damage(folder / name, written))]
    added = [name for name in files_of(folder) if name not in files and not name.startswith(".")]
    return proof, damages + [f"{name} was added" for name in added]


def require_unchanged(origin: Origin, place: str, share: tuple[int, int] = (0, 1)) -> None:
    """Raise StorageError if a proven file in the folder of `origin` has changed. A folder without proof.json passes.
    `place`: the option and its value, for the message. `share`: (n, m): only each m-th file is read, from the n-th on.
    The other ranks read the other files.

    Added files are ignored here; `fxtune verify` names them. In a repository of the hub, only fetched files are read.
    """
    folder = origin.folder
    if not (folder / PROOF).exists():
        return
    files = _read(folder)[1]
    for name, written in list(files.items())[share[0] :: share[1]]:
        if origin.revision is not None and not (folder / name).exists():
            continue
        if damage := find_damage(folder / name, written):
            raise StorageError(
                f"{place}: {folder} is not what was proven when it was saved ({PROOF}): {damage.reason}. Use another "
                f"copy, or export it again (fxtune merge RUN/step-N). If you have edited {name} yourself, "
                f"remove {folder / PROOF}."
            )


def files_of(folder: Path) -> list[str]:
    """The relative paths of the files below `folder` that are proven. Named chat templates are in a subfolder."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path.as_posix() for path in paths if path.name not in UNPROVEN]


def _read(folder: Path) -> tuple[Proof, dict[str, FileDigest]]:
    file = folder / PROOF
    try:
        found = read_json(file)
        outside = [name for name in found["files"] if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside:
            raise ValueError(f"it names a file outside its folder ({shortened(outside[0])})")
        return Proof(**found["proof"]), {name: FileDigest(**values) for name, values in found["files"].items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise StorageError(f"{file} cannot be read: {error}. Export the folder again.") from error
