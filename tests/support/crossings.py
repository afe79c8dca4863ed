"""Runs of crossed features: a case names a value of each factor, and the case's run is compared with what must hold of
every run (the oracles).

    with Bench(folder) as bench:
        outcome = bench.run(Case(7, {"rows": "kto", "long": "truncate"}))    # the other factors have their first value
        outcome.wrong                                                        # what an oracle found, a line each

The rows hold a unique number in each question (q0042) and in each answer (a0042), so where a row went is found by
comparing texts: `record` writes the documents that a run trains on and those that it holds out. If fxtune refuses a
case, the factor that the message names is set back to its first value, and the case goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
import shlex
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.crossing_rows import IMAGES, Conservation, Rows
from support.endings import Ending, Traced
from support.harness import ROOT, TESTS, run
from support.killing import Aim, ForkServer, Reference, disturb

LENGTH = 128
"""Tokens of a row."""
GROUPS = ("dpo", "reward", "kto", "image_pairs")
PAIRS = ("dpo", "reward", "image_pairs")
REFERENCED = ("dpo", "kto", "image_pairs")
CHATS = ("chat", "tools", "images")
LORA = "techniques=lora"
DROPOUT = "rslora"
"""The technique with dropout."""
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "rows": {
        "chat": (),
        "tools": (f"data.chat_template={TESTS / 'support' / 'templates' / 'hermes.jinja'}",),
        "text": (),
        "dpo": ("objective=dpo",),
        "kto": ("objective=kto",),
        "reward": ("objective=reward",),
        "images": (),
        "image_pairs": ("objective=dpo",),
    },
    "long": {
        "fits": (),
        "split": ("data.on_long=split",),
        "truncate": ("data.on_long=truncate",),
        "drop": ("data.on_long=drop",),
    },
    "packing": {
        "packed": ("data.packing=true",),
        "padded": ("data.packing=false",),
        "buckets": ("data.packing=false", f"data.buckets=[64,{LENGTH}]"),
    },
    "prompts": {"auto": (), "shared": ("data.share_prompts=true",), "whole": ("data.share_prompts=false",)},
    "dedup": {"off": (), "exact": ("data.dedup=exact",), "near": ("data.dedup=near",)},
    "held": {
        "none": (),
        "share": ("data.eval_fraction=0.2",),
        "source": (),
        "files": ("data.eval_sources=[{path: held.jsonl}]",),
    },
    "learn": {
        "answers": (),
        "last": ("data.learn.last_turn_only=true",),
        "everyone": ("data.learn.roles=[user,assistant]",),
    },
    "mix": {
        "one": (),
        "two": (),
        "weights": (),
        "long": ("data.mix.long_share=0.4", "data.mix.threshold=40"),
        "growing": (f"data.length_schedule=[[0.0,64],[0.2,{LENGTH}]]",),
    },
    "batch": {
        "2 of 4": ("train.micro_batch_size=2", "train.global_batch_size=4"),
        "1 of 2": ("train.micro_batch_size=1", "train.global_batch_size=2"),
        "1 of 4": ("train.micro_batch_size=1", "train.global_batch_size=4"),
        "4 of 4": ("train.micro_batch_size=4", "train.global_batch_size=4"),
        "ramp": ("train.micro_batch_size=2", "train.global_batch_size=4", "train.batch_ramp=[[0.5,8]]"),
    },
    "length": {
        "2 epochs": ("train.epochs=2",),
        "1 epoch": ("train.epochs=1",),
        "1.5 epochs": ("train.epochs=1.5",),
        "steps": ("train.max_steps=5",),
    },
    "schedule": {name: (f"schedule.name={name}",) for name in ("constant", "cosine", "linear", "wsd")},
    "optimizer": {
        name: (f"optimizer.name={name}",)
        for name in ("adamw", "adamw_8bit", "adamw_schedulefree", "sgd", "adafactor", "lion", "muon")
    },
    "technique": {
        "lora": (LORA,),
        "full": ("techniques=full",),
        "dora": ("techniques=dora",),
        "rslora": ("techniques=rslora", "techniques.lora.dropout=0.1", "techniques.lora.r=16"),
        "pissa": (LORA, "techniques.lora.init=pissa"),
        "olora": (LORA, "techniques.lora.init=olora"),
        "tokens": (LORA, "model.add_tokens=['<|note|>']", "techniques.lora.train_tokens=['0','1']"),
        "head": (LORA, "techniques.lora.modules_to_save=[lm_head]"),
        "recompute": ("techniques=[lora,low_memory]",),
        "yarn": (LORA, "techniques.rope.enabled=true", "techniques.rope.factor=2"),
    },
    "precision": {
        "float32": (),
        "autocast": ("techniques.precision.autocast=bfloat16",),
        "bfloat16": ("model.dtype=bfloat16",),
    },
    "reference": {"auto": (), **{name: (f"objective.reference={name}",) for name in ("start", "base", "stored")}},
    "export": {"best": (), "last": ("run.export=last",)},
    "ranks": {"1": (), "2": ("run.gpus=2",)},
}
"""Factor -> value -> its keys. The first value of a factor is what a case falls back to."""
SHORTER = {
    "2 epochs": "train.epochs=1",
    "1 epoch": "train.epochs=0.5",
    "1.5 epochs": "train.epochs=1",
    "steps": "train.max_steps=3",
}
"""The length of the run that is then extended to the case's length."""
COMMON = (
    "run.dir=run",
    "run.device=cpu",
    f"data.sequence_length={LENGTH}",
    "data.cache_dir=cache",
    "optimizer.lr=1e-3",
    "schedule.warmup_steps=1",
    "checkpoint.every=3",
    "tracking.display=plain",
    "tracking.wandb.mode=disabled",
)


