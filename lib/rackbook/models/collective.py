"""How long an all-reduce over N ranks takes when latency decides: hops one after the other, times the time of a hop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackbook.errors import DataError, ParameterError, one_of

if TYPE_CHECKING:
    from collections.abc import Callable


def ring_hops(num_ranks: int) -> int:
    """Hops of a ring all-reduce, one after the other: N − 1 to reduce and N − 1 to distribute.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005).

    Raises:
        ParameterError: fewer than one rank.
    """
    return 2 * (_ranks(num_ranks) - 1)


def recursive_doubling_hops(num_ranks: int) -> int:
    """Hops of an all-reduce by recursive doubling: log2 N; two more where N is no power of two, to fold the rest in.

    Source: as for :func:`ring_hops`.

    Raises:
        ParameterError: fewer than one rank.
    """
    whole = _ranks(num_ranks).bit_length() - 1
    return whole if num_ranks == 1 << whole else whole + 2


def proportional_units(num_ranks: int) -> int:
    """One unit of time per rank, for a time that is only known to grow in proportion to the ranks.

    Raises:
        ParameterError: fewer than one rank.
    """
    return _ranks(num_ranks)


GROWTH_LAWS: dict[str, Callable[[int], int]] = {
    "proportional to the ranks": proportional_units,
    "ring": ring_hops,
    "recursive doubling": recursive_doubling_hops,
}
"""Hops, or other units of equal time, by number of ranks."""


def growth_law(name: str) -> Callable[[int], int]:
    """Look a law up in :data:`GROWTH_LAWS`.

    Raises:
        ParameterError: no such law.
    """
    if name not in GROWTH_LAWS:
        raise ParameterError(one_of(name, GROWTH_LAWS, "growth law"))
    return GROWTH_LAWS[name]


def hop_ms(law: str, num_ranks: int, sync_ms: float) -> float:
    """Time of one hop, if the synchronisation is nothing but hops of equal time.

    Args:
        law: name in :data:`GROWTH_LAWS`.
        num_ranks: ranks of the point that is known.
        sync_ms: its duration.

    Raises:
        ParameterError: no such law, or fewer than one rank.
        DataError: the law makes no hop at this number of ranks.
    """
    hops = growth_law(law)(num_ranks)
    if hops == 0:
        raise DataError(f"{law}: no hop between {num_ranks} ranks, take a point with more ranks")
    return sync_ms / hops


def sync_ms(law: str, num_ranks: int, *, known_ranks: int, known_ms: float) -> float:
    """Duration at another number of ranks, through one known point.

    Args:
        law: name in :data:`GROWTH_LAWS`.
        num_ranks: where.
        known_ranks: ranks of the known point.
        known_ms: its duration.

    Raises:
        ParameterError: no such law, or fewer than one rank.
        DataError: the law makes no hop at the known point.
    """
    return growth_law(law)(num_ranks) * hop_ms(law, known_ranks, known_ms)


def _ranks(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ParameterError(f"num_ranks: got {num_ranks}, allowed: ≥ 1")
    return num_ranks
