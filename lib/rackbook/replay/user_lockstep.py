"""Lockstep ranks under a load that may be closed: what :mod:`rackbook.replay.client` would measure on a perfect server.

The rules are those of :mod:`rackbook.replay.lockstep`, with one addition: a request is answered when the step that
computes its last prompt token ends, and a user's next request is due after the time to think. Decode is not simulated:
an answer is taken to be one token. Mirrored ranks answer in the same step here, so whether their users wait for each
other makes no difference.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import ParameterError
from rackbook.replay.loads import NONE
from rackbook.replay.lockstep import Run
from rackbook.replay.queues import NS_PER_S, Queue

if TYPE_CHECKING:
    from rackbook.replay.loads import Load
    from rackbook.replay.lockstep import StepCost


def simulate(
    load: Load, cost: StepCost, max_num_batched_tokens: int, *, known_prefixes: bool = False, coupled: bool = True
) -> tuple[pl.DataFrame, tuple[Run, ...]]:
    """Replay a load on simulated ranks.

    Args:
        load: what goes out when.
        cost: of a rank's step.
        max_num_batched_tokens: most tokens that a rank computes in a step.
        known_prefixes: prefixes that the trace knows are not computed.
        coupled: the ranks step together; else each on its own, as separate servers or those of a dense model do.

    Returns:
        The requests with the columns of :attr:`rackbook.replay.client.Replayed.requests`, and the steps: one run of all
        ranks, or one per rank where they are not coupled.

    Raises:
        ParameterError: a cap below 1, or known prefixes of a trace that has none.
    """
    if max_num_batched_tokens < 1:
        raise ParameterError(f"max_num_batched_tokens: got {max_num_batched_tokens}, allowed: ≥ 1")
    frame = load.trace.requests
    if known_prefixes and frame["cached_tokens"].null_count():
        raise ParameterError(f"{load.trace.name}: known prefixes are asked for, but this trace does not know them")
    simulation = _Simulation(load, cost, max_num_batched_tokens, known_prefixes)
    groups = [range(load.num_ranks)] if coupled else [range(rank, rank + 1) for rank in range(load.num_ranks)]
    steps = tuple(simulation.steps(list(group)) for group in groups)
    return simulation.requests(), steps


class _Simulation:
    def __init__(self, load: Load, cost: StepCost, cap: int, known_prefixes: bool) -> None:
        self.load, self.cost, self.cap = load, cost, cap
        frame = load.trace.requests
        input_tokens = frame["input_tokens"].to_numpy()
        cached = frame["cached_tokens"].to_numpy() if known_prefixes else np.zeros_like(input_tokens)
        self.cached = cached[load.request].tolist()
        self.new = (input_tokens - cached)[load.request].tolist()
        self.due_ns = load.at_ns.tolist()
        self.done_ns = [NONE] * len(load)
        self.following = {before: send for send, before in enumerate(load.previous.tolist()) if before != NONE}
        self.think_ns = load.think_ns.tolist()

    def steps(self, ranks: list[int]) -> Run:
        """Run the ranks together until they have nothing left."""
        place = {rank: i for i, rank in enumerate(ranks)}
        ready = [
            (self.due_ns[send], send)
            for send in np.flatnonzero(self.load.previous == NONE).tolist()
            if self.load.rank[send] in place
        ]
        heapq.heapify(ready)
        queues: list[list[int]] = [[] for _ in ranks]
        served: list[list[int]] = [[] for _ in ranks]
        done = [0] * len(ranks)  # computed tokens of the head
        rows, now = [], 0
        while ready or any(queues):
            if not any(queues):
                now = max(now, ready[0][0])
            while ready and ready[0][0] <= now:
                _, send = heapq.heappop(ready)
                queue = place[int(self.load.rank[send])]
                queues[queue].append(send)
                served[queue].append(send)
            tokens, attended, finished = [0] * len(ranks), [0] * len(ranks), []
            for i, queue in enumerate(queues):
                left = self.cap
                while queue and left:
                    send = queue[0]
                    chunk = min(self.new[send] - done[i], left)
                    attended[i] += chunk * (self.cached[send] + done[i]) + chunk * (chunk + 1) // 2
                    tokens[i] += chunk
                    left -= chunk
                    done[i] += chunk
                    if done[i] == self.new[send]:
                        finished.append(queue.pop(0))
                        done[i] = 0
            duration = round(float(self.cost.step_ns(tokens, attended)))
            rows.append((now, duration, tokens, attended))
            now += duration
            for send in finished:
                self.done_ns[send] = now
                if (following := self.following.get(send)) is not None:
                    self.due_ns[following] = now + self.think_ns[following]
                    heapq.heappush(ready, (self.due_ns[following], following))
        start, duration, tokens, attended = zip(*rows, strict=True) if rows else ((), (), (), ())
        shape = (len(rows), len(ranks))
        return Run(
            tuple(self._queue(sends) for sends in served),
            self.cost,
            np.array(start, np.int64),
            np.array(duration, np.int64),
            np.array(tokens, np.int64).reshape(shape),
            np.array(attended, np.int64).reshape(shape),
        )

    def _queue(self, sends: list[int]) -> Queue:
        return Queue(
            np.array([self.due_ns[s] for s in sends], np.int64),
            np.array([self.cached[s] for s in sends], np.int64),
            np.array([self.new[s] for s in sends], np.int64),
        )

    def requests(self) -> pl.DataFrame:
        """The sends as a client would have measured them."""
        load = self.load
        frame = load.trace.requests
        due, done = (np.array(times, np.int64) / NS_PER_S for times in (self.due_ns, self.done_ns))
        session = frame["session"].to_numpy()[load.request].tolist()
        return pl.DataFrame(
            {
                "rank": load.rank,
                "request": load.request,
                "session": pl.Series(session, dtype=pl.String),
                "scheduled_s": due,
                "sent_s": due,
                "first_token_s": done,
                "done_s": done,
                "input_tokens": frame["input_tokens"].to_numpy()[load.request],
                "output_tokens": np.ones(len(load), np.int64),
                "http_status": np.full(len(load), 200),
                "error": pl.Series([None] * len(load), dtype=pl.String),
            }
        )
