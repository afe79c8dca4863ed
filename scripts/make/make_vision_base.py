"""Makes fxtune/assets/tiny-vision, the base model that ships for images: chats, tokenizer, pre-training with fxtune, bf16.

    python scripts/make/make_vision_base.py                # about 25 minutes on two CPU cores (extrapolated)
    python scripts/make/make_vision_base.py --work DIR     # the folder of chats, tokenizer and run; an interrupted run resumes there

Nothing is downloaded: the script draws the pictures and makes the sentences from a seed. The model learns to describe
pictures in plain English, and learns JSON from rows without pictures. No row answers a picture with JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from make_base import CONTEXT, END_OF_TEXT, SEED, SPECIAL, TURN_END, ship, train_tokenizer
from make_vision import QUESTIONS, make
from scenes import COLORS, NUMBERS, SHAPES, SIZES, Scene, data_uri, draw_scene, picture
from shop import PLURALS

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / "fxtune" / "assets" / "tiny-vision"
LIMIT = 1_500_000
"""The most bytes that the folder may have: it is part of every clone and wheel."""

TOKENIZER_ROWS = 8_000
VOCABULARY = 512
PATCH, MERGED = 14, 2
SPREAD = 0.08
"""Standard deviation of the first weights. With 0.02, usual in wide models, this narrow model long ignores pictures."""


@dataclass(frozen=True)
class Stage:
    """The rows of one stage of pre-training."""

    chats: int
    texts: int
    brief: float
    """The share of chats that only describe the picture."""
    most: int
    """The most things in the pictures of chats that only describe."""
    sizes: dict[str, tuple[float, float]]
    requests: tuple[str, ...]
    """Prompts that ask for a description."""


DESCRIBE = ("Describe the picture.", "What do you see?", "Tell me about the picture.")
SEVERAL = ("What is in the picture?", "List the shapes.", "Which shapes do you see?")
STAGES = (
    Stage(36_000, 1_500, 0.5, 3, {"small": (6.0, 7.5), "large": (11.0, 13.5)}, DESCRIBE + SEVERAL),
    Stage(24_000, 1_000, 0.75, 1, SIZES, DESCRIBE + QUESTIONS),
)
"""Pictures of the first stage have several things, and smaller things."""
PLACEHOLDERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- elif message['content'] is string %}
        {{- message['content'] + '<|im_end|>' }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SYSTEMS = (
    "You are a helpful assistant.",
    "You look at pictures.",
    "Answer with one sentence.",
    "Be brief.",
    "Answer with the facts.",
)


def describe(rng: Random, scene: Scene) -> str:
    """All things of a scene, in reading order."""
    number = NUMBERS[len(scene.things)]
    counted = "one shape" if len(scene.things) == 1 else f"{number} shapes"
    verb = "is" if len(scene.things) == 1 else "are"
    first = rng.choice((f"There {verb} {counted}. ", f"I see {counted}. ", ""))
    form = rng.choice(("A {words} is in {place}.", "In {place} there is a {words}.", "{place}: a {words}."))
    said = [form.format(words=thing.words, place=thing.place) for thing in scene.things]
    return first + " ".join(sentence[0].upper() + sentence[1:] for sentence in said)


def asked(rng: Random, scene: Scene) -> tuple[str, str]:
    """A question about a detail, and its answer."""
    thing = rng.choice(scene.things)
    row, column = rng.randint(1, scene.rows), rng.randint(1, scene.columns)
    there = [other for other in scene.things if (other.row, other.column) == (row, column)]
    shape = rng.choice(SHAPES)
    alike = [other for other in scene.things if other.shape == shape]
    number = NUMBERS[len(scene.things)]
    pairs = [
        ("How many shapes are there?", rng.choice((f"{number.capitalize()}.", f"I see {number}."))),
        (f"What is in {thing.place}?", f"A {thing.words}."),
        (f"What is in row {row}, column {column}?", f"A {there[0].words}." if there else "Nothing."),
        (f"Is there a {shape}?", f"Yes, a {alike[0].words} in {alike[0].place}." if alike else "No."),
    ]
    if [other.shape for other in scene.things].count(thing.shape) == 1:
        pairs += [
            (f"What color is the {thing.shape}?", f"The {thing.shape} is {thing.color}."),
            (f"Where is the {thing.shape}?", f"The {thing.shape} is in {thing.place}."),
            (f"Is the {thing.shape} small or large?", f"It is {thing.size}."),
        ]
    return rng.choice(pairs)


def chat(rng: Random, stage: Stage, known: set[str]) -> tuple[dict, str]:
    """(a row about one picture that is not in `known`, its words for the tokenizer). Brief rows only describe the
    picture, and most of their pictures have one thing: from brief rows the model first learns to see."""
    brief = rng.random() < stage.brief
    kinds = [(shape, color) for shape in SHAPES for color in COLORS]
    while True:
        scene = draw_scene(rng, kinds, stage.most if brief else 3)
        if brief and rng.random() < 0.5:
            scene = replace(scene, things=scene.things[:1])
        image = data_uri(picture(rng, scene, stage.sizes))
        if image not in known:
            break
    pairs = [(rng.choice(stage.requests), describe(rng, scene))] if brief or rng.random() < 0.7 else []
    if not brief:
        pairs += [asked(rng, scene) for _ in range(rng.randint(1, 3))]
    messages: list[dict] = []
    if not brief and rng.random() < 0.6:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for number, (question, reply) in enumerate(pairs):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        messages.append({"role": "user", "content": question if number else parts})
        messages.append({"role": "assistant", "content": reply})
    return {"messages": messages}, "\n".join(text for pair in pairs for text in pair)


def text(rng: Random) -> str:
    """A JSON list of things on shelves, and the same facts in prose, from which the model learns JSON."""
    records, prose = [], []
    for _ in range(rng.randint(1, 3)):
        item, color, size = rng.choice(list(PLURALS)), rng.choice(list(COLORS)), rng.choice(list(SIZES))
        shelf, box, shape = rng.randint(1, 4), rng.randint(1, 4), rng.choice(SHAPES)
        record, said = rng.choice(
            (
                (
                    {"item": item, "color": color, "size": size, "shelf": shelf},
                    f"A {size} {color} {item} is on shelf {shelf}.",
                ),
                ({"sign": shape, "box": box, "color": color}, f"Box {box} has a {color} {shape}."),
                (
                    {"size": size, "item": item, "row": shelf, "box": box},
                    f"A {size} {item} is in row {shelf}, box {box}.",
                ),
                ({"column": box, "title": item, "shape": shape}, f"Column {box} has {item} and {shape}."),
            )
        )
        records.append(record)
        prose.append(said)
    return f"{json.dumps(records)}\n{' '.join(prose)}"


def write_rows(work: Path, seed: int, stage: Stage) -> list[str]:
    """Write chats.jsonl and texts.jsonl. Returns the words of the first rows, for the tokenizer."""
    work.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    known = {line["messages"][1]["content"][0]["image"] for file in make() for line in map(json.loads, file)}
    words = []
    with (work / "chats.jsonl").open("w", encoding="utf-8", newline="\n") as out:
        for _ in range(stage.chats):
            row, said = chat(rng, stage, known)
            out.write(json.dumps(row) + "\n")
            words.append(said)
    texts = [text(rng) for _ in range(stage.texts)]
    with (work / "texts.jsonl").open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps({"text": written}) + "\n" for written in texts)
    return words[:TOKENIZER_ROWS] + texts[: TOKENIZER_ROWS // 4]


def architecture(tokenizer: Path) -> dict[str, Any]:
    """The config of a small Qwen2.5-VL."""
    from transformers import AutoTokenizer

    start, image, end, video = AutoTokenizer.from_pretrained(tokenizer).convert_tokens_to_ids(list(PLACEHOLDERS))
    tokens = {
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(TURN_END),
        "pad_token_id": SPECIAL.index(END_OF_TEXT),
    }
    text = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": SPREAD,
        "vocab_size": VOCABULARY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        **tokens,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "out_hidden_size": text["hidden_size"],
        "initializer_range": SPREAD,
    }
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
        "vision_start_token_id": start,
        "image_token_id": image,
        "vision_end_token_id": end,
        "video_token_id": video,
    }


def write_processor(folder: Path) -> None:
    """The settings of the image processor: images of any size, with 4 to 16 tokens."""
    side = (PATCH * MERGED) ** 2
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGED,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * side, "longest_edge": 16 * side},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def pretrain(work: Path, tokenizer: Path, start: Path | None) -> dict[str, float]:
    """Train all parameters, vision encoder and projector too, with fxtune. `start`: the folder of the first
    weights; None: random weights. Returns the run's last figures."""
    from fxtune.checkpoint.manager import CheckpointConfig
    from fxtune.config.root import Config, RunConfig, TrainConfig
    from fxtune.data.config import DataConfig, SourceConfig
    from fxtune.models.load import DType, Init, ModelConfig
    from fxtune.optim.config import OptimizerConfig
    from fxtune.optim.schedule import ScheduleConfig
    from fxtune.training import trainer

    model = ModelConfig(path=str(start), tokenizer=str(tokenizer), dtype=DType.float32)
    if start is None:
        model = replace(model, path=None, init=Init.random, architecture=architecture(tokenizer))
    config = Config(
        run=RunConfig(name="tiny-vision", dir=str(work / "run"), seed=SEED),
        model=model,
        data=DataConfig(
            sources=[SourceConfig(path=str(work / "chats.jsonl")), SourceConfig(path=str(work / "texts.jsonl"))],
            eval_fraction=0.01,
            sequence_length=CONTEXT,
        ),
        train=TrainConfig(epochs=1, micro_batch_size=4, global_batch_size=4, eval_every=500, log_every=20),
        optimizer=OptimizerConfig(lr=1e-3, lr_vision=1e-3, weight_decay=0.1, betas=[0.9, 0.95]),
        schedule=ScheduleConfig(warmup_steps=0.05, min_lr_ratio=0.02),
        checkpoint=CheckpointConfig(every=250, keep=1, keep_best=False),
    )
    config.techniques.lora.enabled = False
    return trainer.run(config)


