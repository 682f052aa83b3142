"""Prompts through the chat template or as raw text, truncated on the left only."""

from tiny_models import EOS_ID, random_base, tiny_tokenizer

from ctcdraft.corpus.chat_template import answer_text, chat_messages, fit_to_context, prompt_tokens
from ctcdraft.corpus.generation.requests import Sample, build_request
from ctcdraft.corpus.types import Prompt
from ctcdraft.evaluation.runner import turn_prompt

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def test_messages_end_with_the_turn_to_answer():
    assert chat_messages(["a", "c", "e"], ["b"]) == TALK
    assert chat_messages(["a", "c"], []) == TALK[:1]


def test_a_template_is_applied_with_its_generation_prompt():
    tokenizer = tiny_tokenizer()
    expected = "<bos><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert prompt_tokens(tokenizer, TALK) == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_without_a_template_the_prompt_is_the_raw_text():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert tokenizer.decode(prompt_tokens(tokenizer, TALK)) == "ab\n\nc"
    assert tokenizer.decode(prompt_tokens(tokenizer, TALK[:1])) == "a"


def test_a_raw_prompt_has_bos_but_not_eos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <|end|>", special_tokens=[("<bos>", 0), ("<|end|>", EOS_ID)]
    )
    assert tokenizer.decode(prompt_tokens(tokenizer, TALK)) == "<bos>ab\n\nc"


def test_fit_cuts_from_the_left_and_leaves_a_quarter_free():
    assert fit_to_context([1, 2, 3, 4, 5], 4, None) == ([3, 4, 5], 2)
    assert fit_to_context([1, 2, 3], 4, None) == ([1, 2, 3], 0)
    tokens, cut = fit_to_context(list(range(1000)), 254, None)
    assert (len(tokens), cut, tokens[-1]) == (190, 810, 999)
    assert 254 - len(tokens) >= 254 / 4


def test_fit_keeps_the_begin_token_and_counts_it():
    assert fit_to_context([1, 2, 3, 4, 5], 4, 1) == ([1, 4, 5], 2)
    assert fit_to_context([1, 2, 3, 4, 5], 4, 2) == ([3, 4, 5], 2)  # the prompt does not begin with BOS
    assert fit_to_context([1, 2, 3], 4, 1) == ([1, 2, 3], 0)
    base = random_base(context=64)
    one = build_request(base, Sample(Prompt("p", "test", ("a" * 100,), None), 0), [])
    assert (len(one.tokens), one.tokens[0]) == (48, base.tokenizer.bos_token_id)
    assert base.tokenizer.decode(list(one.tokens)) == "<bos>" + "a" * 45 + "<|end|><|assistant|>"
    assert one.cut == 100 - 45 + len(["<|user|>"])
    prompt_L, cut = turn_prompt(base, Prompt("p", "test", ("a" * 100,), None), [])
    assert (prompt_L.tolist(), cut) == (list(one.tokens), one.cut)  # evaluation and preparation build the same prompt


def test_an_answer_ends_before_its_first_stop_token():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("yes<|end|>no", add_special_tokens=False)["input_ids"]
    assert answer_text(tokenizer, ids, frozenset({EOS_ID})) == "yes"
    assert answer_text(tokenizer, ids[:2], frozenset({EOS_ID})) == "ye"
