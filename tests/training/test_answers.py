"""Questions and greedy answers: prompts, ends of answers, and padded batches with a cache."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from PIL import Image
from support import image_models, processors
from support.architectures import FAMILIES, built, lora, prepared_model, random_model, trained, word_tokenizer
from support.cases import slow_but
from support.sharded import run_ranks

from fxtune.data.config import DataConfig, QuestionsConfig
from fxtune.distributed.parallel import Degrees
from fxtune.errors import DataError
from fxtune.models.kinds.known import images_of
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.reports.run_files import LARGEST_PICTURE
from fxtune.settle.images import image_processor
from fxtune.techniques.attention import recurrent
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.answers import AnswerEvaluation, Question, answer, exact_match, load_questions

PROMPTS = [[5, 9, 2, 77, 31], [8], [100, 3, 3, 64, 12, 90, 41, 7, 6], [11, 12]]
TOKENIZER = word_tokenizer(eos_token="t1", unk_token="t0", pad_token="t0")


def questions(prompts=PROMPTS, end=None) -> list[Question]:
    return [Question("?", prompt, "!", end) for prompt in prompts]


def alone(model, prompt: list[int], count: int, ends: tuple[int, ...] = (1,)) -> str:
    """The reference: no batch, no padding, no cache, a full forward pass for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            chosen = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if chosen in ends:
                break
            ids.append(chosen)
    return TOKENIZER.decode(ids[len(prompt) :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "gemma3", "phi"))
def test_batched_answers_equal_single_answers(family):
    prepared = prepared_model(Pipeline(), random_model(family))
    model = prepared.module.eval()
    given = answer(prepared, TOKENIZER, questions(), batch_size=3, max_new_tokens=7)
    assert given == [alone(model, prompt, 7) for prompt in PROMPTS]
    assert len(set(given)) > 1, "the prompts must matter, or this compares nothing"


def _write_questions(folder, family: str) -> list[tuple[str, list[Image.Image]]]:
    """questions.jsonl with none to three images each, and for each question its text by the chat template of
    support.processors and its images."""
    placeholder, template = processors.FAMILIES[family]["written"], processors.tokenizer(family)
    draw, rows, written = random.Random(0), [], []
    for row, count in enumerate((1, 0, 2, 1, 3)):
        images = [
            Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
            for size in ((draw.randint(16, 60), draw.randint(16, 40)) for _ in range(count))
        ]
        for number, image in enumerate(images):
            image.save(folder / f"{row}-{number}.png")
        words = "What is it? Say more. "[: 5 + 3 * row]
        text = f"{'<image>' * (count > 0)}{words}{'<image>' * (count - 1)}"
        names = [f"{row}-{number}.png" for number in range(count)]
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
        rows.append({"messages": turns, "images": names})
        asked = [{"role": "user", "content": text.replace("<image>", placeholder)}]
        written.append((template.apply_chat_template(asked, tokenize=False, add_generation_prompt=True), images))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


