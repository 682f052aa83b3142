"""Replay of a drafter along a known text: the decoding steps that trees of any size would have taken.

With one seed the text is the same for every drafter, greedy or sampled. So the base model decodes it once; a drafter is
then run behind its tokens, and decoding steps follow from comparing its trees with the text, without reading any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context, Drafter, generate, refuse_over_budget
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import has_nested_trees, remembers_responses
from ctcdraft.drafters.controls import give_oracle_text
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

TokenIds = Sequence[int]


@dataclass(frozen=True)
class BaseAnswer:
    """An answer of the base model."""

    tokens: tuple[int, ...]
    ended: bool
    contexts: tuple[Context, ...]  # what a drafter gets after each token but the last


class ContextRecorder:
    """A drafter without draft tokens that records every context."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        # Cloned: with static shapes the next forward pass overwrites the hidden states.
        self.contexts.append(replace(context, new_states_KD=context.new_states_KD.clone()))
        return TokenTree.only_root(context.root), None


def record_base_answer(base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, seed: int) -> BaseAnswer:
    recorder = ContextRecorder()
    result = generate(base, recorder, prompt_L, settings, base.stop_token_ids, seed)
    return BaseAnswer(result.tokens, result.ended, tuple(recorder.contexts))


def refuse_unreplayable(settings: DecodingSettings) -> None:
    """Raise InputError if the text would depend on the drafter."""
    if not settings.owes_token_identity(sampled=True):
        raise InputError(
            "replay needs a text that does not depend on the drafter, which this decoding does not promise; use "
            "decoding=greedy or decoding=sampling, or leave out measure=replay and give a number as decoding.nodes="
        )


@dataclass(frozen=True)
class DraftTree:
    """A tree on the host, where a step of every size is taken from it."""

    tokens: TokenIds
    parents: TokenIds
    depths: TokenIds  # 0 at the root

    @classmethod
    def of(cls, tree: TokenTree) -> DraftTree:
        return cls(tree.tokens_N.tolist(), tree.parents_N.tolist(), tree.depths_N.tolist())

    def first_nodes(self, nodes: int) -> DraftTree:
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes])

    def path_along(self, text: TokenIds) -> list[int]:
        """Return the nodes that carry the tokens of a text, which begins after the root; the root is the first."""
        children = {(self.parents[n], self.tokens[n]): n for n in reversed(range(1, len(self.tokens)))}
        path = [0]
        for token in text:
            if (child := children.get((path[-1], token))) is None:
                break
            path.append(child)
        return path


class DraftReplayer:
    """Drafts trees after tokens of a known text, in the order of the text; tokens in between may be skipped."""

    def __init__(self, drafter: Drafter, answer: BaseAnswer, nodes: int, seed: int) -> None:
        self.contexts = [replace(context, nodes=nodes) for context in answer.contexts]
        prompt_L = self.contexts[0].tokens_L[:-1]
        self.drafter, self.memory, self.next_position = drafter, None, 0
        self.rng = torch.Generator(prompt_L.device).manual_seed(seed)
        give_oracle_text(drafter, torch.cat([prompt_L, prompt_L.new_tensor(answer.tokens)]))
        # Frames of all contexts from one forward pass of the head, where the drafter can do that.
        along = getattr(drafter, "draft_many", None)
        self.draft_at: Callable[[int], TokenTree] | None = None if along is None else along(self.contexts, self.rng)

    def draft(self, at: int) -> TokenTree:
        """Draft as in the loop: the new hidden states are those since the last draft."""
        fresh_KD = torch.cat([context.new_states_KD for context in self.contexts[self.next_position : at + 1]])
        context = replace(self.contexts[at], new_states_KD=fresh_KD)
        tree, self.memory = self.drafter.draft(context, self.memory, self.rng)
        self.next_position = at + 1
        return tree

    @torch.inference_mode()
    def __call__(self, at: int) -> DraftTree:
        tree = self.draft(at) if self.draft_at is None else self.draft_at(at)
        draft, context = DraftTree.of(tree), self.contexts[at]
        refuse_over_budget(self.drafter, context.nodes, "nodes", len(draft.tokens))
        refuse_over_budget(self.drafter, context.depth, "depth", max(draft.depths))
        return draft


def refuse_replaying(drafter: Any) -> None:
    """Raise InputError for a drafter that drafts from responses it has seen."""
    # In a replay it would see each of them first; calibrated on questions of a benchmark, it would know the responses.
    if remembers_responses(drafter):
        raise InputError(
            "a drafter with remember=true drafts from the responses it has decoded, which a replay does not decode; "
            "leave out remember=true, or leave out measure=replay and give a number as decoding.nodes="
        )


def replay_drafts(
    drafter: Any, answer: BaseAnswer, sizes: Sequence[int], seed: int
) -> dict[int, tuple[DecodeStep, ...]]:
    """Return the decoding steps for every tree size."""
    if not answer.contexts:
        return dict.fromkeys(sizes, ())
    refuse_replaying(drafter)
    # A smaller tree is the first nodes of a larger one, for most drafters: then one draft serves all sizes.
    together = [sizes] if has_nested_trees(drafter) else [[nodes] for nodes in sizes]
    steps: dict[int, tuple[DecodeStep, ...]] = {}
    for group in together:
        steps |= replay_passes(answer.tokens, group, DraftReplayer(drafter, answer, max(group), seed))
    return steps


def replay_passes(
    answer: TokenIds, sizes: Sequence[int], draft: Callable[[int], DraftTree]
) -> dict[int, tuple[DecodeStep, ...]]:
    """Return the decoding steps in which the loop would have decoded the answer, for trees of each size.

    answer 5 6 7 8; the tree after 5 holds 6 7, those after 6 and 7 nothing   ->   one step, 2 accepted: 6 7, then 8

    Args:
        draft: returns the largest tree after the token at an index.
    """
    positions = dict.fromkeys(sizes, 0)
    passes: dict[int, tuple[DecodeStep, ...]] = dict.fromkeys(sizes, ())
    # In the order of the text, once per token, and only where a step of some size begins.
    while (at := min(positions.values())) < len(answer) - 1:
        largest = draft(at)
        for nodes in (nodes for nodes in sizes if positions[nodes] == at):
            step = replay_pass(answer, at, largest.first_nodes(nodes))
            passes[nodes] += (step,)
            positions[nodes] += step.committed
    return passes


def replay_pass(answer: TokenIds, at: int, tree: DraftTree) -> DecodeStep:
    """Return the decoding step of this tree after token `at` of the answer."""
    path = tree.path_along(answer[at + 1 :])
    depth = len(path) - 1
    ended = at + depth + 1 == len(answer)  # with a draft token: there is no bonus token, and nothing was rejected
    is_open = not ended and path[-1] in tree.parents
    return DecodeStep(depth if ended else depth + 1, depth, is_open, len(tree.tokens), max(tree.depths))
