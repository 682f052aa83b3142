"""Model cards of published heads, from the run directory and its evaluation reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctcdraft.drafters.base import DraftHead
from ctcdraft.evaluation.benchmarks import PUBLISHED_SIZES
from ctcdraft.report.tables import FULL_COLUMNS, markdown_table

CARD_COLUMNS = ("benchmark", "T", "nodes", "prompts", "tau", "speedup", "equal")


def model_card(run: Path, config: Mapping[str, Any], fingerprint: Mapping[str, Any], drafter: DraftHead) -> str:
    """Return Markdown with the hub's front matter. Only rows with a losslessness check are printed."""
    name, base = config["drafter"]["name"], fingerprint["base"]
    trained = sum(weight.numel() for weight in drafter.trainable_parameters())
    reports = list(largest_reports(run, name))
    measured = [measurement_section(*report) for report in reports] or ["This head has not been evaluated yet."]
    return "\n\n".join(
        [
            "---\nlibrary_name: ctcdraft\ntags:\n- speculative-decoding\n- draft-head\n- ctc\n---",
            f"# {name}: a draft head for {base}",
            "Its base decodes several tokens per forward pass with it, and the output does not change: in float32 "
            "greedy tokens are the base's own, and sampled ones follow the base's distribution. In half precision near "
            "ties can be decided otherwise, as with another attention kernel. It works with this base only.",
            "    head = PublishedHead.from_pretrained(FOLDER, model=model, tokenizer=tokenizer)\n"
            "    ids = model.generate(**inputs, custom_generate=head.generate)\n\n"
            "with `from ctcdraft.hub import PublishedHead`.",
            "## The head",
            head_facts(config, fingerprint, trained),
            "## Measurements",
            *measured,
        ]
    ) + "\n"  # fmt: skip


def head_facts(config: Mapping[str, Any], fingerprint: Mapping[str, Any], trained: int) -> str:
    """Return a table of what the head is and how it was trained."""
    drafter, trainer = config["drafter"], config["trainer"]
    batch = f"{trainer['batch_size']} sequences x {trainer['anchors_per_sequence'] or 'all'} windows"
    facts = {
        "base": f"{fingerprint['base']}, weights {fingerprint['weights']}, layers {fingerprint['taps']}",
        "trained parameters": f"{trained:,}",
        "frames": str(drafter.get("frames", "-")),
        "objective": str(config["objective"]["_target_"]).rsplit(".", 1)[-1],
        "prompts, with responses of the base": f"{config['corpus']['name']} (corpus {fingerprint['corpus']})",
        "steps": f"{trainer['steps']:,} of {batch}",
        "seed": str(config["seed"]),
    }
    return "\n".join(["| what |  |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in facts.items())])


def largest_reports(run: Path, name: str) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yield rows and environment of this head's reports: per benchmark and temperature the one with most questions."""
    largest: dict[Any, tuple[tuple[int, str], tuple[list[dict[str, Any]], dict[str, Any]]]] = {}
    for file in sorted(run.glob("evaluation/*/report.json")):
        report = json.loads(file.read_text())
        # benchmark=latency has no questions, and its rows have no losslessness check.
        rows = [row for row in report["rows"] if row["drafter"] == name and row.get("lossless", {}).get("prompts")]
        if not rows:
            continue
        # A replay measures no times, so it does not replace an evaluation that does.
        kind = rows[0]["benchmark"], rows[0]["temperature"], rows[0]["speedup"] is not None
        rank = (rows[0]["prompts"], report["environment"]["date"])
        if kind not in largest or rank > largest[kind][0]:
            largest[kind] = rank, (rows, report["environment"])
    yield from (report for _, report in largest.values())


def measurement_section(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Return rows below a line such as `2 of 1,319 questions of gsm8k; 2 CPU cores, float32, commit ..., date`."""
    row, git = rows[0], environment["git"]
    code = "code not under git" if git is None else f"commit {git['commit'][:7]}"
    total = PUBLISHED_SIZES.get(row["benchmark"], row["prompts"])
    part = f"{row['prompts']:,} of " if row["prompts"] < total else ""
    table = markdown_table(rows, {column: FULL_COLUMNS[column] for column in CARD_COLUMNS})
    return (
        f"{part}{total:,} questions of {row['benchmark']}; {row['hardware']}, {row['dtype']}, {code}, "
        f"{environment['date']}\n\n    {environment['command']}\n\n{table}"
    )
