"""One of N processes that share a piece of work. It knows numbers and names, not what is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ctcdraft.errors import InputError


@dataclass(frozen=True)
class Shard:
    """Every `of`-th piece, starting with the `number`-th: 1/4, 2/4, 3/4 and 4/4 together take all."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        number, _, of = str(text).partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise InputError(f"shard={text} is not i/N with i from 1 to N; for the first of four say shard=1/4")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"-{self.number}-of-{self.of}" if self.of > 1 else ""

    @property
    def siblings(self) -> str:
        """A pattern for the names of all shards of this split."""
        return f"-*-of-{self.of}" if self.of > 1 else ""

    def takes(self, piece: int) -> bool:
        """Whether piece number `piece`, counted from 0, is this shard's."""
        return piece % self.of == self.number - 1