README = """\
# tiny-vision

A Qwen2.5-VL of {parameters:,} parameters ({layers} layers, hidden size {hidden}, {vocabulary} byte-level BPE tokens,
{context} positions; a token of an image is {pixels} x {pixels} pixels) that fxtune pre-trained from random weights, so that a
newcomer can fine-tune a real vision model on a CPU, without a hub and an account. It tells in English which coloured shapes
are in a small picture, and answers questions about them. It knows nothing else.

Made by `python scripts/make/make_vision_base.py`: {rows:,} rows from a generator (seed {seed}), no downloaded picture or text.
Full-parameter training with fxtune, vision encoder and projector too, in {stages} stages, float32, then stored as bfloat16. Loss on the
held-out 1 % of the last stage: {loss:.4f} (perplexity {perplexity:.2f}). Its steps took {minutes:.0f} minutes on {machine},
which other jobs shared, torch {torch}.

Chat markup: `<|im_start|>role`, a newline, the content, `<|im_end|>`; the template marks what the assistant writes with
`{{% generation %}}`. Licence: Apache-2.0, like the code.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "tiny-vision", help="working folder (default: %(default)s)"
    )
    work = parser.parse_args().work
    start, tokenizer = None, work / "stage-0" / "tokenizer"
    for number, stage in enumerate(STAGES):
        folder = work / f"stage-{number}"
        words = write_rows(folder, SEED + number, stage)
        if start is None:
            train_tokenizer(words, tokenizer, VOCABULARY, PLACEHOLDERS, TEMPLATE)
            write_processor(tokenizer)
        figures = pretrain(folder, tokenizer, start)
        start = folder / "run" / "model"
    rows = sum(stage.chats + stage.texts for stage in STAGES)
    ship(folder, tokenizer, ASSET, LIMIT, README, figures, rows=rows, stages=len(STAGES), pixels=PATCH * MERGED)


if __name__ == "__main__":
    main()
