"""Conversations as token ids through the base model's chat template, and checks of answer masks against it.

A base model without a chat template gets raw text: it continues the user's text, often with EOS at once. A draft head
learns nothing useful from such responses while every count looks right. It can be intended (a model of stories), so it
is a warning and no error: in the plan, beside a prompt as the base model reads it, and again before training.

A row is one response behind its own prompt, so its mask is derived and not searched: zeros on the rendered prompt, ones
on the generated tokens. That holds for templates with and without generation markers, also for those that rewrite
earlier turns. But a wrong mask fails silently: a draft head trained on prompts, or one token beside the responses,
still learns something. So every mask is checked against its template again before training.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.token_store import Row
from ctcdraft.corpus.windows import label_windows, valid_anchors
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.fingerprint import text_hash

SHORT_RESPONSE = 8  # mean tokens per response below which there is hardly a window to learn from
PROMPT_HEAD, PROMPT_TAIL = 160, 80  # characters of a long prompt that are printed: a template shows at both ends
WARNING_PREFIX = "WARNING   "
PROBE_PROMPTS = ("x", "Two words", "3 + 4 =", "Why?\n")  # user turns without a common ending
# ANSI codes: dim, green, reversed, yellow, magenta
COLOURS = {"prompt": "2", "answer": "32", "anchor": "7", "root": "1;33", "labels": "1;35"}

Message = dict[str, str]


def chat_messages(turns: Sequence[str], answers: Sequence[str]) -> list[Message]:
    """Return the conversation up to the user turn that is to be answered next.

    turns a, b, c with answers A      ->      user a, assistant A, user b
    """
    conversation: list[Message] = []
    for turn, answer in zip(turns, answers, strict=False):
        conversation += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*conversation, {"role": "user", "content": turns[len(answers)]}]


def prompt_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids after which the base model generates its response: the template with its generation prompt.

    Without a chat template they are those of the raw texts, with an empty line before each later user turn:

    user a, assistant A, user b      ->      a A \\n\\n b
    """
    if not getattr(tokenizer, "chat_template", None):
        text = ""
        for message in messages:
            text += ("\n\n" if text and message["role"] == "user" else "") + message["content"]
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        # Some tokenizers append EOS, which would end the response before its first token.
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    import jinja2

    try:
        encoding = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages[:4])
        raise InputError(
            f"the chat template cannot render a conversation of {roles} ({first_line(error)}); choose another "
            "base.chat_template_file="
        ) from error
    return list(encoding["input_ids"])


