"""One step of the explorer: frames, alignments, token tree and verification, and why the draft ended where it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.trace import (
    ALL_ACCEPTED,
    EARLY_BLANK,
    ENDED,
    MERGED_REPEAT,
    NO_DRAFT,
    NOT_IN_TREE,
    REJECTED_BY_VERIFIER,
    TraceFrames,
    TraceStep,
    exact_alignments,
    forecast,
    prefix_alignments,
    rejection_reason,
    tree_depth,
)
from ctcdraft.report.html.render import format_percent, visible_whitespace

BLANK_SIGN, FREE_FRAME = "\N{GREEK SMALL LETTER EPSILON}", "\N{MIDDLE DOT}"
MAX_TOKENS_SHOWN, MAX_TEXTS, MAX_ALIGNMENTS = 4, 6, 2  # tokens of a frame, texts of a step, alignments of a text

Cell = tuple[str, float] | None  # a token's label and its probability
AlignmentBoxes = tuple[list[str], float]  # one label per frame, and the probability


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


def step_view(name: str, index: int, step: TraceStep, labels: TokenLabels, visible: bool = False) -> dict[str, Any]:
    """Return what the template shows of a step.

    Args:
        name: its element id, the target of its tokens' links.
        visible: whether it is shown until another step of its response is chosen.
    """
    reason, frames = rejection_reason(step), step.frames
    accepted = f"{len(step.accepted)} draft token{'' if len(step.accepted) == 1 else 's'} accepted"
    return {
        "name": name,
        "visible": visible,
        "title": f"Step {index + 1}: {accepted}, of a tree of depth {tree_depth(step)}; {reason}",
        "explanation": explain_rejection(step, reason, labels),
        "frame_tables": frame_tables(frames, step, labels) if frames is not None else [],
        "aligned": frames is not None and frames.is_aligned,
        "alignments": alignment_rows(frames, step, labels) if frames is not None and frames.is_aligned else [],
        "tree": tree_view(step, 0, labels) if len(step.tokens) > 1 else None,
        "bonus": labels.quote([step.bonus]),
        "base": ", ".join(f"{labels.quote([token])} {format_percent(p)}" for token, p in step.base),
    }


def explain_rejection(step: TraceStep, reason: str, labels: TokenLabels) -> str:
    """Return in one sentence, with its probabilities, why no more draft tokens were accepted."""
    bonus = labels.quote([step.bonus])
    if reason == NO_DRAFT:
        return f"No draft token was proposed; the base model's token is {bonus}."
    if reason == ENDED:
        return f"The response ended with {labels.quote(step.accepted)}, which was drafted."
    after = f"After {labels.quote(step.accepted or step.tokens[:1])}"
    if reason == ALL_ACCEPTED:
        return f"{after} no deeper draft token was possible; the base model added {bonus}."
    if reason == REJECTED_BY_VERIFIER:
        return f"{after} the tree held {bonus}, but rejection sampling refused it and then sampled the same token."
    if step.frames is None:
        offered = [labels.quote([step.tokens[node]]) for node in child_nodes(step, step.path[-1])[:MAX_TOKENS_SHOWN]]
        return f"{after} the tree held {', '.join(offered) or 'nothing'}; the base model's token is {bonus}."
    predicted = forecast(step.frames, step.accepted)
    given = format_percent(predicted.token_probs.get(step.bonus, 0.0))
    gave = f"they gave the base model's token {bonus} {given}"
    if reason == MERGED_REPEAT:
        return (
            f"{after} the base model's token is {bonus} once more; the frames repeated it without a blank between, "
            f"which collapses to one token; {gave} as a further token."
        )
    if reason == EARLY_BLANK:
        return f"{after} the frames gave the end of the text {format_percent(predicted.end)}; {gave}."
    if reason == NOT_IN_TREE:
        return f"{after} the frames gave {bonus} {given}, the most of all tokens, but the tree had no node for it."
    best = format_percent(predicted.token_probs[predicted.best])
    return f"{after} the frames gave {labels.quote([predicted.best])} {best}; {gave}."


def frame_tables(
    frames: TraceFrames, step: TraceStep, labels: TokenLabels
) -> list[tuple[str, list[str], list[list[Cell]], str]]:
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
    are CTC emissions, the probability of the blank.

    Args:
        accepted: the number of accepted tokens on which the frames are conditioned.
    """
    columns: list[list[Cell]] = []
    for row in frames.probs[accepted]:
        ranked = sorted(zip(row, frames.tokens, strict=False), reverse=True)[:MAX_TOKENS_SHOWN]
        columns.append([(labels(token), p) for p, token in ranked])
    if frames.is_aligned:
        depth = max(map(len, columns))
        columns = [
            [*column, *[None] * (depth - len(column)), (BLANK_SIGN, row[-1])]
            for column, row in zip(columns, frames.probs[accepted], strict=True)
        ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def alignment_rows(
    frames: TraceFrames, step: TraceStep, labels: TokenLabels
) -> list[tuple[str, float, list[AlignmentBoxes], list[AlignmentBoxes]]]:
    """Return (text, probability that the collapsed frames begin with it, the most probable alignments that begin with
    it, those that collapse to exactly it) of the accepted text and, below it, of the tree's leaves."""
    texts = [step.accepted] if step.accepted else []
    if not frames.is_conditioned:  # conditioned frames were recorded for the accepted text alone
        texts += [text for text in leaf_paths(step) if text not in texts][: MAX_TEXTS - len(texts)]

    def boxes(alignments: Sequence[tuple[float, Sequence[int | None]]]) -> list[AlignmentBoxes]:
        count = frames.frame_count
        return [
            ([*map(labels, tokens), *[FREE_FRAME] * (count - len(tokens))], probability)
            for probability, tokens in alignments
        ]

    rows = []
    for text in texts:
        probability, beginnings = prefix_alignments(frames, text, MAX_ALIGNMENTS)
        mark = " \N{CHECK MARK}" if text == step.accepted else ""
        exact = exact_alignments(frames, text, MAX_ALIGNMENTS)
        rows.append((labels.quote(text) + mark, probability, boxes(beginnings), boxes(exact)))
    return rows


def leaf_paths(step: TraceStep) -> list[tuple[int, ...]]:
    """Return the tokens from below the root to each leaf, in the order of the draft."""
    inner = set(step.parents)
    return [path_tokens(step, node) for node in range(1, len(step.tokens)) if node not in inner]


def path_tokens(step: TraceStep, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node > 0:
        tokens.append(step.tokens[node])
        node = step.parents[node]
    return tuple(reversed(tokens))


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
