"""Batches dealt to processes, here threads: each is generated once, every machine's disk holds the same corpus."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from tiny_models import random_base

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.distributed import Distributed
from ctcdraft.errors import InputError

PROMPTS = [Prompt(f"p{n}", "test", ("turn!" * (1 + n % 5),) * (1 + n % 3), None) for n in range(11)]
GENERATED: list[int] = []  # the lengths of the batches that were generated


class Counting(TransformersAnswers):
    def generate(self, base, requests):
        GENERATED.append(len(requests))
        return super().generate(base, requests)


ANSWERS = Counting(2, 6, 0.0, 0, 1)


class SharedIterator:
    def __init__(self, items) -> None:
        self.items, self.lock = iter(items), threading.Lock()

    def __iter__(self):
        return self

    def __next__(self):
        with self.lock:
            return next(self.items)


@dataclass
class Job:
    values: list
    barrier: threading.Barrier


@dataclass(frozen=True)
class ThreadProcess(Distributed):
    """A thread in place of a process; `local_rank` numbers those of a machine."""

    job: Job = field(default=None)  # type: ignore[assignment]
    local_rank: int = 0

    @property
    def is_local_main(self):
        return self.local_rank == 0

    def all_gather_object(self, value, group=None):
        self.job.values[self.rank] = value
        self.job.barrier.wait(60)
        gathered = [*self.job.values]
        self.job.barrier.wait(60)
        return gathered

    def from_process(self, rank, work):
        return self.all_gather_object(self.in_turn(work, self.rank == rank))[rank]

    def deal(self, items):
        return self.from_process(0, lambda: SharedIterator(items))


def prepare_together(base, folders, local_ranks):
    """Run `prepare` in one thread per folder; return the manifests, or raise what a thread raises."""
    GENERATED.clear()
    job = Job([None] * len(folders), threading.Barrier(len(folders)))

    def work(rank: int):
        process = ThreadProcess(rank, len(folders), job, local_ranks[rank])
        return prepared.prepare(base, Corpus.from_prompts(PROMPTS), ANSWERS, folders[rank], {}, processes=process)

    with ThreadPoolExecutor(len(folders)) as pool:
        return [one.result() for one in [pool.submit(work, rank) for rank in range(len(folders))]]


def content(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def base():
    return random_base()


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The files of one process, and the number of batches that it generated."""
    folder = tmp_path_factory.mktemp("alone")
    prepare_together(base, [folder], [0])
    return content(folder), len(GENERATED)


@pytest.mark.parametrize(
    ("disks", "local_ranks"),
    [("aa", [0, 1]), ("aaaa", [0, 1, 2, 3]), ("aaaa", [0, 1, 0, 1]), ("aabb", [0, 1, 0, 1]), ("abc", [0, 0, 0])],
    ids=["two", "four", "two machines, one disk", "two machines, two disks", "three machines"],
)
def test_processes_together_generate_each_batch_once(base, alone, tmp_path, disks, local_ranks):
    folders = [tmp_path / disk for disk in disks]
    manifests = prepare_together(base, folders, local_ranks)
    assert len(GENERATED) == alone[1]
    assert all(manifest == manifests[0] and manifest["complete"] for manifest in manifests)
    assert all(content(folder) == alone[0] for folder in folders)


def test_what_one_machine_has_finished_is_not_generated_again(base, alone, tmp_path):
    """The disks hold different parts, as after a kill; one of them is damaged."""
    folders = [tmp_path / disk for disk in "aabb"]
    prepare_together(base, folders, [0, 1, 0, 1])
    for number in range(len(part_files.list_parts(folders[0]))):
        part_files.part_path(folders[0] if number % 2 else folders[2], number).unlink()
    for folder in folders[::2]:
        (folder / "manifest.json").unlink()
        part_files.write_manifest(folder, prepared.initial_manifest(base, Corpus.from_prompts(PROMPTS), ANSWERS))
    part_files.part_path(folders[0], 0).write_text("damaged")
    prepare_together(base, folders, [0, 1, 0, 1])
    turns = len(part_files.read_part(part_files.part_path(folders[0], 0))) // 2
    assert len(GENERATED) == turns
    for folder in folders:
        files = content(folder)
        assert {name: files[name] for name in files if name.startswith("part")} == {
            name: alone[0][name] for name in alone[0] if name.startswith("part")
        }


def test_other_settings_on_the_disk_of_one_machine_are_refused_everywhere(base, tmp_path):
    folders = [tmp_path / disk for disk in "ab"]
    other = prepared.initial_manifest(base, Corpus.from_prompts(PROMPTS), ANSWERS)
    other["answers"]["max_new_tokens"] = 7
    folders[1].mkdir()
    part_files.write_manifest(folders[1], other)
    with pytest.raises(InputError, match=r"was made with answers\.max_new_tokens=7 \(now 6\)"):
        prepare_together(base, folders, [0, 0])
    assert not GENERATED
