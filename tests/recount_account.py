"""An independent recount of a manifest from the conversation files and from the parts.

    python tests/recount_account.py PREPARED FILE ...

It shares no code with the package: lines are counted as lines, duplicates by the texts themselves, prompts and
responses by the lines of the parts. It ends with status 1 at the first count that differs.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", newline="\n") as stream:
        yield from (json.loads(line) for line in stream if line.strip())


def user_text(record: dict[str, Any]) -> str:
    """Return the user turns with case and white space normalised."""
    if "question" in record:
        return " ".join(record["question"].lower().split())
    turns = (turn["value"] for turn in record["conversations"] if turn["from"] in ("human", "user"))
    return "\0".join(" ".join(turn.lower().split()) for turn in turns)


def recount(folder: Path, files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return (name, count here, count in the manifest)."""
    texts = [user_text(record) for file in files for record in records(file)]
    manifest = json.loads((folder / "manifest.json").read_text())
    account, counts = manifest["conversations"], manifest["counts"]
    foreign = account["dropped"].get("language", 0)
    different = account["read"] - account["dropped"]["duplicates"]
    # Texts in another language are dropped before duplicates are, so their conversations may repeat texts.
    different -= min(foreign, max(0, different - len(set(texts))))
    gone = sum(account["dropped"].values()) + sum(account["leaked"].values())
    lines = [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.open()]
    answers = [line for line in lines if "dropped" not in line]
    spans = [span for line in answers for span in line["spans"]]
    turns = [(one["id"], one["turn"] + n, one["sample"]) for one in lines for n in range(len(one.get("spans", "-")))]
    parts = {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in folder.glob("part-*.jsonl")}
    same = sum(manifest["parts"].get(name) == digest for name, digest in parts.items())
    return [
        ("conversations read", len(texts), account["read"]),
        ("kept + not asked + dropped + leaked", account["read"], account["kept"] + account["not_asked"] + gone),
        ("different texts, of those not in another language", len(set(texts)) - foreign, different - foreign),
        ("prompts in the parts", len({line["id"] for line in lines}), account["kept"]),
        ("rows", len(answers), counts["rows"]),
        ("answers", len(spans), counts["answers"]),
        ("turns without an answer", len(lines) - len(answers), counts["dropped"]),
        ("turns more than once", len(turns) - len(set(turns)), 0),
        ("tokens", sum(len(line["tokens"]) for line in answers), counts["tokens"]),
        ("tokens of answers", sum(end - start for start, end, _ in spans), counts["answer_tokens"]),
        ("parts with the checksum of the manifest", same, len(manifest["parts"])),
    ]


if __name__ == "__main__":
    compared = recount(Path(sys.argv[1]), map(Path, sys.argv[2:]))
    for name, recounted, recorded in compared:
        print(f"{name:52} {recounted:10,} {recorded:10,}")
    for name, recounted, recorded in compared:
        assert recounted == recorded, name
