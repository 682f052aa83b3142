"""One vLLM engine in a process of its own: answers, sampled tokens and counts, from one JSON file to another.

    python engine.py CALL.json RESULT.json

A call has `settings` of vLLM's LLM class, which may name another model than the embedded base, and any of `answers`,
`crowd` and `samples`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

TINY = Path(__file__).parents[2] / "data" / "tiny"
ABORTED_AFTER = 7  # steps between a request that will be aborted and its end
SAMPLES_AT_ONCE = 1000  # of one request


def draft_counts(llm: LLM) -> list[int]:
    """Return drafts and accepted draft tokens so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [int(values.get(f"vllm:spec_decode_num_{name}", 0)) for name in ("drafts", "accepted_tokens")]


def total(llm: LLM, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def answer(llm: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Return the answers, and drafts and accepted draft tokens; two at a time, which the cache has room for."""
    params, tokens = SamplingParams(temperature=0, max_tokens=max_tokens), []
    for start in range(0, len(prompts), 2):
        asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts[start : start + 2]]
        tokens += [list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]
    return {"tokens": tokens, "counts": draft_counts(llm)}


def crowd(llm: LLM, prompts: list[list[int]], lengths: list[int], aborted: list[int]) -> dict[str, Any]:
    """Return the answers, by number, of requests that arrive one per step; some are aborted."""
    engine, finished, step, counts = llm.llm_engine, {}, 0, draft_counts(llm)
    while step < len(prompts) or engine.has_unfinished_requests():
        if step < len(prompts):
            params = SamplingParams(temperature=0, max_tokens=lengths[step])
            engine.add_request(str(step), {"prompt_token_ids": prompts[step]}, params)
        if step - ABORTED_AFTER in aborted:
            engine.abort_request([str(step - ABORTED_AFTER)])
        for output in engine.step():
            if output.finished:
                finished[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
        step += 1
    own_counts = [after - before for before, after in zip(counts, draft_counts(llm), strict=True)]
    hits, preemptions = total(llm, "prefix_cache_hits"), total(llm, "num_preemptions")
    return {"tokens": finished, "counts": own_counts, "preemptions": preemptions, "cached": hits, "steps": step}


def samples(llm: LLM, prompt: list[int], count: int, tokens: int, sampling: dict[str, Any]) -> list[list[int]]:
    params = SamplingParams(n=SAMPLES_AT_ONCE, max_tokens=tokens, ignore_eos=True, **sampling)
    asked: list[Any] = [{"prompt_token_ids": prompt}] * -(-count // SAMPLES_AT_ONCE)
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs][:count]


def main() -> None:
    call = json.loads(Path(sys.argv[1]).read_text())
    settings = {"model": str(TINY / "base"), "dtype": "float32", "enforce_eager": True} | call["settings"]
    llm = LLM(disable_log_stats=False, **settings)
    functions = {"answers": answer, "crowd": crowd, "samples": samples}
    result = {name: function(llm, **call[name]) for name, function in functions.items() if name in call}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
