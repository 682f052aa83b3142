"""Load generator against any server with OpenAI's completions API: `python -m benchmarks.serving URL`.

At every concurrency it keeps so many requests open for a window of `--seconds` (with `--rate` they arrive at random, so
many per second, and wait where all places are taken). It reports tokens per second, the time to the first token and per
further token (median and 99th percentile), and the draft tokens that the server's own metrics count. Only tokens that
arrive within the window are counted; requests still open at its end are read to their end. The tokens so far come with
every event of a stream (`continuous_usage_stats`, as in vLLM); where a server gives them only at the end of a stream,
they are counted there. A stream without usage or finish_reason is a failure, and one failure voids the level's ratio.

With `--server NAME=COMMAND` it starts the servers itself, in `--rounds` rounds, each of which begins with another
server, so that they share the machine's slow and fast hours; the first one is the reference for speeds and for the
answers, which are greedy. Every concurrency has prompts of its own, the same for all servers, so that no prefix cache
knows them from a level before. Where they run out within a window, they are asked again with "(2) " in front, then
"(3) ", and so on, which no cache knows either. A file with fewer prompts than levels is refused.

With `--rows FILE` everything measured is appended to a file as soon as it is known, and the same command goes on after
an interruption, with the server that was interrupted; rows of another commit or of other settings are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import httpx

from benchmarks.server_process import Server, open_client, stream_events
from benchmarks.serving_report import Load, Rows, report

ROOT = Path(__file__).parents[1]
MEASURED = ("model", "prompts", "concurrency", "seconds", "rate", "max_tokens", "temperature", "warm_up")


def read_prompts(file: Path) -> list[str]:
    """Return the first turns of a benchmark file, each once: lines with `turns` (MT-Bench) or `question` (GSM8K)."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return list(dict.fromkeys(row["turns"][0] if "turns" in row else row["question"] for row in rows))


def level_prompts(prompts: Sequence[str], level: int, levels: int) -> Iterator[str]:
    """Yield the prompts of one level, then the same with the number of the pass in front, without end."""
    own = prompts[level::levels]
    yield from own
    for number in itertools.count(2):
        yield from (f"({number}) {prompt}" for prompt in own)


async def ask(client: httpx.AsyncClient, options: argparse.Namespace, prompt: str, load: Load, end: float) -> None:
    """Send one request and add the tokens and times of its events before `end`."""
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    began, text, finished, used = time.perf_counter(), "", False, False
    tokens, first_tokens, first, last = 0, 0, 0.0, 0.0  # all of them within the window
    try:
        async for event in stream_events(client, body):
            now = time.perf_counter()
            if "error" in event:
                raise ValueError(f"the stream has the error {event['error']}")
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                finished |= choice.get("finish_reason") is not None
            usage = event.get("usage")
            used |= usage is not None
            if now > end:
                continue
            if usage:
                new = usage["completion_tokens"] - tokens
                tokens, last, load.tokens = tokens + new, now, load.tokens + new
            if text and not first:
                first, first_tokens = now, max(1, tokens)
        if not (finished and used):
            raise ValueError(f"the stream ended without {'usage' if finished else 'finish_reason'}")
    except (httpx.HTTPError, ValueError, KeyError) as error:
        load.failures.append(f"{type(error).__name__}: {error}")
        return
    load.requests += 1
    if first:
        load.first.append(first - began)
    if first and tokens > first_tokens:
        load.further.append((last - first) / (tokens - first_tokens))
    if options.temperature == 0:
        load.answers[prompt] = text


