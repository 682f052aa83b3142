"""Several processes store hidden states: each shard is computed once, with one disk and with two."""

from __future__ import annotations

import json
import re
from itertools import chain

import pytest
from test_two_processes import run_job


def shards_in(folder):
    return {file.name for file in folder.glob("states/*/*.safetensors")}


@pytest.mark.parametrize(
    "disks",
    [[0, 0], [0, 1], *(pytest.param(disks, marks=pytest.mark.slow) for disks in ([0] * 4, [0, 0, 1, 1]))],
    ids=["1 disk of 2", "2 disks of 1", "1 disk of 4", "2 disks of 2"],
)
def test_each_shard_is_computed_once(tmp_path, disks):
    """After a kill and a loss only what is lacking is computed; of a complete store a sample is compared."""
    folders = [tmp_path / str(disk) for disk in disks]
    for folder in {*folders}:
        folder.mkdir()
    done = run_job(folders, fills=[{"victim": 1}])
    assert done[0][0] == 1
    assert re.search("another process of this job has ended", done[0][1]), done[0][1]
    left = len(shards_in(folders[0]) | shards_in(folders[-1]))
    assert 2 <= left < 10

    done = run_job(folders, fills=[{}, {}, {"remove": 3}])
    assert [status for status, _ in done] == [0] * len(disks), done
    assert len(shards_in(folders[0])) == 10
    assert shards_in(folders[0]) == shards_in(folders[-1])
    lines = [(folder / f"stored-{rank}.jsonl").read_text().splitlines() for rank, folder in enumerate(folders)]
    resumed, again, repaired = ([json.loads(line) for line in fill] for fill in zip(*lines, strict=True))
    computed = [shards for shards, _ in resumed]
    assert len({*chain(*computed)}) == sum(map(len, computed)) == 10 - left
    assert max(map(len, computed)) - min(map(len, computed)) <= 1
    assert all(shards == [] and 0 < compared <= 4 for shards, compared in again)
    # With two disks the lost shard is copied back.
    assert list(chain(*(shards for shards, _ in repaired))) == ([3] if len({*disks}) == 1 else [])
