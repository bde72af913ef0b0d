"""A simulated lag replay with all that it assumes, and the costs that give it a known throughput or a known loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import optimize

from rackbook.errors import ParameterError
from rackbook.replay import imbalance
from rackbook.replay.lockstep import Run, StepCost, replay
from rackbook.replay.queues import Queue, lag, mirror

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class LagReplay:
    """A lag replay, repeated with different requests.

    Attributes:
        queues: the requests of one rank, one queue per repeat.
        lag_s: delay from one rank to the next.
        max_num_batched_tokens: tokens per step and rank, at most.
        cost: of a rank's step.
    """

    queues: tuple[Queue, ...]
    lag_s: float
    max_num_batched_tokens: int
    cost: StepCost

    @property
    def num_tokens(self) -> int:
        """Tokens that one rank computes, all repeats together."""
        return sum(int(q.new_tokens.sum()) for q in self.queues)

    @property
    def mean_depth_tokens(self) -> float:
        """Context tokens that a computed token attends to, on average."""
        return sum(int(q.attended_tokens.sum()) for q in self.queues) / self.num_tokens

    def run(self, repeat: int, num_ranks: int) -> Run:
        """Simulate one repeat."""
        return replay(lag(self.queues[repeat], num_ranks, self.lag_s), self.cost, self.max_num_batched_tokens)

    def excess(self, num_ranks: int) -> NDArray[np.float64]:
        """By how much waiting makes the steps of the common window longer; shape [repeats]."""
        return np.array([excess_of(self.run(repeat, num_ranks)) for repeat in range(len(self.queues))])

    def whole_run_loss(self, num_ranks: int) -> float:
        """Share of throughput lost against the mirror replay over whole runs, stagger included; mean of the repeats."""
        lost = []
        for repeat, requests in enumerate(self.queues):
            mirrored = replay(mirror(requests, num_ranks), self.cost, self.max_num_batched_tokens)
            lost.append(1 - int(mirrored.end_ns[-1]) / int(self.run(repeat, num_ranks).end_ns[-1]))
        return float(np.mean(lost))

    def with_cost(self, **coefficients: float) -> LagReplay:
        """The same with some coefficients of the step cost changed."""
        return replace(self, cost=replace(self.cost, **coefficients))

    def us_per_token_at(self, tok_per_s: float) -> float:
        """Cost per token at which a rank alone, in full steps, has this throughput; ≤ 0 if no time is left for it."""
        num_steps = sum(-(-int(q.new_tokens.sum()) // self.max_num_batched_tokens) for q in self.queues)
        fixed_us = num_steps * self.cost.fixed_ms * 1e3 / self.num_tokens
        depth_us = self.mean_depth_tokens * self.cost.ps_per_attended_token * 1e-6
        return 1e6 / tok_per_s - fixed_us - depth_us - self.cost.shared_us_per_token

    def calibrated(self, tok_per_s: float) -> LagReplay:
        """The same with the cost per token at which a rank alone, in full steps, has this throughput.

        Raises:
            ParameterError: fixed cost and depth leave no time for it.
        """
        per_token = self.us_per_token_at(tok_per_s)
        if per_token <= 0:
            raise ParameterError(
                f"fixed_ms = {self.cost.fixed_ms:g} and ps_per_attended_token = {self.cost.ps_per_attended_token:.4g} "
                f"at a mean depth of {self.mean_depth_tokens:,.0f} tokens take longer than {tok_per_s:,.0f} tokens/s "
                "allow; lower one of them, or give us_per_token"
            )
        return self.with_cost(us_per_token=per_token)


def excess_of(run: Run) -> float:
    """By how much waiting makes the steps of the common window longer."""
    window = imbalance.common_window(run.tokens)
    return imbalance.excess(run.own_ns[window], run.step_ns[window])


def fit_depth(lag_replay: LagReplay, num_ranks: int, wanted: float, tok_per_s: float) -> LagReplay | None:
    """The lag replay with the cost of depth at which its excess is the wanted one.

    The cost per token is calibrated anew for every cost that is tried, so the throughput of a rank alone stays.

    Args:
        lag_replay: all but the costs of depth and per token.
        num_ranks: at which the excess is known.
        wanted: the excess; the mean of the repeats shall meet it.
        tok_per_s: throughput of one rank alone.

    Returns:
        None where no cost of depth has that excess: it is above it at no cost, or stays below it even when depth takes
        all the time.
    """

    def at(ps: float) -> LagReplay:
        return lag_replay.with_cost(ps_per_attended_token=ps).calibrated(tok_per_s)

    def too_much(ps: float) -> float:
        return float(at(ps).excess(num_ranks).mean()) - wanted

    left_us = lag_replay.with_cost(ps_per_attended_token=0.0).us_per_token_at(tok_per_s)
    most_ps = 0.999 * left_us * 1e6 / lag_replay.mean_depth_tokens
    if most_ps <= 0 or too_much(0.0) > 0 or too_much(most_ps) < 0:
        return None
    return at(float(optimize.brentq(too_much, 0.0, most_ps, rtol=1e-4)))