IMAGE_FAMILIES = slow_but(list(processors.FAMILIES), "qwen2_5_vl", "gemma3", "idefics3")


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_batched_answers_about_images_are_those_of_plain_transformers_one_by_one(family, tmp_path):
    source = ModelConfig(path=str(processors.write_model(family, tmp_path / "model")), dtype=DType.float32)
    written = _write_questions(tmp_path, family)
    data = DataConfig(questions=QuestionsConfig(path=str(tmp_path / "questions.jsonl")))
    tokenizer = load_tokenizer(source)
    images = image_processor(source, data, tokenizer)
    asked = load_questions(data, tokenizer, images)
    prepared = prepared_model(Pipeline(), source, dtype="float32")
    model = prepared.module.eval()
    image_models.draw_for_answers(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    expected = []
    for question, (text, shown) in zip(asked, written, strict=True):
        inputs = images.processor(
            text=[text], images=[shown] if shown else None, add_special_tokens=False, return_tensors="pt"
        )
        assert inputs["input_ids"][0].tolist() == question.prompt
        ids = model.generate(**inputs, max_new_tokens=9, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        new = ids[0, len(question.prompt) :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    given = answer(prepared, tokenizer, asked, batch_size=len(asked), max_new_tokens=9, images=images)
    assert given == expected
    assert len(set(given)) > 2, "the prompts must matter, or this compares nothing"


class _DrawnImages:
    """In place of the processor: the images of a question are the tensors of a document of image_models."""

    def __init__(self, config) -> None:
        self.merge, self.rope_positions = images_of(config).merge(config), images_of(config).rope_positions(config)

    def read(self, documents):
        (document,) = documents
        return document.images


@pytest.mark.parametrize(
    "family", slow_but(list(image_models.CONFIGS), "gemma4", "qwen3_5", "llava_onevision", "mistral3")
)
def test_each_family_answers_in_a_batch_as_alone(family):
    model = image_models.model(family)
    image_models.draw_for_answers(model)
    parts = ([4, (1, 2), 5], [6], [3, (2, 2), 3, (1, 3), 6], [2, (3, 1), 17], [9])
    documents = [image_models.document(family, model, own, seed) for seed, own in enumerate(parts)]
    expected, asked = [], []
    for document in documents:
        ids = document.ids[None]
        given = {"attention_mask": torch.ones_like(ids), **document.images, **image_models.type_ids(model, ids)}
        written = model.generate(ids, **given, max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
        new = [token for token in written[0, ids.shape[1] :].tolist() if token != 1]
        expected.append(TOKENIZER.decode(new, skip_special_tokens=True).strip())
        asked.append(Question("?", document.ids.tolist(), "!", images=(document,) if document.images else ()))
    images = _DrawnImages(model.config)
    recurrent.separate(model, operators=family != "qwen3_5")
    given = answer(PreparedModel(model), TOKENIZER, asked, batch_size=5, max_new_tokens=9, images=images)
    assert given == expected
    assert len(set(given)) > 2, "the prompts must matter, or this compares nothing"


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A tiny vision model, its tokenizer and the processor of its images."""
    source = ModelConfig(path=str(processors.write_model("llava", tmp_path_factory.mktemp("vision"))))
    tokenizer = load_tokenizer(source)
    return source, tokenizer, image_processor(source, DataConfig(), tokenizer)


def _of_image(name: str, text: str = "<image>What is it?") -> dict:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "images": [name]}


def test_an_image_that_is_missing_or_broken_is_an_error_with_the_line(tmp_path, vision):
    _, tokenizer, images = vision
    Image.new("RGB", (20, 30)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    for name, reason in (("b.png", "it is no image"), ("c.png", "no such file")):
        with pytest.raises(DataError, match=rf"questions\.jsonl:2: .*{name}.*{reason}"):
            load_questions(write(tmp_path, _of_image("a.png"), _of_image(name)), tokenizer, images)
    with pytest.raises(DataError, match=r"questions\.jsonl:1: .*reads no images"):
        load_questions(write(tmp_path, _of_image("a.png")), tokenizer)


def test_an_image_that_changes_before_it_is_asked_about_is_an_error(tmp_path, vision):
    source, tokenizer, images = vision
    Image.new("RGB", (20, 30)).save(tmp_path / "a.png")
    asked = load_questions(write(tmp_path, _of_image("a.png")), tokenizer, images)
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"data\.questions: a\.png: it changed"):
        answer(prepared_model(Pipeline(), source), tokenizer, asked, images=images)


@pytest.mark.parametrize("form", ["mark", "parts", "sharegpt"])
def test_the_text_of_a_question_has_a_mark_for_each_image(tmp_path, vision, form):
    _, tokenizer, images = vision
    Image.new("RGB", (20, 30)).save(tmp_path / "a.png")
    row = _of_image("a.png")
    if form == "parts":
        row["messages"][0]["content"] = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    if form == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in row.pop("messages")]
        row["conversations"] = turns
    (question,) = load_questions(write(tmp_path, row), tokenizer, images)
    assert "<image>What is it?" in question.text
    assert question.text.count("<image>") == len(question.images) == 1
    assert "[a.png] What is it?" in question.label


def test_adapter_answers_differ_from_its_base():
    prepared = prepared_model(lora(), random_model("llama"))
    adapted = trained(prepared.module).eval()
    given = answer(prepared, TOKENIZER, questions(), max_new_tokens=6)
    assert given == [alone(adapted, prompt, 6) for prompt in PROMPTS]
    with adapted.disable_adapter():
        assert given != [alone(adapted, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("by", ["question", "tokenizer"])
def test_answer_ends_at_the_end_of_turn_token(by):
    prepared = prepared_model(Pipeline(), random_model("llama"))
    prepared.module.eval()
    words = answer(prepared, TOKENIZER, questions(PROMPTS[:1]), max_new_tokens=8)[0].split()
    end = next(index for index in range(2, 8) if words[index] not in words[:index])
    stop = int(words[end][1:])
    if by == "question":
        given = answer(prepared, TOKENIZER, questions(PROMPTS[:1], end=stop), max_new_tokens=8)
    else:
        given = answer(
            prepared, word_tokenizer(eos_token=f"t{stop}", pad_token="t0"), questions(PROMPTS[:1]), max_new_tokens=8
        )
    assert given[0].split() == words[:end]


def test_asking_questions_does_not_affect_training():
    prepared = prepared_model(lora(dropout=0.2), random_model("llama"))
    model = prepared.module
    model.train()
    row = torch.tensor([[5, 6, 7, 8]])

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(input_ids=row, labels=row, use_cache=False).loss

    before = loss(3).item()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    answer(prepared, TOKENIZER, questions(), max_new_tokens=3)
    assert torch.equal(torch.rand(3), expected), "answering drew random numbers"
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    again = loss(3)
    again.backward()
    assert again.item() == before


def test_asking_questions_compiles_nothing():
    prepared = prepared_model(Pipeline(), random_model("llama"))
    model = prepared.module
    expected = answer(prepared, TOKENIZER, questions(), max_new_tokens=4)

    def refuse(*_):
        raise AssertionError("a layer was compiled")

    for layer in model.model.layers:
        layer.compile(backend=refuse)
    assert answer(prepared, TOKENIZER, questions(), max_new_tokens=4) == expected


def test_exact_match_ignores_outer_whitespace_only():
    right = [replace(question, answer="a b") for question in questions()]
    assert exact_match([" a b\n", "a  b", "A b", "a b"], right) == 0.5


TURNS = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", " Zwei. ")]
ROWS = {
    "messages": {"messages": [{"role": role, "content": content} for role, content in TURNS]},
    "sharegpt": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": content}
            for role, content in TURNS
        ]
    },
    "prompt_completion": {
        "prompt": [{"role": role, "content": content} for role, content in TURNS[:-1]],
        "completion": [{"role": "assistant", "content": " Zwei. "}],
    },
    "preference": {
        "prompt": [{"role": role, "content": content} for role, content in TURNS[:-1]],
        "chosen": " Zwei. ",
        "rejected": "2",
    },
    "trailing_user": {
        "messages": [{"role": role, "content": content} for role, content in [*TURNS, ("user", "Three?")]]
    },
}


def write(folder, *rows) -> DataConfig:
    file = folder / "questions.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return DataConfig(questions=QuestionsConfig(path=str(file)))


@pytest.mark.parametrize("form", ROWS)
def test_prompt_is_everything_before_the_last_answer(tmp_path, form):
    tokenizer = load_tokenizer(ModelConfig())
    (question,) = load_questions(write(tmp_path, ROWS[form]), tokenizer)
    prompt = tokenizer.apply_chat_template(
        ROWS["messages"]["messages"][:-1], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(question.prompt) == prompt
    assert question.answer == "Zwei."
    assert question.end == tokenizer.convert_tokens_to_ids("<|im_end|>")
    if form in ("messages", "preference"):
        assert question.text == "Two?"


def test_questions_from_prompt_and_completion_without_template(tmp_path):
    (question,) = load_questions(
        write(tmp_path, {"prompt": "Q: one\nA:", "completion": " 1"}), load_tokenizer(ModelConfig())
    )
    assert question.answer == "1"


def test_questions_may_have_columns_that_no_one_reads(tmp_path):
    row = {"prompt": "Q: one\nA:", "completion": " 1", "hint": "count your fingers"}
    (question,) = load_questions(write(tmp_path, row), load_tokenizer(ModelConfig()))
    assert question.answer == "1"


def test_own_chat_template_forms_prompt_and_end_of_answer(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = load_tokenizer(ModelConfig())
    (question,) = load_questions(replace(write(tmp_path, ROWS["messages"]), chat_template=str(file)), tokenizer)
    assert tokenizer.decode(question.prompt).endswith("[user]Two?<|endoftext|>[assistant]")
    assert question.end == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_limit_takes_the_first_rows(tmp_path):
    data = write(tmp_path, ROWS["messages"], ROWS["messages"], '{"broken')
    data.questions.limit = 2
    assert len(load_questions(data, load_tokenizer(ModelConfig()))) == 2


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([{"text": "Once."}], DataError, "rows of format text"),
        ([ROWS["messages"], '{"messages": [\n'], DataError, "questions.jsonl:2"),
        ([ROWS["messages"], {"messages": [{"role": "user", "content": "One?"}]}], DataError, "questions.jsonl:2"),
        (
            [
                ROWS["messages"],
                {"messages": [*ROWS["messages"]["messages"][:-1], {"role": "assistant", "content": " "}]},
            ],
            DataError,
            "questions.jsonl:2",
        ),
    ],
    ids=["text", "broken", "no answer", "empty answer"],
)
def test_rows_without_question_or_answer_are_refused(tmp_path, rows, error, words):
    with pytest.raises(error, match=words):
        load_questions(write(tmp_path, *rows), load_tokenizer(ModelConfig()))


def test_resumed_run_keeps_its_first_answers(tmp_path):
    tokenizer = load_tokenizer(ModelConfig())
    data = write(tmp_path, ROWS["messages"])
    data.questions.max_new_tokens = 2
    prepared = prepared_model(Pipeline(), ModelConfig())
    score = AnswerEvaluation.open(data, tokenizer, tmp_path).ask(prepared, "before")["questions/exact_match"]
    reopened = AnswerEvaluation.open(data, tokenizer, tmp_path)
    reopened.ask(prepared, "after")
    ((text, right, before, after),) = reopened.shown()
    assert (text, right) == ("Two?", "Zwei.")
    assert before == after, "the same model answered twice"
    assert f"{score:.0%} before training, {score:.0%} after training" in reopened.verdict()

    (tmp_path / "answers_before.jsonl").write_text('{"right": ')
    assert AnswerEvaluation.open(data, tokenizer, tmp_path).shown()[0][2] is None, (
        "a file that was cut short is no answer"
    )


def test_answers_about_images_are_kept_with_small_pictures(tmp_path, vision):
    source, tokenizer, images = vision
    draw = random.Random(0)
    for name, size in (("a.png", (900, 600)), ("b.png", (20, 30))):
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(tmp_path / name)
    data = write(tmp_path, _of_image("a.png"), _of_image("b.png"), _of_image("a.png"), *[_of_image("b.png")] * 9)
    data.questions.max_new_tokens = 2
    prepared, run = prepared_model(Pipeline(), source), tmp_path / "run"
    run.mkdir()
    asked = AnswerEvaluation.open(data, tokenizer, run, images)
    asked.ask(prepared, "before")
    asked.ask(prepared, "after")
    pictures = {file.name: Image.open(file).size for file in run.glob("question_images/*.jpg")}
    first, second, third, *_ = map(json.loads, (run / "answers_after.jsonl").read_text().splitlines())
    assert first["images"] == third["images"] != second["images"]
    assert first["images"][0]["name"] == "a.png"
    sizes = [pictures[f"{row['images'][0]['digest']}.jpg"] for row in (first, second)]
    assert sizes == [(256, 171), (20, 30)]
    assert len(pictures) == 2
    assert all(file.stat().st_size < LARGEST_PICTURE for file in run.glob("question_images/*.jpg"))
    assert AnswerEvaluation.open(data, tokenizer, run, images).answers == asked.answers

    Image.new("RGB", (20, 30)).save(tmp_path / "b.png")
    assert not AnswerEvaluation.open(data, tokenizer, run, images).answers, "these are other questions"


def test_no_questions_without_a_path(tmp_path):
    assert AnswerEvaluation.open(DataConfig(), load_tokenizer(ModelConfig()), tmp_path) is None


def _with_another_head_on_rank_1(world) -> tuple[list[str], int]:
    """The answers of a rank, and its forward passes. Each rank would choose other tokens, and end elsewhere."""
    model, passes = built(Pipeline(), random_model("llama")).eval(), []
    if world.rank:
        model.lm_head.weight.data.neg_()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    world = world.divided(Degrees(shard=2))
    given = answer(PreparedModel(model), TOKENIZER, questions(), batch_size=3, max_new_tokens=7, world=world)
    return given, len(passes)


@pytest.mark.slow
def test_ranks_that_share_weights_go_on_with_the_tokens_of_one():
    model = built(Pipeline(), random_model("llama")).eval()
    expected = [alone(model, prompt, 7) for prompt in PROMPTS]
    one, other = run_ranks(2, _with_another_head_on_rank_1)
    assert one == other
    assert one[0] == expected
