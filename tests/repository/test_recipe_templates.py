"""The chat templates of the shipped recipes' models: a template of the same shape, and exactly what is learned with it."""

from __future__ import annotations

from typing import Any

import pytest
from support import families

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.formats.registry import FORMATS

# Shapes that tests/support/templates does not have.
PHI4 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SMOLLM3 = (
    "{% if messages[0]['role'] == 'system' %}{% set own, rest = messages[0]['content'], messages[1:] %}"
    "{% else %}{% set own, rest = 'You are a helpful assistant.', messages %}{% endif %}"
    "{{ '<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n## Custom Instructions\n\n' + own + '<|im_end|>\n' }}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ '<|im_start|>user\n' + message['content'] + '<|im_end|>\n' }}{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERS = ("it is four.", "the quick brown fox")
MODELS: dict[str, tuple[Any, str]] = {  # recipe -> tokenizer, what ends an answer
    "gemma_lora": (families.tokenizer("gemma3"), "<end_of_turn>"),
    "mistral_lora": (families.tokenizer("mistral"), "</s>"),
    "qwen3_moe_lora": (families.tokenizer("qwen3"), "<|im_end|>"),
    "gpt_oss_lora": (families.tokenizer("gptoss"), ""),
    "gpt_oss_mxfp4_lora": (families.tokenizer("gptoss"), ""),
}
for _name, _template, _special in (
    ("phi4_lora", PHI4, ("bytelevel", None, "<|im_end|>", ("<|im_start|>", "<|im_sep|>"))),
    ("deepseek_lite_lora", DEEPSEEK, ("bytelevel", "<s>", "</s>")),
    ("smollm3_lora", SMOLLM3, ("bytelevel", None, "<|im_end|>", ("<|im_start|>",))),
):
    _tokenizer = families.build_tokenizer(*_special)
    _tokenizer.chat_template = _template
    MODELS[_name] = (_tokenizer, _tokenizer.eos_token)


@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_learned_with_its_end_and_nothing_else(name):
    tokenizer, end = MODELS[name]
    encoder = Encoder(tokenizer, FORMATS["messages"])
    turns = [("user", "what is two and two?"), ("assistant", ANSWERS[0])]
    turns += [("user", "what is quick?"), ("assistant", ANSWERS[1])]
    (document,) = encoder.encode([{"messages": [{"role": role, "content": text} for role, text in turns]}])
    assert isinstance(document, Document), document
    kept = [token for token, learn in zip(document.ids, document.supervised, strict=True) if learn]
    learned = tokenizer.decode(kept)
    for answer in ANSWERS:
        assert answer + end in learned
    assert "what is" not in learned
    assert not encoder.remarks()
