"""Ollama: GGUF files with a Modelfile, so that a model answers as it was trained.

Newer versions of Ollama run the Jinja template of the GGUF file. A TEMPLATE in the Modelfile has priority; without a
TEMPLATE, Ollama may choose a similar template that it knows. So the Modelfile has a TEMPLATE if fixed texts before and
after each message, by its role, reproduce the chat template exactly. Ollama's default repetition penalty changes
answers, so the Modelfile switches it off. Adapters are always merged for Ollama.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import ClassVar

from fxtune.errors import ConfigError
from fxtune.outputs.targets.gguf import IMAGES, GgufTarget
from fxtune.outputs.targets.source import Source

CONTENTS = (" one ", " two ", " three ", " four ")
"""Contents of test messages. A chat template that removes the spaces has no exact TEMPLATE."""
QUOTES = '"""'
TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options of a generation config that Ollama supports."""
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""transformers' defaults for sampling options that a generation config lacks. Ollama's defaults differ."""
OPTIONS = {"repetition_penalty": "repeat_penalty"}
"""Ollama's names for sampling options, where they differ."""


class OllamaTarget(GgufTarget):
    name: ClassVar[str] = "ollama"
    reads: ClassVar[set[str]] = {"quantize", "llama_cpp"}

    def check(self) -> None:
        if QUOTES in (self.source.data.system or ""):
            raise ConfigError(f"data.system holds {QUOTES}, which ends a text of a Modelfile. Use --to gguf.")
        if bad := [word for end in self.source.ends if '"' in (word := self.source.tokenizer.decode([end]))]:
            raise ConfigError(f"eos_token_id: the end token {bad[0]} has a quote, which ends its text. Use --to gguf.")
        super().check()

    def _write_files(self, staging: Path, scratch: Path) -> None:
        super()._write_files(staging, scratch)
        text = modelfile(self.source, self.names[self.types[0]], (staging / IMAGES).exists())
        (staging / "Modelfile").write_text(text, encoding="utf-8")

    def _command(self, file: Path) -> str:
        name = shlex.quote(self.source.title)
        return f"ollama create {name} -f {shlex.quote(str(file.with_name('Modelfile')))} && ollama run {name}"


def modelfile(source: Source, file: str, images: bool) -> str:
    """The text of the Modelfile for the GGUF file `file`. `images`: whether the model reads images."""
    lines = [f"FROM ./{file}", *[f"FROM ./{IMAGES}"] * images]
    if (template := go_template(source)) is None:
        lines.append(
            "# Its chat template has no exact TEMPLATE: use an Ollama that runs the Jinja template of the file, and "
            f"give requests these variables: {json.dumps(source.data.chat_template_kwargs or {})}"
        )
    else:
        lines.append(f'TEMPLATE """{template}"""')
    if source.data.system:
        lines.append(f'SYSTEM """{source.data.system}"""')
    lines += [f'PARAMETER stop "{source.tokenizer.decode([end])}"' for end in source.ends]
    found, sampling = source.generation, {"temperature": 0}  # a run answers its questions greedily
    if found.get("do_sample"):
        sampling = SAMPLING | {name: found[name] for name in TAKEN if found.get(name) is not None}
    options = {"num_ctx": source.length, "repetition_penalty": 1.0, **sampling}
    lines += [f"PARAMETER {OPTIONS.get(name, name)} {value}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def go_template(source: Source) -> str | None:
    """A template for Ollama that writes the same text as the chat template; None if fixed texts before and after the
    content of each role do not reproduce the chat template."""
    tokenizer, variables = source.tokenizer, source.data.chat_template_kwargs or {}

    def written(*roles: str, prompt: bool = False) -> str:
        chat = [{"role": role, "content": content} for role, content in zip(roles, CONTENTS, strict=False)]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **variables))

    def around(text: str, before: str, content: str, behind: str = "") -> tuple[str, str]:
        """The texts around `content` in `text`, without `before` and `behind`. Raises ValueError."""
        if not (text.startswith(before) and text.endswith(behind) and len(text) >= len(before + behind)):
            raise ValueError
        left, right = text[len(before) : len(text) - len(behind)].split(content)
        return left, right

    first, second, third, _ = CONTENTS
    try:
        asked, answered, again = (written(*("user", "assistant", "user")[:turns]) for turns in (1, 2, 3))
        assistant, user = around(answered, asked, second), around(again, answered, third)
        start, _ = around(asked, "", user[0] + first + user[1])
        system = around(written("system", "user"), start, first, user[0] + second + user[1])
        prompt = written("user", prompt=True).removeprefix(asked)
        whole = zip((system, user, assistant, user), CONTENTS, strict=True)
        expected = start + "".join(before + content + after for (before, after), content in whole) + prompt
        if written("system", "user", "assistant", "user", prompt=True) != expected:
            return None
    except Exception:  # noqa: BLE001  a template is foreign code and can raise anything
        return None
    if start == tokenizer.bos_token and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        start = ""  # the server adds the BOS token
    roles = {"system": system, "user": user, "assistant": assistant}
    cases = [f'if eq .Role "{role}" }}}}{left}{{{{ .Content }}}}{right}' for role, (left, right) in roles.items()]
    parts = (start, "".join(map("".join, roles.values())), prompt)
    if any("{{" in part or '"""' in part for part in parts):
        return None
    return f"{start}{{{{ range .Messages }}}}{{{{ {'{{ else '.join(cases)}{{{{ end }}}}{{{{ end }}}}{prompt}"
