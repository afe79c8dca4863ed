"""Writes the results of a finished run: the proven export, and a page about the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import CHECKPOINTS, METRICS, REPORT, RESULT
from fxtune.data.batches.build import PreparedData
from fxtune.data.formats.values import RowError
from fxtune.data.tokenized.ends import short_question
from fxtune.errors import first_line
from fxtune.export.read_back import EndingProbe
from fxtune.export.save import save_model
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import Answer
from fxtune.models.proof import Proof, require_unchanged
from fxtune.system.files.hub import Origin
from fxtune.training.builder import RunBuilder

MORE_TOKENS = 16
"""In the proof of the export, the model's answer may be longer than the right answer by this number of tokens."""
LARGE_METRICS = 200 * 2**20
"""If metrics.jsonl has more bytes (some 300,000 log lines), the run writes no page when it ends."""


def export(
    builder: RunBuilder,
    prepared: PreparedModel,
    tokenizer: Any,
    data: PreparedData,
    ends: list[int],
    output: Path,
    card: dict[str, Any],
) -> Proof:
    """Write the trained model or adapter to `output`, a folder in the run's folder. `card`: values for the model card.
    `ends`: learned_ends() of `data`. Returns the proof of the written files."""
    proofs = list[Proof]()

    def answer() -> Answer:
        """The trained model's answer, with the precision of training."""
        with builder.techniques.precision.context(builder.world.device):
            return Answer.of(prepared.module)

    save_model(
        prepared,
        tokenizer,
        output,
        card={"data": data.training.fingerprint, "machine": builder.facts, **card},
        world=builder.world,
        answer=answer,
        question=_ending_probe(data, ends),
        record=proofs.append,
        keeps=f"The trained weights are in {output.parent / CHECKPOINTS}: give the same command again.",
    )
    return proofs[0]


def require_whole_export(run: Path) -> None:
    """Raise StorageError if a file of the adapter or model of a finished run has changed since it was proven."""
    for kind in ("adapter", "model"):
        again = f"Remove {run / RESULT} and give the same command again: it exports the last checkpoint again"
        require_unchanged(Origin(run / kind, kind), f"run.dir={run}", remedy=again)


def _ending_probe(data: PreparedData, ends: list[int]) -> EndingProbe | None:
    """A question of the data for the plain model; None if the data has no question or the question's images have
    changed."""
    question, processor = short_question(data.tables, ends), data.images
    if question is None:
        return None
    try:
        images = processor.read(question.images) if processor and question.images else {}
    except RowError:
        return None
    return EndingProbe(question.prompt, question.answer_tokens + MORE_TOKENS, images)


def write_report(folder: Path) -> str:
    """Write report.html. Returns a line that says where the page is, or why it was not written."""
    from fxtune.reports import page

    try:
        if (folder / METRICS).stat().st_size > LARGE_METRICS:  # a page takes tens of seconds and gigabytes of memory
            return f"{folder / METRICS} is large: `fxtune report {folder}` writes a page about the run"
        page.write_report([folder], folder / REPORT)
    except Exception as error:  # noqa: BLE001  no error of the page may fail a finished run
        return f"The page {folder / REPORT} could not be written: {first_line(error)}"
    return f"A page about the run is in {folder / REPORT}"
