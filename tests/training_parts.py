"""A run small enough for a test: random base, random text as corpus, a CTC head of six frames."""

from __future__ import annotations

import json
from functools import partial

import torch

from ctcdraft.corpus.batches import Batches, Rows
from ctcdraft.decoding.loop import Settings
from ctcdraft.decoding.verify import match
from ctcdraft.drafters.block import BlockDrafter
from ctcdraft.drafters.direct import Direct, SparseTree, likely_choices
from ctcdraft.drafters.paths import Collapse, PrefixSearch
from ctcdraft.drafters.transducer import TransducerSearch
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.correction import GRU, Markov
from ctcdraft.nn.residual import FeedForwardBody, ResidualBody
from ctcdraft.objectives.ctc import CTC
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.pace import MACHINE
from ctcdraft.training.peers import Peers
from ctcdraft.training.probe import Probe
from ctcdraft.training.trainer import Care, Trainer

HOW = Settings(max_new_tokens=12, nodes=8, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)


def rows(count: int = 10, length: int = 30, words: int = 40) -> Rows:
    rng = torch.Generator().manual_seed(1)
    tokens = [torch.randint(5, 5 + words, (length - i,), generator=rng) for i in range(count)]
    masks = [(torch.arange(len(row)) >= 6).int() for row in tokens]
    return Rows(tokens, masks, [True] * count)


def ctc_head(base, frames: int = 6) -> BlockDrafter:
    return block_head(base, partial(AttentionBody, root_input=True, causal=False), PrefixSearch(16), frames=frames)


def block_head(base, body, paths, correction=None, frames: int = 6) -> BlockDrafter:
    torch.manual_seed(0)
    return BlockDrafter(base, frames, body, paths, correction)


def block_heads(base) -> list[BlockDrafter]:
    """The other corners of the block drafter, each away from the identity it starts with."""
    attention = partial(AttentionBody, root_input=True, causal=False, blocks=2)
    choices = likely_choices(20, frames=6, ranks=5, first=0.6, rank_decay=0.4, frame_decay=0.9)
    heads = [
        block_head(base, attention, PrefixSearch(16), partial(GRU, rank=8)),
        block_head(base, attention, TransducerSearch(), partial(GRU, rank=8)),
        block_head(base, attention, Direct(None), partial(Markov, rank=8)),
        block_head(base, partial(ResidualBody, blocks=1), SparseTree(choices)),
        block_head(base, partial(FeedForwardBody, inner=None), Direct(1)),
        block_head(base, attention, Collapse(20, 5, 0.4), partial(GRU, rank=8)),
    ]
    for head in heads:
        for value in head.trainable_parameters():
            value.data += 0.2 * torch.randn_like(value)
    return heads


def figures_of(run) -> list[dict]:
    """What was logged of every step, without what the machine had to do with it."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert all(line[name] >= 0 for line in lines for name in MACHINE)
    return [{name: value for name, value in line.items() if name not in MACHINE} for line in lines]


CARE = Care(checkpoint_every=5, checkpoint_minutes=None, keep=2, patience=3)


def trainer(
    run,
    base,
    steps: int,
    labels: int = 3,
    drafter=None,
    objective=None,
    accumulate=1,
    care=CARE,
    engine=TorchEngine,
    **changes,
) -> Trainer:
    drafter = (drafter or ctc_head(base)).train()
    objective = objective or CTC(labels)
    batches = Batches(rows(), base, rows_a_step=4, anchors=8, labels=objective.labels, seed=0)
    values = {
        "learning_rate": 3e-3,
        "warmup": 2,
        "final_share": 0.1,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "clip_value": None,
        "autocast": False,
        "peers": Peers(),
        **changes,
    }
    made = engine(drafter, drafter.trainable_parameters(), steps=steps, **values)
    probe = Probe(base, [torch.arange(10, 16)], HOW)
    return Trainer(run, drafter, objective, batches, made, probe, steps, accumulate, probe_every=6, checkpoint_policy=care)
