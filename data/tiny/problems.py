"""Word problems with worked answers, filled in from the templates of templates.py."""

import random
import re

from templates import HELD_OUT, TRAIN, Row

WOMEN = (
    "Anna Bella Carla Dora Ella Fiona Grace Hanna Iris Jane Kira Lena Mia Nora Olga Paula Rosa Sara Tina "
    "Uma Vera Wendy Yara Zoe Amy Betty Clara Emma Julia Lucy Maria Nina Ruth Sofia"
)
MEN = (
    "Adam Ben Carl David Eric Felix Greg Henry Ivan Jack Kevin Leo Mark Noah Oscar Paul Ravi Sam Tom "
    "Victor Will Yusuf Alan Bob Chris Dan Frank George Hugo James Luke Max Nick Omar Peter Tim"
)
PRONOUNS = (("she", "her", "her"), ("he", "his", "him"))
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WORDS = {
    "fruit": "apple|pear|peach/peaches|plum|lemon|banana|melon|mango/mangoes|kiwi|fig|cherry/cherries|apricot",
    "toy": "marble|toy car|doll|ball|kite|puzzle|drum|robot|train|yo-yo|card|block|teddy bear",
    "sweet": "candy/candies|cookie|mint|lollipop|chocolate|toffee|caramel",
    "bake": "muffin|cookie|bagel|pie|roll|pretzel|waffle|cupcake|bun",
    "drink": "juice|lemonade|coffee|tea|smoothie|milkshake|soda|cocoa",
    "find": "shell|stone|feather|pebble|bead|button|sticker|coin|leaf/leaves|ring|crayon|pencil",
    "flower": "rose|tulip|lily/lilies|daisy/daisies|violet|sunflower|orchid|bush/bushes",
    "vehicle": "car|bus|train|boat|truck|bike|scooter|van",
    "wear": "shirt|hat|scarf/scarves|coat|sweater|dress/dresses|jacket|belt|bag|cap",
}
SPAN = re.compile(r"(\w+)=(\d+)-(\d+)$")
BRACES = re.compile(r"\{([^{}]+)\}")


def problems(split: str, count: int, seed: int, exclude: frozenset[str] = frozenset()) -> list[dict]:
    """Return `count` problems with different question texts, spread evenly over the templates of a split.

    `exclude` holds question texts that must not come up again.
    """
    rows = {"train": TRAIN, "held_out": HELD_OUT}[split]
    rng = random.Random(f"{split}-{seed}")
    seen, made, misses = set(exclude), [], 0
    while len(made) < count:
        row = rows[(len(made) + misses) % len(rows)]
        problem = _fill(row, rng)
        if problem["question"] in seen:
            misses += 1
            if misses > 100 * count + 10_000:
                raise ValueError(f"{split} templates gave {len(made)} of {count} different questions; ask for fewer")
            continue
        seen.add(problem["question"])
        made.append(problem)
    return made


def _fill(row: Row, rng: random.Random) -> dict:
    name, draws, questions, answers, result = row
    values = _numbers(draws.split(), rng)
    scope = {**_people(rng), **_words(rng), **values}
    total = str(eval(result, {}, scope))  # our own table, never a user's text
    question, answer = _text(rng.choice(questions), scope), _text(rng.choice(answers), scope)
    return {
        "template": name,
        "question": question,
        "answer": f"{answer} The answer is {total}.",
        "result": total,
    }


def _numbers(samples_drafts: list[str], rng: random.Random) -> dict[str, int]:
    while True:
        values: dict[str, int] = {}
        holds = True
        for draw in samples_drafts:
            if span := SPAN.match(draw):
                values[span[1]] = rng.randint(int(span[2]), int(span[3]))
            elif ">" in draw:
                holds = holds and eval(draw, {}, values)
            else:
                letter, expression = draw.split("=")
                values[letter] = eval(expression, {}, values)
        if holds:
            return values


def _people(rng: random.Random) -> dict[str, str]:
    """Return two people: N, with pronouns, and M."""
    man = rng.random() < 0.5
    he, his, him = PRONOUNS[man]
    women, men = WOMEN.split(), MEN.split()
    name = rng.choice(men if man else women)
    other = rng.choice([person for person in women + men if person != name])
    return {
        "N": name,
        "M": other,
        "he": he,
        "He": he.capitalize(),
        "his": his,
        "him": him,
        "day": rng.choice(DAYS),
    }


def _words(rng: random.Random) -> dict[str, str]:
    scope = {}
    for kind, words in WORDS.items():
        singular, _, plural = rng.choice(words.split("|")).partition("/")
        scope[kind], scope[kind + "s"] = singular, plural or singular + "s"
    return scope


def _text(text: str, scope: dict) -> str:
    filled = BRACES.sub(lambda match: str(eval(match[1], {}, scope)), text)
    filled = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", filled)
    return filled[0].upper() + filled[1:]
