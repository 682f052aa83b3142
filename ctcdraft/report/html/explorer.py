"""The alignment explorer: traced responses in which every token links to the step that committed it.

A token is coloured by its origin: the prefill, the draft (by depth) or the base model (bonus token). A step shows its
frames, alignments, token tree and verification, and why the draft ended where it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ctcdraft.evaluation import trace as reasons
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.trace import Trace, TraceAnswer, TraceFrames, TraceStep
from ctcdraft.report.html.render import format_percent, render, visible_whitespace

PREFILL, BONUS = "prefill", "bonus"
EMPTY_TOKEN = "\N{DOTTED CIRCLE}"  # for a token that holds only part of a character
BLANK_SIGN, FREE_FRAME = "\N{GREEK SMALL LETTER EPSILON}", "\N{MIDDLE DOT}"
MAX_TOKENS_SHOWN, MAX_TEXTS, MAX_ALIGNMENTS = 4, 6, 2  # tokens of a frame, texts of a step, alignments of a text

Cell = tuple[str, float]  # a token's label and its probability
Boxes = list[tuple[list[str], float]]  # of each alignment: one label per frame, and its probability


class TokenLabels:
    """Labels of token ids in a page; a token whose text was not recorded is shown as its id."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = texts

    def __call__(self, token: int | None) -> str:
        if token is None:
            return BLANK_SIGN
        return visible_whitespace(self.texts.get(token, "")) or f"#{token}"

    def quote(self, tokens: Sequence[int]) -> str:
        return "\N{LEFT DOUBLE QUOTATION MARK}" + "".join(map(self, tokens)) + "\N{RIGHT DOUBLE QUOTATION MARK}"


def explorer_section(trace: Trace | None) -> Markup:
    """Return the section; the first response with a rejected draft token is unfolded."""
    trace = trace or Trace({}, ())
    answers, labels = sorted_answers(trace), TokenLabels(trace.token_texts)
    shown = most_informative(answers) if answers else 0
    views = [answer_view(number, answer, labels, number == shown) for number, answer in enumerate(answers)]
    kinds, counts = reason_table(answers)
    return render("explorer", answers=views, kinds={kind: reasons.REASONS[kind] for kind in kinds}, counts=counts)


def sorted_answers(trace: Trace) -> list[TraceAnswer]:
    # The baseline's responses last: they hold no draft to look at.
    return sorted(trace.answers, key=lambda answer: answer.contestant == AUTOREGRESSIVE)


def most_informative(answers: Sequence[TraceAnswer]) -> int:
    """Return the index of the first response with a rejected draft token; 0 where no token was rejected."""
    return max(range(len(answers)), key=lambda number: any(map(has_rejected_token, answers[number].passes)))


def initial_step(steps: Sequence[TraceStep]) -> int | None:
    """Return the index of the step to show first: of those with a rejected draft token, if there are any, the first
    that accepted most."""
    order = [(has_rejected_token(step), len(step.accepted)) for step in steps]
    return order.index(max(order)) if order else None


def has_rejected_token(step: TraceStep) -> bool:
    """Return whether the last accepted node had a child and the base model's token was another one."""
    # Fewer tokens are committed than the path has nodes where the response ended inside it: nothing was verified there.
    return step.path[-1] in step.parents and step.committed == len(step.path)


def reason_table(answers: Sequence[TraceAnswer]) -> tuple[list[str], list[list[str]]]:
    """Return the rejection reasons that occur, and per drafter its name, its steps and how often each reason occurs.
    Drafters that never drafted are left out."""
    counts: dict[str, Counter[str]] = {}
    for answer in answers:
        counts.setdefault(answer.contestant, Counter()).update(map(reasons.rejection_reason, answer.passes))
    undrafted = {reasons.NO_DRAFT, reasons.ALL_ACCEPTED}  # all that autoregression can have
    drafted = {name: counter for name, counter in counts.items() if set(counter) - undrafted}
    kinds = [kind for kind in reasons.REASONS if any(counter[kind] for counter in drafted.values())]
    return kinds, [[name, *map(str, (each.total(), *(each[kind] for kind in kinds)))] for name, each in drafted.items()]


