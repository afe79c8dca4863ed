"""Tries every causal architecture of the installed transformers on rows of text, as a user meets it, and writes the
table of docs/models.md.

Each type gets a small model with random weights that is shrunk from its own default config (small_models.py), and files
of a base. Then, in one process of one thread, with a time limit:

    acts      two steps of `techniques=[lora,fast]`, without the compiler's last stage: layers are traced, and graphs
              run as they are
    verify    `fxtune verify --loss` in float32: loss and gradients beside plain transformers
    full      two steps of full fine-tuning
    plan      the parameters that `fxtune plan` counts, beside the built model's parameters
    merge     the adapter and the merged model, each loaded by plain peft and plain transformers without a warning,
              give the same logits
    resume    a run that SIGKILL ends after its first step and that goes on ends with the adapter of an undisturbed run

    python scripts/make/model_table.py --write               # all that docs/models.md lacks
    python scripts/make/model_table.py --write --all         # all, those with a file in --folder excepted
    python scripts/make/model_table.py --write llama         # this row of docs/models.md again
    python scripts/make/model_table.py llama qwen3_moe       # prints these rows, and changes no file
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from small_models import small, write

from fxtune.cli import verify
from fxtune.config.compose import load
from fxtune.errors import UserError
from fxtune.estimate.weights import trained_parameters
from fxtune.models.kinds.image_decoder.families import FAMILIES as IMAGE_FAMILIES
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import beside_text, skeleton
from fxtune.outputs import merge
from fxtune.techniques.liger.technique import FAMILIES
from fxtune.tracking import display
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = Path(tempfile.gettempdir()) / f"fxtune-models-{transformers.__version__}"
HEAD = (
    "| model type | `[lora,fast]` | checks | adapters on | packed rows | compiled layers | Liger's kernels | images |"
)
CLOSE = 1e-5
"""The largest difference of logits of the adapter and of the merged model, relative to the largest logit."""
SAVED_SECONDS = 30.0
"""How long a run that is to be killed waits for its first checkpoint."""


@dataclass
class Row:
    kind: str
    result: str
    """`acts`, `refused: ...` or `fails: ...`"""
    adapters: str = ""
    packed: str = ""
    compiled: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    """Why a check failed; empty: it passed."""

    @property
    def liger(self) -> str:
        return "yes" if self.kind in FAMILIES else ""

    def __str__(self) -> str:
        failed = [f"{name}: {why}" for name, why in self.checks.items() if why]
        checks = "; ".join(failed) or "all" * bool(self.checks)
        cells = [f"`{self.kind}`", self.result, checks, self.adapters, self.packed, self.compiled]
        return "| " + " | ".join([*(cell.replace("|", "/") for cell in cells), self.liger, self.images]) + " |"

    @property
    def images(self) -> str:
        """What happens to images: the tests compare each family of IMAGE_FAMILIES with plain transformers."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        if self.kind in IMAGE_FAMILIES:
            return "yes"
        return "no: its text alone is trained" if self.kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else ""


def kinds() -> list[str]:
    """The model types with a causal language model in this transformers, with images or without."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *IMAGE_FAMILIES})


def attempt(kind: str, chats: Path, folder: Path, whole: bool = True) -> Row:
    """Try this type, in `folder`, which is emptied. `chats`: see write_chats(). `whole`: with compiled layers and the
    run that is killed. Call it before any backward pass of the process, as it then forks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base, said = folder / "base", list[str]()

    def train(name: str, techniques: str = "[lora,fast]", compiled: bool = False) -> None:
        off = {} if compiled else {"techniques.compile.enabled": "false"}
        trainer.run(load(_keys(chats, base, folder / name, techniques=techniques, **off)))

    try:
        write(small(kind), base)
        if whole:
            _killed(functools.partial(train, "killed"), folder / "killed")
        with _collect_notes(said), contextlib.redirect_stdout(printed := io.StringIO()), _traced():
            train("run", compiled=whole)
    except Exception as error:  # noqa: BLE001  the table says which architectures fail, and how
        return Row(kind, _reason(error))
    evidence = json.loads((folder / "run" / "evidence.json").read_text())
    adapters = next(one["observed"] for one in evidence if one["asked"].startswith("adapters of rank"))
    experts = any(one["asked"].startswith("adapters of experts") for one in evidence)
    lines = [*said, *printed.getvalue().splitlines()]
    exact = {"techniques.compile.enabled": "false", "techniques.precision.autocast": "none"}
    config = functools.partial(_keys, chats, base, folder / "none", techniques="[lora,fast]")
    checks: dict[str, Callable[[], object]] = {
        "verify": lambda: verify.run(load(config(**exact)), loss=True),
        "full": lambda: train("full", "[fast]"),
        "plan": lambda: _require_planned(_keys(chats, base, folder / "none", techniques="[fast]")),
        "merge": lambda: _require_merged(base, folder / "run"),
    }
    if whole:
        checks["resume"] = lambda: _require_resumed(train, folder)
    found = {name: _failure(check) for name, check in checks.items()}
    packed, compiled = _decision("packing", lines), _decision("compile", lines)
    return Row(kind, "acts", _adapters(adapters, experts), packed, compiled, found)


