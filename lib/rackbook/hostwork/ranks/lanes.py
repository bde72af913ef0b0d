"""A small vector of unsigned 32-bit numbers as bytes: what the ranks add up.

The bytes are added as one long integer. That is the sum of the lanes as long as no lane carries into the next, and
costs the same few hundred nanoseconds for any length that matters here, without numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

LANE_BYTES = 4

ROWS = 7
"""Numbers that each rank contributes to a synchronisation.

Source: vLLM 0.33.0, ``v1/worker/gpu/dp_utils.py``, which adds up an int32 tensor of 7 rows and one column per rank.
"""

MOST_BYTES = 32_768
"""Longest vector: it must fit the socket's buffers, because both ends of an exchange send before they receive."""


def encode(values: Sequence[int], num_ranks: int) -> bytes:
    """Pack numbers so that the sum over the ranks cannot carry from one lane into the next.

    Args:
        values: one number per lane, 0 to (2³² − 1) ÷ ranks.
        num_ranks: how many such vectors are added.

    Raises:
        ValueError: a number out of that range, or too many of them.
    """
    most = (2**32 - 1) // num_ranks
    if wrong := [value for value in values if not 0 <= value <= most]:
        raise ValueError(f"got {wrong[0]}, allowed: 0 to {most}, so that the sum of {num_ranks} ranks fits 32 bits")
    if len(values) * LANE_BYTES > MOST_BYTES:
        raise ValueError(f"got {len(values)} numbers, allowed: up to {MOST_BYTES // LANE_BYTES}")
    return struct.pack(f"<{len(values)}I", *values)


def decode(vector: bytes) -> list[int]:
    """The numbers of a vector."""
    return list(struct.unpack(f"<{len(vector) // LANE_BYTES}I", vector))


def add(one: bytes, other: bytes) -> bytes:
    """Sum lane by lane."""
    return (int.from_bytes(one, "little") + int.from_bytes(other, "little")).to_bytes(len(one), "little")


def contribution(rank: int, num_ranks: int, turn: int) -> list[int]:
    """What a rank puts into a synchronisation: its own column, zeros elsewhere, as vLLM does.

    Args:
        rank: whose.
        num_ranks: columns.
        turn: changes the numbers, so that an old result is not taken for a new one.
    """
    values = [0] * (ROWS * num_ranks)
    for row in range(ROWS):
        values[row * num_ranks + rank] = _number(rank, row, turn)
    return values


def expected_sum(num_ranks: int, turn: int) -> list[int]:
    """What the sum of all contributions must be."""
    return [_number(rank, row, turn) for row in range(ROWS) for rank in range(num_ranks)]


def _number(rank: int, row: int, turn: int) -> int:
    return 1 + (7919 * rank + 104_729 * row + 31 * turn) % 1_000_003
