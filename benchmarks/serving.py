"""Load generator against any server with OpenAI's completions API: `python benchmarks/serving.py URL`.

At every concurrency it keeps so many requests open for a while (or starts `--rate` requests per second) and reports
tokens per second, the time to the first token and per further token (median and 99th percentile), and the draft tokens
that the server's own metrics count. With `--server NAME=COMMAND` it starts the servers itself, in `--rounds` rounds one
after the other, so that they share the machine's slow and fast hours; the first one is the reference for speeds and for
the answers, which are greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

START_SECONDS, STOP_SECONDS = 300, 60


@dataclass
class Load:
    """What was measured at one concurrency."""

    concurrency: int
    seconds: float = 0.0
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    further: list[float] = field(default_factory=list)  # seconds per further token, of every request
    accepted: float | None = None  # draft tokens per draft, from the server's metrics
    answers: dict[str, str] = field(default_factory=dict)  # by prompt, of requests that ended by themselves

    def summary(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "failed": self.failed,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "first_token_s": percentiles(self.first),
            "further_token_s": percentiles(self.further),
            "accepted_per_draft": self.accepted,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    return {"median": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98]}


def read_prompts(file: Path) -> list[str]:
    """Return the first turns of a benchmark file: lines with `turns` (MT-Bench) or `question` (GSM8K)."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["question"] for row in rows]


async def ask(client: httpx.AsyncClient, options: argparse.Namespace, prompt: str, load: Load) -> None:
    """Send one request and add its times; one that fails is counted."""
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, tokens, text = time.perf_counter(), 0.0, 0, ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                piece = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
                if piece and not first:
                    first = time.perf_counter()
                text += piece
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (httpx.HTTPError, json.JSONDecodeError, KeyError):
        load.failed += 1
        return
    load.requests, load.tokens = load.requests + 1, load.tokens + tokens
    if first:
        load.first.append(first - began)
        if tokens > 1:
            load.further.append((time.perf_counter() - first) / (tokens - 1))
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


async def run_load(options: argparse.Namespace, concurrency: int, prompts: Iterator[str]) -> Load:
    load = Load(concurrency)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=options.timeout, limits=limits) as client:
        before, began = await draft_counts(client), time.perf_counter()
        end = began + options.seconds
        running: set[asyncio.Task[None]] = set()
        while time.perf_counter() < end:
            while len(running) < concurrency:
                running.add(asyncio.create_task(ask(client, options, next(prompts), load)))
                if options.rate:
                    await asyncio.sleep(1 / options.rate)
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running:
            await asyncio.wait(running)
        load.seconds = time.perf_counter() - began
        drafts, accepted = (now - then for now, then in zip(await draft_counts(client), before, strict=True))
        load.accepted = accepted / drafts if drafts else None
    return load


def measure(options: argparse.Namespace, prompts: list[str]) -> list[Load]:
    return [asyncio.run(run_load(options, one, cycle(prompts))) for one in options.concurrency]


class Server:
    """A server process of its own group, which ends with all its children."""

    def __init__(self, command: str, url: str) -> None:
        self.process = subprocess.Popen(
            shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.url = url

    def __enter__(self) -> Server:
        end = time.time() + START_SECONDS
        while time.time() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(1)
        self.__exit__()
        raise SystemExit(f"the server did not answer at {self.url}/health; start its command by hand to see why")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--prompts", type=Path, required=True, help="lines of MT-Bench, GSM8K or data/tiny/prompts")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=120.0, help="at each concurrency")
    parser.add_argument("--rate", type=float, help="requests started per second, at most; default: no limit")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="the reference first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all measured values")
    return parser.parse_args()


def report(results: dict[str, list[list[Load]]]) -> None:
    reference = next(iter(results.values()))
    print(
        "server, requests at once, tokens/s: median [range], ratio; first token, further token; accepted; equal answers"
    )
    for name, rounds in results.items():
        for column, same in zip(zip(*rounds, strict=True), zip(*reference, strict=True), strict=True):
            speeds = [one.tokens / one.seconds for one in column]
            ratio = statistics.median(speeds) / statistics.median([one.tokens / one.seconds for one in same])
            first = statistics.median([t for one in column for t in one.first] or [0.0])
            further = statistics.median([t for one in column for t in one.further] or [0.0])
            known = {prompt: text for one in same for prompt, text in one.answers.items()}
            pairs = [(text, known[p]) for one in column for p, text in one.answers.items() if p in known]
            accepted = [one.accepted for one in column if one.accepted is not None]
            acceptance = f"{statistics.median(accepted):.2f}" if accepted else "-"
            parts = (
                f"{name:<10} {column[0].concurrency:>4} {statistics.median(speeds):>9.1f}",
                f"[{min(speeds):.1f}, {max(speeds):.1f}] {ratio:.2f}",
                f"{1000 * first:.1f} ms {1000 * further:.2f} ms {acceptance}",
                f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}",
                f"{sum(one.failed for one in column)} failed",
            )
            print("  ".join(parts))


def main() -> None:
    options = arguments()
    prompts = read_prompts(options.prompts)
    servers = dict(one.split("=", 1) for one in options.server) or {"running": ""}
    results: dict[str, list[list[Load]]] = {name: [] for name in servers}
    for number in range(options.rounds if options.server else 1):
        for name, command in servers.items():
            print(f"round {number + 1}: {name}", file=sys.stderr)
            if command:
                with Server(command, options.url):
                    results[name].append(measure(options, prompts))
            else:
                results[name].append(measure(options, prompts))
    report(results)
    if options.json:
        values = {
            name: [[asdict(one) | one.summary() for one in r] for r in rounds] for name, rounds in results.items()
        }
        options.json.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
