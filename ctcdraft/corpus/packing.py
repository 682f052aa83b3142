"""Which answers a step takes, and which of them share a row. It knows an order and lengths; no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

OPEN = 64  # packs that may still be filled: more of them leave less padding, and cost as many comparisons an answer

Pack = list[int]  # answers, by index
# (the answers in the order of an epoch, all lengths, rows a step) -> the epoch's steps, each a list of rows
Filling = Callable[[Sequence[int], Sequence[int], int], list[list[Pack]]]


def one_a_row(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
    """Every answer in a row of its own, whole steps only: what is left over comes in another epoch's order."""
    return [[[index] for index in order[at : at + rows]] for at in range(0, len(order) - rows + 1, rows)]


def packed(size: int) -> Filling:
    """Packs of up to `size` tokens, and every answer exactly once: an epoch's last step may have fewer rows."""

    def fill(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[list[Pack]]:
        packs = first_fit(order, lengths, size)
        return [packs[at : at + rows] for at in range(0, len(packs), rows)]

    return fill


def first_fit(order: Sequence[int], lengths: Sequence[int], size: int, most_open: int = OPEN) -> list[Pack]:
    """Each answer into the oldest open pack that has room; where none has, into a new one. Of more than `most_open`
    the fullest is closed. The order of packs is that in which they were begun. An answer longer than `size` is a
    pack by itself.

    size 10, answers of 6 5 4 5 tokens   ->   [6 4] [5 5]
    """
    packs: list[Pack] = []
    room: list[tuple[int, Pack]] = []  # of the open ones
    for index in order:
        length = lengths[index]
        at = next((at for at, (left, _) in enumerate(room) if left >= length), None)
        if at is None:
            packs.append([index])
            room.append((size - length, packs[-1]))
            if len(room) > most_open:
                room.remove(min(room, key=lambda pack: pack[0]))
        else:
            left, pack = room[at]
            pack.append(index)
            room[at] = (left - length, pack)
    return packs
