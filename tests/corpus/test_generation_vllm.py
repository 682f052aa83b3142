"""The calls of vLLM's LLM class, checked with a stand-in; tests/serving/test_answers.py runs a real one."""

import sys
import types
from dataclasses import replace

import pytest
from prompts import generated_tokens, make_requests
from tiny_models import EOS_ID, random_base, tiny_tokenizer

from ctcdraft.corpus.generation.requests import Skipped
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.generation.vllm import VllmAnswers
from ctcdraft.errors import InputError

PROMPTS = [tiny_tokenizer()(text)["input_ids"] for text in ("a", "How are you?", "b" * 200)]
OFFLINE = VllmAnswers(8, 100, 0.0, 5, 1, "somewhere", "auto", 0.5, True, revision="main", checked=2)


def stand_in(base):
    """A module with the two names that are used, answering with `base`."""
    calls = []

    class LLM:
        def __init__(self, **settings):
            calls.append(settings)

        def generate(self, prompts, each, use_tqdm):
            calls.extend(each)
            outputs = []
            for prompt, settings in zip(prompts, each, strict=True):
                one = TransformersAnswers(1, settings["max_tokens"], settings["temperature"], 0, 1)
                (ids,) = generated_tokens(one, base, [prompt["prompt_token_ids"]])
                outputs.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tuple(ids))]))
            return outputs

    return types.SimpleNamespace(LLM=LLM, SamplingParams=dict), calls


def test_every_request_has_its_ids_budget_seed_and_stop_tokens(monkeypatch):
    base = random_base()
    module, calls = stand_in(base)
    monkeypatch.setitem(sys.modules, "vllm", module)
    replies = OFFLINE.start(base)(make_requests(PROMPTS))
    assert [reply.tokens for reply in replies] == generated_tokens(
        TransformersAnswers(8, 100, 0.0, 5, 1), base, PROMPTS
    )
    llm, *each = calls
    assert (llm["model"], llm["revision"], llm["generation_config"]) == ("somewhere", "main", "vllm")
    assert [settings["max_tokens"] for settings in each] == [100, 100, 56]  # a context of 256
    assert {tuple(settings["stop_token_ids"]) for settings in each} == {(EOS_ID,)}
    assert len({settings["seed"] for settings in each}) == 3


def test_responses_of_other_weights_are_refused(monkeypatch):
    """As where base.adapter= is merged here, and vLLM has the checkpoint without it."""
    module, _ = stand_in(random_base(seed=1))
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(InputError, match=r"vLLM with somewhere does not answer as .*; serve this base"):
        OFFLINE.start(random_base())(make_requests(PROMPTS))
    unchecked = replace(OFFLINE, checked=0).start(random_base())(make_requests(PROMPTS))
    assert all(reply.tokens for reply in unchecked)


def test_without_vllm_one_sentence_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"answers=vllm needs the package vllm .*; pip install 'ctcdraft\[vllm\]'"):
        OFFLINE.start(random_base())


def test_an_empty_response_is_skipped_with_the_stored_reason(monkeypatch):
    base = random_base()
    module, _ = stand_in(base)
    nothing = types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=())])
    monkeypatch.setattr(module.LLM, "generate", lambda self, prompts, each, use_tqdm: [nothing])
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert OFFLINE.start(base)(make_requests(PROMPTS[:1])) == [Skipped("nothing was said")]
