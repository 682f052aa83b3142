"""Lines of part files: a row of tokens with the spans of its responses, or a response that was dropped.

    {"id", "turn", "sample", "category", "tokens", "spans": [[start, end, ended], ...], "cut", "ids"}
    {"id", "turn", "sample", "category", "dropped"}

A generator makes one line per response, behind its whole prompt. `join_turns` merges the lines of a conversation into
one row wherever a later prompt begins with the row so far: then the base model reads every token once, and the hidden
states at a response are those of its own prompt. A chat template that rewrites earlier turns, a response whose text
encodes to other tokens, and a history that was cut to fit begin a new row, so no row holds tokens that were not in the
prompt of all its later responses.

    tokens of turn 1    p p r r            tokens of turn 2    p p r r p r    ->   p p r r p r    spans 2-4, 5-6

torch is not imported here, because command lines are checked before that takes seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ctcdraft.errors import InputError

Line = dict[str, Any]
Span = tuple[int, int, int]  # first token, end, and 1 if the response ended by itself
RESPONSE = re.compile(rb"[^\0]+")


def join_turns(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with those of each conversation merged where the later prompt begins with the row so far."""
    rows: list[Line] = []
    for line in lines:
        if rows and continues(rows[-1], line):
            first = {key: rows[-1][key] for key in ("turn", "cut")}
            rows[-1] = line | first | {"spans": [*rows[-1]["spans"], *line["spans"]]}
        else:
            rows.append(line)
    return rows


def continues(row: Line, line: Line) -> bool:
    """Return whether a line is the next turn of a row, its prompt beginning with all tokens of the row."""
    if "dropped" in row or "dropped" in line or line["cut"] or row["ids"] != line["ids"]:
        return False
    same = (row["id"], row["sample"], row["turn"] + len(row["spans"])) == (line["id"], line["sample"], line["turn"])
    length = len(row["tokens"])
    # Beyond the row there is a prompt: two responses side by side would be one to a mask.
    return same and line["spans"][0][0] > length and line["tokens"][:length] == row["tokens"]


def line_keys(line: Line) -> list[tuple[str, int, int]]:
    """Return (id, sample, turn) of every turn of a line."""
    turns = 1 if "dropped" in line else len(line["spans"])
    return [(line["id"], line["sample"], line["turn"] + turn) for turn in range(turns)]


def count_lines(lines: Sequence[Line]) -> Counter[str]:
    """Return the counts of a part for the manifest."""
    rows = [line for line in lines if "dropped" not in line]
    spans = [span for row in rows for span in row["spans"]]
    by_conversation = Counter((row["id"], row["sample"]) for row in rows)
    return Counter(
        rows=len(rows),
        conversations_in_one_row=sum(count == 1 for count in by_conversation.values()),
        conversations_in_several_rows=sum(count > 1 for count in by_conversation.values()),
        answers=len(spans),
        tokens=sum(len(row["tokens"]) for row in rows),
        answer_tokens=sum(end - start for start, end, _ in spans),
        ended=sum(ended for *_, ended in spans),
        cut_prompts=sum(row["cut"] > 0 for row in rows),
        reencoded=sum(len(row["spans"]) for row in rows if row["ids"] == "reencoded"),
        dropped=len(lines) - len(rows),
    )


def with_spans(line: Line) -> Line:
    """Return a line with spans; older versions wrote a mask of 0 and 1 beside every token, and one `ended`."""
    if "mask" not in line:
        return line
    mask, length = line["mask"], len(line["tokens"])
    if len(mask) != length:
        raise InputError(
            f"the answer mask of {line['id']} has {len(mask)} entries for {length} tokens; prepare the corpus again "
            "with data/prepare.py overwrite=true"
        )
    kept = {key: value for key, value in line.items() if key not in ("mask", "ended")}
    return kept | {"spans": mask_spans(mask, line["ended"])}


def mask_spans(mask: Iterable[int], ended: bool) -> list[Span]:
    """Return the spans of a mask; `ended` is that of the last one, and earlier ones ended.

    mask_spans([0, 1, 1, 0, 1], False)   ->   [(1, 3, 1), (4, 5, 0)]
    """
    spans = [(*found.span(), 1) for found in RESPONSE.finditer(bytes(map(bool, mask)))]
    return [*spans[:-1], (*spans[-1][:2], int(ended))] if spans else []


def cut_spans(spans: Iterable[Span], length: int) -> list[Span]:
    """Return the spans within the first `length` tokens; one that reaches beyond has not ended there."""
    return [(start, min(end, length), ended if end <= length else 0) for start, end, ended in spans if start < length]
