"""The base answers in batches what it answers alone; a draw depends on the seed and on nothing before it."""

import pytest
import torch
from tiny_models import END, random_base, tiny_tokenizer

from ctcdraft.corpus.answers import TransformersAnswers, questions
from ctcdraft.corpus.conversations import Prompt
from ctcdraft.errors import InputError

TEXTS = ["a", "How are you today?", "Tell me a story about a very small cat.", "7", "b" * 60]
GREEDY = TransformersAnswers(8, 24, 0.0, 0)


def prompts_of(*texts):
    return [tiny_tokenizer()(text)["input_ids"] for text in texts]


def alone(base, prompt, new_tokens):
    """The slow truth: one greedy token at a time, without batch, padding or cache."""
    said = []
    while len(said) < new_tokens and (not said or said[-1] not in base.stop_tokens):
        logits_V = base.lm(torch.tensor([[*prompt, *said]])).logits[0, -1]
        said.append(int(logits_V.argmax()))
    return said


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_padded_batch_answers_what_each_prompt_is_answered_alone(kind):
    base = random_base(kind)
    answers = GREEDY(base, prompts_of(*TEXTS))
    assert answers == [alone(base, prompt, 24) for prompt in prompts_of(*TEXTS)]


def test_an_answer_stops_at_its_first_stop_token_and_keeps_it():
    base = random_base()
    free = GREEDY(base, prompts_of(*TEXTS))
    base.stop_tokens = frozenset({free[0][3], free[2][7]})
    stopped = GREEDY(base, prompts_of(*TEXTS))
    assert stopped == [alone(base, prompt, 24) for prompt in prompts_of(*TEXTS)]
    assert len(stopped[0]) <= 4
    assert stopped[0][-1] in base.stop_tokens


def test_a_tokenizer_without_a_pad_token_answers_the_same():
    base = random_base()
    padded = GREEDY(base, prompts_of(*TEXTS))
    base.tokenizer.pad_token = None
    assert GREEDY(base, prompts_of(*TEXTS)) == padded


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 has no position beyond its context
def test_a_row_near_the_end_of_the_context_does_not_shorten_the_others(kind):
    base = random_base(kind, context=80)
    base.stop_tokens = frozenset()
    prompts = prompts_of("a" * 60, "b" * 66, "c" * 10)
    answers = GREEDY(base, prompts)
    assert [len(answer) for answer in answers] == [20, 14, 24]
    assert answers == [alone(base, prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def test_the_bases_own_generation_settings_are_neither_used_nor_changed():
    base = random_base()
    plain = GREEDY(base, prompts_of(*TEXTS))
    base.lm.generation_config.update(repetition_penalty=5.0, do_sample=True, top_k=1, max_length=30)
    before = base.lm.generation_config.to_dict()
    assert GREEDY(base, prompts_of(*TEXTS)) == plain
    assert base.lm.generation_config.to_dict() == before
    drawn = TransformersAnswers(8, 24, 5.0, 0)(base, prompts_of(*TEXTS))
    assert drawn != plain  # top_k=1 would make them equal


def test_a_draw_depends_on_the_seed_and_on_nothing_drawn_before():
    base = random_base()
    drawing = TransformersAnswers(8, 24, 1.0, 0)
    first = drawing(base, prompts_of(*TEXTS))
    torch.rand(3)
    state = torch.get_rng_state()
    assert drawing(base, prompts_of(*TEXTS)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert TransformersAnswers(8, 24, 1.0, 1)(base, prompts_of(*TEXTS)) != first


def test_draws_follow_the_bases_own_law():
    """One token at temperature 2, 4,000 rows: the counts of the likeliest words within five deviations."""
    base = random_base()
    prompt = prompts_of("a")[0]
    drawn = TransformersAnswers(4000, 1, 2.0, 0)(base, [prompt] * 4000)
    law_V = (base.lm(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
    counts_V = torch.bincount(torch.tensor(drawn).flatten(), minlength=len(law_V))
    deviation_V = (4000 * law_V * (1 - law_V)).sqrt()
    likely_V = law_V > 0.005
    assert likely_V.sum() > 5
    assert ((counts_V - 4000 * law_V).abs() < 5 * deviation_V)[likely_V].all()


def test_questions_come_longest_first_in_an_order_of_their_own():
    base = random_base()
    prompts = [Prompt(f"p{n}", "test", (text, "More?"), None) for n, text in enumerate([*TEXTS, "a"])]
    said = {prompt.id: [] for prompt in prompts}
    asked = questions(base, prompts, said, 0)
    assert asked == questions(base, prompts[::-1], said, 0)
    assert [question.id for question in asked] == ["p4", "p2", "p1", "p0", "p3", "p5"]


def test_a_later_turn_is_asked_after_the_bases_own_answers():
    base = random_base()
    prompts = [Prompt("p", "test", ("Hi", "Why?"), None), Prompt("q", "test", ("Hi",), None)]
    (question,) = questions(base, prompts, {"p": ["Hello"], "q": ["Hello"]}, 1)
    expected = "<bos><|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Why?<|end|><|assistant|>"
    assert base.tokenizer.decode(list(question.tokens)) == expected
    assert (question.id, question.turn, question.cut) == ("p", 1, 0)


def test_a_long_history_is_cut_from_the_left():
    base = random_base(context=64)
    (question,) = questions(base, [Prompt("p", "test", ("x" * 100,), None)], {"p": []}, 0)
    assert (len(question.tokens), question.cut) == (48, 56)
    assert question.tokens[-2:].tolist() == [END, 3]


@pytest.mark.parametrize("wrong", [(0, 24, 0.0), (8, 0, 0.0), (8, 24, -1.0)])
def test_impossible_settings_are_one_sentence(wrong):
    with pytest.raises(InputError, match=f"no answers with batch_size {wrong[0]}, temperature {wrong[2]}"):
        TransformersAnswers(*wrong, seed=0)
