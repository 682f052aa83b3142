"""Drawn drafts: the chains follow the law they carry, and through a small model the text follows the base's."""

from __future__ import annotations

import itertools

import pytest
import torch
from laws import MIN_P_VALUE, p_value, path_tokens
from tiny_models import random_lm, tiny_tokenizer
from truths import slow_next_label_distribution, slow_texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.rejection import Rejection, k_sequential, multi_round, sampling_order
from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.decoding.verification import TypicalAcceptance, match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.request import DraftSampling, TreeRequest
from ctcdraft.drafters.trees.sampled_chains import merge_chains
from ctcdraft.drafters.trees.sampled_labels import SampledLabels
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

WORDS = 4
PROMPT = torch.tensor([0, 2, 1])


def frames(seed, classes=WORDS + 1, steps=4):
    return torch.randn(steps, classes, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def settings(verify, temperature=1.0, tokens=3, lossless=True):
    return DecodingSettings(tokens, 12, temperature, 0, 1.0, verify, lossless, token_for_token=False)


class DrawnFrames:
    """Chains from frames that depend on the root alone: a head without a model."""

    def __init__(self, chains: int) -> None:
        self.frame_tree = SampledLabels(chains)

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        log_probs_TC = frames(int(context.root))
        return self.frame_tree(log_probs_TC, TreeRequest.of(context, (), rng)), None


class ArgmaxKeptAsDrawn(DrawnFrames):
    """The likeliest word with the law it was *not* drawn from: the field's commonest mistake."""

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        tree, _ = super().draft(context, memory, rng)
        if tree.draft_probs_NV is None:
            return tree, None
        guess = tree.draft_probs_NV[0].argmax()[None]
        laws_NV = torch.stack([tree.draft_probs_NV[0], torch.zeros(WORDS, dtype=torch.float64)])
        return TokenTree(torch.cat([context.root[None], guess]), torch.tensor([-1, 0]), 1, laws_NV), None


@pytest.fixture(scope="module")
def base():
    """Four words, hence 64 texts of three."""
    return BaseLM(random_lm(vocabulary=WORDS, context=32, seed=2, eos_token_id=3), tiny_tokenizer(), "four-words")


@pytest.fixture(scope="module")
def exact(base):
    """The law of three words after the prompt, by reading every text whole."""
    law = []
    with torch.inference_mode():
        for text in itertools.product(range(WORDS), repeat=3):
            logits = base.lm(torch.tensor([[*PROMPT.tolist(), *text]])).logits[0].double()
            rows = (logits / TEMPERATURE).softmax(-1)[len(PROMPT) - 1 :]
            law.append(float(torch.stack([rows[step, word] for step, word in enumerate(text)]).prod()))
    assert sum(law) == pytest.approx(1)
    return law


TEMPERATURE = 2.0  # flat enough that most of the 64 texts occur


def texts(base, drafter, verify, samples_drafts):
    seen = [0] * WORDS**3
    for seed in range(samples_drafts):
        a, b, c = generate(base, drafter, PROMPT, settings(verify, TEMPERATURE), frozenset(), seed).tokens
        seen[(a * WORDS + b) * WORDS + c] += 1
    return seen


VERIFIERS = [(Rejection(multi_round), 1), (Rejection(multi_round), 3), (Rejection(k_sequential), 3)]


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["rejection", "specinfer", "spectr"])
def test_through_a_small_model_the_text_has_the_bases_law(base, exact, verify, chains):
    assert p_value(texts(base, DrawnFrames(chains), verify, 400), exact) > MIN_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["rejection", "specinfer", "spectr"])
def test_through_a_small_model_many_times(base, exact, verify, chains):
    assert p_value(texts(base, DrawnFrames(chains), verify, 10_000), exact) > MIN_P_VALUE


def test_through_a_small_model_a_softmax_kept_for_an_argmax_is_found_out(base, exact):
    assert p_value(texts(base, ArgmaxKeptAsDrawn(1), Rejection(multi_round), 400), exact) < MIN_P_VALUE


