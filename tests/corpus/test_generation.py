"""Responses generated in batches equal those generated one by one; sampling depends only on each response's seed."""

import pytest
import torch
import transformers
from prompts import generated_tokens, make_requests
from tiny_models import EOS_ID, random_base, tiny_tokenizer

from ctcdraft.corpus.generation.requests import Sample, batch_samples, build_request
from ctcdraft.corpus.generation.transformers import TransformersAnswers, left_pad, sample_tokens
from ctcdraft.corpus.types import Prompt
from ctcdraft.errors import InputError

TEXTS = ["a", "How are you today?", "Tell me a story about a very small cat.", "7", "b" * 60]
GREEDY = TransformersAnswers(8, 24, 0.0, 0, 1)
DRAWING = TransformersAnswers(8, 24, 1.0, 0, 1)


def prompts_of(*texts):
    return [tiny_tokenizer()(text)["input_ids"] for text in texts]


def alone(base, prompt, new_tokens):
    """Return greedy tokens generated one at a time, without batch, padding or cache."""
    generated = []
    while len(generated) < new_tokens and (not generated or generated[-1] not in base.stop_token_ids):
        logits_V = base.lm(torch.tensor([[*prompt, *generated]])).logits[0, -1]
        generated.append(int(logits_V.argmax()))
    return generated


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_padded_batch_equals_batches_of_one(kind):
    base = random_base(kind)
    answers = generated_tokens(GREEDY, base, prompts_of(*TEXTS))
    assert answers == [alone(base, prompt, 24) for prompt in prompts_of(*TEXTS)]


def test_a_response_ends_with_its_first_stop_token():
    base = random_base()
    free = generated_tokens(GREEDY, base, prompts_of(*TEXTS))
    base.stop_token_ids = frozenset({free[0][3], free[2][7]})
    stopped = generated_tokens(GREEDY, base, prompts_of(*TEXTS))
    assert stopped == [alone(base, prompt, 24) for prompt in prompts_of(*TEXTS)]
    assert len(stopped[0]) <= 4
    assert stopped[0][-1] in base.stop_token_ids


