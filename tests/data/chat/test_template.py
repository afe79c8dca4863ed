"""What a chat template may do, and the forms in which it takes messages."""

from __future__ import annotations

import pytest
from support import families

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.template import ChatTemplate
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.formats.values import RowError
from fxtune.errors import DataError

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


def test_a_function_that_no_template_has_is_said_once_and_no_row_is_blamed() -> None:
    with pytest.raises(DataError, match=r"calls now\(\), .*strftime_now") as caught:
        ChatTemplate("{{ now() }}" + PLAIN, {}, SPECIAL).render(CHAT)
    assert not isinstance(caught.value, RowError)


def test_a_reason_that_a_template_gives_ends_without_its_full_stop() -> None:
    with pytest.raises(RowError, match=r"refuses this conversation: No such role$"):
        ChatTemplate(PLAIN + "{{ raise_exception('No such role.') }}", {}, SPECIAL).render(CHAT)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% for m in messages %}{{ m.content.__class__.__mro__ }}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(DataError, match=r"leave its sandbox") as raised:
        ChatTemplate(attack + PLAIN, {}, SPECIAL)
    assert not isinstance(raised.value, RowError)


def test_a_template_with_a_syntax_error_names_the_line() -> None:
    with pytest.raises(DataError, match=r"does not compile: line 2: .*endfor") as raised:
        ChatTemplate("{% for m in messages %}\n{% endfo %}", {}, SPECIAL)
    assert not isinstance(raised.value, RowError)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<system>Short.<user>a<assistant>b"),
        (
            "{% for m in messages %}{{ m.role | title }}: {{ m.content }} {% endfor %}",
            "System: Short. User: a Assistant: b ",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}Rules: {{ m.content }} {% else %}"
            "{{ m.role }}: {{ m.content }} {% endif %}{% endfor %}",
            "Rules: Short. user: a assistant: b ",
        ),
        (
            "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}"
            "{% endif %}[{{ m.content }}]{% endfor %}",
            "[Short.][a][b]",
        ),
        (
            "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}.{% elif m.role == 'system' %}"
            "S {{ m.content }} {% endif %}{% endfor %}",
            "S Short. a.b.",
        ),
    ],
)
def test_developer_is_system_unless_the_template_has_words_for_it(source: str, text: str) -> None:
    turns = (("developer", "Short."), ("user", "a"), ("assistant", "b"))
    template = ChatTemplate(source, {}, [])
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    chat = FORMATS["messages"].read(row, LearnConfig())
    assert template.render(template.adapted(chat.messages))[0] == text


@pytest.mark.parametrize("family", ["harmony", "chatml"])
def test_a_developer_message_is_the_system_prompt_of_a_chat(family: str) -> None:
    tokenizer, texts = families.tokenizer(family), []
    for role in ("developer", "system"):
        turns = ((role, "Short."), ("user", "a"), ("assistant", "b"))
        row = {"messages": [{"role": role, "content": content} for role, content in turns]}
        (document,) = Encoder(tokenizer, FORMATS["messages"], system="Other.").encode([row])
        assert isinstance(document, Document), document
        texts.append(tokenizer.decode(document.ids))
    assert texts[0] == texts[1]
    assert "Short." in texts[0]
    assert "Other." not in texts[0]
