"""Small talk by topic: prompts and short answers, filled in from the templates of topics.py."""

import random
import re

from topics import HELD_OUT, TRAIN, Topic

FIELDS = "xabc"
OPENERS = ("", "", "", "", "Sure! ", "Of course. ", "Good question. ", "Happy to help. ", "Well, ")
CLOSERS = ("", "", "", " I hope that helps.", " What do you think?")
FITTING = {
    "food": " Enjoy!",
    "travel": " Enjoy your trip!",
    "school": " Good luck!",
    "jobs": " Good luck!",
    "hobbies": " Have fun!",
    "weather": " Stay well!",
    "advice": " You can do it!",
    "animals": " Have fun with it!",
}
# These topics carry their own beginning and end, to which no general opener or closer is added.
PLAIN = {"greeting", "thanks", "stories", "roleplay", "lists", "words", "feelings"}


def prompts(split: str) -> list[dict]:
    """Return every prompt of a split's topics once, topics mixed."""
    topics = {"train": TRAIN, "held_out": HELD_OUT}[split]
    made, seen = [], set()
    for name, topic in topics.items():
        for scope in _items(topic):
            for template in topic["prompts"]:
                prompt = _text(template, scope)
                if prompt not in seen:
                    seen.add(prompt)
                    made.append({"topic": name, "prompt": prompt})
    random.Random(split).shuffle(made)
    return made


def pairs(count: int, seed: int) -> list[dict]:
    """Return up to `count` different prompts with a short answer each, from the training topics."""
    rng = random.Random(f"pairs-{seed}")
    made: dict[tuple[str, str], dict] = {}
    for _ in range(20 * count):
        name = rng.choice(list(TRAIN))
        topic = TRAIN[name]
        scope = rng.choice(_items(topic))
        prompt, answer = (_text(rng.choice(topic[part]), scope) for part in ("prompts", "answers"))
        if name not in PLAIN:
            opener = rng.choice(OPENERS)
            answer = (
                opener
                + (answer if opener[-2:] != ", " else _lower(answer))
                + rng.choice((*CLOSERS, FITTING.get(name, "")))
            )
        made[prompt, answer] = {"topic": name, "prompt": prompt, "answer": answer}
        if len(made) == count:
            break
    return list(made.values())


def _items(topic: Topic) -> list[dict[str, str]]:
    scopes = []
    for line in topic["items"]:
        scope = dict(zip(FIELDS, line.split("|"), strict=False))
        scope["the_x"] = "the " + re.sub(r"^an? ", "", scope["x"])
        scopes.append(scope | {field.upper(): text[0].upper() + text[1:] for field, text in scope.items()})
    return scopes


def _text(template: str, scope: dict[str, str]) -> str:
    filled = template.replace("\\n", "\n").format(**scope)
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", filled)


def _lower(sentence: str) -> str:
    """Return the sentence as it continues after a comma; names and `I` keep their capital."""
    first = sentence.split()[0]
    keep = first == "I" or first in {"Paris", "Rome", "London", "Tokyo", "Berlin", "New", "Lisbon", "French"}
    return sentence if keep else sentence[0].lower() + sentence[1:]