def _keys(chats: Path, base: Path, run: Path, **more: str) -> list[str]:
    """The command line of a run of two steps."""
    keys = {
        "model.path": base,
        "model.tokenizer": "builtin:tiny",
        "data.sources": f"[{{path: {chats}}}]",
        "data.sequence_length": 64,
        "data.cache_dir": chats.parent / "cache",
        "train.max_steps": 2,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 2,
        "checkpoint.every": 1,
        "tracking.display": "none",
        "run.dir": run,
        "run.report": "false",
        **more,
    }
    return [f"{key}={value}" for key, value in keys.items()]


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """torch.compile without its last stage."""
    own = torch.compile
    torch.compile = functools.partial(own, backend="eager")
    try:
        yield
    finally:
        torch.compile = own
        torch._dynamo.reset()


def _killed(run: Callable[[], None], folder: Path) -> None:
    """Start a run in a process of its own, which SIGKILL ends in its second step, when its first is saved."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    steps = 0
    own = trainer.Steps.take

    def step(self: Any, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        end = time.monotonic() + SAVED_SECONDS
        while steps > 1 and time.monotonic() < end:
            if any((folder / "checkpoints").glob("step-*1")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        return own(self, *given)

    trainer.Steps.take = step  # type: ignore[assignment, method-assign]
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()):
        run()  # what is wrong with it the parent's run says
    os._exit(1)


def _require_resumed(train: Callable[[str], None], folder: Path) -> None:
    if (folder / "killed" / "adapter").exists() or not any((folder / "killed" / "checkpoints").glob("step-*1")):
        raise AssertionError("the run was not killed after its first step")
    digests = []
    for name in ("killed", "undisturbed"):
        train(name)
        digests.append(hashlib.sha256((folder / name / "adapter" / "adapter_model.safetensors").read_bytes()).digest())
    if digests[0] != digests[1]:
        raise AssertionError("the run that was killed ends with another adapter")


def _require_planned(keys: list[str]) -> None:
    facts = RunBuilder(load(keys), ahead=True).facts
    model = skeleton(facts.model)
    assert model is not None
    beside = {id(weight) for weight in beside_text(model)}
    built = sum(weight.numel() for weight in model.parameters() if id(weight) not in beside)
    if (planned := trained_parameters(facts)) != built:
        raise AssertionError(f"{planned:,} parameters for {built:,}")


def _require_merged(base: Path, run: Path) -> None:
    """Load what a run exports as the card of the export says."""
    from peft import PeftModel

    merged = merge.merge(run)
    ids, logits = torch.arange(3, 43)[None], []
    auto: Any = kind_of(transformers.AutoConfig.from_pretrained(base)).auto
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), str(run / "adapter"))
        for model in (adapted, auto.from_pretrained(merged, dtype=torch.float32)):
            logits.append(model.eval()(input_ids=ids, use_cache=False).logits)
    if lost := [str(one.message) for one in seen if issubclass(one.category, (RuntimeWarning, UserWarning))]:
        raise AssertionError(f"a warning: {lost[0]}")
    off = ((logits[0] - logits[1]).abs().max() / logits[0].abs().max()).item()
    if not off <= CLOSE:
        raise AssertionError(f"logits differ by {off:.1e}")


def _failure(check: Callable[[], object]) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check()
    except Exception as error:  # noqa: BLE001
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"refused: {_refusal(str(error))}"
    if isinstance(error, AssertionError) and str(error):
        return _short(str(error))
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().split("\n")[0]
    return _short(f"fails: {type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})")


@contextlib.contextmanager
def _collect_notes(said: list[str]) -> Iterator[None]:
    """Append the notes of runs to `said`."""
    own = display.Display.note
    display.Display.note = lambda self, text: said.append(text)  # type: ignore[method-assign]
    try:
        yield
    finally:
        display.Display.note = own  # type: ignore[method-assign]


def _decision(topic: str, lines: list[str]) -> str:
    """`yes`, or why `topic` is off."""
    start = f"{topic}: off, because "
    for number, line in enumerate(lines):
        if line.startswith(start):
            reason = line.removeprefix(start).split(";")[0]
            if "cannot be one graph" in reason:  # the place and the reason are in the next line
                reason = "graph break at " + lines[number + 1].strip()
            return f"no: {_short(reason)}"
    return "yes"


def _adapters(observed: str, experts: bool) -> str:
    parts = observed.partition(": ")[2].split("; left out ")
    left = [reason for part in parts[1:] if "expert" in (reason := part.partition(")")[0].strip("("))]
    return "linears" + " and experts" * experts + "".join(f" (not: {reason})" for reason in left)


def _refusal(text: str) -> str:
    text = re.sub(rf"( in |=){tempfile.gettempdir()}/\S+/base", "", text)  # differs with each call
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0])


def _short(text: str) -> str:
    return text if len(text) <= 150 else text[:147] + "..."


def write_chats(folder: Path) -> Path:
    """24 short conversations, of nearly one length, so that few lengths are compiled."""
    draw, file = random.Random(0), folder / "chats.jsonl"
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair"]
    with file.open("w") as out:
        for _ in range(24):
            messages = [
                {"role": role, "content": " ".join(draw.choices(words, k=7))} for role in ("user", "assistant")
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def rows_of(page: str) -> dict[str, str]:
    """The rows of a page by model type."""
    return {match[1]: match[0] for match in re.finditer(r"^\| `([\w.-]+)` \|.*$", page, re.M)}


def merged(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows in place of its rows of the same model types, sorted, and with the number of types tried."""
    every = {**rows_of(page), **{row.kind: str(row) for row in rows}}
    table = "\n".join([HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", *(every[kind] for kind in sorted(every))])
    said = f"{len(every)} of {len(kinds())} causal model types of transformers {transformers.__version__}"
    text = re.sub(r"\d+ of \d+ causal model types of transformers [\w.]+", said, page.partition("| model type |")[0])
    return f"{text}{table}\n"


def start(kind: str, chats: Path, results: Path, scratch: Path) -> int:
    """The id of a process that tries this type and writes its row to `results`."""
    if child := os.fork():
        return child
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        torch.set_num_threads(1)
        _save(attempt(kind, chats, scratch / kind), results)
    finally:
        shutil.rmtree(scratch / kind, ignore_errors=True)
        os._exit(0)


def _save(row: Row, results: Path) -> None:
    part = results / f".{row.kind}"
    part.write_text(json.dumps(dataclasses.asdict(row)))
    part.rename(results / f"{row.kind}.json")


def try_all(names: Sequence[str], jobs: int, limit: float, results: Path) -> Iterator[Row]:
    """The rows of these types as they are ready, `jobs` at a time. A type that takes more than `limit` seconds fails."""
    results.mkdir(parents=True, exist_ok=True)
    waiting, running = list(names), dict[int, tuple[str, float]]()
    with tempfile.TemporaryDirectory() as scratch:
        chats = write_chats(Path(scratch))
        while waiting or running:
            while waiting and len(running) < jobs:
                kind = waiting.pop(0)
                (results / f"{kind}.json").unlink(missing_ok=True)
                running[start(kind, chats, results, Path(scratch))] = (kind, time.monotonic())
            time.sleep(0.1)
            for child, (kind, begun) in list(running.items()):
                late = time.monotonic() - begun > limit
                if late:
                    os.killpg(child, signal.SIGKILL)
                if os.waitpid(child, 0 if late else os.WNOHANG)[0]:
                    del running[child]
                    file = results / f"{kind}.json"
                    if not file.exists():
                        _save(
                            Row(kind, f"fails: no end in {limit:.0f} s" if late else "fails: its process died"),
                            results,
                        )
                    yield Row(**json.loads(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--write", action="store_true", help="write the rows to docs/models.md")
    parser.add_argument("--all", action="store_true", help="also the types that docs/models.md has")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="a file for each type that was tried (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a type (%(default)s)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = set() if given.all else {*rows_of(PAGE.read_text())}
    done = {path.stem for path in given.folder.glob("*.json")} if given.all else set()
    names = given.names or [kind for kind in kinds() if kind not in known | done]
    if given.write and given.all:
        earlier = [Row(**json.loads((given.folder / f"{kind}.json").read_text())) for kind in sorted(done)]
        PAGE.write_text(merged(PAGE.read_text(), earlier))
    for row in try_all(names, given.jobs, given.limit, given.folder):
        print(row, flush=True)
        if given.write:  # after each row, so that the next call continues an interrupted one
            PAGE.write_text(merged(PAGE.read_text(), [row]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
