"""Values of frames in blocks, with a teacher that is computed once per position, against loops over single labels."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from test_frame_objectives import WIDTH, batch
from torch import nn
from truths_heads import slow_frame_loss

from ctcdraft.errors import InputError
from ctcdraft.nn import chunks, frame_values, heads
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.heads import BlankHead, Emissions, TokenEmissions, TokenHead
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.objectives import teacher
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.distillation import Distill, DistillWithLabels, kl, total_variation

WORDS = 4
CORRECTIONS = {"none": None, "markov": partial(MarkovCorrection, rank=3), "gru": partial(GRUCorrection, rank=3)}
VOCABULARIES = ["whole", "of_both", "of_frames"]
DISTANCES = {"kl": kl, "tv": total_variation}
WEIGHTS = {"cross_entropy": 0.1, "distill": 1.8}


def outputs_and_learned(correction: str, vocabulary: str) -> tuple[Emissions, list[torch.Tensor]]:
    """Return emissions with a trained lm_head where the frames have one of their own, and what has gradients."""
    torch.manual_seed(0)
    lm_head = nn.Linear(WIDTH, WORDS).requires_grad_(False)
    states = torch.randn(2, 5, 4, WIDTH, requires_grad=True)
    learned, start, made = [states], None, None
    if correction != "none":
        made = CORRECTIONS[correction](nn.Embedding(WORDS, WIDTH).requires_grad_(False), epsilon=1e-6)
        learned.append(nn.init.normal_(made.out.weight))
        start = made.start(torch.randn(2, 5, WIDTH), torch.randint(0, WORDS, (2, 5))).detach()
    if vocabulary != "of_frames":
        head = BlankHead(lm_head, WIDTH, vocabulary=3 if vocabulary == "of_both" else None)
        return Emissions(states, head, made, start), learned
    own = TokenHead(DraftVocabHead(lm_head, 3, trained=True))
    own.words.set_tokens(torch.tensor([0, 1, 3]))
    return TokenEmissions(states, TokenHead(lm_head), made, start, own=own), [*learned, own.words.weight]


def slow_distance(name: str, restricted: bool, base, logits, label: int):
    """The distance over tokens that the frame has; None where it lacks the base's most probable one."""
    kept = ~logits.isneginf()
    if restricted and not kept[base.argmax()]:
        return None
    p, q = base[kept].softmax(-1), logits[kept].softmax(-1)
    return (p * (p.log() - q.log())).sum() if name == "kl" else (p - q).abs().sum() / 2


def slow_cross_entropy(base, logits, label: int):
    return None if logits[label].isneginf() else -logits.log_softmax(-1)[label]


def in_small_parts(monkeypatch, parts: str) -> None:
    """Compute in blocks of one window, or in chunks of one window, or on a device that cannot count, or all at once."""
    if parts == "blocks":
        monkeypatch.setitem(frame_values.BLOCKS, "cpu", 1)
    elif parts == "chunks_of_blocks":
        monkeypatch.setitem(frame_values.BLOCKS, "cpu", WORDS * 3)
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 2 * 3 * (WORDS + 1) * 3)  # three windows
    elif parts == "uncounted":
        # What a device other than the CPU computes: every label, or every position where these are fewer.
        monkeypatch.setattr(
            teacher.Tensor, "unique", lambda x, return_inverse: (x.flatten(), torch.arange(x.numel()).view_as(x))
        )


