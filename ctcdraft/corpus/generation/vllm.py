"""Responses by vLLM's offline LLM class in this process, from token ids to token ids.

vLLM holds weights of its own beside the base model's, which is needed for its tokenizer and fingerprint only:
device=cpu keeps the base model off the accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator, Skipped, SkipReason
from ctcdraft.distributed import from_environment
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class VllmAnswers(ResponseGenerator):
    """vLLM on the weights at `path`; it batches the requests of each of our batches by itself."""

    path: str
    dtype: str
    gpu_memory_utilization: float
    enforce_eager: bool  # false: vLLM compiles the model first, which takes minutes on a CPU

    def start(self, base: BaseLM) -> GenerateFn:
        if (processes := from_environment().world_size) > 1:  # whose process group vLLM would take for its own
            raise InputError(
                f"answers=vllm cannot run in {processes} processes of torchrun; start one process per device, with "
                "CUDA_VISIBLE_DEVICES and shard=i/N, or give answers=openai and the address of a server"
            )
        # The engine in this process, not in a child: one whose parent was killed goes on and keeps the accelerator.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"answers=vllm needs the package vllm ({error}); pip install 'ctcdraft[vllm]', or use another answers="
            ) from error
        # A seeded request whose prompt is read in chunks ends the engine on a CPU (vLLM 0.32), whose generators have no
        # offset to set back.
        whole = self.temperature > 0 and not torch.accelerator.is_available()
        llm = vllm.LLM(
            model=self.path,
            dtype=self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=self.enforce_eager,
            enable_chunked_prefill=False if whole else None,
            max_model_len=base.context_length,
            generation_config="vllm",  # not that of the model, which may set top-k and penalties
        )
        return partial(self._generate, base, llm, vllm.SamplingParams)

    def _generate(
        self, base: BaseLM, llm: Any, sampling_params: Any, requests: Sequence[Request]
    ) -> list[Response | Skipped]:
        prompts = [{"prompt_token_ids": list(request.tokens)} for request in requests]
        params = [
            sampling_params(
                temperature=self.temperature,
                top_p=1.0,
                seed=request.random_key(self.seed) % 2**31,
                max_tokens=self.max_response_tokens(base, request),
                stop_token_ids=sorted(base.stop_token_ids),
                detokenize=False,
            )
            for request in requests
        ]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        empty = Skipped(SkipReason.EMPTY_RESPONSE)
        return [Response(list(one.token_ids)) if one.token_ids else empty for one in outputs]