def answer_view(number: int, answer: TraceAnswer, labels: TokenLabels, unfolded: bool) -> dict[str, Any]:
    """Return what the template shows of one response: its tokens, and a panel per step, of which one is visible."""
    tau = "" if answer.tau is None else f", tau {answer.tau:.2f}"
    first = initial_step(answer.passes)
    return {
        "title": f"{answer.contestant} on {answer.id} ({answer.category}): {len(answer.passes)} steps{tau}",
        "prompt": answer.prompt,
        "tokens": token_links(number, answer),
        "steps": [step_view(f"a{number}p{i}", i, step, labels, i == first) for i, step in enumerate(answer.passes)],
        "unfolded": unfolded,
    }


def token_links(number: int, answer: TraceAnswer) -> list[tuple[str, str, str | None]]:
    """Return every token of the response once: its text, its origin, and the link to its step."""
    pieces = iter(piece or EMPTY_TOKEN for piece in answer.pieces)  # an empty link could not be chosen
    links: list[tuple[str, str, str | None]] = [(next(pieces), PREFILL, None)]
    for index, step in enumerate(answer.passes):
        for depth in range(1, step.committed + 1):
            origin = str(depth) if depth <= len(step.accepted) else BONUS
            links.append((next(pieces), origin, f"#a{number}p{index}"))
    return links


def step_view(name: str, index: int, step: TraceStep, labels: TokenLabels, visible: bool = False) -> dict[str, Any]:
    """Return what the template shows of a step.

    Args:
        name: its element id, the target of its tokens' links.
        visible: whether it is shown until another step of its response is chosen.
    """
    reason, frames = reasons.rejection_reason(step), step.frames
    aligned = frames is not None and frames.is_aligned
    accepted = f"{len(step.accepted)} draft token{'' if len(step.accepted) == 1 else 's'} accepted"
    return {
        "name": name,
        "visible": visible,
        "title": f"Step {index + 1}: {accepted}, of a tree of depth {reasons.tree_depth(step)}; {reason}",
        "explanation": explain_rejection(step, reason, labels),
        "frame_tables": frame_tables(frames, step, labels) if frames is not None else [],
        "aligned": aligned,
        "alignments": alignment_rows(frames, step, labels) if frames is not None and aligned else [],
        "tree": tree_view(step, 0, labels) if len(step.tokens) > 1 else None,
        "bonus": labels.quote([step.bonus]),
        "base": ", ".join(f"{labels.quote([token])} {format_percent(p)}" for token, p in step.base),
    }


def explain_rejection(step: TraceStep, reason: str, labels: TokenLabels) -> str:
    """Return in one sentence, with its probabilities, why no more draft tokens were accepted."""
    bonus = labels.quote([step.bonus])
    if reason == reasons.NO_DRAFT:
        return f"No draft token was proposed; the base model's token is {bonus}."
    if reason == reasons.ENDED:
        return f"The response ended with {labels.quote(step.accepted)}, which was drafted."
    after = f"After {labels.quote(step.accepted or step.tokens[:1])}"
    if reason == reasons.ALL_ACCEPTED:
        return f"{after} no deeper draft token was possible; the base model added {bonus}."
    if reason == reasons.REJECTED_BY_VERIFIER:
        return f"{after} the tree held {bonus}, but rejection sampling refused it and then sampled the same token."
    if step.frames is None:
        offered = [labels.quote([step.tokens[node]]) for node in child_nodes(step, step.path[-1])[:MAX_TOKENS_SHOWN]]
        return f"{after} the tree held {', '.join(offered) or 'nothing'}; the base model's token is {bonus}."
    # The frames show whether the token itself was improbable or the tree lost it.
    predicted = reasons.forecast(step.frames, step.accepted)
    given = format_percent(predicted.token_probs.get(step.bonus, 0.0))
    gave = f"they gave the base model's token {bonus} {given}"
    if reason == reasons.MERGED_REPEAT:
        return (
            f"{after} the base model's token is {bonus} once more; the frames repeated it without a blank between, "
            f"which collapses to one token; {gave} as a further token."
        )
    if reason == reasons.EARLY_BLANK:
        return f"{after} the frames gave the end of the text {format_percent(predicted.end)}; {gave}."
    if reason == reasons.NOT_IN_TREE:
        return f"{after} the frames gave {bonus} {given}, the most of all tokens, but the tree had no node for it."
    best = format_percent(predicted.token_probs[predicted.best])
    return f"{after} the frames gave {labels.quote([predicted.best])} {best}; {gave}."


