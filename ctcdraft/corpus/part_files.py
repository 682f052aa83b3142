"""The folder of a prepared corpus: its default name, its files, each written whole or not at all, and its lock.

    manifest.json      base model, generation settings, counts, a checksum of every part; `complete` only at the end
    plan.json          generation speed measured before the first response, on the machine that began the corpus
    part-00000.jsonl   one file per batch, of lines as in lines.py
    rows-00000.arrow   all lines of a complete corpus, which are read from there (arrow_files.py)

Several processes may write into one folder if each has its own shard of the same split. The lock is that of the
operating system (filelock), which ends with its process however that ends: the file that a killed process leaves
behind locks nothing.

The default name has base model, corpus and prompt files in it, so that responses to one file of `corpus=sharegpt` are
neither taken for responses to another nor overwritten by them. Only file names count, not their folders: data moved to
another disk finds its responses again, and files of equal names in two places meet in one folder, where
`prepared.changed_settings` refuses the second. Bundled prompts and prompts from the hub add nothing to the name.

torch is not imported here: a command line is checked, with its default folder, before that takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ctcdraft.corpus.lines import Line, line_keys, with_spans
from ctcdraft.errors import InputError
from ctcdraft.io import write_text

if TYPE_CHECKING:
    from ctcdraft.corpus.generation.requests import Sample
    from ctcdraft.distributed import Shard

Manifest = dict[str, Any]
PLAN_FILE = "plan.json"
LOCK_TIMEOUT = 0.5  # seconds: `is_locked` of a sibling shard holds a lock for an instant
BUNDLED_FOLDER = "data/tiny/"
FILE_ENDINGS = re.compile(r"(\.jsonl?)?(\.gz)?$")
MAX_NAME_LENGTH = 60  # characters that file names may add to the folder name


def default_folder(home: str, base: str, corpus: Any) -> str:
    """Return the folder for the responses of this base model to the prompts of a corpus config.

    home data, base tiny, corpus sharegpt of lima.jsonl   ->   data/tiny-sharegpt-lima
    """
    common, files = Path(home) / f"{base}-{corpus['name']}", file_names(corpus)
    own = common.with_name(f"{common.name}-{files}") if files else common
    # Older versions did not put file names into the name: a corpus of these very files in such a folder stays there.
    return str(own if own.exists() or prepared_file_names(common) != files else common)


def file_names(corpus: Any) -> str:
    """Return the file names of a corpus and of its parts joined by +, or an empty string where none are given."""
    names = [FILE_ENDINGS.sub("", Path(path).name) for path in corpus_paths(corpus) if BUNDLED_FOLDER not in path]
    return re.sub(r"[^\w.+-]+", "_", "+".join(names)).strip("_.-+")[:MAX_NAME_LENGTH]


def corpus_paths(corpus: Any) -> Iterator[str]:
    """Yield the paths of a corpus config, then those of its parts."""
    path = corpus.get("path")
    yield from [path] if isinstance(path, str) else map(str, path or ())
    for part in (corpus.get("parts") or {}).values():
        yield from corpus_paths(part)


def prepared_file_names(folder: Path) -> str | None:
    """Return the names of the files that the corpus in a folder was made from, or None without such a corpus."""
    try:
        return file_names(json.loads((folder / "manifest.json").read_bytes())["settings"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_path_changes(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return "corpus.path=OLD (now NEW)" if two manifests record different paths."""
    if "settings" not in stored or "settings" not in wanted:
        return []
    before, now = (",".join(corpus_paths(one["settings"].get("corpus", {}))) or "the hub" for one in (stored, wanted))
    return [f"corpus.path={before} (now {now})"] if before != now else []


