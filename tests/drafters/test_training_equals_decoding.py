"""Training equals decoding: at every step the drafter's emissions are those of the training forward at that anchor.

No other test would detect a shift by one that training and decoding share, or one in decoding alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import random_base

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, TokenSequences
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch, TransducerSearch
from ctcdraft.drafters.trees.per_frame import PerFrameTree, StaticPerFrameTree, likely_choices
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.bodies import AttentionBody, FeedForwardBody, ResidualBody
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.peagle_body import PEagleBody
from ctcdraft.nn.slot_bodies import DFlashBody

PROMPT = torch.tensor([0, 7, 9, 9, 9, 30])
BODIES = {
    "both ways": partial(AttentionBody, root_input=True, causal=False),
    "as in the paper": partial(AttentionBody, root_input=False, causal=False),
    "causal": partial(AttentionBody, root_input=True, causal=True),
    "two blocks": partial(AttentionBody, root_input=True, causal=False, blocks=2),
    "own text": partial(AttentionBody, root_input=True, causal=False, blocks=2, own_text=True),
    "root row": partial(AttentionBody, root_input=False, causal=False, blocks=2, root_row=True),
    "all of it": partial(AttentionBody, root_input=True, causal=True, blocks=2, own_text=True, root_row=True),
    "dflash": partial(DFlashBody, blocks=2),
    "dspark": partial(DFlashBody, blocks=2, root_predicts=True),
    "peagle": partial(PEagleBody, blocks=3, like_base=True),
    "residual": partial(ResidualBody, blocks=2),
    "feed-forward": partial(FeedForwardBody, inner=None),
    "own heads": partial(ResidualBody, blocks=1),
}
SEES_THE_ROOT = set(BODIES) - {"as in the paper", "residual", "feed-forward", "own heads"}
HOW = DecodingSettings(max_new_tokens=50, nodes=12, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)


def block_drafter(base, body="both ways", paths=None, correction=None) -> ParallelDrafter:
    torch.manual_seed(5)
    drafter = ParallelDrafter(
        base, 6, BODIES[body], paths or PrefixSearch(16), correction, own_heads=body == "own heads"
    ).eval()
    for value in drafter.trainable_parameters():  # away from the identity initialisation
        value.data += 0.2 * torch.randn_like(value)
    return drafter


class RecordingDrafter:
    """Records the emissions of every step, and adds true tokens to some trees so that accepted lengths vary."""

    def __init__(self, drafter: ParallelDrafter, text: torch.Tensor) -> None:
        self.drafter = drafter
        self.text = text
        self.emissions: list[tuple[int, torch.Tensor]] = []
        self.starts: list[torch.Tensor] = []

    def draft(self, context: Context, memory, rng):
        tree, memory = self.drafter.draft(context, memory, rng)
        # `draft` has cached the new states; remove them so that `emit` can append them again.
        if memory is not None:
            memory.keep_path(memory.length - len(context.new_states_KD), torch.arange(0))
        emissions = self.drafter.emit(context, memory)
        length = len(context.tokens_L)
        self.emissions.append((length - 2, emissions.logits()[0, 0]))
        if emissions.start_BAR is not None:
            self.starts.append(emissions.start_BAR[0, 0])
        truth = self.text[length : length + min(len(self.emissions) % 4, context.depth)]
        paths = [truth.tolist(), tree.tokens_N[1:2].tolist()]
        width = max(map(len, paths), default=1) or 1
        padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
        lengths = torch.tensor([len(path) for path in paths])
        return TokenTree.from_paths(context.root, padded, lengths, context.nodes), memory


def training_forward(base, drafter, tokens, anchors, shift=0):
    """Run the training forward over the finished text, with the root moved by `shift`."""
    anchors_BA = torch.tensor(anchors)[None]
    roots_BA = tokens[anchors_BA + 1 + shift]
    labels_BAS = torch.zeros(1, len(anchors), drafter.frames, dtype=torch.int64)
    states_BLD = base.hidden_states(tokens[None], torch.ones_like(tokens)[None])
    position_ids_BL = torch.arange(len(tokens))[None]
    batch = Batch(
        tokens[None], states_BLD, anchors_BA, roots_BA, labels_BAS, torch.ones_like(anchors_BA), position_ids_BL
    )
    return drafter(batch)


def training_emissions(base, drafter, tokens, anchors, shift=0):
    """Return logits_ATC of the training forward."""
    return training_forward(base, drafter, tokens, anchors, shift).logits()[0]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.inference_mode()
def test_every_step_emits_what_training_emits(kind, body):
    base = random_base(kind)
    drafter = block_drafter(base, body)
    response = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(response)])
    recorder = RecordingDrafter(drafter, text)
    generation = generate(base, recorder, PROMPT, HOW, frozenset(), 0)
    assert generation.tokens == response
    assert len({step.committed for step in generation.passes}) > 2  # steps of different lengths were tried

    anchors = [anchor for anchor, _ in recorder.emissions]
    decoded = torch.stack([logits for _, logits in recorder.emissions])
    trained = training_forward(base, drafter, text, anchors).logits()[0]
    assert (decoded - trained).abs().max() < 1e-4
    if body in SEES_THE_ROOT:
        shifted = training_forward(base, drafter, text, anchors[:-1], shift=1).logits()[0]
        assert (decoded[:-1] - shifted).abs().max() > 1e-2


@pytest.mark.parametrize("body", ["both ways", "own text", "all of it"])
@torch.inference_mode()
def test_auxiliary_layers_are_used_in_decoding_as_in_training(body):
    """Also: the auxiliary state is the output of that layer, and zero maps equal a drafter of one layer and no maps."""
    base = random_base()
    tapped = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1, 0])
    drafter = block_drafter(tapped, body)
    response = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(response)])
    recorder = RecordingDrafter(drafter, text)
    assert generate(tapped, recorder, PROMPT, HOW, frozenset(), 0).tokens == response
    trained = training_forward(tapped, drafter, text, [anchor for anchor, _ in recorder.emissions]).logits()[0]
    assert (torch.stack([logits for _, logits in recorder.emissions]) - trained).abs().max() < 1e-4
    states_BLD = tapped.hidden_states(text[None], torch.ones_like(text)[None])
    assert torch.equal(states_BLD[..., : base.width], base.hidden_states(text[None], torch.ones_like(text)[None]))
    assert torch.equal(states_BLD[..., 2 * base.width :], base.embedding(text[None]))
    for zero in (drafter.fuse.mix, *drafter.body.own_text):
        before = training_forward(tapped, drafter, text, [7]).logits()
        zero.weight.zero_()
        assert not torch.allclose(training_forward(tapped, drafter, text, [7]).logits(), before, atol=1e-2)
    shared_text = {**BODIES[body].keywords, "own_text": False}
    one_tap = ParallelDrafter(base, 6, partial(AttentionBody, **shared_text), PrefixSearch(16)).eval()
    one_tap.load_state_dict(drafter.state_dict(), strict=False)
    plain = training_forward(base, one_tap, text, [7]).logits()
    assert torch.equal(training_forward(tapped, drafter, text, [7]).logits(), plain)


CORRECTIONS = {
    "markov": partial(MarkovCorrection, rank=8),
    "own embedding": partial(MarkovCorrection, rank=8, own_embedding=True),
    "gru": partial(GRUCorrection, rank=8),
    "frame gru": partial(FrameGRUCorrection, rank=8, memory=6, uncorrected=1),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("body", ["both ways", "dflash", "peagle"])
@torch.inference_mode()
def test_a_correction_starts_where_training_starts_it(body, correction):
    """Its memory at the root is equal at every step; from there on both run the same code."""
    base = random_base()
    base = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1, 0])
    drafter = block_drafter(base, body, paths=PerFrameTree(None), correction=CORRECTIONS[correction])
    response = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(response)])
    recorder = RecordingDrafter(drafter, text)
    assert generate(base, recorder, PROMPT, HOW, frozenset(), 0).tokens == response
    anchors = [anchor for anchor, _ in recorder.emissions]
    trained = training_forward(base, drafter, text, anchors).start_BAR[0]
    assert (torch.stack(recorder.starts) - trained).abs().max() < 1e-4
    shifted = training_forward(base, drafter, text, anchors[:-1], shift=1).start_BAR[0]
    assert (torch.stack(recorder.starts)[:-1] - shifted).abs().max() > 1e-2


@pytest.mark.parametrize("body", BODIES)
@torch.inference_mode()
def test_an_anchor_sees_no_later_text(body):
    """Changing the text after an anchor's root changes nothing in its emissions."""
    base = random_base()
    drafter = block_drafter(base, body)
    tokens = torch.arange(20, 50)
    anchors = [3, 8, 15]
    before = training_forward(base, drafter, tokens, anchors).logits()[0]
    for index, anchor in enumerate(anchors):
        other = tokens.clone()
        other[anchor + 2 :] = 77
        assert torch.allclose(training_forward(base, drafter, other, [anchor]).logits()[0, 0], before[index], atol=1e-5)
        other[anchor] = 78  # while the text before it does matter
        assert not torch.allclose(
            training_forward(base, drafter, other, [anchor]).logits()[0, 0], before[index], atol=1e-3
        )


