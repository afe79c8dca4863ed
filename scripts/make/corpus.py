# ruff: noqa: SIM905  # word lists are read, and edited, as words
"""Generates the corpus that the tiny base model is pre-trained on. Nothing is downloaded; a seed fixes every byte.

Twelve kinds of documents teach what an adapter later builds on: sentences that follow from each other, reading a word in one
place and writing it in another (also between quotes, where its tokens differ), counting, the look of JSON, and the turns
of a chat, where orders to a shop are answered with friendly prose. An order answered with JSON is not among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from shop import CITIES, COLORS, COUNTS, DAYS, NAMES, PLURALS, REPLIES, draw_order, draw_when

ONSETS = "b br c ch d dr h j k kl l m n pr qu r s sk st t th tr v w y".split()
VOWELS = "a a a e e e i i o o u ai ea ia io ou".split()
CODAS = "n r s l m k d nd rth x".split()
ROOMS = "kitchen garden cellar attic library office workshop hall barn stable tower harbour market station".split()
FEELINGS = "happy tired curious proud quiet hungry cheerful worried calm busy".split()
SYSTEMS = (
    "You are a friendly shop clerk.",
    "You are a helpful assistant.",
    "Answer with one sentence.",
    "Be brief.",
    "Answer the customer politely.",
    "Answer with the facts.",
)


def invent(rng: Random) -> str:
    """A word that is in no list, so that the model cannot copy it from memory."""
    word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3)))
    return word + rng.choice(CODAS) if rng.random() < 0.6 else word


def person(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else invent(rng).capitalize()


def place(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else invent(rng).capitalize()


def thing(rng: Random, count: int) -> str:
    """A noun, singular or plural for `count`."""
    if rng.random() < 0.8:
        singular = rng.choice(list(PLURALS))
        return singular if count == 1 else PLURALS[singular]
    return invent(rng) + ("" if count == 1 else "s")


def counted(rng: Random, count: int, noun: str) -> str:
    return f"{COUNTS[count] if count < len(COUNTS) and rng.random() < 0.6 else count} {noun}"


def turns(rng: Random, *pairs: tuple[str, str], system: float = 0.6) -> str:
    """A chat in the markup of the tokenizer's template. `system`: the probability of a system turn."""
    text = f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n" if rng.random() < system else ""
    for user, assistant in pairs:
        text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"
    return text.rstrip("\n")  # the last end-of-turn token ends the document


def story(rng: Random) -> str:
    a, b, home, away = person(rng), person(rng), place(rng), place(rng)
    color, count, room = rng.choice(COLORS), rng.randint(2, 12), rng.choice(ROOMS)
    noun = thing(rng, count)
    first = rng.choice(
        (
            f"{a} lived in {home}, near the {room}.",
            f"Once {a} from {home} worked in a {room}.",
            f"In {home} there was a {room}, and {a} loved it.",
        )
    )
    middle = rng.choice(
        (
            f"On {rng.choice(DAYS)} {b} came from {away} with {counted(rng, count, noun)}.",
            f"One day {a} found {counted(rng, count, noun)}, all {color}, and wrote to {b} in {away}.",
            f"{b}, who lived in {away}, sent {counted(rng, count, color + ' ' + noun)} to {a}.",
        )
    )
    speech = rng.choice(
        (
            f'"{a}!" said {b}. "Is it far from {home} to {away}?"',
            f'The box said "{a}" and below it "{home}".',
            f'"{noun.capitalize()}!" said {a}. "How {color}!"',
            f'{b} read the label aloud: "{a}, {home}, {count} {noun}".',
            f'"From {away} to {home}," said {b}, "with {counted(rng, count, noun)}."',
        )
    )
    last = rng.choice(
        (
            f"{a} was {rng.choice(FEELINGS)} and thanked {b}.",
            f"Then {b} went back to {away}.",
            f"They put the {noun} in the {room} of {home}.",
            f"Since that day {a} and {b} are friends.",
        )
    )
    return " ".join((first, middle, speech, last))


