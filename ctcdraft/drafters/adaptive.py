"""Adaptive tree sizes (decoding.nodes=adaptive): a draft keeps as many nodes as are worth their time, or is skipped.

Deterministic trees may be cut after drafting: the verifier accepts the base's own tokens, whatever was drafted. Sampled
draft tokens may not, since a token that is dropped because of what was sampled would bias the output. Their size is
decided before the draft, as it is on an accelerator, where looking at the probabilities would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context, Drafter
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.acceptance import LEAST_PROB, MOST_PROB, TreeNodes
from ctcdraft.drafters.base import samples_drafts, uses_hidden_states
from ctcdraft.drafters.tree_policy import AdaptivePolicy
from ctcdraft.machine_code import load_kernels

RECENT_DECAY = 0.98  # of the sums behind `recent`, at every draft: about the latest fifty count
SKIPPED_DECAY = 0.99  # of the same sums where nothing is drafted, so that drafting is tried again
# Steps to skip at once, at most: asking the policy takes a hundredth of a step of a small base. One after a draft, and
# twice as many each time that the policy says so again.
SKIPPED_STEPS = 8
# Pseudo-count, added to the accepted and to the expected draft tokens. With 2, a text was skipped for long after two
# rejected drafts; with more, it takes longer to notice that nothing is accepted.
RECENT_PRIOR = 3.0
RATE_DECAY = 0.97
PRIOR_TIME = 5.0  # the predicted rate counts like so much time at the beginning of a text


class AdaptiveMemory(NamedTuple):
    """What is known between two steps of one text."""

    inner: Any  # the drafter's own memory
    length: int  # tokens of the text at the last step
    pending: list[Tensor]  # hidden states that the drafter was not given yet; grows in place, as a cache does
    limit: int  # index of the size that the last step drafted; 0: nothing
    size: int  # index of the size that it kept
    expected: float  # draft tokens that the kept ones were expected to have accepted, whatever was recently accepted
    accepted_sum: float  # decayed sums over the latest drafts, of accepted draft tokens and of expected ones
    expected_sum: float
    tokens: float  # decayed sums over all steps, of the committed tokens and of the time they took
    time: float
    skipped: int = 0  # steps that the last decision skips, 0 if it was to draft

    @property
    def recent(self) -> float:
        return recent_ratio(self.accepted_sum, self.expected_sum)

    @property
    def rate(self) -> float:
        """Tokens per unit of time; at least the 1 of autoregression, which skipped drafts reach.

        A lower rate would make time look cheap, and further drafts worth it, where drafts have just lost time.
        """
        return max(1.0, self.tokens / self.time)


def recent_ratio(accepted: float, expected: float) -> float:
    """Return the log ratio of accepted to expected draft tokens, close to 0 while few are known."""
    return log((accepted + RECENT_PRIOR) / (expected + RECENT_PRIOR))


class AdaptiveDrafter:
    """A drafter whose trees have the sizes that a policy chooses; they are not cut where draft tokens are sampled."""

    has_nested_trees = False
    why_not_captured = "adaptive sizes need the host"

    def __init__(self, drafter: Drafter, policy: AdaptivePolicy) -> None:
        self.drafter = drafter
        self.policy = policy
        self.samples_drafts = samples_drafts(drafter)
        self.uses_hidden_states = uses_hidden_states(drafter)

    def draft(self, context: Context, memory: AdaptiveMemory | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        if memory is not None and len(context.tokens_L) < memory.length + memory.skipped:
            return self.skip(context, memory)
        policy, now = self.policy, self.observe(context, memory)
        recent, rate = now.recent, now.rate
        limit = policy.limit(recent)
        nodes = min(policy.costs.nodes[limit], context.nodes)
        if nodes == 1 or context.depth < 1:
            skipped = min(max(1, 2 * now.skipped), SKIPPED_STEPS)
            return self.skip(context, now._replace(limit=0, size=0, skipped=skipped))
        states_KD = torch.cat([*now.pending, context.new_states_KD]) if now.pending else context.new_states_KD
        least = 0.0 if self.samples_drafts else policy.least_path_prob(recent, rate, context.depth)
        request = context.limited(states_KD, nodes, least)
        tree, inner = self.drafter.draft(request, now.inner, rng)
        size, expected = limit, policy.limit_tokens[limit] - 1
        if cuts_trees(self.samples_drafts, tree.tokens_N.is_cpu):
            tree, size, expected = keep_best_nodes(policy, tree, recent, rate, limit)
        return tree, now._replace(inner=inner, pending=[], limit=limit, size=size, expected=expected, skipped=0)

    def skip(self, context: Context, memory: AdaptiveMemory) -> tuple[TokenTree, AdaptiveMemory]:
        """Draft nothing; keep the new hidden states for a later draft."""
        if self.uses_hidden_states:
            # Cloned: with static shapes the next forward pass overwrites the hidden states.
            memory.pending.append(context.new_states_KD.clone())
        return TokenTree.only_root(context.root), memory

    def observe(self, context: Context, memory: AdaptiveMemory | None) -> AdaptiveMemory:
        """Return the memory with the outcome of the last draft, or of the steps for which it was skipped."""
        length, policy = len(context.tokens_L), self.policy
        if memory is None:
            return AdaptiveMemory(None, length, [], 0, 0, 0.0, 0.0, 0.0, PRIOR_TIME * policy.rate, PRIOR_TIME)
        committed, drafted = length - memory.length, memory.limit > 0
        steps = 1 if drafted else committed
        decay, rate_decay = (RECENT_DECAY if drafted else SKIPPED_DECAY) ** steps, RATE_DECAY**steps
        weight = (1 - rate_decay) / (1 - RATE_DECAY) / steps  # of a step's tokens and time, decayed since, on average
        time = steps * (policy.costs.rest[memory.size] + policy.costs.draft[memory.limit])
        accepted_sum = decay * memory.accepted_sum + (committed - 1) * drafted
        expected_sum = decay * memory.expected_sum + memory.expected * drafted
        sums = accepted_sum, expected_sum, rate_decay * memory.tokens + weight * committed
        return AdaptiveMemory(
            memory.inner, length, memory.pending, memory.limit, memory.size, memory.expected, *sums,
            rate_decay * memory.time + weight * time, memory.skipped,
        )  # fmt: skip


def cuts_trees(sampled: bool, on_cpu: bool) -> bool:
    """Return whether drafted trees are cut; otherwise the size is decided before the draft alone."""
    return not sampled and on_cpu


def keep_best_nodes(
    policy: AdaptivePolicy, tree: TokenTree, recent: float, rate: float, limit: int
) -> tuple[TokenTree, int, float]:
    """Return the tree of the nodes that are worth their time, the index of its size, at most `limit`, and the draft
    tokens that it is expected to have accepted, whatever was recently accepted."""
    if len(tree) == 1:
        return tree, 0, 0.0
    kernels = load_kernels("ctcdraft.drafters.policy_kernels")
    if kernels is None or tree.path_probs_N is None:
        drafted = TreeNodes.of(tree, policy.model, recent)
        size = policy.size(drafted, rate, limit)
        kept = policy.costs.nodes[size] - 1
        return keep_nodes(tree, drafted.numbers[:kept]), size, sum(drafted.usual_probs[:kept])
    half = tree.path_probs_N.dtype.itemsize == 2  # NumPy has no bfloat16, machine code no half precision
    probs_N = tree.path_probs_N.float() if half else tree.path_probs_N
    size, nodes_M, parents_M, height, expected = kernels.best_nodes(
        probs_N.numpy(), tree.parents_N.numpy(), *policy.arrays, recent, rate, limit, LEAST_PROB, MOST_PROB
    )
    if len(nodes_M) == len(tree):
        return tree, size, expected
    tree = TokenTree(torch.from_numpy(tree.tokens_N.numpy()[nodes_M]), torch.from_numpy(parents_M), height)
    return tree, size, expected


def keep_nodes(tree: TokenTree, numbers: Sequence[int]) -> TokenTree:
    """Return the tree with the root and these nodes alone, each with its parent among them.

    Path probabilities are left out: verification does not need them.
    """
    if len(numbers) == len(tree) - 1:
        return tree
    kept = [0, *sorted(numbers)]
    position = {node: at for at, node in enumerate(kept)}
    parents = [-1, *(position[tree.host_parents[node]] for node in kept[1:])]
    kept_N = torch.tensor(kept)
    height = max(tree.host_depths[node] for node in kept)
    return TokenTree(tree.tokens_N.take(kept_N), torch.tensor(parents), height)
