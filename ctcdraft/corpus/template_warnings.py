"""Warnings about a corpus that can be made and trained on, and is probably not what was meant.

A base without a chat template is asked raw text: it goes on where the user stops, often with an end of text at once.
A head learns nothing of value from that while every count looks right. It may be meant so (a base of stories), hence a
warning and no error, before the answers are made, beside a prompt as the base reads it, and again before training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctcdraft.models.fingerprint import text_hash

SHORT_RESPONSE = 8  # tokens of an answer, on average: hardly more than the labels of one window
PROMPT_HEAD, PROMPT_TAIL = 160, 80  # characters of a prompt that are shown: a template shows at both ends
WARNING_PREFIX = "WARNING   "


def describe_prompt(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a prompt as the base reads it, in one line, without its middle where it is long."""
    text = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    if len(text) <= PROMPT_HEAD + PROMPT_TAIL:
        return repr(text)
    return f"{text[:PROMPT_HEAD]!r} ... {text[-PROMPT_TAIL:]!r} ({len(text):,} characters)"


def missing_template_warnings(name: str) -> list[str]:
    """Return the warning about a base of this name that has no chat template."""
    return [
        f"{WARNING_PREFIX}{name} HAS NO CHAT TEMPLATE: prompts are given to it as raw text, and it goes on where the "
        "user stops",
        f"{WARNING_PREFIX}it may answer nothing, or go on with the question; a head learns from that output, "
        "whatever it is",
        f"{WARNING_PREFIX}if it is to chat: base.chat_template_file=vicuna_v1_1, llama2_chat, chatml or FILE, as it "
        "was trained,",
        f"{WARNING_PREFIX}or an instruct version of it as base.path=; data/prepare.py show=3 prints answers to judge "
        "by",
    ]


def prompt_preview_and_warnings(name: str, tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return a prompt as the base reads it, and what there is to be warned of. tokens: of the prompt."""
    warned = [] if getattr(tokenizer, "chat_template", None) else missing_template_warnings(name)
    return [f"prompt    {describe_prompt(tokenizer, tokens)}", *warned]


def corpus_warnings(manifest: dict[str, Any]) -> list[str]:
    """Return what there is to be warned of in a corpus that is complete."""
    base, counts = manifest["base"], manifest["counts"]
    warned = missing_template_warnings(base["base"]) if base["chat_template"] == text_hash("") else []
    mean = counts["answer_tokens"] / max(1, counts["answers"])
    if mean < SHORT_RESPONSE and counts["ended_share"] > 0.5:
        warned.append(
            f"{WARNING_PREFIX}ANSWERS HAVE {mean:.1f} TOKENS on average, their end included, and "
            f"{counts['ended_share']:.1%} of "
            "them ended by themselves: there is hardly a window to learn from; look at some with data/prepare.py show=3"
        )
    return warned
