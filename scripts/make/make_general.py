"""Writes the general texts on which a run measures what tuning forgets (docs/forgetting.md).

    python scripts/make/make_general.py               # rewrites fxtune/assets/data, byte for byte the same

general.jsonl has the passages below. The authors of fxtune wrote them for this file: facts, dialogues, arithmetic, program
code, letters, stories, reasoning, and sentences in four other languages. tiny_general.jsonl has documents of the generator that
the models which ship with fxtune were trained on, with another seed: those models know nothing else. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from corpus import documents

DATA = Path(__file__).resolve().parents[2] / "fxtune" / "assets" / "data"
SEED = 1
"""Another seed than the seed of the training corpus (make_base.py)."""
DOCUMENTS = 48
PASSAGES = [
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the air pressure is lower, so water boils at a lower temperature and food takes longer to cook.",
    "The Moon goes around the Earth in a little more than 27 days. It always shows us the same side, because it turns once around itself in the same time.",
    "A river begins at its source, often a spring in the hills, and ends at its mouth, where it flows into a lake or the sea. Smaller rivers that join it are called tributaries.",
    "Bees collect nectar from flowers and turn it into honey. On the way they carry pollen from one flower to another, and so help plants to make seeds.",
    "Iron rusts when it meets water and oxygen. Paint, oil or a layer of zinc keeps the air away, and the metal lasts longer.",
    "Paper was first made in China about two thousand years ago, from bark, rags and old fishing nets. Later the craft spread along trade routes to the west.",
    "The heart of a grown person beats about seventy times a minute. It pumps blood through the lungs, where it takes up oxygen, and then through the rest of the body.",
    "Sound needs something to travel through, such as air, water or steel. In empty space there is no sound. In water it travels more than four times faster than in air.",
    "Green plants take in carbon dioxide and water and use the energy of light to make sugar. They give off oxygen, which animals breathe.",
    "An island is land with water all around it. Some islands are the tops of volcanoes that rose from the floor of the sea; others were once part of a continent.",
    "Bread rises because yeast eats sugar in the dough and gives off gas. The gas makes bubbles, and the heat of the oven fixes them in the crumb.",
    "A library lends books to its readers. Each book has a number that tells where it stands on the shelves, so that it can be found again among many thousands.",
    "The equator divides the Earth into a northern and a southern half. When it is summer in one half, it is winter in the other.",
    "Glass is made from sand, soda and lime, which are melted together at great heat. While it is soft it can be blown, pressed or drawn into threads.",
    "A parliament makes the laws of a country. In most countries its members are elected for some years, and they must agree to the taxes that the government raises.",
    "Coffee and tea both contain caffeine. Coffee is made from the roasted seeds of a fruit, and tea from the dried leaves of a shrub.",
    "In chess each player begins with sixteen pieces. The game ends when a king is attacked and cannot escape; this is called checkmate.",
    "Whales are mammals. They breathe air through a hole on top of the head, feed their young with milk, and can hold their breath for more than an hour.",
    "A prime number has exactly two divisors, one and itself. The first primes are 2, 3, 5, 7, 11 and 13. There is no largest prime number.",
    "The price of a good rises when many people want it and there is little of it. When more is made, or fewer people want it, the price falls.",
    '"Did you close the window?" asked Maria. "I think so," said Peter, "but the wind is strong tonight. I will go and look again."',
    '"How far is it to the station?" "About ten minutes on foot. Go straight on, cross the bridge, and turn left after the bakery." "Thank you, that is very kind."',
    "A: I cannot find my keys. B: Where did you have them last? A: In the kitchen, I believe. B: Then look under the newspaper. A: You are right, here they are!",
    "Teacher: What is the capital of France? Student: Paris. Teacher: Correct. And which river flows through it? Student: The Seine.",
    "Customer: This lamp does not work. Clerk: I am sorry to hear that. Do you have the receipt? Customer: Yes, here. Clerk: Then I can give you a new one or your money back.",
    "Doctor: How long have you had this cough? Patient: For about a week. Doctor: Do you have a fever? Patient: No, but I sleep badly. Doctor: Let me listen to your lungs.",
    "17 + 25 = 42. 96 - 38 = 58. 7 * 8 = 56. 144 / 12 = 12.",
    "A train travels 180 kilometres in 2 hours. Its average speed is 180 / 2 = 90 kilometres per hour. In 5 hours it travels 5 * 90 = 450 kilometres.",
    "Anna has 12 apples. She gives a third of them to Tom and eats two herself. A third of 12 is 4, so she has 12 - 4 - 2 = 6 apples left.",
    "A rectangle is 6 metres long and 4 metres wide. Its area is 6 * 4 = 24 square metres, and its perimeter is 2 * (6 + 4) = 20 metres.",
    "Half of 50 is 25. A quarter of 80 is 20. Ten percent of 250 is 25. The square of 9 is 81, and the square root of 64 is 8.",
    "If 3x + 5 = 20, then 3x = 15 and x = 5. To check: 3 * 5 + 5 = 20.",
    "The sequence 1, 1, 2, 3, 5, 8, 13, 21 is named after Fibonacci. Each number is the sum of the two before it, so the next one is 34.",
    'def mean(values):\n    """Return the average of a list of numbers."""\n    return sum(values) / len(values)\n',
    "def is_even(number):\n    return number % 2 == 0\n\nfor number in range(5):\n    print(number, is_even(number))\n",
    'for (let i = 0; i < items.length; i++) {\n  total += items[i].price * items[i].count;\n}\nconsole.log("Total:", total);\n',
    "SELECT name, city FROM customers WHERE country = 'Norway' ORDER BY name LIMIT 10;",
    '#include <stdio.h>\n\nint main(void) {\n    printf("Hello, world!\\n");\n    return 0;\n}\n',
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "married": true}',
    "<ul>\n  <li>bread</li>\n  <li>milk</li>\n  <li>six eggs</li>\n</ul>\n",
    'git add notes.txt\ngit commit -m "Add the notes of the meeting"\ngit push\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n",
    "Dear Mr Lind, thank you for your letter of 3 May. We are glad to offer you the room from June to September. Please send the signed contract by the end of the month. Yours sincerely, Eva Holm",
    "Hi Sam, the meeting is moved to Thursday at two. Could you bring the figures for the last quarter? See you then, Lee",
    "Pancakes: mix 200 grams of flour with two eggs and half a litre of milk. Add a pinch of salt. Let the batter rest for twenty minutes, then fry thin cakes in butter on both sides.",
    "To change a tyre, loosen the nuts before you lift the car. Put the jack under the frame, raise the wheel from the ground, take off the nuts, and change the wheel.",
    "Yesterday it rained all day, and the children stayed at home. They built a ship from chairs and blankets and sailed to an island where nobody had to go to bed.",
    "The old man sat at the harbour and watched the boats come in. He had been at sea for forty years, and he still knew each sail by its patches.",
    "When the bell rang, the door flew open, and a small grey dog ran into the classroom. Nobody knew whose it was, but by noon it had a name.",
    "The snow fell through the silent night,\nit covered field and stone,\nand in the morning, clean and white,\na single track went home.",
    "The weather tomorrow: in the morning fog along the coast, later sunny, with highs of 18 to 21 degrees. In the evening clouds come in from the west, with some rain at night.",
    "The city council decided on Monday to close the main street to cars on weekends. Shop owners fear fewer customers; parents hope for safer ways to the playground.",
    "Rome, Madrid and Lisbon are capitals in the south of Europe. Oslo, Stockholm and Helsinki are capitals in the north.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April, May, June, July, August, September, October, November, December.",
    "The opposite of hot is cold, the opposite of early is late, and the opposite of full is empty. A kitten is a young cat, and a foal is a young horse.",
    "All birds have feathers. A penguin is a bird. Therefore a penguin has feathers, although it cannot fly.",
    "If the museum is closed on Mondays and today is Monday, then we cannot visit it today. We can go tomorrow, because it is open on Tuesdays.",
    "I went to the shop because we had no milk. Although it was late, the shop was still open. Before I paid, I remembered that we also needed bread.",
    "Der Zug nach Berlin fährt um acht Uhr von Gleis drei ab. Bitte achten Sie auf die Abstände zwischen Zug und Bahnsteig.",
    "Le matin, je bois un café et je lis le journal. Ensuite, je vais au travail à pied, car le bureau n'est pas loin.",
    "Mi hermana vive en una casa pequeña cerca del mar. Los domingos comemos juntos y hablamos de la semana.",
    "La biblioteca apre alle nove e chiude alle sei. Il lunedì resta chiusa tutto il giorno.",
    "The tenant shall pay the rent on the first day of each month. If the rent is more than ten days late, the landlord may ask for interest of four percent a year.",
    "We measured the height of forty plants for six weeks. Plants that stood in the light grew 12 centimetres on average, and plants in the shade grew 7. The difference is larger than chance would explain.",
]


def write(file: Path, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    file.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="folder for the two files (default: %(default)s)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write(out / "general.jsonl", PASSAGES)
    texts = (text for text in documents(SEED) if "<|" not in text)  # without chats, whose markup would be text
    write(out / "tiny_general.jsonl", list(islice(texts, DOCUMENTS)))
