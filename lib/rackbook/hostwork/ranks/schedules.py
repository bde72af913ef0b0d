"""Who talks to whom in an all-reduce, as plain lists: the algorithms without their transport."""

from __future__ import annotations

SEND, ADD, EXCHANGE, TAKE = "send", "add", "exchange", "take"

Step = tuple[str, int]
"""What a rank does with which peer: send its vector, receive the peer's and add it, do both, or take its sum over."""


def doubling(rank: int, num_ranks: int) -> list[Step]:
    """Recursive doubling for any number of ranks.

    The largest power of two that fits takes part in log2 of it exchanges. The ranks beyond it are folded in first:
    among the first 2 · (N − power) ranks every even one sends its vector to its odd neighbour, which adds it; at the
    end it takes the sum over from there.

    Args:
        rank: whose steps.
        num_ranks: N.

    Returns:
        The rank's steps in order.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005).
    """
    whole = 1 << (num_ranks.bit_length() - 1)
    folded = num_ranks - whole
    is_folded = rank < 2 * folded
    if is_folded and rank % 2 == 0:
        return [(SEND, rank + 1), (TAKE, rank + 1)]
    place = rank // 2 if is_folded else rank - folded
    exchanges = [(EXCHANGE, _rank_at(place ^ (1 << bit), folded)) for bit in range(whole.bit_length() - 1)]
    return [(ADD, rank - 1), *exchanges, (SEND, rank - 1)] if is_folded else exchanges


def ring_neighbours(rank: int, num_ranks: int) -> tuple[int, int]:
    """The rank that this one receives from and the one that it sends to."""
    return (rank - 1) % num_ranks, (rank + 1) % num_ranks


def partners(rank: int, num_ranks: int) -> set[int]:
    """All ranks that this one is ever connected to."""
    peers = {peer for _, peer in doubling(rank, num_ranks)} | set(ring_neighbours(rank, num_ranks))
    return peers - {rank}


def _rank_at(place: int, folded: int) -> int:
    return 2 * place + 1 if place < folded else place + folded
