"""Training equals decoding for sequential drafters: every distribution is that of the training forward pass.

Along the true text all frames must agree. EAGLE's deeper frames read its own hidden states instead of the base's, by
design; they are compared with a slow computation of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import KINDS, make_sequential_drafter
from test_training_equals_decoding import HOW, PROMPT, training_emissions
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.corpus.batches import Batches, TokenSequences
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.models.base_model import BaseLM

ONE = torch.zeros(1, dtype=torch.int64)


class RecordingDrafter:
    """Records the distributions along the true text at every step and drafts true tokens of varying number."""

    def __init__(self, drafter, text):
        self.drafter = drafter
        self.text = text
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.contexts: list[Context] = []

    def draft(self, context: Context, memory, rng):
        length = len(context.tokens_L)
        step_function = self.drafter.step_function(context, memory)
        tokens = self.text[length - 1 : length - 1 + self.drafter.frames]
        log_probs = torch.stack([step_function(token[None], ONE)[0] for token in tokens])
        self.seen.append((length - 2, log_probs))
        memory = step_function.release()
        truth = self.text[length : length + min(len(self.seen) % 4, context.depth)]
        wrong = ((log_probs[0].argmax() + 1) % log_probs.shape[1])[None]
        paths = [path.tolist() for path in (truth, wrong) if context.depth]
        width = max(map(len, paths), default=1) or 1
        padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths] or [[-1]])
        lengths = torch.tensor([len(path) for path in paths] or [0])
        return TokenTree.from_paths(context.root, padded, lengths, context.nodes), memory


def decoded(base, drafter):
    response = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(response)])
    witness = RecordingDrafter(drafter, text)
    generation = generate(base, witness, PROMPT, HOW, frozenset(), 0)
    assert generation.tokens == response
    assert len({step.committed for step in generation.passes}) > 2  # steps of different lengths occurred
    return text, witness.seen


def precise(base, kind, folder):
    """Return a base and a drafter, in float64 where a fed back hidden state magnifies its rounding."""
    drafter = make_sequential_drafter(kind, base, folder)
    return (base.double(), drafter.double()) if kind.startswith("eagle") else (base, drafter)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lm", ["llama", "gpt2"])
@torch.inference_mode()
def test_every_step_equals_training(lm, kind, tmp_path):
    base, drafter = precise(random_base(lm), kind, tmp_path)
    text, seen = decoded(base, drafter)
    anchors = [anchor for anchor, _ in seen]
    trained = training_emissions(base, drafter, text, anchors).log_softmax(dim=-1)
    equal_frames = 1 if kind == "eagle" else drafter.frames
    for (_, log_probs), truth in zip(seen, trained, strict=True):
        frames = min(len(log_probs), equal_frames)
        assert (log_probs[:frames] - truth[:frames]).abs().max() < 1e-4
    shifted = training_emissions(base, drafter, text, anchors[:-1], shift=1).log_softmax(dim=-1)
    first = torch.stack([log_probs[0] for _, log_probs in seen[:-1]])
    assert (first - shifted[:, 0]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3.1"])
@torch.inference_mode()
def test_eagle_continues_from_its_own_hidden_states(kind, tmp_path):
    """Compared without a cache: one more row per level, which reads the output of the row before it.

    EAGLE-3 is trained on these outputs.
    """
    base = BaseLM(random_lm(), tiny_tokenizer(), "random", aux_layers=["last", 0, 1])
    base, drafter = precise(base, kind, tmp_path)
    text, seen = decoded(base, drafter)
    trained = training_emissions(base, drafter, text, [anchor for anchor, _ in seen]).log_softmax(dim=-1)
    for place, (anchor, log_probs) in list(enumerate(seen))[::5]:
        states = base.hidden_states(text[None, : anchor + 1], torch.ones(1, anchor + 1, dtype=torch.int64))
        states = drafter.input_states(states)
        for level in range(len(log_probs)):
            rows = anchor + 1 + level
            outputs = drafter.outputs(drafter.pairs(text[None, 1 : rows + 1], states), torch.arange(rows))[:, -1:]
            truth = drafter.logits(outputs)[0, 0].log_softmax(dim=-1)
            assert (log_probs[level] - truth).abs().max() < 1e-5
            if level == 0 or kind != "eagle":
                assert (trained[place, level] - truth).abs().max() < 1e-5
            states = torch.cat([states, outputs], dim=1)


class Recorder:
    """Records the distribution behind every text of a step function."""

    def __init__(self, step_function):
        self.step_function = step_function
        self.texts, self.found = [()], {}

    def __call__(self, tokens_K, rows_K):
        if self.found:
            self.texts = [(*self.texts[r], t) for r, t in zip(rows_K.tolist(), tokens_K.tolist(), strict=True)]
        outputs = self.step_function(tokens_K, rows_K)
        self.found |= dict(zip(self.texts, outputs, strict=True))
        return outputs


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_branching_tree_has_the_distributions_of_its_texts(kind, tmp_path):
    """In float64, because EAGLE feeds its hidden states back: on some processors float32 lets 3e-5 grow to 6e-4."""
    base = random_base()
    base.lm.double()
    drafter = make_sequential_drafter(kind, base, tmp_path).double()
    tokens = torch.randint(5, 200, (23,), generator=torch.Generator().manual_seed(3))
    states = base.hidden_states(tokens[None, :-1], torch.ones(1, 22, dtype=torch.int64))[0]
    context = Context(tokens, states, 30, 30)
    recorder = Recorder(drafter.step_function(context, None))
    DynamicTree(5, 3)(recorder, TreeRequest(context.root, 4, 30))
    memory = recorder.step_function.release()
    assert len(recorder.found) == 1 + 3 + 5 + 5
    for text, log_probs in recorder.found.items():
        step_function = drafter.step_function(
            replace(context, new_states_KD=states[:0]) if kind == "draft_model" else context, None
        )
        alone = step_function(context.root[None], ONE)
        for token in text:
            alone = step_function(torch.tensor([token]), ONE)
        assert torch.allclose(log_probs, alone[0], rtol=0, atol=1e-6), text
    # Draft tokens leave nothing in the memory: the next distribution equals the one without it.
    more = torch.cat([tokens, torch.tensor([17, 18])])
    fresh = base.hidden_states(more[None, :-1], torch.ones(1, 24, dtype=torch.int64))[0]
    again = drafter.step_function(Context(more, fresh[22:], 30, 30), memory)(more[-1:], ONE)
    whole = drafter.step_function(Context(more, fresh, 30, 30), None)(more[-1:], ONE)
    assert torch.allclose(again, whole, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_training_batches_hold_what_decoding_sees(kind, tmp_path):
    base, drafter = precise(random_base(), kind, tmp_path)
    text, seen = decoded(base, drafter)
    rows = TokenSequences([text], [[(len(PROMPT), len(text), True)]])
    batch = Batches(rows, base, rows_per_step=1, anchors=len(text), labels=3, seed=0).batch(0)
    outputs = drafter(batch).logits()[0].log_softmax(dim=-1)
    seen_by_anchor, compared = dict(seen), 0
    for place, anchor in enumerate(batch.anchors_BA[0].tolist()):
        if batch.lengths_BA[0, place] and anchor in seen_by_anchor:
            frames = 1 if kind == "eagle" else min(int(batch.lengths_BA[0, place]), len(seen_by_anchor[anchor]))
            assert (outputs[place, :frames] - seen_by_anchor[anchor][:frames]).abs().max() < 1e-4
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_drafter_is_lossless(kind, temperature, tmp_path):
    base = random_base()
    how = replace(HOW, temperature=temperature)
    drafter = make_sequential_drafter(kind, base, tmp_path)
    for seed in range(3):
        prompt = PROMPT + seed
        truth = generate(base, Autoregressive(base), prompt, how, base.stop_token_ids, seed).tokens
        assert generate(base, drafter, prompt, how, base.stop_token_ids, seed).tokens == truth
