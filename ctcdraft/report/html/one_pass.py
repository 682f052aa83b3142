"""One pass of the explorer: frames, readings, tree and verdict, and why the draft died. It draws what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctcdraft.evaluation.tracing.records import TraceFrames, TraceStep
from ctcdraft.evaluation.tracing.rejection_reason import (
    ALL_ACCEPTED,
    EARLY_BLANK,
    ENDED,
    MERGED_REPEAT,
    NO_DRAFT,
    NOT_IN_TREE,
    REJECTED_BY_VERIFIER,
    exact_alignments,
    forecast,
    prefix_alignments,
    rejection_reason,
)
from ctcdraft.report.html.markup import Html, format_percent, html_table, join_html, tag, visible_whitespace

BLANK_SIGN, DOT = "\N{GREEK SMALL LETTER EPSILON}", "\N{MIDDLE DOT}"
MAX_TOKENS_SHOWN, MAX_TEXTS, MAX_ALIGNMENTS = 4, 6, 2  # words of a frame, texts of a pass, alignments of a text


class TokenLabels:
    """What ids look like in a page; a word without an entry is its number."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = texts

    def __call__(self, token: int | None) -> str:
        if token is None:
            return BLANK_SIGN
        return visible_whitespace(self.texts.get(token, "")) or f"#{token}"

    def quote(self, tokens: Sequence[int]) -> str:
        return "\N{LEFT DOUBLE QUOTATION MARK}" + "".join(map(self, tokens)) + "\N{RIGHT DOUBLE QUOTATION MARK}"


def step_panel(name: str, place: int, step: TraceStep, labels: TokenLabels, opening: bool = False) -> Html:
    """Return what is hidden until a token that links to it is chosen. name: its id in the page. opening: shown as long
    as no other pass of its answer is chosen."""
    reason_name = rejection_reason(step)
    parts = [
        tag("h4", f"Pass {place + 1}: {describe_accepted(step)}; {reason_name}"),
        tag("p", explain_rejection(step, reason_name, labels)),
    ]
    if step.frames is not None:
        parts += [tag("h5", "Frames"), frames_table(step.frames, step, labels)]
        if step.frames.reads != "words":
            parts += [
                tag("h5", "Texts, and alignments that collapse to them"),
                alignments_table(step.frames, step, labels),
            ]
    if len(step.tokens) > 1:
        parts += [tag("h5", "Tree"), tree_list(step, labels)]
    parts += [tag("h5", "The base"), base_predictions(step, labels)]
    return tag("section", *parts, id=name, class_="pass opening" if opening else "pass")


def describe_accepted(step: TraceStep) -> str:
    """2 guesses stood, of a tree 4 deep"""
    count = len(step.accepted)
    return f"{count} guess{'' if count == 1 else 'es'} stood, of a tree {tree_depth(step)} deep"


def explain_rejection(step: TraceStep, reason_name: str, labels: TokenLabels) -> str:
    """Where the draft died and why, in a sentence with its numbers."""
    own = labels.quote([step.bonus])
    if reason_name == NO_DRAFT:
        return f"Nothing was guessed; the base said {own}."
    if reason_name == ENDED:
        return f"The answer ended with {labels.quote(step.accepted)}, which was guessed."
    behind = f"Behind {labels.quote(step.accepted or step.tokens[:1])} "
    if reason_name == ALL_ACCEPTED:
        return f"{behind}no more could be guessed; the base added {own}."
    if reason_name == REJECTED_BY_VERIFIER:
        return f"{behind}the tree held {own}, but its coin was refused and the base drew the same word itself."
    frames = step.frames
    if frames is None:
        offered = [step.tokens[node] for node in child_nodes(step, step.path[-1])]
        offered_text = (
            ", ".join(labels.quote([token]) for token in offered[:MAX_TOKENS_SHOWN]) if offered else "nothing"
        )
        return f"{behind}the tree held {offered_text}; the base said {own}."
    predicted = forecast(frames, step.accepted)
    gave = (
        f"to {own}, which the base said, the frames gave {format_percent(predicted.token_probs.get(step.bonus, 0.0))}"
    )
    if reason_name == MERGED_REPEAT:
        return (
            f"{behind}the base said {own} once more; the frames said it in a row, which merges; {gave} as a new word."
        )
    if reason_name == EARLY_BLANK:
        return f"{behind}the frames ended the text with {format_percent(predicted.end)}; {gave}."
    if reason_name == NOT_IN_TREE:
        return (
            f"{behind}the frames foresaw {own} with {format_percent(predicted.token_probs[step.bonus])}, "
            "but no node was left for it."
        )
    best = labels.quote([predicted.best])
    return f"{behind}the frames foresaw {best} with {format_percent(predicted.token_probs[predicted.best])}; {gave}."


