"""What a drafter would have guessed along a known text, and the passes that trees of any size would have taken.

With one seed the text is the same whoever drafts, greedy or sampled. So the base says it once, and passes are walked
over what a drafter guesses behind its tokens: no tree is read, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context, generate, refuse_over_budget
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, Drafter
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import has_nested_trees
from ctcdraft.drafters.controls import give_oracle_text
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

TokenIds = Sequence[int]


@dataclass(frozen=True)
class BaseAnswer:
    """An answer of the base alone. contexts: what a drafter knows behind each of its tokens but the last."""

    tokens: tuple[int, ...]
    ended: bool
    contexts: tuple[Context, ...]


class ContextRecorder:
    """Guesses nothing and keeps every context."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        # Cloned: a captured read overwrites its states at the next one.
        self.contexts.append(replace(context, new_states_KD=context.new_states_KD.clone()))
        return TokenTree.only_root(context.root), None


def record_base_answer(base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, seed: int) -> BaseAnswer:
    """The base's own answer, behind which everyone is asked."""
    recorder = ContextRecorder()
    generation = generate(base, recorder, prompt_L, settings, base.stop_token_ids, seed)
    return BaseAnswer(generation.tokens, generation.ended, tuple(recorder.contexts))


def refuse_unreplayable(settings: DecodingSettings) -> None:
    """Raise InputError where drafters would not all say the same."""
    if settings.temperature > 0 and not settings.token_for_token:
        raise InputError(
            "passes are replayed on a text that everyone says alike, which this decoding does not promise; use "
            "decoding=greedy or decoding=sampling, or leave out measure=replay and give a number as decoding.nodes="
        )


@dataclass(frozen=True)
class DraftTree:
    """A tree on the host. depths: of every node, 0 at the root."""

    tokens: TokenIds
    parents: TokenIds
    depths: TokenIds

    @classmethod
    def of(cls, tree: TokenTree) -> DraftTree:
        parents = tree.parents_N.tolist()
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        return cls(tree.tokens_N.tolist(), parents, depths)

    def first_nodes(self, nodes: int) -> DraftTree:
        """The tree of that size, of a drafter whose sizes are nested."""
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes])


class DraftReplayer:
    """A drafter, asked for trees behind tokens of a known text: in the order of the text, those between left out."""

    def __init__(self, drafter: Drafter, said: BaseAnswer, nodes: int, seed: int) -> None:
        self.contexts = [replace(context, nodes=nodes) for context in said.contexts]
        device = self.contexts[0].tokens_L.device
        self.drafter, self.memory, self.next_position = drafter, None, 0
        self.rng = torch.Generator(device).manual_seed(seed)
        give_oracle_text(drafter, torch.cat([self.contexts[0].tokens_L[:-1], torch.tensor(said.tokens, device=device)]))
        along = getattr(drafter, "draft_many", None)
        self.draft_at: Callable[[int], TokenTree] | None = None if along is None else along(self.contexts, self.rng)

    def draft(self, at: int) -> TokenTree:
        """As in the loop: what is fresh are the states since the drafter was asked last."""
        fresh_KD = torch.cat([context.new_states_KD for context in self.contexts[self.next_position : at + 1]])
        context = replace(self.contexts[at], new_states_KD=fresh_KD)
        tree, self.memory = self.drafter.draft(context, self.memory, self.rng)
        self.next_position = at + 1
        return tree

    @torch.inference_mode()
    def __call__(self, at: int) -> DraftTree:
        tree = self.draft(at) if self.draft_at is None else self.draft_at(at)
        found, context = DraftTree.of(tree), self.contexts[at]
        refuse_over_budget(self.drafter, context.nodes, "nodes", len(found.tokens))
        refuse_over_budget(self.drafter, context.depth, "depth", max(found.depths))
        return found


def replay_drafts(
    drafter: Any, answer: BaseAnswer, sizes: Sequence[int], seed: int
) -> dict[int, tuple[DecodeStep, ...]]:
    """The passes of every size, from one computation where smaller trees are the beginnings of larger ones."""
    if not answer.contexts:
        return dict.fromkeys(sizes, ())
    together = [sizes] if has_nested_trees(drafter) else [[nodes] for nodes in sizes]
    found: dict[int, tuple[DecodeStep, ...]] = {}
    for some in together:
        found |= replay_passes(answer.tokens, some, DraftReplayer(drafter, answer, max(some), seed))
    return found


def replay_passes(
    answer: TokenIds, sizes: Sequence[int], draft: Callable[[int], DraftTree]
) -> dict[int, tuple[DecodeStep, ...]]:
    """The passes in which the loop would have said the answer, for trees of each size. draft: the largest tree behind
    a token; asked in the order of the text, once each, and only where some size begins a pass.

    answer 5 6 7 8; behind 5 the tree says 6 7, behind 6 and 7 nothing    ->    one pass, 2 accepted: 6 7, then 8
    """
    places = dict.fromkeys(sizes, 0)
    passes: dict[int, list[DecodeStep]] = {nodes: [] for nodes in sizes}
    while (at := min(places.values())) < len(answer) - 1:
        largest = draft(at)
        for nodes in (nodes for nodes in sizes if places[nodes] == at):
            passes[nodes].append(replay_pass(answer, at, largest.first_nodes(nodes)))
            places[nodes] += passes[nodes][-1].committed
    return {nodes: tuple(made) for nodes, made in passes.items()}


def replay_pass(answer: TokenIds, at: int, tree: DraftTree) -> DecodeStep:
    """What a pass over this tree behind token `at` commits of the answer."""
    children = {(tree.parents[n], tree.tokens[n]): n for n in reversed(range(1, len(tree.tokens)))}
    node, deep = 0, 0
    while at + deep + 1 < len(answer) and (node, answer[at + deep + 1]) in children:
        node, deep = children[node, answer[at + deep + 1]], deep + 1
    over = at + deep + 1 == len(answer)  # on a guess: nothing comes behind it, so nothing was refused there
    is_open = not over and node in tree.parents
    return DecodeStep(deep if over else deep + 1, deep, is_open, len(tree.tokens), max(tree.depths))
