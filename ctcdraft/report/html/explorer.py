"""The alignment explorer: traced responses in which every token links to the step that committed it.

A token is coloured by its origin: the prefill, the draft (by depth) or the base model (bonus token).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.trace import ALL_ACCEPTED, NO_DRAFT, REASONS, Trace, TraceAnswer, TraceStep, rejection_reason
from ctcdraft.report.html.render import render
from ctcdraft.report.html.steps import TokenLabels, step_view

PREFILL, BONUS = "prefill", "bonus"
EMPTY_TOKEN = "\N{DOTTED CIRCLE}"  # for a token that holds only part of a character


def explorer_section(trace: Trace | None) -> Markup:
    """Return the section; the first response with a rejected draft token is unfolded."""
    answers = sorted_answers(trace) if trace is not None else []
    labels = TokenLabels(trace.token_texts if trace is not None else {})
    shown = most_informative(answers) if answers else 0
    views = [answer_view(number, answer, labels, number == shown) for number, answer in enumerate(answers)]
    kinds, counts = reason_table(answers)
    return render("explorer", answers=views, kinds={kind: REASONS[kind] for kind in kinds}, counts=counts)


def sorted_answers(trace: Trace) -> list[TraceAnswer]:
    """Return the baseline's responses last: they hold no draft to look at."""
    return sorted(trace.answers, key=lambda answer: answer.contestant == AUTOREGRESSIVE)


def most_informative(answers: Sequence[TraceAnswer]) -> int:
    """Return the index of the first response with a rejected draft token; 0 where no token was rejected."""
    return max(range(len(answers)), key=lambda number: any(map(has_rejected_token, answers[number].passes)))


def initial_step(steps: Sequence[TraceStep]) -> int | None:
    """Return the index of the step to show first: of those with a rejected draft token, if there are any, the first
    that accepted most."""
    return max(
        range(len(steps)),
        key=lambda index: (has_rejected_token(steps[index]), len(steps[index].accepted)),
        default=None,
    )


def has_rejected_token(step: TraceStep) -> bool:
    """Return whether the last accepted node had a child and the base model's token was another one."""
    return step.path[-1] in step.parents and step.committed == len(step.path)


def reason_table(answers: Sequence[TraceAnswer]) -> tuple[list[str], list[list[str]]]:
    """Return the rejection reasons that occur, and per drafter its name, its steps and how often each reason occurs.
    Drafters that never drafted are left out."""
    counts: dict[str, Counter[str]] = {}
    for answer in answers:
        counts.setdefault(answer.contestant, Counter()).update(map(rejection_reason, answer.passes))
    drafted = {name: counter for name, counter in counts.items() if set(counter) - {NO_DRAFT, ALL_ACCEPTED}}
    kinds = [kind for kind in REASONS if any(counter[kind] for counter in drafted.values())]
    return kinds, [
        [name, str(counter.total()), *(str(counter[kind]) for kind in kinds)] for name, counter in drafted.items()
    ]


def answer_view(number: int, answer: TraceAnswer, labels: TokenLabels, unfolded: bool) -> dict[str, Any]:
    """Return what the template shows of one response: its tokens, and a panel per step of which one is visible."""
    tau = "" if answer.tau is None else f", tau {answer.tau:.2f}"
    first = initial_step(answer.passes)
    return {
        "title": f"{answer.contestant} on {answer.id} ({answer.category}): {len(answer.passes)} steps{tau}",
        "prompt": answer.prompt,
        "tokens": token_links(number, answer),
        "steps": [
            step_view(f"a{number}p{index}", index, step, labels, index == first)
            for index, step in enumerate(answer.passes)
        ],
        "unfolded": unfolded,
    }


def token_links(number: int, answer: TraceAnswer) -> list[tuple[str, str, str | None]]:
    """Return every token of the response once: its text, its origin, and the link to its step."""
    pieces = iter(piece or EMPTY_TOKEN for piece in answer.pieces)
    links: list[tuple[str, str, str | None]] = [(next(pieces), PREFILL, None)]
    for index, step in enumerate(answer.passes):
        for depth in range(1, step.committed + 1):
            origin = str(depth) if depth <= len(step.accepted) else BONUS
            links.append((next(pieces), origin, f"#a{number}p{index}"))
    return links
