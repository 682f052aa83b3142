"""Slow reference implementations for the corpus: leaks word by word, masks character by character."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


def slow_words(text: str) -> list[str]:
    """Letter by letter: what is no letter, digit or underscore ends a word."""
    words, word = [], ""
    for letter in unicodedata.normalize("NFKC", text).casefold() + " ":
        if letter.isalnum() or letter == "_" or unicodedata.category(letter) in ("Nl", "No"):
            word += letter
        elif word:
            words.append(word)
            word = ""
    return words


def slow_runs(texts: Iterable[str], length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words as words; a shorter text is one run."""
    runs = set()
    for text in texts:
        words = slow_words(text)
        if words:
            runs |= {tuple(words[start : start + length]) for start in range(max(len(words) - length, 0) + 1)}
    return runs


def slow_leaks(texts: Sequence[str], questions: Iterable[str], length: int) -> list[int]:
    """Which texts share a run of words with a question, or are one that is shorter than a run."""
    known = slow_runs(questions, length)
    return [index for index, text in enumerate(texts) if slow_runs([text], length) & known]


def slow_answer_mask(tokenizer, spoken, end, space):
    """Ids and mask of a conversation, from the characters of its text alone.

    Walk through the rendered text: after every earlier message look for the next one; a response's characters are
    `space` (what the template puts before it on the base's behalf), its content, and all up to the end of `end`.
    A token belongs to a response if its characters do.
    """
    text = tokenizer.apply_chat_template(spoken, tokenize=False)
    inside = [False] * len(text)
    at = 0
    for message in spoken:
        content = message["content"].strip()
        at = text.index(content, at)
        stop = at + len(content)
        if message["role"] == "assistant":
            stop = text.index(end, stop) + len(end)
            for position in range(at - len(space), stop):
                inside[position] = True
        at = stop
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = []
    for start, stop in encoding["offset_mapping"]:
        assert len(set(inside[start:stop])) == 1, "a token is partly a response"
        mask.append(int(inside[start]))
    return encoding["input_ids"], mask


def slow_packs(order: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """First fit with every pack open to the end: look at all of them, from the first, and add their lengths up."""
    packs = []
    for index in order:
        for pack in packs:
            if sum(lengths[i] for i in pack) + lengths[index] <= size:
                pack.append(index)
                break
        else:
            packs.append([index])
    return packs


def slow_conversation(turns):
    """Rows of a conversation from its turns (prompt, response, ended, cut), as (token, mark) pairs.

    The mark of a response token is (turn, ended), that of a prompt token None. A prompt that was not cut, is longer
    than the row so far and begins with it continues it.
    """
    rows = []
    for turn, (prompt, response, ended, cut) in enumerate(turns):
        row = rows[-1] if rows else []
        same = 0 < len(row) < len(prompt) and not cut
        for position, (token, _) in enumerate(row):
            same = same and prompt[position] == token
        if same:
            rows.pop()
        marks = [mark for _, mark in row] if same else []
        marks += [None] * (len(prompt) - len(marks)) + [(turn, ended)] * len(response)
        rows.append(list(zip(prompt + response, marks, strict=True)))
    return rows


def slow_windows(row, labels):
    """All windows (anchor, root, labels) of a row of (token, mark) pairs: in one response, and full if it was cut."""
    found = []
    for anchor in range(len(row) - 2):
        (root, mark), window = row[anchor + 1], []
        for token, other in row[anchor + 2 : anchor + 2 + labels]:
            if mark is None or other != mark:
                break
            window.append(token)
        if window and (mark[1] or len(window) == labels):
            found.append((anchor, root, window))
    return found
