"""Commands over folders of a model, an adapter and a tokenizer whose auto_map names code for each auto class.

Nobody has trusted the code, or somebody has trusted a folder, which is refused. After each command a test looks whether
the code has run.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import transformers
from support.harness import write_chats
from support.servers import upload_hub
from support.strangers import change, plant_code, stranger_in

from fxtune.models.proof import PROOF

RUN = (
    *("data.sources=[{path: chats.jsonl}]", "data.cache_dir=cache", "data.sequence_length=128", "data.packing=false"),
    *("data.eval_fraction=0.3", "train.max_steps=2", "train.global_batch_size=2", "train.micro_batch_size=2"),
    *("loader.num_workers=0", "run.device=cpu", "tracking.display=none"),
)
PIN = "Pin what you have read"
"""The refusal of trust in a folder or in a name that may change."""


class Walk:
    """Runs commands in the folder `home`, with `base` as model and `tokenizer` as tokenizer."""

    def __init__(self, home: Path, canary: Path, run_here) -> None:
        self.home, self.canary, self.run_here = home, canary, run_here
        self.base, self.tokenizer = stranger_in(home), stranger_in(home)
        self.words = (f"model.path={self.base}", f"model.tokenizer={self.tokenizer}", *RUN)
        write_chats(home / "chats.jsonl", 80)
        write_chats(home / "new.jsonl", 60, seed=5)

    def works(self, *words: str) -> None:
        self._ends(0, words)

    def refuses(self, *words: str, message: str = "evil.py is Python code that came with") -> None:
        shown = self._ends(2, words)
        assert shown.count("fxtune: ") == 1, words
        assert message in shown, words
        assert "Traceback" not in shown, words

    def _ends(self, expected: int, words: tuple[str, ...]) -> str:
        code, shown = self.run_here(*words)
        assert not self.canary.exists(), f"code ran in: {words}"
        assert code == expected, f"{words}: {shown[-3000:]}"
        return shown

    def train(self) -> None:
        self.works("train", *self.words, "techniques.lora.enabled=true", "run.dir=lora")
        self.works("train", *self.words, "run.dir=full", "checkpoint.every=1")

    def plant(self) -> None:
        """Put code into what the runs have exported, and take away the proofs, which refuse files that have changed."""
        shutil.copy(self.base / "config.json", self.home / "lora" / "adapter")  # as an adapter with RoPE scaling has
        for folder in ("lora/adapter", "full/model"):
            plant_code(self.home / folder)
            (self.home / folder / PROOF).unlink()


@pytest.fixture
def walk(tmp_path, canary, run_here) -> Walk:
    return Walk(tmp_path, canary, run_here)


def test_training_all_weights_does_not_run_code(walk):
    walk.works("train", *walk.words, "run.dir=full", "data.eval_fraction=0")
    assert (walk.home / "full" / "model" / "config.json").exists()
    with pytest.raises(Exception):  # noqa: B017  the class in the file is no model
        transformers.AutoModelForCausalLM.from_pretrained(walk.base, trust_remote_code=True)
    assert walk.canary.exists(), "with trust it runs, so these tests can fail"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.path=builtin:tiny",),
        ("model.path=ann/mine",),
        ("model.path=ann/mine", "model.revision=main"),
        ("model.path=ann/mine", "model.revision=" + "a" * 39),
    ],
    ids=["folder", "builtin", "no commit", "branch", "short commit"],
)
def test_only_a_hub_model_with_its_full_commit_can_be_trusted(words, walk):
    walk.refuses("train", *walk.words, *words, "model.trust_remote_code=true", message=PIN)


@pytest.mark.slow
def test_commands_over_a_known_model_type_work_and_run_no_code(walk, monkeypatch):
    walk.train()
    walk.works("verify", "lora")
    walk.works("verify", "full")
    walk.plant()
    over_adapter = (*walk.words, "model.adapter=lora/adapter", "techniques.lora.enabled=true")
    over_model = (f"model.path={walk.home / 'full' / 'model'}", *walk.words[1:])
    for words in (over_adapter, over_model):
        for command in ("plan", "preview", "verify", "eval"):
            walk.works(command, *words)
    walk.works("eval", "full/checkpoints/step-2")
    walk.works("merge", "lora/adapter", "merged")
    walk.works("merge", "full/checkpoints/step-2", "merged-checkpoint")
    walk.works("train", *over_adapter, "run.dir=again")
    walk.works("refresh", "lora", "data.sources=[{path: new.jsonl}]", "refresh.held_out=0.4", "--force")
    for run in ("lora", "full"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        walk.works("chat", run, "--max-new-tokens", "2")
    with upload_hub(monkeypatch) as hub:
        walk.works("push", "lora", "me/adapter")
        walk.works("push", "lora", "me/merged", "--merged")
        walk.works("push", "full", "me/full")
        assert not [name for files in hub.stored.values() for name in files if name.endswith(".py")]


@pytest.mark.slow
def test_commands_over_an_unknown_type_are_refused_and_run_no_code(walk, monkeypatch):
    walk.train()
    walk.plant()

    def unknown(folder: Path, file: str = "config.json", **values: str) -> None:
        change(folder / file, **(values or {"model_type": "mine"}))

    unknown(walk.tokenizer, "tokenizer_config.json", tokenizer_class="Mine")
    for command in ("train", "preview", "verify", "eval"):
        walk.refuses(command, *walk.words, "run.dir=other")
    unknown(walk.base)
    for command in ("train", "plan", "preview", "verify", "eval"):
        walk.refuses(command, *walk.words, "run.dir=other")
    walk.refuses("merge", "lora/adapter", "merged")
    with upload_hub(monkeypatch) as hub:
        walk.refuses("push", "lora", "me/merged", "--merged")
        assert not hub.stored, "a model that cannot be merged leaves no repository"
    walk.refuses("refresh", "lora", "data.sources=[{path: new.jsonl}]", "refresh.held_out=0.4", "--force")
    unknown(walk.home / "full" / "model")
    for run in ("lora", "full"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        walk.refuses("chat", run, "--max-new-tokens", "2")
    of_run = {
        "full": ("eval", "full/checkpoints/step-2"),
        "lora": ("refresh", "lora", "data.sources=[{path: new.jsonl}]"),
    }
    for words in (("merge", "lora/adapter", "merged"), ("chat", "full")):
        walk.refuses(*words, "--trust-remote-code", message=PIN)
    for run, words in of_run.items():
        walk.refuses(*words, "--trust-remote-code")  # it confirms the trust of a run, and this run had none
        config = walk.home / run / "config.yaml"
        config.write_text(config.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
        walk.refuses(*words, message="runs code of a stranger, so a run folder cannot set it")
        walk.refuses(*words, "--trust-remote-code", message=PIN)
