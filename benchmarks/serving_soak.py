"""Endurance test of a served head over HTTP: `python -m benchmarks.serving_soak`; docs/serving.md.

An undrafted server gives the greedy answer to every prompt once. The server under test then gets thousands of requests
for them with random lengths, stop tokens, stop strings and sampled answers, of which some are aborted in the middle of
the stream, some disconnected at once, and some refused because they are wrong. Every greedy answer must be the
beginning of the undrafted one, as long as its request says; with `--base` it may part from it at a near tie. The memory
of the server's processes is written to a file all the while, drawn beside it, and must not grow. In the end the server
is killed with SIGKILL under load, started again and asked again. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.server_process import Server, open_client
from benchmarks.serving import read_prompts
from benchmarks.serving_clients import LONGEST, Clients, Reference, Tally
from ctcdraft.corpus.generation.response_check import response_log_probs
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base
from ctcdraft.report.svg import SERIES_COLOURS, Axes, axis_ticks, line, numeric_ticks

MEMORY_SECONDS = 5.0  # between two samples
RESTARTED = 64  # requests after the restart
GROWTH = 1.05  # at most, of the mean memory from the second quarter of the soak to the last
TIE = 1e-4  # of two logits in float64; float32 rounds them by less


def resident_bytes(session: int) -> int:
    """Return the memory that all processes of a session hold, pages they share counted once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                rollup = (folder / "smaps_rollup").read_text()
                total += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
    return total


async def watch_memory(session: int, tally: Tally, file: Path, samples: list[int]) -> None:
    began = time.time()
    file.write_text("seconds,requests,bytes\n")
    while True:
        samples.append(resident_bytes(session))
        with file.open("a") as stream:
            stream.write(f"{time.time() - began:.0f},{sum(tally.kinds.values())},{samples[-1]}\n")
        await asyncio.sleep(MEMORY_SECONDS)


async def references(options: argparse.Namespace, prompts: list[str]) -> dict[str, Reference]:
    async with open_client(options.url, options.timeout) as client:
        clients, gate = Clients(options, client, Tally()), asyncio.Semaphore(options.clients)

        async def one(prompt: str) -> Reference:
            async with gate:
                return await clients.post(clients.body(prompt, LONGEST))

        return dict(zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True))


async def soak(
    options: argparse.Namespace, known: dict[str, Reference], count: int, tally: Tally, seed: int, killed: Server | None
) -> None:
    """Send `count` requests; with `killed` the server gets SIGKILL when half of them were sent."""
    async with open_client(options.url, options.timeout) as client:
        clients, rng, prompts = Clients(options, client, tally), random.Random(seed), list(known)
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                if killed and number == count // 2:
                    os.killpg(killed.process.pid, signal.SIGKILL)
                prompt = rng.choice(prompts)
                await clients.request(prompt, known[prompt], random.Random(f"{seed}/{number}"))

        await asyncio.gather(*(worker() for _ in range(options.clients)))


