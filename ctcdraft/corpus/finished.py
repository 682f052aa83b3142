"""Finished corpora: their shards, made from parts alone where an older version wrote them, and exported as parts.

Shards are what is read; the parts stay beside them and may be deleted. Both hold the same lines, so that either repairs
the other without answering again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from ctcdraft.corpus import arrow_files, part_files
from ctcdraft.corpus.lines import Line
from ctcdraft.corpus.part_files import Manifest, file_checksum, writer_lock
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.io import write_text


def complete_manifest_of(path: Path) -> Manifest:
    manifest = part_files.read_manifest(path)
    if manifest is None:
        raise InputError(f"no prepared corpus at {path}; make one with data/prepare.py out={path}")
    if not manifest["complete"]:
        raise InputError(f"the corpus at {path} is not complete; run data/prepare.py again to resume it")
    return manifest


def open_table(path: Path, manifest: Manifest) -> pa.Table:
    """Return the lines of a complete corpus; raise InputError if a file of it is damaged."""
    if "arrow" not in manifest:
        return import_parts(path, manifest)
    for name, expected in manifest["arrow"].items():
        if not part_files.have_checksums(path, {name: expected}):
            raise InputError(f"{path / name} is missing or damaged; run data/prepare.py again to redo it")
    return arrow_files.open_shards([path / name for name in manifest["arrow"]])


def import_parts(path: Path, manifest: Manifest) -> pa.Table:
    """Return the table of a corpus of parts alone, and write its shards where the folder can be written to."""
    try:
        with writer_lock(path, Shard(1, 1)):
            shards = arrow_files.write_shards(path, intact_parts(path, manifest["parts"]))
            part_files.write_manifest(path, manifest | {"arrow": {one.name: file_checksum(one) for one in shards}})
        return arrow_files.open_shards(shards)
    except InputError:  # a read-only or full disk, or another process that is at it
        return arrow_files.in_memory(intact_parts(path, manifest["parts"]))


def intact_parts(path: Path, parts: Mapping[str, str]) -> Iterator[list[Line]]:
    """Yield the lines of every part; one part is in memory at a time."""
    for name, expected in parts.items():
        lines = part_files.read_part(path / name)
        if lines is None or file_checksum(path / name) != expected:
            raise InputError(f"{path / name} is missing or damaged; run data/prepare.py again to redo it")
        yield lines


def restore_parts(path: Path, manifest: Manifest) -> None:
    """Write the parts that are missing and whose lines are all in intact shards."""
    missing = {name: one for name, one in manifest.get("parts", {}).items() if not (path / name).exists()}
    stored = manifest.get("arrow", {}).items() if missing else ()
    shards = [name for name, one in stored if part_files.have_checksums(path, {name: one})]
    if shards:
        for number, lines in arrow_files.parts_of(arrow_files.open_shards(path / name for name in shards)):
            file, text = part_files.part_path(path, number), part_files.part_text(lines)
            if missing.get(file.name) == sha256(text.encode()).hexdigest():  # else the rest of it is in another shard
                write_text(file, text)


def forget_parts(path: Path, names: Sequence[str]) -> None:
    """Remove the checksums of damaged parts, which may be answered with other bytes; the corpus is then incomplete."""
    manifest = part_files.read_manifest(path)
    parts = {} if manifest is None else manifest.get("parts", {})
    if manifest is not None and not parts.keys().isdisjoint(names):
        intact = {name: one for name, one in parts.items() if name not in {*names}}
        part_files.write_manifest(path, manifest | {"complete": False, "parts": intact})


def export_parts(path: Path, out: Path) -> Manifest:
    """Write the parts of a complete corpus, and a manifest, into another folder, and return the manifest."""
    manifest = complete_manifest_of(path)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"export={out} is not an empty folder; choose another one")
    parts = {}
    for number, lines in arrow_files.parts_of(open_table(path, manifest)):
        file = part_files.part_path(out, number)
        part_files.write_part(file, lines)
        parts[file.name] = file_checksum(file)
    exported = {key: value for key, value in manifest.items() if key != "arrow"} | {"parts": parts}
    part_files.write_manifest(out, exported)
    return exported
