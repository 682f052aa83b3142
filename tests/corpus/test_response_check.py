"""Responses of a server without the server: the share of argmax tokens, and texts encoded again."""

from __future__ import annotations

import pytest
import torch
from prompts import make_requests
from tiny_models import EOS_ID, random_base

from ctcdraft.corpus.generation.openai import reencode_text, text_request, with_stop_token
from ctcdraft.corpus.generation.requests import Response, Skipped
from ctcdraft.corpus.generation.response_check import refuse_mismatched_responses, response_log_probs
from ctcdraft.errors import InputError

PROMPT = [0, 40, 41, 42]


@pytest.fixture(scope="module")
def base():
    return random_base()


def greedy_but_for(base, others: int, tokens: int = 20) -> list[int]:
    """Return a response whose first `others` tokens are the second most probable ones and the rest the argmax."""
    answer: list[int] = []
    for position in range(tokens):
        log_probs_V = response_log_probs(base, PROMPT, [*answer, 0], 1.0)[-1]
        answer.append(int(log_probs_V.topk(2).indices[1 if position < others else 0]))
    return answer


@pytest.mark.parametrize("others", [0, 1, 2])
def test_responses_with_a_few_near_ties_are_accepted(base, others):
    response = greedy_but_for(base, others)
    assert sum(a != b for a, b in zip(response, greedy_but_for(base, 0), strict=True)) >= min(others, 1)
    refuse_mismatched_responses(base, [(PROMPT, response)], 0.0, "it")  # raises nothing


@pytest.mark.parametrize("others", [3, 5, 12])
def test_responses_with_more_than_a_tenth_of_other_tokens_are_refused(base, others):
    """A model with most greedy tokens in common is still another model: 17, 15 and 8 of 20."""
    sentence = f"of 20 greedy tokens {20 - others} are the base's argmax;"
    with pytest.raises(InputError, match=f"^it does not answer as random-llama: {sentence}"):
        refuse_mismatched_responses(base, [(PROMPT, greedy_but_for(base, others))], 0.0, "it")


def test_the_share_is_of_all_answers_together(base):
    """One response in ten may differ altogether if the nine others agree in every token."""
    own, off = greedy_but_for(base, 0), greedy_but_for(base, 20)
    refuse_mismatched_responses(base, [(PROMPT, own)] * 9 + [(PROMPT, off)], 0.0, "it")
    with pytest.raises(InputError, match="of 180 greedy tokens 140 are the base's argmax"):
        refuse_mismatched_responses(base, [(PROMPT, own)] * 7 + [(PROMPT, off)] * 2, 0.0, "it")


def test_response_log_probs_are_those_after_the_prompt_and_the_earlier_tokens(base):
    """The log-probabilities at each position are those after the prompt and the earlier response tokens."""
    answer = greedy_but_for(base, 4, tokens=6)
    for position in range(6):
        tokens = torch.tensor([[*PROMPT, *answer[:position]]])
        states_1LD = base.hidden_states(tokens, torch.ones_like(tokens))
        expected_V = base.head(states_1LD[0, -1]).double().log_softmax(dim=-1)
        torch.testing.assert_close(
            response_log_probs(base, PROMPT, answer, 1.0)[position], expected_V, atol=1e-4, rtol=0
        )


def test_a_text_is_reencoded_only_if_its_ids_can_be_the_generated_ones(base):
    ids = base.tokenizer("ab c", add_special_tokens=False)["input_ids"]
    assert reencode_text(base, "ab c", "length", 4) == Response(ids, "reencoded")
    assert reencode_text(base, "ab c", "stop", 5) == Response([*ids, EOS_ID], "reencoded")  # the server counts the end
    assert reencode_text(base, "ab c", "stop", 4) == Response([*ids, EOS_ID], "reencoded")  # or does not
    assert reencode_text(base, "ab c", "stop", None) == Response([*ids, EOS_ID], "reencoded")
    assert isinstance(reencode_text(base, "ab c", "length", 5), Skipped)  # other tokens of the same text
    assert isinstance(reencode_text(base, "ab \N{REPLACEMENT CHARACTER}", "length", 4), Skipped)
    assert isinstance(reencode_text(base, "ab <|end|>", "length", 4), Skipped)  # a text that spells a special token
    assert isinstance(reencode_text(base, "", "length", 1), Skipped)
    assert reencode_text(base, "", "stop", 1) == Response([EOS_ID], "reencoded")
    assert with_stop_token(base, [*ids, EOS_ID], "stop", "generated") == Response([*ids, EOS_ID])


def test_the_stored_reasons_of_skipped_responses_keep_their_wording(base):
    """They are in the part files, whose checksums are the corpus's hash: another wording would be another corpus."""
    reasons = {
        "no text stands for exactly its prompt": text_request(base, make_requests([[255]])[0]),
        "its text does not survive encoding": reencode_text(base, "ab \N{REPLACEMENT CHARACTER}", "length", 4),
        "its text was not said in the words that encoding gives": reencode_text(base, "ab c", "length", 5),
        "nothing was said": with_stop_token(base, [], "length", "generated"),
    }
    assert reasons == {text: Skipped(text) for text in reasons}