async def watched_soak(
    options: argparse.Namespace, known: dict[str, Reference], tally: Tally, server: Server
) -> list[int]:
    """Send all requests; return samples of the server's memory. A watch that fails ends the soak."""
    samples: list[int] = []
    watch = asyncio.create_task(watch_memory(server.process.pid, tally, options.memory, samples))
    sent = asyncio.create_task(soak(options, known, options.requests, tally, options.seed, None))
    await asyncio.wait((watch, sent), return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    await sent
    return samples


def memory_faults(samples: list[int]) -> int:
    """Print the mean memory of every quarter of the samples; return 1 if it grew or cannot be judged."""
    if len(samples) < 4:
        print(f"memory: {len(samples)} samples are too few to judge its growth; send more --requests")
        return 1
    quarters = [samples[len(samples) * k // 4 : len(samples) * (k + 1) // 4] for k in range(4)]
    means = [sum(quarter) / len(quarter) / 2**20 for quarter in quarters]
    grew = means[3] > GROWTH * means[1]
    print("memory in MiB, mean of each quarter: " + ", ".join(f"{mean:.1f}" for mean in means), end="")
    print(f"; the last is above {GROWTH:g} times the second" if grew else "")
    return int(grew)


def draw_memory(file: Path) -> None:
    """Draw the memory over the number of requests as an SVG file beside the CSV file."""
    rows = [row.split(",") for row in file.read_text().splitlines()[1:]]
    points = [(float(requests), int(size) / 2**30) for _, requests, size in rows]
    most, title = max(1.0, points[-1][0]), "Memory of the server's processes"
    axes = Axes(axis_ticks(most)[-1], axis_ticks(max(size for _, size in points))[-1])
    shapes = axes.frame(title, "requests", "GiB", numeric_ticks(most))
    shapes.append(line([axes.at(*point) for point in points], SERIES_COLOURS[0]))
    file.with_suffix(".svg").write_text(axes.figure(title, shapes, {}).file())


def greedy_gaps(base: BaseLM, prompt: list[int], answer: list[int]) -> Tensor:
    """Return by how much every token's logit is below the greatest at each place of an answer, gaps_LV."""
    log_probs_LV = response_log_probs(base, prompt, answer, 1.0)
    return log_probs_LV.max(dim=1, keepdim=True).values - log_probs_LV


def is_near_tie(base: BaseLM, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Tell whether two answers part at a tie: both tokens there have the greatest float64 logit but for TIE, and ours
    is greedy from there on. Where one is the beginning of the other, one has ended wrongly."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return False
    gaps_LV = greedy_gaps(base, prompt, ours)
    own_L = gaps_LV.gather(1, torch.tensor(ours)[:, None])[:, 0]
    return float(own_L.max()) < TIE and float(gaps_LV[at, theirs[at]]) < TIE


def near_ties(model: str, different: list[dict[str, Any]]) -> int:
    """Return how many answers part from the undrafted ones at near ties."""
    base = load_base(model, "float64", "cpu")
    return sum(is_near_tie(base, one["prompt"], one["ours"], one["theirs"]) for one in different)


def report(title: str, tally: Tally, model: str | None) -> int:
    """Print what happened; return the number of wrong answers."""
    ties = near_ties(model, tally.different) if model and tally.different else 0
    print(f"{title}: {sum(tally.kinds.values())} requests ({dict(tally.kinds)}), {tally.compared} answers compared,")
    print(f"{tally.tokens} tokens, {len(tally.different)} different of which {ties} near ties, ", end="")
    print(f"{len(tally.problems)} problems")
    for problem in tally.problems[:10]:
        print(f"  {problem[:300]}")
    return len(tally.different) - ties


def faults(soaked: Tally, while_killed: Tally, again: Tally, samples: list[int], model: str | None) -> int:
    """Print all reports; return the number of faults. Only the SIGKILL may, and must, end requests with problems."""
    titles = {"soak": soaked, "before and after SIGKILL": while_killed, "after a restart": again}
    wrong = sum(report(title, tally, model) for title, tally in titles.items())
    wrong += len(soaked.problems) + len(again.problems) + memory_faults(samples)
    if not while_killed.problems:
        print(f"the SIGKILL ended none of {RESTARTED} requests: the processes it was sent to do not serve")
    return wrong + (not while_killed.problems)


def main() -> None:
    options = arguments()
    prompts = [prompt for file in options.prompts for prompt in read_prompts(file)]
    prompts = random.Random(options.seed).sample(prompts, min(options.distinct, len(prompts)))
    with Server(options.reference, options.url):
        known = asyncio.run(references(options, prompts))
    print(f"{len(known)} undrafted answers, {sum(len(one.ids) for one in known.values())} tokens", file=sys.stderr)
    tally, while_killed, again = Tally(), Tally(), Tally()
    with Server(options.server, options.url) as server:
        samples = asyncio.run(watched_soak(options, known, tally, server))
        asyncio.run(soak(options, known, RESTARTED, while_killed, options.seed + 1, server))
    with Server(options.server, options.url):
        asyncio.run(soak(options, known, RESTARTED, again, options.seed + 2, None))
    draw_memory(options.memory)
    sys.exit(1 if faults(tally, while_killed, again, samples, options.base) else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the model on both servers")
    parser.add_argument("--reference", required=True, help="command of the undrafted server")
    parser.add_argument("--server", required=True, help="command of the server under test")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--base", help="folder of the base: answers that differ are computed again in float64")
    parser.add_argument("--memory", type=Path, required=True, help="CSV file for the memory of the server")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--distinct", type=int, default=250, help="prompts")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
