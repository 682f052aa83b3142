"""One pass of the explorer: frames, readings, tree and verdict, and why the draft died. It draws what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctcdraft.evaluation.tracing.records import SeenFrames, SeenPass
from ctcdraft.evaluation.tracing.rejection_reason import (
    ALL_STOOD,
    BLANK,
    ENDED,
    MERGED,
    NO_DRAFT,
    NO_NODE,
    REFUSED,
    alignments,
    beginnings,
    outlook,
    reason,
)
from ctcdraft.report.html.markup import Html, joined, percent, table, tag, visible

BLANK_SIGN, DOT = "\N{GREEK SMALL LETTER EPSILON}", "\N{MIDDLE DOT}"
TOP, TEXTS, WAYS = 4, 6, 2  # words of a frame, texts of a pass, alignments of a text


class Words:
    """What ids look like in a page; a word without an entry is its number."""

    def __init__(self, words: Mapping[int, str]) -> None:
        self.words = words

    def __call__(self, word: int | None) -> str:
        if word is None:
            return BLANK_SIGN
        return visible(self.words.get(word, "")) or f"#{word}"

    def quoted(self, words: Sequence[int]) -> str:
        return "\N{LEFT DOUBLE QUOTATION MARK}" + "".join(map(self, words)) + "\N{RIGHT DOUBLE QUOTATION MARK}"


def pass_panel(name: str, place: int, step: SeenPass, words: Words, opening: bool = False) -> Html:
    """Return what is hidden until a token that links to it is chosen. name: its id in the page. opening: shown as long
    as no other pass of its answer is chosen."""
    why = reason(step)
    parts = [
        tag("h4", f"Pass {place + 1}: {stood(step)}; {why}"),
        tag("p", obituary(step, why, words)),
    ]
    if step.frames is not None:
        parts += [tag("h5", "Frames"), frames_table(step.frames, step, words)]
        if step.frames.reads != "words":
            parts += [tag("h5", "Texts, and alignments that collapse to them"), readings(step.frames, step, words)]
    if len(step.tokens) > 1:
        parts += [tag("h5", "Tree"), tree(step, words)]
    parts += [tag("h5", "The base"), the_base(step, words)]
    return tag("section", *parts, id=name, class_="pass opening" if opening else "pass")


def stood(step: SeenPass) -> str:
    """2 guesses stood, of a tree 4 deep"""
    count = len(step.accepted)
    return f"{count} guess{'' if count == 1 else 'es'} stood, of a tree {height(step)} deep"


def obituary(step: SeenPass, why: str, words: Words) -> str:
    """Where the draft died and why, in a sentence with its numbers."""
    own = words.quoted([step.bonus])
    if why == NO_DRAFT:
        return f"Nothing was guessed; the base said {own}."
    if why == ENDED:
        return f"The answer ended with {words.quoted(step.accepted)}, which was guessed."
    behind = f"Behind {words.quoted(step.accepted or step.tokens[:1])} "
    if why == ALL_STOOD:
        return f"{behind}no more could be guessed; the base added {own}."
    if why == REFUSED:
        return f"{behind}the tree held {own}, but its coin was refused and the base drew the same word itself."
    frames = step.frames
    if frames is None:
        offered = [step.tokens[node] for node in children(step, step.path[-1])]
        said = ", ".join(words.quoted([word]) for word in offered[:TOP]) if offered else "nothing"
        return f"{behind}the tree held {said}; the base said {own}."
    foreseen = outlook(frames, step.accepted)
    gave = f"to {own}, which the base said, the frames gave {percent(foreseen.words.get(step.bonus, 0.0))}"
    if why == MERGED:
        return (
            f"{behind}the base said {own} once more; the frames said it in a row, which merges; {gave} as a new word."
        )
    if why == BLANK:
        return f"{behind}the frames ended the text with {percent(foreseen.end)}; {gave}."
    if why == NO_NODE:
        return (
            f"{behind}the frames foresaw {own} with {percent(foreseen.words[step.bonus])}, but no node was left for it."
        )
    best = words.quoted([foreseen.best])
    return f"{behind}the frames foresaw {best} with {percent(foreseen.words[foreseen.best])}; {gave}."


def frames_table(frames: SeenFrames, step: SeenPass, words: Words) -> Html:
    """A column a frame: its best words, and where a blank means anything its mass. Frames that listen are shown once
    more, behind the accepted text."""
    made = [one_table(frames, 0, words)]
    if frames.listen:
        made += [tag("p", f"and behind {words.quoted(step.accepted)}:"), one_table(frames, -1, words)]
    return joined(made)


def one_table(frames: SeenFrames, known: int, words: Words) -> Html:
    rows = frames.heard[known]
    columns = []
    for row in rows:
        ranked = sorted(zip(row, frames.words, strict=False), reverse=True)[:TOP]
        columns.append([mass(words(word), p) for p, word in ranked])
    depth = max(map(len, columns))
    body = [[column[rank] if rank < len(column) else "" for column in columns] for rank in range(depth)]
    blanks = [mass(BLANK_SIGN, row[-1]) for row in rows]
    last = [blanks] if frames.reads != "words" else []
    looks = "frames blanks" if last else "frames"
    return table([f"frame {number}" for number in range(1, len(rows) + 1)], [*body, *last], looks)


def mass(said: str, share: float) -> Html:
    """A cell as dark as the share is great."""
    return tag("span", joined([tag("b", said), " ", percent(share)]), class_="mass", style=f"--mass:{share:.3g}")


def readings(frames: SeenFrames, step: SeenPass, words: Words) -> Html:
    """Texts of the tree with the likeliest alignments that say just them: the accepted text first, then leaves."""
    texts = [step.accepted] if step.accepted else []
    if not frames.listen:  # else only the accepted text has heard frames
        texts += [text for text in leaves(step) if text not in texts][: TEXTS - len(texts)]
    if not texts:
        return tag("p", "The tree held no text.")
    return table(
        ["text", "the frames begin with it", "and say no more"],
        [reading(frames, step, text, words) for text in texts],
    )


def reading(frames: SeenFrames, step: SeenPass, text: tuple[int, ...], words: Words) -> list[Html | str]:
    share, ways = beginnings(frames, text, WAYS)
    mark = " \N{CHECK MARK}" if text == step.accepted else ""
    whole = alignments(frames, text, WAYS)
    begins = joined([tag("b", percent(share)), *(way_of(way, p, frames, words) for p, way in ways)])
    return [
        words.quoted(text) + mark,
        begins,
        joined(way_of(way, p, frames, words) for p, way in whole) or "impossible",
    ]


def way_of(way: Sequence[int | None], share: float, frames: SeenFrames, words: Words) -> Html:
    """A box a frame, and the probability; frames that are free to say anything are dotted."""
    boxes = [tag("i", words(word)) for word in way] + [tag("i", DOT)] * (frames.count - len(way))
    return tag("span", *boxes, " ", percent(share), class_="way")


def leaves(step: SeenPass) -> list[tuple[int, ...]]:
    """The texts from the root to each leaf, in the order of the nodes, which is that of the draft."""
    inner = set(step.parents)
    return [text_of(step, node) for node in range(1, len(step.tokens)) if node not in inner]


def text_of(step: SeenPass, node: int) -> tuple[int, ...]:
    text: list[int] = []
    while node > 0:
        text.append(step.tokens[node])
        node = step.parents[node]
    return tuple(reversed(text))


def height(step: SeenPass) -> int:
    return max(len(text_of(step, node)) for node in range(len(step.tokens)))


def children(step: SeenPass, node: int) -> list[int]:
    return [child for child, parent in enumerate(step.parents) if parent == node]


def tree(step: SeenPass, words: Words) -> Html:
    return tag("ul", branch(step, 0, words), class_="tree")


def branch(step: SeenPass, node: int, words: Words) -> Html:
    stood = node in step.path
    below = [branch(step, child, words) for child in children(step, node)]
    if node == step.path[-1] and step.committed == len(step.path):
        below.append(tag("li", tag("b", words(step.bonus)), " \N{LEFTWARDS ARROW} the base's own word", class_="own"))
    said = words(step.tokens[node]) + (" \N{CHECK MARK}" if stood and node else "")
    return tag("li", tag("b" if stood else "span", said), *([tag("ul", *below)] if below else []))


def the_base(step: SeenPass, words: Words) -> Html:
    best = ", ".join(f"{words.quoted([word])} {percent(p)}" for word, p in step.base)
    return tag("p", f"said {words.quoted([step.bonus])} there; its best words were {best}.")
