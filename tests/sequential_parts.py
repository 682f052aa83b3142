"""Sequential drafters on a random base, with weights moved away from their initial values."""

from __future__ import annotations

import torch
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.eagle import Eagle
from ctcdraft.drafters.eagle3 import Eagle3
from ctcdraft.drafters.early_exit import EarlyExit, Kangaroo
from ctcdraft.drafters.hydra import Hydra
from ctcdraft.drafters.redrafter import ReDrafter
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.objectives import eagle as eagle_objectives
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.distillation import Distill, kl

KINDS = (
    *("hydra", "hydra++", "hydra_own", "eagle", "eagle3", "eagle3.1", "redrafter", "early_exit", "kangaroo"),
    *("redrafter_narrow", "draft_model", "draft_model_gpt2"),
)


def saved_lm(folder, kind="llama", seed=7, tokenizer=lambda: tiny_tokenizer(), **changes):
    """Save a small LM and its tokenizer in a folder, as on a hub, and return the folder."""
    lm = random_lm(kind, seed, **{"context": 256, **changes})
    lm.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def make_sequential_drafter(kind, base, folder, frames=4, tree=None):
    tree = tree or DynamicTree(3, 4)
    torch.manual_seed(5)
    if kind.startswith("draft_model"):
        lm = "gpt2" if kind.endswith("gpt2") else "llama"
        width = {} if lm == "gpt2" else {"hidden_size": 16, "head_dim": 4}
        return DraftModel(base, saved_lm(folder / lm, lm, **width), None, frames, tree).eval()
    drafter = MAKERS[kind](base, frames, tree)
    for value in drafter.trainable_parameters():
        value.data += 0.05 * torch.randn_like(value)
    return drafter.eval()


MAKERS = {
    "hydra": lambda base, frames, tree: Hydra(base, frames, layers=1, prefix_layer=False, tree=tree),
    "hydra++": lambda base, frames, tree: Hydra(base, frames, layers=4, prefix_layer=True, tree=tree),
    "hydra_own": lambda base, frames, tree: Hydra(
        base, frames, layers=2, prefix_layer=True, tree=tree, own_heads=True, prefix_norm=True
    ),
    "eagle": Eagle,
    "eagle3": lambda base, frames, tree: Eagle3(base, frames, tree, None, True, False, False, False),
    "eagle3.1": lambda base, frames, tree: Eagle3(base, frames, tree, None, True, True, True, True),
    "redrafter": lambda base, frames, tree: ReDrafter(base, frames, 2, tree, own_head=True),
    "redrafter_narrow": lambda base, frames, tree: ReDrafter(base, frames, 2, tree),
    "early_exit": lambda base, frames, tree: EarlyExit(base, 1, frames, tree),
    "kangaroo": lambda base, frames, tree: Kangaroo(base, 0.5, frames, tree, mlp=False, like_base=True),
}

SEQUENTIAL_CASES = {  # (base, folder) -> drafter, and an objective that trains it
    "redrafter": (lambda base, folder: make_sequential_drafter("redrafter", base, folder, 3), CrossEntropy(3, 0.8)),
    "hydra": (lambda base, folder: make_sequential_drafter("hydra", base, folder, 3), CrossEntropy(3, 0.8)),
    "hydra++": (lambda base, folder: make_sequential_drafter("hydra++", base, folder, 3), Distill(3, 0.8, kl)),
    "hydra_own": (lambda base, folder: make_sequential_drafter("hydra_own", base, folder, 3), CrossEntropy(3, 0.8)),
    "eagle": (
        lambda base, folder: make_sequential_drafter("eagle", base, folder, 3),
        eagle_objectives.Eagle(1, 1.0, 0.1),
    ),
    "eagle3": (lambda base, folder: make_sequential_drafter("eagle3", base, folder, 3), Distill(3, 0.8, kl)),
    "eagle3.1": (lambda base, folder: make_sequential_drafter("eagle3.1", base, folder, 3), Distill(3, 0.8, kl)),
    "eagle_ctc": (
        lambda base, folder: make_sequential_drafter("eagle", base, folder, 6),
        eagle_objectives.EagleCTC(3, 6, 1.0, 0.1, 0.01),
    ),
}
