"""Data-parallel ranks in lockstep: every step lasts as long as its slowest rank.

Semantics, exactly:

- Only prefill is simulated. Every rank serves its queue first in, first out.
- A request is visible to the step that starts at or after its arrival, and to no earlier one.
- In a step a rank computes up to ``max_num_batched_tokens`` visible tokens from the head of its queue. A prompt that
  does not fit is cut, and the rest is first in the next step; a step may hold the end of one prompt, whole prompts
  and the beginning of another.
- A token at position p of its prompt, cached prefix included, attends to p + 1 tokens. A rank's step takes
  ``fixed + per token · tokens + per attended token · attended tokens`` (:class:`StepCost`). A rank without a visible
  token runs a dummy step, which takes ``fixed``.
- The step of all ranks takes as long as the slowest rank's, and longer by the work that the ranks deal out among
  themselves, such as that of a layer's experts: ``shared per token · tokens of all ranks ÷ ranks``. The next step
  starts when it ends. While no rank has a visible token there are no steps, and time jumps to the next arrival.
- Time is whole nanoseconds: a step's duration is rounded to one, sums are exact, and the same input gives the same
  output on every machine. Nothing is random.

Not modelled: decode, limits on KV memory or running requests, evictions, and prefix hits that depend on the rank: a
request's cached prefix is a property of the request.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from rackbook.errors import ParameterError, one_of
from rackbook.replay.queues import Queue, deal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

Policy = Literal["round-robin", "least-requests", "least-tokens"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True)
class StepCost:
    """How long a rank's step takes.

    Attributes:
        fixed_ms: of every step, also a dummy step.
        us_per_token: per token that the step computes.
        ps_per_attended_token: per pair of a computed token and a context token that it attends to.
        shared_us_per_token: per token of the mean over all ranks, for the work that they deal out among themselves.
    """

    fixed_ms: float
    us_per_token: float
    ps_per_attended_token: float
    shared_us_per_token: float = 0.0

    def __post_init__(self) -> None:
        for cost in dataclasses.fields(self):
            value = getattr(self, cost.name)
            if not (math.isfinite(value) and value >= 0):
                raise ParameterError(f"{cost.name}: got {value!r}, allowed: a number ≥ 0")
        if not (self.fixed_ms or self.us_per_token):
            raise ParameterError("fixed_ms and us_per_token are both 0: a step must take time")

    @property
    def coefficients_ns(self) -> tuple[float, float, float, float]:
        """The costs in nanoseconds: fixed, per token, per attended token, shared per token."""
        return (
            self.fixed_ms * 1e6, self.us_per_token * 1e3, self.ps_per_attended_token * 1e-3,
            self.shared_us_per_token * 1e3,
        )  # fmt: skip

    def times(self, factor: float) -> StepCost:
        """All costs multiplied."""
        return StepCost(*(factor * cost for cost in dataclasses.astuple(self)))

    def ns(self, tokens: ArrayLike, attended_tokens: ArrayLike) -> NDArray[np.float64]:
        """Duration of a rank's step in nanoseconds, not rounded, where all ranks have as much to do."""
        fixed, per_token, per_attended, shared = self.coefficients_ns
        return fixed + np.asarray(tokens) * (per_token + shared) + np.asarray(attended_tokens) * per_attended

    def step_ns(self, tokens: ArrayLike, attended_tokens: ArrayLike) -> NDArray[np.float64]:
        """Duration of the step of all ranks in nanoseconds, not rounded; the ranks are the last axis."""
        fixed, per_token, per_attended, shared = self.coefficients_ns
        tokens = np.asarray(tokens)
        own = fixed + tokens * per_token + np.asarray(attended_tokens) * per_attended
        return own.max(axis=-1) + tokens.mean(axis=-1) * shared

    def alone_s(self, requests: Queue, max_num_batched_tokens: int) -> float:
        """Seconds that ranks with equal queues would need for one that never runs dry."""
        tokens = int(requests.new_tokens.sum())
        fixed, per_token, per_attended, shared = self.coefficients_ns
        steps = -(-tokens // max_num_batched_tokens)
        attended = int(requests.attended_tokens.sum())
        return (steps * fixed + tokens * (per_token + shared) + attended * per_attended) * 1e-9


@dataclass(frozen=True, eq=False)
class Run:
    """What the ranks did.

    Attributes:
        queues: one per rank.
        cost: of a rank's step.
        start_ns: start of each step; shape [steps].
        step_ns: duration of each step, the same on all ranks; shape [steps].
        tokens: tokens that each rank computes in each step, 0 in a dummy step; shape [steps, ranks].
        attended_tokens: context tokens that they attend to, summed; shape [steps, ranks].
    """

    queues: tuple[Queue, ...]
    cost: StepCost
    start_ns: NDArray[np.int64]
    step_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    attended_tokens: NDArray[np.int64]

    @property
    def own_ns(self) -> NDArray[np.int64]:
        """How long each step would take if all ranks had as much to do as this one; shape [steps, ranks]."""
        return np.rint(self.cost.ns(self.tokens, self.attended_tokens)).astype(np.int64)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """End of each step; shape [steps]."""
        return self.start_ns + self.step_ns

    def wait_for_prompt_ns(self, rank: int) -> NDArray[np.int64]:
        """From each request's arrival to the end of the step that computes its last token; shape [requests]."""
        requests = self.queues[rank]
        step = np.searchsorted(np.cumsum(self.tokens[:, rank]), np.cumsum(requests.new_tokens))
        return self.end_ns[step] - requests.arrival_ns


def replay(queues: Sequence[Queue], cost: StepCost, max_num_batched_tokens: int) -> Run:
    """Run the queues until they are empty.

    Args:
        queues: one per rank.
        cost: of a rank's step.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Raises:
        ParameterError: no rank, or a cap below 1.
    """
    _check(len(queues), max_num_batched_tokens)
    rank = np.repeat(np.arange(len(queues)), [len(q) for q in queues])
    arrival = np.concatenate([q.arrival_ns for q in queues])
    # Stable: requests of one rank that arrive together keep their order.
    order = np.argsort(arrival, kind="stable")
    cached, new = (
        np.concatenate([getattr(q, name) for q in queues])[order] for name in ("cached_tokens", "new_tokens")
    )
    return Run(
        tuple(queues),
        cost,
        *_steps(arrival[order], cached, new, rank[order], len(queues), "", cost, max_num_batched_tokens),
    )


def route(
    requests: Queue, num_ranks: int, policy: Policy, cost: StepCost, max_num_batched_tokens: int
) -> tuple[Run, NDArray[np.int64]]:
    """Run one stream of requests, each sent to a rank on arrival.

    "round-robin" deals in turn; "least-requests" picks the rank with the fewest requests sent and not finished,
    "least-tokens" the one with the fewest tokens sent and not computed; ties go to the lowest rank. The router counts
    what it sends at once, and learns what a step finished when the next step has started: an arrival during a step, or
    at its very end, is routed without that step's results.

    Args:
        requests: the stream, in order of arrival.
        num_ranks: data-parallel ranks.
        policy: how the rank is chosen.
        cost: of a rank's step.
        max_num_batched_tokens: most tokens that a rank computes in a step.

    Returns:
        The run, and the rank of each request; shape [requests].

    Raises:
        ParameterError: an unknown policy, no rank, or a cap below 1.
    """
    _check(num_ranks, max_num_batched_tokens)
    if policy not in POLICIES:
        raise ParameterError(one_of(policy, POLICIES, "policy"))
    rank = np.arange(len(requests)) % num_ranks
    steps = _steps(
        requests.arrival_ns, requests.cached_tokens, requests.new_tokens, rank, num_ranks, policy, cost,
        max_num_batched_tokens,
    )  # fmt: skip
    return Run(deal(requests, rank, num_ranks), cost, *steps), rank


def _steps(
    arrival_ns: NDArray[np.int64],
    cached_tokens: NDArray[np.int64],
    new_tokens: NDArray[np.int64],
    rank: NDArray[np.int64],
    num_ranks: int,
    policy: str,
    cost: StepCost,
    max_num_batched_tokens: int,
) -> tuple[NDArray[np.int64], ...]:
    """Start and duration of the steps, and tokens and attended tokens by rank; ``rank`` becomes what a policy chose."""
    # Importing the compiler costs more than reading the published points, and only a simulation needs it.
    from rackbook.replay import lockstep_kernel

    return lockstep_kernel.steps(
        arrival_ns, cached_tokens, new_tokens, rank, num_ranks, lockstep_kernel.ROUTERS.get(policy, 0),
        *cost.coefficients_ns, max_num_batched_tokens,
    )  # fmt: skip


def _check(num_ranks: int, max_num_batched_tokens: int) -> None:
    if num_ranks < 1:
        raise ParameterError(f"num_ranks: got {num_ranks}, allowed: ≥ 1")
    if max_num_batched_tokens < 1:
        raise ParameterError(f"max_num_batched_tokens: got {max_num_batched_tokens}, allowed: ≥ 1")
