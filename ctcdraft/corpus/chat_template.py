"""Where text becomes a prompt, for training and evaluation alike. It knows no model and no file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ctcdraft.errors import InputError

Message = dict[str, str]


def chat_messages(turns: Sequence[str], answers: Sequence[str]) -> list[Message]:
    """The conversation up to the turn that is to be answered next.

    turns a, b, c with answers A      ->      user a, assistant A, user b
    """
    conversation: list[Message] = []
    for turn, answer in zip(turns, answers, strict=False):
        conversation += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*conversation, {"role": "user", "content": turns[len(answers)]}]


def prompt_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The ids after which the base begins its answer.

    With a chat template: the template and its generation prompt. Without one the base is prompted raw: it
    goes on where the user stops, and a later turn starts after an empty line.

    user a, assistant A, user b      ->      a A \\n\\n b
    """
    if getattr(tokenizer, "chat_template", None):
        return template_tokens(tokenizer, messages)
    text = ""
    for message in messages:
        text += ("\n\n" if text and message["role"] == "user" else "") + message["content"]
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    # A tokenizer that closes its text would end the prompt before the base has said a word.
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def template_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The ids through the template and its generation prompt; what the template itself refuses is one sentence."""
    import jinja2

    try:
        encoding = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"the chat template cannot say a conversation of {', '.join(message['role'] for message in messages[:4])} "
            f"({reason}); choose another base.chat_template_file="
        ) from error
    return list(encoding["input_ids"])


def fit_to_context(tokens: list[int], context_length: int, begin: int | None) -> tuple[list[int], int]:
    """Cut from the left until a quarter of the context is free for the answer; says how many tokens went.

    begin: the id a text of this base begins with, if it has one. It stays: a base that has never seen a text without
    it says other things.

    fit([1, 2, 3, 4, 5], context_length=4, begin=None)      ->      [3, 4, 5], 2
    fit([1, 2, 3, 4, 5], context_length=4, begin=1)         ->      [1, 4, 5], 2
    """
    cut = max(0, len(tokens) - context_length * 3 // 4)
    kept = tokens[:1] if cut and tokens[0] == begin else []
    return kept + tokens[cut + len(kept) :], cut


def answer_text(tokenizer: Any, ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """What was said before the first stop token."""
    end = next((n for n, token in enumerate(ids) if token in stop_token_ids), len(ids))
    return tokenizer.decode(list(ids[:end]), skip_special_tokens=True)
