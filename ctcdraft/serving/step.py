"""One decoding step of the engine, as the proposer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What is known of the step whose tokens were just sampled."""

    ids: Sequence[str]  # of the requests, in the order of the batch
    starts: Sequence[int]  # of every request among the rows read, and the number of rows
    drafted: Sequence[int]  # draft tokens that every request read
    table_QM: Tensor  # ids of the blocks of every request

    def is_decoding(self) -> bool:
        """Return whether no request read a part of its prompt, as far as the numbers tell."""
        sizes = zip(self.starts[:-1], self.starts[1:], self.drafted, strict=True)
        return all(end - start == 1 + drafted for start, end, drafted in sizes)
