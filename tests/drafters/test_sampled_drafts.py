"""Sampled drafts: chains follow the distributions in their tree, and the output follows the base's."""

from __future__ import annotations

import itertools

import pytest
import torch
from chi_square import MIN_P_VALUE, p_value, path_tokens
from test_adaptive import SCRIPTED
from tiny_models import random_lm, tiny_tokenizer
from truths import slow_next_label_distribution, slow_texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.lossy_acceptance import TypicalAcceptance
from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.decoding.verification import Rejection, k_sequential, match, multi_round, sampling_order
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.request import DraftSampling, TreeRequest
from ctcdraft.drafters.trees.sampled import SampledLabels, merge_chains
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

WORDS = 4
PROMPT = torch.tensor([0, 2, 1])


def frames(seed, classes=WORDS + 1, steps=4):
    return torch.randn(steps, classes, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def settings(verify, temperature=1.0, tokens=3, lossless=True):
    return DecodingSettings(tokens, 12, temperature, 0, 1.0, verify, lossless, token_for_token=False)


class SampledFrames:
    """Chains from frames that depend on the root alone."""

    def __init__(self, chains: int) -> None:
        self.frame_tree = SampledLabels(chains)

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        log_probs_TC = frames(int(context.root))
        return self.frame_tree(log_probs_TC, TreeRequest.of(context, (), rng)), None


class ArgmaxAsSampled(SampledFrames):
    """The most probable token with a distribution that it was *not* sampled from: a common mistake."""

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        tree, _ = super().draft(context, memory, rng)
        if tree.draft_probs_NV is None:
            return tree, None
        token_1 = tree.draft_probs_NV[0].argmax()[None]
        probs_NV = torch.stack([tree.draft_probs_NV[0], torch.zeros(WORDS, dtype=torch.float64)])
        return TokenTree(torch.cat([context.root[None], token_1]), torch.tensor([-1, 0]), 1, probs_NV), None


@pytest.fixture(scope="module")
def base():
    """A vocabulary of four, hence 64 texts of three tokens."""
    return BaseLM(random_lm(vocabulary=WORDS, context=32, seed=2, eos_token_id=3), tiny_tokenizer(), "four-tokens")


@pytest.fixture(scope="module")
def exact(base):
    return exact_distribution(base, 3)


def exact_distribution(base, length):
    """The distribution of the tokens after the prompt, from one forward pass per text."""
    truth = []
    with torch.inference_mode():
        for text in itertools.product(range(WORDS), repeat=length):
            logits = base.lm(torch.tensor([[*PROMPT.tolist(), *text]])).logits[0].double()
            rows = (logits / TEMPERATURE).softmax(-1)[len(PROMPT) - 1 :]
            truth.append(float(torch.stack([rows[step, token] for step, token in enumerate(text)]).prod()))
    assert sum(truth) == pytest.approx(1)
    return truth


TEMPERATURE = 2.0  # flat enough that most of the 64 texts occur


def texts(base, drafter, verify, samples, length=3):
    seen = torch.zeros([WORDS] * length)
    for seed in range(samples):
        tokens = generate(base, drafter, PROMPT, settings(verify, TEMPERATURE, length), frozenset(), seed).tokens
        seen[tokens] += 1
    return seen.flatten().tolist()


VERIFIERS = [(Rejection(multi_round), 1), (Rejection(multi_round), 3), (Rejection(k_sequential), 3)]


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["rejection", "specinfer", "spectr"])
def test_the_output_follows_the_bases_distribution(base, exact, verify, chains):
    assert p_value(texts(base, SampledFrames(chains), verify, 400), exact) > MIN_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["rejection", "specinfer", "spectr"])
