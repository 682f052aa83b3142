"""Engines in processes of their own, and what their answers and counts are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from chi_square import p_value

from benchmarks.serving_soak import is_near_tie
from ctcdraft.config.published_head import load_published_drafter, read_head_config
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.models.loading import load_base

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "data" / "tiny"
DRAFT_TOKENS = 5
SPECULATIVE = {
    "method": "custom_class", "model": "ctcdraft.serving.CTCProposer", "num_speculative_tokens": DRAFT_TOKENS,
}  # fmt: skip
# Few blocks, so that requests are preempted; few tokens per step, so that prompts are read in chunks.
SETTINGS = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32,
    "num_gpu_blocks_override": 17, "enable_prefix_caching": True,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def drafted(length: str = "full", head: Path = TINY / "head", settings: dict = SETTINGS) -> dict:
    own = {"ctcdraft": {"head": str(head), "length": length}}
    return settings | {"speculative_config": SPECULATIVE, "additional_config": own}


def run_engine(folder: Path, call: dict, **environment: str) -> dict:
    files = folder / "call.json", folder / "result.json"
    files[0].write_text(json.dumps(call))
    command = [sys.executable, str(HERE / "engine.py"), *map(str, files)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(files[1].read_text())


def near_ties(model, triples):
    """Return how many of (prompt, answer, other answer) differ; fail unless all of these part at near ties."""
    base, count = None, 0
    for prompt, ours, theirs in triples:
        if ours == theirs:
            continue
        base = base or load_base(str(model), "float64", "cpu")
        assert is_near_tie(base, prompt, ours, theirs), (prompt, ours, theirs)
        count += 1
    return count


class ChainDrafter:
    """Our own drafter, of whose tree only the path of most probable children is kept."""

    def __init__(self, drafter):
        self.drafter = drafter

    def draft(self, context, memory, rng):
        tree, memory = self.drafter.draft(context, memory, rng)
        parents, tokens, at = tree.parents_N.tolist(), [int(tree.tokens_N[0])], 0
        while len(tokens) <= DRAFT_TOKENS and at in parents[1:]:
            at = parents.index(at, 1)
            tokens.append(int(tree.tokens_N[at]))
        chain_N = torch.tensor(tokens)
        return TokenTree(chain_N, torch.arange(len(tokens)) - 1, len(tokens) - 1), memory


def own_counts(base, head, prompts, max_tokens):
    """Return drafts and accepted draft tokens of our own loop with the head's chains, cut as served ones are."""
    drafter = ChainDrafter(load_published_drafter(head, read_head_config(head), base))
    # So that a draft near the end of an answer is not shortened by our loop, but by the room below.
    settings = DecodingSettings(max_tokens + DRAFT_TOKENS + 1, 64, 0.0, 0, 1.0, match, True)
    drafts = accepted = 0
    for prompt in prompts:
        result = generate(base, drafter, torch.tensor(prompt), settings, base.stop_token_ids, 0)
        produced = len(result.tokens) - sum(step.committed for step in result.passes)
        for step in result.passes:
            if (room := max_tokens - produced - 1) > 0:
                drafts, accepted = drafts + 1, accepted + min(step.accepted, room)
            produced += step.committed
    return drafts, accepted


def exact_probs(base, prompt, texts_XL, sampling):
    """Return the distributions_XV after texts of one length, of temperature, top-k and top-p in float64."""
    lm = base.lm.double()
    with torch.inference_mode():
        parts = torch.tensor([prompt + text for text in texts_XL]).split(256)
        logits_XV = torch.cat([lm(part).logits[:, -1] for part in parts])
    base.lm.float()
    settings = DecodingSettings(
        1, 1, sampling["temperature"], sampling.get("top_k", 0), sampling.get("top_p", 1.0), match, True
    )
    return settings.process_logits(logits_XV).exp()


def conditional_p_values(base, prompt, draws, sampling):
    """Return p-values of the tokens at all positions but the first, each after the most frequent text before it that
    leaves a choice: after some texts top-p allows a single token."""
    p_values = []
    for position in range(1, len(draws[0])):
        texts = [list(text) for text, _ in Counter(tuple(one[:position]) for one in draws).most_common(16)]
        for text, probs_V in zip(texts, exact_probs(base, prompt, texts, sampling), strict=True):
            drawn = [one[position] for one in draws if one[:position] == text]
            if float(probs_V.max()) < 0.9:
                break
        assert len(drawn) >= 50, (position, len(drawn))
        p_values.append(p_value(torch.tensor(drawn).bincount(minlength=len(probs_V)).tolist(), probs_V.tolist()))
    return p_values


def marginal_p_values(base, prompt, draws, sampling):
    """Return p-values of the tokens at all positions but the first, summed over every text that can come before."""
    texts, masses_X, p_values = [[]], torch.ones(1, dtype=torch.float64), []
    for position in range(len(draws[0])):
        joint_XV = masses_X[:, None] * exact_probs(base, prompt, texts, sampling)
        counts = torch.tensor([one[position] for one in draws]).bincount(minlength=joint_XV.shape[1])
        p_values.append(p_value(counts.tolist(), joint_XV.sum(dim=0).tolist()))
        places = joint_XV.nonzero()
        texts = [[*texts[x], token] for x, token in places.tolist()]
        masses_X = joint_XV[places[:, 0], places[:, 1]]
    return p_values[1:]


def holm_passes(p_values, level=0.01):
    return all(p > level / (len(p_values) - rank) for rank, p in enumerate(sorted(p_values)))


def edit_json(file: Path, change) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