def fit_to_context(tokens: list[int], context_length: int, begin: int | None) -> tuple[list[int], int]:
    """Return the prompt truncated on the left to three quarters of the context, and how many tokens were cut.

    A first token `begin` (BOS) is kept: models trained with BOS generate different text without it.

    fit([1, 2, 3, 4, 5], context_length=4, begin=None)      ->      [3, 4, 5], 2
    fit([1, 2, 3, 4, 5], context_length=4, begin=1)         ->      [1, 4, 5], 2
    """
    cut = max(0, len(tokens) - context_length * 3 // 4)
    kept = tokens[:1] if cut and tokens[0] == begin else []
    return kept + tokens[cut + len(kept) :], cut


def answer_text(tokenizer: Any, ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """Return the text before the first stop token."""
    end = next((n for n, token in enumerate(ids) if token in stop_token_ids), len(ids))
    return tokenizer.decode(list(ids[:end]), skip_special_tokens=True)


def missing_template_warnings(name: str) -> list[str]:
    lines = (
        f"{name} HAS NO CHAT TEMPLATE: prompts are given to it as raw text, which it continues",
        "it may respond with nothing or continue the question; a draft head learns from that output all the same",
        "for a chat model: base.chat_template_file=vicuna_v1_1, llama2_chat, chatml or FILE, as it was trained,",
        "or its instruct version as base.path=; data/prepare.py show=3 prints responses",
    )
    return [WARNING_PREFIX + line for line in lines]


def prompt_preview_and_warnings(name: str, tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the line of the plan that shows a prompt, and the warning where the template is missing."""
    warnings = [] if getattr(tokenizer, "chat_template", None) else missing_template_warnings(name)
    text = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    shown = repr(text)
    if len(text) > PROMPT_HEAD + PROMPT_TAIL:
        shown = f"{text[:PROMPT_HEAD]!r} ... {text[-PROMPT_TAIL:]!r} ({len(text):,} characters)"
    return [f"prompt    {shown}", *warnings]


def corpus_warnings(manifest: dict[str, Any]) -> list[str]:
    """Return the warnings about a complete prepared corpus: no chat template, very short responses."""
    base, counts = manifest["base"], manifest["counts"]
    warnings = missing_template_warnings(base["base"]) if base["chat_template"] == text_hash("") else []
    mean = counts["answer_tokens"] / max(1, counts["answers"])
    if mean < SHORT_RESPONSE and counts["ended_share"] > 0.5:
        warnings.append(
            f"{WARNING_PREFIX}ANSWERS HAVE {mean:.1f} TOKENS on average, EOS included, and {counts['ended_share']:.1%} "
            "of them ended by themselves: there is hardly a window to learn from; look at some with data/prepare.py "
            "show=3"
        )
    return warnings


def generation_prompt_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids of the template's generation prompt: the longest common ending of unlike prompts."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    backwards = [prompt_tokens(tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBE_PROMPTS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*backwards, strict=False))
    return [tokens[0] for tokens in same][::-1]


def refuse_wrong_masks(rows: Iterable[Row], tokenizer: Any, stop_token_ids: Collection[int]) -> None:
    """Raise InputError unless every response follows the generation prompt and ends at its first stop token."""
    opening_K = torch.tensor(generation_prompt_tokens(tokenizer), dtype=torch.int64)
    stops_E = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
    for row in rows:
        fault = mask_fault(row, opening_K, stops_E)
        if fault:
            raise InputError(
                f"the answer mask of {row.id} {fault}; training on it would teach the wrong tokens: prepare the corpus "
                "again with data/prepare.py overwrite=true, and look at it with show=3"
            )


def mask_fault(row: Row, opening_K: Tensor, stops_E: Tensor) -> str:
    """Return what is wrong with the mask of a row, or an empty string."""
    tokens_L, mask_L = row.tokens_L.long(), row.mask_L.int()
    if len(tokens_L) != len(mask_L):
        return f"has {len(mask_L)} entries for {len(tokens_L)} tokens"
    if not mask_L.any() or mask_L.all():
        return "is all ones: prompt and answer cannot be told apart" if mask_L.any() else "is all zeros: no answer"
    edges_L = torch.diff(mask_L, prepend=mask_L.new_zeros(1), append=mask_L.new_zeros(1))
    starts, ends = (edges_L == 1).nonzero()[:, 0].tolist(), (edges_L == -1).nonzero()[:, 0].tolist()
    is_stop_L = torch.isin(tokens_L, stops_E)
    for start, end in zip(starts, ends, strict=True):
        if not torch.equal(tokens_L[max(start - len(opening_K), 0) : start], opening_K):
            return f"is shifted: the answer at token {start} does not follow the template's generation prompt"
        if is_stop_L[start : end - 1].any():
            return f"is shifted: the answer at token {start} continues after its end token"
        if not is_stop_L[end - 1] and (end < len(tokens_L) or row.ended):
            return f"is shifted: the answer at token {start} stops before its end token"
    return ""


def paint(text: str, colour: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def legend() -> str:
    return " ".join(paint(name, name) for name in COLOURS)


def render_row(row: Row, tokenizer: Any, labels: int) -> str:
    """Return one prompt and response in colour, and the window of at most `labels` labels of its middle anchor."""
    tokens_1L, mask_1L = row.tokens_L.long()[None], row.mask_L.int()[None]
    anchors_A = valid_anchors(mask_1L)[0].nonzero()[:, 0]
    colours = ["answer" if is_answer else "prompt" for is_answer in row.mask_L.tolist()]
    window = "no anchor: the answer has fewer than two tokens"
    if len(anchors_A):
        anchor = int(anchors_A[len(anchors_A) // 2])
        ended_1L = torch.full_like(tokens_1L, row.ended, dtype=torch.bool)
        root_11, labels_11S, lengths_11 = label_windows(tokens_1L, mask_1L, torch.tensor([[anchor]]), labels, ended_1L)
        length = int(lengths_11)
        colours[anchor : anchor + 2 + length] = ["anchor", "root"] + ["labels"] * length
        anchor_text, root_text = (repr(tokenizer.decode(int(token))) for token in (tokens_1L[0, anchor], root_11))
        label_texts = [paint(repr(tokenizer.decode(token)), "labels") for token in labels_11S[0, 0, :length].tolist()]
        window = (
            f"anchor {anchor} {paint(anchor_text, 'anchor')}, root {paint(root_text, 'root')}: the draft head is "
            f"trained on the labels {' '.join(label_texts) or '(none: the answer was cut off here)'}"
        )
    counts = f"{int(mask_1L.sum())} of {len(row.tokens_L)} tokens are answer, {'ended' if row.ended else 'cut off'}"
    return f"{row.id}: {counts}\n{paint_tokens(tokens_1L[0].tolist(), colours, tokenizer)}\n{window}"


def paint_tokens(tokens: list[int], colours: list[str], tokenizer: Any) -> str:
    """Return the text of all tokens in colours, one decoding per run of a colour: characters can span tokens."""
    text, painted, end = "", [], 0
    for colour, run in groupby(colours):
        end += len(list(run))
        # The difference of two decodings: decoded alone, a run would lose its leading space with some tokenizers.
        longer = tokenizer.decode(tokens[:end])
        painted.append(paint(longer[len(text) :], colour))
        text = longer
    return "".join(painted)
