"""Speed of responses in a batch against one prompt after another: `python benchmarks/answers.py`.

Both ways answer the same prompts in one process, in turns, with the same loop; the ratio is the median over the
repeats. `generate`, called once per prompt, is what one would write without this project.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable

import torch

from benchmarks.decoding import TINY, stock
from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.corpus.generation.requests import Request
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    base = load_base(options.base, options.dtype, options.device)
    requests = questions(base, options.prompts, options.batch)
    batch = TransformersAnswers(options.batch, options.max_new_tokens, 0.0, 0, 1)
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "in a batch": lambda: [reply.tokens for reply in batch.generate(base, requests)],
        "one by one": lambda: [batch.generate(base, [question])[0].tokens for question in requests],
        "generate": lambda: [generated(base, question, options.max_new_tokens) for question in requests],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    responses = {}
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            responses[name] = way()
            seconds[name].append(time.perf_counter() - start)
    tokens = sum(map(len, responses["in a batch"]))
    print(
        f"{len(requests)} prompts, {tokens} tokens of answers, {options.threads} threads, {options.dtype}, {base.name}"
    )
    for name, each in seconds.items():
        ratios = [other / one for other, one in zip(each, seconds["in a batch"], strict=True)]
        same = sum(one == other for one, other in zip(responses[name], responses["in a batch"], strict=True))
        print(
            f"{name:11} {statistics.median(each):7.2f} s  {tokens / statistics.median(each):7.0f} tokens/s  "
            f"a batch is {statistics.median(ratios):5.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{same} of {len(requests)} answers equal"
        )


def questions(base: BaseLM, path: str, count: int) -> list[Request]:
    """Return `count` prompts of a file that are neighbours by length, like a batch of a corpus."""
    prompts = project_prompts(path, "benchmark", count * 20).prompts
    tokens = [prompt_tokens(base.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    middle = sorted(tokens, key=len)[len(tokens) // 2 :][:count]
    return [Request(f"q{number}", 0, 0, "benchmark", array("i", ids), 0) for number, ids in enumerate(middle)]


@torch.inference_mode()
def generated(base: BaseLM, question: Request, new_tokens: int) -> list[int]:
    return stock(base, torch.tensor(list(question.tokens), device=base.device), new_tokens, base.stop_token_ids)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=str(TINY / "base"), help="folder or hub id")
    parser.add_argument("--prompts", default=str(TINY / "prompts" / "held_out.jsonl"))
    parser.add_argument("--batch", type=int, default=64, help="64, and 128 tokens, as in the demo")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
