"""Classifiers, embedding models, distilled students and policies for bench_peers.py: documents, weights, and the trainers
of peers.

Both tools of a case read one folder of random weights and one file of documents, so their first losses can be compared.
This module does not import fxtune, because the processes of the peers import this module.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

CLASSES = 4
SIGMA = 1.0
"""Sigma of log-normal lengths."""
HEADS = {
    "classification": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
    "distillation": "AutoModelForCausalLM",
    "policy": "AutoModelForCausalLM",
}
PEERS = {
    "classification": "transformers",
    "embedding": "sentence_transformers",
    "distillation": "trl",
    "policy": "trl",
}
MASKS = ("prompt_mask", "completion_mask")
"""The masks of a batch that has no attention mask. DPOTrainer has one, and its completion mask marks a part of it."""


def words(tokenizer: Path) -> list[str]:
    """The words that are one token each, both at the beginning of a text and after a space."""
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = sorted(token[1:] for token in known.get_vocab() if token[0] == "Ġ" and token[1:].isalpha())
    return [word for word in found if len(known.encode(word).ids) == len(known.encode(" " + word).ids) == 1]


@dataclass(frozen=True)
class Task:
    """What both tools of a case learn."""

    objective: str
    """fxtune's objective: `classification`, `embedding`, `distillation` or `policy`."""
    documents: int
    """Documents of a step of the peer; of embedding, pairs; of a policy, answers."""
    mean: int
    """Mean tokens of a text, before long texts are cut; of a policy, mean tokens of an answer."""
    longest: int = 0
    """The most tokens of a text, with log-normal lengths; of an answer, with lengths drawn evenly from 1 on. 0: each
    text has `mean` tokens."""
    teacher: Optional[str] = None
    """The shape of the teacher in distillation."""
    pool: Optional[str] = None
    prompt: int = 0
    """Tokens of each prompt of a policy."""
    answers: int = 1
    """Answers to a prompt."""
    log_prob: float = -12.0
    """The mean of the made-up log-probabilities of a policy's tokens."""
    repeats: bool = False
    """Whether all steps have the same documents, so that the first loss of both tools is equal."""

    @property
    def head(self) -> str:
        return HEADS[self.objective]

    @property
    def peer(self) -> str:
        return PEERS[self.objective]

    @property
    def step_tokens(self) -> int | None:
        """Tokens of each step of the peer; None if steps differ."""
        texts = 2 if self.objective == "embedding" else 1
        return None if self.longest else self.documents * (self.mean * texts + self.prompt)

    def models(self, shape: str, scratch: Path) -> dict[str, tuple[str, Path]]:
        """{name: (shape, folder)} of the models that both tools read."""
        shapes = {"model": shape, "teacher": self.teacher}
        return {name: (each, scratch / f"weights-{each}-{self.objective}") for name, each in shapes.items() if each}

    def keys(self, shape: str, scratch: Path) -> list[str]:
        """fxtune's keys."""
        (_, model), *teachers = self.models(shape, scratch).values()
        keys = [f"model.path={model}", f"objective={self.objective}"]
        keys += [f"objective.teacher={folder}" for _, folder in teachers]
        if self.objective == "policy":
            keys += ["objective.rewards=[{name: given}]", f"sampler.answers={self.answers}"]
            keys += [f"sampler.max_tokens={self.longest or self.mean}"]
        return keys + [f"objective.pool={self.pool}"] * bool(self.pool)

    def settings(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Groups of the peer's settings: the first that fits in each group is measured. `micro`: documents of a
        micro-batch, which are padded to the longest. `mini`: texts of a pass of CachedMultipleNegativesRankingLoss."""
        if self.objective == "embedding":
            names = ("flash_attention_2", "flash_attention_4", "sdpa")
            return tuple(((f"attention={name}", f"mini={mini}"),) for name in names for mini in (64, 128))
        if self.objective == "policy":
            plain, recomputed = ("checkpointing=none", "liger=on"), ("checkpointing=full", "liger=on")
            fits = [f"micro={size}" for size in (8, 4, 2) if self.documents % size == 0]
            return tuple((*plain, size) for size in fits), ((*recomputed, "micro=8"),)
        kernels = (("liger=on",), ("liger=off",)) if self.objective == "distillation" else ((),)
        sizes = [f"micro={size}" for size in (4, 8, 16) if self.documents % size == 0]
        passes = ("checkpointing=none", "checkpointing=full")
        return tuple(tuple((again, *liger, size) for again in passes for liger in kernels) for size in sizes)

    def write_documents(self, folder: Path, steps: int, tokenizer: Path) -> Path:
        """The JSONL file of the documents of these steps. Writes the file if it does not exist."""
        count = self.documents * (1 if self.repeats else steps)
        file = folder / f"{self.objective}-{self.mean}-{self.longest}-{self.prompt}-{count}.jsonl"
        if not file.exists():
            known = words(tokenizer)
            rows = self._prompts(count, known, tokenizer) if self.objective == "policy" else self._rows(count, known)
            file.with_suffix(".part").write_text("".join(json.dumps(row) + "\n" for row in rows))
            file.with_suffix(".part").rename(file)
        return file

    def _rows(self, count: int, known: list[str]) -> Iterator[dict[str, Any]]:
        """Classification: the words of a class are three times as likely as others. Embedding: both texts of a pair
        take their words from the same list of forty words. Distillation: random ids; the first quarter of the ids is
        the prompt."""
        draw = random.Random(0)

        def length() -> int:
            size = round(draw.lognormvariate(math.log(self.mean) - SIGMA**2 / 2, SIGMA))
            return min(max(8, size), self.longest) if self.longest else self.mean

        for number in range(count):
            if self.objective == "classification":
                label = number % CLASSES
                weights = [3 if at % CLASSES == label else 1 for at in range(len(known))]
                yield {"text": " ".join(draw.choices(known, weights, k=length())), "label": f"LABEL_{label}"}
            elif self.objective == "embedding":
                topic = draw.sample(known, 40)
                yield {name: " ".join(draw.choices(topic, k=length())) for name in ("anchor", "positive")}
            else:
                ids = draw.choices(range(3, 1000), k=length())
                yield {"input_ids": ids, "labels": [-100] * (len(ids) // 4) + ids[len(ids) // 4 :]}

    def _prompts(self, count: int, known: list[str], tokenizer: Path) -> Iterator[dict[str, Any]]:
        """Prompts with `count` answers in total. An answer's tokens, log-probabilities and rewards are random. The
        log-probabilities are close to the log-probabilities of random weights, so the ratios of the first step are on both sides of 1."""
        from tokenizers import Tokenizer

        encode, draw = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode, random.Random(0)
        for _ in range(count // self.answers):
            prompt = " ".join(draw.choices(known, k=self.prompt))
            rewards = [draw.random() for _ in range(self.answers)]
            mean, answers = sum(rewards) / self.answers, []
            for reward in rewards:
                length = draw.randint(1, self.longest) if self.longest else self.mean
                ids = draw.choices(range(3, 1000), k=length)
                log_probs = [draw.gauss(self.log_prob, 0.3) for _ in ids]
                answers.append({"ids": ids, "log_probs": log_probs, "advantage": reward - mean})
            yield {"prompt": prompt, "prompt_ids": encode(prompt).ids, "answers": answers}

    def mean_tokens(self, file: Path) -> float:
        """Tokens of a document of write_documents(), on average."""
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if self.objective == "policy":
            answers = [len(answer["ids"]) for row in rows for answer in row["answers"]]
            return self.prompt + sum(answers) / len(answers)
        texts = ("text", "anchor", "positive")
        counts = [len(row.get("input_ids") or " ".join(row.get(name, "") for name in texts).split()) for row in rows]
        return sum(counts) / len(counts)


def trainer(request: dict[str, Any], settings: dict[str, Any], clock: Any) -> Any:
    """The peer's trainer for a task. `settings`: arguments of any transformers Trainer."""
    made = {"classification": _classifier, "embedding": _embedder, "distillation": _student, "policy": _policy}
    with open(request["documents"], encoding="utf-8") as file:
        return made[request["task"]["objective"]](request, settings, [json.loads(line) for line in file], clock)


def unpadded(inputs: dict[str, Any]) -> Any:
    """Tokens of a micro-batch that are not padding. Without a mask there is no padding."""
    import torch

    known = [(name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    masks = [(name, value.sum()) for name, value in known if name.endswith("_mask") and value.dim() == 2]
    whole = [count for name, count in masks if name.endswith("attention_mask")]
    parts = [count for name, count in masks if name in MASKS]
    return sum(whole or parts or [torch.tensor(value.numel()) for name, value in known if name.endswith("input_ids")])


def _classifier(request: Any, settings: Any, rows: list[dict[str, Any]], clock: Any) -> Any:
    """Plain transformers and peft. The mean of the loss over a step is computed here: Trainer divides the loss of a
    sequence classifier neither by the accumulated micro-batches nor by the documents of the step."""
    import transformers
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return cross_entropy(outputs.logits.float(), labels, reduction="sum") / num_items_in_batch

    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(request["model"], dtype="auto")
    ids = model.config.label2id
    if settings["gradient_checkpointing"]:
        model.enable_input_require_grads()
    return transformers.Trainer(
        model=get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **request["adapters"])),
        args=transformers.TrainingArguments(**settings, per_device_train_batch_size=int(request["micro"])),
        train_dataset=Dataset.from_list([dict(tokenizer(row["text"]), label=ids[row["label"]]) for row in rows]),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_loss_func=loss,
        callbacks=[clock],
    )


def _embedder(request: Any, settings: Any, rows: list[dict[str, Any]], clock: Any) -> Any:
    """sentence-transformers, all weights in float32 under bfloat16 autocast. Its scale of 20 is a temperature of 0.05."""
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    options = dict(dtype=torch.float32, attn_implementation=request["attention"])
    body = Transformer(request["model"], max_seq_length=request["length"], model_kwargs=options)
    pool = request["task"]["pool"]
    pooling = Pooling(body.get_embedding_dimension(), {"last": "lasttoken"}.get(pool, pool))
    model = SentenceTransformer(modules=[body, pooling])
    return SentenceTransformerTrainer(
        model=model,
        args=Arguments(**settings, per_device_train_batch_size=request["step_documents"]),
        train_dataset=Dataset.from_list(rows),
        loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=int(request["mini"])),
        callbacks=[clock],
    )


