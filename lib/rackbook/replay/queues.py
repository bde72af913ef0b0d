"""What each data-parallel rank is asked to prefill, and when: the mirror and the lag replay of one request list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import DataError, ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rackbook.replay.traces import Trace

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, eq=False)
class Queue:
    """The requests of one rank, first in, first out.

    Attributes:
        arrival_ns: when each request may be scheduled, ascending from 0, in whole nanoseconds; shape [requests].
        cached_tokens: prefix whose KV is there already and is not computed again; shape [requests].
        new_tokens: tokens to compute, at least one; shape [requests].
    """

    arrival_ns: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    new_tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in ("arrival_ns", "cached_tokens", "new_tokens"):
            values = np.asarray(getattr(self, name))
            if values.dtype.kind not in "iu" and values.size:
                raise DataError(f"{name}: got {values.dtype}, allowed: whole numbers")
            object.__setattr__(self, name, values.astype(np.int64))
        if not self.arrival_ns.shape == self.cached_tokens.shape == self.new_tokens.shape or self.arrival_ns.ndim != 1:
            raise DataError(
                "arrival_ns, cached_tokens and new_tokens need one entry per request, got shapes "
                f"{self.arrival_ns.shape}, {self.cached_tokens.shape} and {self.new_tokens.shape}"
            )
        for name, values, least in (
            ("arrival_ns", self.arrival_ns, 0),
            ("cached_tokens", self.cached_tokens, 0),
            ("new_tokens", self.new_tokens, 1),
        ):
            if values.size and values.min() < least:
                raise DataError(f"{name}, request {values.argmin()}: got {values.min()}, allowed: ≥ {least}")
        if (np.diff(self.arrival_ns) < 0).any():
            late = int((np.diff(self.arrival_ns) < 0).argmax()) + 1
            raise DataError(f"arrival_ns, request {late}: earlier than the one before, allowed: in order of arrival")

    def __len__(self) -> int:
        return self.new_tokens.size

    @property
    def attended_tokens(self) -> NDArray[np.int64]:
        """Context tokens that the new tokens of each request attend to, summed over them; shape [requests].

        The token at position p of a prompt attends to p + 1 tokens, itself included, so n new tokens behind a prefix
        of c attend to n·c + n(n + 1)/2.
        """
        n = self.new_tokens
        return n * self.cached_tokens + n * (n + 1) // 2

    def delayed(self, by_ns: int) -> Queue:
        """The same requests, all later by the same time."""
        return replace(self, arrival_ns=self.arrival_ns + by_ns)

    def at_once(self) -> Queue:
        """The same requests in the same order, all there from the start: the queue never runs dry before its end."""
        return replace(self, arrival_ns=np.zeros_like(self.arrival_ns))


def queue(trace: Trace, *, prefix_caching: bool) -> Queue:
    """The prefills of a trace as the queue of one rank.

    Args:
        trace: the requests.
        prefix_caching: whether the known prefix of each request is taken from the cache; else all input is computed.

    Raises:
        DataError: prefix caching is on and the trace does not know the prefixes.
    """
    frame = trace.requests
    if prefix_caching and frame["cached_tokens"].null_count():
        raise DataError(
            f"{trace.name}: prefix caching needs cached_tokens, which this trace does not know; set prefix_caching off"
        )
    cached = frame["cached_tokens"].to_numpy() if prefix_caching else np.zeros(frame.height, dtype=np.int64)
    return Queue(
        arrival_ns=np.rint(frame["arrival_s"].to_numpy() * NS_PER_S).astype(np.int64),
        cached_tokens=cached,
        new_tokens=frame["input_tokens"].to_numpy() - cached,
    )


def mirror(requests: Queue, num_ranks: int) -> tuple[Queue, ...]:
    """Every rank gets every request at the same time.

    Raises:
        ParameterError: fewer than one rank.
    """
    return (requests,) * _checked(num_ranks)


def lag(requests: Queue, num_ranks: int, lag_s: float) -> tuple[Queue, ...]:
    """Every rank gets every request, rank r later than the first rank by r · lag_s seconds.

    Raises:
        ParameterError: fewer than one rank, or a negative lag.
    """
    if not lag_s >= 0:
        raise ParameterError(f"lag_s: got {lag_s!r}, allowed: a number ≥ 0 [s]")
    return tuple(requests.delayed(round(rank * lag_s * NS_PER_S)) for rank in range(_checked(num_ranks)))


def deal(requests: Queue, rank: NDArray[np.int64], num_ranks: int) -> tuple[Queue, ...]:
    """Split one stream of requests by the rank that each goes to.

    Args:
        requests: the stream.
        rank: 0 to num_ranks − 1; shape [requests].
        num_ranks: also ranks without a request get a queue.
    """
    return tuple(
        Queue(requests.arrival_ns[mine], requests.cached_tokens[mine], requests.new_tokens[mine])
        for mine in (rank == r for r in range(num_ranks))
    )


def _checked(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ParameterError(f"num_ranks: got {num_ranks}, allowed: ≥ 1")
    return num_ranks