def test_a_tokenizer_without_a_pad_token_gives_the_same_responses():
    base = random_base()
    padded = generated_tokens(GREEDY, base, prompts_of(*TEXTS))
    base.tokenizer.pad_token = None
    assert generated_tokens(GREEDY, base, prompts_of(*TEXTS)) == padded


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 has no position ids beyond its context
def test_a_row_near_the_end_of_the_context_does_not_shorten_the_others(kind):
    base = random_base(kind, context=80)
    base.stop_token_ids = frozenset()
    prompts = prompts_of("a" * 60, "b" * 66, "c" * 10)
    answers = generated_tokens(GREEDY, base, prompts)
    assert [len(answer) for answer in answers] == [20, 14, 24]
    assert answers == [alone(base, prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def test_the_generation_config_of_the_base_model_is_neither_used_nor_changed():
    base = random_base()
    plain = generated_tokens(GREEDY, base, prompts_of(*TEXTS))
    base.lm.generation_config.update(repetition_penalty=5.0, do_sample=True, top_k=1, max_length=30)
    before = base.lm.generation_config.to_dict()
    assert generated_tokens(GREEDY, base, prompts_of(*TEXTS)) == plain
    assert base.lm.generation_config.to_dict() == before
    drawn = generated_tokens(TransformersAnswers(8, 24, 5.0, 0, 1), base, prompts_of(*TEXTS))
    assert drawn != plain  # top_k=1 would make them equal


def test_a_batch_equals_transformers_generate():
    base = random_base()
    tokens_BL, mask_BL = left_pad(prompts_of(*TEXTS), 60)
    settings = transformers.GenerationConfig(
        max_new_tokens=24, do_sample=False, eos_token_id=EOS_ID, pad_token_id=EOS_ID
    )
    output_BL = base.lm.generate(tokens_BL, attention_mask=mask_BL, generation_config=settings)
    for answer, output in zip(
        generated_tokens(GREEDY, base, prompts_of(*TEXTS)), output_BL[:, 60:].tolist(), strict=True
    ):
        assert output[: len(answer)] == answer
        assert len(answer) == 24 or answer[-1] == EOS_ID


@pytest.mark.parametrize("answers", [GREEDY, DRAWING])
def test_a_batch_that_shrinks_at_every_step_gives_the_same_responses(answers):
    base = random_base()
    base.stop_token_ids = frozenset(range(5, 60))  # about one token in five ends a response
    texts = [chr(97 + n) * (1 + n) for n in range(20)]
    together = generated_tokens(answers, base, prompts_of(*texts))
    assert len({len(answer) for answer in together}) > 4
    names = [f"q{n}" for n in range(20)]
    for name, prompt, answer in zip(names, prompts_of(*texts), together, strict=True):
        assert generated_tokens(answers, base, [prompt], [name]) == [answer]


def test_a_sampled_response_depends_on_its_own_seed_only():
    base = random_base()
    first = generated_tokens(DRAWING, base, prompts_of(*TEXTS))
    torch.rand(3)
    state = torch.get_rng_state()
    assert generated_tokens(DRAWING, base, prompts_of(*TEXTS)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert generated_tokens(TransformersAnswers(8, 24, 1.0, 1, 1), base, prompts_of(*TEXTS)) != first
    # Another batch and another row in it: the same sampled tokens.
    assert generated_tokens(DRAWING, base, prompts_of(*TEXTS)[1::-1], ["q1", "q0"]) == first[1::-1]


def test_every_seed_prompt_sample_and_turn_has_its_own_key():
    ids = ["a", "1", "1/1", "/"]
    requests = [
        question for sample in range(3) for turn in range(3) for question in make_requests([[5]] * 4, ids, turn, sample)
    ]
    keys = {request.random_key(seed) for request in requests for seed in (0, 1)}
    assert len(keys) == 2 * len(requests)


def test_a_uniform_draw_selects_the_token_at_that_cumulative_probability():
    logits_BV = torch.tensor([[0.5, 0.3, 0.0, 0.2]]).log().expand(6, 4)
    coins_B = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits_BV, 1.0, coins_B).tolist() == [0, 0, 1, 1, 3, 3]


def test_sampled_tokens_follow_the_distribution_of_the_base_model():
    """One token at temperature 2, 4,000 rows: the counts of the most probable tokens within five deviations."""
    base = random_base()
    prompt = prompts_of("a")[0]
    tokens = generated_tokens(TransformersAnswers(4000, 1, 2.0, 0, 1), base, [prompt] * 4000)
    probs_V = (base.lm(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
    counts_V = torch.bincount(torch.tensor(tokens).flatten(), minlength=len(probs_V))
    deviation_V = (4000 * probs_V * (1 - probs_V)).sqrt()
    likely_V = probs_V > 0.005
    assert likely_V.sum() > 5
    assert ((counts_V - 4000 * probs_V).abs() < 5 * deviation_V)[likely_V].all()


def test_samples_are_batched_longest_first_whatever_their_order():
    prompts = [Prompt(f"p{n}", "test", (text,), None) for n, text in enumerate([*TEXTS, "a"])]
    prompts.append(Prompt("two", "test", ("a", "b"), None))  # more turns come before more tokens
    batch_of_two = TransformersAnswers(3, 24, 1.0, 0, 2)
    formed = batch_samples(tiny_tokenizer(), prompts, batch_of_two)
    assert formed == batch_samples(tiny_tokenizer(), prompts[::-1], batch_of_two)
    assert [(one.prompt.id, one.sample) for batch in formed for one in batch] == [
        (name, sample) for name in ("two", "p4", "p2", "p1", "p0", "p3", "p5") for sample in (0, 1)
    ]
    assert [len(batch) for batch in formed] == [3, 3, 3, 3, 2]


def test_a_later_turn_follows_the_responses_of_the_base_model():
    base = random_base()
    request = build_request(base, Sample(Prompt("p", "test", ("Hi", "Why?"), None), 1), ["Hello"])
    expected = "<bos><|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Why?<|end|><|assistant|>"
    assert base.tokenizer.decode(list(request.tokens)) == expected
    assert (request.id, request.turn, request.sample, request.cut) == ("p", 1, 1, 0)


def test_a_long_history_is_cut_from_the_left():
    base = random_base(context=64)
    request = build_request(base, Sample(Prompt("p", "test", ("x" * 100,), None), 0), [])
    assert (len(request.tokens), request.cut) == (48, 56)
    assert request.tokens[-2:].tolist() == [EOS_ID, 3]


@pytest.mark.parametrize("settings", [(0, 24, 0.0, 0, 1), (8, 0, 0.0, 0, 1), (8, 24, -1.0, 0, 1), (8, 24, 0.0, 0, 0)])
def test_settings_out_of_range_are_one_sentence(settings):
    words = r"answers.((batch_size|max_new_tokens|samples) must be an integer|temperature)"
    with pytest.raises(InputError, match=words):
        TransformersAnswers(*settings)
    with pytest.raises(InputError, match="samples=3 at temperature 0 is one answer 3 times; raise"):
        TransformersAnswers(8, 24, 0.0, 0, 3)
