"""An override of one function of vLLM's rejection sampler, which on a CPU loses temperature, top-k and top-p.

`expand_batch_to_tokens` repeats each request's parameter for each of its draft tokens. On a CPU the replacement for its
Triton kernel writes into a copy, so the parameters are whatever the memory held, and answers of any drafter, ngram too,
follow another distribution (https://github.com/vllm-project/vllm/issues/55005). Delete this module, its call and its
test once the oldest version that is served has the fix.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAULTY_VERSIONS = ("0.32.", "0.33.")


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return x[i] once for every token of request i, cu_num_tokens [Q] being the running sum of their tokens.

    a b c, 2 5 6   ->   a a b b b c
    """
    counts_Q = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced_Q = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced_Q.repeat_interleave(counts_Q, output_size=num_tokens)


def install(version: str) -> bool:
    """Override the function on a CPU under a faulty version; return whether that was done."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not (current_platform.is_cpu() and version.startswith(FAULTY_VERSIONS)):
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return True
