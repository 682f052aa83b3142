"""A draft vocabulary: the full head's distribution over these tokens, in scores, searches and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import random_base
from torch import nn
from training_parts import DECODING, logged_metrics, make_trainer, random_sequences

from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.eagle3 import Eagle3
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.redrafter import ReDrafter
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.errors import InputError
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.draft_vocab import DraftVocabHead, most_frequent_tokens
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC, PrefixCTC
from ctcdraft.objectives.distillation import Distill, kl
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory, load_trainable_state

WIDTH, VOCABULARY, SELECTED = 6, 11, [1, 4, 5, 9]
NEVER = -1e4
OBJECTIVES = {
    "ctc": CTC(3),
    "prefix": PrefixCTC(3, 0.8),
    "cross_entropy": CrossEntropy(3, 0.8),
    "kl": Distill(3, 0.8, kl),
    "eagle3": Distill(3, 0.8, kl),  # with an lm_head of its own
    "redrafter": CrossEntropy(3, 1.0),  # with a wider one
}


def emissions(corrected: bool) -> tuple[Emissions, Emissions]:
    """The same states under a head of four tokens, and under a full one whose biases exclude the others."""
    torch.manual_seed(0)
    lm_head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    some, every = BlankHead(lm_head, WIDTH, len(SELECTED)), BlankHead(lm_head, WIDTH)
    some.words.set_tokens(torch.tensor(SELECTED))
    every.words = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    every.words.weight.copy_(lm_head.weight)
    every.words.bias.fill_(NEVER).index_copy_(0, torch.tensor(SELECTED), lm_head.bias[SELECTED])
    every.load_state_dict({"blank_D": some.blank_D, "blank_bias": some.blank_bias}, strict=False)
    states = torch.randn(2, 3, 4, WIDTH, requires_grad=True)
    if not corrected:
        return Emissions(states, some), Emissions(states, every)
    correction = GRUCorrection(nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False), 5, 1e-6)
    nn.init.normal_(correction.out.weight)
    start = correction.start(states[:, :, 0].detach(), torch.zeros(2, 3, dtype=torch.long))
    return Emissions(states, some, correction, start), Emissions(states, every, correction, start)


@pytest.mark.parametrize("corrected", [False, True])
def test_scores_and_gradients_are_those_of_a_head_restricted_to_these_tokens(corrected):
    some, every = emissions(corrected)
    labels = torch.tensor(SELECTED)[torch.randint(len(SELECTED), (2, 3, 2))]
    labels[0, 0, 1] = 7  # outside the draft vocabulary
    ours, theirs = some.scores(labels), every.scores(labels)
    assert ours.label_BATS[0, 0, :, 1].isneginf().all()
    assert ours.hold_BATS[0, 0, :, 1].isneginf().all()
    learned = [some.states_BATD] if some.correction is None else [some.states_BATD, some.correction.out.weight]
    gradients = []
    for scores in (ours, theirs):
        finite = [one.where(one > NEVER / 2, 0.0) for one in log_probs(scores)]
        gradients.append(torch.autograd.grad(sum((one * one).sum() for one in finite), learned, retain_graph=True))
    for a, b in zip(log_probs(ours), log_probs(theirs), strict=True):
        torch.testing.assert_close(a, b.where(b > NEVER / 2, -torch.inf), rtol=0, atol=1e-5)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    logits = every.logits()
    torch.testing.assert_close(some.logits(), logits.where(logits > NEVER / 2, -torch.inf))
    assert not [
        token for token in range(VOCABULARY) if some.logits()[..., token].isfinite().all() != (token in SELECTED)
    ]


def log_probs(scores):
    return scores.label_BATS, scores.hold_BATS, scores.blank_BATP


def test_the_most_frequent_tokens_and_the_required_ones():
    assert most_frequent_tokens(torch.tensor([5, 0, 7, 5]), 2, [1]).tolist() == [1, 2]
    assert most_frequent_tokens(torch.tensor([5, 0, 7, 5]), 2, []).tolist() == [0, 2]
    assert most_frequent_tokens(torch.tensor([5, 0, 7, 5]), 2, [1, 9]).tolist() == [
        1,
        2,
    ]  # 9 exceeds the lm_head's rows
    with pytest.raises(InputError, match=r"drafter\.vocabulary must be >= 2, the number of stop tokens, got 1"):
        most_frequent_tokens(torch.tensor([5, 0, 7, 5]), 1, [1, 2])
    assert random_sequences(count=2, length=9).token_counts(50).sum() == 3 + 2  # of the responses alone


def test_more_tokens_than_the_base_has_are_refused():
    with pytest.raises(InputError, match=r"drafter\.vocabulary must be <= 11 .*, got 12"):
        DraftVocabHead(nn.Linear(WIDTH, VOCABULARY), 12)


def test_rows_for_wider_hidden_states_begin_at_random_and_stay():
    lm_head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    one = DraftVocabHead(lm_head, 4, trained=True, width=2 * WIDTH)
    assert one.weight.shape == (4, 2 * WIDTH)
    assert one.weight.requires_grad
    assert one.bias is None
    before = one.weight.detach().clone()
    one.set_tokens(torch.tensor(SELECTED))
    assert torch.equal(one.weight, before)
    assert one(torch.randn(3, 2 * WIDTH)).isfinite().all(dim=0).nonzero().flatten().tolist() == SELECTED


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_trains_decodes_and_reloads(tmp_path, name):
    """Half of the labels are outside it, which is counted and gives no gradient; the output stays the base's."""
    base, objective = random_base(context=64), OBJECTIVES[name]
    aligned = objective.supervises == "alignments"

    def head():
        if name == "eagle3":
            torch.manual_seed(0)
            return Eagle3(base, 3, DynamicTree(3, 4), 20, True, False, False, True)
        if name == "redrafter":
            torch.manual_seed(0)
            return ReDrafter(base, 3, 2, DynamicTree(3, 4), 20, own_head=True)
        body = partial(AttentionBody, root_input=True, causal=False)
        paths = PrefixSearch(16) if aligned else PerFrameTree(None)
        correction = partial(GRUCorrection, rank=8) if name == "prefix" else None
        torch.manual_seed(0)
        return ParallelDrafter(base, 6 if aligned else 3, body, paths, correction, vocabulary=20)

    drafter = head()
    drafter.set_draft_vocab(random_sequences().token_counts(base.vocabulary), base.stop_token_ids)
    selected = drafter.head.words.words_N.tolist()
    assert selected != list(range(20))
    counts = random_sequences().token_counts(base.vocabulary)
    assert drafter.vocab_coverage(counts) == pytest.approx(
        sum(counts.tolist()[token] for token in selected) / int(counts.sum())
    )
    run = RunDirectory(tmp_path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, steps=8, drafter=drafter, objective=objective)
    assert one.fit([JsonlLogger(run.metrics, 0)]) >= 1.0
    assert one.skipped == 0
    shares = [line.get("infeasible_share") for line in logged_metrics(run)]
    assert all(share is None if name == "kl" else 0 < share < 1 for share in shares)
    other = head()
    load_trainable_state(
        other, {key: value.clone() for key, value in drafter.trainable_state_dict().items()}, Path("run")
    )
    prompt = torch.arange(10, 16)
    truth = generate(base, Autoregressive(base), prompt, DECODING, base.stop_token_ids, 0).tokens
    first, again = (generate(base, one.eval(), prompt, DECODING, base.stop_token_ids, 0) for one in (drafter, other))
    assert first.tokens == truth
    assert (again.tokens, len(again.passes)) == (truth, len(first.passes))


@pytest.mark.parametrize("ids", [[1, 4, 5, VOCABULARY], [-1, 4, 5, 9], [1, 5, 4, 9], [4, 4, 5, 9]])
def test_wrong_ids_in_a_file_are_refused(ids):
    head = DraftVocabHead(nn.Linear(WIDTH, VOCABULARY), 4)
    head.words_N.copy_(torch.tensor(ids))
    with pytest.raises(InputError, match=f"must be ascending token ids from 0 to {VOCABULARY - 1}"):
        head.refresh()
