"""Batches dealt to processes, here threads: each is generated once, every machine's disk holds the same corpus."""

from __future__ import annotations

import pytest
from thread_processes import run_threads
from tiny_models import random_base

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.errors import InputError

PROMPTS = [Prompt(f"p{n}", "test", ("turn!" * (1 + n % 5),) * (1 + n % 3), None) for n in range(11)]
GENERATED: list[int] = []  # the lengths of the batches that were generated


class Counting(TransformersAnswers):
    def generate(self, base, requests):
        GENERATED.append(len(requests))
        return super().generate(base, requests)


ANSWERS = Counting(2, 6, 0.0, 0, 1)


def prepare_together(base, folders, local_ranks):
    """Run `prepare` in one thread per folder; return the manifests, or raise what a thread raises."""
    GENERATED.clear()

    def work(process):
        corpus, folder = Corpus.from_prompts(PROMPTS), folders[process.rank]
        return prepared.prepare(base, corpus, ANSWERS, folder, {}, processes=process)

    return run_threads(work, local_ranks)


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
