# ruff: noqa: SIM905  # word lists are read, and edited, as words
"""Orders to a small shop: the words and sentences that make_base.py, make_quickstart.py and make_preferences.py share.

Everything is drawn from a `random.Random`, so a seed fixes every byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = """Adam Agnes Aisha Akira Albert Alice Alina Amara Amina Anders Andrea Anna Anton Ariel Arjun Arthur Astrid Aurora
Beatrice Ben Bianca Boris Bruno Camila Carla Carlos Carmen Cecilia Chloe Clara Colin Daniel Daphne David Deniz Diana Diego
Dora Edgar Edith Elena Elias Elif Elsa Emil Emma Erik Esther Eva Fatima Felix Fiona Flora Frida Gabriel George Gloria
Grace Greta Gustav Hana Hannah Harold Hassan Helen Henry Hugo Ibrahim Ida Igor Ines Ingrid Irene Isaac Ivan Jack Jana Jasper
Jin Joan Jonas Jorge Josef Julia Kai Kamal Karin Karl Kate Kenji Kira Klara Lara Laura Leila Lena Leo Liam Lina Linus Liv
Louis Lucas Lucy Luis Magda Maja Marco Maria Marta Martin Matilda Max Maya Mei Mia Miguel Mila Mina Miriam Mona Nadia
Naomi Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Paula Pedro Petra Philip Priya Rafael Ravi Rebecca Rita Robert
Rosa Ruben Ruth Sam Samira Sara Sean Selma Sergei Silvia Simon Stella Sven Tamara Tara Theo Thomas Tina Tom Ulla Umar
Uma Vera Victor Viola Walter Wanda Wei William Yara Yusuf Yvonne Zara Zoe""".split()
CITIES = """Aarhus Accra Amman Ankara Athens Austin Bamako Bergen Berlin Bern Bilbao Bogota Bonn Boston Bremen Bristol Bruges
Cadiz Cairo Calgary Cardiff Chicago Cork Dakar Dallas Delhi Denver Derby Dresden Dublin Durban Essen Fargo Florence
Geneva Genoa Ghent Glasgow Graz Haifa Halifax Hamburg Hanoi Helsinki Houston Ithaca Izmir Jakarta Kassel Kiel Kigali Krakow
Kyoto Lagos Leeds Leipzig Lima Linz Lisbon London Luanda Lyon Madrid Malmo Manila Memphis Miami Milan Monaco Montreal
Munich Nairobi Naples Nice Odense Osaka Oslo Ottawa Oxford Palermo Paris Perth Pisa Porto Prague Quito Rabat Riga Rome
Salem Seattle Seoul Seville Sofia Split Sydney Tampa Tartu Tokyo Toledo Toronto Trieste Tunis Turin Utrecht Valencia Venice
Vienna Vilnius Warsaw Windsor York Zagreb Zurich""".split()
PLURALS = dict(
    pair.split(":")
    for pair in """lamp:lamps chair:chairs table:tables cup:cups plate:plates bowl:bowls spoon:spoons
book:books pen:pens pencil:pencils notebook:notebooks candle:candles pillow:pillows blanket:blankets towel:towels
basket:baskets box:boxes bottle:bottles jar:jars kettle:kettles clock:clocks mirror:mirrors rug:rugs curtain:curtains
scarf:scarves hat:hats glove:gloves coat:coats shirt:shirts sock:socks belt:belts bag:bags umbrella:umbrellas
bike:bikes helmet:helmets rope:ropes tent:tents bench:benches shelf:shelves brush:brushes bucket:buckets ladder:ladders
hammer:hammers vase:vases drum:drums flute:flutes guitar:guitars kite:kites ball:balls puzzle:puzzles""".split()
)
COLORS = "red blue green yellow black white brown grey orange purple pink silver".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COUNTS = "zero one two three four five six seven eight nine ten eleven twelve".split()

GREETINGS = ("", "", "", "Hello! ", "Hi, ", "Good morning! ", "Good evening. ", "Dear shop, ")
THANKS = ("", "", "", "", " Thank you!", " Many thanks.", " Best wishes.", " Please confirm.")
# Every order has {who}, {where} and {what} ("three red lamps").
MESSAGES = (
    "{who} from {where} ordered {what}.",
    "this is {who} from {where}. Please send me {what}.",
    "my name is {who} and I live in {where}. I would like {what}.",
    "I need {what}. Ship to {where}. Name: {who}.",
    "could you send {what} to {who} in {where}?",
    "please deliver {what} to {where}. The name is {who}.",
    "we want {what} in {where}, for {who}.",
    "{what} for {who}, {where}.",
    "{who} here. I want to buy {what}. My city is {where}.",
    "in {where}, {who} is waiting for {what}.",
    "I am {who}. Can I get {what}? I live in {where}.",
    "{who} in {where} asks for {what}.",
)
# How a clerk answers an order. {when} is one of whens(), or empty.
REPLIES = (
    "Thank you, {name}! Your {goods} will be in {city}{when}.",
    "Of course, {name}. We will send {goods} to {city}{when}.",
    "Dear {name}, {goods} will leave for {city}{when}.",
    "With pleasure! {goods} for {name} in {city}{when}.",
)


def draw_when(rng: Random) -> str:
    """When an order arrives or leaves, as {when} of REPLIES."""
    return rng.choice((" soon", f" on {rng.choice(DAYS)}", "", " today"))


@dataclass(frozen=True)
class Order:
    """The order of one customer."""

    name: str
    city: str
    item: str
    color: str
    quantity: int

    def what(self, rng: Random) -> str:
        """The goods in words: "three red lamps" or "3 red lamps", "a red lamp" or "one red lamp"."""
        if self.quantity == 1:
            article = "an" if self.color[0] in "aeiou" else "a"
            return f"{rng.choice((article, 'one', '1'))} {self.color} {self.item}"
        written = COUNTS[self.quantity] if self.quantity < len(COUNTS) and rng.random() < 0.6 else str(self.quantity)
        return f"{written} {self.color} {PLURALS[self.item]}"

    def answer(self, reply: str, when: str) -> str:
        """One of REPLIES to this order."""
        noun = self.item if self.quantity == 1 else PLURALS[self.item]
        goods = f"{self.quantity} {self.color} {noun}"
        return reply.format(name=self.name, goods=goods, city=self.city, when=when)

    def message(self, rng: Random) -> str:
        """The order in the customer's words."""
        text = rng.choice(MESSAGES).format(who=self.name, where=self.city, what=self.what(rng))
        greeting = rng.choice(GREETINGS)
        if not greeting or greeting.rstrip()[-1] in "!.":
            text = text[0].upper() + text[1:]
        return greeting + text + rng.choice(THANKS)


def draw_quantity(rng: Random) -> int:
    return rng.randint(1, 12) if rng.random() < 0.8 else rng.randint(13, 99)


def draw_order(rng: Random, names: list[str], cities: list[str]) -> Order:
    """One order by somebody in `names` who lives in one of `cities`."""
    quantity = draw_quantity(rng)
    return Order(rng.choice(names), rng.choice(cities), rng.choice(list(PLURALS)), rng.choice(COLORS), quantity)
