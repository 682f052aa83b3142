"""A drafter's forward pass compiled, and tried before any corpus. It knows torch.compile, and nothing of the pass.

The objective stays as it is: inductor's C++ for its recursion does not compile on a CPU (torch 2.13), and the words'
projection, which is most of it, is matrix products that nothing makes faster.
"""

from __future__ import annotations

from collections.abc import Callable

from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError


def compile_forward(drafter: DraftHead, backend: str, rehearsal: Callable[[], None]) -> None:
    """From now on `drafter(batch)` is compiled; names of weights, decoding and what is saved stay what they were.

    backend: one of torch.compile's. rehearsal: a forward and a backward pass, which went well before. In place, and
    for any sizes: batches differ in length, and each length would be compiled anew. InputError where it cannot be.
    """
    import torch._dynamo  # seconds, for those alone who want it

    try:
        drafter.compile(backend=backend, dynamic=True)
        rehearsal()
    except RuntimeError as error:
        backends = ", ".join(torch._dynamo.list_backends())
        raise InputError(
            f"trainer.compile={backend} cannot compile {type(drafter).__name__} here ({reason(error)}); give "
            f"another backend of torch.compile ({backends}), or null to train without"
        ) from error


def reason(error: RuntimeError) -> str:
    """backend='inductor' raised:, and what in the next line -> both; else the first line."""
    lines = str(error).strip().splitlines()
    return " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]).rstrip(".")