def chapter(rng: Random) -> str:
    """Several stories in sequence, so that late positions of a row are trained too."""
    return "\n\n".join(story(rng) for _ in range(rng.randint(3, 5)))


def label(rng: Random) -> str:
    """Prose, then the same words quoted, without the space before them."""
    lines, labels = [], []
    for _ in range(rng.randint(1, 4)):
        who, where, count = person(rng), place(rng), rng.randint(1, 12)
        noun = thing(rng, count)
        lines.append(
            rng.choice(
                (
                    f"{who} from {where} gets {counted(rng, count, noun)}.",
                    f"{counted(rng, count, noun).capitalize()} for {who} in {where}.",
                    f"In {where} lives {who}, with {counted(rng, count, noun)}.",
                )
            )
        )
        labels.append(rng.choice((f'"{who}" / "{where}" / {count}', f'Label: "{who}", "{where}", {count}')))
    return "\n".join(lines + labels)


def echo(rng: Random) -> str:
    """A list, then the same list, perhaps quoted."""
    draw = (invent, person, place, lambda r: thing(r, 1), lambda r: r.choice(COLORS), lambda r: r.choice(DAYS))
    words = [rng.choice(draw)(rng) for _ in range(rng.randint(2, 7))]
    again = [f'"{word}"' for word in words] if rng.random() < 0.6 else words
    return f"The list: {', '.join(words)}.\nThe list again: {', '.join(again)}."


def counting(rng: Random) -> str:
    singular = rng.choice(list(PLURALS))
    start, color = rng.randint(1, 9), rng.choice(COLORS)
    lines = [f"{COUNTS[n]} {singular if n == 1 else PLURALS[singular]}" for n in range(start, start + 4)]
    more = [f"{COUNTS[n]} is {n}" for n in rng.sample(range(1, 13), 3)]
    return (
        ", ".join(lines)
        + f". Each {singular} is {color}. "
        + ", ".join(more)
        + f'. One "{singular}", {rng.randint(2, 99)} "{PLURALS[singular]}".'
    )


def colors(rng: Random) -> str:
    """Who has what in which color, then the colors alone."""
    statements, asked = [], []
    for _ in range(rng.randint(2, 4)):
        who, color, noun = person(rng), rng.choice(COLORS), thing(rng, rng.randint(1, 2))
        statements.append(
            rng.choice((f"{who} has {rng.choice(('the', 'some'))} {color} {noun}.", f"The {color} {noun} of {who}."))
        )
        asked.append(rng.choice((f'{who}: "{color}".', f"{who}'s color is {color}.", f'The {noun}: "{color}".')))
    rng.shuffle(asked)
    return " ".join(statements + asked)


def records(rng: Random) -> str:
    """JSON lists, sometimes with their content in prose: this teaches reading JSON, never writing it from prose."""
    lines, prose = [], []
    for _ in range(rng.randint(1, 4)):
        who, where, count, color = person(rng), place(rng), rng.randint(1, 99), rng.choice(COLORS)
        singular, day = rng.choice(list(PLURALS)), rng.choice([*DAYS, None, None])
        record, said = rng.choice(
            (
                ({"name": who, "city": where}, f"{who} lives in {where}."),
                (
                    {"item": singular, "color": color, "quantity": count},
                    f"There are {count} {color} {PLURALS[singular]}.",
                ),
                ({"city": where, "day": day}, f"To {where} on {day}." if day else f"To {where} on any day."),
                ({"title": who, "shelf": None, "pages": count}, f"{who} has {count} pages."),
                ({"room": rng.choice(ROOMS), "color": color, "day": day}, f"It is {color}."),
            )
        )
        lines.append(json.dumps(record))
        prose.append(said)
    return "\n".join(lines + prose if rng.random() < 0.7 else lines)