@dataclass(frozen=True)
class Case:
    number: int
    values: dict[str, str]

    def value(self, factor: str) -> str:
        return self.values.get(factor, next(iter(FACTORS[factor])))

    def changed(self, factor: str, value: str) -> Case:
        return Case(self.number, {**self.values, factor: value})

    def words(self, model: Path) -> list[str]:
        """The command line of the case's run."""
        return [*COMMON, *(word for words in self.factor_words(model).values() for word in words)]

    def factor_words(self, model: Path) -> dict[str, tuple[str, ...]]:
        """The words that each factor stands for. `model`: the folder of write_bases()."""
        found = {factor: FACTORS[factor][self.value(factor)] for factor in FACTORS}
        base = model / ("vision" if self.value("rows") in IMAGES else "text")
        dtype = () if self.value("precision") == "bfloat16" else ("model.dtype=float32",)
        found["rows"] += (f"model.path={base}", *dtype)
        two = self.value("mix") != "one"
        weights = (", weight: 3", ", weight: 1") if self.value("mix") == "weights" else ("", "")
        share = ", eval_fraction: 0.3" if self.value("held") == "source" else ""
        sources = [f"{{path: a.jsonl{weights[0]}{share}}}", *[f"{{path: b.jsonl{weights[1]}}}"] * two]
        found["mix"] += (f"data.sources=[{','.join(sources)}]",)
        if self.value("held") != "none":
            found["held"] += ("train.eval_every=2",)
        return found


