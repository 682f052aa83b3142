"""Speed of the decoding loop: `python benchmarks/decoding.py`. It measures time alone, never acceptance.

Three parts, each over interleaved repeats in one process:

    generate   autoregression in our loop against `model.generate`, as called and under inference mode; equal tokens
    costs      c, v and o of draft heads (--heads RUN ...) by nodes, in whole autoregressive steps
    search     prefix search over T frames of C classes, all implementations, by nodes
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from ctcdraft.config.drafters import load_drafter
from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.ctc.best_first import compiled_search
from ctcdraft.ctc.prefix_search import prefix_search
from ctcdraft.decoding import loop
from ctcdraft.decoding.loop import Context, Drafter, generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation import profiling
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.evaluation.environment import hardware_name
from ctcdraft.evaluation.profiling import PASS_PARTS, PhaseTimes, profile_answer
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base, without_generation_config
from ctcdraft.training.run_directory import RunDirectory

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
Clock = Callable[[], float]
# Processor time does not count other processes; it is meaningful with one thread on a shared machine.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
NEVER: frozenset[int] = frozenset()  # no stop token: both sides generate equally many tokens


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    print(
        f"{hardware_name(torch.device(options.device))}, {options.dtype}, torch {torch.__version__}, {options.clock} "
        "time"
    )
    # The first head's: heads of other layers are refused.
    layers = RunDirectory(Path(options.heads[0])).base_fingerprint()["taps"] if options.heads else ["last"]
    for folder in options.bases:
        base = load_base(folder, options.dtype, options.device, aux_layers=layers).for_inference()
        reads = [None, StaticShapes(), StaticShapes(compiled=True)] if options.compiled else [None]
        against_generate(base, reads, options)
        for base.static_shapes in reads:
            costs(base, options)
    search(options)


def against_generate(base: BaseLM, reads: Sequence[StaticShapes | None], options: argparse.Namespace) -> None:
    """Print tokens/s of both, prefill included, alternating per response, so that other load on the machine affects
    both. With `reads`, also those of our loop with static shapes.
    """
    prompts, clock = benchmark_prompts(base, options), CLOCKS[options.clock]
    how = settings(1, options.max_new_tokens)

    def ours(prompt_L: Tensor, by: StaticShapes | None = None) -> list[int]:
        base.static_shapes = by
        response = generate(base, Autoregressive(base), prompt_L, how, NEVER, 0)
        base.static_shapes = None
        return list(response.tokens)

    others = {f"ours, {'compiled' if by.compiled else 'fixed'}": partial(ours, by=by) for by in reads if by is not None}
    ways: dict[str, Callable[[Tensor], list[int]]] = {
        "ours": ours,
        **others,
        "generate": lambda prompt_L: stock(base, prompt_L, how.max_new_tokens),
        # Under inference mode, as our loop runs; `generate` itself uses no_grad only.
        "generate, helped": torch.inference_mode()(lambda prompt_L: stock(base, prompt_L, how.max_new_tokens)),
    }
    responses = {name: [way(prompt_L) for prompt_L in prompts] for name, way in ways.items()}  # a warm-up, too
    tokens = sum(map(len, responses["ours"]))
    pairs = [
        interleaved({name: partial(way, prompt_L) for name, way in ways.items()}, options.repeats, clock)
        for prompt_L in prompts
    ]
    speeds = {name: tokens / sum(statistics.median(pair[name]) for pair in pairs) for name in ways}
    print(f"generate  {base.name:17} ours {speeds['ours']:.0f} tokens/s, {len(prompts)} prompts")
    for name in list(ways)[1:]:
        ratios = [other / one for pair in pairs for one, other in zip(pair["ours"], pair[name], strict=True)]
        low, high = interval(ratios)
        equal = sum(one == other for one, other in zip(responses["ours"], responses[name], strict=True))
        print(
            f"          {base.name:17} {name} {speeds[name]:.0f} tokens/s: ours {statistics.median(ratios):.3f} times "
            f"as fast [{low:.3f}, {high:.3f}], {len(ratios)} pairs, {equal} of {len(prompts)} answers equal"
        )


def interval(ratios: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median; pairs are resampled."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[resamples // 40], medians[-resamples // 40 - 1]


class Bush:
    """A random tree of the full budget, three children per node, at no cost: the rest is the loop's own time."""

    def __init__(self, vocabulary: int) -> None:
        self.tokens_N = torch.randint(vocabulary, (256,), generator=torch.Generator().manual_seed(0)).tolist()

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        size = min(context.nodes, 1 + (3 ** (context.depth + 1) - 3) // 2) - 1
        parents = [node // 3 - 1 for node in range(size)]
        return TokenTree.from_lists(context.root, self.tokens_N[:size], parents), None


def costs(base: BaseLM, options: argparse.Namespace) -> None:
    """Print c, v and o by nodes of draft heads, and of trees whose drafts cost nothing and are mostly rejected."""
    prompts, clock = benchmark_prompts(base, options), CLOCKS[options.clock]
    heads = {Path(run).name: load_drafter(Path(run), base, None) for run in options.heads}
    drafters: dict[str, Drafter] = {"bush": Bush(base.vocabulary), **heads}
    spent: dict[tuple[str, int], list[PhaseTimes]] = {(AUTOREGRESSIVE, 1): []}
    spent |= {(name, nodes): [] for name in drafters for nodes in options.nodes}
    drafters[AUTOREGRESSIVE] = Autoregressive(base)
    with patch.object(profiling, "perf_counter", clock), patch.object(loop, "perf_counter", clock):
        for _ in range(options.repeats + 1):
            for (name, nodes), times in spent.items():
                how = settings(nodes, options.max_new_tokens)
                times.append(
                    reduce(
                        add,
                        (
                            profile_answer(base, drafters[name], text_L, how, 0, options.max_new_tokens)
                            for text_L in prompts
                        ),
                    )
                )
    unit = lower_quartile([one.seconds_per_pass for one in spent[AUTOREGRESSIVE, 1][1:]])
    for (name, nodes), times in spent.items():
        parts = {part: lower_quartile([one.seconds[part] / one.passes for one in times[1:]]) for part in PASS_PARTS}
        c, v = (parts["draft"] + parts["tree"]) / unit, parts["read"] / unit
        listed = "  ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in parts.items())
        o = sum(parts.values()) / unit - c - v
        print(f"costs     {name:15} {nodes:3} nodes: c {c:.3f}  v {v:.2f}  o {o:.3f};  us a step: {listed}")


def lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]  # other work on the machine only ever adds to a time


def search(options: argparse.Namespace) -> None:
    """Time the prefix searches on frames as peaked as a trained head's, flatter, and uniform."""
    for sharp in (6.0, 3.0, 1.0):
        frames_TC = frames(options.frames, options.classes, sharp)
        blank = options.classes - 1
        for nodes in (8, 16, 24, 32, 48, 64, 96, 128):
            ways: dict[str, Callable[[], object]] = {
                "machine code": partial(compiled_search, frames_TC, blank, nodes - 1, options.tokens_per_frame),
                "by levels": partial(prefix_search, frames_TC, blank, nodes - 1, options.tokens_per_frame),
            }
            seconds = interleaved(ways, 10 * options.repeats, CLOCKS[options.clock])
            medians = "  ".join(f"{name} {1e3 * statistics.median(taken):5.2f} ms" for name, taken in seconds.items())
            print(f"search    T {options.frames}, C {options.classes:,}, sharpness {sharp}, {nodes:3} nodes: {medians}")


def frames(count: int, classes: int, sharp: float) -> Tensor:
    """Return log-probabilities_TC; the greater `sharp`, the fewer tokens share the mass."""
    rng = torch.Generator().manual_seed(0)
    return (sharp * torch.randn(count, classes, generator=rng)).log_softmax(-1)


def interleaved(ways: dict[str, Callable[[], object]], repeats: int, clock: Clock) -> dict[str, list[float]]:
    """Return the seconds of every repeat of every way, in turns, after a warm-up; the order alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            began = clock()
            ways[name]()
            seconds[name].append(clock() - began)
    return {name: taken[1:] for name, taken in seconds.items()}


def benchmark_prompts(base: BaseLM, options: argparse.Namespace) -> list[Tensor]:
    prompts = project_prompts(str(TINY / "prompts" / "held_out.jsonl"), "benchmark", options.prompts).prompts
    rows = [prompt_tokens(base.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    return [torch.tensor(row[: base.context_length // 2], device=base.device) for row in rows]


def settings(nodes: int, new_tokens: int, temperature: float = 0.0) -> DecodingSettings:
    return DecodingSettings(new_tokens, nodes, temperature, top_k=0, top_p=1.0, verify=match, lossless=True)


def stock(base: BaseLM, prompt_L: Tensor, new_tokens: int, stops: frozenset[int] = NEVER) -> list[int]:
    """Call `model.generate` with its defaults, but to the end, or to one of the stop tokens."""
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=sorted(stops) or None, pad_token_id=0
    )
    output_BL = without_generation_config(base.lm).generate(
        prompt_L[None], attention_mask=torch.ones_like(prompt_L)[None], generation_config=config
    )
    return output_BL[0, len(prompt_L) :].tolist()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="*", default=[str(TINY / "base")], help="folders or hub ids")
    parser.add_argument("--heads", nargs="*", default=[], help="run directories of draft heads")
    parser.add_argument("--nodes", nargs="*", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--classes", type=int, default=32001)
    parser.add_argument(
        "--tokens-per-frame", type=int, default=16, help="as in configs/drafter/tree/prefix_search.yaml"
    )
    parser.add_argument("--compiled", action="store_true", help="reads of fixed shapes, eager and compiled, as well")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
