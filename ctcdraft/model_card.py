"""The card of a published head, written from its run and from what was measured with it. It measures nothing."""

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
    """Markdown with the hub's front matter. Only rows that carry a certificate are printed."""
    name, base = config["drafter"]["name"], fingerprint["base"]
    trained = sum(weight.numel() for weight in drafter.trainable_parameters())
    reports = list(largest_reports(run, name))
    measured = [measurement_section(*found) for found in reports] or ["Nothing was measured with this head yet."]
    return "\n\n".join(
        [
            "---\nlibrary_name: ctcdraft\ntags:\n- speculative-decoding\n- draft-head\n- ctc\n---",
            f"# {name}: a draft head for {base}",
            "It makes its base decode several tokens a pass and does not change one of them: what the base says, and "
            "at which temperature, is up to the base alone. It works with this base only.",
            "    head = PublishedHead.from_pretrained(FOLDER, model=model, tokenizer=tokenizer)\n"
            "    ids = model.generate(**inputs, custom_generate=head.generate)\n\n"
            "with `from ctcdraft.hub import PublishedHead`.",
            "## What it is",
            markdown_table(
                head_facts(config, fingerprint, trained),
                {"what": lambda row: row["what"], "": lambda row: row["value"]},
            ),
            "## What was measured",
            *measured,
        ]
    ) + "\n"  # fmt: skip


def head_facts(config: Mapping[str, Any], fingerprint: Mapping[str, Any], trained: int) -> list[dict[str, str]]:
    drafter, trainer = config["drafter"], config["trainer"]
    values = {
        "base": f"{fingerprint['base']}, weights {fingerprint['weights']}, taps {fingerprint['taps']}",
        "trained parameters": f"{trained:,}",
        "frames": str(drafter.get("frames", "-")),
        "objective": str(config["objective"]["_target_"]).rsplit(".", 1)[-1],
        "answers of the base to": f"{config['corpus']['name']} (corpus {fingerprint['corpus']})",
        "steps": f"{trainer['steps']:,} of {trainer['rows']} answers x {trainer['anchors']} windows",
        "seed": str(config["seed"]),
    }
    return [{"what": what, "value": value} for what, value in values.items()]


def largest_reports(run: Path, name: str) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yield the rows of this head, and where they were measured: of each benchmark and temperature the report with
    the most questions. A replay, which times nothing, does not stand in for an evaluation that does."""
    largest: dict[Any, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    for file in sorted(run.glob("evaluation/*/report.json")):
        report = json.loads(file.read_text())
        # benchmark=latency asks nobody anything, and its rows have no verdict.
        rows = [row for row in report["rows"] if row["drafter"] == name and row.get("lossless", {}).get("prompts")]
        if not rows:
            continue
        kind = rows[0]["benchmark"], rows[0]["temperature"], rows[0]["speedup"] is not None
        if kind not in largest or report_rank(rows, report["environment"]) > report_rank(*largest[kind]):
            largest[kind] = rows, report["environment"]
    yield from largest.values()


def report_rank(rows: list[dict[str, Any]], environment: dict[str, Any]) -> tuple[int, str]:
    """Return what the larger of two reports has more of; of equally large ones the newer is taken."""
    return rows[0]["prompts"], environment["date"]


def describe_questions(row: dict[str, Any]) -> str:
    """2 of 1,319 questions of gsm8k"""
    all_of_them = PUBLISHED_SIZES.get(row["benchmark"], row["prompts"])
    part = f"{row['prompts']:,} of " if row["prompts"] < all_of_them else ""
    return f"{part}{all_of_them:,} questions of {row['benchmark']}"


def measurement_section(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    commit = environment["git"]["commit"][:7]
    return (
        f"{describe_questions(rows[0])}; {rows[0]['hardware']}, {rows[0]['dtype']}, commit {commit}, "
        f"{environment['date']}\n\n"
        "    "
        f"{environment['command']}\n\n{markdown_table(rows, {column: FULL_COLUMNS[column] for column in CARD_COLUMNS})}"
    )
