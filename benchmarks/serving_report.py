"""Loads measured by `benchmarks.serving`, kept in a file of rows, and the table of their ratios."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Load:
    """What was measured at one concurrency, in a window of `seconds`."""

    concurrency: int
    seconds: float
    requests: int = 0  # answered, those still open at the end of the window included
    tokens: int = 0  # that arrived within the window
    first: list[float] = field(default_factory=list)  # seconds to the first token
    further: list[float] = field(default_factory=list)  # seconds per further token, of every request
    accepted: float | None = None  # draft tokens per draft, from the server's metrics
    answers: dict[str, str] = field(default_factory=dict)  # by prompt, at temperature 0
    failures: list[str] = field(default_factory=list)  # one sentence per request that failed

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Rows:
    """Loads by round, server and concurrency, kept in a file with one line each; without a file in memory alone."""

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self.file, self.settings, self.loads = file, settings, dict[tuple[int, str, int], Load]()
        for line in file.read_text().splitlines() if file and file.exists() else ():
            row = json.loads(line)
            was = row["settings"]
            if other := [key for key in sorted({*was, *settings}) if was.get(key) != settings.get(key)]:
                pairs = ", ".join(f"{key} {was.get(key)!r} instead of {settings.get(key)!r}" for key in other)
                raise SystemExit(f"{file} was measured with {pairs}; give another --rows")
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


def report(rows: Rows, names: Sequence[str], concurrencies: Sequence[int]) -> None:
    """Print a line per server and concurrency, and the first failures of each."""
    print("server, requests at once: tokens/s, median [range] of the rounds; ratio to the first server;")
    print("first token and further tokens, median/p99; accepted tokens per draft; equal answers; failed requests")
    for name in names:
        for concurrency in concurrencies:
            loads, same = rows.of(name, concurrency), rows.of(names[0], concurrency)
            known = {prompt: text for one in same.values() for prompt, text in one.answers.items()}
            pairs = [(text, known[p]) for one in loads.values() for p, text in one.answers.items() if p in known]
            accepted = [one.accepted for one in loads.values() if one.accepted is not None]
            failures = [failure for one in loads.values() for failure in one.failures]
            parts = (
                f"{name:<10} {concurrency:>4} {spread([one.speed for one in loads.values()], 1)} tokens/s",
                f"ratio {ratio(loads, same)}",
                f"{milliseconds([t for one in loads.values() for t in one.first])}",
                f"{milliseconds([t for one in loads.values() for t in one.further])}",
                f"{statistics.median(accepted):.2f}" if accepted else "-",
                f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}",
                f"{len(failures)} failed",
            )
            print("  ".join(parts))
            for failure in failures[:3]:
                print(f"  failed: {failure[:300]}")


def ratio(loads: dict[int, Load], same: dict[int, Load]) -> str:
    """Return the ratio of speeds within a round, median and range; void where a request of either failed."""
    if any(one.failures for one in (*loads.values(), *same.values())):
        return "void, requests failed"
    return spread([one.speed / same[number].speed for number, one in loads.items()], 2)


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def milliseconds(values: Sequence[float]) -> str:
    """Return median and 99th percentile."""
    if len(values) < 2:
        return "-"
    return f"{1000 * statistics.median(values):.1f}/{1000 * statistics.quantiles(values, n=100)[98]:.1f} ms"