@pytest.mark.parametrize(
    "verify",
    [Rejection(multi_round), Rejection(k_sequential), TypicalAcceptance(0.09, 0.3)],
    ids=["multi_round", "k_sequential", "typical"],
)
@pytest.mark.parametrize("chains", [1, 3])
def test_at_temperature_0_every_verifier_says_the_bases_words(base, verify, chains):
    for seed in range(6):
        how = settings(verify, 0.0, tokens=12)
        truth = generate(base, Autoregressive(base), PROMPT, settings(match, 0.0, tokens=12), frozenset(), seed).tokens
        assert generate(base, DrawnFrames(chains), PROMPT, how, frozenset(), seed).tokens == truth


@pytest.mark.parametrize("chains", [1, 3])
def test_drawn_chains_read_by_match_say_what_autoregression_says(base, chains):
    for seed in range(6):
        how = settings(match, 1.0, tokens=12)
        truth = generate(base, Autoregressive(base), PROMPT, how, frozenset(), seed).tokens
        assert generate(base, DrawnFrames(chains), PROMPT, how, frozenset(), seed).tokens == truth


# --- what the tree carries ----------------------------------------------------------------------------------------


def drawn(seed, chains, log_probs_TC, depth=9, nodes=64, stops=()):
    rng = torch.Generator().manual_seed(seed)
    return SampledLabels(chains)(log_probs_TC, TreeRequest(torch.tensor(0), depth, nodes, stops, DraftSampling(rng)))


@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("stops", [(), (1,)])
def test_every_row_is_the_exact_law_behind_its_node(chains, stops):
    """Against all alignments; below a stop word and at the depth that was asked for nothing is drawn."""
    log_probs_TC = frames(5).double().log_softmax(-1)
    probs = log_probs_TC.exp().tolist()
    for seed in range(15):
        tree = drawn(seed, chains, log_probs_TC, depth=2, stops=stops)
        draws_NK = sampling_order(tree)
        for node in range(len(tree)):
            text = path_tokens(tree, node)
            if len(text) == 2 or set(text) & set(stops):
                assert tree.draft_probs_NV[node].sum() == 0
                assert (draws_NK[node] == -1).all()
                continue
            law, _ = slow_next_label_distribution(probs, WORDS, text)
            assert tree.draft_probs_NV[node].tolist() == pytest.approx([law[w] for w in range(WORDS)], abs=1e-10, rel=0)
            children = set((tree.parents_N == node).nonzero()[:, 0].tolist())
            assert {int(child) for child in draws_NK[node] if child >= 0} == children
            through = chains if node == 0 else int((draws_NK == node).sum())
            assert int((draws_NK[node] != -1).sum()) == through  # who comes this far draws once more


def test_chains_have_the_probability_of_their_texts():
    """4,000 chains of up to four labels against the enumeration of every alignment: end and all."""
    log_probs_TC = frames(6, classes=4).double().log_softmax(-1)
    truth = slow_texts(log_probs_TC.exp().tolist(), 3)
    names = sorted(truth)
    seen = dict.fromkeys(names, 0)
    for seed in range(1000):
        tree = drawn(seed, 4, log_probs_TC)
        paths = [[0] for _ in range(4)]
        for chain, path in enumerate(paths):
            while (child := int(tree.sampled_nodes_NK[path[-1], chain])) >= 0:
                path.append(child)
            seen[path_tokens(tree, path[-1])] += 1
    assert p_value([seen[name] for name in names], [truth[name] for name in names]) > MIN_P_VALUE