async def draft_counts(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return drafts and accepted draft tokens from the server's metrics; 0 where it has none."""
    counts = {"drafts": 0.0, "accepted_tokens": 0.0}
    try:
        for line in (await client.get("/metrics")).text.splitlines():
            for name in counts:
                if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                    counts[name] += float(line.rpartition(" ")[2])
    except httpx.HTTPError:
        pass
    return counts["drafts"], counts["accepted_tokens"]


def arrivals(began: float, rate: float | None, seed: int) -> Iterator[float]:
    """Yield the times at which requests arrive, with exponential gaps; without a rate all of them at once."""
    rng, now = random.Random(seed), began
    while True:
        yield now
        now += rng.expovariate(rate) if rate else 0.0


async def run_load(options: argparse.Namespace, concurrency: int, prompts: Iterator[str]) -> Load:
    load = Load(concurrency, options.seconds)
    async with open_client(options.url, options.timeout) as client:
        if options.warm_up:
            warm = Load(concurrency, options.seconds)
            await asyncio.gather(*(ask(client, options, next(prompts), warm, math.inf) for _ in range(concurrency)))
            load.failures += warm.failures
        before, began = await draft_counts(client), time.perf_counter()
        end, starts = began + options.seconds, arrivals(began, options.rate, concurrency)

        async def place() -> None:
            """Send the requests of one of the places, each when it has arrived and the one before has ended."""
            while (start := max(next(starts), time.perf_counter())) < end:
                await asyncio.sleep(start - time.perf_counter())
                await ask(client, options, next(prompts), load, end)

        await asyncio.gather(*(place() for _ in range(concurrency)))
        drafts, accepted = (now - then for now, then in zip(await draft_counts(client), before, strict=True))
        load.accepted = accepted / drafts if drafts else None
    return load


def measure(options: argparse.Namespace, rows: Rows, number: int, servers: dict[str, str], prompts: list[str]) -> None:
    """Measure one round. A server of which a level is missing is measured at all of them: it starts anew."""
    first = (number - 1) % len(servers)
    for name in [*servers][first:] + [*servers][:first]:
        if all((number, name, one) in rows.loads for one in options.concurrency):
            continue
        print(f"round {number}: {name}", file=sys.stderr)
        with Server(servers[name], options.url) if servers[name] else nullcontext():
            for level, concurrency in enumerate(options.concurrency):
                own = level_prompts(prompts, level, len(options.concurrency))
                load = asyncio.run(run_load(options, concurrency, own))
                for failure in load.failures[:3]:
                    print(f"round {number}: {name}, {concurrency} at once: failed: {failure[:300]}", file=sys.stderr)
                if name == next(iter(servers)) and not load.tokens:
                    raise SystemExit(
                        f"the reference {name} gave 0 tokens in {options.seconds:g} s at {concurrency} requests at "
                        f"once ({len(load.failures)} failed), so there is no ratio to it; check its command and "
                        "--model, or raise --seconds"
                    )
                rows.add(number, name, load)


def code_version() -> str | None:
    """Return the commit of this repository, with a hash of changes not committed; None if it is not under git."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout

    try:
        commit, changes = git("rev-parse", "HEAD").decode().strip(), git("diff", "--binary", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + (f" and changes {hashlib.sha256(changes).hexdigest()[:12]}" if changes else "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--prompts", type=Path, required=True, help="lines of MT-Bench, GSM8K or data/tiny/prompts")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=120.0, help="at each concurrency")
    parser.add_argument("--rate", type=float, help="requests that arrive per second; default: no limit")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="the reference first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="requests not measured")
    parser.add_argument("--rows", type=Path, help="file that all measured values are appended to, and resumed from")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the servers would live on
    options = arguments()
    prompts, levels = read_prompts(options.prompts), len(options.concurrency)
    if len(prompts) < levels:
        raise SystemExit(f"{options.prompts} has {len(prompts)} prompts for {levels} levels; give one for each")
    servers = dict(one.split("=", 1) for one in options.server) or {"running": ""}
    settings = {key: str(getattr(options, key)) for key in MEASURED} | {"commit": code_version(), "servers": servers}
    rows = Rows(options.rows, settings)
    for number in range(1, 1 + (options.rounds if options.server else 1)):
        measure(options, rows, number, servers, prompts)
    report(rows, list(servers), options.concurrency)


if __name__ == "__main__":
    main()