def _student(request: Any, settings: Any, rows: list[dict[str, Any]], clock: Any) -> Any:
    """TRL's DistillationTrainer lets the student write the answers. Here it takes the answers of the rows instead; its
    passes, its divergence and its optimizer are unchanged."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    class OffPolicy(DistillationTrainer):
        def _generate(self, prompts: list[dict[str, Any]]) -> tuple[Any, ...]:
            return [row["prompt_ids"] for row in prompts], [row["answer_ids"] for row in prompts], None, None, []

    def split(row: dict[str, Any]) -> dict[str, Any]:
        at = row["labels"].count(-100)
        return {"prompt": {"prompt_ids": row["input_ids"][:at], "answer_ids": row["input_ids"][at:]}}

    models = [AutoModelForCausalLM.from_pretrained(request[name], dtype="auto") for name in ("model", "teacher")]
    return OffPolicy(
        model=models[0],
        teacher_model=models[1],
        args=DistillationConfig(**settings, per_device_train_batch_size=int(request["micro"]), beta=0.0),
        train_dataset=Dataset.from_list([split(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(request["model"], padding_side="left"),
        callbacks=[clock],
    )


def _policy(request: Any, settings: Any, rows: list[dict[str, Any]], clock: Any) -> Any:
    """TRL's GRPOTrainer. It gets each step's answers, with their log-probabilities and advantages, in place of answers
    that it samples and scores. Its passes, its loss and its optimizer are unchanged. The ratios are to the given
    log-probabilities, so TRL needs no pass of its own for them."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    answers = [answer for row in rows for answer in row["answers"]]
    prompts = [torch.tensor(row["prompt_ids"]) for row in rows for _ in row["answers"]]
    tokens = [torch.tensor(answer["ids"]) for answer in answers]
    log_probs = [torch.tensor(answer["log_probs"]) for answer in answers]
    longest = max(map(len, tokens))

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            found = {
                "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
                "prompt_mask": pad([torch.ones_like(each) for each in prompts], padding_value=0, padding_side="left"),
                "completion_ids": pad(tokens, padding_value=0),
                "completion_mask": pad([torch.ones_like(each) for each in tokens], padding_value=0),
                "old_per_token_logps": pad(log_probs, padding_value=0.0),
                "advantages": torch.tensor([answer["advantage"] for answer in answers]),
                "num_items_in_batch": torch.tensor(sum(map(len, tokens))),
            }
            return {name: value.to(self.accelerator.device) for name, value in found.items()}

    args = GRPOConfig(
        **settings,
        per_device_train_batch_size=int(request["micro"]),
        num_generations=request["task"]["answers"],
        max_completion_length=longest,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
    )
    options = dict(dtype="auto", attn_implementation=request.get("attention", "sdpa"))
    return Given(
        model=AutoModelForCausalLM.from_pretrained(request["model"], **options),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(request["model"], padding_side="left"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **request["adapters"]),
        callbacks=[clock],
    )
