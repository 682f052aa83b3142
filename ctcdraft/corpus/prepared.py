"""Preparation of a corpus: responses of the base model to all prompts, resumable and bound to that base model.

Each batch of responses becomes one part file, written whole or not at all, and batches depend on the prompts only. So a
killed run resumes where it was, and the parts are byte-identical whether the run was interrupted or not, and whether
one process wrote them or several shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ctcdraft.corpus import arrow_files, part_files
from ctcdraft.corpus.finished import complete_manifest_of, intact_parts, open_table, restore_parts
from ctcdraft.corpus.generation.requests import ResponseGenerator, batch_samples
from ctcdraft.corpus.generation.shared import generate_parts
from ctcdraft.corpus.lines import Line, count_lines
from ctcdraft.corpus.part_files import Manifest, describe_path_changes, file_checksum, writer_lock
from ctcdraft.corpus.token_store import Row, TokenStore
from ctcdraft.corpus.types import Corpus
from ctcdraft.distributed import ALONE, Distributed, Shard
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import has_other_rotary, has_other_sum

SINGLE_SHARD = Shard(1, 1)
BASE_KEYS = ("weights", "tokenizer", "chat_template")  # not the name: one base model can have two names


class PlanRecord(Protocol):
    """What is kept of a plan: an entry of the manifest, and the measurements of plan.json.

    (A protocol, because planning imports this package.)
    """

    @property
    def manifest_entry(self) -> dict[str, Any]: ...
    @property
    def measured(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PreparedCorpus:
    """A complete corpus whose checksums are right; `manifest["hash"]` identifies its content."""

    manifest: Manifest
    rows: Sequence[Row]


def prepare(
    base: BaseLM,
    corpus: Corpus,
    answers: ResponseGenerator,
    out: Path,
    settings: dict[str, Any],
    shard: Shard = SINGLE_SHARD,
    planned: PlanRecord | None = None,
    processes: Distributed = ALONE,
) -> Manifest:
    """Generate the base model's response to every turn of every prompt into `out`, or resume, and return the manifest.

    The processes of torchrun, all of which must call this, share the batches of a shard. The shard that finds all parts
    finished completes the manifest; so shards from machines without a shared disk are merged by copying their parts
    into one folder and running once more. `settings` and `planned` are recorded for information: to resume, only the
    base model, the prompts and the generation settings must be the same.
    """
    wanted = initial_manifest(base, corpus, answers) | {"settings": settings}
    if planned is not None:
        wanted["plan"] = planned.manifest_entry | {"measured": part_files.PLAN_FILE}
    if all(processes.all_gather_object(not processes.is_local_main or is_undamaged(out))):
        return begin_manifest(out, wanted)  # without a lock: trainings may share a corpus on a read-only disk
    batches = dict(enumerate(batch_samples(base.tokenizer, corpus.prompts, answers)))
    with ExitStack() as stack:

        def begin() -> Manifest:
            if processes.is_main:
                stack.enter_context(writer_lock(out, shard))
                if shard == SINGLE_SHARD and not (part_files.list_parts(out) or part_files.list_shards(out)):
                    # A manifest of an attempt, perhaps with other settings, that wrote no part.
                    part_files.delete_corpus(out)
            manifest = begin_manifest(out, wanted)
            if processes.is_local_main:
                restore_parts(out, manifest)
            if planned is not None:
                part_files.write_plan(out, planned.measured)
            return manifest

        manifest = processes.main_process_first(begin)
        known: dict[str, str] = manifest.get("parts", {})
        own = {number: batch for number, batch in batches.items() if shard.takes(number)}
        finished = generate_parts(base, answers, out, own, summarise, known, processes)

        def complete() -> Manifest:
            if not processes.is_main and is_complete(out):
                return begin_manifest(out, wanted)
            latest = (part_files.read_manifest(out) or manifest).get("parts", {})  # a sibling may have redone some
            for number in batches.keys() - own.keys():
                file = part_files.part_path(out, number)
                lines = part_files.read_finished_part(file, batches[number], latest.get(file.name))
                if lines is None:
                    return manifest  # left to the sibling shard
                finished[number] = summarise(file, lines)
            return complete_manifest(out, manifest, [finished[n] for n in range(len(batches))], len(corpus.prompts))

        return processes.main_process_first(complete)


def summarise(file: Path, lines: Sequence[Line]) -> tuple[str, Counter[str]]:
    """Return the checksum and the counts of a part."""
    return file_checksum(file), count_lines(lines)


def begin_manifest(out: Path, wanted: Manifest) -> Manifest:
    """Return the manifest in `out`, written now if absent; raise InputError if it records other settings."""
    parts = part_files.list_parts(out)  # before the manifest: a sibling shard may write both at this moment
    existing = part_files.read_manifest(out)
    if existing is None:
        if parts:
            raise InputError(f"{out} holds parts without manifest.json; choose another out= or add overwrite=true")
        if part_files.write_first_manifest(out, wanted):
            return wanted
        return begin_manifest(out, wanted)  # a sibling was faster, perhaps with other settings
    refuse_other_base(existing, wanted["base"], out)
    changed = changed_settings(existing, wanted)
    if changed:
        what = "a corpus" if existing.get("complete", True) else "an unfinished corpus"
        raise InputError(
            f"{out} holds {what} that was made with {', '.join(changed)}; repeat those settings (data_seed= where "
            "only seed= changed), choose another place (out= of data/prepare.py, prepared= of train.py), or have "
            "data/prepare.py replace it with overwrite=true"
        )
    return existing


def initial_manifest(base: BaseLM, corpus: Corpus, answers: ResponseGenerator) -> Manifest:
    dtype = str(base.dtype).removeprefix("torch.")
    return {
        "complete": False,
        "base": base.fingerprint(),
        "prompts": corpus.hash,
        "conversations": corpus.account,
        "answers": {"by": type(answers).__name__, "dtype": dtype, **answers.generation_settings()},
    }


def differing_settings(base: BaseLM, corpus: Corpus, answers: ResponseGenerator, out: Path) -> list[str]:
    """Return the settings in which the corpus in `out` differs from the wanted one; raise for another base model."""
    existing = part_files.read_manifest(out)
    if existing is None:
        return []
    refuse_other_base(existing, base.fingerprint(), out)
    return changed_settings(existing, initial_manifest(base, corpus, answers))


def changed_settings(existing: Manifest, wanted: Manifest) -> list[str]:
    """Return KEY=OLD (now NEW) for generation settings, prompts and paths that differ."""
    # A setting that is missing in `existing` was not there when the corpus was begun, and counts as changed.
    changed = [
        f"answers.{key}={existing['answers'].get(key)} (now {value})"
        for key, value in wanted["answers"].items()
        if existing["answers"].get(key) != value
    ]
    if existing["prompts"] != wanted["prompts"]:
        kept, now = (manifest["conversations"]["kept"] for manifest in (existing, wanted))
        changed.append("other prompts" if kept == now else f"{kept:,} prompts (now {now:,})")
        changed += describe_path_changes(existing, wanted)
    return changed


def complete_manifest(
    out: Path, manifest: Manifest, finished: Sequence[tuple[str, Counter[str]]], prompts: int
) -> Manifest:
    checksums = [checksum for checksum, _ in finished]
    counts = count_lines([])
    for _, part_counts in finished:
        counts.update(part_counts)  # not +, which would remove counts of 0
    parts = {part_files.part_path(out, number).name: checksum for number, checksum in enumerate(checksums)}
    shards = arrow_files.write_shards(out, intact_parts(out, parts))
    complete = manifest | {
        "complete": True,
        "counts": {
            "prompts": prompts,
            **counts,
            "ended_share": counts["ended"] / max(1, counts["answers"]),
        },
        "hash": hashlib.sha256("".join(checksums).encode()).hexdigest()[:16],
        "parts": parts,
        "arrow": {shard.name: file_checksum(shard) for shard in shards},
    }
    part_files.write_manifest(out, complete)
    return complete


def is_complete(path: Path) -> bool:
    """Return whether the manifest of `path` is complete; only `read_corpus` checks that the parts still are."""
    manifest = part_files.read_manifest(path)
    return manifest is not None and manifest["complete"]


def is_undamaged(path: Path) -> bool:
    """Return whether a corpus is complete and has all its shards, or, made by an older version, all its parts."""
    manifest = part_files.read_manifest(path)
    if manifest is None or not manifest["complete"]:
        return False
    return part_files.have_checksums(path, manifest.get("arrow") or manifest["parts"])


def read_corpus(path: Path, fingerprint: dict[str, Any]) -> PreparedCorpus:
    """Return the corpus; raise InputError if it is absent, incomplete, damaged, or not of the fingerprint's base."""
    manifest = complete_manifest_of(path)
    refuse_other_base(manifest, fingerprint, path)
    return PreparedCorpus(manifest, TokenStore(open_table(path, manifest)))


def past_responses(base: BaseLM, path: str | None) -> Iterator[np.ndarray]:
    """Yield the tokens of all responses in a prepared corpus, the last one first; none without a path."""
    if path is not None:
        for row in reversed(read_corpus(Path(path), base.fingerprint()).rows):
            yield from (row.tokens_L[start:end].numpy() for start, end, _ in reversed(row.spans))


def refuse_other_base(manifest: Manifest, fingerprint: dict[str, Any], path: Path) -> None:
    prepared_for = manifest["base"]
    differing = [key.replace("_", " ") for key in BASE_KEYS if prepared_for[key] != fingerprint[key]]
    differing += ["sum of weights"] * has_other_sum(prepared_for, fingerprint)
    differing += ["rotary frequencies"] * has_other_rotary(prepared_for, fingerprint)
    if differing:
        raise InputError(
            f"the corpus at {path} holds answers of {prepared_for['base']}, but this run's base is "
            f"{fingerprint['base']} (another {', '.join(differing)}); run data/prepare.py for this base with "
            "another out=, or with overwrite=true to replace them"
        )
