"""scripts/study/equal_preferences.py: the chat template without the newline that TRL takes for a token of an answer."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


def test_corrected_template_ends_with_the_answer_and_keeps_prompts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import equal_preferences
    from transformers import AutoTokenizer

    pair, tokenizer = equal_preferences.rows_of("dpo")[0], AutoTokenizer.from_pretrained(equal_preferences.TINY)
    turns = [*pair["prompt"], *pair["chosen"]]

    def written() -> tuple[str, str]:
        return (
            tokenizer.apply_chat_template(pair["prompt"], tokenize=False, add_generation_prompt=True),
            tokenizer.apply_chat_template(turns, tokenize=False),
        )

    before = written()
    tokenizer.chat_template = equal_preferences.without_last_newline(tokenizer.chat_template)
    after = written()
    assert after[0] == before[0]
    assert after[1] == before[1].removesuffix("\n") != before[1]
    assert after[1].startswith(after[0])