def frames_table(frames: TraceFrames, step: TraceStep, labels: TokenLabels) -> Html:
    """A column a frame: its best words, and where a blank means anything its mass. Frames that listen are shown once
    more, behind the accepted text."""
    made = [frame_table(frames, 0, labels)]
    if frames.is_conditioned:
        made += [tag("p", f"and behind {labels.quote(step.accepted)}:"), frame_table(frames, -1, labels)]
    return join_html(made)


def frame_table(frames: TraceFrames, benchmark_hashes: int, labels: TokenLabels) -> Html:
    rows = frames.heard[benchmark_hashes]
    columns = []
    for row in rows:
        ranked = sorted(zip(row, frames.words, strict=False), reverse=True)[:MAX_TOKENS_SHOWN]
        columns.append([probability_cell(labels(token), p) for p, token in ranked])
    depth = max(map(len, columns))
    body = [[column[rank] if rank < len(column) else "" for column in columns] for rank in range(depth)]
    blanks = [probability_cell(BLANK_SIGN, row[-1]) for row in rows]
    last = [blanks] if frames.reads != "words" else []
    looks = "frames blanks" if last else "frames"
    return html_table([f"frame {number}" for number in range(1, len(rows) + 1)], [*body, *last], looks)


def probability_cell(label: str, share: float) -> Html:
    """A cell as dark as the share is great."""
    return tag(
        "span", join_html([tag("b", label), " ", format_percent(share)]), class_="mass", style=f"--mass:{share:.3g}"
    )


def alignments_table(frames: TraceFrames, step: TraceStep, labels: TokenLabels) -> Html:
    """Texts of the tree with the likeliest alignments that say just them: the accepted text first, then leaves."""
    texts = [step.accepted] if step.accepted else []
    if not frames.is_conditioned:  # else only the accepted text has heard frames
        texts += [text for text in leaf_paths(step) if text not in texts][: MAX_TEXTS - len(texts)]
    if not texts:
        return tag("p", "The tree held no text.")
    return html_table(
        ["text", "the frames begin with it", "and say no more"],
        [alignment_row(frames, step, text, labels) for text in texts],
    )


def alignment_row(frames: TraceFrames, step: TraceStep, text: tuple[int, ...], labels: TokenLabels) -> list[Html | str]:
    share, ways = prefix_alignments(frames, text, MAX_ALIGNMENTS)
    mark = " \N{CHECK MARK}" if text == step.accepted else ""
    whole = exact_alignments(frames, text, MAX_ALIGNMENTS)
    begins = join_html([tag("b", format_percent(share)), *(alignment_boxes(way, p, frames, labels) for p, way in ways)])
    return [
        labels.quote(text) + mark,
        begins,
        join_html(alignment_boxes(way, p, frames, labels) for p, way in whole) or "impossible",
    ]


def alignment_boxes(alignment: Sequence[int | None], share: float, frames: TraceFrames, labels: TokenLabels) -> Html:
    """A box a frame, and the probability; frames that are free to say anything are dotted."""
    boxes = [tag("i", labels(token)) for token in alignment] + [tag("i", DOT)] * (frames.frame_count - len(alignment))
    return tag("span", *boxes, " ", format_percent(share), class_="way")


def leaf_paths(step: TraceStep) -> list[tuple[int, ...]]:
    """The texts from the root to each leaf, in the order of the nodes, which is that of the draft."""
    inner = set(step.parents)
    return [path_tokens(step, node) for node in range(1, len(step.tokens)) if node not in inner]


def path_tokens(step: TraceStep, node: int) -> tuple[int, ...]:
    text: list[int] = []
    while node > 0:
        text.append(step.tokens[node])
        node = step.parents[node]
    return tuple(reversed(text))


def tree_depth(step: TraceStep) -> int:
    return max(len(path_tokens(step, node)) for node in range(len(step.tokens)))


def child_nodes(step: TraceStep, node: int) -> list[int]:
    return [child for child, parent in enumerate(step.parents) if parent == node]


def tree_list(step: TraceStep, labels: TokenLabels) -> Html:
    return tag("ul", tree_branch(step, 0, labels), class_="tree")


def tree_branch(step: TraceStep, node: int, labels: TokenLabels) -> Html:
    stood = node in step.path
    below = [tree_branch(step, child, labels) for child in child_nodes(step, node)]
    if node == step.path[-1] and step.committed == len(step.path):
        below.append(tag("li", tag("b", labels(step.bonus)), " \N{LEFTWARDS ARROW} the base's own word", class_="own"))
    label = labels(step.tokens[node]) + (" \N{CHECK MARK}" if stood and node else "")
    return tag("li", tag("b" if stood else "span", label), *([tag("ul", *below)] if below else []))


def base_predictions(step: TraceStep, labels: TokenLabels) -> Html:
    best = ", ".join(f"{labels.quote([token])} {format_percent(p)}" for token, p in step.base)
    return tag("p", f"said {labels.quote([step.bonus])} there; its best words were {best}.")
