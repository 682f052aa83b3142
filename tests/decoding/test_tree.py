"""TokenTree: merged paths, ancestors, masks; accepted paths. Against worked examples and a slow twin."""

import pytest
import torch
from truths import slow_tree_from_paths

from ctcdraft.decoding.tree import AcceptedPath, TokenTree, VerifyResult


def tree_of(*nodes: tuple[int, int]) -> TokenTree:
    tokens, parents = zip(*nodes, strict=True)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), height=len(nodes) - 1)


FORK = tree_of((7, -1), (5, 0), (6, 0), (8, 1), (9, 3))


def test_ancestors_and_depths_follow_the_parents():
    assert FORK.ancestors_NN.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert FORK.depths_N.tolist() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9, 17, 33, 64])
def test_a_chain_of_any_length_sees_all_before_it(size):
    chain = TokenTree.chain(torch.tensor(3), torch.arange(size - 1))
    assert torch.equal(chain.ancestors_NN, torch.ones(size, size, dtype=torch.bool).tril())
    assert chain.depths_N.tolist() == list(range(size))


def test_the_mask_shows_the_past_and_the_ancestors_only():
    mask = FORK.attention_mask(past=2, dtype=torch.float32)
    assert mask.shape == (5, 7)
    assert torch.equal(mask[:, :2], torch.zeros(5, 2))
    assert torch.equal(mask[:, 2:] == 0, FORK.ancestors_NN)
    assert mask[1, 4] == torch.finfo(torch.float32).min


def test_paths_that_begin_alike_share_their_nodes():
    tree = TokenTree.from_paths(torch.tensor(7), torch.tensor([[5, 5, 8], [5, 9, -1]]), torch.tensor([3, 2]), limit=64)
    assert tree.tokens_N.tolist() == [7, 5, 5, 8, 9]
    assert tree.parents_N.tolist() == [-1, 0, 1, 2, 1]


@pytest.mark.parametrize("seed", range(30))
def test_merging_equals_the_slow_twin(seed):
    rng = torch.Generator().manual_seed(seed)
    paths = torch.randint(0, 3, (6, 5), generator=rng)
    lengths = torch.randint(0, 6, (6,), generator=rng)
    limit = int(torch.randint(1, 20, (1,), generator=rng))
    tree = TokenTree.from_paths(torch.tensor(9), paths, lengths, limit)
    tokens, parents = slow_tree_from_paths(9, paths.tolist(), lengths.tolist(), limit)
    assert tree.tokens_N.tolist() == tokens
    assert tree.parents_N.tolist() == parents
    assert bool((tree.parents_N[1:] < torch.arange(1, len(tree))).all())


def test_tokens_beyond_a_paths_length_are_ignored():
    junk = torch.tensor([[5, 99], [5, 6]])
    tree = TokenTree.from_paths(torch.tensor(1), junk, torch.tensor([1, 2]), limit=9)
    assert tree.tokens_N.tolist() == [1, 5, 6]


def test_an_accepted_path_holds_the_accepted_tokens_and_the_bonus():
    result = VerifyResult(torch.tensor([0, 1, -1, -1, -1]), torch.tensor(2), torch.tensor(4))
    path = AcceptedPath.of(FORK, result)
    assert path.tokens == (5, 4)
    assert path.path_K.tolist() == [0, 1]
    assert path.has_rejected_child  # node 3 is a child of node 1
    assert path.drafted == 3
    leaf = VerifyResult(torch.tensor([0, 2, -1, -1, -1]), torch.tensor(2), torch.tensor(4))
    assert not AcceptedPath.of(FORK, leaf).has_rejected_child
