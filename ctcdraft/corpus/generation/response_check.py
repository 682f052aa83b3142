"""Whether responses can come from a base model, by its own probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

MIN_GREEDY_AGREEMENT = 0.9  # of greedy tokens: in bfloat16 near ties can be decided otherwise
MAX_EXCESS_NATS = 0.1  # per token, between the mean surprisal of sampled tokens and the entropy, and ...
MAX_DEVIATIONS = 6.0  # ... at least this many standard deviations, so that few tokens prove nothing


def refuse_mismatched_responses(
    base: BaseLM, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, source: str
) -> None:
    """Raise InputError if the (prompt, response) pairs of `source` cannot come from this base at this temperature.

    Greedy: nearly every token must be the base model's argmax. Sampled: the mean surprisal (negative log-probability)
    of the tokens must equal the mean entropy of the base model's distributions.
    """
    matching, excess, variance, tokens = 0, 0.0, 0.0, 0
    for prompt, response in pairs:
        log_probs_LV = response_log_probs(base, prompt, response, temperature or 1.0)
        tokens += len(response)
        tokens_L = torch.tensor(response, device=log_probs_LV.device)
        matching += int((log_probs_LV.argmax(dim=-1) == tokens_L).sum())
        probs_LV = log_probs_LV.exp()
        entropy_L = -(probs_LV * log_probs_LV).sum(dim=-1)
        excess += float((-log_probs_LV.gather(1, tokens_L[:, None])[:, 0] - entropy_L).sum())
        variance += float(((probs_LV * log_probs_LV**2).sum(dim=-1) - entropy_L**2).sum())
    if not tokens:
        return
    if temperature == 0 and matching < MIN_GREEDY_AGREEMENT * tokens:
        raise InputError(
            f"{source} does not answer as {base.name}: of {tokens} greedy tokens {matching} are the base's argmax; "
            "serve this base, without penalties, or choose the base= that is served"
        )
    if temperature > 0 and abs(excess) > max(MAX_EXCESS_NATS * tokens, MAX_DEVIATIONS * variance**0.5):
        raise InputError(
            f"{source} does not sample as {base.name} does at temperature {temperature}: the mean surprisal of its "
            f"tokens is {excess / tokens:+.2f} nats off the base's entropy; serve this base, without top-k, top-p or "
            "penalties of its own"
        )


@torch.inference_mode()
def response_log_probs(base: BaseLM, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Return log_probs_LV of the base model at every response token, in float64."""
    tokens_BL = torch.tensor([[*prompt, *response[:-1]]], device=base.device)
    states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    logits_LV = base.head(states_BLD[0, len(prompt) - 1 :, : base.width])
    return (logits_LV.double() / temperature).log_softmax(dim=-1)