def part_path(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.jsonl"


def list_parts(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.jsonl"))


def shard_path(out: Path, number: int) -> Path:
    return out / f"rows-{number:05d}.arrow"


def list_shards(out: Path) -> list[Path]:
    return sorted(out.glob("rows-*.arrow"))


def write_part(file: Path, lines: Sequence[Line]) -> None:
    write_text(file, part_text(lines))


def part_text(lines: Sequence[Line]) -> str:
    # Without spaces after commas: a byte less per token.
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def read_part(file: Path) -> list[Line] | None:
    """Return the lines, those of older versions too, or None if the file is absent, truncated or not JSON."""
    if not file.is_file():
        return None
    *lines, after_last_newline = file.read_bytes().split(b"\n")
    try:
        found = None if after_last_newline else [json.loads(line) for line in lines]
    except ValueError:
        return None
    return found and [with_spans(line) for line in found]


def read_finished_part(file: Path, batch: Sequence[Sample], expected: str | None) -> list[Line] | None:
    """Return the lines of a part if it holds exactly this batch, else None: then the whole batch is generated again.

    `expected` is its checksum if the corpus was complete once, so that a damaged part is redone alone. (That base model
    and prompts are the same is checked by the manifest.)
    """
    lines = read_part(file)
    if lines is None or (expected is not None and file_checksum(file) != expected):
        return None
    keys = [(one.prompt.id, one.sample, turn) for one in batch for turn in range(len(one.prompt.turns))]
    return lines if [key for line in lines for key in line_keys(line)] == keys else None


def read_manifest(out: Path) -> Manifest | None:
    file = out / "manifest.json"
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_bytes())
        # The fields that are read later: many programs write a manifest.json.
        manifest["base"]["weights"], manifest["answers"].items()
        if manifest["complete"]:
            manifest["parts"].items(), manifest["counts"].items(), manifest["hash"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not the manifest of a prepared corpus; choose another folder") from error
    return manifest


def write_manifest(out: Path, manifest: Manifest) -> None:
    write_text(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def write_first_manifest(out: Path, manifest: Manifest) -> bool:
    """Return whether the manifest was written: not where another process has written one."""
    draft = out / f"manifest.json.first.{os.getpid()}.{socket.gethostname()}.partial"
    write_text(draft, json.dumps(manifest, indent=1) + "\n")
    try:
        (out / "manifest.json").hardlink_to(draft)  # unlike a renaming, this replaces no file
        return True
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        write_manifest(out, manifest)
        return True
    finally:
        draft.unlink(missing_ok=True)


def write_plan(out: Path, measured: dict[str, Any]) -> None:
    # Not in the manifest: no two measurements are equal, while all other files are byte-identical on every machine.
    if not (out / PLAN_FILE).exists():
        write_text(out / PLAN_FILE, json.dumps(measured, indent=1) + "\n")


def delete_corpus(out: Path) -> None:
    """Remove a prepared corpus, and no other file in the folder."""
    # The manifest last: parts without one, left by a kill, could not be resumed.
    for file in [*list_shards(out), *list_parts(out), *out.glob("*.partial"), out / PLAN_FILE, out / "manifest.json"]:
        file.unlink(missing_ok=True)


def file_checksum(file: Path) -> str:
    with file.open("rb") as stream:  # not read whole: a shard has hundreds of megabytes
        return hashlib.file_digest(stream, "sha256").hexdigest()


def have_checksums(out: Path, expected: dict[str, str]) -> bool:
    return all((out / name).is_file() and file_checksum(out / name) == one for name, one in expected.items())


@contextlib.contextmanager
def writer_lock(out: Path, shard: Shard) -> Iterator[None]:
    """Lock `out` for this shard; raise InputError if another process writes the same shard or one of another split."""
    file = out / f"writer{shard}.lock"
    lock = FileLock(file, timeout=LOCK_TIMEOUT, fallback_to_soft=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InputError(describe_writer(out, file)) from None
    except OSError as error:
        raise InputError(
            f"cannot write {file} ({error.strerror}); make room or choose another place, then run again: what was "
            "finished is kept"
        ) from error
    try:
        with contextlib.suppress(OSError):  # on a full disk only the error of another process lacks the name
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        drafts = list(out.glob("*.partial"))  # listed before the locks: those of a later sibling are not among them
        siblings = set(out.glob(f"writer{shard.siblings}.lock"))
        running = [other for other in sorted(out.glob("writer*.lock")) if other != file and is_locked(other)]
        for other in running:
            if other not in siblings:
                raise InputError(describe_writer(out, other))
        for draft in [] if running else drafts:  # left by killed processes
            draft.unlink(missing_ok=True)
        yield
    finally:
        file.unlink(missing_ok=True)  # before the release: a process that has it open sees that the name is gone
        lock.release()


def is_locked(file: Path) -> bool:
    """Return whether a process holds this lock; remove the file otherwise."""
    try:
        with FileLock(file, blocking=False, fallback_to_soft=False):
            file.unlink(missing_ok=True)
        return False
    except Timeout:
        return True


def describe_writer(out: Path, file: Path) -> str:
    try:
        writer = file.read_text() or "another process"
    except OSError:
        writer = "another process"
    return f"{writer} is writing into {out} ({file.name}); wait for it, stop it, or choose another out="
