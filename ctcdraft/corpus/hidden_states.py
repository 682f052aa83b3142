"""Hidden states of the corpus: computed in every step (online), or stored once and read (offline).

Stored shards, and their folder, are named by a hash of their content (the base model's fingerprint with its auxiliary
hidden-state layers, the dtype, the tokens, the precision). So runs that share a corpus share the store, and a changed
base model never meets old hidden states. A store above its limit is refused, so that none is removed and computed again
within a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.corpus.shard_filling import Filling
from ctcdraft.corpus.shard_folder import ShardFolder
from ctcdraft.distributed import ALONE, Distributed
from ctcdraft.errors import InputError
from ctcdraft.hardware import format_bytes, format_hours
from ctcdraft.models.base_model import BaseLM


class OnlineHiddenStates:
    """One forward pass of the base model in every step, and nothing on disk."""

    on_disk = False

    def __init__(self, base: BaseLM, tokens: Sequence[Tensor]) -> None:
        pass

    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor | None:
        # The step computes them: a prefetching thread, which calls this, must not run the base model.
        return None

    def precompute(self, processes: Distributed = ALONE) -> None:
        pass

    def describe(self, tokens_per_second: float | None = None) -> str:
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
    """Shards of `rows` conversations in a folder below `path`, computed before the first step and then only read.

    Until they are, `stored_states` returns None, and a step computes its own.
    """

    on_disk = True

    def __init__(
        self, base: BaseLM, tokens: Sequence[Tensor], path: str, precision: str, rows: int, limit_gb: float
    ) -> None:
        self.base = base
        self.tokens = tokens
        self.limit = int(limit_gb * 1e9)
        lengths = [len(tokens_L) for tokens_L in tokens]
        self.token_count = sum(lengths)
        refuse_over_limit(self.token_count, len(tokens), base, precision, limit_gb)
        self.precision = PRECISIONS[precision]
        # Sorted by length: a shard is one batch of a forward pass, and needs little padding.
        order = sorted(range(len(tokens)), key=lambda index: (lengths[index], index))
        self.shard_rows = [order[start : start + rows] for start in range(0, len(order), rows)]
        self.location = {index: (n, k) for n, indices in enumerate(self.shard_rows) for k, index in enumerate(indices)}
        identity = base.fingerprint()
        # The names of older folders do not depend on the rotary frequencies.
        older = {key: value for key, value in identity.items() if key != "rotary_frequencies"}
        self.folder = self._folder(Path(path), [older, str(base.dtype), precision])
        if older != identity and not self.folder.path.exists():
            self.folder = self._folder(Path(path), [identity, str(base.dtype), precision])
        self.filled = False

    def _folder(self, path: Path, of: list[Any]) -> ShardFolder:
        source = json.dumps(of, sort_keys=True).encode()
        keys = [content_key(source, [self.tokens[index] for index in shard]) for shard in self.shard_rows]
        return ShardFolder(path / content_key("".join(keys).encode(), []), keys)

    @property
    def bytes_per_token(self) -> int:
        return self.precision.bytes_per_token(self.base.width * len(self.base.aux_layers))

    def stored_states(self, packs: Sequence[Sequence[int]]) -> Tensor | None:
        """Return states_BLD of rows of packed sequences, right-padded, on the base model's device."""
        if not self.filled:
            return None
        states = [torch.cat([self.row(index) for index in pack]).to(self.base.device) for pack in packs]
        return pad_sequence(states, batch_first=True)

    def row(self, index: int) -> Tensor:
        """Return states_LD of one row, in float32."""
        shard, position = self.location[index]
        file = self.folder.files[shard]
        try:
            with safe_open(file, framework="pt") as stored:
                return self.precision.unpack(lambda part: stored.get_tensor(f"{position}.{part}"))
        except (OSError, SafetensorError) as error:
            sentence = f"{file} was removed or damaged after this run had begun ({error})"
            raise InputError(f"{sentence}; resume= the run, which stores it again") from error

    def precompute(self, processes: Distributed = ALONE) -> None:
        """Store all hidden states that are not stored yet; the processes share the work."""
        Filling(self.folder, self.compute_shard, self.token_count * self.bytes_per_token, self.limit, processes)()
        self.filled = True

    def describe(self, tokens_per_second: float | None = None) -> str:
        """Return where they are and what they cost, for the plan. tokens_per_second: of all processes together."""
        there, shards, size = len(self.folder.present()), len(self.shard_rows), self.token_count * self.bytes_per_token
        hours = 0.0
        if tokens_per_second is not None:
            hours = (1 - there / shards) * self.token_count / tokens_per_second / 3600
        return (
            f"stored in {self.folder.path} as {str(self.precision.dtype).removeprefix('torch.')}, {format_bytes(size)} "
            f"of at most {format_bytes(self.limit)}; {there:,} of {shards:,} shards are there"
            + (f", the others take about {format_hours(hours)}" if hours else "")
        )

    def compute_shard(self, shard: int) -> dict[str, Tensor]:
        rows = [self.tokens[index] for index in self.shard_rows[shard]]
        with torch.autocast(self.base.device.type, enabled=False):  # runs with and without autocast share the store
            states_BLD = compute_hidden_states(self.base, pad_sequence(rows, batch_first=True))
        return {
            f"{position}.{part}": value.contiguous().cpu()
            for position, (tokens_L, states_LD) in enumerate(zip(rows, states_BLD, strict=True))
            for part, value in self.precision.pack(states_LD[: len(tokens_L)]).items()
        }


def refuse_over_limit(
    tokens: int, rows: int, base: BaseLM, precision: str, limit_gb: float, estimate: str = ""
) -> None:
    """Raise InputError where stored hidden states of so many tokens are larger than the limit.

    estimate: "at least ", where the responses do not exist yet.
    """
    if precision not in PRECISIONS:
        raise InputError(f"hidden_states.precision must be one of {', '.join(PRECISIONS)}, got {precision}")
    layers = len(base.aux_layers)

    def size(precision: str = precision, layers: int = layers) -> float:
        return tokens * PRECISIONS[precision].bytes_per_token(base.width * layers)

    if size() <= limit_gb * 1e9:
        return
    ways = ["hidden_states=online (0 bytes)"]
    if precision != "int8":
        ways.append(f"hidden_states.precision=int8 ({format_bytes(size('int8'))})")
    if layers > 1:
        ways.append(f"base.aux_layers=[last] ({format_bytes(size(layers=1))})")
    ways.append(f"at most {int(rows * limit_gb * 1e9 / size()):,} of the {rows:,} conversations (corpus.limit=)")
    raise InputError(
        f"hidden_states=offline would store {estimate}{format_bytes(size())} ({tokens:,} tokens x {layers} x "
        f"{base.width:,} values as {precision}), more than hidden_states.limit_gb={limit_gb:g}; give "
        f"{', '.join(ways)}, or a higher limit"
    )


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


HiddenStates = OnlineHiddenStates | OfflineHiddenStates
HiddenStatesFactory = Callable[[BaseLM, Sequence[Tensor]], HiddenStates]
