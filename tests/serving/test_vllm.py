"""A head served by vLLM: tokens of undrafted vLLM, acceptance of our own loop, the exact distribution when sampling."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm`")

from engine_runs import SETTINGS, TINY, conditional_p_values, drafted, holm_passes, near_ties, own_counts, run_engine

from ctcdraft.models.loading import load_base

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]
MAX_TOKENS, REQUESTS = 96, 24
LENGTHS = [5 + 13 * i % 60 for i in range(40)]
ABORTED = [4, 11, 23, 30]
SAMPLING = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
DRAWS, POSITIONS = 3000, 4


@pytest.fixture(scope="module")
def base():
    return load_base(str(TINY / "base"), "float32", "cpu", name="tiny", aux_layers=["last", 4, 11])


@pytest.fixture(scope="module")
def prompts(base):
    """Prompts of many lengths, half of which begin with the same two hundred tokens."""
    lines = (TINY / "prompts" / "held_out.jsonl").read_text().splitlines()[:REQUESTS]
    texts = [json.loads(line)["turns"][0] for line in lines]
    prefix = " ".join(texts[:6])

    def ids(text):
        turns = [{"role": "user", "content": text}]
        return list(base.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    return [ids(f"{prefix} {text}" if number % 2 else text) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def crowd(prompts):
    asked = [prompts[number % REQUESTS] for number in range(len(LENGTHS))]
    return {"prompts": asked, "lengths": LENGTHS, "aborted": ABORTED}


@pytest.fixture(scope="module")
def answers(prompts):
    return {"prompts": prompts, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def samples(prompts):
    return {"prompt": prompts[4], "count": DRAWS, "tokens": POSITIONS, "sampling": SAMPLING}


@pytest.fixture(scope="module")
def stock(tmp_path_factory, answers, crowd):
    return run_engine(tmp_path_factory.mktemp("stock"), {"settings": SETTINGS, "answers": answers, "crowd": crowd})


@pytest.fixture(scope="module")
def served(tmp_path_factory, answers, crowd, samples):
    call = {"settings": drafted(), "answers": answers, "crowd": crowd, "samples": samples}
    return run_engine(tmp_path_factory.mktemp("served"), call)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory, crowd):
    return run_engine(tmp_path_factory.mktemp("adaptive"), {"settings": drafted("adaptive"), "crowd": crowd})


@pytest.fixture(scope="module")
def roomy(tmp_path_factory, crowd):
    """The crowd in a cache that has room for all."""
    settings = drafted(settings=SETTINGS | {"num_gpu_blocks_override": 400})
    return run_engine(tmp_path_factory.mktemp("roomy"), {"settings": settings, "crowd": crowd})


def test_greedy_answers_are_those_of_undrafted_vllm(base, prompts, stock, served):
    pairs = zip(prompts, served["answers"]["tokens"], stock["answers"]["tokens"], strict=True)
    assert near_ties(TINY / "base", pairs) <= 1
    assert served["answers"]["counts"][0] > 0


@pytest.mark.parametrize("lengths", ["served", "adaptive"])
def test_answers_survive_chunks_shared_prefixes_preemptions_and_aborts(base, crowd, stock, lengths, request):
    ours, theirs = request.getfixturevalue(lengths)["crowd"], stock["crowd"]
    assert ours["preemptions"] > 0
    assert ours["cached"] > 0
    assert ours["counts"][0] > 0
    numbers = sorted(set(ours["tokens"]) & set(theirs["tokens"]), key=int)
    assert len(numbers) >= len(LENGTHS) - len(ABORTED)
    pairs = [
        (crowd["prompts"][int(n)], ours["tokens"][n], theirs["tokens"][n]) for n in numbers if int(n) not in ABORTED
    ]
    assert len(pairs) == len(LENGTHS) - len(ABORTED)
    assert near_ties(TINY / "base", pairs) <= 1


def test_drafts_are_as_good_after_preemptions(served, roomy):
    """Wrong keys and values of the head would leave the answers as they are."""
    assert roomy["crowd"]["preemptions"] == 0
    drafts, accepted = served["crowd"]["counts"]
    other_drafts, other_accepted = roomy["crowd"]["counts"]
    assert accepted / drafts == pytest.approx(other_accepted / other_drafts, rel=0.03)


def test_as_many_draft_tokens_are_accepted_as_in_our_own_loop(base, prompts, served):
    drafts, accepted = own_counts(base, TINY / "head", prompts, MAX_TOKENS)
    their_drafts, their_accepted = served["answers"]["counts"]
    assert their_accepted == pytest.approx(accepted, rel=0.01)
    assert their_drafts == pytest.approx(drafts, rel=0.01)


def test_sampled_tokens_follow_the_exact_distribution(base, samples, served):
    p_values = conditional_p_values(base, samples["prompt"], served["samples"], SAMPLING)
    assert len(p_values) == POSITIONS - 1
    assert holm_passes(p_values), p_values


def test_without_the_override_they_do_not(base, samples, tmp_path):
    """Fails once vLLM has mended its fault: then delete ctcdraft/serving/cpu_sampling.py and this test."""
    plain = {"temperature": SAMPLING["temperature"]}  # a top-k that was never written may be out of bounds
    call = {"settings": drafted(), "samples": samples | {"sampling": plain, "count": 2000}}
    result = run_engine(tmp_path, call, VLLM_PLUGINS="none")  # the entry point is not called
    assert min(conditional_p_values(base, samples["prompt"], result["samples"], plain)) < 1e-6