def load_plainly(words: list[str]) -> int:
    """Compare the logits of the export and of the merged model with those of the checkpoint that was exported.

    `words`: the exported folder, the merged folder or "", the checkpoint, the result file. The export is loaded by the
    code of its model card.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    from fxtune.outputs.checkpoint_model import exported_model

    export, merged, checkpoint, result = words
    expected, tokenizer, _ = exported_model(Path(checkpoint))
    ids = torch.tensor([tokenizer("<|im_start|>user\nq0042 red lamp table<|im_end|>\n")["input_ids"]])

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits.float()

    (code,) = re.findall(r"```python\n(.*?)```", (Path(export) / "README.md").read_text(), re.S)[:1]
    place: dict[str, Any] = {}
    exec(code.replace('folder = "."', f"folder = {export!r}"), place)
    right, found = logits(expected.module), {"export": logits(place["model"])}
    if merged:
        kind = json.loads((Path(merged) / "config.json").read_text())["architectures"][0]
        classes = {"Sequence": AutoModelForSequenceClassification, "Conditional": AutoModelForImageTextToText}
        loader = next((one for part, one in classes.items() if part in kind), AutoModelForCausalLM)
        found["merged"] = logits(loader.from_pretrained(merged))
    off = {name: ((one - right).norm() / right.norm()).item() for name, one in found.items()}
    Path(result).write_text(json.dumps({"off": off, "dtype": str(next(expected.module.parameters()).dtype)}))
    return 0


def write_bases(words: list[str]) -> int:
    """Write two bases in float32 into the folder that the only word names, with plain transformers: a small random Llama
    with the tokenizer of builtin:tiny, and builtin:tiny-vision."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    folder = Path(words[0])
    text, vision = (ROOT / "fxtune" / "assets" / name for name in ("tiny", "tiny-vision"))
    config = AutoConfig.from_pretrained(text)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, size in {**sizes, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "text")
    AutoTokenizer.from_pretrained(text).save_pretrained(folder / "text")
    shutil.copytree(vision, folder / "vision")
    AutoModelForImageTextToText.from_pretrained(vision, dtype=torch.float32).save_pretrained(folder / "vision")
    return 0


@dataclass
class Done:
    code: int
    text: str

    @property
    def messages(self) -> list[str]:
        """Each message of fxtune, with its further lines."""
        found = list[str]()
        for line in self.text.splitlines():
            if line.startswith("fxtune: "):
                found.append(line)
            elif found and line.startswith(" "):
                found[-1] += f"\n{line}"
        return found


@dataclass
class Outcome:
    case: Case
    """With the factors that were not dropped."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Factor -> the message for which it was set back."""
    trained: bool = False
    ran: Counter[str] = field(default_factory=Counter)
    """The oracles that ran."""
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """What is wrong: (oracle, line)."""


ORACLES = (
    *("no traceback", "all three refuse", "one message, a way out", "steps", "rows", "eval", "export"),
    *("verify --loss", "longer run", "kill -9", "two ranks"),
)
BASES = threading.Lock()
"""One of several benches of a folder writes the bases."""
EVERY = {"kill -9": 3}
"""An oracle that costs much is asked of every so many-th case, unless it is named."""
REFERENCE_ELSEWHERE = re.compile(r"Evaluate a checkpoint|model with what its run started from")
"""`eval RUN` of some preferences is refused, and names the checkpoint."""
ADVICE = re.compile(
    r"\b(set|use|give|leave|remove|choose|raise|lower|make|write|train|install|keep|name|add|drop|take)\b", re.I
)
KEY = re.compile(r"\b(?:data|train|model|objective|optimizer|schedule|techniques|run|checkpoint|parallel)(?:\.\w+)+")


