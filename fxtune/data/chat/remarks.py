"""Remarks for the user about the documents of a source. Each is printed with the number of documents it applies to."""

from __future__ import annotations

from fxtune.data.config import OnRewritten

REASONING_REMARK = (
    "the chat template writes reasoning only in the last turns, so the reasoning of earlier turns is left out"
)
CONTENT_REMARK = "the chat template writes no text beside a tool call, so that text is left out"
REWRITTEN_REMARKS = {
    OnRewritten.split: "the chat template writes an answer otherwise once another turn follows (it drops reasoning, "
    "or ends the turn with another token), so each such question is a separate document, as in sampling "
    "(data.on_rewritten=context learns only the last question)",
    OnRewritten.context: "the chat template writes an answer otherwise once another turn follows (it drops reasoning, "
    "or ends the turn with another token), so it is context only, by data.on_rewritten=context",
}
EMPTY_REASONING_REMARK = (
    "answers without reasoning are learned with the empty block of reasoning that the chat template writes; to have "
    "the block in the prompt, as in sampling without reasoning, set the template's variable, "
    "data.chat_template_kwargs.enable_thinking=false (docs/data.md, Reasoning)"
)
PROMPT_REMARK = (
    "the chat template begins an answer otherwise in sampling than in a whole chat, so what is learned is not what "
    "will be asked; does a variable of data.chat_template_kwargs fit the reasoning of these rows?"
)
APART_REMARK = (
    "in one text, a token would lie across the border of a prompt and its answer, so the two are tokenized apart, as "
    "in sampling"
)
OTHERS_REMARK = (
    "some answers are not used: the most frequent one is learned, or by their scores the best and the worst"
)
TEXT_REMARK = "the prompt is a text and not a list of messages, so no chat template is written around it"
"""Printed only if it is true of some rows of a source, and not of all."""
CROSSED_REMARK = (
    "an answer begins inside a token of its prompt, which sampling never writes; `fxtune preview` shows where, and "
    "another character at the end of the prompt or at the beginning of the answer avoids it"
)
