"""Training equals decoding, for drafters of several steps: every law on the way is that of the training forward.

Along the true words all frames must agree. EAGLE's deeper frames are told its own states and not the base's, by
design; these are held to a slow reading of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stepwise_parts import KINDS, make_sequential_drafter
from test_path import HOW, PROMPT, training_emissions
from tiny_models import random_base

from ctcdraft.corpus.batches import Batches, TokenSequences
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.request import TreeRequest

ONE = torch.zeros(1, dtype=torch.int64)


class Witness:
    """Asks for the laws along the true words at every pass; hangs truth of varying length into the tree."""

    def __init__(self, drafter, text):
        self.drafter = drafter
        self.text = text
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.contexts: list[Context] = []

    def draft(self, context: Context, memory, rng):
        here = len(context.tokens_L)
        laws = self.drafter.step_function(context, memory)
        words = self.text[here - 1 : here - 1 + self.drafter.frames]
        law = torch.stack([laws(word[None], ONE)[0] for word in words])
        self.seen.append((here - 2, law))
        memory = laws.release()
        truth = self.text[here : here + min(len(self.seen) % 4, context.depth)]
        wrong = (law[0].argmax() + 1)[None]
        paths = [path.tolist() for path in (truth, wrong) if context.depth]
        width = max(map(len, paths), default=1) or 1
        padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths] or [[-1]])
        lengths = torch.tensor([len(path) for path in paths] or [0])
        return TokenTree.from_paths(context.root, padded, lengths, context.nodes), memory


def decoded(base, drafter):
    answer = generate(base, Autoregressive(base), PROMPT, HOW, frozenset(), 0).tokens
    text = torch.cat([PROMPT, torch.tensor(answer)])
    witness = Witness(drafter, text)
    made = generate(base, witness, PROMPT, HOW, frozenset(), 0)
    assert made.tokens == answer
    assert len({step.committed for step in made.passes}) > 2  # passes of different lengths were tried
    return text, witness.seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lm", ["llama", "gpt2"])
@torch.inference_mode()
def test_every_pass_says_what_training_says(lm, kind, tmp_path):
    base = random_base(lm)
    drafter = make_sequential_drafter(kind, base, tmp_path)
    text, seen = decoded(base, drafter)
    anchors = [anchor for anchor, _ in seen]
    trained = training_emissions(base, drafter, text, anchors).log_softmax(dim=-1)
    equal_frames = 1 if kind == "eagle" else drafter.frames
    for (_, law), truth in zip(seen, trained, strict=True):
        frames = min(len(law), equal_frames)
        assert (law[:frames] - truth[:frames]).abs().max() < 1e-4
    shifted = training_emissions(base, drafter, text, anchors[:-1], shift=1).log_softmax(dim=-1)
    first = torch.stack([law[0] for _, law in seen[:-1]])
    assert (first - shifted[:, 0]).abs().max() > 1e-2


@torch.inference_mode()
def test_eagle_goes_on_from_its_own_states(tmp_path):
    """The slow reading: no cache, one more row a level, each fed the state guessed for the row before it."""
    base = random_base()
    drafter = make_sequential_drafter("eagle", base, tmp_path).double()  # feeding a state back magnifies its rounding
    base.double()
    text, seen = decoded(base, drafter)
    for anchor, law in seen[::5]:
        states = base.hidden_states(text[None, : anchor + 1], torch.ones(1, anchor + 1, dtype=torch.int64))
        for level in range(len(law)):
            rows = anchor + 1 + level
            said = drafter.block(drafter.fuse_inputs(text[None, 1 : rows + 1], states), torch.arange(rows))[:, -1:]
            truth = drafter.head(said)[0, 0].log_softmax(dim=-1)
            assert (law[level] - truth).abs().max() < 1e-4
            states = torch.cat([states, said], dim=1)


class Recorder:
    """Passes laws on and keeps every text's."""

    def __init__(self, laws):
        self.step_function = laws
        self.texts, self.found = [()], {}

    def __call__(self, tokens_K, rows_K):
        if self.found:
            self.texts = [(*self.texts[r], t) for r, t in zip(rows_K.tolist(), tokens_K.tolist(), strict=True)]
        said = self.step_function(tokens_K, rows_K)
        self.found |= dict(zip(self.texts, said, strict=True))
        return said


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_branching_tree_is_read_as_the_texts_in_it(kind, tmp_path):
    """In float64: EAGLE's own states go from step to step, and on some processors float32 lets 3e-5 grow to 6e-4."""
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
    for text, law in recorder.found.items():
        laws = drafter.step_function(
            replace(context, new_states_KD=states[:0]) if kind == "draft_model" else context, None
        )
        alone = laws(context.root[None], ONE)
        for word in text:
            alone = laws(torch.tensor([word]), ONE)
        assert torch.allclose(law, alone[0], rtol=0, atol=1e-6), text
    # What was guessed has left no trace: the same tree again from what is remembered.
    more = torch.cat([tokens, torch.tensor([17, 18])])
    fresh = base.hidden_states(more[None, :-1], torch.ones(1, 24, dtype=torch.int64))[0]
    again = drafter.step_function(Context(more, fresh[22:], 30, 30), memory)(more[-1:], ONE)
    whole = drafter.step_function(Context(more, fresh, 30, 30), None)(more[-1:], ONE)
    assert torch.allclose(again, whole, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_batches_that_train_hold_what_decoding_sees(kind, tmp_path):
    base = random_base()
    drafter = make_sequential_drafter(kind, base, tmp_path)
    text, seen = decoded(base, drafter)
    rows = TokenSequences([text], [(torch.arange(len(text)) >= len(PROMPT)).int()], [True])
    batch = Batches(rows, base, rows_per_step=1, anchors=len(text), labels=3, seed=0).batch(0)
    said = drafter(batch).logits()[0].log_softmax(dim=-1)
    laws, compared = dict(seen), 0
    for place, anchor in enumerate(batch.anchors_BA[0].tolist()):
        if batch.lengths_BA[0, place] and anchor in laws:
            frames = 1 if kind == "eagle" else min(int(batch.lengths_BA[0, place]), len(laws[anchor]))
            assert (said[place, :frames] - laws[anchor][:frames]).abs().max() < 1e-4
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_lossless_untrained(kind, temperature, tmp_path):
    base = random_base()
    how = replace(HOW, temperature=temperature)
    drafter = make_sequential_drafter(kind, base, tmp_path)
    for seed in range(3):
        prompt = PROMPT + seed
        truth = generate(base, Autoregressive(base), prompt, how, base.stop_token_ids, seed).tokens
        assert generate(base, drafter, prompt, how, base.stop_token_ids, seed).tokens == truth