def test_chains_share_nodes_and_keep_their_order():
    """Chains a b, a stop, c d: node 1 was drawn twice after the root, then node 3."""
    words = torch.tensor([[0, 1], [0, NO_TOKEN], [2, 3]])
    laws = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4) / 100
    laws[1, 0] = laws[2, 0] = laws[0, 0]
    laws[1, 1] = laws[0, 1]
    tree = merge_chains(torch.tensor(9), words, laws, torch.ones(3, 2, dtype=torch.bool))
    assert tree.tokens_N.tolist() == [9, 0, 1, 2, 3]
    assert tree.parents_N.tolist() == [-1, 0, 1, 0, 3]
    assert tree.sampled_nodes_NK.tolist() == [[1, 1, 3], [2, NO_TOKEN, -1], [-1] * 3, [-1, -1, 4], [-1] * 3]
    assert torch.equal(tree.draft_probs_NV[[0, 1, 3]], torch.stack([laws[0, 0], laws[0, 1], laws[2, 1]]))
    assert tree.draft_probs_NV[[2, 4]].sum() == 0


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (12, 10)])
def test_a_budget_is_shared_by_the_chains(nodes, most):
    """Never more than `nodes`, and no chain is cut because of what another one says."""
    sizes = {len(drawn(seed, 3, frames(seed, classes=60), depth=9, nodes=nodes)) for seed in range(40)}
    assert max(sizes) == most


def test_without_a_record_of_draws_every_guess_is_one():
    laws = torch.tensor([[0.5, 0.5], [0.5, 0.1], [0.0, 0.0], [0.3, 0.3]])
    tree = TokenTree(torch.tensor([0, 1, 0, 1]), torch.tensor([-1, 0, 1, 2]), 3, laws)
    assert sampling_order(tree).tolist() == [[1], [2], [3], [NO_TOKEN]]


def test_no_chain_is_refused():
    with pytest.raises(InputError, match="chains=0"):
        SampledLabels(0)


# --- typical ------------------------------------------------------------------------------------------------------


def test_typical_by_pencil():
    """Uniform over four: H = log 4, threshold min(0.3, 0.5 / 4) = 1/8 < 1/4: every guess stands. Nearly sure: 0.3."""
    tree = TokenTree.from_paths(torch.tensor(0), torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 2]), 9)
    laws = torch.tensor([[0.25] * 4, [0.1, 0.1, 0.2, 0.6], [0.25] * 4, [0.6, 0.1, 0.2, 0.1], [0.25] * 4])
    verdict = TypicalAcceptance(0.3, 0.5)(tree, laws.log(), GumbelNoise(0), 5)
    # Both first words stand. H(.6 .2 .1 .1) = 1.089, so min(0.3, 0.5 x 0.337) = 0.168: 2 (0.2) and 0 (0.6) stand too;
    # of the two longest paths the base finds 3 0 the likelier.
    assert verdict.path_K[: verdict.length].tolist() == [0, 3, 4]
    verdict = TypicalAcceptance(0.22, 2.0)(
        tree, laws.log(), GumbelNoise(0), 5
    )  # 0.22 everywhere, as without it 0.5 behind the root
    assert verdict.path_K[: verdict.length].tolist() == [0, 3, 4]
    verdict = TypicalAcceptance(0.3, 2.0)(
        tree, laws.log(), GumbelNoise(0), 5
    )  # 0.3 everywhere: not even the first words stand
    assert verdict.path_K[: verdict.length].tolist() == [0]


def test_typical_changes_the_text(base, exact):
    """Why it is marked lossy: the same chi-square that passes the others refuses it."""
    assert p_value(texts(base, DrawnFrames(1), TypicalAcceptance(0.09, 0.3), 400), exact) < MIN_P_VALUE


def test_typical_refuses_values_that_mean_nothing():
    with pytest.raises(InputError, match="epsilon=1"):
        TypicalAcceptance(1.5, 0.3)


def test_a_single_word_left_by_top_k_is_no_trouble():
    """Where p is one-hot at T > 0 rejection agrees with the base's only word."""
    tree = drawn(1, 3, frames(3))
    log_probs = warp(torch.randn(len(tree), WORDS, generator=torch.Generator().manual_seed(0)), 1.0, top_k=1)
    for rule in (multi_round, k_sequential):
        verdict = Rejection(rule)(tree, log_probs, GumbelNoise(4), 2)
        last = int(verdict.path_K[verdict.length - 1])
        assert int(verdict.bonus) == int(log_probs[last].argmax())
