"""Serving of a published draft head inside vLLM: a plug-in, and a proposer of draft tokens for whole batches.

vLLM schedules, runs the base model and verifies; this package adds what a CTC head needs: the hidden states of the
base, the head's keys and values in vLLM's KV cache, and a batched search for the most probable chain of draft tokens.
Installation and use: docs/serving.md. Only vllm_runner.py, configuration.py and cpu_sampling.py import vllm.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Every process of vLLM imports this package for the entry point, and most of them need nothing else of it.
    if name == "CTCProposer":
        from ctcdraft.serving.proposer import CTCProposer

        return CTCProposer
    raise AttributeError(f"module {__name__} has no attribute {name}")