def frame_tables(frames: TraceFrames, step: TraceStep, labels: TokenLabels) -> list[tuple[str, list[str], Any, str]]:
    """Return (caption, header, rows, CSS class) of the frames; label-conditioned frames are shown once more,
    conditioned on the accepted tokens."""
    header = [f"frame {number}" for number in range(1, frames.frame_count + 1)]
    css = "frames blanks" if frames.is_aligned else "frames"
    tables = [("", header, frame_rows(frames, 0, labels), css)]
    if frames.is_conditioned:
        caption = f"and conditioned on {labels.quote(step.accepted)}:"
        tables.append((caption, header, frame_rows(frames, -1, labels), css))
    return tables


def frame_rows(frames: TraceFrames, accepted: int, labels: TokenLabels) -> list[list[Cell]]:
    """Return the most probable tokens of each frame, best first, one column per frame; below them, where the frames
    are CTC emissions, the probability of the blank. accepted: number of tokens on which the frames are conditioned."""
    columns: list[list[Cell]] = []
    for row in frames.probs[accepted]:
        ranked = sorted(zip(row, frames.tokens, strict=False), reverse=True)[:MAX_TOKENS_SHOWN]
        columns.append([(labels(token), p) for p, token in ranked])
        if frames.is_aligned:
            columns[-1].append((BLANK_SIGN, row[-1]))
    return [list(cells) for cells in zip(*columns, strict=True)]


def alignment_rows(frames: TraceFrames, step: TraceStep, labels: TokenLabels) -> list[tuple[str, float, Boxes, Boxes]]:
    """Return (text, probability that the collapsed frames begin with it, the most probable alignments that begin with
    it, those that collapse to exactly it) of the accepted text and, below it, of the tree's leaves."""
    texts = [step.accepted] if step.accepted else []
    if not frames.is_conditioned:  # conditioned frames were recorded for the accepted text alone
        texts += [text for text in leaf_paths(step) if text not in texts][: MAX_TEXTS - len(texts)]

    def boxes(alignments: Sequence[tuple[float, Sequence[int | None]]]) -> Boxes:
        count = frames.frame_count  # an alignment ends with its text: the frames after it are free
        return [([*map(labels, tokens), *[FREE_FRAME] * (count - len(tokens))], p) for p, tokens in alignments]

    rows = []
    for text in texts:
        probability, beginnings = reasons.prefix_alignments(frames, text, MAX_ALIGNMENTS)
        mark = " \N{CHECK MARK}" if text == step.accepted else ""
        exact = reasons.exact_alignments(frames, text, MAX_ALIGNMENTS)
        rows.append((labels.quote(text) + mark, probability, boxes(beginnings), boxes(exact)))
    return rows


def leaf_paths(step: TraceStep) -> list[tuple[int, ...]]:
    """Return the tokens below the root on the path to each leaf, in the order of the draft."""
    paths: list[tuple[int, ...]] = [()]  # a parent is before its children in the draft
    for token, parent in zip(step.tokens[1:], step.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [path for node, path in enumerate(paths) if node and node not in step.parents]


def child_nodes(step: TraceStep, node: int) -> list[int]:
    return [child for child, parent in enumerate(step.parents) if parent == node]


def tree_view(step: TraceStep, node: int, labels: TokenLabels) -> dict[str, Any]:
    """Return a node with its children; the base model's own token hangs below the last accepted node."""
    accepted = node in step.path
    return {
        "label": labels(step.tokens[node]) + (" \N{CHECK MARK}" if accepted and node else ""),
        "accepted": accepted,
        "children": [tree_view(step, child, labels) for child in child_nodes(step, node)],
        "bonus": labels(step.bonus) if node == step.path[-1] and step.committed == len(step.path) else None,
    }
