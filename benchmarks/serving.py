"""Load generator against any server with OpenAI's completions API: `python -m benchmarks.serving URL`.

At every concurrency it keeps so many requests open for a while (or starts `--rate` requests per second) and reports
tokens per second, the time to the first token and per further token (median and 99th percentile), and the draft tokens
that the server's own metrics count. With `--server NAME=COMMAND` it starts the servers itself, in `--rounds` rounds one
after the other, so that they share the machine's slow and fast hours; the first one is the reference for speeds and for
the answers, which are greedy. With `--rows FILE` everything measured is appended to a file as soon as it is known, and
the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import Server, open_client, stream_events


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

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def milliseconds(values: Sequence[float]) -> str:
    """Return median and 99th percentile."""
    if len(values) < 2:
        return "-"
    return f"{1000 * statistics.median(values):.1f}/{1000 * statistics.quantiles(values, n=100)[98]:.1f} ms"


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
        "stream_options": {"include_usage": True},
    }
    began, first, tokens, text = time.perf_counter(), 0.0, 0, ""
    try:
        async for event in stream_events(client, body):
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
    async with open_client(options.url, options.timeout) as client:
        if options.warm_up:
            warm = [ask(client, options, next(prompts), Load(concurrency)) for _ in range(concurrency)]
            await asyncio.gather(*warm)
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


class Rows:
    """Loads by round, server and concurrency, kept in a file with one line each; without a file in memory alone."""

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self.file, self.settings, self.loads = file, settings, dict[tuple[int, str, int], Load]()
        for line in file.read_text().splitlines() if file and file.exists() else ():
            row = json.loads(line)
            if row["settings"] != settings:
                raise SystemExit(
                    f"{file} was measured with {row['settings']}, not with {settings}; give another --rows"
                )
            self.loads[row["round"], row["server"], row["load"]["concurrency"]] = Load(**row["load"])

    def add(self, number: int, name: str, load: Load) -> None:
        self.loads[number, name, load.concurrency] = load
        if self.file:
            row = {"round": number, "server": name, "settings": self.settings, "load": asdict(load)}
            with self.file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    def of(self, name: str, concurrency: int) -> dict[int, Load]:
        """Return the loads by round."""
        return {key[0]: load for key, load in sorted(self.loads.items()) if key[1:] == (name, concurrency)}


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
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="requests not measured")
    parser.add_argument("--rows", type=Path, help="file that all measured values are appended to, and resumed from")
    return parser.parse_args()


def report(rows: Rows, names: Sequence[str], concurrencies: Sequence[int]) -> None:
    """Print a line per server and concurrency; ratios are those within a round."""
    print("server, requests at once: tokens/s, median [range] of the rounds; ratio to the first server;")
    print("first token and further tokens, median/p99; accepted tokens per draft; equal answers; failed requests")
    for name in names:
        for concurrency in concurrencies:
            loads, same = rows.of(name, concurrency), rows.of(names[0], concurrency)
            speeds = [one.speed for one in loads.values()]
            ratios = [one.speed / same[number].speed for number, one in loads.items()]
            known = {prompt: text for one in same.values() for prompt, text in one.answers.items()}
            pairs = [(text, known[p]) for one in loads.values() for p, text in one.answers.items() if p in known]
            accepted = [one.accepted for one in loads.values() if one.accepted is not None]
            parts = (
                f"{name:<10} {concurrency:>4} {spread(speeds, 1)} tokens/s",
                f"ratio {spread(ratios, 2)}",
                f"{milliseconds([t for one in loads.values() for t in one.first])}",
                f"{milliseconds([t for one in loads.values() for t in one.further])}",
                f"{statistics.median(accepted):.2f}" if accepted else "-",
                f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}",
                f"{sum(one.failed for one in loads.values())} failed",
            )
            print("  ".join(parts))


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def main() -> None:
    options = arguments()
    prompts = read_prompts(options.prompts)
    servers = dict(one.split("=", 1) for one in options.server) or {"running": ""}
    measured = ("model", "prompts", "seconds", "rate", "max_tokens", "temperature", "warm_up")
    rows = Rows(options.rows, {key: str(getattr(options, key)) for key in measured} | {"servers": servers})
    for number in range(1, 1 + (options.rounds if options.server else 1)):
        for name, command in servers.items():
            left = [one for one in options.concurrency if (number, name, one) not in rows.loads]
            if not left:
                continue
            print(f"round {number}: {name}", file=sys.stderr)
            with Server(command, options.url) if command else nullcontext():
                for concurrency in left:
                    rows.add(number, name, asyncio.run(run_load(options, concurrency, cycle(prompts))))
    report(rows, list(servers), options.concurrency)


if __name__ == "__main__":
    main()
