"""Questions the base has not met: two problems told as one, small talk about what belongs to another topic.

Made of the training templates and topics only. On a question it knows the base answers by heart, and a head that
hears nothing else learns the answers instead of the base; most of what it is asked later is of this other kind.
"""

import random

import chat
import problems
from topics import TRAIN


def problem_prompts(count: int, seed: int) -> list[str]:
    """The facts of one problem before or after those of another, with the question of the second."""
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
    """Every topic's questions about the things of all the others."""
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
