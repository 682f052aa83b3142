"""The files of a prepared corpus: whole or not there at all. It knows no base and asks nobody.

Beside `manifest.json` (which base, asked how, how much, a checksum of every part, `complete` only at the end)
lie `part-00000.jsonl` and so on, one a batch, with {"id", "turn", "sample", "category", "tokens", "mask", "ended",
"cut", "ids"} on every line, or {"id", "turn", "sample", "category", "dropped"} where there is no answer to learn from.
`plan.json` is how fast the machine that began it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctcdraft.corpus.questions import Dialogue
from ctcdraft.errors import InputError
from ctcdraft.files import write_text

Manifest = dict[str, Any]
Line = dict[str, Any]
PLAN = "plan.json"


def part(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.jsonl"


def part_files(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.jsonl"))


def write_part(file: Path, lines: Sequence[Line]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_text(file, text)


def read_part(file: Path) -> list[Line] | None:
    """The lines, or None if the file is absent, torn or not JSON."""
    if not file.is_file():
        return None
    *lines, torn = file.read_bytes().split(b"\n")
    try:
        return None if torn else [json.loads(line) for line in lines]
    except ValueError:
        return None


def finished(file: Path, batch: Sequence[Dialogue], expected: str | None) -> list[Line] | None:
    """The lines of a part if it holds exactly this batch, else None: then the batch is asked again, whole.

    `expected` is its checksum where the corpus was complete once; so a damaged part can be redone alone. Which
    base and which prompts is the manifest's word.
    """
    lines = read_part(file)
    if lines is None or (expected is not None and checksum(file) != expected):
        return None
    places = [(one.prompt.id, one.sample, turn) for one in batch for turn in range(len(one.prompt.turns))]
    return lines if [(line.get("id"), line.get("sample"), line.get("turn")) for line in lines] == places else None


def read_manifest(out: Path) -> Manifest | None:
    file = out / "manifest.json"
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_bytes())
        manifest["base"]["weights"], manifest["answers"].items()
        if manifest["complete"]:
            manifest["parts"].items(), manifest["counts"].items(), manifest["hash"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not the manifest of a prepared corpus; choose another folder") from error
    return manifest


def write_manifest(out: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest, indent=1) + "\n"
    write_text(out / "manifest.json", text)


def write_plan(out: Path, measured: dict[str, Any]) -> None:
    """What was measured before the first answer, where that has not been written yet. The manifest names this file
    and holds none of it: no two measurements are equal, and all else in the folder is, whoever makes it."""
    if not (out / PLAN).exists():
        write_text(out / PLAN, json.dumps(measured, indent=1) + "\n")


def discard(out: Path) -> None:
    """Remove a prepared corpus, and nothing else that may lie beside it."""
    for file in [out / "manifest.json", out / PLAN, *part_files(out), *out.glob("*.partial")]:
        file.unlink(missing_ok=True)


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
