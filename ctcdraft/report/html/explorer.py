"""The alignment explorer: answers whose every token says how it came, and behind each token the pass it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.tracing.records import Trace, TraceAnswer, TraceStep
from ctcdraft.evaluation.tracing.rejection_reason import REASONS, rejection_reason
from ctcdraft.report.html.markup import Html, bullets, html_table, join_html, tag
from ctcdraft.report.html.one_pass import TokenLabels, step_panel

PREFILL, BONUS = "prefill", "bonus"


def explorer_section(seen: Trace | None) -> Html:
    if seen is None or not seen.answers:
        return join_html([tag("p", "No answer was looked into here; explorer.questions=3 looks into three.")])
    labels, answers = TokenLabels(seen.words), sorted_answers(seen)
    chosen = most_informative(answers)
    panels = [answer_panel(number, one, labels, number == chosen) for number, one in enumerate(answers)]
    return join_html([introduction(), reasons_table(seen.answers), *panels])


def sorted_answers(seen: Trace) -> list[TraceAnswer]:
    """Autoregression's own come last: they hold no draft to look at."""
    return sorted(seen.answers, key=lambda one: one.contestant == AUTOREGRESSIVE)


def most_informative(answers: Sequence[TraceAnswer]) -> int:
    """Return the place of the first answer in which a draft token was rejected; of the first one where none was."""
    return max(range(len(answers)), key=lambda number: any(map(has_rejected_token, answers[number].passes)))


def initial_step(passes: Sequence[TraceStep]) -> int | None:
    """Return the place of the pass to show before a token is chosen: one with a rejected draft token if there is any,
    and of those the first one that accepted most."""
    return max(
        range(len(passes)), key=lambda at: (has_rejected_token(passes[at]), len(passes[at].accepted)), default=None
    )


def has_rejected_token(step: TraceStep) -> bool:
    """Whether a draft token stood behind the last accepted node, and the base's token was another."""
    return step.path[-1] in step.parents and step.committed == len(step.path)


def introduction() -> Html:
    legend = join_html(
        [
            tag("span", "first word, said by the prefill", class_="token", data_depth=PREFILL),
            tag("span", "the base's own word (bonus)", class_="token", data_depth=BONUS),
            *(tag("span", f"drafted at depth {k}", **token_attributes(str(k))) for k in (1, 2, 3, 4)),
        ],
        " ",
    )
    return join_html(
        [
            tag(
                "p",
                "Choose a token to see the pass it came from: what the frames said, the texts they were read as, the "
                "tree, what the base said, and why the draft died. \N{GREEK SMALL LETTER EPSILON} is the blank, "
                "\N{OPEN BOX} a space within a word, \N{MIDDLE DOT} a frame that may say anything, \N{CHECK MARK} a "
                "guess that stood. The arrow keys go from pass to pass. These answers were decoded once more, untimed, "
                "after all that was measured: the first turns of a few questions, and of long answers the beginning.",
            ),
            tag("p", legend, class_="legend"),
        ]
    )


def token_attributes(depth: str) -> dict[str, str]:
    """How a token is coloured: by its depth, the deeper the stronger."""
    looks = {"class_": "token", "data_depth": depth}
    return looks | ({"style": f"--depth:{min(int(depth), 8)}"} if depth.isdigit() else {})


def reasons_table(answers: Sequence[TraceAnswer]) -> Html:
    """How often drafts died of what, a row a contestant."""
    counts = {
        name: Counter(rejection_reason(step) for one in answers if one.contestant == name for step in one.passes)
        for name in dict.fromkeys(one.contestant for one in answers)
    }
    drafted = {name: found for name, found in counts.items() if set(found) - {"no draft", "all accepted"}}
    if not drafted:
        return Html("")
    kinds = [kind for kind in REASONS if any(found[kind] for found in drafted.values())]
    rows = [[name, str(found.total()), *(str(found[kind]) for kind in kinds)] for name, found in drafted.items()]
    meaning = bullets(join_html([tag("b", kind), f": {REASONS[kind]}"]) for kind in kinds)
    return join_html([tag("h3", "What drafts died of"), html_table(["drafter", "passes", *kinds], rows), meaning])


def answer_panel(number: int, answer: TraceAnswer, labels: TokenLabels, open_: bool) -> Html:
    """One answer: its tokens to the left, to the right the chosen pass, or else the one it opens with."""
    tau = "" if answer.tau is None else f", tau {answer.tau:.2f}"
    title = f"{answer.contestant} on {answer.id} ({answer.category}): {len(answer.passes)} passes{tau}"
    first = initial_step(answer.passes)
    panels = [
        step_panel(f"a{number}p{place}", place, step, labels, place == first)
        for place, step in enumerate(answer.passes)
    ] or [tag("p", "The prefill gave the whole answer.")]
    prompt = tag("details", tag("summary", "the question"), tag("p", answer.prompt, class_="said"))
    answer_text = tag("p", *token_links(number, answer), class_="said answer")
    both = tag("div", tag("div", prompt, answer_text), tag("div", *panels, class_="passes"), class_="two")
    return tag("details", tag("summary", title), both, class_="explored", open=open_)


def token_links(number: int, answer: TraceAnswer) -> list[Html]:
    """Every token of the answer once, with how it came and a link to its pass."""
    made = [tag("span", visible_piece(answer.pieces[0]), **token_attributes(PREFILL))]
    place = 1
    for index, step in enumerate(answer.passes):
        for depth in range(1, step.committed + 1):
            origin = str(depth) if depth <= len(step.accepted) else BONUS
            made.append(
                tag("a", visible_piece(answer.pieces[place]), href=f"#a{number}p{index}", **token_attributes(origin))
            )
            place += 1
    return made


def visible_piece(text: str) -> str:
    """What a token shows; one that holds a part of a character only, or nothing to see, shows a mark."""
    return text or "\N{DOTTED CIRCLE}"
