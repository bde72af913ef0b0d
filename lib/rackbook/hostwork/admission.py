"""Admissions in a lockstep decode engine: what a burst of new requests does to the step, with and without a cap.

Every data-parallel rank has its own queue. At the start of a step a rank admits the requests at the head of its
queue, at most ``cap`` of them, and pays CPU time for each in proportion to its prompt. The ranks run in lockstep,
so the step of all of them lasts as long as the slowest rank's: ``base + max(0, largest work − hidden)``. The engine
never stands idle: it steps without admissions too, because older requests decode.

Not modelled: requests that end, the limit on running requests, a base step that grows with the batch, and the
transfer of the KV cache before a request is ready. Arrivals are open loop: they do not wait for answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Arrivals:
    """Requests that become ready for admission in one time window, in order of arrival.

    Attributes:
        arrived_ms: when each became ready, ascending, from 0; shape [requests].
        rank: the rank that will run it, 0 to num_ranks − 1; shape [requests].
        prompt_tokens: its prompt length; shape [requests].
        num_ranks: ranks of the engine, also those without a request.
        window_ms: length of the window; no request arrives later.
    """

    arrived_ms: NDArray[np.float64]
    rank: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    num_ranks: int
    window_ms: float

    def __post_init__(self) -> None:
        times = self.arrived_ms
        if not times.shape == self.rank.shape == self.prompt_tokens.shape or times.ndim != 1:
            raise ParameterError(
                "arrived_ms, rank and prompt_tokens need one entry per request, got shapes "
                f"{times.shape}, {self.rank.shape} and {self.prompt_tokens.shape}"
            )
        if times.size == 0:
            return
        if not (times[0] >= 0 and times[-1] <= self.window_ms and (np.diff(times) >= 0).all()):
            raise ParameterError(f"arrived_ms: allowed: ascending times from 0 to window_ms = {self.window_ms:g}")
        if not (self.rank.min() >= 0 and self.rank.max() < self.num_ranks):
            raise ParameterError(
                f"rank: got {self.rank.min()} to {self.rank.max()}, allowed: 0 to {self.num_ranks - 1}"
            )
        if self.prompt_tokens.min() < 1:
            raise ParameterError(f"prompt_tokens: got {self.prompt_tokens.min()}, allowed: ≥ 1")

    def __len__(self) -> int:
        return self.arrived_ms.size


@dataclass(frozen=True)
class Run:
    """What happened to one stream of arrivals.

    Attributes:
        arrivals: the stream.
        step_start_ms: start of each step; shape [steps]. The last step is the one that empties the queues, or the
            one that passes the end of the window.
        step_ms: duration of each step, the same on all ranks; shape [steps].
        work_ms: admission work of each step, summed over the ranks; shape [steps].
        step_of_request: the step that admitted each request, in arrival order; shape [requests].
    """

    arrivals: Arrivals
    step_start_ms: NDArray[np.float64]
    step_ms: NDArray[np.float64]
    work_ms: NDArray[np.float64]
    step_of_request: NDArray[np.int64]

    @property
    def in_window(self) -> NDArray[np.bool_]:
        """Which steps start before the window ends; those after it see no new arrivals and belong in no statistic."""
        return self.step_start_ms < self.arrivals.window_ms

    @property
    def delay_ms(self) -> NDArray[np.float64]:
        """From a request's arrival to the end of the step that admits it; shape [requests]."""
        step = self.step_of_request
        return self.step_start_ms[step] + self.step_ms[step] - self.arrivals.arrived_ms

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted when the window ends; a number that grows with the window means overload."""
        return int((self.step_start_ms[self.step_of_request] >= self.arrivals.window_ms).sum())


def draw_arrivals(
    generator: np.random.Generator,
    *,
    num_ranks: int,
    requests_per_s: float,
    window_s: float,
    prompt_tokens: int,
    burst_share: float = 0.0,
    burst_size: int = 1,
    ranks_per_burst: int = 1,
) -> Arrivals:
    """Draw open-loop arrivals: a Poisson stream, part of which may come as bursts of requests released together.

    Both parts keep the mean rate: independent requests arrive at (1 − share) · rate and go to a random rank each;
    bursts start at share · rate ÷ size, and the requests of one burst are dealt in turn to its random ranks.

    Args:
        generator: source of randomness.
        num_ranks: data-parallel ranks.
        requests_per_s: mean rate over all ranks.
        window_s: length of the window.
        prompt_tokens: prompt length of every request.
        burst_share: share of the requests that come in bursts, 0 to 1.
        burst_size: requests of one burst.
        ranks_per_burst: ranks that share one burst.

    Raises:
        ParameterError: an argument out of range.
    """
    if num_ranks < 1 or not 1 <= ranks_per_burst <= num_ranks:
        raise ParameterError(
            f"ranks_per_burst: got {ranks_per_burst}, allowed: 1 to num_ranks = {num_ranks}, which must be at least 1"
        )
    if not (requests_per_s >= 0 and window_s > 0 and 0 <= burst_share <= 1 and burst_size >= 1):
        raise ParameterError(
            f"got requests_per_s = {requests_per_s!r}, window_s = {window_s!r}, burst_share = {burst_share!r}, "
            f"burst_size = {burst_size!r}; allowed: a rate ≥ 0, a window > 0, a share from 0 to 1, a size ≥ 1"
        )
    window_ms = window_s * 1e3
    expected = requests_per_s * window_s
    num_single = generator.poisson(expected * (1 - burst_share))
    num_bursts = generator.poisson(expected * burst_share / burst_size)
    deal = np.arange(burst_size) % ranks_per_burst
    burst_ranks = [generator.permutation(num_ranks)[:ranks_per_burst][deal] for _ in range(num_bursts)]
    times = np.concatenate(
        [
            generator.uniform(0, window_ms, num_single),
            np.repeat(generator.uniform(0, window_ms, num_bursts), burst_size),
        ]
    )
    ranks = np.concatenate([generator.integers(0, num_ranks, num_single), *burst_ranks])
    order = np.argsort(times, kind="stable")
    return Arrivals(
        arrived_ms=times[order],
        rank=ranks[order].astype(np.int64),
        prompt_tokens=np.full(times.size, prompt_tokens, dtype=np.int64),
        num_ranks=num_ranks,
        window_ms=window_ms,
    )


def one_burst(size: int, *, num_ranks: int, prompt_tokens: int) -> Arrivals:
    """A burst on the first rank at time 0, and nothing else.

    Args:
        size: requests of the burst.
        num_ranks: data-parallel ranks.
        prompt_tokens: prompt length of every request.
    """
    return Arrivals(
        arrived_ms=np.zeros(size),
        rank=np.zeros(size, dtype=np.int64),
        prompt_tokens=np.full(size, prompt_tokens, dtype=np.int64),
        num_ranks=num_ranks,
        window_ms=0.0,
    )


def simulate(
    arrivals: Arrivals, *, cap: int | None, ns_per_token: float, base_step_ms: float, hidden_ms: float = 0.0
) -> Run:
    """Step the engine through the window and on until every request is admitted.

    Args:
        arrivals: the requests.
        cap: admissions per step and rank, at most; None for no cap.
        ns_per_token: CPU time of an admission per prompt token.
        base_step_ms: duration of a step without admissions.
        hidden_ms: admission work per step that runs behind the GPU and costs the step nothing.

    Raises:
        ParameterError: a cap below 1, a negative cost, or a base step that is not positive.
    """
    if cap is not None and cap < 1:
        raise ParameterError(f"cap: got {cap}, allowed: ≥ 1, or None for no cap (0 would admit nobody)")
    if not (ns_per_token >= 0 and base_step_ms > 0 and hidden_ms >= 0):
        raise ParameterError(
            f"got ns_per_token = {ns_per_token!r}, base_step_ms = {base_step_ms!r}, hidden_ms = {hidden_ms!r}; "
            "allowed: a cost ≥ 0, a base step > 0, hidden work ≥ 0"
        )
    from rackbook.hostwork import admission_kernel  # numba takes a second to import

    queue = np.argsort(arrivals.rank, kind="stable")
    paid_ms = np.concatenate([[0.0], np.cumsum(arrivals.prompt_tokens[queue] * (ns_per_token * 1e-6))])
    starts, durations, works, step_of_place = admission_kernel.steps(
        arrivals.arrived_ms.astype(float),
        arrivals.rank.astype(np.int64),
        paid_ms,
        np.searchsorted(arrivals.rank[queue], np.arange(arrivals.num_ranks)),
        float(arrivals.window_ms),
        max(1, len(arrivals)) if cap is None else cap,
        float(base_step_ms),
        float(hidden_ms),
    )
    step_of_request = np.empty_like(step_of_place)
    step_of_request[queue] = step_of_place
    return Run(arrivals, starts, durations, works, step_of_request)