@pytest.mark.parametrize("parts", ["whole", "blocks", "chunks_of_blocks", "uncounted"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_distillation_alone_and_with_labels(distance, correction, vocabulary, parts, monkeypatch):
    (outputs, learned), windows = outputs_and_learned(correction, vocabulary), batch()
    restricted = vocabulary == "of_frames"
    slow = slow_frame_loss(outputs, windows, 0.8, partial(slow_distance, distance, restricted))
    labels = slow_frame_loss(outputs, windows, 0.8, slow_cross_entropy)
    in_small_parts(monkeypatch, parts)
    alone = Distill(3, 0.8, DISTANCES[distance])(outputs, windows)
    both = DistillWithLabels(3, 0.8, DISTANCES[distance], WEIGHTS)(outputs, windows)
    for ours, wanted in ((alone, slow), (both, 0.1 * labels + 1.8 * slow)):
        torch.testing.assert_close(ours.value, wanted)
        gradients = (torch.autograd.grad(value, learned, retain_graph=True) for value in (ours.value, wanted))
        for our, want in zip(*gradients, strict=True):
            torch.testing.assert_close(our, want, atol=1e-6, rtol=1e-4)
    parts_of_sum = {"cross_entropy": CrossEntropy(3, 0.8), "distill": Distill(3, 0.8, DISTANCES[distance])}
    summed = WeightedSum(3, parts_of_sum, WEIGHTS)(outputs, windows)
    torch.testing.assert_close((both.value, both.count), (summed.value, summed.count))
    assert set(both.metrics) == set(summed.metrics)


def test_the_base_is_computed_once_per_position():
    outputs, _ = outputs_and_learned("none", "whole")
    windows, rows = batch(), []
    outputs.head.words.register_forward_hook(lambda module, args, logits: rows.append(args[0].shape))
    Distill(3, 0.8, kl)(outputs, windows)
    needed = {
        (row, int(windows.anchors_BA[row, anchor]) + 1 + k)
        for row in range(2)
        for anchor in range(5)
        for k in range(int(windows.lengths_BA[row, anchor]))
    }
    assert (len(needed), WIDTH) in rows
    assert len(needed) < int(windows.lengths_BA.sum())


def test_weights_of_unknown_parts_are_refused():
    with pytest.raises(InputError, match=r"objective\.weights must be those of cross_entropy and distill"):
        DistillWithLabels(3, 0.8, kl, {"cross_entropy": 1.0})


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_scores_of_labels_are_computed_for_real_windows_only(correction, monkeypatch):
    """The same as of every window alone, zeros for windows that are padding, and gradients of real ones only."""
    (outputs, _), windows = outputs_and_learned(correction, "whole"), batch()
    real_BA, labels_BAS = windows.lengths_BA > 0, windows.labels_BAS
    counted = []
    for name in ("pairwise_logsumexp", "fused_linear_logsumexp", "label_and_blank_log_probs"):
        score = getattr(heads, name)
        monkeypatch.setattr(heads, name, lambda x, *rest, score=score: (counted.append(len(x)), score(x, *rest))[1])
    scores, log_probs_BAS = outputs.scores(labels_BAS), outputs.label_log_probs(labels_BAS)
    assert counted == [int(real_BA.sum()), 3 * int(real_BA.sum())]
    assert (scores.hold_BATS is scores.label_BATS) == (correction == "none")
    for row, anchor in real_BA.nonzero().tolist():
        at = (slice(row, row + 1), slice(anchor, anchor + 1))
        start = None if outputs.start_BAR is None else outputs.start_BAR[at]
        alone = Emissions(outputs.states_BATD[at], outputs.head, outputs.correction, start)
        for name, score in vars(alone.scores(labels_BAS[at])).items():
            assert score is None or torch.allclose(getattr(scores, name)[at], score, atol=1e-6)
        assert torch.allclose(log_probs_BAS[at], alone.label_log_probs(labels_BAS[at]), atol=1e-6)
    every = [*(score for score in vars(scores).values() if score is not None), log_probs_BAS]
    assert all((score[~real_BA] == 0).all() for score in every)
    (gradient,) = torch.autograd.grad(sum(score.sum() for score in every), outputs.states_BATD)
    assert ((gradient != 0).flatten(2).any(-1) == real_BA).all()


def test_a_chunk_is_computed_once_in_the_forward_pass_and_once_in_the_backward_pass(monkeypatch):
    """Gradients of blocks are computed inside a checkpoint, whose hooks would compute the chunk again for each."""
    (outputs, learned), windows, calls = outputs_and_learned("none", "whole"), batch(), []
    in_small_parts(monkeypatch, "chunks_of_blocks")
    outputs.head.words.register_forward_hook(lambda *_: calls.append(1))
    value = Distill(3, 0.8, kl)(outputs, windows).value
    of_forward = len(calls)
    assert of_forward == 2 * -(-int((windows.lengths_BA > 0).sum()) // 3)  # frames and teacher of every chunk
    torch.autograd.grad(value, learned)
    assert len(calls) == 2 * of_forward


@pytest.mark.parametrize("several", [False, True])
def test_no_block_stays_in_memory(several, monkeypatch):
    monkeypatch.setitem(frame_values.BLOCKS, "cpu", 22)  # two of four windows, of one frame and 11 tokens

    def measure(log_probs_XSV, labels_XS):
        values_XS = log_probs_XSV.gather(-1, labels_XS[..., None])[..., 0]
        return torch.stack([values_XS, log_probs_XSV.exp().square().sum(dim=-1)], dim=-1) if several else values_XS

    def blocks():
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) and one.shape[-1:] == (11,) for one in gc.get_objects())

    before = blocks()
    logits_XSV = torch.randn(4, 1, 11, requires_grad=True)
    frame_values.frame_values(measure, logits_XSV, torch.zeros(4, 1, dtype=torch.long)).sum().backward()
    assert logits_XSV.grad is not None
    del logits_XSV
    assert blocks() == before
