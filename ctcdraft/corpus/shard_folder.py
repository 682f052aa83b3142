"""Folder with the stored hidden states of one corpus: its shards, its marker, its lock, and the room that it takes.

`complete.json`, with the size of each shard, marks a folder that is filled. A run holds a shared lock on the folder
that it reads, so that no other run removes it to make room for its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ctcdraft.errors import InputError
from ctcdraft.hardware import format_bytes
from ctcdraft.io import atomic_write, write_text

NAME = re.compile("[0-9a-f]{24}")  # nothing else is removed: hidden_states.path= may hold other files
STALE_SECONDS = 3600  # age of a temporary file whose process was killed


class ShardFolder:
    """Files of one corpus for one base model and precision. names: of the shards."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.files = [path / f"{name}.safetensors" for name in names]
        self.marker, self.lock = path / "complete.json", path / "in_use.lock"
        self.release: Callable[[], object] | None = None  # ends the lock; called with the end of this object

    def hold(self) -> None:
        """Create the folder, and mark it as in use while this object lives."""
        while self.release is None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                sentence = f"hidden_states.path={self.path.parent} cannot be written ({error.strerror})"
                raise InputError(f"{sentence}; choose another hidden_states.path=") from error
            with contextlib.suppress(OSError):  # a disk without locks: `remove` fails there too, and removes nothing
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if self.lock.exists() and os.path.samestat(os.fstat(descriptor), self.lock.stat()):
                self.release = weakref.finalize(self, os.close, descriptor)
            else:
                os.close(descriptor)  # another run has removed the folder meanwhile
        os.utime(self.lock)  # what was used longest ago is removed first

    def present(self) -> dict[int, int]:
        """Return the bytes of the shards that are here, by number."""
        sizes = file_sizes(self.path)
        return {number: sizes[file.name] for number, file in enumerate(self.files) if file.name in sizes}

    def is_complete(self) -> bool:
        """Return whether the marker is here and all shards have the sizes in it."""
        try:
            return json.loads(self.marker.read_text()) == [*self.present().values()]
        except (OSError, ValueError):
            return False

    def mark_complete(self) -> None:
        write_text(self.marker, json.dumps([*self.present().values()]))

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        metadata = {"checksum": tensors_checksum(tensors)}
        atomic_write(self.files[number], lambda draft: save_file(dict(tensors), draft, metadata))

    def remove_damaged(self, numbers: Iterable[int]) -> bool:
        """Remove the shards whose checksum is wrong; return whether there were any."""
        damaged = [self.files[number] for number in numbers if not is_intact(self.files[number])]
        for file in damaged:
            print(f"{file} is damaged and is written again")
            self.marker.unlink(missing_ok=True)
            file.unlink()
        return bool(damaged)

    def make_room(self, size: int, limit: int) -> None:
        """Remove the folders used longest ago until one of `size` bytes fits; raise InputError where it cannot.

        size: of this folder when it is filled. limit: bytes of this folder and those beside it.
        """
        for file in self.path.glob("*.partial"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > STALE_SECONDS:
                    file.unlink()
        # A file here is a shard of an older version, which had no folders.
        others = [one for one in self.path.parent.iterdir() if NAME.fullmatch(one.stem) and one != self.path]
        sizes = {one: sum(file_sizes(one).values()) for one in others}
        used = sum(sizes.values())
        for other in sorted(others, key=last_use):
            if used + size <= limit:
                break
            used -= sizes[other] if remove(other) else 0
        missing, free = size - sum(self.present().values()), shutil.disk_usage(self.path).free
        if used + size > limit or missing > free:
            raise InputError(
                f"{format_bytes(missing)} of hidden states do not fit into {self.path.parent}: {format_bytes(used)} of "
                f"hidden_states.limit_gb={limit / 1e9:g} are used by other runs, {format_bytes(free)} of the disk are "
                "free; wait for these runs, make room, or give hidden_states=online or another hidden_states.path="
            )


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of the files in a folder, or of a single file, by name; other runs may be removing them."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError):
        for file in [folder] if folder.is_file() else folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes[file.name] = file.stat().st_size
    return sizes


def last_use(folder: Path) -> float:
    for path in (folder / "in_use.lock", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0  # another run has removed it meanwhile


def remove(folder: Path) -> bool:
    """Remove a folder of shards, or a shard of an older version; return False if a run is using it."""
    if folder.is_file():
        folder.unlink(missing_ok=True)
        return True
    try:
        with locked(folder / "in_use.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for file in folder.iterdir():  # the lock too, while locked: a run that waits for it sees that it is gone
                file.unlink()
            folder.rmdir()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(file: Path, operation: int) -> Iterator[None]:
    """Hold a lock of the operating system, which ends with this process however that ends."""
    with file.open("ab") as stream:
        fcntl.flock(stream, operation)
        yield


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        # As bytes, because numpy has no bfloat16.
        digest.update(name.encode() + tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_intact(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            return stored.metadata()["checksum"] == tensors_checksum(tensors)
    except (OSError, SafetensorError, KeyError, TypeError):
        return False
