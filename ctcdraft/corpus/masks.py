"""Which tokens of a conversation are answers, exactly or not at all. It knows templates and ids; no file, no model.

A wrong mask fails silently: a head trained on prompts, on nothing, or one word beside its answers still learns
something. So a mask is found in a way that can be checked, and what cannot be checked is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from ctcdraft.corpus.chat import Message, prompt_tokens, rendered_tokens
from ctcdraft.errors import InputError

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNLIKE = ("x", "Two words", "3 + 4 =", "Why?\n")  # users who have no end in common


class Masked(Protocol):
    """An answer after its prompt, as training reads it."""

    @property
    def id(self) -> str: ...
    @property
    def tokens_L(self) -> Tensor: ...
    @property
    def mask_L(self) -> Tensor: ...
    @property
    def ended(self) -> bool: ...


def conversation_tokens(
    tokenizer: Any, spoken: Sequence[Message], stop_tokens: Collection[int]
) -> tuple[list[int], list[int]]:
    """A whole conversation through the template: its ids, and a mask that is 1 on what the base would have said.

    That is every answer behind its generation prompt, its end token included. It is derived by rendering the
    prompt of each answer; where the template has generation markers they must say the same, and where a prompt is
    no beginning of the conversation (a template that rewrites earlier turns) they alone are taken.
    """
    ids = rendered_tokens(tokenizer, spoken, generation_prompt=False)
    derived, doubt = derived_mask(tokenizer, spoken, ids, stop_tokens)
    marked = marked_mask(tokenizer, spoken)
    if marked is None and doubt:
        raise InputError(
            f"{doubt}, and the template has no generation markers; choose another base.chat_template_file="
        )
    if marked is not None and not doubt and marked != derived:
        place = next(n for n, (one, other) in enumerate(zip(marked, derived, strict=True)) if one != other)
        raise InputError(
            f"the chat template's generation markers are wrong: token {place} ({tokenizer.decode(ids[place])!r}) is "
            f"{'marked, but is not said' if marked[place] else 'said, but is not marked'} by the base; correct them, "
            "or choose another base.chat_template_file="
        )
    mask = derived if marked is None or not doubt else marked
    if not any(mask) or all(mask):
        raise InputError(
            f"the answer mask of a conversation of {len(spoken)} messages is {'all' if any(mask) else 'no'} ones; "
            "choose another base.chat_template_file="
        )
    return ids, mask


def derived_mask(
    tokenizer: Any, spoken: Sequence[Message], ids: Sequence[int], stop_tokens: Collection[int]
) -> tuple[list[int], str]:
    """A mask by the prompts of all answers; or why there is none, as the beginning of a sentence.

    ids      p p p a a E p p a E      E ends an answer
    prompt 1 p p p                    must be how the ids begin, else the base would not have said the rest
    mask     0 0 0 1 1 1 0 0 1 1
    """
    mask = [0] * len(ids)
    for number, message in enumerate(spoken):
        if message["role"] != "assistant":
            continue
        prompt = rendered_tokens(tokenizer, spoken[:number], generation_prompt=True)
        start = len(prompt)
        if list(ids[:start]) != prompt:
            return mask, f"the prompt of message {number + 1} is not how the tokens of its conversation begin"
        answer = said_up_to_stop(ids[start:], stop_tokens)
        if not answer or answer[-1] not in stop_tokens:
            return mask, f"no end token of the base follows message {number + 1}"
        # An end token in the middle of what was said, or words of the template between prompt and answer.
        if tokenizer.decode(answer[:-1]).strip() != roundtrip(tokenizer, message["content"]):
            return mask, f"message {number + 1} is not what stands between its prompt and its end token"
        mask[start : start + len(answer)] = [1] * len(answer)
    return mask, ""


def said_up_to_stop(ids: Sequence[int], stop_tokens: Collection[int]) -> list[int]:
    said = list(takewhile(lambda token: token not in stop_tokens, ids))
    return [*said, *ids[len(said) : len(said) + 1]]


def roundtrip(tokenizer: Any, text: str) -> str:
    """The text as this tokenizer can say it: some drop spaces, or characters they do not know."""
    return tokenizer.decode(tokenizer(text.strip(), add_special_tokens=False, verbose=False)["input_ids"]).strip()


def marked_mask(tokenizer: Any, spoken: Sequence[Message]) -> list[int] | None:
    """What the template's own generation markers say, or None where it has none."""
    if not MARKER.search(str(tokenizer.chat_template)):
        return None
    encoding = tokenizer.apply_chat_template(
        list(spoken), return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
    )
    return list(encoding["assistant_masks"])


def opening(tokenizer: Any) -> list[int]:
    """The ids that stand before every answer: how the prompts of quite different users all end."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in UNLIKE]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[Masked], tokenizer: Any, stop_tokens: Collection[int]) -> None:
    """Raise InputError unless every answer begins behind the template's opening and ends with its first end token."""
    before = torch.tensor(opening(tokenizer), dtype=torch.int64)
    stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64)
    for row in rows:
        fault = mask_fault(row, before, stops)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong words: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: Masked, before_K: Tensor, stops_E: Tensor) -> str:
    """What is wrong with the mask of a row, or nothing."""
    tokens_L, mask_L = row.tokens_L.long(), row.mask_L.int()
    if len(tokens_L) != len(mask_L):
        return f"has {len(mask_L)} places for {len(tokens_L)} tokens"
    if not mask_L.any() or mask_L.all():
        return "is all ones: prompt and answer cannot be told apart" if mask_L.any() else "is all zeros: no answer"
    edges_L = torch.diff(mask_L, prepend=mask_L.new_zeros(1), append=mask_L.new_zeros(1))
    starts, ends = (edges_L == 1).nonzero()[:, 0].tolist(), (edges_L == -1).nonzero()[:, 0].tolist()
    is_stop_L = torch.isin(tokens_L, stops_E)
    for start, end in zip(starts, ends, strict=True):
        if not torch.equal(tokens_L[max(start - len(before_K), 0) : start], before_K):
            return f"is shifted: the answer at token {start} does not follow what the template puts before an answer"
        if is_stop_L[start : end - 1].any():
            return f"is shifted: the answer at token {start} goes on behind its end token"
        if not is_stop_L[end - 1] and (end < len(tokens_L) or row.ended):
            return f"is shifted: the answer at token {start} stops before its end token"
    return ""
