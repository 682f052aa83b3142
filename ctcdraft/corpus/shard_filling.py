"""Filling of a shard folder by all processes of a job.

Each missing shard is computed by one process. Where the processes have several disks it is copied to the others, so
which rows a process reads, and hence the run, does not depend on where they are stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.corpus.shard_folder import ShardFolder, locked
from ctcdraft.distributed import Distributed, lost_process
from ctcdraft.io import atomic_write

SAMPLED_SHARDS = 4  # of a complete folder, by each process
COPIED_BYTES = 64 * 2**20  # at a time


@dataclass(frozen=True)
class Filling:
    """Fills `folder`, which may be on one disk of all processes or on several.

    Args:
        compute: returns the tensors of a shard.
        size, limit: bytes of the filled folder; of it and those beside it.
    """

    folder: ShardFolder
    compute: Callable[[int], Mapping[str, Tensor]]
    size: int
    limit: int
    processes: Distributed

    def __call__(self) -> None:
        self.processes.in_turn(self.folder.hold, True)
        with contextlib.ExitStack() as stack:
            if self.processes.world_size == 1:  # jobs of a sweep, which would compute the same shards
                with contextlib.suppress(OSError):  # a disk without locks
                    stack.enter_context(locked(self.folder.path / "filling.lock", fcntl.LOCK_EX))
            disks = self.find_disks()
            self.check(disks)
            self.fill(disks)

    def find_disks(self) -> list[int]:
        """Return for each process the first process that has the same folder."""
        probes = self.processes.all_gather_object(f"{uuid4().hex}.partial")
        own = self.folder.path / probes[self.processes.rank]
        self.processes.in_turn(own.touch, True)
        seen = next(rank for rank, name in enumerate(probes) if (self.folder.path / name).exists())
        disks = self.processes.all_gather_object(seen)
        own.unlink()
        return disks

    def check(self, disks: list[int]) -> None:
        """Remove damaged shards: of a complete folder a sample is read, and all others only if one is damaged."""
        rank = self.processes.rank
        peers = [other for other, disk in enumerate(disks) if disk == disks[rank]]
        own = [*self.folder.present()][peers.index(rank) :: len(peers)]
        # Gathered, so that no process removes a shard before the others have looked.
        complete = self.processes.all_gather_object(self.folder.is_complete())[rank]
        sample = random.Random().sample(own, min(SAMPLED_SHARDS, len(own))) if complete else own
        damaged = self.processes.all_gather_object(self.folder.remove_damaged(sample))
        if complete and any(damaged[peer] for peer in peers):
            self.folder.remove_damaged(number for number in own if number not in sample)

    def fill(self, disks: list[int]) -> None:
        """Compute what no disk has, each shard once, and copy what some disks have to the others."""
        rank, world, shards = self.processes.rank, self.processes.world_size, set(range(len(self.folder.files)))
        leads, leading = sorted(set(disks)), disks[rank] == rank
        held = dict.fromkeys(leads, shards)
        for disk, seen in zip(disks, self.processes.all_gather_object({*self.folder.present()}), strict=True):
            held[disk] = held[disk] & seen  # what one of its processes has just removed is not there
        if any(held[lead] != shards for lead in leads):
            self.processes.in_turn(lambda: self.folder.make_room(self.size, self.limit), leading)
        somewhere = set().union(*held.values())
        # gloo also where processes compute on GPUs: files are read into host memory.
        group = torch.distributed.new_group(backend="gloo") if len(leads) > 1 else None
        for lead in leads:
            for number in sorted(somewhere - held[lead]):
                self.copy(number, next(one for one in leads if number in held[one]), lead, group)
        missing = sorted(shards - somewhere)
        disable = None if self.processes.is_main else True
        with tqdm(total=len(missing), desc="storing states", unit=" shards", disable=disable) as bar:
            # In rounds, so that a process that has ended is noticed after one shard.
            for start in range(0, len(missing), world):
                numbers = missing[start : start + world]
                self.processes.in_turn(partial(self.write, numbers[rank:]), rank < len(numbers))
                for source, number in enumerate(numbers):
                    for lead in leads:
                        if lead != disks[source]:
                            self.copy(number, source, lead, group)
                bar.update(len(numbers))
        self.processes.in_turn(self.folder.mark_complete, leading and not self.folder.is_complete())

    def write(self, numbers: Sequence[int]) -> None:
        """Compute the first of these shards, and write it."""
        self.folder.write(numbers[0], self.compute(numbers[0]))

    def copy(self, number: int, source: int, target: int, group: Any) -> None:
        """Copy a shard from the disk of one process to that of another; all others return at once."""
        file = self.folder.files[number]
        if self.processes.rank == source:
            send_file(file, target, group)
        elif self.processes.rank == target:
            atomic_write(file, lambda draft: receive_file(draft, source, group))


def send_file(file: Path, target: int, group: Any) -> None:
    """Send a file to another process, which calls `receive_file`."""
    with lost_process(), file.open("rb") as stream:
        torch.distributed.send(torch.tensor([file.stat().st_size]), target, group)
        while chunk := stream.read(COPIED_BYTES):
            torch.distributed.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group)


def receive_file(file: Path, source: int, group: Any) -> None:
    left = torch.zeros(1, dtype=torch.long)
    with lost_process(), file.open("wb") as stream:
        torch.distributed.recv(left, source, group)
        while left > 0:
            chunk = torch.empty(min(int(left), COPIED_BYTES), dtype=torch.uint8)
            torch.distributed.recv(chunk, source, group)
            stream.write(chunk.numpy().tobytes())
            left -= len(chunk)
