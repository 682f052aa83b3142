"""Answers by vLLM's offline LLM class, ids in and ids out. Not tried on a real vLLM yet: only its calls are tested.

vLLM is an optional extra and enters by this door alone. It holds weights of its own beside the base's, which is
needed for its tokenizer and fingerprint only: device=cpu keeps the base off the accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator, Skipped
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class VllmAnswers(ResponseGenerator):
    """vLLM in this process, on the weights at `path`; it forms its own batches out of each of ours."""

    path: str
    dtype: str
    gpu_memory_utilization: float

    def start(self, base: BaseLM) -> GenerateFn:
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"answers=vllm needs the package vllm ({error}); pip install 'ctcdraft[vllm]', or use another answers="
            ) from error
        llm = vllm.LLM(
            model=self.path,
            dtype=self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=base.context_length,
            generation_config="vllm",  # not the model's own, with its top-k and penalties
        )
        return partial(self._generate, base, llm, vllm.SamplingParams)

    def _generate(self, base: BaseLM, llm: Any, settings: Any, asked: Sequence[Request]) -> list[Response | Skipped]:
        prompts = [{"prompt_token_ids": list(question.tokens)} for question in asked]
        each = [
            settings(
                temperature=self.temperature,
                top_p=1.0,
                seed=question.random_key(self.seed) % 2**31,
                max_tokens=self.max_response_tokens(base, question),
                stop_token_ids=sorted(base.stop_token_ids),
                detokenize=False,
            )
            for question in asked
        ]
        outputs = [output.outputs[0] for output in llm.generate(prompts, each, use_tqdm=False)]
        return [Response(list(one.token_ids)) if one.token_ids else Skipped("nothing was said") for one in outputs]
