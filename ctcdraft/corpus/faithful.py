"""Whether answers are this base's own: another model behind a name, or a law that is bent. It knows no server.

A server may serve other weights, cut the law (top-k and penalties out of a model's generation config) or answer
greedily whatever the temperature. Nothing of that shows in the text; all of it shows in the base's own law.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctcdraft.base import BaseLM
from ctcdraft.errors import InputError

AGREED = 0.9  # of greedy words; in bfloat16 a near-tie falls otherwise now and then
SURPRISE = 0.1  # nats a word between what draws cost and what they should, and ...
DEVIATIONS = 6.0  # ... this many standard deviations, so that few words prove nothing


def refuse_unfaithful(base: BaseLM, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, who: str) -> None:
    """Raise InputError if `who` cannot be this base at this temperature; pairs: prompts and what was answered.

    Greedy: nearly every word must be the base's likeliest. Drawn: the words must on average be as unlikely as
    the law says that its draws are, which is its entropy.
    """
    likely, excess, variance, words = 0, 0.0, 0.0, 0
    for prompt, answer in pairs:
        log_law_LV = log_laws(base, prompt, answer, temperature or 1.0)
        words += len(answer)
        said_L = torch.tensor(answer, device=log_law_LV.device)
        likely += int((log_law_LV.argmax(dim=-1) == said_L).sum())
        law_LV = log_law_LV.exp()
        entropy_L = -(law_LV * log_law_LV).sum(dim=-1)
        excess += float((-log_law_LV.gather(1, said_L[:, None])[:, 0] - entropy_L).sum())
        variance += float(((law_LV * log_law_LV**2).sum(dim=-1) - entropy_L**2).sum())
    if not words:
        return
    if temperature == 0 and likely < AGREED * words:
        raise InputError(
            f"{who} does not answer as {base.name}: of {words} words that it said greedily the base would "
            f"say {likely}; serve this base, without penalties, or choose the base= that is served"
        )
    if temperature > 0 and abs(excess) > max(SURPRISE * words, DEVIATIONS * variance**0.5):
        raise InputError(
            f"{who} does not draw as {base.name} does at temperature {temperature}: its words cost "
            f"{excess / words:+.2f} nats more each than the base's own draws; serve this base, without top-k, top-p or "
            "penalties of its own"
        )


@torch.inference_mode()
def log_laws(base: BaseLM, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    """The base's log-probabilities_LV of every word of the answer's, in float64."""
    tokens_BL = torch.tensor([[*prompt, *answer[:-1]]], device=base.device)
    states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    logits_LV = base.head(states_BLD[0, len(prompt) - 1 :, : base.width])
    return (logits_LV.double() / temperature).log_softmax(dim=-1)
