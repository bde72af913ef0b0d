"""The lockstep semantics in plain Python, one token budget, one rank and one step at a time.

Written from the prose in :mod:`rackbook.replay.lockstep`, without arrays and without looking ahead; the fast simulator
must agree with it to the nanosecond.
"""

from __future__ import annotations

from collections import deque


class ReferenceRank:
    def __init__(self):
        self.waiting = deque()
        self.finished = 0
        self.sent = 0

    def take(self, budget):
        """Compute up to the budget; returns tokens and the context tokens they attend to, summed one by one."""
        tokens = attended = 0
        while self.waiting and tokens < budget:
            request = self.waiting[0]
            chunk = min(request["left"], budget - tokens)
            first = request["depth"] + 1
            attended += (first + first + chunk - 1) * chunk // 2
            tokens += chunk
            request["depth"] += chunk
            request["left"] -= chunk
            if request["left"] == 0:
                self.waiting.popleft()
                self.finished += 1
        return tokens, attended

    def push(self, cached, new):
        self.waiting.append({"depth": cached, "left": new})
        self.sent += 1


def step_all(ranks, budget, cost):
    """One step: (duration in ns, tokens by rank, attended by rank); duration None when nobody has a token."""
    fixed, per_token, per_attended, shared = cost.coefficients_ns
    taken = [rank.take(budget) for rank in ranks]
    if not any(tokens for tokens, _ in taken):
        return None, [], []
    own = [fixed + tokens * per_token + attended * per_attended for tokens, attended in taken]
    mean = sum(tokens for tokens, _ in taken) / len(ranks)
    return round(max(own) + mean * shared), [tokens for tokens, _ in taken], [attended for _, attended in taken]


def replay(queues, cost, budget):
    """Starts, durations, tokens and attended tokens of all steps, as lists."""
    ranks = [ReferenceRank() for _ in queues]
    coming = [
        deque(zip(q.arrival_ns.tolist(), q.cached_tokens.tolist(), q.new_tokens.tolist(), strict=True)) for q in queues
    ]
    now, steps = 0, []
    while True:
        for rank, requests in zip(ranks, coming, strict=True):
            while requests and requests[0][0] <= now:
                _, cached, new = requests.popleft()
                rank.push(cached, new)
        duration, tokens, attended = step_all(ranks, budget, cost)
        if duration is not None:
            steps.append((now, duration, tokens, attended))
            now += duration
        elif any(coming):
            now = min(requests[0][0] for requests in coming if requests)
        else:
            return [list(column) for column in zip(*steps, strict=True)] or [[], [], [], []]


def route(requests, num_ranks, policy, cost, budget):
    """The same, and the rank of each request."""
    ranks = [ReferenceRank() for _ in range(num_ranks)]
    coming = deque(
        zip(requests.arrival_ns.tolist(), requests.cached_tokens.tolist(), requests.new_tokens.tolist(), strict=True)
    )
    known = [0] * num_ranks  # what the router believes each rank still has
    now, steps, chosen = 0, [], []
    while True:
        while coming and coming[0][0] <= now:
            _, cached, new = coming.popleft()
            if policy == "round-robin":
                number = len(chosen) % num_ranks
            else:
                number = min(range(num_ranks), key=lambda r: (known[r], r))
            known[number] += new if policy == "least-tokens" else 1
            ranks[number].push(cached, new)
            chosen.append(number)
        # the step that starts now makes the results of the one before known
        for number, rank in enumerate(ranks):
            tokens = sum(request["left"] for request in rank.waiting)
            known[number] = tokens if policy == "least-tokens" else len(rank.waiting)
        duration, tokens, attended = step_all(ranks, budget, cost)
        if duration is not None:
            steps.append((now, duration, tokens, attended))
            now += duration
        elif coming:
            now = coming[0][0]
        else:
            return [list(column) for column in zip(*steps, strict=True)] or [[], [], [], []], chosen
