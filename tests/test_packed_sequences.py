"""Packed sequences: for every drafter a packed batch equals the same responses one per row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sequential_parts import SEQUENTIAL_CASES, make_sequential_drafter
from tiny_models import random_base
from torch.nn.utils.rnn import pad_sequence
from training_parts import block_head, block_heads, ctc_head, random_sequences
from truths import slow_window

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, TokenSequences, first_fit_packing
from ctcdraft.corpus.hidden_states import OfflineHiddenStates, OnlineHiddenStates
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.peagle_body import PEagleBody
from ctcdraft.nn.slot_bodies import DFlashBody
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC, PrefixCTC, Transducer
from ctcdraft.objectives.distillation import Distill, kl

CONTEXT = 32  # shorter than a pack: position ids that did not restart would exceed it
SIZE = 80
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 5, 5]])


def cut() -> TokenSequences:
    """The sequences of other tests; every third response was cut off, and one text begins with a response token."""
    made = random_sequences()
    begins = [0 if index == 4 else 6 for index in range(len(made))]
    return TokenSequences(
        made.tokens,
        [[(begin, length, n % 3 != 1)] for n, (begin, length) in enumerate(zip(begins, made.lengths, strict=True))],
    )


def packs(base, labels, source=OnlineHiddenStates, anchors=30) -> Batches:
    return Batches(cut(), base, 2, anchors, labels, seed=0, hidden_states=source, packing=first_fit_packing(SIZE))


def unpacked(base, made: Batches, step: int, batch: Batch) -> Batch:
    """Return the same responses and anchors, one response per row: windows by the slow twin, hidden states alone."""
    tokens, states, windows = [], [], []
    for row, pack in enumerate(made.packs(step)):
        begin = 0
        for index in pack:
            text = made.rows.tokens[index]
            places = [a - begin for a in batch.anchors_BA[row].tolist() if begin <= a < begin + len(text)]
            found = []
            for place in sorted(set(places)):
                ((start, _, ended),) = made.rows.spans[index]
                mask = [position >= start for position in range(len(text))]
                root, labels_found = slow_window(text.tolist(), mask, place, made.labels)
                if labels_found and (ended or len(labels_found) == made.labels):
                    found.append((place, root, labels_found))
            tokens.append(text)
            states.append(base.hidden_states(text[None], torch.ones_like(text)[None])[0])
            windows.append(found)
            begin += len(text)
    return padded(tokens, states, windows, made.labels)


def padded(tokens, states, windows, labels) -> Batch:
    tokens_BL, most = pad_sequence(tokens, batch_first=True), max(map(len, windows))
    free = (tokens_BL.shape[1] - 1, 0, [])
    filled = [found + [free] * (most - len(found)) for found in windows]
    return Batch(
        tokens_BL,
        pad_sequence(states, batch_first=True),
        torch.tensor([[anchor for anchor, _, _ in found] for found in filled]),
        torch.tensor([[root for _, root, _ in found] for found in filled]),
        torch.tensor(
            [[labels_found + [-1] * (labels - len(labels_found)) for _, _, labels_found in found] for found in filled]
        ),
        torch.tensor([[len(labels_found) for _, _, labels_found in found] for found in filled]),
        torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL),
    )


def tapped(base):
    fused = ctc_head(BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1]))
    fused.fuse.mix.weight.data.normal_(std=0.2)
    return fused


def causal(base):
    return block_head(base, partial(AttentionBody, root_input=False, causal=True), PrefixSearch(16))


def peagle(base):
    return block_head(base, partial(PEagleBody, blocks=2, like_base=True), PerFrameTree(None))


def domino(base):
    correction = partial(FrameGRUCorrection, rank=8, memory=6, uncorrected=1)
    return block_head(base, partial(DFlashBody, blocks=2, root_predicts=True), PerFrameTree(None), correction)


BLOCK = ("gru", "transducer", "markov", "residual", "feed_forward", "collapse")
OF_BLOCK = (CTC(4), Transducer(4), CrossEntropy(6, 0.8), CrossEntropy(3, 0.8), Distill(3, 0.8, kl), CTC(2))

CASES = {
    "ctc": (lambda base, folder: ctc_head(base), CTC(3)),
    "ctc_taps": (lambda base, folder: tapped(base), CTC(3)),
    "ctc_causal": (lambda base, folder: causal(base), PrefixCTC(3, 0.8)),
    "peagle": (lambda base, folder: peagle(base), CrossEntropy(3, 0.8)),
    "domino": (lambda base, folder: domino(base), CrossEntropy(3, 0.8)),
    **{
        name: (lambda base, folder, at=at: block_heads(base)[at], objective)
        for at, (name, objective) in enumerate(zip(BLOCK, OF_BLOCK, strict=True))
    },
    **SEQUENTIAL_CASES,
    "draft_model": (lambda base, folder: make_sequential_drafter("draft_model", base, folder, 3), Distill(3, 1.0, kl)),
    "kangaroo": (lambda base, folder: make_sequential_drafter("kangaroo", base, folder, 3), Distill(3, 1.0, kl)),
    "draft_model_gpt2": (
        lambda base, folder: make_sequential_drafter("draft_model_gpt2", base, folder, 3),
        CrossEntropy(3, 1.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_packed_batch_equals_its_responses_one_per_row(case, tmp_path):
    """The same loss and the same gradient of every trained parameter."""
    base = random_base("gpt2" if case == "ctc_causal" else "llama", context=CONTEXT)
    make, objective = CASES[case]
    drafter = make(base, tmp_path)
    base = tapped_base(base) if case == "ctc_taps" else base
    made = packs(base, objective.labels)
    batch = made.batch(0)
    assert [len(pack) for pack in made.packs(0)] == [3, 3]
    alone = unpacked(base, made, 0, batch)
    assert int((alone.lengths_BA > 0).sum()) == int((batch.lengths_BA > 0).sum()) > 30
    results = [gradients(drafter, objective, one) for one in (batch, alone)]
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), rel=1e-5, abs=1e-5)
    for name, value in results[0][1].items():
        scale = max(1.0, float(value.abs().max()))
        assert (value - results[1][1][name]).abs().max() < 2e-5 * scale, name
    # The test can fail: texts that attend to each other, with position ids that continue, have another loss.
    leaking = torch.arange(batch.tokens_BL.shape[1]).clamp(max=CONTEXT - 1).expand_as(batch.tokens_BL)
    if case not in SEES_ONE_STATE:
        blurred = objective(drafter(Batch(**vars(batch) | {"position_ids_BL": leaking})), batch).value
        assert abs(float(blurred.detach() - results[1][0])) > 1e-4


SEES_ONE_STATE = ("residual", "feed_forward", "hydra")  # of the base, whose packing is tested below


def tapped_base(base):
    return BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1])


def gradients(drafter, objective, batch):
    drafter.zero_grad(set_to_none=True)
    loss = objective(drafter(batch), batch).value
    loss.backward()
    return loss.detach(), {
        name: value.grad.clone() for name, value in drafter.named_parameters() if value.grad is not None
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_hidden_states_of_a_pack_are_those_of_every_text_alone(kind):
    base = random_base(kind, context=CONTEXT)
    rng = torch.Generator().manual_seed(2)
    texts = [torch.randint(5, 200, (length,), generator=rng) for length in (20, 9, 30, 3, 1, 17)]
    packed_rows = TokenSequences(texts, [[(0, len(text), True)] for text in texts])
    padded_rows = packed_rows.pad_packs([[0, 1, 2, 3], [4, 5]])
    states_BLD = base.hidden_states(
        padded_rows.tokens_BL, torch.ones_like(padded_rows.tokens_BL), padded_rows.position_ids_BL
    )
    at = {0: (0, 0), 1: (0, 20), 2: (0, 29), 3: (0, 59), 4: (1, 0), 5: (1, 1)}
    for index, (row, begin) in at.items():
        alone_LD = base.hidden_states(texts[index][None], torch.ones_like(texts[index])[None])[0]
        packed_LD = states_BLD[row, begin : begin + len(texts[index])]
        assert torch.allclose(packed_LD, alone_LD, atol=1e-4), index
        # As one text, or at other position ids, they differ.
        if begin and len(texts[index]) > 1:
            whole_BLD = base.hidden_states(
                padded_rows.tokens_BL[:, :CONTEXT], torch.ones_like(padded_rows.tokens_BL[:, :CONTEXT])
            )
            part_LD = whole_BLD[row, begin : begin + len(texts[index])]
            assert not torch.allclose(part_LD, alone_LD[: len(part_LD)], atol=1e-2) or not len(part_LD)


@pytest.mark.parametrize("case", ["ctc", "gru", "residual", "hydra", "hydra++", "eagle_ctc", "eagle3", "draft_model"])
@torch.no_grad()
def test_other_texts_of_a_pack_change_nothing(case, tmp_path):
    """Other tokens in its first and last text: hidden states and emissions of the middle one do not change, not even
    those of frames that reach past its end."""
    base = random_base(context=CONTEXT)
    make, objective = CASES[case]
    drafter = make(base, tmp_path)
    made = packs(base, objective.labels, anchors=SIZE)
    batch = made.batch(0)
    first, middle, last = (len(made.rows.tokens[index]) for index in made.packs(0)[0])
    other = batch.tokens_BL.clone()
    other[:, :first] += 1
    other[:, first + middle : first + middle + last] += 1
    states_BLD = base.hidden_states(other, torch.ones_like(other), batch.position_ids_BL)
    own = slice(first, first + middle)
    assert torch.allclose(states_BLD[0, own], batch.states_BLD[0, own], atol=1e-6)
    assert not torch.allclose(states_BLD[0, :first], batch.states_BLD[0, :first], atol=1e-2)
    inside_A = (batch.anchors_BA[0] >= first) & (batch.anchors_BA[0] < first + middle)
    assert 5 < int(inside_A.sum()) < len(inside_A)
    reaching = batch.anchors_BA[0][inside_A] + drafter.frames >= first + middle
    assert reaching.any()
    changed = Batch(**vars(batch) | {"tokens_BL": other, "states_BLD": states_BLD})
    emitted, again = drafter(batch).logits()[0], drafter(changed).logits()[0]
    assert torch.allclose(emitted[inside_A], again[inside_A], atol=1e-5)
    assert not torch.allclose(emitted[~inside_A], again[~inside_A], atol=1e-2)


@pytest.mark.parametrize("precision", ["float32"])
def test_stored_hidden_states_are_packed(precision, tmp_path):
    base = random_base(context=CONTEXT)
    stored = packs(base, 3, partial(OfflineHiddenStates, path=str(tmp_path), precision=precision, rows=4, limit_gb=1.0))
    stored.hidden_states.precompute()
    live = packs(base, 3)
    for step in range(4):
        one, other = stored.batch(step), live.batch(step)
        for row, pack in enumerate(stored.packs(step)):
            real = sum(len(stored.rows.tokens[index]) for index in pack)
            assert torch.allclose(one.states_BLD[row, :real], other.states_BLD[row, :real], atol=1e-4)
