"""The files of a prepared corpus: whole or not there at all. It knows no base and asks nobody.

Beside `manifest.json` (which base, asked how, how much, a checksum of every part, `complete` only at the end)
lie `part-00000.jsonl` and so on, one a batch, with {"id", "turn", "sample", "category", "tokens", "mask", "ended",
"cut", "ids"} on every line, or {"id", "turn", "sample", "category", "dropped"} where there is no answer to learn from.
`plan.json` is how fast the machine that began it was.

Who may write into a folder: one process a shard, all of one split. It knows locks, not what is written.

A lock is held by a living process and by nothing else: the system lets go of it when the process ends, however it
ends. So the file that a killed process leaves behind stops nobody.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ctcdraft.corpus.generation.requests import Sample
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.io import write_text

Manifest = dict[str, Any]
Line = dict[str, Any]
PLAN_FILE = "plan.json"


def part_path(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.jsonl"


def list_parts(out: Path) -> list[Path]:
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


def read_finished_part(file: Path, batch: Sequence[Sample], expected: str | None) -> list[Line] | None:
    """The lines of a part if it holds exactly this batch, else None: then the batch is asked again, whole.

    `expected` is its checksum where the corpus was complete once; so a damaged part can be redone alone. Which
    base and which prompts is the manifest's word.
    """
    lines = read_part(file)
    if lines is None or (expected is not None and file_checksum(file) != expected):
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
    if not (out / PLAN_FILE).exists():
        write_text(out / PLAN_FILE, json.dumps(measured, indent=1) + "\n")


def delete_corpus(out: Path) -> None:
    """Remove a prepared corpus, and nothing else that may lie beside it."""
    for file in [out / "manifest.json", out / PLAN_FILE, *list_parts(out), *out.glob("*.partial")]:
        file.unlink(missing_ok=True)


def file_checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


LOCK_ATTEMPTS = 10  # a sibling that looks whether a lock is held, holds it for an instant


@contextmanager
def writer_lock(out: Path, shard: Shard) -> Iterator[None]:
    """Hold `out` for this shard; refuse where another process writes the same, or shares the work otherwise.

    Drafts that a killed process left are removed, once nobody else is alive who could be writing one.
    """
    file = out / f"writer{shard}.lock"
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = try_lock(file, LOCK_ATTEMPTS)
    except OSError as error:
        raise InputError(
            f"cannot write {file} ({error.strerror}); make room or choose another place, then run again: what was "
            "finished is kept"
        ) from error
    if lock is None:
        raise InputError(describe_writer(out, file))
    try:
        drafts = list(out.glob("*.partial"))  # before looking who is alive: whoever comes later has none of these
        siblings = set(out.glob(f"writer{shard.siblings}.lock"))
        alive = [other for other in sorted(out.glob("writer*.lock")) if other != file and not is_stale_lock(other)]
        for other in alive:
            if other not in siblings:
                raise InputError(describe_writer(out, other))
        for draft in [] if alive else drafts:
            draft.unlink(missing_ok=True)
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.close()


def try_lock(file: Path, tries: int) -> IO[str] | None:
    """The open file, locked and signed by this process, or None if another one keeps it."""
    for attempt in range(tries):
        stream = file.open("a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(stream, file):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}")
                stream.flush()
                return stream
        except BlockingIOError:
            pass
        except OSError:
            stream.close()
            raise
        stream.close()
        if attempt + 1 < tries:
            time.sleep(0.05)
    return None


def is_same_file(stream: IO[str], file: Path) -> bool:
    """Whether the locked file is the one of that name: its last holder may just have removed it."""
    try:
        return os.fstat(stream.fileno()).st_ino == file.stat().st_ino
    except FileNotFoundError:
        return False


def is_stale_lock(file: Path) -> bool:
    """Whether nobody keeps this lock; the file is removed then."""
    try:
        stream = file.open("a+")
    except FileNotFoundError:
        return True
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if is_same_file(stream, file):
            file.unlink(missing_ok=True)
        return True


def describe_writer(out: Path, file: Path) -> str:
    try:
        writer = file.read_text() or "another process"
    except OSError:
        writer = "another process"
    return f"{writer} is writing into {out} ({file.name}); wait for it, stop it, or choose another out="
