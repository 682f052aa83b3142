"""The prepared corpus: made once, resumed after a kill, refused by another base. It knows no training.

Every batch of answers becomes one part file, whole or not there at all, and batches depend on the prompts
alone. So running again goes on where it was, and the parts come out equal whether it was stopped or not, and
whether one process made them or many.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from ctcdraft.corpus import part_files
from ctcdraft.corpus.default_folder import describe_path_changes
from ctcdraft.corpus.generation.requests import MultiTurnGenerator, ResponseGenerator, Sample, batch_samples
from ctcdraft.corpus.part_files import Line, Manifest, file_checksum, writer_lock
from ctcdraft.corpus.token_store import Row, TokenStore
from ctcdraft.corpus.types import Corpus
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

SINGLE_SHARD = Shard(1, 1)
COUNT_KEYS = ("answers", "tokens", "answer_tokens", "ended", "cut_prompts", "reencoded", "dropped")
BASE_KEYS = ("weights", "tokenizer", "chat_template")  # one base may go by two names


@dataclass(frozen=True)
class PreparedCorpus:
    """A whole corpus, checked; `manifest["hash"]` stands for its content."""

    manifest: Manifest
    rows: Sequence[Row]


@dataclass(frozen=True)
class FinishedPart:
    """What the manifest says of one finished batch."""

    checksum: str
    counts: Counter[str]


class CorpusPlan(Protocol):
    """What is stored of a `ctcdraft.planning.corpus.CorpusPlan`; planning imports this package."""

    @property
    def manifest_entry(self) -> dict[str, Any]: ...

    @property
    def measured(self) -> dict[str, Any]: ...


def prepare(
    base: BaseLM,
    corpus: Corpus,
    answers: ResponseGenerator,
    out: Path,
    settings: dict[str, Any],
    shard: Shard = SINGLE_SHARD,
    planned: CorpusPlan | None = None,
) -> Manifest:
    """Ask the base every turn of every prompt and keep its answers in `out`; run again, it goes on.

    `settings` and `planned` are written down for the reader. What must agree in order to go on is the base, the prompts
    themselves and how answers are made. A shard asks its own batches; whoever finds them all finished, its
    siblings' included, completes the manifest. So shards on machines without a disk in common are merged by
    laying their parts into one folder and running once more.
    """
    existing = part_files.read_manifest(out)
    if existing is not None and existing["complete"] and has_all_parts(out, existing):
        # No lock: trainings that start side by side read one corpus, perhaps on a disk they may not write to.
        return begin_manifest(base, corpus, answers, out, settings, planned)
    with writer_lock(out, shard):
        if shard == SINGLE_SHARD and not part_files.list_parts(out):
            part_files.delete_corpus(out)  # begun, perhaps otherwise, by someone who got nowhere
        manifest = begin_manifest(base, corpus, answers, out, settings, planned)
        if planned is not None:
            part_files.write_plan(out, planned.measured)
        known: dict[str, str] = manifest.get("parts", {})
        sample_batches = batch_samples(base.tokenizer, corpus.prompts, answers)
        finished: dict[int, FinishedPart] = {}
        own_numbers = [number for number in range(len(sample_batches)) if shard.takes(number)]
        interview = MultiTurnGenerator(base, answers)
        # smoothing=0 is answers/s over the whole run: the longest come first, so it only gets faster.
        with tqdm(
            total=count_turns(sample_batches, own_numbers), unit=" answers", desc="answering", smoothing=0
        ) as bar:
            for number in own_numbers:
                file, batch = part_files.part_path(out, number), sample_batches[number]
                lines = part_files.read_finished_part(file, batch, known.get(file.name))
                if lines is None:
                    lines = interview(batch)
                    part_files.write_part(file, lines)
                else:
                    bar.initial += len(lines)  # answers/s is about this run
                finished[number] = FinishedPart(file_checksum(file), count_lines(lines))
                bar.update(len(lines))
        for number in range(len(sample_batches)):
            if number not in finished:
                file = part_files.part_path(out, number)
                lines = part_files.read_finished_part(file, sample_batches[number], known.get(file.name))
                if lines is None:
                    return manifest  # a sibling is at work on it, or will be
                finished[number] = FinishedPart(file_checksum(file), count_lines(lines))
        return complete_manifest(
            out, manifest, [finished[number] for number in range(len(sample_batches))], len(corpus.prompts)
        )


def count_turns(sample_batches: Sequence[Sequence[Sample]], numbers: Sequence[int]) -> int:
    return sum(len(one.prompt.turns) for number in numbers for one in sample_batches[number])


def count_lines(lines: Sequence[Line]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        if "dropped" in line:
            counts.update(dropped=1)
            continue
        counts.update(
            answers=1,
            tokens=len(line["tokens"]),
            answer_tokens=sum(line["mask"]),
            ended=int(line["ended"]),
            cut_prompts=int(line["cut"] > 0),
            reencoded=int(line["ids"] == "reencoded"),
        )
    return counts


def begin_manifest(
    base: BaseLM,
    corpus: Corpus,
    answers: ResponseGenerator,
    out: Path,
    settings: dict[str, Any],
    planned: CorpusPlan | None,
) -> Manifest:
    """The manifest of the corpus in `out`, begun now or earlier; refuses one that was made otherwise."""
    wanted = initial_manifest(base, corpus, answers) | {"settings": settings}
    if planned is not None:
        wanted["plan"] = planned.manifest_entry | {"measured": part_files.PLAN_FILE}
    existing = part_files.read_manifest(out)
    if existing is None:
        if part_files.list_parts(out):
            raise InputError(f"{out} holds parts without manifest.json; choose another out= or add overwrite=true")
        part_files.write_manifest(out, wanted)
        return wanted
    refuse_other_base(existing, wanted["base"], out)
    changed = changed_settings(existing, wanted)
    if changed:
        raise InputError(
            f"{out} holds a corpus that was made with {', '.join(changed)}; "
            "repeat those settings (data_seed= where only seed= changed), choose another place (out= of "
            "data/prepare.py, prepared= of train.py), or have "
            "data/prepare.py replace it with overwrite=true"
        )
    return existing


def initial_manifest(base: BaseLM, corpus: Corpus, answers: ResponseGenerator) -> Manifest:
    """What a manifest says from the beginning."""
    return {
        "complete": False,
        "base": base.fingerprint(),
        "prompts": corpus.hash,
        "conversations": corpus.account,
        "answers": {"by": type(answers).__name__, "dtype": dtype_name(base), **answers.generation_settings()},
    }


def differing_settings(base: BaseLM, corpus: Corpus, answers: ResponseGenerator, out: Path) -> list[str]:
    """What the corpus in `out`, of this base, was made with that is asked for otherwise now."""
    existing = part_files.read_manifest(out)
    if existing is None:
        return []
    refuse_other_base(existing, base.fingerprint(), out)
    return changed_settings(existing, initial_manifest(base, corpus, answers))


def changed_settings(existing: Manifest, wanted: Manifest) -> list[str]:
    """What a corpus was made with that is asked for otherwise now."""
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


def complete_manifest(out: Path, manifest: Manifest, finished: Sequence[FinishedPart], prompts: int) -> Manifest:
    counts: Counter[str] = sum((one.counts for one in finished), Counter())
    whole = manifest | {
        "complete": True,
        "counts": {
            "prompts": prompts,
            **{key: counts[key] for key in COUNT_KEYS},
            "ended_share": counts["ended"] / max(1, counts["answers"]),
        },
        "hash": hashlib.sha256("".join(one.checksum for one in finished).encode()).hexdigest()[:16],
        "parts": {part_files.part_path(out, number).name: one.checksum for number, one in enumerate(finished)},
    }
    part_files.write_manifest(out, whole)
    return whole


def is_complete(path: Path) -> bool:
    """Whether `path` holds a corpus that was prepared to its end; `read` checks that it is still whole."""
    manifest = part_files.read_manifest(path)
    return manifest is not None and manifest["complete"]


def has_all_parts(out: Path, manifest: Manifest) -> bool:
    """Whether every part is there as it was written."""
    return all(
        (out / name).is_file() and file_checksum(out / name) == expected for name, expected in manifest["parts"].items()
    )


def read_corpus(path: Path, fingerprint: dict[str, Any]) -> PreparedCorpus:
    """The whole corpus, or one sentence on why not: absent, incomplete, damaged, or made for another base."""
    manifest = part_files.read_manifest(path)
    if manifest is None:
        raise InputError(f"no prepared corpus at {path}; make one with data/prepare.py out={path}")
    if not manifest["complete"]:
        raise InputError(f"the corpus at {path} is not complete; run data/prepare.py again, it goes on")
    refuse_other_base(manifest, fingerprint, path)
    return PreparedCorpus(manifest, TokenStore(answer_lines(path, manifest)))


def answer_lines(path: Path, manifest: Manifest) -> Iterator[Line]:
    """The lines of all parts that hold an answer; one part is in memory at a time."""
    for name, expected in manifest["parts"].items():
        lines = part_files.read_part(path / name)
        if lines is None or file_checksum(path / name) != expected:
            raise InputError(f"{path / name} is missing or damaged; run data/prepare.py again to redo it")
        yield from (line for line in lines if "dropped" not in line)


def refuse_other_base(manifest: Manifest, fingerprint: dict[str, Any], path: Path) -> None:
    prepared_for = manifest["base"]
    differing = [key.replace("_", " ") for key in BASE_KEYS if prepared_for[key] != fingerprint[key]]
    if differing:
        raise InputError(
            f"the corpus at {path} holds answers of {prepared_for['base']}, but this run's base is "
            f"{fingerprint['base']} (another {', '.join(differing)}); run data/prepare.py for this base with "
            "another out=, or with overwrite=true to replace them"
        )


def dtype_name(base: BaseLM) -> str:
    return str(base.dtype).removeprefix("torch.")
