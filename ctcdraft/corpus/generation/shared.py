"""Generation of the parts of a corpus by all processes of torchrun together.

Batches are dealt one by one: a process takes the next one when it is free, so that all end within the time of one
batch and none waits longer than that for another. Machines without a shared disk exchange their parts at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from ctcdraft.corpus import part_files
from ctcdraft.corpus.finished import forget_parts
from ctcdraft.corpus.generation.requests import ResponseGenerator, Sample
from ctcdraft.corpus.lines import Line, join_turns
from ctcdraft.distributed import Distributed
from ctcdraft.io import write_text
from ctcdraft.models.base_model import BaseLM

Summary = TypeVar("Summary")


def generate_parts(
    base: BaseLM,
    answers: ResponseGenerator,
    out: Path,
    batches: Mapping[int, Sequence[Sample]],
    summarise: Callable[[Path, Sequence[Line]], Summary],
    known: Mapping[str, str],
    processes: Distributed,
) -> dict[int, Summary]:
    """Return summarise(file, lines) of the part of each of these batches, generated now where it is not finished.

    All processes must call it with the same batches. known: checksums of a manifest that was complete once.
    """
    finished: dict[int, Summary] = {}
    damaged: list[str] = []
    for number, batch in batches.items() if processes.is_local_main else ():
        file = part_files.part_path(out, number)
        lines = part_files.read_finished_part(file, batch, known.get(file.name))
        if lines is None:
            file.unlink(missing_ok=True)  # damaged, or of other prompts; another process may generate it
            damaged.append(file.name)
        else:
            finished[number] = summarise(file, lines)
    forget_parts(out, damaged)
    owners, summaries = gather(finished, processes)
    missing = [number for number in batches if number not in summaries]
    # The turns of all batches up to one that is finished: the others are finished too, or at work.
    begun = dict(zip(missing, accumulate(count_turns(batches[number]) for number in missing), strict=True))
    before = sum(count_turns(batches[number]) for number in summaries)
    total = before + max(begun.values(), default=0)
    made: dict[int, Summary] = {}
    # smoothing=0 shows the mean rate of the whole run: the longest prompts come first, so it only gets faster.
    with tqdm(
        total=total, initial=before, unit=" answers", desc="answering", smoothing=0, disable=not processes.is_main
    ) as bar:
        dealt = ((number, batches[number]) for number in processes.deal(missing))
        for number, responses in answers.answer_batches(base, dealt):
            lines = join_turns(responses)
            file = part_files.part_path(out, number)
            part_files.write_part(file, lines)
            made[number] = summarise(file, lines)
            bar.update(max(0, before + begun[number] - bar.n))
    new_owners, new_summaries = gather(made, processes)
    exchange_parts(out, owners | new_owners, processes)
    return summaries | new_summaries


def count_turns(batch: Sequence[Sample]) -> int:
    return sum(len(sample.prompt.turns) for sample in batch)


def gather(mine: Mapping[int, Summary], processes: Distributed) -> tuple[dict[int, int], dict[int, Summary]]:
    """Return the process that has each part, and the summaries, of all processes."""
    owners: dict[int, int] = {}
    summaries: dict[int, Summary] = {}
    for rank, theirs in enumerate(processes.all_gather_object(mine)):
        owners |= dict.fromkeys(theirs, rank)
        summaries |= theirs
    return owners, summaries


def exchange_parts(out: Path, owners: Mapping[int, int], processes: Distributed) -> None:
    """Write the parts that are on the disks of other machines only. owners: the process that has each part."""
    own = [number for number in owners if processes.is_local_main and not part_files.part_path(out, number).is_file()]
    for number in sorted(set().union(*processes.all_gather_object(own))):
        file = part_files.part_path(out, number)
        content = processes.from_process(owners[number], file.read_text)
        if number in own:
            write_text(file, content)
