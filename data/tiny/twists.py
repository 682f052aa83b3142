"""Questions unlike those the base was trained on: two problems in one, small talk with the items of another topic.

Made of the training templates and topics only. The base has memorised its answers to training questions, and a head
trained on nothing else would memorise them, too; most questions that it is used for later are unlike them.
"""

import random

import chat
import problems
from topics import TRAIN


def problem_prompts(count: int, seed: int) -> list[str]:
    """Return prompts with the facts of two problems, and the question of the second."""
    rng = random.Random(f"twists-{seed}")
    told = [row["question"] for row in problems.problems("train", 2 * count, seed=seed + 1)]
    rng.shuffle(told)
    return [twisted(first, second, rng) for first, second in zip(told[:count], told[count:], strict=True)]


def twisted(first: str, second: str, rng: random.Random) -> str:
    facts, (*others, question) = sentences(first)[:-1], sentences(second)
    facts = facts or [sentences(first)[-1]]
    mixed = [*facts, *others] if rng.random() < 0.5 else [*others, *facts]
    return " ".join([*mixed, question])


def sentences(text: str) -> list[str]:
    marked = text.replace("? ", "?\n").replace(". ", ".\n")
    return [part.strip() for part in marked.splitlines() if part.strip()]


def chat_prompts(count: int, seed: int) -> list[str]:
    """Return every topic's questions with the items of all others."""
    rng = random.Random(f"twists-{seed}")
    made: set[str] = set()
    names = sorted(TRAIN)
    for _ in range(50 * count):
        asks, about = rng.sample(names, 2)
        template = rng.choice(TRAIN[asks]["prompts"])
        if "{x}" in template and not any(f"{{{field}}}" in template for field in "abc"):
            made.add(chat._text(template, rng.choice(chat._items(TRAIN[about]))))
        if len(made) == count:
            break
    return sorted(made)