class Bench:
    """Runs cases in `folder`, each in a folder of its own. Use it as a context manager; one case at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "bases"
        self.server = ForkServer(environ={"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> Bench:
        self.server.__enter__()
        with BASES:
            if not self.model.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                assert self.call([str(self.model)], self.folder, "support.crossings:write_bases").code == 0
        return self

    def __exit__(self, *given: object) -> None:
        self.server.__exit__(*given)

    def call(self, words: list[str], place: Path, function: str = "fxtune.cli.main:main") -> Done:
        """Run a command, or another function of its words, in `place`."""
        log = place / "log.txt"
        before = log.stat().st_size if log.exists() else 0
        code = self.server.start(words, place, function=function).wait()
        return Done(code, log.read_bytes()[before:].decode(errors="replace"))

    def run(self, case: Case, oracles: frozenset[str] = frozenset()) -> Outcome:
        """Train the case, without the factors that fxtune refuses, and ask the `oracles` (all without any)."""
        outcome = Outcome(case)
        while True:
            attempt = Attempt(self, outcome, oracles)
            if attempt.trains():
                outcome.trained = True
                attempt.examine()
                break
            if not attempt.drop_factor():
                break
        return outcome


class Attempt:
    """One command line of a case: its preview, plan and run, and the oracles."""

    def __init__(self, bench: Bench, outcome: Outcome, oracles: frozenset[str]) -> None:
        self.bench, self.outcome, self.case, self.oracles = bench, outcome, outcome.case, oracles
        self.place = bench.folder / f"case-{self.case.number}{f'-{len(outcome.dropped)}' if outcome.dropped else ''}"
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        value = self.case.value
        self.rows = Rows(value("rows"), self.place, self.case.number, value("long") != "fits", value("mix") != "one")
        self.words = self.case.words(bench.model)
        (self.place / "command.txt").write_text(shlex.join(["fxtune", *self.words]) + "\n")
        self.single = [word for word in self.words if word != "run.gpus=2"]
        self.done = Done(0, "")

    def wrong(self, oracle: str, line: str) -> None:
        self.outcome.wrong.append((oracle, line))

    def check(self, oracle: str, problems: Iterable[str]) -> None:
        """Count that the oracle ran, and note its problems."""
        self.outcome.ran[oracle] += 1
        for problem in list(problems)[:3]:
            self.wrong(oracle, problem)

    def asked(self, oracle: str) -> bool:
        return oracle in self.oracles or not (self.oracles or self.case.number % EVERY.get(oracle, 1))

    def call(self, words: list[str], function: str = "fxtune.cli.main:main", place: Path | None = None) -> Done:
        done = self.bench.call(words, place or self.place, function)
        if "Traceback (most recent call last)" in done.text or (done.code == 1 and words[0] != "verify"):
            self.wrong("no traceback", f"{' '.join(words[:2])}: {done.text.strip().splitlines()[-1:]}")
        return done

    # --- what is refused ----------------------------------------------------------------------------------------

    def trains(self) -> bool:
        """Preview, plan and train. Whether the run ended with 0."""
        self.previewed = self.call(["preview", *self.single, "--json", "preview.json"])
        self.planned = self.call(["plan", "--gpu", "cpu", *self.single, "--json", "plan.json"])
        before = (self.place / "log.txt").stat().st_size
        started = self.bench.server.start(self.single, self.place, function="support.crossing_rows:record")
        code = started.wait()
        text = (self.place / "log.txt").read_bytes()[before:].decode(errors="replace")
        self.trace, self.done = Traced.read(started.file), Done(code, text)
        self.check("no traceback", ["training: " + self.done.text.strip()[-300:]] * ("Traceback" in self.done.text))
        self.check("all three refuse", self.disagreements())
        return code == 0

    def disagreements(self) -> Iterator[str]:
        if "Asked for and not done" in self.done.text:
            return  # only the built model shows it
        refused = bool(self.done.code)
        said = (self.done.messages or [""])[0][:160]
        shown = self.previewed.code or "A run is refused:" in self.previewed.text
        for name, other, of_other in (("preview", shown, self.previewed), ("plan", self.planned.code, self.planned)):
            if refused and not other:
                yield f"{name} shows no refusal, and training ends with {self.done.code}: {said}"
            if other and not refused:
                yield f"{name} refuses, and training does not: {(of_other.messages or [''])[0][:160]}"

    def drop_factor(self) -> bool:
        """Set back the factor that the refusal names. False if the case cannot go on."""
        messages = self.done.messages
        text = messages[0] if messages else self.done.text[-300:]
        problems = [f"{len(messages)} messages"] * (len(messages) != 1)
        problems += [f"no way out: {text[:200]}"] * (not (ADVICE.search(text) and KEY.search(text)))
        self.check("one message, a way out", problems)
        if (factor := self._named(text)) is None:
            self.wrong("one message, a way out", f"names no factor of the case: {text[:300]}")
            return False
        self.outcome.dropped[f"{factor}={self.case.value(factor)}"] = text
        self.outcome.case = self.case.changed(factor, next(iter(FACTORS[factor])))
        return True

    def _named(self, text: str) -> str | None:
        """The first factor that a message names, by a key or the last part of a key, of those that have not their first
        value."""
        found = list[tuple[int, str]]()
        for factor, words in self.case.factor_words(self.bench.model).items():
            if factor != "rows" and self.case.value(factor) != next(iter(FACTORS[factor])):
                for key in (word.partition("=")[0] for word in words):
                    place = min((match.start() for match in KEY.finditer(text) if _same(match[0], key)), default=-1)
                    last = re.search(rf"\b{key.rpartition('.')[2]}\b", text)
                    if place >= 0:
                        found.append((place, factor))
                    elif last and "." in key:
                        found.append((len(text) + last.start(), factor))
        return min(found, default=(0, None))[1]

    # --- the oracles --------------------------------------------------------------------------------------------

    def examine(self) -> None:
        self.run_folder = self.place / "run"
        self.result = json.loads((self.run_folder / "result.json").read_text())
        self.exported_step = self.result.get("export/step", self.result["train/step"])
        checks: dict[str, Callable[[], Iterable[str] | None]] = {
            "steps": self.steps,
            "rows": self.conserved,
            "eval": self.evaluated,
            "export": self.exported,
            "verify --loss": self.verified,
            "longer run": self.extended,
            "kill -9": self.killed,
            "two ranks": self.on_two_ranks,
        }
        for oracle, check in checks.items():
            if self.asked(oracle) and (found := check()) is not None:
                self.check(oracle, found)

    def steps(self) -> Iterable[str] | None:
        """Preview, plan and run have the same number of steps."""
        counts = {"run": self.result["train/step"]}
        if not self.previewed.code:
            counts["preview"] = json.loads((self.place / "preview.json").read_text())["summary"]["steps"]
        if not self.planned.code:
            counts["plan"] = json.loads((self.place / "plan.json").read_text())["steps"]
        return [f"{counts}"] * (len(set(counts.values())) > 1)

    def conserved(self) -> Iterable[str]:
        """What goes in is trained, held out or counted; supervised tokens are counted as they are."""
        value, preview = self.case.value, self.place / "preview.json"
        summary = json.loads(preview.read_text())["summary"] if not self.previewed.code else Counter[str]()
        found = Conservation(
            self.rows,
            learn=value("learn"),
            long=value("long"),
            weighted=value("mix") in ("weights", "long"),
            cut=value("mix") == "growing",
            dedup=value("dedup") != "off",
            epochs=self.result["train/epoch"] if value("length") == "steps" else float(value("length").split()[0]),
            summary=summary,
            log=self.done.text,
        ).read(self.place)
        yield from found.problems()
        if found.learned_tokens != self.result["train/supervised_tokens"]:
            yield f"{found.learned_tokens} tokens are supervised, and the run counts {self.result['train/supervised_tokens']:g}"

    def evaluated(self) -> Iterable[str] | None:
        """`eval RUN`, `eval RUN/step-N` and the run's own figures are equal."""
        if self.case.value("held") == "none":
            return None
        lines = map(json.loads, (self.run_folder / "metrics.jsonl").read_text().splitlines())
        (*_, own) = (line for line in lines if line["train/step"] == self.exported_step and "eval/loss" in line)
        found = []
        for output in ("run", self.checkpoint.relative_to(self.place)):
            done = self.call(["eval", str(output)])
            others = {name: float(number) for name, number in re.findall(r"│ (eval/\w+) +│ +(\S+) +│", done.text)}
            off = {
                name: (round(own[name], 4), other)
                for name, other in others.items()
                if name in own and abs(own[name] - other) > 2e-4 * max(1, abs(other))
            }
            if off or (not others and not REFERENCE_ELSEWHERE.search(done.text)):
                found.append(f"eval {output} ends with {done.code}, (the run's, eval's): {off} {done.messages[:1]}")
        return found

    @property
    def checkpoint(self) -> Path:
        """The checkpoint whose weights were exported."""
        return Path(self.run_folder / "checkpoints" / f"step-{self.exported_step:08d}")

    def exported(self) -> Iterable[str]:
        """Plain peft and transformers load the export, and merged weights, with the logits of the checkpoint."""
        adapter, merged, out = self.run_folder / "adapter", "", self.place / "loaded.json"
        found = []
        if adapter.exists():
            merge = self.call(["merge", "run", "merged"])
            merged = str(self.place / "merged") if not merge.code else ""
            found += [f"merge ends with {merge.code}: {merge.messages[:1]}"] * (merge.code != 0)
        export = adapter if adapter.exists() else self.run_folder / "model"
        words = [str(export), merged, str(self.checkpoint), str(out)]
        if (loaded := self.call(words, "support.crossings:load_plainly")).code:
            return [*found, f"the code of the model card fails: {loaded.text.strip().splitlines()[-1:]}"]
        bounds = (
            {"export": 1e-5, "merged": 1e-4}
            if self.case.value("precision") != "bfloat16"
            else {"export": 2e-2, "merged": 3e-2}
        )
        off = json.loads(out.read_text())["off"]
        return [
            *found,
            *(
                f"logits of the {name} are off by {error:.1e}"
                for name, error in off.items()
                if not error < bounds[name]
            ),
        ]

    def verified(self) -> Iterable[str]:
        done = self.call(["verify", "--loss", *self.single])
        return [f"ends with {done.code}: {(done.messages or [done.text[-300:]])[0][:400]}"] * (done.code != 0)

    def inputs(self, name: str) -> Path:
        """A new folder with the files of the case's rows."""
        place = self.place / name
        place.mkdir()
        for file in (*self.place.glob("*.jsonl"), *self.place.glob("*.png")):
            if file.name not in ("documents.jsonl", "trace.jsonl"):
                shutil.copy(file, place)
        return place

    def extended(self) -> Iterable[str] | None:
        """A shorter run that is extended to the case's length has the weights of the case's run."""
        schedule = self.case.value("schedule")
        if schedule not in ("constant", "wsd"):
            return None  # others are refused
        place, length = self.inputs("longer"), FACTORS["length"][self.case.value("length")]
        shorter = [SHORTER[self.case.value("length")] if word in length else word for word in self.single]
        for words in (shorter, self.single):
            done = self.call(words, place=place)
            if done.code:
                one = len(done.messages) == 1 and ADVICE.search(done.messages[0])
                return (
                    [] if one and words is self.single else [f"{words[0]} ends with {done.code}: {done.text[-300:]}"]
                )
        # The steps of a decay that an extension drops count on.
        newest, other = (max((folder / "run" / "checkpoints").glob("step-*")) for folder in (self.place, place))
        sums = [
            {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}
            for folder in (newest, other)
        ]
        if sums[0] == sums[1]:
            return []
        tokens = [
            json.loads((folder / "state.json").read_text())["figures"]["train/tokens"] for folder in (newest, other)
        ]
        return [f"other weights than in the whole run; tokens of the whole run and of the extended run: {tokens}"]

    def killed(self) -> Iterable[str]:
        """A run that is killed before a file operation, and started again, has the same bits."""
        place = self.inputs("killed")
        operations = sum("operation" in line for line in self.trace.lines)
        share = random.Random(self.case.number).uniform(0.4, 0.98)
        reference = Reference(
            self.single, dataclasses.replace(Ending.of(self.run_folder, [self.trace])), self.trace, 1.0
        )
        outcome = disturb(self.bench.server, reference, place, [Aim(operation=int(share * operations))])
        found = [f"ends with {outcome.code}"] * (outcome.code != 0) + ["a process is left"] * outcome.left
        return [*found, *(line[:300] for line in outcome.differences)]

    def on_two_ranks(self) -> Iterable[str] | None:
        """Two ranks take the same steps with the same losses."""
        if self.case.value("ranks") == "1":
            return None
        place = self.inputs("ranks")
        done = run(self.words, place, OMP_NUM_THREADS="1")
        if done.code:
            return [f"ends with {done.code}: {done.text[-300:]}"]
        losses = [
            [
                line["train/loss"]
                for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
                if "train/loss" in line
            ]
            for folder in (self.run_folder, place / "run")
        ]
        if len(losses[0]) != len(losses[1]):
            return [f"{len(losses[1])} steps, and {len(losses[0])} with one rank"]
        bound = (
            1.0
            if self.case.value("technique") == DROPOUT
            else 1e-3
            if self.case.value("precision") == "float32"
            else 3e-2
        )
        off = max(abs(one - two) / max(abs(one), 0.1) for one, two in zip(*losses, strict=True))
        return [f"losses differ by {off:.1e}: {losses}"] * (off > bound)


def _same(one: str, other: str) -> bool:
    """Whether two keys are equal, or one is a group of the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