def test_the_output_follows_the_bases_distribution_with_many_samples(base, exact, verify, chains):
    assert p_value(texts(base, SampledFrames(chains), verify, 10_000), exact) > MIN_P_VALUE


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["rejection", "specinfer", "spectr"])
def test_adaptive_sizes_keep_the_bases_distribution(base, verify, chains):
    """Sizes, and skips, that follow from what was accepted before, but not from what is being drafted."""
    drafter = AdaptiveDrafter(SampledFrames(chains), SCRIPTED)
    assert drafter.samples_drafts
    assert p_value(texts(base, drafter, verify, 400, length=4), exact_distribution(base, 4)) > MIN_P_VALUE
    how = settings(verify, TEMPERATURE, tokens=12)
    answers = [generate(base, drafter, PROMPT, how, frozenset(), seed) for seed in range(9)]
    assert len({step.nodes for answer in answers for step in answer.passes}) > 2


class SizedByTheDraft(AdaptiveDrafter):
    """Drops a draft whose first token is the most probable one: the size then depends on what is being drafted."""

    def draft(self, context, memory, rng):
        tree, memory = super().draft(context, memory, rng)
        dropped = len(tree) > 1 and int(tree.tokens_N[1]) == int(tree.draft_probs_NV[0].argmax())
        return (TokenTree.only_root(context.root) if dropped else tree), memory


@pytest.mark.slow
def test_adaptive_sizes_keep_the_distribution_with_many_samples_and_others_do_not(base):
    exact = exact_distribution(base, 4)

    def p_of(kind):
        return p_value(texts(base, kind(SampledFrames(1), SCRIPTED), Rejection(multi_round), 3000, length=4), exact)

    assert p_of(AdaptiveDrafter) > MIN_P_VALUE > p_of(SizedByTheDraft)


def test_the_chi_square_test_rejects_an_argmax_declared_as_sampled(base, exact):
    assert p_value(texts(base, ArgmaxAsSampled(1), Rejection(multi_round), 400), exact) < MIN_P_VALUE


@pytest.mark.parametrize(
    "verify",
    [Rejection(multi_round), Rejection(k_sequential), TypicalAcceptance(0.09, 0.3)],
    ids=["multi_round", "k_sequential", "typical"],
)
@pytest.mark.parametrize("chains", [1, 3])
def test_at_temperature_0_every_verifier_returns_the_bases_tokens(base, verify, chains):
    for seed in range(6):
        how = settings(verify, 0.0, tokens=12)
        truth = generate(base, Autoregressive(base), PROMPT, settings(match, 0.0, tokens=12), frozenset(), seed).tokens
        assert generate(base, SampledFrames(chains), PROMPT, how, frozenset(), seed).tokens == truth


@pytest.mark.parametrize("chains", [1, 3])
def test_sampled_chains_verified_by_match_equal_autoregression(base, chains):
    for seed in range(6):
        how = settings(match, 1.0, tokens=12)
        truth = generate(base, Autoregressive(base), PROMPT, how, frozenset(), seed).tokens
        assert generate(base, SampledFrames(chains), PROMPT, how, frozenset(), seed).tokens == truth


def sampled_tree(seed, chains, log_probs_TC, depth=9, nodes=64, stops=()):
    rng = torch.Generator().manual_seed(seed)
    return SampledLabels(chains)(log_probs_TC, TreeRequest(torch.tensor(0), depth, nodes, stops, DraftSampling(rng)))


@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("stops", [(), (1,)])
def test_every_row_is_the_exact_distribution_behind_its_node(chains, stops):
    """Against all alignments; below a stop token and at the maximal depth nothing is sampled."""
    log_probs_TC = frames(5).double().log_softmax(-1)
    probs = log_probs_TC.exp().tolist()
    for seed in range(15):
        tree = sampled_tree(seed, chains, log_probs_TC, depth=2, stops=stops)
        sampled_NK = sampling_order(tree)
        for node in range(len(tree)):
            text = path_tokens(tree, node)
            if len(text) == 2 or set(text) & set(stops):
                assert tree.draft_probs_NV[node].sum() == 0
                assert (sampled_NK[node] == -1).all()
                continue
            truth, _ = slow_next_label_distribution(probs, WORDS, text)
            assert tree.draft_probs_NV[node].tolist() == pytest.approx(
                [truth[w] for w in range(WORDS)], abs=1e-10, rel=0
            )
            children = set((tree.parents_N == node).nonzero()[:, 0].tolist())
            assert {int(child) for child in sampled_NK[node] if child >= 0} == children
            through = chains if node == 0 else int((sampled_NK == node).sum())
            assert int((sampled_NK[node] != -1).sum()) == through  # every chain that comes this far samples once more