def sheet(rng: Random) -> str:
    who, where, count = person(rng), place(rng), rng.randint(1, 99)
    noun, color = thing(rng, count), rng.choice(COLORS)
    return (
        f"Receipt {rng.randint(100, 999)}\nCustomer: {who}\nTown: {where}\nGoods: {count} {color} {noun}\n"
        f"Dear {who}, your {color} {noun} will leave for {where} on {rng.choice(DAYS)}."
    )


def order_chat(rng: Random) -> str:
    """An order with the answer of a clerk."""
    order = draw_order(rng, [person(rng)], [place(rng)])
    when = draw_when(rng)
    reply = order.answer(rng.choice(REPLIES), when)
    follow_ups = rng.sample(
        (
            (f"Who {rng.choice(('ordered', 'is the customer'))}?", f'The customer is "{order.name}".'),
            (f"Which {rng.choice(('town', 'city'))}?", f'The town is "{order.city}".'),
            (f"{rng.choice(('What', 'Which'))} color?", f'The color is "{order.color}".'),
            ("How many?", f"The customer wants {order.quantity}."),
            ("What is one piece called?", f'One piece is called "{order.item}".'),
        ),
        rng.randint(0, 4),
    )
    return turns(rng, (order.message(rng), reply), *follow_ups)


def facts_chat(rng: Random) -> str:
    """Facts about a few people, then questions about one of them."""
    people = [(person(rng), place(rng), rng.randint(1, 12)) for _ in range(rng.randint(2, 4))]
    owned = [thing(rng, count) for _, _, count in people]
    statements = [
        rng.choice(
            (
                f"{who} lives in {where} and has {counted(rng, count, noun)}.",
                f"In {where}, {who} owns {counted(rng, count, noun)}.",
            )
        )
        for (who, where, count), noun in zip(people, owned, strict=True)
    ]
    pairs = []
    for _ in range(rng.randint(1, 3)):
        (who, where, count), noun = rng.choice(list(zip(people, owned, strict=True)))
        pairs.append(
            rng.choice(
                (
                    (f"Where does {who} live?", f"{who} lives in {where}."),
                    (f"Who lives in {where}?", f"{who}."),
                    (f"What does {who} have?", f"{who} has {count} {noun}."),
                )
            )
        )
    pairs[0] = (" ".join(statements) + " " + pairs[0][0], pairs[0][1])
    return turns(rng, *pairs)


def copy_chat(rng: Random) -> str:
    words = [rng.choice((invent, person, place))(rng) for _ in range(rng.randint(1, 5))]
    ask, reply = rng.choice(
        (
            ("Repeat: {}", "{}"),
            ("Please say {}.", "{}"),
            ("Put {} in quotes.", "quoted"),
            ("Quote these words: {}", "quoted"),
        )
    )
    written = ", ".join(f'"{word}"' for word in words) if reply == "quoted" else ", ".join(words)
    return turns(rng, (ask.format(", ".join(words)), written))


def small_talk(rng: Random) -> str:
    who, where, feeling = person(rng), place(rng), rng.choice(FEELINGS)
    return turns(
        rng,
        rng.choice(
            (
                (f"Hello, I am {who}.", f"Hello {who}! How can I help you?"),
                (f"I am {who} and I am {feeling} today.", f"Dear {who}, it is good to be {feeling} sometimes."),
                (f"What is {where}?", f"{where} is a town with a {rng.choice(ROOMS)}."),
                ("Do you sell lamps?", f"Yes, we have lamps in {rng.choice(COLORS)} and {rng.choice(COLORS)}."),
            )
        ),
        ("Thank you!", "You are welcome!"),
    )


KINDS: dict[Callable[[Random], str], int] = {
    story: 5,
    chapter: 1,
    label: 4,
    echo: 4,
    counting: 2,
    records: 4,
    sheet: 2,
    colors: 3,
    order_chat: 10,
    facts_chat: 4,
    copy_chat: 4,
    small_talk: 1,
}
"""Each kind of document and its share."""


def documents(seed: int) -> Iterator[str]:
    """An endless sequence of documents, the same for the same seed."""
    rng = Random(seed)
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng)
