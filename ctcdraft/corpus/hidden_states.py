"""The base's states of the corpus: computed as they are needed, or stored once and read. It knows answers, no windows.

Two sources with one question: `kept(packs)`, the states of rows that hold one answer or several. What is stored is
found by its content (the base, its taps, the tokens, the precision), so runs that share a corpus share the store and a
changed base never meets old states.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.corpus.state_precision import PRECISIONS, Precision
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.io import atomic_write
from ctcdraft.models.base_model import BaseLM


class HiddenStates(Protocol):
    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor | None:
        """States_BLD of rows, each of the answers of a pack behind one another, padded on the right; on the base's
        device. None where nothing is kept and the base is to `read` them: files can be read beside a step that
        runs, a base on the same device cannot."""
        ...

    def precompute(self) -> None:
        """Do beforehand what can be done beforehand."""
        ...

    def describe(self) -> str:
        """What they cost, in words."""
        ...


class OnlineHiddenStates:
    """The base reads every batch anew: no disk, and the base's forward pass in every step."""

    def __init__(self, base: BaseLM, tokens: Sequence[Tensor]) -> None:
        pass

    def stored_states(self, packs: Sequence[Sequence[int]]) -> None:
        return None

    def precompute(self) -> None:
        pass

    def describe(self) -> str:
        return "computed as they are needed, 0 bytes on disk"


class OfflineHiddenStates:
    """Shards of `rows` answers in `path`, written when first needed; at most `limit_gb` of them are kept.

    Every tensor is checked against its shard's checksum when a run first opens it; a damaged shard is named and
    written again. Where room runs out the shard used longest ago goes first, whichever run wrote it.
    """

    def __init__(
        self, base: BaseLM, tokens: Sequence[Tensor], path: str, precision: str, rows: int, limit_gb: float
    ) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"states.precision={precision} is impossible; it is one of {', '.join(PRECISIONS)}")
        check_int(rows, "states.rows")
        if not check_float(limit_gb, "states.limit_gb") > 0:
            raise InputError(f"states.limit_gb={limit_gb} holds no state; it lies above 0")
        self.base = base
        self.tokens = tokens
        self.folder = Path(path)
        self.precision: Precision = PRECISIONS[precision]
        self.limit = int(limit_gb * 1e9)
        # Rows of like length side by side: a shard is one batch for the base, with little padding.
        order = sorted(range(len(tokens)), key=lambda index: (len(tokens[index]), index))
        self.shard_rows = [order[start : start + rows] for start in range(0, len(order), rows)]
        self.shard_and_index_of = {
            index: (shard, place)
            for shard, indices in enumerate(self.shard_rows)
            for place, index in enumerate(indices)
        }
        made_of = json.dumps([base.fingerprint(), str(base.dtype), precision], sort_keys=True).encode()
        self.files = [
            self.folder / f"{content_key(made_of, self._shard_tokens(shard))}.safetensors" for shard in self.shard_rows
        ]
        self.intact_files: set[Path] = set()

    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor:
        states = [torch.cat([self.row(index) for index in pack]).to(self.base.device) for pack in packs]
        return pad_sequence(states, batch_first=True)

    def row(self, index: int) -> Tensor:
        """States_LD of one row, in float32."""
        shard, place = self.shard_and_index_of[index]
        file = self.files[shard]
        if file not in self.intact_files or not file.exists():
            self._ensure_shard(shard)
        with safe_open(file, framework="pt") as stored:
            return self.precision.unpack({part: stored.get_tensor(f"{place}.{part}") for part in self.precision.parts})

    def precompute(self) -> None:
        """Store whatever is not there yet, so that no step waits for it."""
        for shard in tqdm(range(len(self.shard_rows)), desc="storing states", unit=" shards", disable=None):
            if self.files[shard] not in self.intact_files:
                self._ensure_shard(shard)

    def describe(self) -> str:
        stored_shards = sum(file.exists() for file in self.files)
        size = sum(map(len, self.tokens)) * self.precision.bytes_per_token(self.base.width * len(self.base.taps))
        return (
            f"stored in {self.folder} as {self.precision.name}, {size / 1e6:,.1f} MB "
            f"({stored_shards:,} of {len(self.files):,} shards are there; limit {self.limit / 1e9:,.1f} GB)"
        )

    def _shard_tokens(self, shard: Sequence[int]) -> list[Tensor]:
        return [self.tokens[index] for index in shard]

    def _ensure_shard(self, shard: int) -> None:
        file = self.files[shard]
        if file.exists() and not is_intact(file):
            print(f"{file} is damaged and is written again")
            file.unlink()
        if not file.exists():
            self._write(shard)
        file.touch()  # used now: the last to be evicted
        self.intact_files.add(file)

    def _write(self, shard: int) -> None:
        rows = self._shard_tokens(self.shard_rows[shard])
        with torch.autocast(self.base.device.type, enabled=False):  # one store, however a run multiplies matrices
            states_BLD = compute_hidden_states(self.base, pad_sequence(rows, batch_first=True))
        tensors = {
            f"{place}.{part}": value.contiguous().cpu()
            for place, (tokens_L, states_LD) in enumerate(zip(rows, states_BLD, strict=True))
            for part, value in self.precision.pack(states_LD[: len(tokens_L)]).items()
        }
        self._evict(sum(value.nbytes for value in tensors.values()))
        atomic_write(
            self.files[shard], lambda draft: save_file(tensors, draft, {"checksum": tensors_checksum(tensors)})
        )

    def _evict(self, size: int) -> None:
        if size > self.limit:
            raise InputError(f"states.limit_gb={self.limit / 1e9} holds not even one shard of {size / 1e9:.2g} GB")
        stored_files = sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        stored_bytes = sum(file.stat().st_size for file in stored_files)
        for file in stored_files:
            if stored_bytes + size <= self.limit:
                return
            stored_bytes -= file.stat().st_size
            self.intact_files.discard(file)
            with contextlib.suppress(FileNotFoundError):  # another run was faster
                file.unlink()


@torch.no_grad()
def compute_hidden_states(base: BaseLM, tokens_BL: Tensor, places_BL: Tensor | None = None) -> Tensor:
    """States_BLD of right-padded rows, read now; places_BL where a row may hold several texts."""
    tokens_BL = tokens_BL.to(base.device)
    return base.hidden_states(tokens_BL, torch.ones_like(tokens_BL), places_BL)


def content_key(source_weights: bytes, tokens: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(source_weights)
    for tokens_L in tokens:
        digest.update(tokens_L.to(torch.int32).numpy().tobytes() + b"\n")
    return digest.hexdigest()[:24]


def tensors_checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_intact(file: Path) -> bool:
    """Whether a shard can be read and holds what was written."""
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            return stored.metadata()["checksum"] == tensors_checksum(tensors)
    except (OSError, SafetensorError, KeyError, TypeError):
        return False


HiddenStatesFactory = Callable[[BaseLM, Sequence[Tensor]], HiddenStates]