@torch.inference_mode()
def test_training_batches_equal_what_decoding_sees():
    """The production batches of a corpus of one response, against decoding this response."""
    base = random_base()
    drafter = block_drafter(base)
    response = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(response)])
    recorder = RecordingDrafter(drafter, text)
    generate(base, recorder, PROMPT, HOW, frozenset(), 0)
    decoded = dict(recorder.emissions)

    rows = TokenSequences([text], [[(len(PROMPT), len(text), True)]])
    batch = Batches(rows, base, rows_per_step=1, anchors=len(text), labels=3, seed=0).batch(0)
    logits = drafter(batch).logits()[0]
    compared = 0
    for index, anchor in enumerate(batch.anchors_BA[0].tolist()):
        length = int(batch.lengths_BA[0, index])
        if not length:
            continue
        assert batch.roots_BA[0, index] == text[anchor + 1]
        assert batch.labels_BAS[0, index, :length].tolist() == text[anchor + 2 : anchor + 2 + length].tolist()
        if anchor in decoded:
            assert (logits[index] - decoded[anchor]).abs().max() < 1e-4
            compared += 1
    assert compared > 10


PATHS = [
    PrefixSearch(16),
    TransducerSearch(),
    Collapse(20, 5, 0.4),
    PerFrameTree(None),
    StaticPerFrameTree(likely_choices(20, 6, 5, 0.6, 0.4, 0.9)),
]


@pytest.mark.parametrize("paths", PATHS, ids=lambda paths: type(paths).__name__)
@pytest.mark.parametrize("correction", [None, MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_head_is_lossless_too(paths, correction, temperature):
    base = random_base()
    settings = replace(HOW, temperature=temperature)
    drafter = block_drafter(base, paths=paths, correction=correction and partial(correction, rank=8))
    for seed in range(3):
        prompt = PROMPT + seed
        truth = generate(base, Autoregressive(base), prompt, settings, base.stop_token_ids, seed).tokens
        assert generate(base, drafter, prompt, settings, base.stop_token_ids, seed).tokens == truth
