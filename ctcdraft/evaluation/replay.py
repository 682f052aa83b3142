"""What a drafter would have guessed along a known text, and the passes that trees of any size would have taken.

With one seed the text is the same whoever drafts, greedy or sampled. So the base says it once, every drafter guesses
behind each of its tokens, and passes are walked over the guesses: no tree is read, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.base import BaseLM
from ctcdraft.decoding.loop import Context, Drafter, Pass, Settings, generate, refuse_too_large
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.controls import tell
from ctcdraft.drafters.drafter import nested
from ctcdraft.errors import InputError

Words = Sequence[int]


@dataclass(frozen=True)
class Said:
    """An answer of the base alone. contexts: what a drafter knows behind each of its tokens but the last."""

    tokens: tuple[int, ...]
    ended: bool
    contexts: tuple[Context, ...]


class Witness:
    """Guesses nothing and keeps every context."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        # Cloned: a captured read overwrites its states at the next one.
        self.contexts.append(replace(context, fresh_KD=context.fresh_KD.clone()))
        return TokenTree.only_root(context.root), None


def hear(base: BaseLM, prompt_L: Tensor, settings: Settings, seed: int) -> Said:
    """The base's own answer, behind which everyone is asked."""
    witness = Witness()
    said = generate(base, witness, prompt_L, settings, base.stop_tokens, seed)
    return Said(said.tokens, said.ended, tuple(witness.contexts))


def refuse_other_texts(settings: Settings) -> None:
    """Raise InputError where drafters would not all say the same."""
    if settings.temperature > 0 and not settings.token_for_token:
        raise InputError(
            "passes are replayed on a text that everyone says alike, which this decoding does not promise; use "
            "decoding=greedy or decoding=sampling, or leave out measure=replay and give a number as decoding.nodes="
        )


@dataclass(frozen=True)
class Guesses:
    """A tree on the host. depths: of every node, 0 at the root."""

    words: Words
    parents: Words
    depths: Words

    @classmethod
    def of(cls, tree: TokenTree) -> Guesses:
        parents = tree.parents_N.tolist()
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        return cls(tree.tokens_N.tolist(), parents, depths)

    def first(self, nodes: int) -> Guesses:
        """The tree of that size, of a drafter whose sizes are nested."""
        return Guesses(self.words[:nodes], self.parents[:nodes], self.depths[:nodes])


@torch.inference_mode()
def guess(drafter: Drafter, said: Said, nodes: int, seed: int) -> list[Guesses]:
    """The tree of at most `nodes` nodes behind each token: all at once where the drafter can, else one by one."""
    if not said.contexts:
        return []
    contexts = [replace(context, nodes=nodes) for context in said.contexts]
    tell(drafter, torch.cat([contexts[0].tokens_L[:-1], contexts[0].tokens_L.new_tensor(said.tokens)]))
    rng = torch.Generator(contexts[0].tokens_L.device).manual_seed(seed)
    at_once = getattr(drafter, "draft_along", None)
    trees = at_once(contexts, rng) if at_once is not None else one_by_one(drafter, contexts, rng)
    found = [Guesses.of(tree) for tree in trees]
    for one, context in zip(found, contexts, strict=True):
        refuse_too_large(drafter, nodes, "nodes", len(one.words))
        refuse_too_large(drafter, context.depth, "depth", max(one.depths))
    return found


def one_by_one(drafter: Drafter, contexts: Sequence[Context], rng: torch.Generator) -> list[TokenTree]:
    trees, memory = [], None
    for context in contexts:
        tree, memory = drafter.draft(context, memory, rng)
        trees.append(tree)
    return trees


def replayed(drafter: Any, said: Said, sizes: Sequence[int], seed: int) -> dict[int, tuple[Pass, ...]]:
    """The passes of every size, from one computation where smaller trees are the beginnings of larger ones."""
    if not nested(drafter):
        return {nodes: walk(said.tokens, guess(drafter, said, nodes, seed)) for nodes in sizes}
    largest = guess(drafter, said, max(sizes), seed)
    return {nodes: walk(said.tokens, [one.first(nodes) for one in largest]) for nodes in sizes}


def walk(answer: Words, trees: Sequence[Guesses]) -> tuple[Pass, ...]:
    """The passes in which the loop would have said the answer. trees: behind each of its tokens but the last.

    answer 5 6 7 8; behind 5 the tree says 6 7, behind 6 and 7 nothing    ->    one pass, 2 accepted: 6 7, then 8
    """
    passes, at = [], 0
    while at < len(answer) - 1:
        tree = trees[at]
        children = {(tree.parents[n], tree.words[n]): n for n in reversed(range(1, len(tree.words)))}
        node, deep = 0, 0
        while at + deep + 1 < len(answer) and (node, answer[at + deep + 1]) in children:
            node, deep = children[node, answer[at + deep + 1]], deep + 1
        over = at + deep + 1 == len(answer)  # on a guess: nothing comes behind it, so nothing was refused there
        committed = deep if over else deep + 1
        is_open = not over and node in tree.parents
        passes.append(Pass(committed, deep, is_open, len(tree.words), max(tree.depths)))
        at += committed
    return tuple(passes)
