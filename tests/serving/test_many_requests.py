"""480 requests of mixed lengths against undrafted vLLM, acceptance, and 20,000 sampled answers: minutes.

Beside the embedded base a second one is served if CTCDRAFT_HEADS has a folder with a head of that name. `-s` prints
the figures.
"""

from __future__ import annotations

import random
import re
import shutil
from itertools import cycle
from pathlib import Path

import pytest
import torch
from local_data import require_data
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm-slow`")

from engine_runs import (
    SETTINGS,
    TINY,
    drafted,
    edit_json,
    holm_passes,
    marginal_p_values,
    near_ties,
    own_counts,
    run_engine,
)

from ctcdraft.config.published_head import read_head_config
from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.evaluation.benchmarks import gsm8k, mt_bench
from ctcdraft.models.loading import load_base

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.filterwarnings("default"),
]  # fmt: skip
REQUESTS, CONTEXT, MAX_TOKENS, ANSWERED = 480, 512, 96, 64
SAMPLING = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
DRAWS, POSITIONS = 20_000, 4
WIDTH, PADDED = 16, 32
PROJECTION = re.compile(r"(?:self_attn\.|attention\.)(q|k|v|o)\w*\.weight$")  # q_proj in the base, query in a head


def padded_weight(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a projection [heads * WIDTH, D] or, of the output, [D, heads * WIDTH] with padded heads."""
    if (found := PROJECTION.search(name)) is None:
        return weight
    rows = weight.T if found[1] == "o" else weight
    heads = rows.unflatten(0, (-1, WIDTH))
    padded = heads.new_zeros(len(heads), PADDED, heads.shape[2])
    half = torch.arange(WIDTH // 2)
    # Pair i turns by theta^(-2 i / width): in twice the width that is pair 2 i.
    padded[:, torch.cat([2 * half, 2 * half + PADDED // 2])] = heads
    rows = padded.flatten(0, 1) * ((PADDED / WIDTH) ** 0.5 if found[1] == "q" else 1.0)
    return (rows.T if found[1] == "o" else rows).contiguous()


def pad(base: Path, head: Path, folder: Path) -> tuple[Path, Path]:
    """Write both with attention heads of width 32, which vLLM's CPU attention asks for at least; return their folders.

    The logits are the same: added numbers are zero, rotary pairs go where they keep their frequencies, and queries are
    scaled for the square root of the width.
    """
    new_base, new_head = folder / "base", folder / "head"
    for old, new in ((base, new_base), (head, new_head)):
        shutil.copytree(old, new, copy_function=shutil.copyfile)
        new.chmod(0o755)
        tensors = load_file(old / "model.safetensors")
        tensors = {name: padded_weight(name, weight) for name, weight in tensors.items()}
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    edit_json(new_base / "config.json", lambda values: values.update(head_dim=PADDED))
    fingerprint = load_base(str(new_base), "float32", "cpu").fingerprint()
    edit_json(new_head / "config.json", lambda values: values["fingerprint"].update(weights=fingerprint["weights"]))
    return new_base, new_head


@pytest.fixture(scope="module", params=["tiny", "tinystories-656K"])
def pair(request, tmp_path_factory):
    """Return the folders of a base and its head."""
    if request.param == "tiny":
        return TINY / "base", TINY / "head"
    base, head = require_data("CTCDRAFT_MODELS", request.param), require_data("CTCDRAFT_HEADS", request.param)
    return pad(base, head, tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def base(pair):
    layers = read_head_config(pair[1])["fingerprint"]["taps"]
    return load_base(str(pair[0]), "float32", "cpu", name="base", aux_layers=layers)


@pytest.fixture(scope="module")
def prompts(base):
    """Token ids of questions of GSM8K and MT-Bench in turns; every third begins with the same two questions."""
    math = gsm8k(str(require_data("CTCDRAFT_DATA", "gsm8k/test.jsonl")), "gsm8k", "", "", "test", None, REQUESTS // 2)
    talk = mt_bench(str(require_data("CTCDRAFT_DATA", "mt_bench/question.jsonl")), "mt_bench", "", None)
    texts = [one.turns[0] for both in zip(math.prompts, cycle(talk.prompts), strict=False) for one in both]
    shared = " ".join(texts[:4:2])
    texts = [f"{shared} {text}" if number % 3 == 2 else text for number, text in enumerate(texts)]
    # The longest leave room for few tokens, so that answers end with the context.
    return [prompt_tokens(base.tokenizer, chat_messages([text], []))[: CONTEXT - 20] for text in texts]


def answered(prompts):
    """Return those whose drafts are counted: far from the end of the context, which is another in our own loop."""
    return [prompt for prompt in prompts if len(prompt) < CONTEXT - 2 * MAX_TOKENS][:ANSWERED]


@pytest.fixture(scope="module")
def call(prompts):
    """Return the requests: of one token and more, and some that only the end of the context ends."""
    rng = random.Random(1)
    lengths = [rng.choice((1, 2, rng.randint(3, 40), rng.randint(3, 80))) for _ in prompts]
    lengths = [CONTEXT if len(prompt) > CONTEXT - 60 else n for prompt, n in zip(prompts, lengths, strict=True)]
    assert CONTEXT in lengths
    aborted = rng.sample(range(len(prompts)), len(prompts) // 20)
    return {
        "crowd": {"prompts": prompts, "lengths": lengths, "aborted": aborted},
        "answers": {"prompts": answered(prompts), "max_tokens": MAX_TOKENS},
    }


@pytest.fixture(scope="module")
def stock(pair, call, tmp_path_factory):
    settings = SETTINGS | {"model": str(pair[0])}
    return run_engine(tmp_path_factory.mktemp("stock"), {"settings": settings} | call)


@pytest.fixture(scope="module", params=["full", "adaptive"])
def served(request, pair, call, tmp_path_factory):
    settings = drafted(request.param, pair[1]) | {"model": str(pair[0])}
    return run_engine(tmp_path_factory.mktemp(request.param), {"settings": settings} | call) | {"length": request.param}


def test_all_answers_are_those_of_undrafted_vllm(pair, prompts, call, stock, served):
    ours, theirs = served["crowd"], stock["crowd"]
    numbers = [n for n in range(REQUESTS) if n not in call["crowd"]["aborted"]]
    assert ours["preemptions"] > 0
    assert ours["cached"] > 0
    triples = [(prompts[n], ours["tokens"][str(n)], theirs["tokens"][str(n)]) for n in numbers]
    ties = near_ties(pair[0], triples)
    print(f"\n{pair[1]} {served['length']}: {len(triples)} answers, {sum(len(one) for _, one, _ in triples)} tokens,")
    print(f"{ties} near ties, {ours['preemptions']} preemptions, {ours['cached']} cached tokens, {ours['steps']} steps")
    print(f"{theirs['preemptions']} preemptions, {theirs['steps']} steps without drafts")
    assert ties <= 0.01 * len(triples)


def test_as_many_draft_tokens_are_accepted_as_in_our_own_loop(pair, base, prompts, served):
    drafts, accepted = served["answers"]["counts"]
    assert drafts > 0
    if served["length"] == "full":
        own = own_counts(base, pair[1], answered(prompts), MAX_TOKENS)
        print(f"\n{pair[1]}: {drafts} drafts, {accepted} accepted draft tokens; our own loop {own}")
        assert (drafts, accepted) == pytest.approx(own, rel=0.01)


def test_20000_sampled_answers_follow_the_exact_distribution(pair, base, prompts, tmp_path):
    samples = {"prompt": prompts[0], "count": DRAWS, "tokens": POSITIONS, "sampling": SAMPLING}
    settings = drafted("full", pair[1]) | {"model": str(pair[0]), "max_num_seqs": 64, "num_gpu_blocks_override": 500}
    draws = run_engine(tmp_path, {"settings": settings, "samples": samples})["samples"]
    assert len(draws) == DRAWS
    p_values = marginal_p_values(base, prompts[0], draws, SAMPLING)
    print(f"\n{pair[1]}: p-values {p_values}")
    assert len(p_values) == POSITIONS - 1
    assert holm_passes(p_values), p_values
