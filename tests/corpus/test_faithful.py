"""Whether answers are the base's own: a share of greedy tokens, at the bound and below it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_base

from ctcdraft.corpus.generation.openai import refuse_mismatched_responses, response_log_probs
from ctcdraft.errors import InputError

PROMPT = [0, 40, 41, 42]


@pytest.fixture(scope="module")
def base():
    return random_base()


def greedy_but_for(base, others: int, tokens: int = 20) -> list[int]:
    """An answer whose first `others` tokens are the base's second choice, and whose other tokens are its first."""
    answer: list[int] = []
    for place in range(tokens):
        log_law_V = response_log_probs(base, PROMPT, [*answer, 0], 1.0)[-1]
        answer.append(int(log_law_V.topk(2).indices[1 if place < others else 0]))
    return answer


@pytest.mark.parametrize("others", [0, 1, 2])
def test_answers_with_a_few_near_ties_are_the_base_s_own(base, others):
    refuse_mismatched_responses(base, [(PROMPT, greedy_but_for(base, others))], 0.0, "it")  # raises nothing


@pytest.mark.parametrize("others", [3, 5, 12])
def test_answers_of_which_more_than_a_tenth_is_another_choice_are_refused(base, others):
    """A model that shares most greedy tokens is still another model: 17 of 20, 15 of 20 and 8 of 20."""
    sentence = f"of 20 greedy tokens {20 - others} are the base's argmax;"
    with pytest.raises(InputError, match=f"^it does not answer as random-llama: {sentence}"):
        refuse_mismatched_responses(base, [(PROMPT, greedy_but_for(base, others))], 0.0, "it")


def test_the_share_is_of_all_answers_together(base):
    """One answer in ten may be off altogether where the nine others agree to the last token."""
    own, off = greedy_but_for(base, 0), greedy_but_for(base, 20)
    refuse_mismatched_responses(base, [(PROMPT, own)] * 9 + [(PROMPT, off)], 0.0, "it")
    with pytest.raises(InputError, match="of 180 greedy tokens 140 are the base's argmax"):
        refuse_mismatched_responses(base, [(PROMPT, own)] * 7 + [(PROMPT, off)] * 2, 0.0, "it")


def test_an_answer_is_compared_token_by_token_after_its_own_prompt(base):
    """The log-probabilities at each place are those after the prompt and the answer's tokens before it."""
    answer = greedy_but_for(base, 4, tokens=6)
    for place in range(6):
        tokens = torch.tensor([[*PROMPT, *answer[:place]]])
        states_1LD = base.hidden_states(tokens, torch.ones_like(tokens))
        expected_V = base.head(states_1LD[0, -1]).double().log_softmax(dim=-1)
        torch.testing.assert_close(response_log_probs(base, PROMPT, answer, 1.0)[place], expected_V, atol=1e-4, rtol=0)
