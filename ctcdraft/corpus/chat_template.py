"""Conversations as token ids through the base model's chat template, for training and evaluation alike.

A base model without a chat template gets raw text: it continues the user's text, often with EOS at once. A draft head
learns nothing useful from such responses while every count looks right. It can be intended (a model of stories), so it
is a warning and no error: in the plan, beside a prompt as the base model reads it, and again before training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

from ctcdraft.errors import InputError, first_line
from ctcdraft.models.fingerprint import text_hash

SHORT_RESPONSE = 8  # mean tokens per response below which there is hardly a window to learn from
PROMPT_HEAD, PROMPT_TAIL = 160, 80  # characters of a long prompt that are printed: a template shows at both ends
WARNING_PREFIX = "WARNING   "

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
        # verbose=False: no warning about a prompt that is longer than the context, which `fit_to_context` cuts.
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


def keeps_history(tokenizer: Any, stop_token_ids: Set[int]) -> bool:
    """Return whether a later prompt begins with the prompt and the response before it, as tried on short texts.

    Llama 2's template, for one, renders a space before the end token that its model does not generate, and templates of
    reasoning models leave the reasoning of earlier turns out.
    """
    user = {"role": "user", "content": "Why?"}
    prompt = prompt_tokens(tokenizer, [user])
    reasoned = "</think>" in str(getattr(tokenizer, "chat_template", None))
    for response in ("Yes.", "<think>\nHm.\n</think>\n\nYes.")[: 1 + reasoned]:
        later = prompt_tokens(tokenizer, [user, {"role": "assistant", "content": response}, user])
        behind = later[len(prompt) :]
        if later[: len(prompt)] != prompt or stop_token_ids.isdisjoint(behind):
            return False
        if answer_text(tokenizer, behind, stop_token_ids).lstrip() != response:
            return False
    return True


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
