"""Hidden states of the corpus: computed in every step (online), or stored once and read (offline).

A stored shard is named by a hash of its content (the base model's fingerprint with its auxiliary hidden-state layers,
the dtype, the tokens, the precision). So runs that share a corpus share the store, and a changed base model never meets
old hidden states.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write
from ctcdraft.models.base_model import BaseLM


class OnlineHiddenStates:
    """One forward pass of the base model in every step, and nothing on disk."""

    def __init__(self, base: BaseLM, tokens: Sequence[Tensor]) -> None:
        pass

    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor | None:
        # The step computes them: a prefetching thread, which calls this, must not run the base model.
        return None

    def precompute(self) -> None:
        pass

    def describe(self) -> str:
        return "computed as they are needed, 0 bytes on disk"


@dataclass(frozen=True)
class Precision:
    """A dtype in which hidden states are stored: floating-point, or int8 with one float32 scale per token.

    int8 takes half the bytes of bfloat16. A value is off by at most half its token's scale (the token's largest value /
    127), which is large because a few dimensions of hidden states are many times larger than the rest.
    """

    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        return not self.dtype.is_floating_point

    def pack(self, states_LD: Tensor) -> dict[str, Tensor]:
        if not self.scaled:
            return {"states": states_LD.to(self.dtype)}
        states_LD = states_LD.float()
        scales_L1 = (states_LD.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return {"states": (states_LD / scales_L1).round().to(self.dtype), "scales": scales_L1}

    def unpack(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return states_LD in float32 from read(name of a part)."""
        states_LD = read("states").float()
        return states_LD * read("scales") if self.scaled else states_LD

    def bytes_per_token(self, width: int) -> int:
        return width * self.dtype.itemsize + 4 * self.scaled


PRECISIONS = {name: Precision(getattr(torch, name)) for name in ("float32", "bfloat16", "int8")}


class OfflineHiddenStates:
    """Shards of `rows` responses in `path`, written when first needed, at most `limit_gb` of them in total.

    A damaged shard is reported and written again. At the limit the least recently used shard is evicted, whichever run
    wrote it.
    """

    def __init__(
        self, base: BaseLM, tokens: Sequence[Tensor], path: str, precision: str, rows: int, limit_gb: float
    ) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"hidden_states.precision must be one of {', '.join(PRECISIONS)}, got {precision}")
        self.base = base
        self.tokens = tokens
        self.folder = Path(path)
        self.precision = PRECISIONS[precision]
        self.limit = int(limit_gb * 1e9)
        # Sorted by length: a shard is one batch of a forward pass, and needs little padding.
        order = sorted(range(len(tokens)), key=lambda index: (len(tokens[index]), index))
        self.shard_rows = [order[start : start + rows] for start in range(0, len(order), rows)]
        self.location = {index: (n, k) for n, indices in enumerate(self.shard_rows) for k, index in enumerate(indices)}
        source = json.dumps([base.fingerprint(), str(base.dtype), precision], sort_keys=True).encode()
        keys = [content_key(source, [tokens[index] for index in shard]) for shard in self.shard_rows]
        self.files = [self.folder / f"{key}.safetensors" for key in keys]
        self.intact_files: set[Path] = set()  # those whose checksum this run has compared

    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor:
        """Return states_BLD of rows of packed sequences, right-padded, on the base model's device."""
        states = [torch.cat([self.row(index) for index in pack]).to(self.base.device) for pack in packs]
        return pad_sequence(states, batch_first=True)

    def row(self, index: int) -> Tensor:
        """Return states_LD of one row, in float32."""
        shard, position = self.location[index]
        file = self.files[shard]
        if file not in self.intact_files or not file.exists():
            self._ensure_shard(shard)
        with safe_open(file, framework="pt") as stored:
            return self.precision.unpack(lambda part: stored.get_tensor(f"{position}.{part}"))

    def precompute(self) -> None:
        """Store all hidden states before the first step."""
        for shard in tqdm(range(len(self.shard_rows)), desc="storing states", unit=" shards", disable=None):
            if self.files[shard] not in self.intact_files:
                self._ensure_shard(shard)

    def describe(self) -> str:
        """Return where they are and what they cost, for the plan."""
        stored_shards = sum(file.exists() for file in self.files)
        size = sum(map(len, self.tokens)) * self.precision.bytes_per_token(self.base.width * len(self.base.aux_layers))
        return (
            f"stored in {self.folder} as {str(self.precision.dtype).removeprefix('torch.')}, {size / 1e6:,.1f} MB "
            f"({stored_shards:,} of {len(self.files):,} shards are there; limit {self.limit / 1e9:,.1f} GB)"
        )

    def _ensure_shard(self, shard: int) -> None:
        file = self.files[shard]
        if file.exists() and not is_intact(file):
            print(f"{file} is damaged and is written again")
            file.unlink()
        if not file.exists():
            self._write(shard)
        file.touch()  # eviction goes by the modification time
        self.intact_files.add(file)

    def _write(self, shard: int) -> None:
        rows = [self.tokens[index] for index in self.shard_rows[shard]]
        with torch.autocast(self.base.device.type, enabled=False):  # runs with and without autocast share the store
            states_BLD = compute_hidden_states(self.base, pad_sequence(rows, batch_first=True))
        tensors = {
            f"{position}.{part}": value.contiguous().cpu()
            for position, (tokens_L, states_LD) in enumerate(zip(rows, states_BLD, strict=True))
            for part, value in self.precision.pack(states_LD[: len(tokens_L)]).items()
        }
        self._evict(sum(value.nbytes for value in tensors.values()))
        metadata = {"checksum": tensors_checksum(tensors)}
        atomic_write(self.files[shard], lambda draft: save_file(tensors, draft, metadata))

    def _evict(self, size: int) -> None:
        """Remove the least recently used shards until `size` more bytes fit."""
        if size > self.limit:
            raise InputError(
                f"hidden_states.limit_gb={self.limit / 1e9} is not enough for one shard of {size / 1e9:.2g} GB; "
                "raise it, or lower hidden_states.rows"
            )
        stored_files = sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        stored_bytes = sum(file.stat().st_size for file in stored_files)
        for file in stored_files:
            if stored_bytes + size <= self.limit:
                return
            stored_bytes -= file.stat().st_size
            self.intact_files.discard(file)
            with contextlib.suppress(FileNotFoundError):  # another run has removed it first
                file.unlink()


@torch.no_grad()
def compute_hidden_states(base: BaseLM, tokens_BL: Tensor, position_ids_BL: Tensor | None = None) -> Tensor:
    """Return states_BLD of right-padded rows by a forward pass; position_ids_BL for packed sequences."""
    tokens_BL = tokens_BL.to(base.device)
    return base.hidden_states(tokens_BL, torch.ones_like(tokens_BL), position_ids_BL)


def content_key(source: bytes, tokens: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(source)
    for tokens_L in tokens:
        digest.update(tokens_L.to(torch.int32).numpy().tobytes() + b"\n")
    return digest.hexdigest()[:24]


def tensors_checksum(tensors: dict[str, Tensor]) -> str:
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


HiddenStates = OnlineHiddenStates | OfflineHiddenStates
HiddenStatesFactory = Callable[[BaseLM, Sequence[Tensor]], HiddenStates]
