# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One pass, frame by frame
#
# What a trained head says at one place of a text, which texts that collapses to, the tree that goes to the base,
# and what the base makes of it. Needs a run: `make demo` leaves one in `runs/demo`. Run this file as a script, or
# open it in Jupyter with jupytext.

# %%
from pathlib import Path

import torch
from omegaconf import OmegaConf

from ctcdraft.corpus.chat import messages, prompt_tokens
from ctcdraft.decoding.loop import Context, Settings, generate
from ctcdraft.decoding.tree import Commit
from ctcdraft.decoding.verify import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.front_door import REPOSITORY, load_drafter, register_resolvers

register_resolvers()
RUN = REPOSITORY / "runs" / "demo"
QUESTION = "Nina has 4 boxes with 6 pens in each box. She gives away 5 pens. How many pens does she have now?"
BEFORE = 12  # words of the answer that are there already

# %%
from hydra.utils import instantiate  # noqa: E402

config = OmegaConf.load(Path(RUN) / "config.yaml")
base = instantiate(config.base, device="cpu", dtype="float32")
drafter = load_drafter(RUN, base, paths=None)
how = Settings(max_new_tokens=80, nodes=12, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)


def word(token) -> str:
    return "ε" if int(token) == base.vocabulary else repr(base.tokenizer.decode([int(token)]))[1:-1]


prompt = torch.tensor(prompt_tokens(base.tokenizer, messages([QUESTION], [])))
answer = generate(base, Autoregressive(base), prompt, how, base.stop_tokens, 0).tokens
print(base.tokenizer.decode(answer))

# %% [markdown]
# ## The frames
# The base has read everything before the root. Each frame is a distribution over words and the blank ε.

# %%
text = torch.cat([prompt, torch.tensor(answer[: BEFORE + 1])])
with torch.inference_mode():
    cache = base.new_cache(512)
    read = base.read(text[:-1], cache)
    context = Context(text, read.states_ND, room=40, nodes=how.nodes)
    tree, memory = drafter.draft(context, None, torch.Generator())
    memory.keep(0, torch.arange(0))
    log_probs = drafter.emit(context, memory).logits()[0, 0].log_softmax(-1)

print("so far:", base.tokenizer.decode(text[len(prompt) : -1]), "| root:", word(text[-1]))
for number, frame in enumerate(log_probs):
    best = frame.topk(4)
    print(f"frame {number + 1}  ", "   ".join(f"{word(t):>8} {float(p.exp()):.2f}" for p, t in zip(*best, strict=True)))

# %% [markdown]
# ## The tree
# Every node is a distinct text; its probability adds up all alignments that collapse to it.

# %%
with torch.inference_mode():
    start = cache.length
    read = base.read_tree(tree, cache)
    verdict = match(tree, how.law(read.logits_NV), None, start)
    commit = Commit.of(tree, verdict)
accepted = set(commit.path_K.tolist())
for node in range(len(tree)):
    mark = "✓" if node in accepted else " "
    print(f"{mark} {'    ' * int(tree.depths_N[node])}{word(tree.tokens_N[node])}")
print("committed:", " ".join(word(token) for token in commit.tokens), f"({len(commit.tokens)} tokens for one pass)")

# %% [markdown]
# The text itself goes on with these words, whatever was guessed:

# %%
print(" ".join(word(token) for token in answer[BEFORE + 1 : BEFORE + 1 + len(commit.tokens)]))
assert tuple(answer[BEFORE + 1 : BEFORE + 1 + len(commit.tokens)]) == commit.tokens