def test_chains_have_the_probability_of_their_texts():
    """4,000 chains of up to four labels against the enumeration of all alignments, the end included."""
    log_probs_TC = frames(6, classes=4).double().log_softmax(-1)
    truth = slow_texts(log_probs_TC.exp().tolist(), 3)
    names = sorted(truth)
    seen = dict.fromkeys(names, 0)
    for seed in range(1000):
        tree = sampled_tree(seed, 4, log_probs_TC)
        paths = [[0] for _ in range(4)]
        for chain, path in enumerate(paths):
            while (child := int(tree.sampled_nodes_NK[path[-1], chain])) >= 0:
                path.append(child)
            seen[path_tokens(tree, path[-1])] += 1
    assert p_value([seen[name] for name in names], [truth[name] for name in names]) > MIN_P_VALUE


def test_chains_share_nodes_and_keep_their_order():
    """Chains a b, a end, c d: node 1 was sampled twice after the root, then node 3."""
    tokens = torch.tensor([[0, 1], [0, NO_TOKEN], [2, 3]])
    probs = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4) / 100
    probs[1, 0] = probs[2, 0] = probs[0, 0]
    probs[1, 1] = probs[0, 1]
    tree = merge_chains(torch.tensor(9), tokens, probs, torch.ones(3, 2, dtype=torch.bool))
    assert tree.tokens_N.tolist() == [9, 0, 1, 2, 3]
    assert tree.parents_N.tolist() == [-1, 0, 1, 0, 3]
    assert tree.sampled_nodes_NK.tolist() == [[1, 1, 3], [2, NO_TOKEN, -1], [-1] * 3, [-1, -1, 4], [-1] * 3]
    assert torch.equal(tree.draft_probs_NV[[0, 1, 3]], torch.stack([probs[0, 0], probs[0, 1], probs[2, 1]]))
    assert tree.draft_probs_NV[[2, 4]].sum() == 0


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (12, 10)])
def test_a_budget_is_shared_by_the_chains(nodes, most):
    """Never more than `nodes`, and no chain is cut because of another one's tokens."""
    sizes = {len(sampled_tree(seed, 3, frames(seed, classes=60), depth=9, nodes=nodes)) for seed in range(40)}
    assert max(sizes) == most


def test_without_recorded_samples_every_draft_token_is_one():
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.1], [0.0, 0.0], [0.3, 0.3]])
    tree = TokenTree(torch.tensor([0, 1, 0, 1]), torch.tensor([-1, 0, 1, 2]), 3, probs)
    assert sampling_order(tree).tolist() == [[1], [2], [3], [NO_TOKEN]]


def test_zero_chains_are_refused():
    with pytest.raises(InputError, match="chains must be an integer >= 1, got 0"):
        SampledLabels(0)


def test_a_single_token_left_by_top_k():
    """Where p is one-hot at T > 0 rejection sampling returns the base's only token."""
    tree = sampled_tree(1, 3, frames(3))
    log_probs = warp(torch.randn(len(tree), WORDS, generator=torch.Generator().manual_seed(0)), 1.0, top_k=1)
    for rule in (multi_round, k_sequential):
        verdict = Rejection(rule)(tree, log_probs, GumbelNoise(4), 2)
        last = int(verdict.path_K[verdict.length - 1])
        assert int(verdict.bonus) == int(log_probs[last].argmax())
